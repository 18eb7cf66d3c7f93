"""A weight that a collective of ``torch.distributed`` writes to counts as written to.

torch moves the version of no tensor there. So casts of a weight would stay those of before, and
what other ranks have sent into a master would be taken for what is to follow its half parameter.
What a script sums over ranks is handed on as well. Knows the fp32 values; no rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .fp32_values import FP32Values

#: Those that write to each tensor of a list, their first argument. The functions that users call
#: stay as they are: torch's compiler knows them.
_WRITING = ("allreduce", "broadcast", "recv", "reduce", "scatter")
#: Those that sum.
_SUMMING = ("allreduce", "reduce")


def replacements(
    values: FP32Values, on_summed: Callable[[Sequence[Tensor]], None]
) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method of torch by its path, what makes its replacement.

    Args:
        values: know what a state dict has of half tensors.
        on_summed: gets what is to be summed over ranks.
    """
    if not torch.distributed.is_available():
        return {}
    return {
        f"torch.distributed.ProcessGroup.{name}": functools.partial(
            _counting, values, on_summed if name in _SUMMING else None
        )
        for name in _WRITING
    }


def _counting(
    values: FP32Values,
    on_summed: Callable[[Sequence[Tensor]], None] | None,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def counting(group: Any, tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        every = [tensors] if isinstance(tensors, Tensor) else tensors
        if on_summed is not None:
            on_summed(every)
        work = original(group, tensors, *args, **kwargs)
        for tensor in every:
            if isinstance(tensor, nn.Parameter) or values.handed_out.has(tensor):
                # No other tensor's version moves: autograd may have saved it, as the statistics of
                # a batch norm, and would refuse the backward.
                increment_version(tensor)
        return work

    return counting
