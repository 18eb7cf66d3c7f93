"""What is advised against an overflow is what mends it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plants import WIDTH, Scores, around, prepared, square, the_cause, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_patch.debug import Cause
from amp_patch.debug.cause import with_one_limit
from amp_patch.debug.places import Places
from amp_patch.debug.ranges import range_of
from amp_patch.debug.trace import _together, tracer
from amp_patch.scaling.scale_rule import ScaleRule


class Normalized(nn.Module):
    """Divides by a mean; an eps that float16 cannot hold is to keep that above 0."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.half() * 0.0
        return x / (x.abs().mean() + 1e-8)


def test_no_rule_of_a_division_is_advised_where_its_divisor_was_rounded_to_0(amp) -> None:
    model, optimizer = prepared(amp, around(Normalized()), "O1")
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.module, cause.operator, cause.mended_by) == ("1.1", "div", "module")
    assert "float_region" in cause.advice()
    assert "rules=" not in cause.advice()
    # of digits or of range? of 1 - 0.9999 bfloat16 makes 0 as well
    assert "Or try O4" in cause.advice()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_weight_that_float32_cannot_hold_is_not_said_to_be_too_large_for_float16(amp, level):
    model = around(nn.Tanh())
    model[1][0].weight.data.fill_(torch.inf)
    model, optimizer = prepared(amp, model, level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.operator) == ("weight", "weight")
    assert "learning rate" in cause.advice()
    assert ("too large for float16" in cause.advice()) == (level == "O2")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_that_no_scale_makes_fit_is_said_to_be_large(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), level)
    train(amp, model, optimizer, lambda outputs: square(outputs + 1.0) * 1e7)
    cause = the_cause(amp)
    assert cause.where == ("loss" if level == "O1" else "backward")
    assert "even at a loss scale of 1" in cause.advice()


def test_a_loss_that_float32_cannot_hold_times_the_scale_is_said_to_be_large(amp) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1", loss_scale=65536.0)
    train(amp, model, optimizer, lambda outputs: (outputs.float() + 1.0).mean() * 1e36)
    cause = the_cause(amp)
    assert (cause.where, cause.operator, cause.is_large) == ("loss", "mul", True)
    assert cause.operands[0].name == "loss"
    assert "is the loss a sum" in cause.advice()
    assert "division by zero" not in cause.advice()


@pytest.mark.parametrize("dims", [(), (-1,), ((0, 1),), (0, True)])
def test_a_sum_that_torch_computes_in_float32_is_not_advised_to_be(amp, dims: Any) -> None:
    model, optimizer = prepared(amp, nn.Linear(WIDTH, WIDTH), "O1", loss_scale=65536.0)
    train(amp, model, optimizer, lambda outputs: outputs.sum(*dims).sum() * 2.0)
    cause = the_cause(amp)
    assert (cause.where, cause.operator) == ("loss", "sum")
    assert 1.0 < (cause.fits or 0.0) <= 16384.0
    assert "only the loss scale" in cause.advice()


def test_a_sum_of_half_and_float32_losses_is_not_advised_to_be_in_float32(amp) -> None:
    model, optimizer = prepared(amp, nn.Linear(WIDTH, WIDTH), "O1", loss_scale=65536.0)
    train(amp, model, optimizer, lambda outputs: outputs.mean() + 10.0 * outputs.float().mean())
    cause = the_cause(amp)
    assert (cause.where, cause.operator, cause.fits) == ("loss", "add", 32768.0)
    assert "only the loss scale" in cause.advice()


def test_a_function_is_advised_to_run_in_float32_where_that_is_enough() -> None:
    enough = Cause("forward", 1.0, operator="softmax", mended_by="module", by_rule=True)
    assert enough.title().startswith("the model itself: `softmax` returned")
    assert 'rules={"softmax": "float"}' in enough.advice()
    assert "rules=" not in replace(enough, by_rule=False).advice()


class Amplified(nn.Module):
    """A product beyond float16, and what makes it small again: after a linear layer, or at once."""

    def __init__(self, layer: bool, in_place: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH) if layer else nn.Identity()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.half() + 2.0
        y = x.mul_(6e4) if self.in_place else x * 6e4
        return self.layer(y) * 1e-5


