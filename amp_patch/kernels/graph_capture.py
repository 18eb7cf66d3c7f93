"""Tells whether a CUDA graph is captured, and collects what the host must do for its replays.

While a graph is captured nothing runs, and the host may neither wait for the device nor ask it. So
what the host does in each step is done after each replay instead. Knows no step and no loss scale.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class HostSide:
    """What a CUDA graph needs of the host when it is replayed.

    Attributes:
        actions: to be called after each replay.
        memory: made outside of the graph, which reads or copies it at each replay: it must live as
            long.

    Args:
        device: the one that it replays on; None: the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.actions: list[Callable[[], object]] = []
        self.memory: dict[int, Tensor] = {}


@functools.cache
def type_of(device: torch.device) -> str:
    """Return ``device.type``, which torch makes anew at each look: 3 us after a forward."""
    return device.type


class Captures:
    """Collects what a graph needs of the host, from whatever code runs while it is captured.

    `amp_patch.cuda_graph.capture` calls `collect` and sees to it. Who captures by other means, as
    ``torch.cuda.graph()``, does not. Then an action that must follow each replay is refused, and
    memory that the graph copies from is kept until the process ends, for nothing tells when the
    graph goes.

    Attributes:
        are_rehearsed: whether the step that runs is made as one that is captured next.
    """

    def __init__(self) -> None:
        self._collected: HostSide | None = None
        self._memory_of_others: dict[int, Tensor] = {}
        self.are_rehearsed = False
        self._uses: Counter[Callable[[int], object]] = Counter()

    def are_made(self, device: torch.device) -> bool:
        """Return whether what is launched on a device now is captured, and does not run."""
        return type_of(device) == "cuda" and torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def collect(self, device: torch.device | None = None) -> Iterator[HostSide]:
        """Give what the graph needs of the host that is captured inside the block.

        Args:
            device: see `HostSide`.
        """
        self._collected = host_side = HostSide(device)
        try:
            yield host_side
        finally:
            self._collected = None

    @contextlib.contextmanager
    def rehearse(self) -> Iterator[None]:
        """Make a step in the block as one that is captured next; who notes uses prepares for it."""
        self.are_rehearsed = True
        try:
            yield
            for reserve, count in self._uses.items():
                reserve(count)
        finally:
            self.are_rehearsed = False
            self._uses.clear()

    def note_use(self, reserve: Callable[[int], object]) -> None:
        """Have ``reserve`` called after the rehearsal, with how often this was called for it."""
        self._uses[reserve] += 1

    def keep(self, memory: Tensor) -> None:
        """Keep memory alive for the graph that is captured, and was not made in it."""
        collected = self._collected
        owner = self._memory_of_others if collected is None else collected.memory
        owner[id(memory)] = memory

    def release(self, host_side: HostSide) -> None:
        """Give up the memory of a graph that is replayed no more; waits for replays under way."""
        if host_side.memory and torch.cuda.is_initialized():
            if torch.cuda.is_current_stream_capturing():  # when the host cannot wait
                self._memory_of_others.update(host_side.memory)
            else:
                torch.cuda.synchronize(host_side.device)
        host_side.memory.clear()

    def can_follow(self, device: torch.device) -> bool:
        """Return whether `follow` would not raise."""
        return not self.are_made(device) or self._collected is not None

    def follow(self, device: torch.device, action: Callable[[], object]) -> None:
        """Call ``action`` now, or after each replay of the graph that is captured on a device.

        Raises:
            RuntimeError: somebody else captures, who would not call it.
        """
        if not self.are_made(device):
            action()
        elif self._collected is not None:
            self._collected.actions.append(action)
        else:
            raise RuntimeError(
                "a step whose device skips it is captured by amp_patch.cuda_graph.capture(), "
                "which tells the host of each replay; got a capture without it, by "
                "torch.cuda.graph() or the like; call "
                "amp_patch.cuda_graph.capture(step_function)."
            )

    def wait_for(self, flag: Tensor) -> bool:
        """Return whether a flag of one element is not 0. Waits for its device.

        Raises:
            RuntimeError: see `refuse_waiting`.
        """
        self.refuse_waiting(flag.device)
        return bool(flag.item())

    def refuse_waiting(self, device: torch.device) -> None:
        """Say before the host waits for a device whether it may.

        Raises:
            RuntimeError: a graph is captured, during which it cannot.
        """
        if self.are_made(device):
            raise RuntimeError(
                "a step in a CUDA graph must be one that its device can skip: the optimizer is "
                "stepped by kernels (fused_step=True) or is one of torch's with fused=True, its "
                "momentum is there, its gradients are dense; got one for which the host has to "
                "wait. Step it outside of the graph, or call amp.initialize(..., "
                "fused_step=True)."
            )


#: Of the whole process: one graph is captured at a time.
captures = Captures()


def in_living_graphs(params: Iterable[Tensor]) -> list[Tensor]:
    """Return those of the parameters to which an autograd graph leads that somebody holds.

    As long as it lives, all graphs share the node that adds to a parameter's gradient, and this
    node works on the stream on which it was made. So a loss that is kept from a step on another
    stream has the backward of a captured step leave the stream that is captured.
    """
    required = [param for param in params if param.requires_grad]
    for param in required:
        _notes_of(param)[_MARK] = True
    # A node that nobody else holds has gone with the mark, and is made again here.
    return [param for param in required if _notes_of(param).pop(_MARK, False)]


def _notes_of(param: Tensor) -> dict[str, Any]:
    """Return what anybody noted at the node that adds to a parameter's gradient."""
    node: Any = get_gradient_edge(param).node
    notes: dict[str, Any] = node.metadata
    return notes


_MARK = "amp_patch saw this node"
