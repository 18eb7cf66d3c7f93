"""Numbers that half does not have: what is filled and what is bounded by them, as in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from casting_support import losses_of
from hypothesis import given
from hypothesis import strategies as st
from support import nightly_but
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch import amp as core

HALF = {"O1": torch.float16, "O4": torch.bfloat16}
STORED = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
IS_DIAGONAL = torch.eye(4, dtype=torch.bool)


def changed(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    copied = x * 1.0
    change(copied)
    return copied


#: Write a number into numbers of a dtype, all of them or those of the diagonal.
FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda x, value: x.masked_fill(IS_DIAGONAL, value),
    "masked_fill by names": lambda x, value: x.masked_fill(mask=IS_DIAGONAL, value=value),
    "torch.masked_fill": lambda x, value: torch.masked_fill(x, IS_DIAGONAL, value),
    "masked_fill_": lambda x, value: changed(x, lambda y: y.masked_fill_(IS_DIAGONAL, value)),
    "index_fill": lambda x, value: x.index_fill(0, torch.tensor([1]), value),
    "a mask": lambda x, value: changed(x, lambda y: y.__setitem__(IS_DIAGONAL, value)),
    "a slice": lambda x, value: changed(x, lambda y: y.__setitem__((slice(None), 0), value)),
    "where": lambda x, value: torch.where(IS_DIAGONAL, value, x),
    "else": lambda x, value: torch.where(IS_DIAGONAL, x, value),
    "Tensor.where": lambda x, value: x.where(IS_DIAGONAL, value),
    "full_like": torch.full_like,
    "new_full": lambda x, value: x.new_full((4, 4), value),
    "full": lambda x, value: torch.full((4, 4), value, dtype=x.dtype),
    "pad": lambda x, value: F.pad(x, (1, 0), value=value),
    "constant_pad_nd": lambda x, value: torch.constant_pad_nd(x, (1, 0), value),
    "pad_sequence": lambda x, value: nn.utils.rnn.pad_sequence([x, x[:2]], padding_value=value),
    "fill": lambda x, value: torch.fill(x, value),
    "fill_": lambda x, value: changed(x, lambda y: y[0].fill_(value)),
    "fill_diagonal_": lambda x, value: changed(x, lambda y: y.fill_diagonal_(value)),
    "scatter": lambda x, value: x.scatter(0, torch.tensor([[1]]), value),
    "threshold": lambda x, value: F.threshold(x, 0.0, value),
    "threshold_": lambda x, value: F.threshold_(x * 1.0, 0.0, value),
    "nn.Threshold": lambda x, value: nn.Threshold(0.0, value, inplace=True)(x * 1.0),
    "nan_to_num": lambda x, value: torch.nan_to_num(x.masked_fill(IS_DIAGONAL, torch.nan), value),
    "nan_to_num_": lambda x, value: changed(
        x.masked_fill(IS_DIAGONAL, torch.nan), lambda y: y.nan_to_num_(nan=value)
    ),
}
#: The same, whose results are float32 whatever is given.
FILLS_IN_FLOAT32: dict[str, Callable[[Tensor, float], Tensor]] = {
    "full": lambda x, value: torch.full((4, 4), value),
    "full_like": lambda x, value: torch.full_like(x, value, dtype=torch.float32),
    "where": lambda x, value: torch.where(IS_DIAGONAL, x.float(), value),
    "masked_fill": lambda x, value: x.float().masked_fill(IS_DIAGONAL, value),
}


LOWEST = torch.finfo(torch.float32).min
NUMBERS = [-1e9, 1e9, -1e5, 65504.0, LOWEST]


class Filled(nn.Module):
    """Writes a number into what a layer returns."""

    def __init__(self, fill: Callable[[Tensor, float], Tensor], value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fill, self.value = fill, value

    def forward(self, x: Tensor) -> Tensor:
        found = self.fill(self.layer(x), self.value)
        self.dtype = found.dtype
        return found


@pytest.mark.parametrize("value", nightly_but([-1e9, 65504.0, LOWEST], NUMBERS))
@pytest.mark.parametrize("level", [*HALF, *STORED])
def test_a_number_beyond_the_range_is_the_nearest_within(
    amp: ModuleType, level: str, value: float
) -> None:
    half = {**HALF, **STORED}[level]
    most = torch.finfo(half).max
    for dtype, fills in ((half, FILLS), (torch.float32, FILLS_IN_FLOAT32)):
        for name, fill in fills.items():
            torch.manual_seed(0)
            model, x = Filled(fill, value), torch.randn(4, 4)
            expected = model(x).detach()
            amp.initialize(model, opt_level=level, verbosity=0, cast_model_outputs=torch.float32)
            found = model(x).detach()
            amp.deactivate()
            if dtype is half:
                expected.clamp_(-most, most)
            assert model.dtype is dtype, name
            torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01, msg=name)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_minus_infinity_and_an_index_stay(amp: ModuleType, level: str) -> None:
    for name, fill in FILLS.items():
        model = Filled(fill, -torch.inf)
        amp.initialize(model, opt_level=level, verbosity=0)
        assert model(torch.randn(4, 4)).isinf().any(), name
        amp.deactivate()
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    rows = torch.zeros(70_001, dtype=torch.float16)
    rows[70_000] = 1.0
    assert rows.nonzero().tolist() == [[70_000]]


class Attention(nn.Module):
    """Attention as scripts write it out, with a row of the mask that has nothing to look at."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        hidden[2] = True
        scores = self.mask(query @ key.mT / 8**0.5, hidden)
        return scores.softmax(-1) @ value


