"""Forwards of torch's plain layers that read their weights where they are, while casts are on.

``self.weight`` of a module takes the host longer than a cached cast. Knows torch's layers and
where a module keeps its parameters; knows nothing of casts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from amp_patch.patching import Patches

# Calls a layer's function; looked up at each call, for somebody may have patched it.
_Call = Callable[[Any, Tensor, Any, Any], Tensor]


def _linear(layer: nn.Linear, x: Tensor, weight: Any, bias: Any) -> Tensor:
    return F.linear(x, weight, bias)


def _layer_norm(layer: nn.LayerNorm, x: Tensor, weight: Any, bias: Any) -> Tensor:
    return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


def _convolution(layer: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
    return layer._conv_forward(x, weight, bias)  # type: ignore[no-any-return]  # of torch's


_CALLS: dict[type[nn.Module], _Call] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}


def install(patches: Patches) -> None:
    """Replace the forwards of these very classes; a subclass's layers go on as they are.

    So does a class whose forward somebody else has replaced, as adapters and weight
    standardization do.
    """
    for kind, call in _CALLS.items():
        if _is_torchs(kind):
            patches.replace(kind, "forward", _reading(kind, call, kind.forward))


def _is_torchs(kind: type[nn.Module]) -> bool:
    own = vars(sys.modules[kind.__module__])
    return type(kind.forward) is FunctionType and kind.forward.__globals__ is own


def _reading(kind: type[nn.Module], call: _Call, original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def forward(self: Any, input: Tensor) -> Any:
        own = self.__dict__
        # A tensor in a parameter's way was put there: by a weight norm, or by torch in a replica.
        if type(self) is kind and "weight" not in own and "bias" not in own:
            params = own["_parameters"]
            if "weight" in params and not is_dynamo_compiling():
                return call(self, input, params["weight"], params["bias"])
        return original(self, input)

    return forward
