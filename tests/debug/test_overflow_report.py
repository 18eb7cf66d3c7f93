"""After a skipped step parameters are named, with the numbers of inf and NaN in each gradient."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from amp_patch.scaling import device_scaler
from amp_patch.step import loss_scaling

LEVELS = ("O1", "O2", "O3")


def start(amp: Any, level: str, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    options = {"verbosity": 0, "loss_scale": "dynamic", **options}
    return amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level=level, **options)


def step(amp: Any, model: nn.Module, optimizer: Optimizer, plants: dict[str, Any]) -> None:
    """Make a step in which gradients get values by the names of their parameters."""
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 4)).float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
        for name, values in plants.items():
            grad = dict(model.named_parameters())[name].grad
            for index, value in enumerate(values):
                grad.view(-1)[index] = value
    optimizer.step()


PLANTS = {"0.weight": [torch.inf, -torch.inf, torch.nan], "1.bias": [torch.nan]}


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_are_named_with_their_numbers(amp, level: str) -> None:
    model, optimizer = start(amp, level, loss_scale=64.0)
    step(amp, model, optimizer, {})
    assert not amp.overflow_report()
    step(amp, model, optimizer, PLANTS)
    ((overflow),) = amp.overflow_report().overflows
    assert (overflow.scaler_id, overflow.scale, overflow.step_number) == (0, 64.0, 2)
    assert overflow.total == 4
    first, second = overflow.params
    assert first == ("0.weight", "inf and NaN", 12, 2, 1)
    assert second == ("1.bias", "NaN", 2, 0, 1)
    text = str(amp.overflow_report())
    assert "step 2, loss scaler 0 at 64" in text
    assert "0.weight: 2 inf (16.67%) and 1 NaN (8.33%) of 12" in text
    assert json.loads(json.dumps(amp.overflow_report().to_json()))["overflows"][0]["skips"] == 1


def test_the_last_overflow_stays_and_is_counted(amp) -> None:
    model, optimizer = start(amp, "O1")
    for plants in (PLANTS, {"1.weight": [torch.inf]}, {}):
        step(amp, model, optimizer, plants)
    ((overflow),) = amp.overflow_report().overflows
    assert (overflow.step_number, overflow.skips, overflow.scale) == (2, 2, 32768.0)
    assert [one.name for one in overflow.params] == ["1.weight"]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device of which the host hears at the next step at the earliest."""

    class Late:
        def __init__(self, source: Tensor) -> None:
            self.copy = source.clone()

        def ready(self) -> bool:
            return False

        def wait(self) -> Tensor:
            return self.copy

    monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})
    monkeypatch.setattr(device_scaler, "HostCopy", Late)


def late_start(amp: Any, level: str, model: nn.Module | None = None) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) if model is None else model
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_device_that_tells_late_is_asked_while_the_gradients_are_there(
    amp, late: None, level: str
) -> None:
    model, optimizer = late_start(amp, level)
    step(amp, model, optimizer, PLANTS)
    ((overflow),) = amp.overflow_report().overflows
    assert (overflow.step_number, overflow.scale) == (1, 65536.0)
    assert overflow.params == (
        ("0.weight", "inf and NaN", 12, 2, 1),
        ("1.bias", "NaN", 2, 0, 1),
    )


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_are_gone_are_said_to_be_unknown(
    amp, late: None, level: str, drop: bool
) -> None:
    model, optimizer = late_start(amp, level)
    step(amp, model, optimizer, PLANTS)
    optimizer.zero_grad(set_to_none=drop)
    ((overflow),) = amp.overflow_report().overflows
    assert overflow.params is None
    assert overflow.scale == 65536.0
    assert "not known" in str(amp.overflow_report())


def test_gradients_of_a_later_pass_are_not_taken_for_those_of_an_earlier_one(
    amp, late: None
) -> None:
    model, optimizer = late_start(amp, "O1")
    step(amp, model, optimizer, PLANTS)
    step(amp, model, optimizer, {"1.weight": [torch.inf]})
    ((overflow),) = amp.overflow_report().overflows
    assert overflow.step_number == 2
    assert [one.name for one in overflow.params] == ["1.weight"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_gradient_is_kept_alive_for_the_report(amp, late: None, level: str) -> None:
    model, optimizer = late_start(amp, level, nn.Linear(4, 1 << 18, bias=False))
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 4)).float().sum() * torch.inf, optimizer) as loss:
        loss.backward()
    del loss
    optimizer.step()
    grad, param = weakref.ref(model.weight.grad), weakref.ref(model.weight)
    optimizer.zero_grad()
    assert grad() is None
    del model, optimizer
    gc.collect()
    assert param() is None


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_at_a_scale_of_1_a_report_does_not_say_that_all_was_finite(amp, level: str) -> None:
    model, optimizer = start(amp, level, loss_scale=1.0)
    step(amp, model, optimizer, PLANTS)
    report = amp.overflow_report()
    assert not report
    assert "nobody looks" in str(report)
    assert "finite" not in str(report)
    amp.deactivate()
    # with a scale somebody has looked
    model, optimizer = start(amp, level, loss_scale=8.0)
    step(amp, model, optimizer, {})
    assert "were finite" in str(amp.overflow_report())


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_what_was_traced_at_a_scale_of_1_is_in_the_report(amp, level: str) -> None:
    model, optimizer = start(amp, level, loss_scale=1.0, trace_overflow=True)
    step(amp, model, optimizer, {})
    assert not amp.overflow_report()
    assert "were finite" in str(amp.overflow_report())
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)
    step(amp, model, optimizer, {})
    report = amp.overflow_report()
    assert report
    assert not report.overflows
    assert str(report).startswith("Traced once: ")
    assert "`1`: its weight holds NaN" in str(report)


def test_a_report_needs_initialize(amp) -> None:
    with pytest.raises(RuntimeError, match=r"amp\.overflow_report\(\)"):
        amp.overflow_report()


def test_a_report_ends_with_the_session(amp) -> None:
    model, optimizer = start(amp, "O1")
    step(amp, model, optimizer, PLANTS)
    amp.deactivate()
    start(amp, "O1")
    assert not amp.overflow_report()
    assert str(amp.overflow_report()).startswith("No overflow")


def test_a_disabled_run_has_an_empty_report(amp) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, SGD(model.parameters(), lr=0.1), enabled=False)
    assert not amp.overflow_report()


def test_only_the_sum_of_gradients_overflowed(amp) -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O3", loss_scale=0.5, verbosity=0)
    for _ in range(2):  # 80000 is beyond float16
        with amp.scale_loss(model(torch.tensor([[40000.0]])).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    assert "only the sum of gradients was not finite" in str(amp.overflow_report())


def test_many_parameters_are_cut_in_words_and_not_in_json(amp) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    model, optimizer = amp.initialize(
        model, SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )
    step(amp, model, optimizer, {name: [torch.nan] for name, _ in model.named_parameters()})
    report = amp.overflow_report()
    assert "and 6 more" in str(report)
    assert len(report.to_json()["overflows"][0]["params"]) == 16
