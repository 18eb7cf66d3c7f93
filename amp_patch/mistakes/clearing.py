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


def replacements(optimizers: PreparedOptimizers) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method by its path, what makes its replacement."""
    return {"torch.nn.modules.module.Module.zero_grad": functools.partial(_noting, optimizers)}


def _noting(optimizers: PreparedOptimizers, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            original(self, *args, **kwargs)
            return
        cleared = set(map(id, self.parameters()))
        steps = list(optimizers.steps.values())
        for step in steps:
            step.backward.cleared.note_by_model(cleared)
        original(self, *args, **kwargs)
        for step in steps:
            step.backward.cleared.follow(cleared)

    return zero_grad
