"""The rule "half_out" and the profile "fast-norms", which gives it to the norms and to softmax.

A result is compared with float64 of the very input. Rounding to half moves each element by its
share of u = eps / 2 at most, and so the norm of an error is at most u of the result's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from cast_counter import CastCounter
from casting_support import HALVES, activate, half_kernels_as_on_cuda
from hypothesis import given
from hypothesis import strategies as st
from small_models import TASKS, cross_entropy
from support import scaled_backward, trains
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from amp_patch import amp as public
from amp_patch.casting import rules as cast_rules
from amp_patch.casting.mode import process

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PROFILE = "fast-norms"
Function = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
#: Functions of an input (N, 8) and a weight and a bias of 8, or none.
NORMS: dict[str, Function] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (8,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (8,), w),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
}
SOFTMAXES: dict[str, Function] = {
    "softmax": lambda x, w, b: F.softmax(x, -1),
    "torch.softmax": lambda x, w, b: torch.softmax(x, -1),
    "method": lambda x, w, b: x.softmax(-1),
    "special": lambda x, w, b: torch.special.softmax(x, -1),
}
FUNCTIONS = {**NORMS, **SOFTMAXES}


@contextlib.contextmanager
def fast_norms(
    amp: ModuleType, opt_level: str = "O1", rules: Any = PROFILE, device: Any = "cpu"
) -> Iterator[None]:
    """Casts on, by the profile, for a block."""
    model = activate(amp, opt_level, nn.Linear(1, 1, device=device), rules=rules)
    yield
    del model
    amp.deactivate()


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(1 + torch.randn(8) / 4), nn.Parameter(torch.randn(8) / 4)


# -- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", HALVES)
@pytest.mark.parametrize("given_dtype", [F16, BF16, F32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_result_is_half_whatever_comes_in(
    amp: ModuleType, name: str, given_dtype: torch.dtype, opt_level: str
) -> None:
    x, (weight, bias) = torch.randn(4, 8).to(given_dtype), parameters()
    with fast_norms(amp, opt_level):
        for affine in ((weight, bias), (None, None)):
            assert FUNCTIONS[name](x, *affine).dtype is HALVES[opt_level]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_comes_in_float32_is_rounded_behind_the_function_and_not_before(
    amp: ModuleType, name: str
) -> None:
    x, (weight, bias) = 1000 + torch.randn(4, 8), parameters()
    expected = FUNCTIONS[name](x, weight, bias).half()
    with fast_norms(amp):
        assert torch.equal(FUNCTIONS[name](x, weight, bias), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_and_a_dtype_that_is_asked_for_stay(amp: ModuleType, name: str) -> None:
    x, (weight, bias) = torch.randn(4, 8, dtype=F64), parameters()
    with fast_norms(amp):
        assert FUNCTIONS[name](x, weight.double(), bias.double()).dtype is F64
        half = x.half()
        assert half.softmax(-1, dtype=F32).dtype is F32
        assert half.softmax(-1, F32).dtype is F32
        assert F.softmax(half, -1, dtype=F64).dtype is F64
        out = torch.empty(4, 8)
        assert torch.softmax(x.float(), -1, out=out) is out


def test_what_is_no_tensor_is_refused_as_before(amp: ModuleType) -> None:
    with fast_norms(amp):
        for arguments in ((), ([1.0], 0)):
            with pytest.raises(TypeError, match="softmax"):
                torch.softmax(*arguments)


def test_layers_give_half_and_a_loss_is_computed_in_float32(amp: ModuleType) -> None:
    layers = (nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.Softmax(-1))
    x = torch.randn(4, 8)
    with fast_norms(amp):
        for layer in layers:
            assert layer(x).dtype is layer(x.half()).dtype is F16
        assert F.log_softmax(x.half(), -1).dtype is F32
        assert F.cross_entropy(x.half(), torch.zeros(4).long()).dtype is F32
        statistics = torch.native_layer_norm(x.half(), (8,), None, None, 1e-5)[1:]
        assert [one.dtype for one in statistics] == [F32, F32]


def test_regions_and_disable_casts_stand_above_it(amp: ModuleType) -> None:
    x, (weight, bias) = torch.randn(4, 8), parameters()
    with fast_norms(amp):
        for function in FUNCTIONS.values():
            with amp.float_region():
                assert function(x.half(), weight, bias).dtype is F32
                with amp.half_region():
                    assert function(x, weight, bias).dtype is F16
            with amp.disable_casts():
                assert function(x, weight, bias).dtype is F32
            assert function(x, weight, bias).dtype is F16


# -- how far it is from float64 ------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw an input of 16 or more columns, the result's gradient, a weight and a bias.

    The mean is 30 deviations at most, of which bfloat16 still tells values apart.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    drawn = functools.partial(torch.randn, generator=generator)
    shape = draw(st.integers(1, 64)), draw(st.sampled_from([16, 128, 4096]))
    deviation = draw(st.sampled_from([1e-2, 1.0, 30.0]))
    x = deviation * (draw(st.sampled_from([0, 3, -30])) + drawn(shape))
    return x, drawn(shape), 1 + drawn(shape[1]) / 4, drawn(shape[1]) / 4


def norm(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if name == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias)
    if name == "rms_norm":  # whose own eps is that of the dtype
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return F.group_norm(x, 2, weight, bias)


def with_gradients(
    function: Callable[..., Tensor], gradient: Tensor, *arguments: Tensor
) -> list[Tensor]:
    """Return a result, and the gradients of its arguments that it depends on."""
    leaves = [argument.detach().clone().requires_grad_() for argument in arguments]
    result = function(*leaves)
    result.backward(gradient.to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact).norm() / exact.norm())


@pytest.mark.parametrize("opt_level", HALVES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm"])
@given(call=calls())
def test_a_norm_rounds_once(
    device: torch.device, name: str, opt_level: str, call: tuple[Tensor, ...]
) -> None:
    half = HALVES[opt_level]
    u = torch.finfo(half).eps / 2
    x, gradient, weight, bias = call
    x, gradient = x.to(half), gradient.to(half)
    function = functools.partial(norm, name)
    exact = with_gradients(function, *(one.double() for one in (gradient, x, weight, bias)))
    with fast_norms(public, opt_level, device=device):
        found = with_gradients(function, *(one.to(device) for one in (gradient, x, weight, bias)))
    assert [one.dtype for one in found] == [half, half, F32, F32][: len(found)]
    # Each is rounded to half once; on CUDA so are the weight before, and the gradients of weight
    # and bias. The rest is float32's own error, of means up to 30 deviations.
    bounds = (3 * u, 3 * u, 2 * u, 2 * u) if device.type == "cuda" else (u, u, 0.0, 0.0)
    for one, its_exact, bound in zip(found, exact, bounds, strict=False):
        assert distance(one, its_exact) <= bound + 1e-4


@pytest.mark.parametrize("opt_level", HALVES)
@given(call=calls(), dim=st.sampled_from([0, 1]))
def test_softmax_rounds_once(
    device: torch.device, opt_level: str, call: tuple[Tensor, ...], dim: int
) -> None:
    half = HALVES[opt_level]
    u = torch.finfo(half).eps / 2
    x, gradient, *_ = (one.to(half) for one in call)
    y, exact = with_gradients(lambda x: x.softmax(dim), gradient, x.double())
    with fast_norms(public, opt_level, device=device):
        found = with_gradients(lambda x: x.softmax(dim), gradient.to(device), x.to(device))
    # float16 has no finer steps than 2**-24, of which rounding leaves a half
    step = 2.0**-25 * x.numel() ** 0.5 if half is F16 else 0.0
    assert (found[0].double().cpu() - y).norm() <= (u + 1e-4) * y.norm() + step
    # y * (g - sum(y * g)) from a y that is rounded by u, twice; then rounded itself
    parts = y * (gradient.double().abs() + (y * gradient.double().abs()).sum(dim, keepdim=True))
    error = (found[1].double().cpu() - exact).norm()
    assert error <= (2 * u + 1e-4) * parts.norm() + u * exact.norm() + 4 * step


# -- what the kernels get ------------------------------------------------------------------------


class Seen(TorchFunctionMode):
    """Records for each norm and softmax of torch the dtypes of the tensors that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)]
        self.dtypes.setdefault(func.__name__, {one.dtype for one in given})
        return func(*args, **(kwargs or {}))


