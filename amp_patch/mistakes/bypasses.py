"""Calls of an optimizer's class that pass by what `amp.initialize` put in the optimizer's place.

Wrappers make them that take on the class of what they wrap (``LightningOptimizer``), and so does
``type(optimizer).zero_grad(optimizer)``. Knows the prepared optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from amp_patch.step.prepared_optimizers import PreparedOptimizers


def replacements(optimizers: PreparedOptimizers) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method by its path, what makes its replacement."""
    return {
        f"torch.optim.optimizer.Optimizer.{name}": functools.partial(_handed_on, optimizers)
        for name in ("add_param_group", "zero_grad")
    }


def _handed_on(optimizers: PreparedOptimizers, original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__

    @functools.wraps(original)
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        step = optimizers.steps.get(optimizers.originals_of(self))
        replaced = None if step is None else step.methods.in_place_of(name)
        if replaced is None:
            return original(self, *args, **kwargs)
        return replaced(*args, **kwargs)

    return method
