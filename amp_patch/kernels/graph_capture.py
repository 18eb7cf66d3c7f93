"""What a CUDA graph leaves to the host, which does it after each replay; knows no step or scale.

While a graph is captured nothing runs, and the host may neither wait for the device nor ask it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class Captures:
    """Tells whoever reads back what a device did when to do so."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] | None = None

    def are_made(self, device: torch.device) -> bool:
        """Return whether what is launched on a device now is captured, and does not run."""
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[Callable[[], object]]]:
        """Give the list of what is to be done after each replay; it fills inside the block."""
        self._actions = []
        try:
            yield self._actions
        finally:
            self._actions = None

    def can_follow(self, device: torch.device) -> bool:
        """Return whether `follow` finds somebody who calls, now or after each replay."""
        return not self.are_made(device) or self._actions is not None

    def follow(self, device: torch.device, action: Callable[[], object]) -> None:
        """Call ``action`` now, or after each replay of the graph that is captured on a device.

        Raises:
            RuntimeError: nobody calls it then.
        """
        if not self.are_made(device):
            action()
        elif self._actions is not None:
            self._actions.append(action)
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
        """Raise where the host cannot wait, for a graph is captured.

        Raises:
            RuntimeError: as said.
        """
        if self.are_made(device):
            raise RuntimeError(
                "a step in a CUDA graph must be one that its device can skip: the optimizer is "
                "stepped by kernels (fused_step=True) or is one of torch's with fused=True, its "
                "momentum is there, its gradients are dense; got one for which the host has to "
                "wait. Step it outside of the graph, or call amp.initialize(..., "
                "fused_step=True)."
            )


#: Of the whole process: only one graph is captured at a time.
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
