"""One cast of an activation for functions that take it one after the other, as q, k and v do.

Knows tensors and the forward that runs; nothing of functions, rules or weights.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .mode import mode

#: How to cast to the usual dtypes: Tensor.to(dtype) costs the host twice as much.
CAST: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
}
#: How often one cast is used. Autograd adds up in half what comes back to it: of 1,024 calls of a
#: cell in bfloat16 half of a weight's gradient is lost, under torch's autocast as well. What comes
#: back to several casts is added up in float32.
USES = {torch.float32: sys.maxsize, torch.float16: 64, torch.bfloat16: 32}


def _nothing() -> Any:
    return None


class _LastCast(threading.local):
    """The last cast of this thread, and what must still hold for it to be right.

    Both tensors are held weakly: a cast lives as long as the graph of a function that took it.

    What no operator has made, an input, say, may lie in memory that NumPy writes to, which no
    version tells of: its cast serves within one forward of a model.

    Attributes:
        entry: references to the source and to the cast, the cast's dtype, the version and the
            address that the source had, and the forwards that ran, or None where that is all one.
        uses_left: how often the cast may be used again, see `USES`.
    """

    def __init__(self) -> None:
        self.entry = _NO_CAST
        self.uses_left = 0
        _of_threads[threading.get_ident()] = vars(self)


_NO_CAST: tuple[Any, ...] = (_nothing, _nothing, None, 0, 0, None)
#: What each thread has in `_last`, by its number, which another one gets when it has ended.
_of_threads: dict[int, dict[str, Any]] = {}
_last = _LastCast()


def shared_cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an activation in another dtype: the last cast, where that was of the same values.

    Differentiable. The gradients of all functions that take one cast are added up in its dtype.

    Args:
        source: a plain tensor that is to be cast, for a function that neither writes to it nor
            hands it on.
        dtype: float32, float16 or bfloat16, and not the source's.
    """
    # Without grad no graph would hold the cast until its next use. And torch.jit.trace compares a
    # run with grad to one without: both have to come by the same lines here.
    if not _is_grad_enabled() or _is_tracing() or is_in_selective_checkpoint():
        return CAST[dtype](source)
    found = None if is_recorded() else last_cast(source, dtype)
    return new_cast(source, dtype) if found is None else found


def last_cast(source: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the last cast where it was of this, to this dtype, and is as it was made; else None.

    For a caller who has seen that grad is on and nothing recorded.
    """
    known, known_cast, known_dtype, version, address, forwards = _last.entry
    if known() is not source or known_dtype is not dtype:
        return None
    if forwards is not None and not (forwards and forwards is mode.models):
        return None
    cast: Any = known_cast()
    if cast is None or source._version != version or source.data_ptr() != address:
        return None
    cast._fix_weakref()
    is_as_made = cast._version == 0 and cast.requires_grad == source.requires_grad
    uses_left = _last.uses_left
    if not (is_as_made and uses_left):
        return None
    _last.uses_left = uses_left - 1
    return cast  # type: ignore[no-any-return]  # of a reference


def new_cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    """As `shared_cast`, for a caller whom `last_cast` gave None."""
    cast = CAST[dtype](source)
    if type(cast) is Tensor and not _are_transforms_active():  # whose tensors end with it
        try:
            state = source._version, source.data_ptr()
        except RuntimeError:  # made in inference mode, or sparse: it has no version or no address
            return cast
        forwards = mode.models if source.grad_fn is None else None  # each makes a tuple anew
        _last.entry = (weakref.ref(source), weakref.ref(cast), dtype, *state, forwards)
        _last.uses_left = USES[dtype]
    return cast


def forget() -> None:
    """Let no thread use its last cast again: something was written that moves no version."""
    for last in list(_of_threads.values()):
        last["entry"] = _NO_CAST


def is_recorded() -> bool:
    """Tell whether operators are recorded: a cast made before would be a constant there."""
    if _count_dispatch_modes() and any(map(_get_dispatch_mode, _RECORDING)):
        return True
    return _is_tracing() or _are_transforms_active()


def is_in_selective_checkpoint() -> bool:
    """Tell whether a selective checkpoint sees the operators that are called.

    Its repetition must call those of the first run, in their order.
    """
    if not _count_dispatch_modes():
        return False
    return type(_get_current_dispatch_mode()).__module__ == "torch.utils.checkpoint"


_is_grad_enabled = torch.is_grad_enabled
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_get_dispatch_mode = torch._C._get_dispatch_mode
_RECORDING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
_is_tracing = torch._C._is_tracing
# Not by asking for functorch's stack: the question makes one in this thread, and from then on each
# node of a backward copies it.
_are_transforms_active = torch._C._are_functorch_transforms_active
