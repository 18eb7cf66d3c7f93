"""What half numbers cannot do, and weights that others replaced: notes on torch's exceptions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from test_dtypes import DTYPES, HALF, X, fail, told
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adam
from training import prepared

from amp_patch import amp as core

CASTING = {"O1": "torch.float16", "O4": "torch.bfloat16"}
FILL = "write torch.finfo(x.dtype).min in the place of -1e9, or take opt_level 'O4' or 'O5'"
MEND = (
    "put `with amp.float_region():` around it, give it x.float() in the place of x, and hand on "
    "y.to(x.dtype) after it"
)

#: Functions that torch refuses half numbers for, each by words of its own, and that have no rule:
#: operators below torch's functions, and calls with ``out=``.
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "not implemented for": lambda x: torch.ops.aten.geqrf(x)[0],
    "Unsupported dtype": lambda x: torch.fft.rfft(x.detach(), out=x.new_empty(0).cfloat()).abs(),
    "MKL FFT doesn't support": lambda x: torch.ops.aten.stft(x, 4, return_complex=True).abs(),
    "Low precision dtypes": lambda x: torch.ops.aten.linalg_inv(x),
    "either float or double": lambda x: torch.quantile(x.detach(), 0.5, out=x.new_empty(0)),
    "other than float and double": lambda x: torch.ops.aten.linalg_lstsq(x, x)[0],
}
#: The same, of bfloat16 alone.
REFUSED_IN_BFLOAT16: dict[str, Callable[[Tensor], Any]] = {
    "Half, Float or Double tensors": lambda x: torch.complex(
        x.detach(), x.detach(), out=x.new_empty(0).cfloat()
    ),
    "view_as_complex is only": lambda x: torch._VF.view_as_complex(x.reshape(-1, 2)),
    "unsupported ScalarType": lambda x: x.detach().numpy(),
}
#: Of these what writes to a tensor that it is given, which no rule casts.
WITH_OUT = {"Unsupported dtype", "either float or double", "Half, Float or Double tensors"}


class Product(nn.Module):
    """A matrix, and no layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)


class Then(nn.Module):
    """A layer, and then a function of its half numbers."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_number_that_float16_cannot_hold(amp: ModuleType, level: str) -> None:
    model = Then(lambda x: x.add(x, alpha=-1e9))
    amp.initialize(model, opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert FILL in note
    does = "functions cast to" if level == "O1" else "the model is stored in"
    assert f"at opt_level {level} {does} torch.float16; this came from the model itself" in note


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_the_levels_that_it_names_hold_that_number(amp: ModuleType, level: str) -> None:
    model = Then(lambda x: x.add(x, alpha=-1e9))
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model(X).isfinite().all()


#: What takes one dtype, each in words of its own; methods that write to a tensor are given a cast.
OF_ONE_DTYPE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "expected dtype .* for `end`": lambda out, at, y: out.lerp_(y, 0.5),
    "Index put requires": lambda out, at, y: torch.index_put_(out, (at,), y),
}


@pytest.mark.parametrize("words", OF_ONE_DTYPE)
@pytest.mark.parametrize("level", CASTING)
def test_a_function_of_one_dtype_where_functions_cast(
    amp: ModuleType, level: str, words: str
) -> None:
    def write(half: Tensor, mend: bool) -> Tensor:
        out, y = torch.zeros_like(half), half.softmax(-1)
        return OF_ONE_DTYPE[words](out, torch.arange(4), y.to(out.dtype) if mend else y)

    model = Then(lambda half: write(half, mend=False))
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match=words) as error:
        model(X)
    note = told(error.value)
    assert f"at opt_level {level} functions cast to {CASTING[level]}" in note
    assert "write y.to(out.dtype), or compute this part in `with amp.float_region():`" in note
    model.function = lambda half: write(half, mend=True)
    assert model(X).isfinite().all()


@pytest.mark.parametrize("words", OF_ONE_DTYPE)
@pytest.mark.parametrize("level", CASTING)
def test_a_function_of_one_dtype_beside_the_model(amp: ModuleType, level: str, words: str) -> None:
    """As of a memory bank of the script's: a note comes where the script ends."""
    model = amp.initialize(nn.Linear(4, 4), opt_level=level, verbosity=0)
    bank, at = torch.zeros(4, 4), torch.arange(4)
    call = OF_ONE_DTYPE[words]
    note = fail(lambda: call(bank, at, model(X).detach()), ends_script=True)
    assert f"at opt_level {level} functions cast to half precision" in note
    assert "write y.to(out.dtype), or compute this part in `with amp.float_region():`" in note
    assert call(bank, at, model(X).detach().to(bank.dtype)).isfinite().all()


