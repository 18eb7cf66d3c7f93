"""Functions that run beside torch's default device, where the host's time counts.

``torch.set_default_device`` has each call of torch pass through Python, and each look at ``p.grad``
or ``t.dtype``, too: a microsecond for each, of which a step makes thousands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.utils._device import DeviceContext

P = ParamSpec("P")
T = TypeVar("T")


def without_default_device(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as if ``torch.set_default_device`` had not been called.

    A decorator, for what calls no code of a script's and says where it makes tensors. Beside a
    mode of the script's own nothing is changed.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if _count_modes() != 1 or type(mode := _mode_at(0)) is not DeviceContext:
            return function(*args, **kwargs)
        try:  # before it is taken away: an interrupt may come after that
            _pop_mode()
            return function(*args, **kwargs)
        finally:
            if not _count_modes():
                _push_mode(mode)

    return run


_count_modes = torch._C._len_torch_function_stack
_mode_at = torch._C._get_function_stack_at
_pop_mode = torch._C._pop_torch_function_stack
_push_mode = torch._C._push_on_torch_function_stack
