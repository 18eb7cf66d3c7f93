"""Times a training step that is bound by the host: tiny layers, one thread, float16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from benchmarks.rounds import Candidate, Seconds, interleave, median_time
from torch import nn
from torch.nn import functional as F

from amp_patch import amp

LAYERS, WIDTH, BATCH = 24, 8, 4
AUTOCAST = "autocast + GradScaler"
LEVELS = ("O1", "O2")


def _start() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def autocast_step(warm_up: int, steps: int) -> Seconds:
    model, optimizer, inputs, targets = _start()
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return median_time(step, warm_up, steps)


def amp_step(opt_level: str, warm_up: int, steps: int) -> Seconds:
    model, optimizer, inputs, targets = _start()
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    seconds = median_time(step, warm_up, steps)
    amp.deactivate()
    return seconds


def measure(
    rounds: int, warm_up: int, steps: int, on_round: Callable[[], object]
) -> dict[str, list[Seconds]]:
    """Return the seconds of a step, one value per round, of autocast and of each level."""
    candidates: dict[str, Candidate] = {AUTOCAST: partial(autocast_step, warm_up, steps)}
    for level in LEVELS:
        candidates[level] = partial(amp_step, level, warm_up, steps)
    return interleave(candidates, rounds, on_round)