@pytest.mark.parametrize(("layer", "in_place"), [(False, False), (True, False), (False, True)])
def test_a_rule_of_a_function_is_advised_where_it_mends(amp, layer: bool, in_place: bool) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        plant = Amplified(layer, in_place)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), plant, nn.Linear(WIDTH, 1))

    traced, optimizer = prepared(amp, model(), "O1")
    train(amp, traced, optimizer)
    cause = the_cause(amp)
    assert (cause.module, cause.operator) == ("1", "mul")
    mended, optimizer = prepared(amp, model(), "O1", rules={"mul": "float"})
    train(amp, mended, optimizer)
    assert ("rules=" in cause.advice()) == (not amp.step_was_skipped(optimizer))


class Recurrent(nn.Module):
    """Hands a number that float16 cannot hold from one call of its layer to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)
        nn.init.eye_(self.cell.weight).data.mul_(20.0)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.cell(x)
        return x * 1e-7


def test_what_a_module_hands_on_is_advised_to_stay_in_the_module_around_it(amp) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return around(nn.Sequential(nn.Tanh(), Recurrent()))

    traced, optimizer = prepared(amp, model(), "O2")
    train(amp, traced, optimizer)
    cause = the_cause(amp)
    assert (cause.module, cause.around, cause.mended_by) == ("1.1.1.cell", "1.1.1", "module")
    assert "Compute `1.1.1` in" in cause.advice()

    mended, optimizer = prepared(amp, model(), "O2", rules={"modules": cause.rule})
    train(amp, mended, optimizer)
    assert not amp.step_was_skipped(optimizer)


class Sizes(nn.Module):
    """Returns what float16 cannot hold, as a detector's sizes of boxes are."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.exp(self.layer(x).clamp(-1.0, 1.0) + 13.0)
        return sizes.float() if self.casts else sizes


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_model_returns_is_advised_to_stay_in_float32(amp, casts: bool, depth: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        last = nn.Sequential(nn.Tanh(), Sizes(casts)) if depth else Sizes(casts)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), last)

    def loss(outputs: Tensor) -> Tensor:
        return outputs.log().mean()

    traced, optimizer = prepared(amp, model(), "O2")
    train(amp, traced, optimizer, loss)
    cause = the_cause(amp)
    name = "1.1" if depth else "1"
    assert (cause.module, cause.rule) == (name, {name: "float"})
    assert "Leave its result in float32" in cause.advice()
    mended, optimizer = prepared(amp, model(), "O2", rules={"modules": cause.rule})
    train(amp, mended, optimizer, loss)
    assert not amp.step_was_skipped(optimizer)


def test_targets_that_the_script_makes_in_half_are_named_as_what_may_be_to_blame(amp) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O2")
    rewards = torch.full((4, 1), 30000.0).half().cumsum(0).float()
    train(amp, model, optimizer, lambda outputs: square(outputs.float() - rewards))
    cause = the_cause(amp)
    assert cause.where == "loss"
    assert "or a cast of the script's, has made what has no gradients" in cause.advice()


def test_one_loss_scale_is_advised_for_all_causes_of_a_rule() -> None:
    def cause(name: str, fits: float, rule: ScaleRule) -> Cause:
        return Cause("backward", 2.0**16, operator=name, fits=fits, scaling=rule)

    dynamic, static = ScaleRule(), ScaleRule(dynamic=False)
    causes = [
        cause("mul", 8192.0, dynamic),
        cause("linear", 1024.0, dynamic),
        cause("exp", 512.0, static),
        replace(cause("div", 4.0, dynamic), scale=4.0),  # not of the scale
        cause("add", 2048.0, static),
    ]
    first, second, third, other, last = (one.advice() for one in with_one_limit(causes))
    assert "a scale of 8192 is no overflow" in first
    assert first.endswith("To skip none, call amp.initialize(..., max_loss_scale=1024).")
    assert "a scale of 1024 is no overflow" in second
    assert "max_loss_scale" not in second
    assert "Call amp.initialize(..., loss_scale=512)" in third
    assert "loss_scale" not in other
    assert last == "It is only the loss scale: a scale of 2048 is no overflow."
    assert [one.key for one in with_one_limit(causes)] == [one.key for one in causes]


def test_what_two_steps_need_is_the_wider_module_around() -> None:
    inner = Cause("forward", 1.0, module="a.b.c", mended_by="module")
    around_it, wide = replace(inner, around="a.b"), replace(inner, around="a")
    for order in itertools.permutations((inner, around_it, wide)):
        assert functools.reduce(_together, order).rule == {"a": "float"}