ON_CUDA = {"layer_norm": F16, "rms_norm": F16, "group_norm": F32, "softmax": F16}


@pytest.mark.parametrize("name", ON_CUDA)
def test_on_cuda_a_kernel_that_rounds_once_gets_its_input_and_the_weights_in_half(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with fast_norms(amp), FakeTensorMode():
        monkeypatch.setattr(process, "devices", frozenset({"cuda"}))
        weight, bias = (torch.empty(8, device="cuda") for _ in range(2))
        for given_dtype, wanted in ((F16, ON_CUDA[name]), (F32, F32)):
            x = torch.empty(4, 8, device="cuda", dtype=given_dtype)
            with Seen() as seen:
                assert FUNCTIONS[name](x, weight, bias).dtype is F16
            assert seen.dtypes[name] == {wanted}


@pytest.mark.parametrize("given_by", ["position", "name"])
def test_a_weight_that_is_no_parameter_is_cast_as_well(amp: ModuleType, given_by: str) -> None:
    x, weight = torch.randn(4, 8).half(), 1 + torch.randn(8)
    expected = F.layer_norm(x, (8,), weight.half())
    with half_kernels_as_on_cuda(), fast_norms(amp), Seen() as seen:
        if given_by == "name":
            found = F.layer_norm(input=x, normalized_shape=(8,), weight=weight)
        else:
            found = F.layer_norm(x, (8,), weight)
    assert seen.dtypes["layer_norm"] == {F16}
    assert torch.equal(found, expected)


def test_on_the_cpu_norms_are_computed_in_float32(amp: ModuleType) -> None:
    x, (weight, bias) = torch.randn(4, 8).half(), parameters()
    with fast_norms(amp), Seen() as seen:
        for function in NORMS.values():
            function(x, weight, bias)
    names = "layer_norm", "rms_norm", "group_norm"
    assert [seen.dtypes[name] for name in names] == [{F32}] * 3


def test_many_rows_leave_the_gradient_of_a_bias_right(amp: ModuleType) -> None:
    """The CPU's kernel for half tensors adds up in half, and comes to a standstill."""
    rows = 16384
    norm, x = nn.LayerNorm(8), torch.randn(rows, 8).bfloat16().requires_grad_()
    with fast_norms(amp, "O4"):
        norm(x).sum().backward()
    assert torch.equal(norm.bias.grad, torch.full((8,), float(rows)))


# -- with other rules ----------------------------------------------------------------------------


def test_a_users_own_rules_stand_above_the_profile(amp: ModuleType) -> None:
    own = {"rms_norm": "float", "torch.nn.functional.softmax": "float", "mm": "off"}
    x = torch.randn(4, 8).half()
    with fast_norms(amp, rules={"profile": PROFILE, "functions": own}):
        assert F.rms_norm(x, (8,)).dtype is F32
        assert F.softmax(x, -1).dtype is F32
        assert x.softmax(-1).dtype is F.layer_norm(x, (8,)).dtype is F16
        assert torch.mm(x.float(), x.float().T).dtype is F32


def test_a_module_with_a_rule_runs_in_its_region(amp: ModuleType) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    rules = {"profile": PROFILE, "modules": {"1": "float"}}
    amp.initialize(model, opt_level="O1", verbosity=0, rules=rules)
    half = model[0](torch.randn(4, 8))
    assert (half.dtype, model[1](half).dtype) == (F16, F32)


def test_the_rule_may_be_given_to_any_function(amp: ModuleType) -> None:
    x = torch.rand(4, 8)
    rules = {"exp": "half_out", "torch.nn.functional.normalize": "half_out"}
    with fast_norms(amp, rules=rules):
        for given_dtype in (F16, F32):
            expected = x.to(given_dtype).float()
            with amp.disable_casts():
                expected = [expected.exp().half(), F.normalize(expected).half()]
            found = [x.to(given_dtype).exp(), F.normalize(x.to(given_dtype))]
            assert all(map(torch.equal, found, expected))


def test_a_file_names_the_profile(amp: ModuleType, tmp_path: Any) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(f'opt_level = "O4"\nprofile = "{PROFILE}"\n[functions]\nsoftmax = "float"\n')
    x = torch.randn(4, 8)
    with fast_norms(amp, "O1", rules=path):
        assert F.layer_norm(x, (8,)).dtype is BF16
        assert x.bfloat16().softmax(-1).dtype is F32


@pytest.mark.parametrize("opt_level", ["O0", "O2", "O3", "O5"])
def test_levels_that_cast_no_functions_refuse_it_as_they_do_rules(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, opt_level: str
) -> None:
    model = nn.LayerNorm(8)
    message = (
        f"rules say how functions are cast, which opt_level '{opt_level}' does not do; got profile "
        "'fast-norms', without effect there; call amp.initialize(..., rules=...) at "
        "opt_level='O1' or 'O4'."
    )
    with pytest.raises(RuntimeError) as raised:
        amp.initialize(model, opt_level=opt_level, rules=PROFILE, verbosity=0)
    assert str(raised.value) == message
    # a level that the environment forces has no use for them
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", opt_level)
    amp.initialize(model, opt_level="O1", rules=PROFILE, verbosity=0)


def test_it_joins_the_rules_of_before_and_goes_with_them(amp: ModuleType) -> None:
    before, x = F.layer_norm, torch.randn(4, 8)
    models = [activate(amp, rules={"mm": "off"}), activate(amp, rules=PROFILE), activate(amp)]
    assert torch.mm(x, x.T).dtype is F32
    assert F.layer_norm(x, (8,)).dtype is F16
    amp.deactivate()
    assert F.layer_norm is before
    models.append(activate(amp))
    assert F.layer_norm(x.half(), (8,)).dtype is F32


def test_every_profile_is_made_of_functions_and_rules_that_there_are(amp: ModuleType) -> None:
    for name in cast_rules.PROFILES:
        with fast_norms(amp, rules=name):
            pass
    assert set(cast_rules.ROUNDED_ONCE) <= {*cast_rules.rules()}


# -- in training ---------------------------------------------------------------------------------


class Norms(nn.Module):
    """Each function of the profile between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears[:-1], self.norms, strict=True):
            x = x + norm(linear(x))
        return self.linears[-1](x).softmax(-1)


@pytest.mark.parametrize("as_on_cuda", [False, True])
def test_a_step_casts_no_weight_once_it_is_warm(amp: ModuleType, as_on_cuda: bool) -> None:
    model, x = Norms(), torch.randn(4, 8).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with half_kernels_as_on_cuda() if as_on_cuda else contextlib.nullcontext():
        amp.initialize(model, optimizer, opt_level="O1", rules=PROFILE, verbosity=0)
    counter = CastCounter(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        with counter if step == 2 else contextlib.nullcontext():
            loss = model(x).float().square().sum()
        scaled_backward(amp, loss, optimizer)
        optimizer.step()
    assert counter.of_weights == 0
    assert counter.bulk_copies == 1
    assert counter.casts > 0


@pytest.mark.parametrize("opt_level", HALVES)
def test_a_compiled_model_trains_as_the_plain_one(amp: ModuleType, opt_level: str) -> None:
    torch.manual_seed(0)
    plain, model = Norms(), Norms()
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    options = {"rules": PROFILE, "verbosity": 0, "loss_scale": 128.0}
    with half_kernels_as_on_cuda():  # for which weights are cast as well
        amp.initialize([plain, model], optimizers, opt_level=opt_level, **options)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 8).to(HALVES[opt_level])
        results = [plain(x), forward(x)]
        for result, optimizer in zip(results, optimizers, strict=True):
            optimizer.zero_grad()
            scaled_backward(amp, result.float().square().sum(), optimizer)
            optimizer.step()
        assert results[0].dtype is results[1].dtype is HALVES[opt_level]
        torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)
    torch._dynamo.reset()


@trains()
@given(
    task=st.sampled_from(["mlp", "cnn", "transformer"]),
    opt_level=st.sampled_from(sorted(HALVES)),
    as_on_cuda=st.booleans(),
    seed=st.integers(0, 99),
)
def test_small_models_train_as_without_it(
    task: str, opt_level: str, as_on_cuda: bool, seed: int
) -> None:
    losses = []
    for rules in (None, PROFILE):
        torch.manual_seed(seed)
        model, (x, targets) = TASKS[task].build(), TASKS[task].batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with half_kernels_as_on_cuda() if as_on_cuda else contextlib.nullcontext():
            public.initialize(model, optimizer, opt_level=opt_level, rules=rules, verbosity=0)
        for _ in range(30):
            loss = cross_entropy(model(x), targets)
            optimizer.zero_grad()
            scaled_backward(public, loss, optimizer)
            optimizer.step()
        losses.append(loss.item())
        public.deactivate()
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] < 0.8
