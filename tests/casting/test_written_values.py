"""What a script writes to a part of a tensor comes in that tensor's dtype, where functions cast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from casting_support import losses_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch import amp as core

HALF = {"O1": torch.float16, "O4": torch.bfloat16}
STORED = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
AT = torch.tensor([2, 0, 3])
PLACES = AT[:, None].expand(3, 4)
MASK = torch.tensor([True, False, True, True])
PUT = torch.arange(12)

#: Writes a (3, 4) tensor into a (4, 4) one.
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a mask": lambda out, y: out.__setitem__(MASK, y),
    "an index": lambda out, y: out.__setitem__(AT, y),
    "a slice": lambda out, y: out.__setitem__(slice(1, 4), y),
    "several": lambda out, y: out.__setitem__((slice(None), AT), y.T),
    "one number": lambda out, y: out.__setitem__((AT, 1), y[0, 0]),
    "index_add_": lambda out, y: out.index_add_(0, AT, y, alpha=2),
    "index_add_ by name": lambda out, y: out.index_add_(dim=0, index=AT, source=y),
    "index_copy_": lambda out, y: out.index_copy_(0, AT, y),
    "index_put_": lambda out, y: out.index_put_((AT,), y, accumulate=True),
    "index_reduce_": lambda out, y: out.index_reduce_(0, AT, y, "mean"),
    "masked_scatter_": lambda out, y: out.masked_scatter_(MASK[:, None], y),
    "scatter_": lambda out, y: out.scatter_(0, PLACES, y),
    "scatter_add_": lambda out, y: out.scatter_add_(0, PLACES, src=y),
    "scatter_reduce_": lambda out, y: out.scatter_reduce_(0, PLACES, y, "amax"),
    "put_": lambda out, y: out.put_(PUT, y),
    "addmm_": lambda out, y: out.addmm_(y.T, y, beta=1, alpha=-2),
    "addmm_, one operand": lambda out, y: out.addmm_(y.T.to(out.dtype), y),
    "addmm_, the other": lambda out, y: out.addmm_(y.T, y.to(out.dtype)),
    "addmm_, one by name": lambda out, y: out.addmm_(y.T.to(out.dtype), mat2=y),
    "addbmm_": lambda out, y: out.addbmm_(y.T[None], y[None]),
    "addmv_": lambda out, y: out[0].addmv_(y.T, torch.ones_like(y[:, 0])),
    "baddbmm_": lambda out, y: out[None].baddbmm_(y.T[None], y[None]),
}
#: The same, into a copy.
COPIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda out, y: out.index_add(0, AT, y, alpha=2),
    "index_copy": lambda out, y: torch.index_copy(out, 0, AT, y),
    "index_reduce": lambda out, y: torch.index_reduce(out, 0, AT, y, "amax"),
    "masked_scatter": lambda out, y: torch.masked_scatter(out, MASK[:, None], y),
    "put": lambda out, y: out.put(PUT, y),
    "scatter": lambda out, y: out.scatter(0, PLACES, y),
    "scatter by name": lambda out, y: torch.scatter(input=out, dim=0, index=PLACES, src=y),
    "scatter_reduce": lambda out, y: torch.scatter_reduce(out, 0, PLACES, y, "sum"),
}
#: These have a rule of autocast's where functions cast, and not in a model in half.
RULED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put": lambda out, y: out.index_put((AT,), y),
    "scatter_add": lambda out, y: torch.scatter_add(out, 0, PLACES, y),
}
#: torch casts for these itself.
CAST_BY_TORCH = {"a slice", "one number"}


def prepare(amp: ModuleType, level: str) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)


def dtypes(half: torch.dtype) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(torch.float32, half), (half, torch.float32)]


@pytest.fixture
def y() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("level", HALF)
def test_a_write_is_that_of_the_values_in_the_dtype_of_the_tensor(
    amp: ModuleType, level: str, write: str, y: Tensor
) -> None:
    prepare(amp, level)
    for stored, given_ in dtypes(HALF[level]):
        values = y.to(given_).requires_grad_()
        out, by_hand = torch.ones(4, 4, dtype=stored), torch.ones(4, 4, dtype=stored)
        WRITES[write](out, values)
        out.float().square().sum().backward()
        got, values.grad = values.grad, None
        with core.disable_casts():
            WRITES[write](by_hand, values.to(stored))
            by_hand.float().square().sum().backward()
            if write not in CAST_BY_TORCH:
                with pytest.raises(RuntimeError):
                    WRITES[write](torch.ones(4, 4, dtype=stored), values)
        assert out.dtype is stored
        assert torch.equal(out, by_hand)
        assert got is not None
        assert got.dtype is given_
        assert torch.equal(got, values.grad)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("level", HALF)
def test_a_copy_is_written_to_alike(amp: ModuleType, level: str, y: Tensor) -> None:
    prepare(amp, level)
    for name, call in COPIES.items():
        for stored, given_ in dtypes(HALF[level]):
            out, values = torch.ones(4, 4, dtype=stored), y.to(given_)
            got = call(out, values)
            assert got.dtype is stored, name
            assert torch.equal(got, call(out, values.to(stored))), name
            assert torch.equal(out, torch.ones_like(out))
            with core.disable_casts(), pytest.raises(RuntimeError):
                call(out, values)


#: Places that are views of a (4, 4) tensor.
VIEWS: list[Any] = [1, slice(1, 4), ..., None, (slice(None), 2), (..., None, slice(0, 3)), (1, 2)]


def shapes(place: Any) -> list[torch.Size]:
    """Return the shapes of values that a place of a (4, 4) tensor takes: some are expanded."""
    view = torch.ones(4, 4)[place]
    found = {view.shape, torch.Size([1, *view.shape]), view.shape[1:], torch.Size([])}
    found.update(
        torch.Size([1 if i == at else n for i, n in enumerate(view.shape)]) for at in (0, 1)
    )
    return sorted(found)


@pytest.mark.parametrize("place", VIEWS, ids=str)
@pytest.mark.parametrize("level", HALF)
def test_a_view_is_written_to_as_by_values_that_were_cast_before(
    amp: ModuleType, level: str, place: Any
) -> None:
    """Gradients, too, which are added up in the tensor's dtype where values are expanded."""
    prepare(amp, level)
    torch.manual_seed(0)
    for stored, given_ in dtypes(HALF[level]):
        factors = torch.randn(4, 4, dtype=stored)
        for shape in shapes(place):
            values = torch.randn(shape).to(given_).requires_grad_()
            found = []
            for by_hand in (False, True):
                out = torch.zeros(4, 4, dtype=stored)
                out[place] = values.to(stored) if by_hand else values
                out.backward(factors)
                found.append((out.detach(), values.grad))
                values.grad = None
            (out, grad), (expected, expected_grad) = found
            assert torch.equal(out, expected)
            assert grad is not None
            assert grad.dtype is given_
            assert torch.equal(grad, expected_grad), (shape, stored)


