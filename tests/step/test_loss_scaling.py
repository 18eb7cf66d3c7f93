"""Who scales a loss, and what each does with an overflow; on tensors of one element."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch import kernels
from amp_patch.scaling import device_scaler
from amp_patch.scaling.device_scaler import DeviceScaler
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule
from amp_patch.step import loss_scaling
from amp_patch.step.late_check import LateCheck
from amp_patch.step.loss_scaling import (
    DeviceScaling,
    Found,
    HostScaling,
    LossScaling,
    NoScaling,
    PendingCheck,
    choose_scaling,
)
from amp_patch.step.skip import Skip
from amp_patch.weights.parameter_lists import Tensors

CPU = torch.device("cpu")
INF = float("inf")
SAID = "Gradient overflow.  Skipping step, loss scaler 3 reducing loss scale to 32768.0"


def found(value: float) -> Found:
    """Return the check of one gradient with this value."""
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.tensor([value])
    check = kernels.unscaler([param.grad], [param.grad]).run([param.grad], [param.grad], 1.0)
    return check, Tensors([param])


class Case:
    """A scaler, a skip, and what both said."""

    def __init__(self, number: int = 3, **rule: Any) -> None:
        self.number = number
        self.scaler = LossScaler(ScaleRule(**rule))
        self.said: list[str] = []
        self.overflows: list[tuple[int, float, int]] = []
        self.skip = Skip(self.said.append)
        self.error: Exception | None = None

    def choose(self, delayed: bool = False, can_skip: bool = True) -> LossScaling:
        on_host = HostScaling(self.scaler, self.number, lambda: self.name_of, self.on_overflow)
        return choose_scaling(on_host, CPU, delayed, lambda: can_skip)

    def name_of(self, param: Tensor) -> str:
        return "blocks.2.weight"

    def on_overflow(self, scaler_id: int, found: Any, scale: float, step: int) -> None:
        self.overflows.append((scaler_id, scale, step))
        if self.error is not None:
            raise self.error


@pytest.fixture
def runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device that works behind the host."""
    monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})


def test_a_static_scale_of_one_is_no_scaling() -> None:
    case = Case(dynamic=False, init_scale=1.0)
    scaling = case.choose()
    assert isinstance(scaling, NoScaling)
    assert (scaling.is_on, scaling.scale()) == (False, 1.0)
    scaling.update([found(INF)], [case.skip])
    assert not case.skip.is_possible
    assert case.scaler.unskipped == 1


def test_the_host_scales_where_the_host_need_not_wait() -> None:
    case = Case()
    scaling = case.choose()
    assert isinstance(scaling, HostScaling)
    assert (scaling.is_on, scaling.scale()) == (True, 65536.0)


@pytest.mark.usefixtures("runs_ahead")
@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda case: case.choose(), DeviceScaling),
        (lambda case: case.choose(delayed=True), HostScaling),
        (lambda case: case.choose(can_skip=False), HostScaling),
    ],
)
def test_the_device_scales_where_it_can_skip(
    prepare: Callable[[Case], LossScaling], expected: type
) -> None:
    assert isinstance(prepare(Case()), expected)


@pytest.mark.usefixtures("runs_ahead")
@pytest.mark.parametrize(("dynamic", "expected"), [(True, HostScaling), (False, DeviceScaling)])
def test_a_low_scale_is_the_hosts_to_look_at_if_it_moves(dynamic: bool, expected: type) -> None:
    assert isinstance(Case(dynamic=dynamic, init_scale=2.0**-12).choose(), expected)


@pytest.mark.usefixtures("runs_ahead")
def test_a_pass_that_brought_no_gradient_is_a_finite_one() -> None:
    case = Case()
    scaling = case.choose()
    assert isinstance(scaling, DeviceScaling)
    scaling.update([], [case.skip])
    assert (case.scaler.unskipped, case.skip.is_possible) == (1, False)