class RoundedToZero(nn.Module):
    """The logarithm of what float16 rounds to 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log((x * 1e-9).abs())


class Difference(nn.Module):
    """Divides by what is a little above 0 until bfloat16 rounds it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x, dtype=torch.float32)
        return (x / (ones - (ones * 0.999).to(self.proj(x).dtype))).to(x.dtype)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_level_of_bfloat16_is_not_advised_for_its_range(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(Difference()), level, loss_scale=1.0)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.module, cause.operator) == ("forward", "1.1", "div")
    assert cause.mended_by == "module"
    assert "three digits" in cause.advice()
    assert "range of float32" not in cause.advice()
    assert "is the loss a sum" not in cause.advice()


class OwnCast(nn.Module):
    """Casts to float16 by itself, whatever the level."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x + 1.0).float() * 1e6).half().to(x.dtype)


class OwnCastBackward(nn.Module):
    """Casts to float16 by itself numbers that are 0, and whose gradients it does not hold."""

    def forward(self, x: Tensor) -> Tensor:
        half = (x * 0.0).float().half()
        steep = half.float() * 1e7
        return x + (steep - steep.detach()).to(x.dtype)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_cast_of_the_scripts_own_is_blamed_for_its_backward(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(OwnCastBackward()), level)
    train(amp, model, optimizer, lambda outputs: outputs.float().sum())
    cause = the_cause(amp)
    assert (cause.where, cause.operator, cause.mended_by) == ("backward", "cast", "script")
    assert "half.float()" in cause.line
    assert "script itself has cast to float16 what is cast back there" in cause.advice()
    assert "gradients below 65504" in cause.advice()
    assert not any(one in cause.advice() for one in ("O1", "O2", "O4", "O5", "float_region"))
    assert cause.rule == {}


class Steep(nn.Module):
    """Hands large gradients to its weights, by a view of one too."""

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        self.proj, self.is_view = nn.Linear(WIDTH, WIDTH), is_view

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.proj.weight.t() if self.is_view else self.proj(x)
        return x + (y * 0.0).to(x.dtype) + ((y - y.detach()).float() * 1e7).to(x.dtype)


@pytest.mark.parametrize("is_view", [False, True])
def test_half_weights_are_the_levels_cast_and_not_the_scripts(amp, is_view: bool) -> None:
    model, optimizer = prepared(amp, around(Steep(is_view)), "O2")
    train(amp, model, optimizer, lambda outputs: outputs.float().sum())
    cause = the_cause(amp)
    assert (cause.where, cause.mended_by) == ("backward", "level")
    assert "O5: bfloat16 has the range" in cause.advice()


class CastAfterProduct(OwnCast):
    """Squares in the level's half what it casts to float16 in another line."""

    def forward(self, x: Tensor) -> Tensor:
        large = (x * 0.0 + 300.0) @ (x * 0.0 + 300.0).T
        return x + large.half().float().sum().to(x.dtype) * 0.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_line_of_the_cast_is_told_where_it_is_another(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(CastAfterProduct()), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.operator, cause.mended_by) == ("matmul", "script")
    assert "@" in cause.line
    assert "large.half()" in cause.cast_at
    assert f"casts to float16 at {cause.cast_at}, also" in cause.advice()


