"""What a script takes of a half weight by indices comes back in sums of float64's, rounded once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter
from torch.utils.checkpoint import checkpoint

from amp_patch.casting import many_uses
from amp_patch.casting.libraries import indexed_weights
from amp_patch.patching import Patches, stood_for

HALVES = [torch.float16, torch.bfloat16]
LEVELS = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
COUNT = 2400
IDS, OTHERS = torch.arange(COUNT) % 5 - 2, torch.arange(COUNT) % 3
ALL, LAST = slice(None), torch.tensor(-1)
#: Of a weight of shape (5, 3, 2); all look up many rows.
INDICES: dict[str, Any] = {
    "ids": IDS,
    "tuple": (IDS,),
    "int32": IDS.int(),
    "matrix": IDS.view(60, 40),
    "column": (ALL, OTHERS),
    "end": (..., OTHERS.clamp(max=1)),
    "middle": (1, ..., OTHERS.clamp(max=1)),
    "number": (0, OTHERS),
    "number of a tensor": (OTHERS, LAST),
    "rows then number": (IDS, 0),
    "slice": (slice(1, 4), OTHERS),
    "steps": (slice(0, 5, 2), OTHERS, 0),
    "two": (IDS, OTHERS),
    "apart": (IDS, ALL, OTHERS.clamp(max=1)),
    "around": (IDS, ..., OTHERS.clamp(max=1)),
    "grid": (IDS[:, None], OTHERS[None, :20]),
    "new": (None, IDS, None),
}
#: What torch's own way is right for, or decides itself.
OF_TORCH: dict[str, Any] = {
    "int": 2,
    "slice": slice(1, 3),
    "view": (..., None, 0, slice(1)),
    "few": IDS[:64],
    "none": IDS[:0],
    "mask": torch.tensor([True, False, True, True, False]),
    "mask and number": (torch.tensor([True, False, True, True, False]), 0),
    "list": [0, 1, 1],
    "one": torch.tensor(3),
}


@pytest.fixture
def _patched() -> Iterator[None]:
    patches, torchs = Patches(), Parameter.__getitem__
    indexed_weights.install(patches, [nn.Linear(1, 1)])
    yield
    patches.undo()
    assert Parameter.__getitem__ is torchs
    assert "__getitem__" not in vars(Parameter)


def weight(dtype: torch.dtype) -> Parameter:
    torch.manual_seed(0)
    return Parameter(torch.randn(5, 3, 2).to(dtype))


def is_near(found: Tensor, expected: Tensor) -> None:
    """Compare half gradients with float64's, whose largest number gives the tolerance."""
    tolerance = torch.finfo(found.dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("_patched")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", INDICES)
def test_a_gradient_is_that_of_float64(name: str, dtype: torch.dtype) -> None:
    half, index = weight(dtype), INDICES[name]
    wide = half.detach().double().requires_grad_()
    found, expected = half[index], wide[index]
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0)
    grad = (torch.rand(found.shape) + 1).to(dtype)
    found.backward(grad)
    expected.backward(grad.double())
    is_near(half.grad, wide.grad)


@pytest.mark.usefixtures("_patched")
@pytest.mark.parametrize("name", OF_TORCH)
def test_what_torch_adds_up_well_is_left_to_it(name: str) -> None:
    half, index = weight(torch.bfloat16), OF_TORCH[name]
    twin = half.detach().requires_grad_()
    found, expected = half[index], twin[index]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert type(found.grad_fn) is type(expected.grad_fn)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(half.grad, twin.grad, rtol=0, atol=0)


@pytest.mark.usefixtures("_patched")
@pytest.mark.parametrize("index", [(IDS, 7), (IDS + 4,), (IDS[:90], OTHERS[:80]), ("rows",)])
def test_a_wrong_index_is_told_by_torch(index: Any) -> None:
    half = weight(torch.bfloat16)
    with pytest.raises((IndexError, TypeError)) as expected:
        half.detach()[index]
    with pytest.raises((IndexError, TypeError)) as found:
        half[index]
    assert str(found.value) == str(expected.value)


@pytest.mark.usefixtures("_patched")
def test_no_other_weight_is_looked_at() -> None:
    class Own(Parameter):
        pass

    half = weight(torch.float16)
    weights = {
        "float32": weight(torch.float32),
        "frozen": Parameter(half.detach(), requires_grad=False),
        "tensor": half.detach().requires_grad_(),
        "subclass": Own(half.detach()),
    }
    for name, one in weights.items():
        found = one[IDS]
        assert torch.equal(found, one.detach()[IDS]), name
        assert found.grad_fn is None or "Index" in type(found.grad_fn).__name__, name
    with torch.no_grad():
        assert half[IDS].grad_fn is None
    with pytest.raises(ValueError, match="uninitialized"):
        UninitializedParameter()[IDS]
    half.data[IDS] = 1.0  # a write is torch's
    assert half.eq(1).all()


@pytest.mark.usefixtures("_patched")
@pytest.mark.parametrize("name", ["ids", "apart"])
def test_a_second_derivative_adds_up_in_float32_as_well(name: str) -> None:
    half, index = weight(torch.bfloat16), INDICES[name]
    wide = half.detach().double().requires_grad_()
    seconds = []
    for one in (half, wide):
        (first,) = torch.autograd.grad(one[index].square().sum(), one, create_graph=True)
        seconds += torch.autograd.grad(first.sum(), one)
    is_near(*seconds)


