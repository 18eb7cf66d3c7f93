"""Convolutions in bfloat16 of which torch's kernels for a CPU make wrong gradients.

Where a kernel or a stride is longer than the input, some places of the kernel see padding alone. On
CPUs with AVX-512 oneDNN then leaves places of the weight's gradient as the memory was, NaN or any
number, or writes beyond its end, and the process ends later. Seen with torch 2.6 to 2.14, under
torch.autocast as well; float16, and what comes out of the forward, are right. Such a call is
computed in float32 here. Knows the sizes of these calls, and no modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import Function
from .argument_casts import to_float


def right_on_cpu(function: Function) -> Function:
    """Return a convolution of torch whose gradients are right; any other function as it is."""
    make = _MADE.get(getattr(function, "__name__", ""))
    return function if make is None else make(function)


def _checking(dims: int, is_transposed: bool, function: Function) -> Function:
    never_wrong = _never_wrong(dims)
    is_wrong = functools.partial(_call_is_wrong, dims, is_transposed)
    known = functools.lru_cache(_KNOWN)(is_wrong)

    @functools.wraps(function)
    def convolution(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, *others: Any, **named: Any
    ) -> Any:
        if stride not in never_wrong and _has_backward(input, weight, bias):
            call = input.shape, weight.shape, stride, others, *named.items()
            try:
                is_lost = is_wrong(*call) if is_dynamo_compiling() else known(*call)
            except TypeError:  # a list, which no cache holds
                is_lost = is_wrong(*call)
            if is_lost:
                wide = to_float(input), to_float(weight), to_float(bias)
                result: Tensor = function(*wide, stride, *others, **named)
                return result.to(input.dtype)
        return function(input, weight, bias, stride, *others, **named)

    return convolution


def _call_is_wrong(
    dims: int,
    is_transposed: bool,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Any,
    others: tuple[Any, ...],
    *named: tuple[str, Any],
) -> bool:
    """Tell whether torch may make wrong gradients of a call.

    Args:
        dims, is_transposed: of the function.
        sizes, kernel: of input and weight.
        stride, others, named: the other arguments; those before them by place.
    """
    names = _OPTIONS[is_transposed]
    # torch 2.6 compiles no `zip` of other lengths
    given = zip(names[: len(others)], others[: len(names)], strict=True)
    options = {"stride": stride, **dict(given), **dict(named)}
    if is_transposed:  # the gradient of its weight is that of a convolution of its result
        sizes = _sizes_of_result(dims, sizes, kernel, **options)
    return _is_wrong(dims, sizes, kernel, stride, options.get("dilation", 1))


#: Of so many calls of each function is known whether torch's gradients are right.
_KNOWN = 1024
#: What convolutions, and transposed ones, take by place after the stride.
_OPTIONS = {
    False: ("padding", "dilation", "groups"),
    True: ("padding", "output_padding", "groups", "dilation"),
}
_MADE: dict[str, Callable[[Function], Function]] = {
    f"conv{kind}{dims}d": functools.partial(_checking, dims, bool(kind))
    for kind in ("", "_transpose")
    for dims in (1, 2, 3)
}


def _never_wrong(dims: int) -> tuple[Any, ...]:
    """Return strides with which no gradient is wrong: of most calls, which need no other look."""
    return (1, (1,) * dims) if dims < 3 else ()


def _has_backward(input: Any, weight: Any, bias: Any) -> bool:
    """Tell whether a convolution is in bfloat16 on a CPU, and its weights have gradients."""
    if not isinstance(input, Tensor) or input.dtype is not torch.bfloat16 or not input.is_cpu:
        return False
    if not torch.is_grad_enabled():
        return False
    if not is_dynamo_compiling() and torch._C._is_tracing():  # which would warn of the numbers
        return False
    return getattr(weight, "requires_grad", False) or getattr(bias, "requires_grad", False)


def _sizes_of_result(
    dims: int,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> list[int]:
    """Return how large the result of a transposed convolution is, in these dimensions."""
    each = (_each(one, dims) for one in (stride, padding, output_padding, dilation))
    # A wrong number of them is torch's to refuse.
    places = zip(sizes[-dims:], kernel[-dims:], *each, strict=False)
    return [
        (size - 1) * step - 2 * pad + spread * (taken - 1) + more + 1
        for size, taken, step, pad, more, spread in places
    ]


def _is_wrong(
    dims: int, sizes: Sequence[int], kernel: Sequence[int], stride: Any, dilation: Any
) -> bool:
    """Tell whether torch may make wrong gradients: a little more often than it does.

    Args:
        dims: how many dimensions it convolves.
        sizes: of the input; the last ones are of these dimensions.
        kernel: the sizes of the weight, so.
    """
    if len(sizes) < dims or len(kernel) < dims:
        return False  # torch refuses it
    if sizes[-1] < (stride if isinstance(stride, int) else stride[-1]) and kernel[-1] > 1:
        return True
    if dims < 3:
        return False
    spread = _each(dilation, dims)
    places = zip(sizes[-3:-1], kernel[-3:-1], spread, strict=False)
    return any(one * (taken - 1) >= size for size, taken, one in places)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """Return an option of a convolution for each dimension."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) if len(value) == dims else tuple(value) * dims
