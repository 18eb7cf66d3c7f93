"""True gradients to which the backward of a scaled loss may add; of what nobody unscales.

What it adds is divided by the scale, and the sum is true. To multiply what is there by the scale
instead would overflow in half precision, and be for nothing where the backward does not reach it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef

from amp_patch.common.scales import Scale
from amp_patch.distributed.shards import is_spread
from amp_patch.weights.parameter_lists import stored_grad

from .any_values import are_any


class TrueGradients:
    """Keeps gradients true while a block of a scaled loss is open.

    A gradient of 0 is none: what is added to it stays multiplied, which loses no small numbers.

    Args:
        scale: of the block.

    Attributes:
        is_on: whether backwards are of this block; False while another is open inside of it.
    """

    def __init__(self, scale: Scale) -> None:
        self._scale, self._thread = scale, threading.get_ident()
        self.is_on = True
        self._kept: dict[int, TensorWeakRef] = {}  # by the ids of parameters
        self._added_to: set[int] = set()
        # Of each gradient, with its version then, whether it was not 0: to look waits for a device.
        self._seen: dict[int, tuple[TensorWeakRef, int, bool]] = {}
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
        for param in chosen:
            if stored_grad(param) is None:
                continue
            self._kept[id(param)] = TensorWeakRef(param)
            node: Any = get_gradient_edge(param).node
            divide = functools.partial(self._divide, id(param))
            self._hooks.append((node, node.register_prehook(divide)))
        if self._hooks:
            _stash(_OF_THREAD, self._thread)

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
        if not (_is_stashed(_OF_THREAD) and _stashed(_OF_THREAD) == self._thread):
            return None  # a backward of another thread
        if not self._is_any(key):
            del self._kept[key]  # cleared
            return None
        self._added_to.add(key)
        return tuple(map(self._finite, grads))

    def _is_any(self, key: int) -> bool:
        """Return whether a gradient is there and not 0, by a look at all that may be asked for."""
        param = self._kept[key]()
        held = None if param is None else stored_grad(param)
        if held is None:
            return False
        seen = self._seen.get(key)
        if seen is None or seen[0]() is not held or seen[1] != held._version:
            self._look()
        return self._seen[key][2]

    def _look(self) -> None:
        """Look at what is not as it was seen last: to look at each in its hook would wait often."""
        params = {key: known() for key, known in self._kept.items()}
        grads = {key: stored_grad(one) for key, one in params.items() if one is not None}
        there = {key: grad for key, grad in grads.items() if grad is not None}
        found = zip(there.items(), are_any([*there.values()]), strict=True)
        self._seen = {key: (TensorWeakRef(g), g._version, is_any) for (key, g), is_any in found}

    def _finite(self, grad: Tensor) -> Tensor:
        """Return a gradient divided, or 0 where it overflowed: what was there before stays."""
        scale = self._scale
        true = grad / (scale.to(grad.device) if isinstance(scale, Tensor) else scale)
        return true if true.is_sparse else torch.where(true.isfinite().all(), true, 0.0)


#: What a thread stashes under a name its backwards find, also where they run in threads of torch's,
#: as those of a GPU do, and those that call backwards themselves.
_OF_THREAD = "amp_patch.thread"
_stashed, _is_stashed = torch._C._get_obj_in_tls, torch._C._is_key_in_tls


def _stash(key: str, value: object) -> None:
    if _takes_a_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _takes_a_reference() -> bool:
    """Return whether torch gives back a reference that it never took, as torch 2.6 does.

    What it was given is freed then while others have it.
    """
    probe = object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))  # the one that may be given back
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("amp_patch.probe", probe)
    return sys.getrefcount(probe) == before
