"""A scale that moves on its device: LossScaler's numbers, known to the host when they arrive."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.scaling import device_scaler
from amp_patch.scaling.device_scaler import DeviceScaler
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

RULES = st.builds(
    ScaleRule,
    dynamic=st.booleans(),
    init_scale=st.sampled_from([1.0, 4.0, 3.0, 65536.0]),
    growth_interval=st.integers(1, 3),
    hysteresis=st.integers(1, 3),
    min_loss_scale=st.sampled_from([2.0**-2, 1.0]),
    max_loss_scale=st.sampled_from([2.0**17, 2.0**24]),
)
CPU = torch.device("cpu")


class SlowCopy:
    """A copy that arrives when told to."""

    arrived = False

    def __init__(self, source: Tensor) -> None:
        self.copy = source.clone()

    def ready(self) -> bool:
        return SlowCopy.arrived

    def wait(self) -> Tensor:
        return self.copy


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[SlowCopy]:
    monkeypatch.setattr(device_scaler, "HostCopy", SlowCopy)
    monkeypatch.setattr(SlowCopy, "arrived", False)
    return SlowCopy


def flag(overflow: bool) -> Tensor:
    return torch.full((1,), float(overflow))


def nothing() -> Callable[[float], None]:
    """Expect an outcome that nobody asks for."""
    return lambda scale: None


@given(RULES, st.lists(st.sampled_from([True, False, "load", "host"]), max_size=12))
def test_it_moves_as_the_scaler_would(rule: ScaleRule, events: list[Any]) -> None:
    expected, scaler = LossScaler(rule), LossScaler(rule)
    twin = DeviceScaler.of(scaler, CPU)
    for event in events:
        if event == "load":
            for one in (expected, scaler):
                one.load_state_dict({"loss_scale": 2.0**10, "unskipped": 1})
        elif event == "host":  # a pass that the host judges, between those on the device
            expected.update(True)
            scaler.update(True)
        else:
            expected.update(event)
            assert twin.scale().item() == scaler.loss_scale()
            twin.update(flag(event), nothing)
        assert twin.scale().item() == expected.scale
        twin.settle()
        assert scaler.numbers() == expected.numbers()


def test_the_scale_is_one_tensor_until_it_may_move() -> None:
    twin = DeviceScaler.of(LossScaler(ScaleRule()), CPU)
    before = twin.scale()
    assert (before.shape, before.dtype) == ((), torch.float32)
    assert twin.scale() is before
    twin.update(flag(True), nothing)
    assert twin.scale() is not before
    assert (before.item(), twin.scale().item()) == (65536.0, 32768.0)


def test_an_update_that_raises_leaves_the_device_with_what_the_host_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaler = LossScaler(ScaleRule())
    twin = DeviceScaler.of(scaler, CPU)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device_scaler.captures, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            twin.update(flag(True), nothing)
    assert twin.scale().item() == scaler.loss_scale() == 65536.0


READERS: dict[str, Callable[[LossScaler], Any]] = {
    "loss_scale": LossScaler.loss_scale,
    "state_dict": lambda scaler: scaler.state_dict()["loss_scale"],
    "settle": lambda scaler: scaler.settle() or scaler.scale,
}


@pytest.mark.parametrize("read", READERS)
def test_who_reads_the_scaler_waits_for_the_outcome(slow: type[SlowCopy], read: str) -> None:
    scaler = LossScaler(ScaleRule())
    twin = DeviceScaler.of(scaler, CPU)
    outcomes = []
    twin.update(flag(True), lambda: lambda before: outcomes.append(scaler.skipped))
    twin.poll()
    assert (scaler.scale, outcomes) == (65536.0, [])
    assert READERS[read](scaler) == 32768.0
    assert outcomes == [True]


@pytest.mark.parametrize("write", ["load", "update"])
def test_what_is_on_its_way_comes_before_what_is_written(slow: type[SlowCopy], write: str) -> None:
    scaler = LossScaler(ScaleRule())
    twin = DeviceScaler.of(scaler, CPU)
    twin.update(flag(True), nothing)
    if write == "load":
        scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 5})
    else:
        scaler.update(True)
    twin.settle()
    assert scaler.scale == (8.0 if write == "load" else 16384.0)
    assert twin.scale().item() == scaler.scale


def test_poll_takes_in_what_arrived_and_lets_the_host_run_two_passes_ahead(
    slow: type[SlowCopy],
) -> None:
    scaler = LossScaler(ScaleRule())
    twin = DeviceScaler.of(scaler, CPU)
    outcomes: list[int] = []
    for number in range(4):
        twin.update(flag(True), lambda number=number: lambda before: outcomes.append(number))
        twin.poll()
    assert outcomes == [0, 1]
    assert scaler.scale == 16384.0
    slow.arrived = True
    twin.poll()
    assert outcomes == [0, 1, 2, 3]
    assert scaler.scale == 4096.0


def test_a_twin_on_another_device_takes_over(slow: type[SlowCopy]) -> None:
    scaler = LossScaler(ScaleRule())
    first = DeviceScaler.of(scaler, CPU)
    assert DeviceScaler.of(scaler, CPU) is first
    first.update(flag(True), nothing)
    second = DeviceScaler.of(scaler, torch.device("cpu:0"))
    assert second is not first
    assert scaler.device_scaler is second
    assert second.scale().item() == 32768.0
