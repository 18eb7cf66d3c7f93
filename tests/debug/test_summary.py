"""`amp.summary()` counts what happened, from `initialize` to `deactivate`."""

from __future__ import annotations

import datetime
import json
import re
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import trains
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from amp_patch import amp as public
from amp_patch.step import loss_scaling

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def made(kind: type[Optimizer] = SGD, **options: object) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    return model, kind(model.parameters(), lr=2.0**-6, **options)


def step(model: nn.Module, optimizer: Optimizer, factor: float = 1.0, loss_id: int = 0) -> bool:
    """Make a step and return whether it was skipped."""
    optimizer.zero_grad()
    loss = model(torch.ones(4, 3)).square().mean() * factor
    with public.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return public.step_was_skipped(optimizer)


@trains()
@given(
    st.sampled_from(LEVELS),
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12),
)
def test_it_counts_the_steps_of_each_optimizer(level: str, events: list[tuple[bool, bool]]) -> None:
    public.deactivate()
    runs = [made(), made(AdamW, eps=1e-4)]
    models, optimizers = zip(*runs, strict=True)
    public.initialize(list(models), list(optimizers), opt_level=level, verbosity=0, loss_scale=8.0)
    steps, skipped = [0, 0], [0, 0]
    for is_second, overflows in events:
        steps[is_second] += 1
        skipped[is_second] += step(*runs[is_second], torch.inf if overflows else 1.0)
    summary = public.summary()
    assert [one.steps for one in summary.optimizers] == steps
    assert [one.skipped for one in summary.optimizers] == skipped
    assert (summary.steps, summary.skipped) == (sum(steps), sum(skipped))
    assert summary.losses[0].overflows == sum(overflows for _, overflows in events)
    public.deactivate()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("fused_step", [True, False])
def test_it_counts_what_a_device_skips(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, at_once: bool, fused_step: bool
) -> None:
    if not at_once:  # the CPU as a device that works behind the host
        monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})
    model, optimizer = made(AdamW, fused=True)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, fused_step=fused_step)
    for factor in (torch.inf, 1.0, torch.nan, 1.0, 1.0):
        step(model, optimizer, factor)
    (found,) = amp.summary().optimizers
    assert (found.steps, found.skipped) == (5, 2)
    assert amp.summary().losses[0].scale == 2.0**14


def test_it_is_what_one_reads(amp: ModuleType) -> None:
    before = datetime.datetime.now().astimezone()
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O1", num_losses=2, verbosity=0)
    step(model, optimizer, torch.inf, loss_id=1)
    step(model, optimizer)
    other = amp.initialize(*made(AdamW), opt_level="O4", verbosity=0)
    step(*other)
    del other, model, optimizer  # the counts stay
    lines = repr(amp.summary()).splitlines()
    assert re.fullmatch(r"amp at O1, O4 since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[0])
    assert lines[1:3] == [
        "  SGD at O1: 2 steps, 1 of them skipped; losses 0, 1",
        "  AdamW at O4: 1 step, none skipped; loss 2",
    ]
    assert lines[3:] == [
        "  loss 0: scale 65536, dynamic; 0 overflows",
        "  loss 1: scale 32768, dynamic; 1 overflow",
        "  loss 2: scale 1, static; 0 overflows",
    ]
    assert before <= amp.summary().since <= datetime.datetime.now().astimezone()
    assert json.loads(json.dumps(amp.summary().to_json())) == amp.summary().to_json()


def test_of_many_optimizers_the_last_are_told(amp: ModuleType) -> None:
    for _ in range(23):  # the folds of a cross-validation
        amp.initialize(*made(), opt_level="O1", verbosity=0)
    summary = amp.summary()
    first, *lines = [line.strip() for line in repr(summary).splitlines() if "loss 0: " not in line][
        1:
    ]
    assert first == "3 earlier: see amp.summary().optimizers"
    assert lines == [str(one) for one in summary.optimizers[3:]]
    assert len(lines) == 20


def test_it_begins_anew_after_deactivate(amp: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"Invoked 'amp.summary\(\)', but internal Amp state"):
        amp.summary()
    run = made()
    amp.initialize(*run, opt_level="O1", verbosity=0)
    step(*run)
    amp.deactivate()
    amp.initialize(*run, opt_level="O4", verbosity=0)
    assert (amp.summary().levels, amp.summary().steps) == (("O4",), 0)


def test_where_amp_is_disabled_it_says_so(amp: ModuleType) -> None:
    run = made()
    amp.initialize(*run, enabled=False)
    assert "disabled" in repr(amp.summary())
    assert amp.summary().to_json()["levels"] == []