@pytest.mark.usefixtures("runs_ahead")
def test_at_its_floor_the_host_scales_to_name_what_is_not_finite() -> None:
    case = Case(min_loss_scale=65536.0)
    case.scaler.update(overflow=True)
    assert isinstance(case.choose(), HostScaling)


def test_an_overflow_lowers_the_scale_and_skips_the_step() -> None:
    case = Case()
    case.choose().update([found(1.0), found(INF)], [case.skip])
    assert case.scaler.scale == 32768.0
    assert case.overflows == [(3, 65536.0, 1)]
    assert case.skip.found()
    case.skip.note_skipped()
    assert case.said == [SAID]


def test_finite_gradients_skip_nothing() -> None:
    case = Case()
    case.choose().update([found(1.0)], [case.skip])
    assert (case.scaler.scale, case.scaler.unskipped) == (65536.0, 1)
    assert (case.overflows, case.skip.is_possible) == ([], False)


def test_after_an_error_the_scale_is_what_it_was() -> None:
    case = Case()
    case.error = ArithmeticError()
    before = case.scaler.numbers()
    with pytest.raises(ArithmeticError):
        case.choose().update([found(INF)], [case.skip])
    assert case.scaler.numbers() == before


def test_the_second_overflow_at_the_floor_names_the_parameter() -> None:
    case = Case(min_loss_scale=65536.0)
    case.choose().update([found(INF)], [case.skip])
    message = r"loss scaler 3 at its floor 65536.0: blocks.2.weight \(inf\)"
    with pytest.raises(FloatingPointError, match=message):
        case.choose().update([found(INF)], [case.skip])


@pytest.mark.usefixtures("runs_ahead")
def test_a_device_moves_its_scale_and_the_host_hears_of_it_later() -> None:
    case = Case()
    scaling = case.choose()
    assert scaling.scale().item() == 65536.0
    scaling.update([found(1.0), found(INF)], [case.skip])
    assert case.skip.flag.item() != 0
    case.skip.note_made(case.skip.flag)
    case.scaler.settle()
    assert case.scaler.scale == 32768.0
    assert case.said == [SAID]
    assert case.overflows == [(3, 65536.0, 1)]


def test_gradients_on_another_device_are_the_hosts() -> None:
    case = Case()
    elsewhere = DeviceScaler.of(case.scaler, torch.device("cpu:0"))
    on_host = HostScaling(case.scaler, 3, lambda: case.name_of, case.on_overflow)
    scaling = DeviceScaling(elsewhere, on_host)
    scaling.update([found(INF)], [case.skip])
    assert case.skip.is_certain
    assert case.scaler.scale == 32768.0


def test_a_late_overflow_is_reported_with_what_is_left_of_its_check(runs_ahead: None) -> None:
    case, reported = Case(), []
    scaling = case.choose()
    scaling._on_host.on_overflow = lambda number, found, *_: reported.extend(found)
    one = found(INF)
    scaling.update([one], [case.skip])
    case.scaler.settle()
    assert [type(check) for check, _ in reported] == [LateCheck]
    assert reported[0][1] == list(one[1])


class LateCopy:
    """A copy that arrives when it is waited for."""

    def __init__(self, source: Tensor) -> None:
        self._copy = source.clone()

    def ready(self) -> bool:
        return False

    def wait(self) -> Tensor:
        return self._copy


LOSSES = st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=4)


@given(st.lists(LOSSES, max_size=4), st.sampled_from([0, 2, 20]))
def test_a_step_has_the_line_that_a_host_which_waits_says(
    steps: list[list[tuple[int, bool]]], late: int
) -> None:
    said = []
    for runs_ahead in (set(), {"cpu"}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss_scaling, "RUNS_AHEAD", runs_ahead)
            patch.setattr(device_scaler, "_MOST_PENDING", late)
            patch.setattr(device_scaler, "HostCopy", LateCopy)
            said.append(lines_of(steps))
    assert sorted(said[1]) == sorted(said[0])
    assert len(said[1]) == sum(any(overflows for _, overflows in losses) for losses in steps)