class OwnHalf(nn.Module):
    """Computes in float16 by itself, whatever the level."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.sign(x).half() * 1e3 * 1e3).to(x.dtype)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_no_level_is_advised_against_a_cast_of_the_scripts_own(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(OwnCast()), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.operator, cause.mended_by) == ("cast", "script")
    assert "half()" in cause.line
    assert "script itself casts" in cause.advice()
    assert not any(one in cause.advice() for one in ("O1", "O2", "O4", "O5"))


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_no_level_is_advised_where_the_script_computes_in_another_half_than_it(
    amp, level: str
) -> None:
    model, optimizer = prepared(amp, around(OwnHalf()), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.operator, cause.dtype, cause.mended_by) == ("mul", "float16", "module")
    assert "float_region" in cause.advice()
    assert not any(one in cause.advice() for one in ("O1", "O2", "O4", "O5", "digits"))


def test_what_no_precision_mends_in_one_step_is_not_said_to_be_mended_in_the_next(amp) -> None:
    class Now(RoundedToZero):
        is_zero = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 0.0 if self.is_zero else x)

    model, optimizer = prepared(amp, nn.Sequential(nn.Linear(WIDTH, WIDTH), Now()), "O1")
    for is_zero in (False, True, False):
        model[1].is_zero = is_zero
        train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.operator, cause.mended_by) == ("log", "nothing")


def test_an_overflow_that_no_scale_mends_is_told_apart_from_one_of_the_scale(amp) -> None:
    model, optimizer = prepared(amp, nn.Linear(WIDTH, WIDTH), "O2", loss_scale=65536.0)
    for factor in (8.0, 1e7, 8.0, 32.0):
        train(amp, model, optimizer, lambda outputs, f=factor: (outputs + 1.0).sum() * f)
    first, second = (cause for cause, _ in amp.overflow_report().causes)
    assert first.is_loss_scale
    assert first.scale == 65536.0
    assert not second.is_loss_scale
    assert first.operator == second.operator
    # the scale that is said to fit fits all of them
    again, optimizer = prepared(amp, nn.Linear(WIDTH, WIDTH), "O2", loss_scale=first.fits)
    train(amp, again, optimizer, lambda outputs: (outputs + 1.0).sum() * 32.0)
    assert not amp.step_was_skipped(optimizer)


class Spectral(nn.Module):
    """A division of complex numbers by 0."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x.float())
        return (spectrum / (spectrum.conj() * 0.0)).real


def test_an_operator_on_complex_numbers_is_named(amp) -> None:
    model, optimizer = prepared(amp, around(Spectral()), "O1")
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.module, cause.operator) == ("1.1", "div")
    assert cause.operands[0].shape == (4, WIDTH)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_modules_that_overflow_each_by_itself_are_advised_together(amp, level: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(around(Scores()), around(Scores()), nn.Linear(WIDTH, WIDTH))

    traced, optimizer = prepared(amp, model(), level)
    train(amp, traced, optimizer)
    cause = the_cause(amp)
    assert (cause.module, cause.also, cause.mended_by) == ("0.1.1", ("1.1.1",), "module")
    assert "`0.1.1` and `1.1.1`, each of which" in cause.advice()

    mended, optimizer = prepared(amp, model(), level, rules={"modules": cause.rule})
    train(amp, mended, optimizer)
    assert not amp.step_was_skipped(optimizer)


def test_what_two_steps_need_in_float32_is_one_advice(amp) -> None:
    class Now(Scores):
        is_on = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.is_on else x

    model, optimizer = prepared(amp, nn.Sequential(Scores(), Now(), Now()), "O1")
    for later in model[1:]:
        later.is_on = True
        train(amp, model, optimizer)
        later.is_on = False
    assert the_cause(amp).rule == {"0": "float", "1": "float", "2": "float"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([math.nan, math.inf], "x: float32 [2], only inf and NaN"),
        ([math.nan, 2.0], "x: float32 [2], magnitudes 2 to 2, and NaN"),
        ([1.0, 2.0], "x: float32 [2], magnitudes 1 to 2"),
    ],
)
def test_a_range_says_what_a_tensor_holds(values: list[float], said: str) -> None:
    assert str(range_of("x", torch.tensor(values))) == said


def test_no_operator_is_told_of_a_weight_and_of_a_loss_by_itself() -> None:
    result = range_of("loss", torch.tensor(math.nan))
    assert "\n  loss: float32 [], only NaN\n" in str(Cause("loss", 1.0, result=result))
    weight = Cause("weight", 1.0, operator="weight", result=range_of("weight", torch.ones(1)))
    assert "\n  weight: float32 [1], " in str(weight)
    called = Cause("forward", 1.0, operator="exp", result=range_of("result", torch.ones(1)))
    assert "\n  operator: result: float32 [1], " in str(called)


def test_a_product_in_the_loss_is_advised_to_be_in_a_region_where_functions_cast(amp) -> None:
    def similarities(outputs: Tensor) -> Tensor:
        large = outputs.float() * 0.0 + 600.0
        return (large @ large.T).mean() * 1e-6

    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    train(amp, model, optimizer, similarities)
    cause = the_cause(amp)
    assert (cause.where, cause.in_half) == ("loss", "mm")
    assert "compute the loss in `with amp.float_region():`" in cause.advice()
    before = tracer.overflows
    with amp.float_region():
        train(amp, model, optimizer, similarities)
    assert tracer.overflows == before