def test_torch_itself_casts_what_is_written_to_a_view(amp: ModuleType, y: Tensor) -> None:
    prepare(amp, "O4")
    out = torch.zeros(3, 5, 4)
    out[:, 2] = y.bfloat16().requires_grad_() * 2
    assert out.grad_fn is not None
    nodes = [node.name() for node, _ in out.grad_fn.next_functions if node is not None]
    assert nodes == ["MulBackward0"]  # no cast between


class Writing(nn.Module):
    """Calls in its forward what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, run: Callable[[], Any]) -> None:
        self.found = run()


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("level", STORED)
def test_in_a_model_in_half_it_is_the_same(amp: ModuleType, level: str, y: Tensor) -> None:
    model = amp.initialize(Writing(), opt_level=level, verbosity=0)
    in_place = {
        name: lambda out, y, write=write: (write(out, y), out)[1] for name, write in WRITES.items()
    }
    for name, call in {**in_place, **COPIES, **RULED}.items():
        for stored, given_ in dtypes(STORED[level]):
            values, ones = y.to(given_), torch.ones(4, 4, dtype=stored)
            model(lambda call=call, values=values, ones=ones: call(ones.clone(), values))
            assert model.found.dtype is stored, name
            assert torch.equal(model.found, call(ones.clone(), values.to(stored))), name
            if name not in CAST_BY_TORCH:
                with pytest.raises(RuntimeError):  # outside of the model
                    call(ones, values)


@pytest.mark.parametrize("region", ["half_region", "float_region"])
@pytest.mark.parametrize("level", HALF)
def test_so_it_is_in_a_region(amp: ModuleType, level: str, region: str, y: Tensor) -> None:
    prepare(amp, level)
    for stored, given_ in dtypes(HALF[level]):
        out = torch.zeros(4, 4, dtype=stored)
        with getattr(core, region)():
            out[AT] = y.to(given_)
        assert torch.equal(out[AT], y.to(given_).to(stored))


@given(index=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), whole=st.booleans())
def test_any_rows_are_written_as_one_by_one(index: list[int], whole: bool) -> None:
    model = core.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0)
    try:
        rows = model(torch.randn(len(index), 4)).detach()
        assert rows.dtype is torch.bfloat16
        out, one_by_one = torch.zeros(4, 4), torch.zeros(4, 4)
        out[(index, slice(None)) if whole else index] = rows
        for place, row in zip(index, rows.float(), strict=True):
            one_by_one[place].copy_(row)
        assert torch.equal(out, one_by_one)
    finally:
        core.deactivate()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_tensors_of_other_dtypes_take_what_torch_lets_them_take(
    amp: ModuleType, dtype: torch.dtype, y: Tensor
) -> None:
    prepare(amp, "O1")
    with pytest.raises(RuntimeError, match="dtypes match"):
        torch.zeros(4, 4, dtype=dtype)[AT] = y.half()
    with pytest.raises(RuntimeError, match="dtypes match"):
        torch.zeros(4, 4)[AT] = y.to(dtype)


def test_indices_and_numbers_stay(amp: ModuleType) -> None:
    prepare(amp, "O1")
    out = torch.zeros(4, dtype=torch.float16)
    out[AT] = 1.5
    out[MASK] = torch.tensor(0.1, dtype=torch.float64)
    counts = torch.zeros(4, dtype=torch.int64)
    counts[AT] += 1
    assert counts.tolist() == [1, 0, 1, 1]
    scores = torch.zeros(4, dtype=torch.float16)
    scores[MASK] = -1e9
    assert scores[MASK].tolist() == [-65504.0] * len(scores[MASK])
    wide = torch.zeros(4)
    wide[MASK] = 1e30
    wide.index_put_((AT,), torch.ones(3, dtype=torch.float16), True)
    assert wide[MASK].max() >= 1e29
    assert wide.sum() >= 3.0
    assert out.tolist() == torch.tensor([0.1, 0, 0.1, 0.1]).half().tolist()


def test_the_methods_are_torchs_own_before_and_behind() -> None:
    def own() -> list[Any]:
        return [vars(torch.Tensor).get(name) for name in ("__setitem__", "index_add_", "scatter_")]

    before, found = own(), torch.Tensor.__setitem__
    core.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert own() != before
    core.deactivate()
    assert own() == before
    assert torch.Tensor.__setitem__ is found
    core.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)  # where nothing is in half
    assert own() == before
    core.deactivate()
    core.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    assert own() != before
    core.deactivate()
    assert own() == before


class Pieces(nn.Module):
    """A function of pieces, each for some of the rows, as a spline of a flow is."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        is_left = x[:, 0] < 0
        out = torch.zeros(x.shape)
        out[is_left] = self.left(x[is_left])
        out[~is_left] = self.right(x[~is_left]).softmax(-1)
        return out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("level", [*HALF, *STORED])
def test_a_model_of_pieces_trains_as_in_float32(
    amp: ModuleType, level: str, backend: str | None
) -> None:
    torch.manual_seed(0)
    model, x, y = Pieces(), torch.randn(16, 4), torch.randn(16, 4)

    def loss_of(run: Callable[[Tensor], Tensor]) -> Tensor:
        return F.mse_loss(run(x), y)

    exact = losses_of(copy.deepcopy(model), loss_of)
    assert exact[-1] < exact[0]
    found = losses_of(model, loss_of, amp, backend=backend, opt_level=level)
    assert found == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_factor_is_no_value_that_is_written(amp: ModuleType, level: str) -> None:
    """1e-8 is no number of float16, but its product with what is added is."""
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    at, large = torch.tensor([0, 1]), torch.full((2, 2), 6e4)
    added = torch.zeros(2, 2).half().index_add_(0, at, large, alpha=1e-8)
    product = torch.zeros(2, 2).half().addmm_(large / 600, large / 600, alpha=1e-8)
    assert added.tolist() == torch.full((2, 2), 6e-4).half().tolist()
    assert product.tolist() == torch.full((2, 2), 2e-4).half().tolist()
