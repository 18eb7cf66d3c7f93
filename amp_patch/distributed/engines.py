"""What torch's engines for many ranks tell of themselves: FSDP of both kinds, ZeRO.

Knows modules and optimizers of torch; nothing of masters, levels or scales.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from .groups import is_on, without_repetition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


def groups_given(
    given: ProcessGroup | None, models: Iterable[nn.Module], optimizer: Optimizer
) -> list[ProcessGroup] | None:
    """Return the groups of an optimizer that do not follow from its parameters.

    Args:
        given: by the user.
        models: looked through for `FullyShardedDataParallel` (FSDP1), whose parameters are plain
            tensors of this rank's part.
        optimizer: maybe a `ZeroRedundancyOptimizer`.

    Returns:
        None where there is neither: then the parameters tell (`groups_of`).
    """
    if given is not None:
        return without_repetition([given])
    if not is_on():
        return None
    found = [module.process_group for model in models for module in _fsdp1_modules(model)]
    return without_repetition(found) if found else None


def _fsdp1_modules(model: nn.Module) -> list[Any]:
    kind = _known("torch.distributed.fsdp", "FullyShardedDataParallel")
    return [] if kind is None else [one for one in model.modules() if isinstance(one, kind)]


def _known(module: str, name: str) -> Any:
    """Return a class of torch; None where nobody has imported it, so that there is no instance."""
    return getattr(sys.modules.get(module), name, None)
