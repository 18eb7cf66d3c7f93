"""Computes torch's cross_entropy on a GPU without a float32 copy of the logits.

By the CUDA kernels of `kernels`, where these take it; else by functions of torch that read half
logits and write float32. Knows the arguments of that function, and where nobody but autograd must
see what a kernel computes of; nothing of rules. Every other call is the caller's.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter, functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from amp_patch import kernels
from amp_patch.levels import HALVES
from amp_patch.patching import stood_for

from . import Function
from .argument_casts import is_on_cast_device, to_float
from .mode import FLOATS, OFF, mode, process
from .usual_calls import AUTOGRAD, below_autograd


def has_kernel(function: Function) -> bool:
    """Tell whether a kernel may stand in for a function, on some device of this build of torch.

    It may for torch's own, and its wrapper of `library_casts`, and not for a replacement.
    """
    original = stood_for(function) or function
    if type(original) is not types.FunctionType:  # a proxy of one says that it is an instance
        return False
    is_torchs = original.__globals__ is vars(functional) and original.__name__ == "cross_entropy"
    return is_torchs and torch.version.cuda is not None


def wrap(wrapper: Function) -> Function:
    """Return the function that casts to float32, but for logits of which `loss_of` is computed."""

    @functools.wraps(wrapper)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if (mode.dtype or process.dtype) is not OFF:
            loss = loss_of(args, kwargs, FLOATS)
            if loss is not None:
                return loss
        return wrapper(*args, **kwargs)

    return wrapped


def loss_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dtypes: Collection[torch.dtype]
) -> Tensor | None:
    """Return what torch's cross_entropy returns of these in float32; None where it is to be called.

    Args:
        args, kwargs: of the call.
        dtypes: those of logits that are to be computed so.
    """
    logits: Any = args[0] if args else kwargs.get("input")
    # The question that ends most calls comes early; before it that for torch.compile, which cannot
    # trace it.
    if is_dynamo_compiling() or not kernels.is_on_cuda(logits) or _is_tracing():
        return None
    if logits.dtype not in dtypes or type(logits) not in _PLAIN or not is_on_cast_device(logits):
        return None
    if _count_function_modes() and _is_seen_by_modes():
        return None
    try:
        call = _arguments(*args, **kwargs)
    except TypeError:  # which torch's function explains
        return None
    if call is None or type(call.targets) is not Tensor:
        return None
    # Torch's own function calls none that have rules: inside of this one rules are off, too.
    saved = mode.switch_off(mode.region)
    try:
        loss = _by_kernel(logits, call)
        return _by_nll_loss(logits, call) if loss is None and logits.dtype in HALVES else loss
    finally:
        mode.restore(saved)


class _Call(NamedTuple):
    """The arguments of a call, but for the logits."""

    targets: Any
    weight: Any
    ignore_index: int
    reduction: str


def _arguments(
    input: Tensor,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> _Call | None:
    """Return the arguments of a call; None where those count that nobody here knows."""
    is_usual = size_average is reduce is None and label_smoothing == 0.0
    known = type(ignore_index) is int and type(reduction) is str
    return _Call(target, weight, ignore_index, reduction) if is_usual and known else None


def _by_kernel(logits: Tensor, call: _Call) -> Tensor | None:
    if call.weight is not None or not _is_unwatched():
        return None
    return kernels.cross_entropy(logits, call.targets, call.ignore_index, call.reduction)


def _by_nll_loss(logits: Tensor, call: _Call) -> Tensor | None:
    """Return the loss of half logits: torch's log_softmax on a GPU reads half and writes float32.

    So the backward makes no float32 gradient of the logits either: at its peak it takes 10 bytes
    for a logit, as under autocast, where a float32 copy of the logits makes it 12.
    """
    if call.targets.is_floating_point():  # of each class a probability
        return None
    weight = to_float(call.weight)
    logs = logits.log_softmax(1 if logits.dim() > 1 else 0, dtype=torch.float32)
    return _nll_loss(
        logs, call.targets, weight, ignore_index=call.ignore_index, reduction=call.reduction
    )


def _is_seen_by_modes() -> bool:
    """Tell whether a mode of torch sees the functions that are called, and would miss this one.

    It calls what it saw once more, beneath itself.
    """
    return any(type(one) is not DeviceContext for one in _get_current_function_mode_stack())


def _is_unwatched() -> bool:
    """Tell whether autograd alone follows what is computed, and it knows the kernel's backward.

    Modes of torch that see operators would miss the kernel; tracers and transforms as well.
    """
    return not (
        _count_dispatch_modes()
        or _are_transforms_active()
        or forward_ad._current_level >= 0
        # where torch itself decomposes an operator; in inference mode all is below autograd
        or (below_autograd(AUTOGRAD) and not torch.is_inference_mode_enabled())
    )


_PLAIN = (Tensor, Parameter)
#: Torch's own, for its cross_entropy calls none that a script has put in its place.
_nll_loss = functional.nll_loss
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_count_function_modes = torch._C._len_torch_function_stack
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