def test_what_the_script_made_too_large_for_float16_before_a_part_is_told_so(amp) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    train(amp, lambda x: model[1](model[0](x) * 1e6), optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.module, cause.dtype) == ("input", "1", "float16")
    assert "float_region" in cause.advice()
    assert "the data" in cause.advice()


class Probabilities(nn.Module):
    """Probabilities that half precision rounds to 0, though its inputs are small."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.layer, self.gap = nn.Linear(WIDTH, WIDTH), gap

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.linspace(-self.gap, 0.0, WIDTH).to(x)
        return torch.softmax(self.layer(x) + ramp, -1)


class Sigmoid(nn.Module):
    """One that half precision rounds to 1."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.layer, self.gap = nn.Linear(WIDTH, WIDTH), gap

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layer(x) + self.gap)


LOSSES_OF_ROUNDED = [
    (Probabilities, "O2", lambda p: -p.log().mean(), (0.0,)),
    (Probabilities, "O2", lambda p: p.sqrt().mean(), (0.0,)),
    (Probabilities, "O2", lambda p: -p[:, ::3].t().log2().mean(), (0.0,)),
    (Probabilities, "O2", lambda p: (1e-12 / p).mean(), (0.0,)),
    (Sigmoid, "O1", lambda p: -(1.0 - p).log().mean(), (1.0,)),
    (Sigmoid, "O1", lambda p: -(-p).log1p().mean(), (1.0,)),
    (Sigmoid, "O1", lambda p: p.float().logit().mean() * 1e-3, (1.0,)),
]


@pytest.mark.parametrize(("model", "level", "loss_of", "rounded"), LOSSES_OF_ROUNDED)
def test_a_loss_of_what_half_has_rounded_to_0_or_1_is_said_to_be_of_precision(
    amp, model: type[nn.Module], level: str, loss_of: Any, rounded: tuple[float, ...]
) -> None:
    torch.manual_seed(0)
    traced, optimizer = prepared(amp, model(12.0 if level == "O1" else 30.0), level)
    train(amp, traced, optimizer, loss_of)
    cause = the_cause(amp)
    assert (cause.where, cause.rounded, cause.rule) == ("loss", rounded, {"": "float"})
    assert "precision has no part" not in cause.advice()
    assert "log_softmax" in cause.advice()
    assert "Else look at the loss and its targets" in cause.advice()  # it may be chance

    torch.manual_seed(0)
    mended, optimizer = prepared(
        amp, model(12.0 if level == "O1" else 30.0), level, rules={"modules": cause.rule}
    )
    train(amp, mended, optimizer, loss_of)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize(
    ("level", "options", "half"),
    [
        ("O2", {}, "float16"),
        ("O2", {"cast_model_type": torch.bfloat16}, "bfloat16"),
        ("O1", {}, "float16"),
        ("O4", {"loss_scale": 1.0}, "bfloat16"),
    ],
)
def test_advice_goes_by_what_the_level_casts_to_not_by_its_name(
    amp, level: str, options: dict[str, Any], half: str
) -> None:
    model, optimizer = prepared(amp, Sigmoid(9.0), level, **options)
    train(amp, model, optimizer, lambda p: -(1.0 - p.float()).log().mean())
    cause = the_cause(amp)
    assert (cause.half, cause.casts_functions) == (half, level != "O2")
    assert cause.advice().startswith(f"{half} rounds numbers to 1 that the model returns")


