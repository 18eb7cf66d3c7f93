"""Wrappers for the functions that most of a step's calls are of: layers, products and norms.

Each makes the usual call of its function without a list, a dictionary or a second look at an
argument, and leaves every other call to the general wrapper, which does the same (`wrappers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter, functional

from . import Function
from .argument_casts import to_dtype, to_float
from .mode import OFF, mode, process
from .shared_casts import last_cast, new_cast

#: Casts a parameter to a dtype.
CastWeight = Callable[[Parameter, torch.dtype], Tensor]


class UsualCasts(NamedTuple):
    """What casts the arguments of a usual call to a dtype.

    Attributes:
        weight: gets a parameter.
        activation: gets a plain tensor.
    """

    weight: CastWeight
    activation: Callable[[Tensor, torch.dtype], Tensor]


#: Returns what casts just now; None where a usual call's general wrapper has to tell.
CastsNow = Callable[[], UsualCasts | None]

#: Functions that take an activation, a weight and perhaps a bias, then what is no tensor.
LAYERS = frozenset(
    {
        functional.linear,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
    }
)
#: Functions that take two matrices, or batches of them.
PRODUCTS = frozenset(
    {
        torch.matmul,
        torch.mm,
        torch.bmm,
        Tensor.matmul,
        Tensor.mm,
        Tensor.bmm,
        Tensor.__matmul__,
    }
)
#: Functions that add a product of two matrices, or of batches of them, to what they take first.
SUMS = frozenset({torch.addmm, torch.baddbmm})
#: Functions that take an equation and operands.
CONTRACTIONS = frozenset({torch.einsum})
#: Functions that take an activation, a state and weights: one step of a recurrent layer.
CELLS = frozenset({torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.gru_cell, torch.lstm_cell})
#: Functions that take an activation, what is no tensor, and perhaps a weight and a bias.
NORMS = frozenset(
    {
        functional.layer_norm,
        functional.group_norm,
        functional.rms_norm,
        torch.layer_norm,
        torch.group_norm,
        torch.rms_norm,
    }
)
#: What a norm of a tensor is told, by name and in its place: no dtype, and no `out`.
_OPTIONS = frozenset({"p", "ord", "dim", "keepdim"})
_OPTION_TYPES = frozenset({int, float, bool, str, tuple, list, type(None)})
#: What the weight of a layer's usual call is.
_WEIGHTS = frozenset({Parameter, Tensor})
#: What the weights of a cell's usual call are; a bias may be missing.
_CELL_WEIGHTS = frozenset({Parameter, type(None)})


def layer(
    casts_now: CastsNow, fixed: torch.dtype | None, original: Function, general: Function
) -> Function:
    """Wrap one of `LAYERS`, which is to cast to ``fixed``, or to the level's dtype."""

    @functools.wraps(original)
    def wrapper(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        dtype = mode.dtype or process.dtype
        if (
            dtype is OFF
            or type(input) is not Tensor
            or is_dynamo_compiling()  # before the set: torch 2.6 looks up no class in one
            or type(weight) not in _WEIGHTS
            or (casts := casts_now()) is None
        ):
            return general(input, weight, bias, *args, **kwargs)
        dtype = fixed or dtype
        cast_weight, cast = casts
        input = cast(input, dtype)
        if type(weight) is Parameter:
            weight = cast_weight(weight, dtype)
        elif weight.dtype is not dtype:
            # A weight norm, say, computes it anew in each call. It is not noted as the last cast:
            # that is the input's, which the next layer may take as well.
            weight = to_dtype(weight, dtype)
        if type(bias) is Parameter:
            bias = cast_weight(bias, dtype)
        elif bias is not None:
            bias = to_dtype(bias, dtype)
        return original(input, weight, bias, *args, **kwargs)  # a stride or so, by name

    return wrapper


def product(
    casts_now: CastsNow, fixed: torch.dtype | None, original: Function, general: Function
) -> Function:
    """Wrap one of `PRODUCTS`, which is to cast to ``fixed``, or to the level's dtype.

    Casts of two activations are not noted for others: to note one takes as long as to cast it, and
    no other function takes what a product of two is made of.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 2:
            return general(*args, **kwargs)
        left, right = args
        if (
            type(left) is not Tensor
            or is_dynamo_compiling()
            or type(right) not in _WEIGHTS
            or left.layout is not torch.strided
            or right.layout is not torch.strided
        ):
            return general(left, right)
        level = mode.dtype or process.dtype
        dtype = fixed or level
        if level is OFF or (left.dtype is dtype and right.dtype is dtype):
            return original(left, right)
        has_weight = type(right) is Parameter
        if has_weight and (casts := casts_now()) is not None:
            return original(casts.activation(left, dtype), casts.weight(right, dtype))
        if has_weight or below_autograd(AUTOGRAD):  # as it is in inference mode
            return general(left, right)
        return original(to_dtype(left, dtype), to_dtype(right, dtype))

    return wrapper


def added_product(
    casts_now: CastsNow, fixed: torch.dtype | None, original: Function, general: Function
) -> Function:
    """Wrap one of `SUMS`, which is to cast to ``fixed``, or to the level's dtype: as a layer's."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtype = mode.dtype or process.dtype
        if (
            kwargs
            or len(args) != 3
            or dtype is OFF
            or is_dynamo_compiling()
            or type(args[1]) is not Tensor
            or type(args[0]) not in _WEIGHTS
            or type(args[2]) not in _WEIGHTS
            or args[1].layout is not torch.strided
            or args[2].layout is not torch.strided
            or (casts := casts_now()) is None
        ):
            return general(*args, **kwargs)
        dtype = fixed or dtype
        cast_weight, cast = casts
        added, left, right = args
        if type(right) is Parameter:
            left, right = cast(left, dtype), cast_weight(right, dtype)
        else:
            left, right = to_dtype(left, dtype), to_dtype(right, dtype)
        is_weight = type(added) is Parameter
        return original(
            cast_weight(added, dtype) if is_weight else to_dtype(added, dtype), left, right
        )

    return wrapper


def contraction(
    casts_now: CastsNow, fixed: torch.dtype | None, original: Function, general: Function
) -> Function:
    """Wrap one of `CONTRACTIONS`, which is to cast to ``fixed``, or to the level's dtype.

    With a weight it casts as a layer does, else as a product of activations: of one activation
    alone the result may be a view of the cast, which somebody may write to.
    """

    @functools.wraps(original)
    def wrapper(equation: Any, *operands: Any, **kwargs: Any) -> Any:
        dtype = mode.dtype or process.dtype
        kinds = set(map(type, operands))
        if (
            kwargs
            or dtype is OFF
            or is_dynamo_compiling()
            or not kinds <= _WEIGHTS
            or (casts := casts_now()) is None
        ):
            return general(equation, *operands, **kwargs)
        dtype = fixed or dtype
        cast_weight, cast = casts
        if Parameter not in kinds:
            cast = to_dtype
        halves = [
            cast_weight(x, dtype) if type(x) is Parameter else cast(x, dtype) for x in operands
        ]
        return original(equation, *halves)

    return wrapper


def cell(
    casts_now: CastsNow, fixed: torch.dtype | None, original: Function, general: Function
) -> Function:
    """Wrap one of `CELLS`, which is to cast to ``fixed``, or to the level's dtype."""

    @functools.wraps(original)
    def wrapper(input: Any, hx: Any, *weights: Any, **kwargs: Any) -> Any:
        dtype = mode.dtype or process.dtype
        if (
            kwargs
            or dtype is OFF
            or type(input) is not Tensor
            or is_dynamo_compiling()
            or not _CELL_WEIGHTS.issuperset(map(type, weights))
            or (casts := casts_now()) is None
        ):
            return general(input, hx, *weights, **kwargs)
        dtype = fixed or dtype
        cast_weight, cast = casts
        halves = [None if weight is None else cast_weight(weight, dtype) for weight in weights]
        # an LSTM's state is a pair
        state = [to_dtype(one, dtype) for one in hx] if type(hx) is tuple else to_dtype(hx, dtype)
        return original(cast(input, dtype), state, *halves)

    return wrapper


def norm(original: Function, general: Function) -> Function:
    """Wrap one of `NORMS`, which compute in float32: most often weights are in it already."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not args or type(args[0]) is not Tensor:
            return general(*args, **kwargs)
        for other in (*args[2:], *kwargs.values()) if kwargs else args[2:4]:  # some are numbers
            if getattr(other, "dtype", _FLOAT) is not _FLOAT:
                return general(*args, **kwargs)
        if args[0].dtype is _FLOAT:
            return original(*args, **kwargs)
        if is_dynamo_compiling() or below_autograd(AUTOGRAD):  # as it is in inference mode
            return general(*args, **kwargs)
        if (mode.dtype or process.dtype) is OFF:
            return original(*args, **kwargs)
        return original(to_float(args[0]), *args[1:], **kwargs)

    return wrapper


def length(original: Function, general: Function) -> Function:
    """Wrap a norm of a tensor, which computes in float32: most often it gets no other tensor."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not args or type(args[0]) is not Tensor:
            return general(*args, **kwargs)
        if args[0].dtype is _FLOAT:
            return original(*args, **kwargs)
        if (
            is_dynamo_compiling()
            or not _OPTIONS.issuperset(kwargs)
            or not _OPTION_TYPES.issuperset(map(type, args[1:]))
            or below_autograd(AUTOGRAD)  # as it is in inference mode
        ):
            return general(*args, **kwargs)
        if (mode.dtype or process.dtype) is OFF:
            return original(*args, **kwargs)
        return original(to_float(args[0]), *args[1:], **kwargs)

    return wrapper


def casts_by_grad(kept: CastWeight, now: CastWeight) -> CastsNow:
    """Return what tells the casts of usual calls, by whether grad is on.

    Args:
        kept: casts a weight where grad is on, and may return an earlier cast.
        now: casts it as it is now.
    """
    with_grad, without_grad = UsualCasts(kept, _shared), UsualCasts(now, to_dtype)

    def casts_now() -> UsualCasts | None:
        if _count_dispatch_modes() or _is_tracing():
            return None
        is_below = below_autograd(AUTOGRAD)
        if is_grad_enabled():
            return None if is_below else with_grad
        # In inference mode all is below autograd. The first run of a checkpoint, which is without
        # grad, has to cast as its second run does.
        is_plain = not mode.in_checkpoint and (not is_below or is_inference_mode_enabled())
        return without_grad if is_plain else None

    return casts_now


def _shared(input: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an activation in a dtype: where it is the last one that was cast, that cast."""
    if input.dtype is dtype:
        return input
    cast = last_cast(input, dtype)
    found: Tensor = to_dtype(input, dtype, None, new_cast) if cast is None else cast
    return found


_FLOAT = torch.float32
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
below_autograd = torch._C._dispatch_tls_is_dispatch_key_excluded
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
