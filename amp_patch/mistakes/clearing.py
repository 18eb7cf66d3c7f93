"""``model.zero_grad()``: clears gradients wherever they are, those set aside for a backward, too.

Knows the prepared optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_patch.step.prepared_optimizers import PreparedOptimizers
from amp_patch.step.zero_grad import SETS_NONE


def replacements(optimizers: PreparedOptimizers) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method by its path, what makes its replacement."""
    return {"torch.nn.modules.module.Module.zero_grad": functools.partial(_noting, optimizers)}


def _noting(optimizers: PreparedOptimizers, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            original(self, *args, **kwargs)
            return
        params = list(self.parameters())
        cleared = set(map(id, params))
        steps = list(optimizers.steps.values())
        for step in steps:
            step.backward.cleared.note_by_model(cleared)
        if (args, kwargs) in SETS_NONE and "_is_replica" not in vars(self):
            for param in params:  # as torch does, after another walk through all modules
                param.grad = None
        else:
            original(self, *args, **kwargs)
        for step in steps:
            step.backward.cleared.follow(cleared)

    return zero_grad