class Many(nn.Module):
    """Returns numbers of which half precision rounds some to 0, to 1 and to -1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.layer.weight.zero_()[3, 3] = 1.0
            self.layer.bias.copy_(torch.tensor([1e-9, 1.0 - 1e-5, 1e-5 - 1.0, 0.3] * 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def to_itself(outputs: Tensor) -> Tensor:
    """Return a mean distance of points to others, of which one is the same."""
    points = outputs.float()
    others = points.detach().roll(1, 0)
    others[0] = points[0].detach()
    return (points - others).square().sum(1).sqrt().mean()


@pytest.mark.parametrize(
    ("loss_of", "operator"),
    [
        (to_itself, "sqrt"),
        (lambda y: (y.float() - y.float().detach()).sum(1).log().mean(), "log"),
        (
            lambda y: F.mse_loss((y * 300.0) @ (y * 300.0).T, torch.zeros(len(y), len(y))),
            "mse_loss",
        ),
        (lambda y: y.float().mean() / (y.float() * 0.0).sum(), "div"),
    ],
    ids=["distance", "logarithm", "product", "quotient"],
)
def test_numbers_that_half_rounds_by_chance_are_not_blamed(
    amp, loss_of: Callable[[Tensor], Tensor], operator: str
) -> None:
    model, optimizer = prepared(amp, Many(), "O1")
    train(amp, model, optimizer, loss_of)
    cause = the_cause(amp)
    assert (cause.where, cause.rounded, cause.rule) == ("loss", (), {})
    assert operator in (cause.operator, cause.spoiled_by)
    assert "Look at the loss and its targets" in cause.advice()


def test_angles_of_cosines_that_half_has_rounded_to_1_are_to_be_kept_from_it(amp) -> None:
    torch.manual_seed(0)
    model, optimizer = prepared(amp, Sigmoid(12.0), "O1")
    train(amp, model, optimizer, lambda cosines: cosines.float().acos().mean())
    cause = the_cause(amp)
    assert (cause.operator, cause.rounded, cause.rule) == ("acos", (1.0,), {"": "float"})
    assert "x.float().clamp(-1 + 1e-6, 1 - 1e-6).acos()" in cause.advice()


def test_no_rule_is_advised_where_float32_rounds_what_a_model_returns_as_well(amp) -> None:
    torch.manual_seed(0)
    model, optimizer = prepared(amp, Sigmoid(16.8), "O1")
    train(amp, model, optimizer, lambda p: -(1.0 - p.float()).log().mean())
    cause = the_cause(amp)
    assert (cause.rounded, cause.rule) == ((1.0,), {})
    assert "float32 is not enough" in cause.advice()


def test_a_loss_of_0_that_a_model_returns_in_every_precision_is_to_be_seen_at_float32(amp) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O2")
    train(amp, model, optimizer, lambda outputs: (outputs.float() * 0.0).log().mean())
    cause = the_cause(amp)
    assert (cause.rounded, cause.rule) == ((), {})
    assert "precision has no part" not in cause.advice()
    assert "at O0" in cause.advice()


class Spread(nn.Module):
    """A standard deviation as the difference of large squares, which half precision rounds."""

    def forward(self, x: Tensor) -> Tensor:
        large, apart = (48.0, 0.25) if x.dtype == torch.float16 else (36.0, 1.0)
        x = x * 0.0 + large + apart * (torch.arange(WIDTH) < 3).to(x)
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return x / torch.sqrt(variance + 1e-5)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_no_wider_range_is_advised_where_a_number_was_rounded_to_below_0(amp, level: str) -> None:
    torch.manual_seed(0)
    model, optimizer = prepared(amp, around(nn.Sequential(Spread())), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.operator) == ("forward", "sqrt")
    assert ("four digits" if level == "O2" else "three digits") in cause.advice()
    assert "a little above 0 may be 0, or below it" in cause.advice()
    assert not any(one in cause.advice() for one in ("O4", "O5", "range"))


@pytest.mark.parametrize(
    ("operator", "said"), [("acos", "at most 1 may be above it"), ("rsqrt", "or below it")]
)
def test_what_half_rounds_beyond_a_bound_is_told_with_the_bound(operator: str, said: str) -> None:
    cause = Cause(
        "forward",
        1.0,
        operator=operator,
        half="float16",
        casts_functions=True,
        mended_by="module",
        operands=(range_of("operand 0", torch.ones(1)),),
        result=range_of("result", torch.tensor([math.nan])),
    )
    assert said in cause.advice()
    assert "O4" not in cause.advice()
    large = range_of("operand 0", torch.tensor([math.inf]))
    assert "O4" in replace(cause, operands=(large,)).advice()


@pytest.mark.parametrize(("lr", "diverges"), [(1.0, True), (1e-6, False)])
def test_weights_that_grow_are_told_before_any_precision_is(amp, lr: float, diverges: bool) -> None:
    class Later(Scores):
        is_on = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.is_on else x

    model, optimizer = prepared(amp, around(Later()), "O1", loss_scale=1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    train(amp, model, optimizer, lambda outputs: (outputs.float() * 100.0).sum())
    model[1][1].is_on = True
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.growth >= 10.0) == ("forward", diverges)
    assert cause.advice().startswith("The model's largest weight is") == diverges
    assert ("learning rate too high? Train at O0" in cause.advice()) == diverges
    assert (cause.rule == {}) == diverges


def test_what_came_up_before_weights_grew_is_no_matter_of_the_learning_rate() -> None:
    early = Cause("forward", 1.0, module="a", mended_by="module")
    late = replace(early, growth=50.0)
    assert late.advice().startswith("The model's largest weight")
    for order in ((early, late), (late, early)):
        assert _together(*order).advice() == early.advice()


def test_the_steps_that_a_dynamic_scale_needs_are_counted_from_its_first_overflow(amp) -> None:
    model, optimizer = prepared(amp, nn.Linear(WIDTH, WIDTH), "O2", loss_scale="dynamic")
    # beyond float16 from a scale of 32 on
    train(amp, model, optimizer, lambda outputs: (outputs + 1.0).mean() * 5e4, steps=3)
    cause = the_cause(amp)
    assert (cause.is_loss_scale, cause.scale) == (True, 65536.0)
    steps = round(math.log2(65536.0 / (cause.fits or 0.0)))
    assert steps > 3
    assert f"with {steps} steps skipped" in cause.advice()


@pytest.mark.parametrize(
    "options", [{"hysteresis": 3}, {"backoff_factor": 0.1}, {"min_loss_scale": 1024.0}]
)
def test_the_scales_own_rule_counts_the_steps_that_it_needs(amp, options: dict[str, float]) -> None:
    model, optimizer = prepared(amp, nn.Linear(WIDTH, WIDTH), "O2", loss_scale="dynamic", **options)

    def is_skipped() -> bool:
        train(amp, model, optimizer, lambda outputs: (outputs + 1.0).mean() * 5e4, steps=1)
        return bool(amp.step_was_skipped(optimizer))

    found = [is_skipped()]
    advice = the_cause(amp).advice()
    if "min_loss_scale" in options:
        assert "Yours stays at min_loss_scale=1024: leave that out" in advice
        return
    found += [is_skipped() for _ in range(30)]
    assert f"with {sum(found)} steps skipped" in advice
    assert found == sorted(found, reverse=True)  # no later one


def test_gradients_that_meet_the_cast_of_outputs_are_advised_to_leave_these_in_float32(
    amp,
) -> None:
    """As of a Kullback-Leibler divergence; a region around the loss leaves that cast as it is."""

    def divergence(outputs: Tensor) -> Tensor:
        return ((outputs.float() - outputs.float().detach() + 40.0).exp()).mean()

    model, optimizer = prepared(amp, nn.Linear(WIDTH, WIDTH), "O1", loss_scale=2.0)
    train(amp, model, optimizer, divergence)
    assert amp.step_was_skipped(optimizer)
    advice = the_cause(amp).advice()
    assert "leave what the model returns in float32" in advice
    assert "rules={'modules': {'': 'float'}}" in advice
    amp.deactivate()
    rules = {"modules": {"": "float"}}
    model, optimizer = prepared(amp, nn.Linear(WIDTH, WIDTH), "O1", loss_scale=2.0, rules=rules)
    train(amp, model, optimizer, divergence)
    assert not amp.step_was_skipped(optimizer)


def test_a_scale_that_meets_weights_which_grew_is_told_of_the_learning_rate_first() -> None:
    cause = Cause("backward", 65536.0, fits=8.0, growth=100.0)
    assert cause.is_loss_scale
    assert cause.advice().startswith("The model's largest weight is 100 times")
    assert "If it does not: it is only the loss scale" in cause.advice()
    assert replace(cause, growth=1.0).advice().startswith("It is only the loss scale")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_exponential_that_float32_cannot_hold_is_advised_to_subtract(amp, level: str) -> None:
    def by_hand(outputs: Tensor) -> Tensor:
        scores = torch.exp(outputs.float() * 0.0 + 89.0)
        return -torch.log(scores[:, 0] / scores.sum(1)).mean()

    model, optimizer = prepared(amp, around(nn.Tanh()), level)
    train(amp, model, optimizer, by_hand)
    cause = the_cause(amp)
    assert (cause.where, cause.spoiled_by, cause.rule) == ("loss", "exp", {})
    assert "more than 88.7 is inf in float32, too" in cause.advice()
    assert "logsumexp" in cause.advice()
    assert "NaN in the data" not in cause.advice()


class LargePower(nn.Module):
    """An exponential that float32 cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp2(x.float() * 0.0 + 128.0).to(x.dtype)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exponential_in_a_model_that_float32_cannot_hold_is_told_so(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(LargePower()), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.operator, cause.mended_by) == ("forward", "exp2", "nothing")
    assert "`exp2` of more than 128 is inf in float32, too" in cause.advice()


