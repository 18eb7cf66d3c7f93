"""Sharding that comes after `amp.initialize`: it replaces the parameters that optimizers step.

Knows what was prepared; nothing of how an engine shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from amp_patch.step.prepared_optimizers import PreparedOptimizers
from amp_patch.weights.fp32_values import FP32Values

#: The module that has FSDP of either kind.
FSDP = "torch.distributed.fsdp"


def replacements(
    optimizers: PreparedOptimizers, values: FP32Values
) -> dict[str, Callable[[Any], Any]]:
    """Return what makes replacements of torch's functions that shard, which are in `FSDP`."""

    def refuse(module: Any, call: str) -> None:
        modules = module if isinstance(module, (list, tuple)) else [module]
        params = [p for one in modules if isinstance(one, nn.Module) for p in one.parameters()]
        stepped = set(map(id, optimizers.params()))
        count = sum(id(param) in stepped or values.holds(param) for param in params)
        if count:
            raise RuntimeError(
                f"{call} must come before amp.initialize(), and before the optimizer is made, for "
                f"it replaces the parameters; got {count} of {len(params)} parameters that "
                f"amp.initialize() has prepared. Call model = {call}, then make the optimizer of "
                "model.parameters(), then call amp.initialize(model, optimizer)."
            )

    def fully_shard(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def refusing(module: Any, *args: Any, **kwargs: Any) -> Any:
            refuse(module, "fully_shard(model)")
            return original(module, *args, **kwargs)

        return refusing

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def refusing_init(wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            refuse(module, "FullyShardedDataParallel(model)")
            return original(wrapper, module, *args, **kwargs)

        return refusing_init

    return {
        f"{FSDP}.fully_shard": fully_shard,
        f"{FSDP}.FullyShardedDataParallel.__init__": wrap,
    }
