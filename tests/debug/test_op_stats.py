"""Operators, casts and avoided casts are counted as by counters that know nothing of amp."""

from __future__ import annotations

import json

import pytest
import torch
from cast_counter import CastCounter
from plants import WIDTH, prepared
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch.debug.op_stats import OpStats

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = {"O1": "float16", "O2": "float16", "O3": "float16", "O4": "bfloat16", "O5": "bfloat16"}
LAYERS = 3


def model_of_layers() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def step(amp, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(passes):
        scaled_backward(amp, model(torch.randn(4, WIDTH)).float().square().mean(), optimizer)
    optimizer.step()


class Calls(TorchDispatchMode):
    """Counts the calls of one operator by the dtype of its result."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.dtypes = name, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if str(func) == self.name:
            self.dtypes.append(str(result.dtype).removeprefix("torch."))
        return result


def counted(amp, level: str, steps: int = 2, passes: int = 1) -> tuple[OpStats, CastCounter, Calls]:
    options = {"trace_overflow": False, "loss_scale": 1024.0 if level != "O0" else 1.0}
    model, optimizer = prepared(amp, model_of_layers(), level, **options)
    counter, calls = CastCounter(), Calls("aten.addmm.default")
    with amp.debug.op_stats() as stats, counter, calls:
        for _ in range(steps):
            step(amp, model, optimizer, passes)
    return stats, counter, calls


@pytest.mark.parametrize("level", LEVELS)
def test_casts_are_those_that_another_counter_counts(amp, level: str) -> None:
    stats, counter, _ = counted(amp, level)
    bulk_bound = sum(stats.casts.values()) - counter.casts  # tensors in launches of many
    assert bulk_bound >= 0
    assert (bulk_bound > 0) == (stats.bulk_casts > 0)
    assert stats.bulk_casts <= counter.bulk_copies
    if level in ("O0", "O3"):
        assert bulk_bound == 0
    parameters = 2 * LAYERS
    # O1, O4: each weight once, then all by one launch for each step; O2, O5: gradients and masters
    assert stats.casts_of("weight") == {"O0": 0, "O3": 0}.get(level, 2 * parameters)


@pytest.mark.parametrize("level", LEVELS)
def test_calls_are_counted_by_dtype(amp, level: str) -> None:
    stats, _, calls = counted(amp, level)
    dtype = HALF.get(level, "float32")
    assert calls.dtypes == [dtype] * (2 * LAYERS)
    assert stats.calls["forward", "addmm", dtype] == 2 * LAYERS
    assert stats.calls["backward", "mm", dtype] == 2 * (2 * LAYERS - 1)
    if level == "O3":  # torch steps half parameters one by one
        assert stats.calls["step", "add_", dtype] == 4 * LAYERS
    else:
        assert stats.calls["step", "_foreach_add_", "float32"] == 2
    assert stats.steps == 2


@pytest.mark.parametrize("level", LEVELS)
def test_casts_that_were_avoided_are_counted(amp, level: str) -> None:
    stats, _, _ = counted(amp, level, steps=2, passes=2)
    reads = 2 * 2 * 2 * LAYERS  # steps, passes, weight and bias of each layer
    first = 2 * LAYERS
    assert stats.cache_hits == (reads - first if level in ("O1", "O4") else 0)
    assert stats.half_weights == (reads if level in ("O2", "O3", "O5") else 0)
    # At O1 and O4 every block of scale_loss makes the casts anew; else masters are rounded once a
    # step, and what the second step rounds is not read any more.
    made = {"O3": 0, "O2": first, "O5": first}.get(level, reads)
    assert stats.casts_avoided == reads - made


@pytest.mark.parametrize("passes", [1, 3])
def test_accumulated_passes_avoid_all_casts_but_the_first(amp, passes: int) -> None:
    options = {"trace_overflow": False, "loss_scale": 1024.0}
    model, optimizer = prepared(amp, model_of_layers(), "O1", **options)
    step(amp, model, optimizer)
    with amp.debug.op_stats() as stats:
        for number in range(passes):
            loss = model(torch.randn(4, WIDTH)).float().square().mean()
            delay = number < passes - 1
            with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
                scaled_loss.backward()
    assert stats.casts_of("weight") == 2 * LAYERS
    assert stats.casts_avoided == (passes - 1) * 2 * LAYERS


def test_gradients_are_told_from_activations(amp) -> None:
    stats, _, _ = counted(amp, "O1", steps=1)
    casts = stats.casts
    # the input, and the loss's float(); GELU is computed in half
    assert casts["activation", "float32", "float16"] == 1
    assert casts["activation", "float16", "float32"] == 1
    assert casts["gradient", "float32", "float16"] == 1
    assert casts["gradient", "float16", "float32"] == 2 * LAYERS


def test_a_checkpoint_computes_forward_again(amp) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    options = {"trace_overflow": False}
    model, optimizer = prepared(amp, Recomputing(), "O1", **options)
    with amp.debug.op_stats() as stats:
        step(amp, model, optimizer)
    # the second layer's result is not needed again
    assert stats.calls["forward", "addmm", "float16"] == 2 + 1
    assert stats.calls["forward", "gelu", "float16"] == 1 + 1
    assert stats.calls["backward", "addmm", "float16"] == 0


@pytest.mark.parametrize(("level", "traced"), [("O1", False), ("O2", False), ("O1", True)])
def test_what_an_overflow_is_looked_at_with_is_no_forward(amp, level: str, traced: bool) -> None:
    found = []
    looked_at = {"addmm"} if traced else None  # what is traced is copied, which is counted
    for factor in (1.0, torch.inf):
        options = {"trace_overflow": traced, "loss_scale": 128.0}
        model, optimizer = prepared(amp, model_of_layers(), level, **options)
        model(torch.zeros(4, WIDTH))  # the casts of the weights
        with amp.debug.op_stats() as stats:
            loss = model(torch.randn(4, WIDTH)).float().square().mean() * factor
            scaled_backward(amp, loss, optimizer)
            optimizer.step()
            str(amp.overflow_report())
        assert bool(amp.overflow_report()) == (factor == torch.inf)
        forward = {key[1:]: n for key, n in stats.calls.items() if key[0] == "forward"}
        found.append({key: n for key, n in forward.items() if key[0] in (looked_at or key)})
        amp.deactivate()
    assert found[0] == found[1]


def test_statistics_are_a_table_and_json(amp) -> None:
    stats, _, _ = counted(amp, "O1")
    found = json.loads(json.dumps(stats.to_json()))
    assert {"phase": "forward", "operator": "addmm", "dtype": "float16", "calls": 6} in found[
        "calls"
    ]
    assert found["casts_avoided"] == stats.casts_avoided
    lines = str(stats).splitlines()
    assert any(line.split()[:2] == ["addmm", "6"] for line in lines)
    assert f"{stats.casts_avoided} casts of weights were avoided" in lines[-1]


def test_nothing_is_changed_and_nothing_stays(amp) -> None:
    results = []
    for counts in (False, True):
        torch.manual_seed(0)
        model, optimizer = prepared(amp, model_of_layers(), "O1", trace_overflow=False)
        if counts:
            with amp.debug.op_stats():
                step(amp, model, optimizer)
        else:
            step(amp, model, optimizer)
        step(amp, model, optimizer)
        results.append([param.detach().clone() for param in model.parameters()])
        amp.deactivate()
    for plain, counted_ in zip(*results, strict=True):
        assert torch.equal(plain, counted_)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_statistics_of_an_empty_block(amp) -> None:
    with amp.debug.op_stats() as stats:
        pass
    assert str(stats).startswith("0 tensors were cast")