@pytest.mark.usefixtures("_patched")
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # which torch calls for these
@pytest.mark.parametrize("name", ["ids", "apart"])
def test_transforms_and_batches_of_gradients(name: str) -> None:
    half, index = weight(torch.float16), INDICES[name]
    found = half[index]
    grads = torch.rand(2, *found.shape).to(found.dtype)
    batch = torch.autograd.grad(found, half, grads, is_grads_batched=True)[0]
    wide = half.detach().double().requires_grad_()
    for own, grad in zip(batch, grads, strict=True):
        is_near(own, torch.autograd.grad(wide[index], wide, grad.double())[0])
    with forward_ad.dual_level():
        tangent = torch.randn_like(half)
        dual = Parameter(half.detach())
        taken = forward_ad.make_dual(dual, tangent)[index]
        assert torch.equal(forward_ad.unpack_dual(taken).tangent, tangent[index])
    of_torch = torch.func.grad(lambda one: one[index].sum())(half)
    assert of_torch.shape == half.shape
    each = torch.vmap(lambda number: half[INDICES["matrix"]].sum() * number)(torch.ones(2))
    assert each[0] == half[INDICES["matrix"]].sum()


@pytest.mark.usefixtures("_patched")
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_recomputes_it(is_reentrant: bool) -> None:
    half, x = weight(torch.bfloat16), torch.ones(1, requires_grad=True)
    wide = half.detach().double().requires_grad_()

    def run(table: Tensor, x: Tensor) -> Tensor:
        return (table[IDS] * x.to(table.dtype)).sin()

    checkpoint(lambda x: run(half, x), x, use_reentrant=is_reentrant).sum().backward()
    run(wide, x).sum().backward()
    is_near(half.grad, wide.grad)


@pytest.mark.usefixtures("_patched")
def test_hundreds_of_lookups_of_few_rows_add_up_in_float32() -> None:
    half = weight(torch.bfloat16)
    for _ in range(2):  # at first nobody knows how many there will be
        half.grad = None
        torch.stack([half[IDS[:5]] for _ in range(512)]).sum().backward()
        many_uses.begin_anew()
    many_uses.forget()
    assert half.grad.eq(512).all()  # ones that are added up in bfloat16 end at 256


@pytest.mark.usefixtures("_patched")
def test_copies_of_a_weight_are_as_before() -> None:
    half = weight(torch.float16)
    for one in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert type(one) is Parameter
        assert torch.equal(one, half)
    assert [len(row) for row in half] == [3] * 5


class Types(nn.Module):
    """Adds a vector of its type to each row, and scales it, as heterogeneous layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.scale = Parameter(torch.rand(3, 4) + 0.5)
        self.bias = Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        return self.first(x) * self.scale[kinds] + self.bias[kinds]


ROWS = torch.linspace(-1.0, 2.0, 4 * 6000).view(6000, 4)
KINDS = torch.arange(6000) % 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_in_half_has_float32_s_gradients(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    model, torchs = Types(), Parameter.__getitem__
    goal = torch.randn(6000, 4) + 1
    expected = torch.autograd.grad(F.mse_loss(model(ROWS, KINDS), goal), [*model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    with amp.scale_loss(F.mse_loss(model(ROWS, KINDS), goal), optimizer) as scaled:
        scaled.backward()
    for found, one in zip(amp.master_params(optimizer), expected, strict=True):
        error = (found.grad.float() - one).norm() / one.norm()
        assert error < 3 * torch.finfo(LEVELS[level]).eps
    amp.deactivate()
    assert Parameter.__getitem__ is torchs
    assert "__getitem__" not in vars(Parameter)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_models_in_float32_leave_it_alone(amp: ModuleType, level: str) -> None:
    amp.initialize(Types(), opt_level=level, verbosity=0)
    assert "__getitem__" not in vars(Parameter)


def test_models_on_another_device_leave_it_alone(amp: ModuleType) -> None:
    amp.initialize(Types().to("meta"), opt_level="O5", verbosity=0)
    assert "__getitem__" not in vars(Parameter)
    model = amp.initialize(Types(), opt_level="O5", verbosity=0)
    assert stood_for(Parameter.__getitem__) is Tensor.__getitem__
    amp.register_library_function("no_such_library", "function", casts="half")  # patches anew
    assert stood_for(Parameter.__getitem__) is Tensor.__getitem__
    assert model.bias.dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_traced_scripted_and_compiled_models_take_rows(amp: ModuleType) -> None:
    model = Types()
    amp.initialize(model, opt_level="O5", verbosity=0)
    expected = model(ROWS, KINDS)
    traced = torch.jit.trace(model, (ROWS, KINDS), check_trace=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one in (traced, compiled):
        found = one(ROWS, KINDS)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        found.sum().backward()
        assert model.bias.grad.isfinite().all()
    torch.jit.script(Types().bfloat16())(ROWS.bfloat16(), KINDS).sum().backward()
