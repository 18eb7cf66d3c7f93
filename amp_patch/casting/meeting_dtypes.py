"""Float32 tensors that meet half ones in a model that is stored in half (O2, O3, O5).

``forward`` makes float32 tensors: positions, noise, a mask that is added to scores. What takes one
dtype, as a product does, would refuse them beside half weights and activations. Knows which
arguments meet in a call, and of what is computed only where half arguments alone lose too much.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from amp_patch.levels import HALVES
from amp_patch.patching import stand_for

from . import Function
from .argument_casts import is_sparse_on_cpu, tensors_in, to_dtype, to_float
from .cpu_convolutions import right_on_cpu
from .many_uses import in_parts, is_used_up, used
from .mode import mode

#: Words of `library_rules`; for layers, products of two and attention, which most calls of a model
#: are of, the places of the arguments that are in the dtype of the first where nothing meets.
MEETINGS: dict[str, tuple[int, int] | None] = {
    "product": (1, 1),
    "attention": (1, 2),
    "norm": (2, 2),
    "cell": (2, 2),  # whose state `layer_forwards` has cast
    "products": None,
    "joined": None,
}
#: Attention takes a float32 mask beside half tensors; in half it may leave float16's range.
_MASK, _MASK_AT = "attn_mask", 3
#: Of so many rows torch's kernel for a CPU adds up the gradients of a layer norm's weight and bias
#: in half without much loss: of 256 equal ones in bfloat16 the bias's is off by a tenth.
_ROWS = 64
#: It keeps 1 over the deviation in half: of equal numbers that is inf in float16 for an epsilon
#: below this, and all gradients are NaN.
_LEAST_EPS = 1e-9


def casting_where_they_meet(function: Function, word: str) -> Function:
    """Return a function of torch in which float32 arguments that meet half ones are cast.

    To the model's dtype; by the words "joined" and "norm" all are computed in float32, and the
    result is cast. Every other call is torch's own.
    """
    one, other = MEETINGS[word] or (sys.maxsize, sys.maxsize)
    loses = _LOSES.get(function.__name__)
    torchs, function = function, right_on_cpu(function)

    @functools.wraps(torchs)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if len(args) > other:
            first, last = args[0], args[other]
            if isinstance(first, Tensor) and isinstance(last, Tensor):
                found = first.dtype
                is_one = found is last.dtype and (one is other or found is args[one].dtype)
                if is_one and not (loses and loses(*args, **kwargs)):
                    weight = last if type(last) is Parameter else first
                    if type(weight) is Parameter and not is_compiling() and is_used_up(weight):
                        args, kwargs = in_parts(args, kwargs)
                    return function(*args, **kwargs)
        if not is_compiling():
            args, kwargs = used(args, kwargs)
        if mode.stored is None or mode.region is not None:
            return function(*args, **kwargs)
        return _run(function, word, args, kwargs, loses)

    return stand_for(wrapper, torchs)


def _run(
    function: Function,
    word: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loses: Callable[..., bool] | None,
) -> Any:
    is_lost = loses is not None and loses(*args, **kwargs)
    if not is_lost and _are_of_one_dtype(args) and _are_of_one_dtype(kwargs.values(), args):
        return function(*args, **kwargs)
    count = _MASK_AT if word == "attention" else len(args)
    given = {name: value for name, value in kwargs.items() if name != _MASK}
    taken = [*args[:count], *given.values()]
    if "out" in kwargs or not (is_lost or _meet(taken)):
        return function(*args, **kwargs)
    if is_lost and word == "norm" and _has_few_rows(*args, **kwargs):
        return _beside_float_weights(function, *args, **kwargs)
    if word in ("joined", "norm") or any(map(is_sparse_on_cpu, taken)):
        given = {name: to_float(value) for name, value in given.items()}
        return _to_stored(function(*map(to_float, args), **{**kwargs, **given}))
    given = {name: _to_stored(value) for name, value in given.items()}
    return function(*map(_to_stored, args[:count]), *args[count:], **{**kwargs, **given})


def layer_norm_of_half(torchs: Function) -> Function:
    """Return ``F.layer_norm`` for a half input beside a weight of its dtype, with few checks.

    Args:
        torchs: torch's own.
    """

    def layer_norm(input: Tensor, shape: Any, weight: Tensor, bias: Any, eps: float) -> Tensor:
        args = input, shape, weight, bias, eps
        if not _layer_norm_loses(*args) or mode.stored is None or mode.region is not None:
            result: Tensor = torchs(*args)
        elif _has_few_rows(*args):
            result = _beside_float_weights(torchs, *args)
        else:
            result = _run(torchs, "norm", args, {}, _layer_norm_loses)
        return result

    return layer_norm


def _beside_float_weights(
    function: Function,
    input: Any,
    normalized_shape: Any,
    weight: Any,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return a layer norm for which torch keeps 1 over the deviation in float32.

    It takes half of the casts of a layer norm in float32.
    """
    bias = None if bias is None else bias.float()
    return function(input, normalized_shape, weight.float(), bias, *args, **kwargs)