class LargerGradient(torch.autograd.Function):
    """A function of the user's own whose backward multiplies."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 1e9


class HalvedGradient(LargerGradient):
    """One whose backward casts to float16, whatever it is given."""

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return ((grad + 1.0) * 6e4 * 6e4).half()  # in a float region, too


class OwnBackward(nn.Module):
    """Calls an autograd function of the user's own."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_loss_is_questioned_where_a_function_of_the_users_own_multiplies(amp, level) -> None:
    model, optimizer = prepared(amp, around(OwnBackward(LargerGradient)), level)
    train(amp, model, optimizer, lambda outputs: square(outputs + 1.0))
    cause = the_cause(amp)
    assert (cause.where, cause.operator, cause.is_own) == ("backward", "LargerGradient", True)
    assert "is the loss a sum" not in cause.advice()
    assert "look at what it multiplies by" in cause.advice()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_backward_of_the_users_own_that_casts_is_what_to_look_at(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(OwnBackward(HalvedGradient)), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.operator, cause.mended_by) == ("HalvedGradient", "nothing")
    assert "Look whether it casts to float16" in cause.advice()


@pytest.mark.parametrize("in_region", [False, True])
def test_a_loss_of_angles_is_told_to_keep_from_1(amp, in_region: bool) -> None:
    def angles(outputs: Tensor) -> Tensor:
        with amp.float_region() if in_region else contextlib.nullcontext():
            outputs = outputs.float()
            rows = outputs / outputs.norm(dim=-1, keepdim=True)
            return torch.acos(rows @ rows.T).mean()

    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    train(amp, model, optimizer, angles)
    advice = the_cause(amp).advice()
    assert "clamp(-1 + 1e-6, 1 - 1e-6).acos()" in advice
    assert "float_region" not in advice