@pytest.mark.parametrize("level", CASTING)
def test_a_hook_that_returns_what_a_model_has_computed(amp: ModuleType, level: str) -> None:
    """As a learned optimizer does; the note's mend trains as without amp."""
    model, learned = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize([model, learned], optimizer, opt_level=level, loss_scale=1.0, verbosity=0)

    def step() -> None:
        with amp.scale_loss(model(X).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()

    handle = model.weight.register_hook(learned)
    note = fail(step, ends_script=True)
    assert f"at opt_level {level} functions cast to half precision" in note
    assert "write g * mask.to(g.dtype)" in note
    handle.remove()
    optimizer.zero_grad()
    model.weight.register_hook(lambda grad: learned(grad).to(grad.dtype))
    step()
    expected = learned.weight.sum(1) * 4 + learned.bias
    torch.testing.assert_close(model.weight.grad, expected.expand(4, 4), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_hook_that_multiplies_a_half_gradient_by_a_float32_mask(
    amp: ModuleType, level: str
) -> None:
    """As of rows that stay as they are; the note's mend trains as without amp."""
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    mask = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)

    def step() -> None:
        with amp.scale_loss(model(X).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()

    handle = model.weight.register_hook(lambda grad: grad * mask)
    note = fail(step, ends_script=True)
    assert f"at opt_level {level} the model is stored in half" in note
    assert "write g * mask.to(g.dtype)" in note
    handle.remove()
    optimizer.zero_grad()
    model.weight.register_hook(lambda grad: grad * mask.to(grad.dtype))
    step()
    torch.testing.assert_close(model.weight.grad.float(), (4 * mask).expand(4, 4))


OF_A_GRADIENT = (
    "A gradient has its parameter's dtype: write p.grad = g.to(p.dtype), or give float32 ones to "
    "`for p in amp.master_params(optimizer)`."
)


def in_float(model: nn.Module) -> list[Tensor]:
    """Return gradients as a script computes them to change them by hand."""
    found = torch.autograd.grad(model(X).float().square().mean(), list(model.parameters()))
    return [grad.float() for grad in found]


def assign(model: nn.Module, dtype: torch.dtype) -> None:
    for param, grad in zip(model.parameters(), in_float(model), strict=True):
        param.grad = grad.to(dtype)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("make_model", [Product, lambda: nn.Sequential(nn.Linear(4, 4), Product())])
def test_a_float32_gradient_for_a_half_parameter(
    amp: ModuleType, level: str, make_model: Any
) -> None:
    """The setter of torch is asked nothing more: the note comes where the script ends."""
    model = amp.initialize(make_model(), opt_level=level, verbosity=0)
    note = fail(lambda: assign(model, torch.float32), ends_script=True)
    assert f"at opt_level {level} the model is stored in half. {OF_A_GRADIENT}" in note


def test_a_half_gradient_for_a_parameter_that_stays_in_float32(amp: ModuleType) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    amp.initialize(model, opt_level="O2", keep_batchnorm_fp32=True, verbosity=0)
    note = fail(lambda: assign(model, torch.float16), ends_script=True)
    assert OF_A_GRADIENT in note


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_gradient_that_a_method_of_the_model_assigns(amp: ModuleType, level: str) -> None:
    class Own(Product):
        def merge(self) -> None:
            assign(self, torch.float32)

    model = amp.initialize(Own(), opt_level=level, verbosity=0)
    note = fail(model.merge, ends_script=True)
    assert f"this came from the model itself (Own), with self.weight {DTYPES[level]}" in note
    assert OF_A_GRADIENT in note
    assert "was called by itself" not in note


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_torch_before_2_10_says_of_such_a_gradient(amp: ModuleType, level: str) -> None:
    def refuse() -> None:
        raise RuntimeError("assigned grad has data of a different type")

    model = amp.initialize(nn.Linear(4, 4), opt_level=level, verbosity=0)
    assert OF_A_GRADIENT in fail(refuse, ends_script=True)
    del model


@pytest.mark.parametrize("level", CASTING)
def test_a_half_gradient_where_parameters_are_float32_is_the_scripts_own_matter(
    amp: ModuleType, level: str
) -> None:
    model = amp.initialize(nn.Linear(4, 4), opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError) as error:
        assign(model, torch.float16)
    sys.excepthook(error.type, error.value, error.tb)
    assert not getattr(error.value, "__notes__", ())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("to", ["model", "masters"])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_both_ways_that_the_note_on_a_gradient_names_train(
    amp: ModuleType, kind: Any, to: str, level: str, fused: bool
) -> None:
    model = Product()
    optimizer = kind(model.parameters(), lr=0.1)
    options: Any = {"opt_level": level, "fused_step": fused, "verbosity": 0}
    model, optimizer = core.initialize(model, optimizer, loss_scale=1.0, **options)
    for _ in range(2):
        before = model.state_dict()["weight"].clone()
        grads = in_float(model)
        given = model.parameters() if to == "model" else amp.master_params(optimizer)
        for param, grad in zip(given, grads, strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()
        moved = before - model.state_dict()["weight"]
        if kind is SGD:
            torch.testing.assert_close(moved, 0.1 * grads[0], rtol=1e-4, atol=1e-7)
        assert (moved * grads[0]).sum() > 0


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        *product(["linear", "conv", "no bias", "matmul"], [*CASTING, *HALF]),
        *product(["gru"], HALF),  # elsewhere torch names no half dtype
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
def test_integers_that_plain_torch_refuses_as_well(
    amp: ModuleType, kind: str, level: str, dtype: torch.dtype
) -> None:
    models = {
        "linear": nn.Linear(4, 4),
        "conv": nn.Conv1d(4, 4, 1),
        "no bias": nn.Conv1d(4, 4, 1, bias=False),
        "matmul": Product(),
        "gru": Then(lambda x: x),
    }
    models["gru"].layer = nn.GRU(4, 4)
    x = torch.ones(2, 4, 4).to(dtype)
    with pytest.raises((RuntimeError, ValueError)):
        models[kind](x)
    model = amp.initialize(models[kind], opt_level=level, verbosity=0)
    note = fail(lambda: model(x))
    assert "Integers are never cast" in note
    model(x.float())


def test_a_result_that_numpy_cannot_take(amp: ModuleType) -> None:
    """The note comes where the script ends, and what it says mends it."""
    model = amp.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0)
    note = fail(lambda: model(X).detach().numpy(), ends_script=True)
    assert "at opt_level O4 a model returns torch.bfloat16" in note
    assert "write y.float().numpy()" in note
    model = core.initialize(
        nn.Linear(4, 4), opt_level="O4", verbosity=0, cast_model_outputs=torch.float32
    )
    assert model(X).detach().numpy().shape == (4, 4)


@pytest.mark.parametrize("level", CASTING)
def test_a_method_but_forward_where_functions_cast(amp: ModuleType, level: str) -> None:
    """As the `log_prob` of a flow: a note comes where the script ends."""
    model = Then(lambda half: half.lerp_(X, 0.5))
    amp.initialize(model, opt_level=level, verbosity=0)
    note = fail(lambda: model.forward(X), ends_script=True)
    assert "write y.to(out.dtype), or compute this part in `with amp.float_region():`" in note


@pytest.mark.parametrize("level", CASTING)
def test_inputs_in_float64_where_functions_cast(amp: ModuleType, level: str) -> None:
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4)), opt_level=level, verbosity=0)
    note = fail(lambda: model(X.double()))
    assert "with input torch.float64, self.weight torch.float32" in note
    assert "A float64 tensor is never cast: pass x.float()" in note


