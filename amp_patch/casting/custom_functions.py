"""Runs the backward of a ``torch.autograd.Function`` in the mode that its forward was called in.

The model and the region around that call are over when the backward runs, which may run the
forward again (a checkpoint of a script's own, a reversible net, an adjoint). Knows the mode of the
thread and torch's nodes; nothing of casts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from amp_patch.patching import Patches

from .mode import PROCESS, mode


def install(patches: Patches) -> None:
    """Have each node note the mode that it is made in, and run its backward there.

    The class of the nodes is patched, and not ``Function.apply``: scripts hold that as
    ``swish = Swish.apply``, and torch's transforms go by another.

    Args:
        patches: undoes it.
    """
    patches.replace(BackwardCFunction, _NOTED, None)
    # not by its path: the original is that of `object`, which anybody may have bound
    patches.replace(BackwardCFunction, "__init__", _noting(BackwardCFunction.__init__))
    for name in ("apply", "apply_boxed"):
        original = vars(BackwardCFunction).get(name)
        if original is not None:  # torch 2.6 has no second way
            patches.replace(BackwardCFunction, name, _in_noted_mode(original))


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    """Note the mode with a node, which torch makes before it calls the forward."""

    @functools.wraps(original)
    def init(self: Any) -> None:
        original(self)
        # `torch_sites` has torch's checkpoints repeat their forward alone in its mode: hooks that
        # the backward within theirs calls are to run as those of all others.
        if not _is_torchs_checkpoint(self) and not mode.is_of_process():
            setattr(self, _NOTED, mode.note())

    return init


def _in_noted_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run what the engine calls of a node in the mode that the node has noted, if any."""

    @functools.wraps(original)
    def apply(self: Any, *grads: Any) -> Any:
        noted = getattr(self, _NOTED)
        if noted is None and mode.in_hook and not _is_torchs_checkpoint(self):
            noted = PROCESS  # the hook calls this backward, and casts are off in it alone
        return original(self, *grads) if noted is None else mode.run(noted, original, self, *grads)

    return apply


def _is_torchs_checkpoint(node: Any) -> bool:
    return node._forward_cls is CheckpointFunction


# What nodes have the mode by: their own attribute, None of the class for all others.
_NOTED = "_amp_patch_mode"
