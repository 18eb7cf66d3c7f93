"""A model whose training diverged gets earlier weights back: its loss scale begins anew with them.

An LR finder does so, and a script that goes back to its best weights. The overflows have driven a
dynamic scale to where float16 gradients become 0, and the weights that are loaded would stand
still. Knows the prepared optimizers and their scalers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.step.optimizer_step import OptimizerStep
from amp_patch.step.prepared_optimizers import PreparedOptimizers


def replacements(optimizers: PreparedOptimizers) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method by its path, what makes its replacement."""
    path = "torch.nn.modules.module.Module.load_state_dict"
    return {path: functools.partial(_beginning_anew, optimizers)}


def _beginning_anew(optimizers: PreparedOptimizers, original: Callable[..., Any]) -> Any:
    made_before: weakref.WeakKeyDictionary[OptimizerStep, int] = weakref.WeakKeyDictionary()

    def has_trained(step: OptimizerStep) -> bool:
        """Return whether a step was made since the scale began.

        A scale that only fell since then looks for the one that the gradients need, which may be
        below 1: a script that loads weights every few steps (federated averaging) must let it.
        """
        return _count_made(step) > made_before.get(step, 0)

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        lost = [
            (step, scaler)
            for step in optimizers.steps.values()
            for scaler in optimizers.scalers.of(step.scalers)
            if _diverges(scaler) and has_trained(step)
        ]
        loaded = set(map(id, self.parameters())) if lost else set()
        for step, scaler in lost:
            if not loaded.isdisjoint(map(id, step.backward.pairs().model)):
                made_before[step] = _count_made(step)
                scaler.load_state_dict({"loss_scale": scaler.rule.init_scale, "unskipped": 0})
        return result

    return load_state_dict


def _count_made(step: OptimizerStep) -> int:
    count = step.skip.count
    return count.steps - count.skipped


def _diverges(scaler: LossScaler) -> bool:
    """Return whether the scale is lost, and the last pass lowered it or met the floor."""
    return scaler.is_lost() and (scaler.reduced or scaler.exhausted)
