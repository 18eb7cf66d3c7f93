"""What torch's engines for many ranks tell of themselves: FSDP of both kinds, ZeRO.

Knows modules and optimizers of torch; nothing of masters, levels or scales.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from .groups import StepRanks, is_on, without_repetition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


def ranks_given(
    given: ProcessGroup | None, models: Iterable[nn.Module], optimizer: Optimizer, steps_share: bool
) -> StepRanks | None:
    """Return the ranks of an optimizer that do not follow from its parameters.

    Args:
        given: the process group that the user gave.
        models: looked through for `FullyShardedDataParallel` (FSDP1), whose parameters are plain
            tensors of this rank's part.
        optimizer: maybe a `ZeroRedundancyOptimizer`.
        steps_share: whether this rank handles the gradients of its own share alone.

    Returns:
        None where there is neither: then the parameters tell (`groups_of`).
    """
    found: list[ProcessGroup] = []
    if is_on():
        found = [one.process_group for model in models for one in _fsdp1_modules(model)]
        if steps_share:
            found.append(optimizer.process_group)  # type: ignore[attr-defined]  # it is one
    if given is not None:
        return StepRanks(without_repetition([given]), bool(found))
    return StepRanks(without_repetition(found), True) if found else None


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return what a `ZeroRedundancyOptimizer` steps this rank's share of the parameters by.

    Any other optimizer stands for itself.

    Raises:
        TypeError: one with ``overlap_with_ddp``, which steps inside of the backward.
    """
    if not is_zero(optimizer):
        return optimizer
    zero: Any = optimizer
    if zero._overlap_with_ddp:
        raise TypeError(
            "a ZeroRedundancyOptimizer must step when optimizer.step() is called, after the "
            "gradients were unscaled; got one with overlap_with_ddp=True, which steps inside of "
            "backward(). Call ZeroRedundancyOptimizer(..., overlap_with_ddp=False)."
        )
    found: Optimizer = zero.optim
    # zero broadcasts what its own lists hold: the half parameters, not the masters of them.
    found.param_groups[:] = [
        {**group, "params": list(group["params"])} for group in found.param_groups
    ]
    return found


def is_zero(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is a `ZeroRedundancyOptimizer`."""
    kind = _known("torch.distributed.optim", "ZeroRedundancyOptimizer")
    return kind is not None and isinstance(optimizer, kind)


def is_flat(model: nn.Module) -> bool:
    """Return whether a model is, or has parts, of `FullyShardedDataParallel` (FSDP1)."""
    return bool(_fsdp1_modules(model))


def refuse_original_params(models: Iterable[nn.Module], level: str) -> None:
    """Raise for FSDP1 with ``use_orig_params=True``, whose parameters are views of flat ones.

    Args:
        models: about to be stored in half.
        level: its name.

    Raises:
        RuntimeError: as said.
    """
    for model in models:
        if any(one._use_orig_params for one in _fsdp1_modules(model)):
            raise RuntimeError(
                f"opt_level {level} stores parameters in half, and those of a model in "
                "FullyShardedDataParallel must be the flat ones; got use_orig_params=True, which "
                "keeps float32 ones beneath. Call FullyShardedDataParallel(model, "
                "use_orig_params=False), or fully_shard(model), or take opt_level O1 or O4."
            )


def flat_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that `FullyShardedDataParallel` (FSDP1) wraps."""
    kind = _known("torch.distributed.fsdp", "FullyShardedDataParallel")
    return [] if kind is None else [one for one in model.modules() if isinstance(one, kind)]


def keeps_flat_gradients(module: Any) -> bool:
    """Return whether the last backward of a module of FSDP1 was under its ``no_sync()``.

    It leaves whole gradients then, in the place of this rank's part of their sum.
    """
    params = [] if module._flat_param is None else [module._flat_param]
    is_whole = any(p.grad is not None and p.grad.shape != p.shape for p in params)
    return is_whole or not module._sync_gradients


def _fsdp1_modules(model: nn.Module) -> list[Any]:
    return [one for one in flat_modules(model) if one.sharding_strategy.name != "NO_SHARD"]


def _known(module: str, name: str) -> Any:
    """Return a class of torch; None where nobody has imported it, so that there is no instance."""
    return getattr(sys.modules.get(module), name, None)
