"""torch's functions that clip gradients, given parameters whose masters are what is stepped.

At O2 and O5 they clip the masters' gradients. Gradients that are still scaled are refused. Knows
the prepared optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.utils.clip_grad
from torch import Tensor

from amp_patch.step.optimizer_backward import OptimizerBackward
from amp_patch.step.prepared_optimizers import PreparedOptimizers

_OF_PARAMETERS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")


def replacements(optimizers: PreparedOptimizers) -> dict[str, Callable[[Any], Any]]:
    """Return, for each function by its path, what makes its replacement."""
    by_name: dict[str, Callable[[Any], Any]] = {
        name: functools.partial(_clipping, optimizers, f"torch.nn.utils.{name}()")
        for name in _OF_PARAMETERS
    }
    by_name["get_total_norm"] = functools.partial(_measuring, optimizers)
    return {
        f"{module.__name__}.{name}": make
        for name, make in by_name.items()
        for module in (torch.nn.utils, torch.nn.utils.clip_grad)
        if hasattr(module, name)
    }


def _clipping(
    optimizers: PreparedOptimizers, call: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        stepped, owners = _stepped(optimizers, parameters, call)
        result = original(stepped, *args, **kwargs)
        for owner in owners:
            owner.note_clipped()
        return result

    return clip


def _measuring(optimizers: PreparedOptimizers, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        wanted = set(map(id, given))
        true: dict[int, Tensor] = {}
        for step in list(optimizers.steps.values()):
            model, _ = step.backward.pairs()
            params = [param for param in model if id(param.grad) in wanted]
            stepped, _ = _stepped(optimizers, params, "torch.nn.utils.get_total_norm()")
            for param, one in zip(params, stepped, strict=True):
                if one.grad is not None:
                    true[id(param.grad)] = one.grad
        return original([true.get(id(grad), grad) for grad in given], *args, **kwargs)

    return get_total_norm


def _stepped(
    optimizers: PreparedOptimizers, parameters: Any, call: str
) -> tuple[Any, list[OptimizerBackward]]:
    """Return what is stepped for each parameter, with its gradient unscaled, and whose they are.

    Raises:
        RuntimeError: it is still scaled.
    """
    if not isinstance(parameters, Iterable):
        return parameters, []
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    wanted = set(map(id, given))
    masters: dict[int, Tensor] = {}
    owners = []
    for step in list(optimizers.steps.values()):
        pairs = step.backward.pairs()
        if wanted.isdisjoint(map(id, pairs.model)) and wanted.isdisjoint(map(id, pairs.master)):
            continue
        step.backward.refuse_scaled(call)
        owners.append(step.backward)
        masters.update(zip(map(id, pairs.model), pairs.master, strict=True))
    if not given:
        return parameters, []  # of an empty generator torch warns
    return [masters.get(id(param), param) for param in given], owners