def _layer_norm_loses(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> bool:
    """Tell whether torch's layer norm of half tensors on a CPU would lose too much."""
    if is_compiling() or not (isinstance(input, Tensor) and input.is_cpu):
        return False
    if input.dtype not in HALVES:
        return False
    if eps < _LEAST_EPS and input.dtype is torch.float16:
        return True
    return isinstance(weight, Tensor) and not _has_few_rows(input, normalized_shape, weight)


def _has_few_rows(
    input: Tensor, normalized_shape: Any, weight: Any = None, *others: Any, **more: Any
) -> bool:
    """Tell whether a layer norm has weights, whose gradients a CPU may add up in half."""
    if not isinstance(weight, Tensor):
        return False
    # A trace would warn of the numbers.
    return torch._C._is_tracing() or input.numel() <= _ROWS * weight.numel()


def _sampling_loses(input: Any, grid: Any, *args: Any, **kwargs: Any) -> bool:
    """Tell whether a sample at places of a grid is asked of half numbers.

    Torch's backward finds the pixels anew, in half: of 64 in bfloat16 a quarter of one is lost.
    """
    return getattr(input, "dtype", None) in HALVES or getattr(grid, "dtype", None) in HALVES


#: Of which half arguments are computed in float32 where these say so.
_LOSES: dict[str, Callable[..., bool]] = {
    "layer_norm": _layer_norm_loses,
    "grid_sample": _sampling_loses,
    "grid_sampler": _sampling_loses,
}


def _to_stored(value: Any) -> Any:
    """Return a value with its floating tensors in the dtype of the running model."""
    dtype: Any = mode.stored
    return to_dtype(value, dtype, activation=Tensor.to)


def _is_shape(value: Sequence[Any]) -> bool:
    """Tell a shape or a stride, in which no tensor is: to look for one would take longer."""
    # torch 2.6 compiles no comparison of sets, and a generator takes the host longer
    for one in value:  # noqa: SIM110
        if type(one) is not int:
            return False
    return True


def _are_of_one_dtype(values: Iterable[Any], others: Sequence[Any] = ()) -> bool:
    """Tell at a quick look that all tensors have one dtype, as in most calls.

    Args:
        values: False, too, where one of them may hold tensors.
        others: of which the first tensor has that dtype as well.
    """
    found = None
    for value in others:
        if isinstance(value, Tensor):
            found = value.dtype
            break
    for value in values:
        if isinstance(value, Tensor):
            if found is None:
                found = value.dtype
            elif value.dtype is not found:
                return False
        elif isinstance(value, (list, tuple)) and not _is_shape(value):
            return False
    return True


def _meet(values: list[Any]) -> bool:
    """Tell whether a float32 tensor is among half ones.

    Not where a float32 parameter is among them: it came to the model after `initialize`, or was
    given another dtype since, and a note tells its owner what mends that.
    """
    if any(isinstance(value, (list, tuple)) and not _is_shape(value) for value in values):
        values = tensors_in(values)
    tensors = [value for value in values if isinstance(value, Tensor)]
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.float32 not in dtypes or dtypes.isdisjoint(HALVES):
        return False
    return not any(type(one) is Parameter and one.dtype is torch.float32 for one in tensors)