class Scores(nn.Module):
    """Half scores, to which the minimum of float32 times nothing is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        query = self.layer(x).float()
        scores = torch.matmul(query.to(self.layer.weight.dtype), self.layer.weight)
        return scores.add(torch.zeros_like(scores), alpha=torch.finfo(query.dtype).min)


@pytest.mark.parametrize("path", ["", "1"])
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_number_that_bfloat16_cannot_hold(amp: ModuleType, level: str, path: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scores()) if path else Scores()
    amp.initialize(model, opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert (
        "torch.bfloat16 cannot hold that number: write torch.finfo(x.dtype).min with the x" in note
    )
    assert "O5'." not in note
    assert "-1e9" not in note
    if not path:
        assert "float32 by `with amp.float_region():` around it." in note
        with core.float_region():
            assert model(X).isfinite().all()
        return
    assert "by amp.initialize(..., rules={'modules': {'1': 'float'}})." in note
    core.deactivate()
    core.initialize(model, opt_level=level, verbosity=0, rules={"modules": {"1": "float"}})
    assert model(X).isfinite().all()


@pytest.mark.parametrize(
    ("level", "words"),
    [*product(HALF, REFUSED), *product(["O5"], REFUSED_IN_BFLOAT16)],
)
def test_a_function_that_is_not_computed_in_half(amp: ModuleType, level: str, words: str) -> None:
    """The note is not that of two dtypes; and what it says mends it."""
    function = {**REFUSED, **REFUSED_IN_BFLOAT16}[words]
    model = Then(function)
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises((RuntimeError, TypeError), match=words) as error:
        model(X)
    note = told(error.value)
    assert f"This is not computed in {DTYPES[level]}: {MEND}" in note

    def mended(x: Tensor) -> Any:
        with core.float_region():
            y = function(x.float())
        return y.to(x.dtype) if isinstance(y, Tensor) and not y.is_complex() else y

    other = Then(mended)
    amp.initialize(other, opt_level=level, verbosity=0)
    other(torch.eye(4))


@pytest.mark.parametrize(
    ("level", "words"),
    [
        *product(HALF, sorted(set(REFUSED) - WITH_OUT)),
        *product(["O5"], sorted(set(REFUSED_IN_BFLOAT16) - WITH_OUT)),
    ],
)
def test_a_rule_of_the_part_mends_it_where_its_code_is_a_librarys(
    amp: ModuleType, level: str, words: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Then({**REFUSED, **REFUSED_IN_BFLOAT16}[words]))
    amp.initialize(model, opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert f"{MEND}; or leave the code as it is, and compute the part in float32 by " in note
    assert "amp.initialize(..., rules={'modules': {'1': 'float'}})." in note
    core.deactivate()
    core.initialize(model, opt_level=level, verbosity=0, rules={"modules": {"1": "float"}})
    model(torch.eye(4))


@pytest.mark.parametrize("level", CASTING)
def test_what_only_half_is_at_fault_for_is_told_where_functions_cast(
    amp: ModuleType, level: str
) -> None:
    model = Then(lambda x: torch._standard_gamma(x.exp().to(x.dtype)))
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError) as error:
        model(X)
    assert f"This is not computed in {CASTING[level]}: {MEND}" in told(error.value)
    assert f"at opt_level {level} functions cast to {CASTING[level]}" in told(error.value)


def test_a_solver_without_steps_of_time_is_told(amp: ModuleType) -> None:
    """As torchdiffeq says of times in float16."""

    def solve(x: Tensor) -> Tensor:
        raise AssertionError("underflow in dt 0.0")

    model = Then(solve)
    amp.initialize(model, opt_level="O2", verbosity=0)
    with pytest.raises(AssertionError) as error:
        model(X)
    assert MEND in told(error.value)


class Moved(nn.Module):
    """Gives its weight to a function that takes one dtype, and is given no cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.lerp(x, self.weight, 0.5)


