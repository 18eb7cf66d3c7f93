"""Hands torch's cross_entropy to the CUDA kernels of `kernels`, where these take it without a cast.

Knows the arguments of that function, and where nobody but autograd must see what it computes of;
nothing of rules. Every other call is the caller's, as if there were no kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter, functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from amp_patch import kernels
from amp_patch.kernels import cuda_cross_entropy

from .argument_casts import is_on_cast_device
from .mode import FLOATS, OFF, mode, process
from .usual_calls import AUTOGRAD, below_autograd

Function = Callable[..., Any]


def has_kernel(function: Function) -> bool:
    """Tell whether a kernel may stand in for a function, on some device of this build of torch.

    It may for torch's own, and its wrapper of `library_functions`, and not for a replacement.
    """
    original = getattr(function, "stands_for", function)
    in_torch = getattr(original, "__globals__", None) is vars(functional)
    is_torchs = in_torch and original.__name__ == "cross_entropy"
    return is_torchs and torch.version.cuda is not None


def without_casts(wrapper: Function) -> Function:
    """Return the function that casts to float32, but for what a kernel takes as it is."""

    @functools.wraps(wrapper)
    def uncast(*args: Any, **kwargs: Any) -> Any:
        if (mode.dtype or process.dtype) is not OFF:
            loss = by_kernel(args, kwargs, FLOATS)
            if loss is not None:
                return loss
        return wrapper(*args, **kwargs)

    return uncast


def by_kernel(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dtypes: Collection[torch.dtype]
) -> Tensor | None:
    """Return what torch's cross_entropy returns of these in float32; None where it is to be called.

    Args:
        args, kwargs: of the call.
        dtypes: those of logits that may go to a kernel.
    """
    logits: Any = args[0] if args else kwargs.get("input")
    # First what most calls do not get beyond. A tracer would note the question for the size.
    if not kernels.is_on_cuda(logits) or is_dynamo_compiling() or _is_tracing():
        return None
    if logits.numel() < cuda_cross_entropy.MIN_LOGITS or logits.dtype not in dtypes:
        return None
    try:
        targets, ignore_index, reduction = _arguments(*args, **kwargs)
    except TypeError:  # which torch's function explains
        return None
    if type(logits) not in _PLAIN or type(targets) is not Tensor:
        return None
    if not is_on_cast_device(logits) or not _is_unwatched():
        return None
    return kernels.cross_entropy(logits, targets, ignore_index, reduction)


def _arguments(
    input: Tensor,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Any, int, str]:
    """Return targets, ignored index and reduction of a call; without targets where more counts."""
    is_usual = weight is size_average is reduce is None and label_smoothing == 0.0
    known = type(ignore_index) is int and type(reduction) is str
    return (target if is_usual and known else None), ignore_index, reduction


def _is_unwatched() -> bool:
    """Tell whether autograd alone follows what is computed, and it knows the kernel's backward.

    Modes of torch see functions or operators, and would miss the kernel; tracers and transforms
    as well. A mode of functions calls what it saw once more, beneath itself.
    """
    modes = _count_function_modes() and _get_current_function_mode_stack()
    return not (
        _count_dispatch_modes()
        or (modes and any(type(one) is not DeviceContext for one in modes))
        or _innermost_transform() is not None
        or forward_ad._current_level >= 0
        # where torch itself decomposes an operator; in inference mode all is below autograd
        or (below_autograd(AUTOGRAD) and not torch.is_inference_mode_enabled())
    )


_PLAIN = (Tensor, Parameter)
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_count_function_modes = torch._C._len_torch_function_stack
_innermost_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
