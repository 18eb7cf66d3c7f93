"""Makes one training step at each level and compares it with the same step in float64."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.common.rules_file import RULES_BY
from amp_patch.levels import OPT_LEVELS
from amp_patch.requested_level import FORCED_BY

from .finding import Finding

#: The largest relative error of an update: some roundings of float32, float16 and bfloat16.
_ALLOWED = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_LOSS_SCALE = 128.0


@dataclass(frozen=True)
class Outcome:
    """A level.

    Attributes:
        level: its name.
        error: the norm of the update's difference from float64's, over the norm of that.
        allowed: for its half dtype.
        problem: of a step that raised; "" otherwise.
    """

    level: str
    error: float
    allowed: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the step is right."""
        return not self.problem and self.error <= self.allowed


def check_levels(device: torch.device) -> list[Outcome]:
    """Make a step at each level; amp is deactivated afterwards."""
    forced = {name: os.environ.pop(name, None) for name in (FORCED_BY, RULES_BY)}
    random_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        model, inputs = _model(), torch.randn(32, 16, dtype=torch.float32)
        targets = torch.randint(4, (32,))
        wanted = _update(copy.deepcopy(model).double(), inputs.double(), targets)
        batch = inputs.to(device), targets.to(device)
        return [_test(name, copy.deepcopy(model).to(device), batch, wanted) for name in OPT_LEVELS]
    finally:
        torch.random.set_rng_state(random_state)
        os.environ.update({name: value for name, value in forced.items() if value is not None})


def judge(tested: list[Outcome]) -> list[Finding]:
    """Return what is to be said of them."""
    found = []
    for one in tested:
        text = f"{one.level}: the update is off by {one.error:.1e}, {one.allowed:.0e} is allowed"
        if one.problem:
            text = f"{one.level}: the step raised {one.problem}"
        mend = "" if one.passed else "amp-patch doctor --json (and report what it says)"
        found.append(Finding("self-test", "ok" if one.passed else "broken", text, mend))
    return found


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4)
    )


def _update(model: nn.Module, inputs: Tensor, targets: Tensor, level: str | None = None) -> Tensor:
    """Make a step of SGD and return by how much all parameters moved, in float64.

    Args:
        model: changed by it.
        inputs, targets: a batch.
        level: None for a plain step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = _flat(optimizer)
    if level is None:
        F.cross_entropy(model(inputs), targets).backward()
    else:
        options: dict[str, Any] = {"opt_level": level, "verbosity": 0}
        if OPT_LEVELS[level].loss_scale == "dynamic":
            options["loss_scale"] = _LOSS_SCALE  # a dynamic one may skip its first step
        model, optimizer = amp.initialize(model, optimizer, **options)
        with amp.scale_loss(F.cross_entropy(model(inputs), targets), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    return _flat(optimizer) - before


def _flat(optimizer: torch.optim.Optimizer) -> Tensor:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return torch.cat([one.detach().double().cpu().flatten() for one in parameters])


def _test(level: str, model: nn.Module, batch: tuple[Tensor, Tensor], wanted: Tensor) -> Outcome:
    settings = OPT_LEVELS[level]
    is_full = settings.cast_model_type is torch.float32
    allowed = _ALLOWED[torch.float32 if is_full else settings.half_dtype]
    try:
        update = _update(model, *batch, level)
    except Exception as error:  # the point of the test
        return Outcome(level, float("inf"), allowed, f"{type(error).__name__}: {error}")
    finally:
        amp.deactivate()
    return Outcome(level, float((update - wanted).norm() / wanted.norm()), allowed)
