"""Forwards of torch's own layers, while functions cast or models are stored in half.

The plain ones read their weights where they are: ``self.weight`` of a module takes the host longer
than a cached cast. And in a model in half a layer takes float32, which a tensor made inside of
``forward`` brings along: it computes in the dtype of its weights. Knows torch's layers and where a
module keeps its parameters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from amp_patch.patching import Patches, hide_from_torchscript, stood_for

from .many_uses import is_used_up, part
from .meeting_dtypes import layer_norm_of_half
from .mode import casts_are_on, mode
from .nested import map_tensors

# Calls a layer's function; looked up at each call, for somebody may have patched it. The last
# argument says that input and weights are of one dtype, for which a `_Pair` has another function.
_Call = Callable[[Any, Tensor, Any, Any, bool], Tensor]


class _Pair:
    """A function that casts where two dtypes meet, and what is called where there is but one.

    No dict has the two: a proxy that somebody has put around a function is equal to it.
    """

    __slots__ = ("meeting", "own")

    def __init__(self) -> None:
        self.meeting: Any = None
        self.own: Any = None


_LINEAR, _LAYER_NORM, _GROUP_NORM = _Pair(), _Pair(), _Pair()


def _linear(layer: nn.Linear, x: Tensor, weight: Any, bias: Any, is_one: bool) -> Any:
    function = F.linear
    if is_one and function is _LINEAR.meeting:
        function = _LINEAR.own
        if is_used_up(weight):
            weight, bias = part(weight), part(bias)
    return function(x, weight, bias)


def _layer_norm(layer: nn.LayerNorm, x: Tensor, weight: Any, bias: Any, is_one: bool) -> Any:
    function, weight, bias = _of_one_dtype(F.layer_norm, _LAYER_NORM, weight, bias, is_one)
    return function(x, layer.normalized_shape, weight, bias, layer.eps)


def _group_norm(layer: nn.GroupNorm, x: Tensor, weight: Any, bias: Any, is_one: bool) -> Any:
    function, weight, bias = _of_one_dtype(F.group_norm, _GROUP_NORM, weight, bias, is_one)
    return function(x, layer.num_groups, weight, bias, layer.eps)


def _of_one_dtype(
    function: Any, pair: _Pair, weight: Any, bias: Any, is_one: bool
) -> tuple[Any, ...]:
    """Return what stands for a function, and what it takes; `_linear` has it inline, for speed."""
    if not (is_one and function is pair.meeting):
        return function, weight, bias
    own = pair.own
    return (own, part(weight), part(bias)) if is_used_up(weight) else (own, weight, bias)


def _convolution(layer: Any, x: Tensor, weight: Any, bias: Any, is_one: bool) -> Any:
    return layer._conv_forward(x, weight, bias)


_CALLS: dict[type[nn.Module], _Call] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}


#: Layers that take float32 as well, in forwards of torch's own.
_OTHERS = (
    nn.Bilinear,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.GRU,
    nn.GRUCell,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LSTM,
    nn.LSTMCell,
    nn.MultiheadAttention,
    nn.PReLU,
    nn.RMSNorm,
    nn.RNN,
    nn.RNNCell,
)


def install(patches: Patches) -> None:
    """Replace the forwards of these very classes; a subclass's layers go on as they are.

    So does a class whose forward somebody else has replaced, as adapters and weight
    standardization do.
    """
    for kind, call in _CALLS.items():
        if _has_torchs_forward(kind):
            patches.replace(kind, "forward", _reading(kind, call, kind.forward))


def install_for_half(patches: Patches) -> None:
    """Do the same, and let other layers take float32, too, where weights are stored in half."""
    forget_half()
    for pair, function in _now():
        own = stood_for(function)
        if own is not None:
            pair.own = layer_norm_of_half(own) if pair is _LAYER_NORM else own
            pair.meeting = function
    install(patches)
    for kind in _OTHERS:
        if _has_torchs_forward(kind):
            patches.replace(kind, "forward", _taking(kind.forward))


def forget_half() -> None:
    """Hold no functions that cast where two dtypes meet: they are no longer patched."""
    for pair, _ in _now():
        pair.meeting = pair.own = None


def _now() -> tuple[tuple[_Pair, Any], ...]:
    """Return each pair with the function that layers call now."""
    return (_LINEAR, F.linear), (_LAYER_NORM, F.layer_norm), (_GROUP_NORM, F.group_norm)


def _has_torchs_forward(kind: type[nn.Module]) -> bool:
    own = vars(sys.modules[kind.__module__])
    return type(kind.forward) is FunctionType and kind.forward.__globals__ is own


def _reading(kind: type[nn.Module], call: _Call, original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def forward(self: Any, input: Tensor) -> Any:
        own = self.__dict__
        # A tensor in a parameter's way was put there: by a weight norm, or by torch in a replica.
        if type(self) is kind and "weight" not in own and "bias" not in own:
            params = own["_parameters"]
            # A script may have made a buffer of one, which torch finds by its name.
            if "weight" in params and "bias" in params and not is_dynamo_compiling():
                weight, is_one = params["weight"], False
                try:
                    found = input.dtype
                except AttributeError:  # no tensor: torch hands it on to its __torch_function__
                    return original(self, input)
                if found is _FLOAT:
                    if weight is not None and weight.dtype is not _FLOAT:
                        input = _as_stored(input, weight)
                elif weight is not None and weight.dtype is found:
                    is_one = True
                return call(self, input, weight, params["bias"], is_one)
        weight = _first(self)  # the bias, where a parametrization computes the weight
        return original(self, input if weight is None else _as_stored(input, weight))

    return hide_from_torchscript(forward, original)


def _taking(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (_has_float(args) or (kwargs and _has_float(kwargs.values()))):  # as most often
            return original(self, *args, **kwargs)
        weight = _first(self)
        if weight is None or weight.dtype is not mode.stored:
            return original(self, *args, **kwargs)
        # One by one: to map the tuple and the dict as containers takes the host twice as long.
        cast = functools.partial(_as_stored, weight=weight)
        if kwargs:
            kwargs = {name: map_tensors(cast, value) for name, value in kwargs.items()}
        return original(self, *[map_tensors(cast, value) for value in args], **kwargs)

    return hide_from_torchscript(forward, original)


def _has_float(values: Iterable[Any]) -> bool:
    """Return whether there is a float32 tensor among arguments of a layer, or in a tuple there."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is _FLOAT:
                return True
        elif isinstance(value, tuple) and _has_float(value):
            return True
    return False


def _first(layer: nn.Module) -> Tensor | None:
    for param in layer._parameters.values():  # torch 2.6 compiles no `next` with a default
        if param is not None:
            return param
    return None


def _as_stored(input: Tensor, weight: Tensor) -> Tensor:
    """Return a float32 input of a layer in the half dtype that the running model is stored in.

    Not where functions cast: there they decide. And not outside of the model's call, where nobody
    casts what comes out either.
    """
    if input.dtype is _FLOAT and weight.dtype is mode.stored and not casts_are_on():
        return input.to(weight.dtype)
    return input


_FLOAT = torch.float32
