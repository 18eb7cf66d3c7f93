"""One cast of an activation for functions that take it one after the other, as q, k and v do.

Knows tensors; nothing of functions, rules or weights.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: How to cast to the usual dtypes: Tensor.to(dtype) costs the host twice as much.
CAST: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
}


def _nothing() -> Any:
    return None


class _LastCast(threading.local):
    """The last cast of this thread, and what must still hold for it to be right.

    Both tensors are held weakly: a cast lives as long as the graph of a function that took it.
    """

    def __init__(self) -> None:
        self.source: Callable[[], Any] = _nothing
        self.cast: Callable[[], Any] = _nothing
        self.state: tuple[Any, ...] = ()


_last = _LastCast()


def shared_cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an activation in another dtype: the last cast, where that was of the same values.

    Differentiable. The gradients of all functions that take one cast are added up in its dtype.

    Args:
        source: a plain tensor, for a function that neither writes to it nor hands it on.
        dtype: float32, float16 or bfloat16, and not the source's.
    """
    if not _is_grad_enabled():  # nothing would hold the cast
        return CAST[dtype](source)
    if _last.source() is source:
        cast = _last.cast()
        if cast is not None:
            cast._fix_weakref()
            if cast.dtype is dtype and _last.state == _state(source, cast) and not is_recorded():
                found: Tensor = cast
                return found
    cast = CAST[dtype](source)
    if not (is_recorded() or source.is_inference()):  # which has no version
        _last.source, _last.cast = weakref.ref(source), weakref.ref(cast)
        _last.state = _state(source, cast)
    return cast


def _state(source: Tensor, cast: Tensor) -> tuple[Any, ...]:
    return (
        source._version,
        cast._version,
        source.data_ptr(),
        source.requires_grad == cast.requires_grad,
    )


def is_recorded() -> bool:
    """Tell whether operators are recorded: a cast made before would be a constant there."""
    if _count_dispatch_modes() and any(map(_get_dispatch_mode, _RECORDING)):
        return True
    return _is_tracing() or _inside_of_transform() is not None


_is_grad_enabled = torch.is_grad_enabled
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_get_dispatch_mode = torch._C._get_dispatch_mode
_RECORDING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
_is_tracing = torch._C._is_tracing
_inside_of_transform = torch._C._functorch.peek_interpreter_stack