def test_a_function_of_torchs_is_none_of_the_users_own() -> None:
    inputs = torch.ones(1, requires_grad=True)
    checkpointed = checkpoint(torch.exp, inputs, use_reentrant=True)
    places = [
        Places({}).of_node(one.grad_fn) for one in (checkpointed, LargerGradient.apply(inputs))
    ]
    assert [one.operator for one in places] == ["CheckpointFunction", "LargerGradient"]
    assert [one.is_own for one in places] == [False, True]


class Judging(nn.Module):
    """Computes its loss itself, and may return what that is made of."""

    def __init__(self, size: float, returns_hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.size, self.returns_hidden = size, returns_hidden

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).relu()
        scores = self.last(hidden)
        loss = (scores.float() * self.size).mean()
        shown = {"hidden": hidden, "scores": scores} if self.returns_hidden else {}
        return {"loss": loss, **shown}


@pytest.mark.parametrize("size", [1e3, 1e10])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_output_that_another_is_made_of_does_not_change_what_is_advised(
    amp, level: str, size: float
) -> None:
    causes = []
    for returns_hidden in (False, True):
        model, optimizer = prepared(amp, Judging(size, returns_hidden), level, loss_scale=65536.0)
        train(amp, model, optimizer, lambda outputs: outputs["loss"])
        causes.append(the_cause(amp))
        amp.deactivate()
    told = [(one.module, one.operator, one.fits, one.mended_by, one.advice()) for one in causes]
    assert told[0] == told[1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_script_computes_of_such_an_output_counts(amp, level: str) -> None:
    def loss_of(outputs: dict[str, Tensor]) -> Tensor:
        return outputs["loss"] + outputs["hidden"].float().sum() * 0.5

    model, optimizer = prepared(amp, Judging(1.0, True), level, loss_scale=65536.0)
    train(amp, model, optimizer, loss_of)
    cause = the_cause(amp)
    assert (cause.where, cause.module) == ("backward", "first")
    amp.deactivate()
    again, optimizer = prepared(amp, Judging(1.0, True), level, loss_scale=cause.fits)
    train(amp, again, optimizer, loss_of)
    assert not amp.step_was_skipped(optimizer)
