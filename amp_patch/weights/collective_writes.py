"""What a collective of ``torch.distributed`` writes to counts as written to.

torch moves the version of no tensor there. So casts of a weight or of an activation would stay
those of before, and what other ranks have sent into a master would be taken for what is to follow
its half parameter. What a script sums over ranks is handed on as well. Knows the fp32 values; no
rank.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from amp_patch.casting import shared_casts
from amp_patch.distributed.pending_sums import pending_sums

from .fp32_values import FP32Values

#: Those that write to their first argument: a tensor, or lists of some. The functions that users
#: call stay as they are: torch's compiler knows them. Each version of torch has some of them.
_WRITING = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter", "gather"),
    *("recv", "recv_anysource", "alltoall", "alltoall_base", "all_to_all_single"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
#: Those that sum.
_SUMMING = ("allreduce", "reduce")
#: Methods of ``torch.distributed.Work`` that wait for what has been called, or ask whether it is
#: done: what it writes is there by then, and not before.
_ENDING = ("wait", "synchronize", "block_current_stream", "is_completed")


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
    writes = CollectiveWrites(values)
    made: dict[str, Callable[[Any], Any]] = {}
    for name in _WRITING:
        if hasattr(torch.distributed.ProcessGroup, name):
            of_sums = on_summed if name in _SUMMING else None
            make = functools.partial(writes.counting, of_sums)
            made[f"torch.distributed.ProcessGroup.{name}"] = make
    for name in _ENDING:
        if hasattr(torch.distributed.Work, name):
            made[f"torch.distributed.Work.{name}"] = writes.ending
    return made


class CollectiveWrites:
    """What collectives write to, when they are called and when they are done.

    Args:
        values: know what a state dict has of half tensors.
    """

    def __init__(self, values: FP32Values) -> None:
        self._values = values
        # what those write to that may go on, of the tensors whose version moves
        self._written: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()

    def counting(
        self,
        on_summed: Callable[[Sequence[Tensor]], None] | None,
        original: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Return a method of a process group that counts as a write to its first argument.

        Args:
            on_summed: gets what it writes to; may be None.
            original: the method.
        """

        @functools.wraps(original)
        def counting(group: Any, *args: Any, **kwargs: Any) -> Any:
            every = [*_tensors(args[:1] or tuple(kwargs.values()))]
            if on_summed is not None:
                on_summed(every)
            work = original(group, *args, **kwargs)
            if on_summed is not None and work is not None:
                pending_sums.note(work, every)
            # No other tensor's version moves: autograd may have saved it, as the statistics of a
            # batch norm, and would refuse the backward.
            versioned = [one for one in every if self._has_version(one)]
            if versioned and work is not None:
                self._written[work] = versioned
            _count(versioned)
            return work

        return counting

    def ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of a work that is over when, or tells whether, its writes are there."""

        @functools.wraps(original)
        def ending(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            if result is not False:  # `is_completed` says whether it is
                _count(self._written.pop(work, ()))
                pending_sums.end(work)
            return result

        return ending

    def _has_version(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or self._values.handed_out.has(tensor)


def _count(versioned: Sequence[Tensor]) -> None:
    """Have tensors cast anew: these, and every activation."""
    shared_casts.forget()
    for tensor in versioned:
        increment_version(tensor)


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors(one)