def lines_of(steps: list[list[tuple[int, bool]]]) -> list[str]:
    """Return what is said of steps; each of their losses has a scaler, and may overflow."""
    cases = [Case(0), Case(1)]
    skip = cases[0].skip
    for losses in steps:
        for number, overflows in losses:
            cases[number].choose().update([found(INF if overflows else 1.0)], [skip])
        if skip.is_certain:
            skip.note_skipped()
        else:
            skip.note_made(skip.flag)
    for case in cases:
        case.scaler.settle()
    return cases[0].said


def test_a_pending_check_moves_the_scale_once() -> None:
    case = Case()
    pending = PendingCheck(case.choose(), [found(INF)], [case.skip])
    pending.register()
    assert case.skip.pending == [pending]
    for _ in range(2):
        pending.settle()
    assert case.scaler.scale == 32768.0
    assert case.skip.pending == []


@pytest.mark.parametrize("value", [1.0, INF])
def test_a_pending_check_can_be_taken_over_for_its_scaler(value: float) -> None:
    case = Case()
    pending = PendingCheck(case.choose(), [found(value)], [case.skip])
    pending.register()
    assert not pending.has_found(LossScaler(ScaleRule()))
    assert pending.has_found(case.scaler) == (value == INF)
    assert not pending.take_over(LossScaler(ScaleRule()))
    assert pending.take_over(case.scaler) == (value == INF)
    pending.settle()
    assert case.scaler.scale == 65536.0  # who took it over moves the scale


def test_a_check_that_half_of_the_optimizers_wait_for_is_withdrawn() -> None:
    case, other = Case(), Case()
    pending = PendingCheck(case.choose(), [found(INF)], [case.skip, other.skip])
    case.skip.pending.append(pending)  # an interrupt came before the other
    assert pending.withdraw()
    assert case.skip.pending == other.skip.pending == []
    assert not pending.withdraw()


class Halving:
    """A script's method, which halves the scale and skips whatever was found."""

    is_on = True

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.met: list[bool] = []

    def move(self, overflow: bool) -> bool:
        self.met.append(overflow)
        self.scaler.scale /= 2
        return True


@pytest.mark.usefixtures("runs_ahead")
def test_an_override_moves_the_scale_on_the_host_while_it_is_on() -> None:
    case = Case()
    case.scaler.override = override = Halving(case.scaler)
    scaling = case.choose()
    assert isinstance(scaling, HostScaling)
    scaling.update([found(1.0)], [case.skip])
    assert override.met == [False]
    assert (case.scaler.scale, case.scaler.skipped, case.skip.is_certain) == (32768.0, True, True)
    case.skip.note_skipped()
    assert case.said == [SAID]
    override.is_on = False
    assert isinstance(case.choose(), DeviceScaling)
    assert case.scaler.move(False) is False
    assert override.met == [False]


@pytest.mark.parametrize("value", [1.0, INF])
@pytest.mark.parametrize("rule", [{}, {"dynamic": False, "init_scale": 1.0}], ids=["on", "off"])
def test_whether_the_next_step_is_skipped_is_known_before_anything_moves(
    rule: dict[str, Any], value: float
) -> None:
    case = Case(**rule)
    check = PendingCheck(case.choose(delayed=True), [found(value)], [case.skip])
    check.register()
    expected = value == INF and rule == {}
    assert case.skip.found_inf(CPU).item() == expected
    assert case.scaler.loss_scale() == case.scaler.rule.init_scale
    check.settle()
    assert case.skip.found_inf(CPU).item() == expected
    case.skip.forget()
    case.skip.ask_where(torch.tensor([2.0]))
    assert case.skip.found_inf(CPU).item() == 2.0
