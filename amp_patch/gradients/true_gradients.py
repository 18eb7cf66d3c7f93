"""True gradients to which the backward of a scaled loss may add; of what nobody unscales.

What it adds is divided by the scale, and the sum is true. To multiply what is there by the scale
instead would overflow in half precision, and be for nothing where the backward does not reach it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef

from amp_patch.distributed.shards import is_spread
from amp_patch.kernels import values
from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.parameter_lists import stored_grad


class TrueGradients:
    """Keeps gradients true while a block of a scaled loss is open.

    A gradient of 0 is none: what is added to it stays multiplied, which loses no small numbers.

    Args:
        scale: of the block.

    Attributes:
        is_on: whether backwards are of this block; False while another is open inside of it.
    """

    def __init__(self, scale: float | Tensor) -> None:
        self._scale, self._thread = scale, threading.get_ident()
        self.is_on = True
        self._kept: dict[int, TensorWeakRef] = {}  # by the ids of parameters
        self._added_to: set[int] = set()
        # Gradients and versions at which they were not 0: to look again would wait for a device.
        self._seen: dict[int, tuple[TensorWeakRef, int]] = {}
        self._hooks: list[tuple[Any, Any]] = []  # each with its node, which might go without it

    def keep(self, params: Iterable[Tensor]) -> None:
        """Follow, from now on, what backwards add to these, which have true gradients."""
        if torch.is_inference_mode_enabled():
            return
        chosen = [
            param
            for param in dict.fromkeys(params)
            if param.requires_grad and not is_spread(param) and id(param) not in self._kept
        ]
        grads = [stored_grad(param) for param in chosen]
        for param, grad, is_one in zip(chosen, grads, _are_any(grads), strict=True):
            if grad is None or not is_one:
                continue
            self._kept[id(param)] = TensorWeakRef(param)
            self._seen[id(param)] = TensorWeakRef(grad), grad._version
            node: Any = get_gradient_edge(param).node
            divide = functools.partial(self._divide, id(param))
            self._hooks.append((node, node.register_prehook(divide)))

    def end(self) -> None:
        """The block is over."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def has(self, param: Tensor) -> bool:
        """Return whether a parameter has the gradient still that it had, with what was added."""
        known = self._kept.get(id(param))
        return known is not None and known() is param and stored_grad(param) is not None

    def is_as_it_was(self, param: Tensor) -> bool:
        """Return whether it has, and nothing was added."""
        return self.has(param) and id(param) not in self._added_to

    def _divide(self, key: int, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not self.is_on or key not in self._kept:
            return None
        if grads[0].is_cpu and threading.get_ident() != self._thread:
            return None  # a backward of another thread, which runs in that on a CPU
        param = self._kept[key]()
        held = None if param is None else stored_grad(param)
        seen, version = self._seen[key]
        is_as_seen = held is not None and seen() is held and version == held._version
        if not (is_as_seen or _are_any([held])[0]):
            del self._kept[key]  # cleared in the block
            return None
        self._added_to.add(key)
        return tuple(map(self._finite, grads))

    def _finite(self, grad: Tensor) -> Tensor:
        """Return a gradient divided, or 0 where it overflowed: what was there before stays."""
        scale = self._scale
        true = grad / (scale.to(grad.device) if isinstance(scale, Tensor) else scale)
        return true if true.is_sparse else torch.where(true.isfinite().all(), true, 0.0)


def _are_any(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return of each gradient whether it is there and not 0; waits for a device once."""
    found = [grad is not None for grad in grads]
    rows = [
        row
        for row, grad in enumerate(grads)
        if grad is not None and not captures.are_made(grad.device)
    ]
    flags = [values(cast(Tensor, grads[row])).any() for row in rows]
    if flags:
        read = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        for row, is_any in zip(rows, read, strict=True):
            found[row] = is_any
    return found
