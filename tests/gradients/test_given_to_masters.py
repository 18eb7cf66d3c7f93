"""Gradients that a script gives, scales and clears by hand train as in plain fp32, to the bit.

All coefficients, factors and scales are small integers or powers of two: no sum is ever rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import scaled_backward
from torch import Tensor, nn

SIZES = (3, 4, 2)
WHICH = range(len(SIZES))
LEVELS = pytest.mark.parametrize("level", ["O2", "O5"])
FUSED = pytest.mark.parametrize("fused_step", [False, True])


class Weights(nn.Module):
    """Weights that go half, and one that stays in fp32 and is its own master."""

    def __init__(self, large: int = 0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(SIZES[0] + large))
        self.second = nn.Parameter(torch.zeros(SIZES[1]))
        self.norm = nn.BatchNorm1d(SIZES[2])
        self.norm.bias.requires_grad_(False)


class Script:
    """What a script does to the gradients of one optimizer, with amp or without."""

    def __init__(self, amp: ModuleType | None, level: str = "O0", large: int = 0, **options: Any):
        self.amp, model = amp, Weights(large)
        self.params: list[Tensor] = [model.first, model.second, model.norm.weight]
        self.optimizer = torch.optim.SGD(self.params, lr=1.0)
        self.model: Any = model
        if amp is not None:
            options = {"loss_scale": 8.0, "verbosity": 0, **options}
            self.model, self.optimizer = amp.initialize(
                model, self.optimizer, opt_level=level, **options
            )
        self.masters: list[Tensor] = self.optimizer.param_groups[0]["params"]

    def block(self, *coefficients: float | None, **options: Any) -> None:
        rows = zip(self.params, coefficients, strict=False)
        loss = sum(param.float().sum() * c for param, c in rows if c is not None)
        if self.amp is None:
            loss.backward()
        else:
            scaled_backward(self.amp, loss, self.optimizer, **options)

    def give(self, params: list[Tensor], *values: float | None) -> None:
        for param, value in zip(params, values, strict=False):
            if value is not None:
                param.grad = torch.full_like(param, value)

    def clear(self, params: list[Tensor], which: Any = WHICH) -> None:
        for row in which:
            params[row].grad = None

    def scale(self, params: list[Tensor], factor: float, which: Any = WHICH) -> None:
        for row in which:
            if (grad := params[row].grad) is not None:
                grad.mul_(factor)

    def step(self) -> list[float]:
        """Step, and return what each parameter has moved by."""
        before = [master.detach().clone() for master in self.masters]
        self.optimizer.step()
        moved = [a - b.detach() for a, b in zip(before, self.masters, strict=True)]
        assert all(bool((one == one[0]).all()) for one in moved)
        return [float(one[0]) for one in moved]


@pytest.fixture(params=[0, 1 << 14], ids=["small", "large"])
def script(request: pytest.FixtureRequest, amp: ModuleType, level: str, fused_step: bool) -> Script:
    return Script(amp, level, request.param, fused_step=fused_step)


@pytest.mark.filterwarnings("error:gradients must last until the step")
@FUSED
@LEVELS
def test_what_masters_are_given_behind_the_models_clearing_is_stepped(script: Script) -> None:
    script.block(1, 2, 4)
    script.clear(script.params)
    script.give(script.masters, 8, 16, 32)
    assert script.step() == [8, 16, 32]
    script.optimizer.zero_grad()
    script.block(1, 2, 4)
    assert script.step() == [1, 2, 4]


@FUSED
@LEVELS
def test_the_rest_of_them_is_cleared(script: Script) -> None:
    script.block(1, 2, 4)
    grads = [master.grad for master in script.masters]  # a fused step lets them wait till then
    script.clear(script.params, [0, 1])
    script.give(script.masters, 8)
    assert script.step() == [8, 0, 4]
    del grads


@FUSED
@LEVELS
def test_zeros_and_what_comes_of_all_tasks(script: Script) -> None:
    tasks = []
    for coefficients in ((1, 2, 4), (-3, 4, 8)):
        script.block(*coefficients)
        tasks.append([master.grad.clone() for master in script.masters])
        script.clear(script.params)
    for master, *grads in zip(script.masters, *tasks, strict=True):
        master.grad = sum(grads)
    script.masters[1].grad = torch.zeros_like(script.masters[1])
    assert script.step() == [-2, 0, 12]


@FUSED
@LEVELS
def test_a_further_block_adds_to_them(script: Script) -> None:
    script.block(1, 2, 4)
    script.clear(script.params)
    script.give(script.masters, 8, None, 32)
    script.block(1, 2, 4)
    assert script.step() == [9, 2, 36]


@FUSED
@LEVELS
def test_those_that_waited_scaled_may_be_cleared_for_them(script: Script) -> None:
    script.block(1, 2, 4)
    script.block(1, 2, 4, delay_unscale=True)
    script.clear(script.params)
    script.give(script.masters, 8)
    assert script.step() == [8, 0, 0]


@FUSED
@LEVELS
def test_zero_grad_of_the_model_clears_what_was_given_before(script: Script) -> None:
    script.block(1, 2, 4)
    script.give(script.masters, 8, 16, 32)
    script.model.zero_grad()
    script.block(1, 2, 4)
    assert script.step() == [1, 2, 4]


@FUSED
@LEVELS
def test_an_overflow_skips_them(amp: ModuleType, level: str, fused_step: bool) -> None:
    script = Script(amp, level, fused_step=fused_step, loss_scale="dynamic")
    script.block(1, float("inf"), 4)
    script.clear(script.params)
    script.give(script.masters, 8, 16, 32)
    assert script.step() == [0, 0, 0]


@FUSED
@LEVELS
def test_they_may_be_clipped(script: Script) -> None:
    script.block(1, 2, 4)
    script.clear(script.params)
    script.give(script.masters, 8, 16, 32)
    torch.nn.utils.clip_grad_value_(script.masters, 16.0)
    assert script.step() == [8, 16, 16]


@FUSED
@LEVELS
def test_each_of_several_optimizers_steps_its_own(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    model = Weights()
    optimizers = [torch.optim.SGD([one], lr=1.0) for one in (model.first, model.second)]
    options = {"loss_scale": 8.0, "verbosity": 0, "fused_step": fused_step}
    amp.initialize(model, optimizers, opt_level=level, **options)
    scaled_backward(amp, model.first.float().sum() + model.second.float().sum(), optimizers)
    model.first.grad = model.second.grad = None
    masters = [one.param_groups[0]["params"][0] for one in optimizers]
    masters[0].grad = torch.full_like(masters[0], 8.0)
    for one in optimizers:
        one.step()
    assert [float(one[0].detach()) for one in masters] == [-8.0, 0.0]


class Program:
    """A drawn script, and what of it at levels with masters is as in plain PyTorch.

    Attributes:
        calls: what it does.
        received: rows of which masters have what a block has left, until all is cleared. What a
            script writes to half gradients then has no effect, and a warning says so.
        given: rows whose masters a script has given gradients. None in the place of the half one is
            not seen then.
        half_given: rows whose half parameters it has. Masters have none, and None is not seen.
        waiting: rows with gradients that are still scaled.
    """

    def __init__(self, lines: list[tuple[str, set[int], int]]) -> None:
        self.calls: list[Callable[[Script], object]] = []
        self._forget()
        for name, rows, value in [*lines, ("step", set(), 0)]:
            getattr(self, name)(rows, value)

    def _forget(self) -> None:
        self.received: set[int] = set()
        self.given: set[int] = set()
        self.half_given: set[int] = set()
        self.waiting: set[int] = set()

    def run(self, script: Script) -> list[list[float]]:
        """Return what each step has moved the parameters by."""
        found = [call(script) for call in self.calls]
        return [one for one in found if isinstance(one, list)]

    def block(self, rows: set[int], value: int) -> None:
        coefficients = [value + 1.0 + row if row in rows else None for row in WHICH]
        delays = value % 3 == 2
        self.calls.append(lambda one: one.block(*coefficients, delay_unscale=delays))
        self.waiting |= rows
        self.received |= self.half_given
        self.half_given = set()
        if not delays:
            self.received |= self.waiting
            self.given -= self.waiting
            self.waiting = set()

    def give(self, rows: set[int], value: int) -> None:
        rows = rows - self.waiting - self.half_given - self._whole()
        values = [value * 2.0 if row in rows else None for row in WHICH]
        self.calls.append(lambda one: one.give(one.masters, *values))
        self.given |= rows

    def give_halves(self, rows: set[int], value: int) -> None:
        if self.waiting or self.received:
            return
        rows = rows - self.given
        values = [value * 2.0 if row in rows else None for row in WHICH]
        self.calls.append(lambda one: one.give(one.params, *values))
        self.half_given |= rows

    def clear(self, rows: set[int], value: int) -> None:
        rows = rows - self.half_given - self.waiting - self._whole()
        self.calls.append(lambda one: one.clear(one.masters, rows))

    def clear_halves(self, rows: set[int], value: int) -> None:
        if self.waiting:  # others are aside, and None in the place of None is not seen
            return
        rows = rows - self.given
        self.calls.append(lambda one: one.clear(one.params, rows))

    def scale(self, rows: set[int], value: int) -> None:
        rows = rows - self.half_given - self.waiting - self._whole()
        self.calls.append(lambda one: one.scale(one.masters, FACTORS[value % 2], rows))

    def scale_halves(self, rows: set[int], value: int) -> None:
        rows = rows & self.half_given
        self.calls.append(lambda one: one.scale(one.params, FACTORS[value % 2], rows))

    def zero_grad(self, rows: set[int], value: int) -> None:
        self.calls.append(lambda one: (one.model if value % 2 else one.optimizer).zero_grad())
        self._forget()

    def step(self, rows: set[int], value: int) -> None:
        if self.waiting:
            return
        self.calls.append(lambda one: one.step())
        if value < 2:
            self.zero_grad(rows, value)
        else:  # by hand, of either
            name = "params" if value % 2 else "masters"
            self.calls.append(lambda one: one.clear(getattr(one, name)))
        self._forget()

    def _whole(self) -> set[int]:
        """Return the row that is its own master, while a block adds to what waits scaled."""
        return {2} if self.waiting else set()


FACTORS = (0.5, 2.0)
NAMES = ["block", "give", "give_halves", "clear", "clear_halves", "scale", "scale_halves"]
NAMES += ["zero_grad", "step", "block", "block", "give", "clear_halves"]
LINES = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.sets(st.sampled_from(WHICH), min_size=1), st.integers(0, 5)
    ),
    max_size=10,
)


@pytest.mark.filterwarnings("ignore")
@LEVELS
@FUSED
def test_a_drawn_script_trains_as_in_fp32(amp: ModuleType, level: str, fused_step: bool) -> None:
    @given(LINES)
    def run(lines: list[tuple[str, set[int], int]]) -> None:
        amp.deactivate()  # of the example before
        program = Program(lines)
        found = program.run(Script(amp, level, fused_step=fused_step))
        expected = program.run(Script(None))
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)

    run()
