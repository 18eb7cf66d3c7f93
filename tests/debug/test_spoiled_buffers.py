"""Buffers that a training makes inf or NaN are named with what keeps them finite, as it does."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn

from amp_patch.debug import spoiled_buffers
from amp_patch.debug.spoiled_buffers import SpoiledBuffers


class Average(nn.Module):
    """Keeps the average of squares of what it is given, and a bound that is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("squares", torch.zeros(8))
        self.register_buffer("bound", torch.tensor([torch.inf, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.squares.lerp_((x * x).mean(0).to(self.squares.dtype), 0.5)
        return x / (1.0 + x.abs())


MODULES = {"running_var": nn.BatchNorm1d, "squares": lambda _: Average()}
HOLDS = {"running_var": "inf", "squares": "NaN"}  # of inf - inf, in lerp


def model_of(name: str, factor: float = 1e3) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), MODULES[name](8), nn.Linear(8, 2))
    model[0].weight.data.mul_(factor)
    return model


def train(amp: Any, model: nn.Module, level: str, **options: Any) -> None:
    """Make three steps of which each gradient is finite."""
    options = {"verbosity": 0, "loss_scale": 1.0, "trace_overflow": True, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, **options)
    for seed in range(3):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        scaled_backward(amp, model(x).float().square().mean(), optimizer)
        optimizer.step()


def largest_in_float64(name: str) -> float:
    """Return the largest number of the buffer in a run of float64, without amp."""
    model = model_of(name).double()
    for seed in range(3):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        model(x.double())
    return float(model.get_buffer(f"1.{name}").max())


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("level", "options"), [("O3", {}), ("O2", {"keep_batchnorm_fp32": False})])
def test_what_float16_cannot_hold_is_named_and_its_rule_holds_it(
    amp, level: str, options: dict[str, Any], name: str
) -> None:
    exact = largest_in_float64(name)
    assert exact > torch.finfo(torch.float16).max
    model = model_of(name)
    train(amp, model, level, **options)
    report = amp.overflow_report()
    assert report
    assert not report.causes
    (found,) = report.buffers
    of = type(model[1]).__name__
    assert found.title() == f"{name} of `1` ({of}) holds {HOLDS[name]}, in float16"
    assert found.title() in str(report)
    assert json.loads(json.dumps(report.to_json()))["buffers"][0]["name"] == name
    assert ("keep_batchnorm_fp32=True" in found.advice()) is (name == "running_var")
    amp.deactivate()
    mended = model_of(name)
    train(amp, mended, level, **options, rules={"modules": found.rule})
    assert amp.overflow_report().buffers == []
    assert float(mended.get_buffer(f"1.{name}").max()) == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize(
    ("level", "options"),
    [("O2", {}), ("O3", {"keep_batchnorm_fp32": True}), ("O5", {}), ("O1", {})],
)
def test_what_the_levels_hold_is_not_told(amp, level: str, options: dict[str, Any]) -> None:
    train(amp, model_of("running_var"), level, **options)
    assert amp.overflow_report().buffers == []


def test_what_was_infinite_from_the_beginning_is_not_told(amp) -> None:
    train(amp, model_of("squares", 1.0), "O3")
    assert amp.overflow_report().buffers == []


def test_statistics_of_an_overflow_in_the_forward_are_not_blamed_on_their_own_dtype(amp) -> None:
    """At O1 they are in float32; the step was skipped, and they keep what it has brought."""
    model = model_of("running_var", 1e6)
    train(amp, model, "O1", loss_scale="dynamic")
    report = amp.overflow_report()
    assert report.causes
    assert {one.dtype for one in report.buffers} == {"float32"}
    assert all(one.rule == {} for one in report.buffers)
    assert all("mend what overflows in the forward" in one.advice() for one in report.buffers)


def test_many_are_counted_and_each_mend_is_told_once() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(13))).half()
    buffers = SpoiledBuffers()
    buffers.follow([model])
    for norm in model:
        norm.running_var.fill_(torch.inf)
    lines = spoiled_buffers.lines([one.to_json() for one in buffers.found()])
    assert len(lines) == 1 + 10 + 1 + 1
    assert lines[-2] == "  and 3 more"


def test_models_of_which_it_is_told_are_not_kept_and_copies_are_others() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2)).half()
    buffers = SpoiledBuffers()
    buffers.follow([model])
    copy.deepcopy(model)[0].running_var.fill_(torch.inf)
    assert buffers.found() == []
    model[0].running_var.fill_(torch.inf)
    del model
    assert buffers.found() == []


def test_what_has_no_numbers_yet_is_not_looked_at() -> None:
    model, buffers = nn.LazyBatchNorm1d(), SpoiledBuffers()
    buffers.follow([model])
    assert buffers.found() == []
    model(torch.ones(4, 2))
    model.running_var.fill_(torch.inf)
    assert [one.name for one in buffers.found()] == ["running_var"]


def test_a_mask_that_a_forward_makes_is_no_statistic() -> None:
    model, buffers = nn.BatchNorm1d(2), SpoiledBuffers()
    buffers.follow([model])
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    model.register_buffer("late", torch.full((2,), torch.nan))
    model.running_mean.fill_(-torch.inf)
    assert {one.name for one in buffers.found()} == {"late", "running_mean"}