@pytest.mark.parametrize("level", HALF)
def test_functional_call_with_the_values_of_a_checkpoint(amp: ModuleType, level: str) -> None:
    """They are float32: layers cast them, and elsewhere a note says what mends it."""
    model, _ = prepared(amp, level)
    values = model.state_dict()
    assert {value.dtype for value in values.values()} >= {torch.float32}
    assert torch.equal(torch.func.functional_call(model, values, X), model(X))
    model = amp.initialize(Moved(), opt_level=level, verbosity=0)
    note = fail(lambda: torch.func.functional_call(model, model.state_dict(), X))
    assert "those of model.state_dict() are float32" in note
    assert "dict(model.named_parameters())" in note
    named = torch.func.functional_call(model, dict(model.named_parameters()), X)
    assert torch.equal(named, model(X))


@pytest.mark.parametrize("level", HALF)
def test_weights_from_a_float_vector(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level)
    expected, vector = model(X), parameters_to_vector(model.parameters())
    vector_to_parameters(vector.float(), model.parameters())
    note = fail(lambda: model(X))
    assert f"as vector_to_parameters() leaves them: give it vector.to({DTYPES[level]})" in note
    vector_to_parameters(vector.to(getattr(torch, DTYPES[level][6:])), model.parameters())
    assert torch.equal(model(X), expected)