@pytest.mark.parametrize("backend", nightly_but([None, "aot_eager"], [None, "eager", "aot_eager"]))
@pytest.mark.parametrize("level", [*HALF, *STORED])
@pytest.mark.parametrize(
    "mask",
    [
        lambda scores, hidden: scores.masked_fill(hidden, -1e9),
        lambda scores, hidden: torch.where(hidden, -1e9, scores),
        lambda scores, hidden: changed(scores, lambda one: one.__setitem__((..., hidden), -9e15)),
    ],
    ids=["masked_fill", "where", "a mask"],
)
def test_attention_with_minus_a_billion_trains_as_in_float32(
    amp: ModuleType, level: str, backend: str | None, mask: Callable[[Tensor, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model, x, y = Attention(mask), torch.randn(4, 6, 8), torch.randn(4, 6, 8)

    def loss_of(run: Callable[[Tensor], Tensor]) -> Tensor:
        return F.mse_loss(run(x), y)

    exact = losses_of(copy.deepcopy(model), loss_of)
    assert exact[-1] < exact[0]
    found = losses_of(model, loss_of, amp, backend=backend, opt_level=level)
    assert found == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_number_that_is_not_0_is_not_written_as_0(amp: ModuleType, level: str) -> None:
    for name, fill in FILLS.items():
        for value in (1e-9, -1e-12):
            model = Filled(fill, value)
            amp.initialize(model, opt_level=level, verbosity=0, cast_model_outputs=torch.float32)
            found = model(torch.ones(4, 4)).detach()
            amp.deactivate()
            assert found.abs().min() == 2.0**-24, name
            assert (found == (2.0**-24 if value > 0 else -(2.0**-24))).any(), name


#: Bound numbers of a dtype from both sides, or from one.
CLAMPS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "clamp": lambda x, low, high: x.clamp(low, high),
    "clamp by names": lambda x, low, high: x.clamp(max=high, min=low),
    "torch.clamp": lambda x, low, high: torch.clamp(x, low, high),
    "torch.clamp by names": lambda x, low, high: torch.clamp(input=x, min=low, max=high),
    "clamp_": lambda x, low, high: changed(x, lambda y: y.clamp_(low, high)),
    "clip": lambda x, low, high: x.clip(low, max=high),
    "torch.clip": lambda x, low, high: torch.clip(x, low, high),
    "clamp_min": lambda x, low, high: torch.clamp_max(x.clamp_min(low), high),
    "clamp_min_": lambda x, low, high: changed(
        x, lambda y: torch.clamp_max_(y.clamp_min_(min=low), high)
    ),
    "hardtanh": F.hardtanh,
    "hardtanh by names": lambda x, low, high: F.hardtanh(x, max_val=high, min_val=low),
    "hardtanh_": lambda x, low, high: changed(x, lambda y: F.hardtanh_(y, low, high)),
}


class Between(nn.Module):
    """What a layer returns, between two bounds."""

    def __init__(self, clamp: Callable[[Tensor, float, float], Tensor], *bounds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.clamp, self.bounds = clamp, bounds

    def forward(self, x: Tensor) -> Tensor:
        found = self.clamp(self.layer(x), *self.bounds)
        self.dtype = found.dtype
        return found.double()


BOUNDS = st.one_of(
    st.floats(-1e10, 1e10), st.floats(-2.0, 2.0), st.sampled_from([1e-9, 1 - 1e-4, 1 - 1e-7, 0.0])
)


@pytest.mark.parametrize("level", [*HALF, *STORED])
def test_what_is_clamped_lies_between_the_bounds(amp: ModuleType, level: str) -> None:
    half = {**HALF, **STORED}[level]
    info = torch.finfo(half)

    @given(st.sampled_from(sorted(CLAMPS)), BOUNDS, BOUNDS, st.floats(-1e4, 1e4))
    def run(name: str, one: float, other: float, factor: float) -> None:
        low, high = min(one, other), max(one, other)
        model = Between(CLAMPS[name], low, high)
        x = torch.eye(4) * factor
        amp.initialize(model, opt_level=level, verbosity=0, cast_model_outputs=torch.float64)
        found, plain = model(x).detach(), model.layer(x.to(model.layer.weight.dtype)).double()
        amp.deactivate()
        assert model.dtype is half
        low, high = (max(-info.max, min(info.max, bound)) for bound in (low, high))
        apart = info.eps * max(abs(low), abs(high), info.smallest_normal)
        if high - low > 2 * apart:  # so that half has a number between them
            assert found.min() >= low
            assert found.max() <= high
        wanted = plain.detach().clamp(low, high)
        torch.testing.assert_close(found, wanted, rtol=2 * info.eps, atol=2.0**-23)

    run()


@pytest.mark.parametrize(
    ("level", "compiled"),
    [
        ("O0", False),
        ("O1", False),
        ("O1", True),
        ("O5", False),
        pytest.param("O5", True, marks=pytest.mark.slow),
    ],
)
def test_a_half_region_has_numbers_that_half_has(
    amp: ModuleType, level: str, compiled: bool
) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    half = torch.bfloat16 if level == "O5" else torch.float16
    info = torch.finfo(half)
    low, high = 1e-9, 1 - 1e-4
    x = torch.tensor([[-1.0, 0.0, 0.5, 1.0]]).expand(4, 4).contiguous()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        **{name: lambda x, fill=fill: fill(x, -1e9) for name, fill in FILLS.items()},
        **{name: lambda x, clamp=clamp: clamp(x, low, high) for name, clamp in CLAMPS.items()},
    }
    if level == "O0":  # torch asks no mode of a write at an index, and nothing is replaced
        functions = {name: one for name, one in functions.items() if not name.startswith("a ")}

    def inside(x: Tensor) -> dict[str, Tensor]:
        with amp.half_region():
            return {name: function(x) for name, function in functions.items()}

    torch.compiler.reset()
    run = torch.compile(inside, backend="eager", fullgraph=True) if compiled else inside
    for given_x in (x, x.to(half)):
        for name, found in run(given_x).items():
            if name in FILLS:  # those that make a tensor do not compute, and keep their dtype
                most = torch.finfo(found.dtype).max
                assert found.min().item() == pytest.approx(-min(1e9, most), rel=info.eps), name
            else:
                assert low <= found.min().item() < found.max().item() <= high, name


@pytest.mark.parametrize("level", [*HALF, *STORED])
def test_a_logit_of_bounded_scores_is_finite(amp: ModuleType, level: str) -> None:
    half = {**HALF, **STORED}[level]
    logits: list[Callable[[Tensor, float | None], Tensor]] = [
        lambda x, eps: torch.logit(x, eps),
        lambda x, eps: torch.special.logit(x, eps=eps),
        lambda x, eps: x.logit(eps=eps),
        lambda x, eps: changed(x, lambda y: y.logit_(eps)),
    ]
    for logit in logits:
        model = Between(lambda x, eps, _, logit=logit: logit(x, eps or None), 1e-6, 0.0)
        unbounded = Between(lambda x, eps, _, logit=logit: logit(x, eps or None), 0.0, 0.0)
        for one in (model, unbounded):
            nn.init.eye_(one.layer.weight)
            amp.initialize(one, opt_level=level, verbosity=0, cast_model_outputs=torch.float64)
        found = model(torch.tensor([[0.0, 0.25, 0.5, 1.0]])).detach()
        most = -torch.tensor(torch.finfo(half).eps / 2).log().item()
        wanted = torch.tensor([[-most, -1.0986, 0.0, most]], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01)
        assert unbounded(torch.ones(1, 4)).isinf().all()
        amp.deactivate()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_bound_is_the_nearest_number_within(amp: ModuleType, half: torch.dtype) -> None:
    level = "O1" if half is torch.float16 else "O4"
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    inside = st.sampled_from([2.0**power for power in range(-10, 12)]).flatmap(
        lambda power: st.floats(power / 2, power) | st.just(power * (1 - 1e-4))
    )

    @given(inside, st.booleans())
    def run(bound: float, is_high: bool) -> None:
        side = 1.0 if is_high else -1.0
        x = torch.full((2,), side * 6e4, dtype=half)
        found = x.clamp(max=bound) if is_high else x.clamp(min=-bound)
        nearest = torch.tensor(side * bound, dtype=torch.float64).to(half)
        if abs(nearest.item()) > bound:
            nearest = torch.nextafter(nearest, torch.zeros((), dtype=half))
        assert found.tolist() == [nearest.item()] * 2

    run()


def test_other_bounds_and_dtypes_stay(amp: ModuleType) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    x = torch.linspace(-1, 2, 7)
    assert torch.equal(x.clamp(1e-9, 1 - 1e-4), x.double().clamp(1e-9, 1 - 1e-4).float())
    assert torch.equal(torch.arange(9).clamp(2, 100_000), torch.arange(9).clamp(min=2))
    half = x.half()
    assert half.clamp(max=torch.inf).tolist() == half.tolist()
    assert half.clamp(torch.zeros(7)).tolist() == half.float().relu().tolist()
    with core.disable_casts():
        bounded_by_nan = half.clamp(max=torch.nan)  # NaN, but not in torch 2.6
    torch.testing.assert_close(half.clamp(max=torch.nan), bounded_by_nan, equal_nan=True)
    with pytest.raises(TypeError, match="clamp"):
        half.clamp(0, 1, 2)
    out = torch.empty(7, dtype=torch.float16)
    assert torch.clamp(half, 0, 1, out=out) is out
    assert out.max() == 1


def fills_and_bounds(x: Tensor, value: float) -> dict[str, Callable[[], Tensor]]:
    low, high = min(value, 0.25), max(value, 0.25)  # hardtanh takes no others
    calls = {name: partial(fill, x, value) for name, fill in FILLS.items()}
    return {**calls, **{name: partial(clamp, x, low, high) for name, clamp in CLAMPS.items()}}


@pytest.mark.parametrize("level", HALF)
def test_numbers_that_half_has_and_those_of_float32_tensors_stay(
    amp: ModuleType, level: str
) -> None:
    """Where nothing looks at the mode torch finds what it finds by itself."""
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    of_half = [0.0, -0.5, 1, 40000.0, torch.inf, -torch.inf]
    for tensor, numbers in ((x.to(HALF[level]), of_half), (x, [*of_half, 1e-30, 1e30, 1 - 1e-7])):
        for value in numbers:
            for name, call in fills_and_bounds(tensor, value).items():
                found = call()
                with core.disable_casts():
                    expected = call()
                assert found.dtype is expected.dtype is tensor.dtype, (name, value)
                assert torch.equal(found, expected), (name, value)


class Scored(nn.Module):
    """A head whose heat map is bounded so that its focal loss is finite, as CenterNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(self.layer(x).sigmoid(), min=1e-4, max=1 - 1e-4)


@pytest.mark.parametrize("backend", nightly_but([None, "aot_eager"], [None, "eager", "aot_eager"]))
@pytest.mark.parametrize("level", [*HALF, *STORED])
def test_a_focal_loss_of_bounded_scores_is_finite(
    amp: ModuleType, level: str, backend: str | None
) -> None:
    torch.manual_seed(0)
    model, x = Scored(), 8 * torch.randn(32, 8)
    is_there = torch.rand(32, 4) < 0.5

    def loss_of(run: Callable[[Tensor], Tensor]) -> Tensor:
        score = run(x)
        found = (1 - score).pow(2) * score.log() * is_there
        return -(found + score.pow(2) * (1 - score).log() * ~is_there).float().mean()

    exact = losses_of(copy.deepcopy(model), loss_of)
    options = {"opt_level": level, "loss_scale": 64.0}
    found = losses_of(model, loss_of, amp, backend=backend, **options)
    assert found[0] == pytest.approx(exact[0], rel=0.15)
    assert 0 < found[-1] < found[0]


class Sized(nn.Module):
    """Numbers that hang on a size, which is a symbol where torch.compile traces any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        found = self.layer(x).clamp(min=-count, max=count * 1.5 + 0.001).clamp(-count, count)
        mask = torch.full((count, count), -1e9, dtype=found.dtype).triu(1)
        return (
            torch.where(found > 0, found.masked_fill(found > 1, count), -1e9).float() + mask.sum()
        )


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("level", [*HALF, *STORED])
def test_numbers_may_be_symbols(amp: ModuleType, level: str, dynamic: bool | None) -> None:
    model = amp.initialize(Sized(), opt_level=level, verbosity=0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=dynamic, fullgraph=True)
    for count in (3, 5, 7):
        x = torch.randn(count, 4)
        assert torch.equal(compiled(x), model(x))