#: What plain PyTorch refuses of indices, classes and masks that are floating numbers.
FLOATING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, y: x.gather(1, y),
    "index_select": lambda x, y: x.index_select(0, y[0]),
    "embedding": lambda x, y: F.embedding(y, x),
    "classes": lambda x, y: F.nll_loss(x, y[0]),
    "mask": lambda x, y: x.masked_fill(y, 0.0),
    "index": lambda x, y: x[y],
}


class Indexed(nn.Module):
    """A layer of whose result a function takes a part."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.layer(x), y)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("kind", FLOATING)
def test_floating_indices_that_plain_torch_refuses_as_well(
    amp: ModuleType, level: str, kind: str
) -> None:
    model, y = Indexed(FLOATING[kind]), torch.ones(4, 4)
    with pytest.raises((RuntimeError, IndexError)):
        model(X, y)
    model = amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises((RuntimeError, IndexError)) as error:
        model(X, y)
    if isinstance(error.value, RuntimeError):  # else torch says all by itself
        assert "write index.long(), or mask.bool()" in told(error.value)
    right = y.bool() if kind == "mask" else y.long()
    model(X, right)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_scripts_own_error_and_a_write_of_half_to_integers_are_no_integers_in_a_layer(
    amp: ModuleType, level: str
) -> None:
    def refuse(x: Tensor) -> Tensor:
        raise ValueError("dtype must be one of fp16, bf16; got int 8")

    def put(x: Tensor) -> Tensor:
        return torch.ops.aten.index_put_(torch.zeros(4, 4).long(), [torch.arange(4)], x)

    for function in (refuse, put):
        model = amp.initialize(Then(function), opt_level=level, verbosity=0)
        with pytest.raises((RuntimeError, ValueError)) as error:
            model(X)
        assert "Integers are never cast" not in told(error.value)
