"""Averages of weights that are stored in half, which read fp32 values of them.

A copy of a model in half, in which most averages are kept, is in fp32: see `exact_copies`.
``torch.lerp`` that makes a new tensor is among the casts, in `casting.libraries.mixtures`. Knows
models in half and their fp32 values; no optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from amp_patch.casting.libraries.mixtures import mixed, widened
from amp_patch.kernels.getters import DTYPE
from amp_patch.levels import HALVES
from amp_patch.patching import hide_from_torchscript
from amp_patch.weights.fp32_values import FP32Values

_CLASS = "torch.optim.swa_utils.AveragedModel"


class _ExactModel:
    """A model's parameters and buffers as an average is to read them: in fp32."""

    def __init__(self, model: nn.Module, values: FP32Values) -> None:
        self._model, self._values = model, values

    def parameters(self) -> Iterator[Tensor]:
        """Yield the fp32 value of each parameter in half, and the others."""
        yield from self._exact(list(self._model.parameters()))

    def buffers(self) -> Iterator[Tensor]:
        """Yield the fp32 value of each buffer in half, and the others."""
        yield from self._exact(list(self._model.buffers()))

    def _exact(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        halves = [tensor for tensor in tensors if tensor.dtype in HALVES]
        exact = dict(zip(map(id, halves), self._values.exact_ones(halves), strict=True))
        return [exact[id(one)].float() if id(one) in exact else one for one in tensors]


def replacements(
    values: FP32Values, models: Callable[[], Iterable[nn.Module]]
) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method by its path, what makes its replacement.

    Args:
        values: the fp32 values.
        models: returns the models that are stored in half.
    """

    def averaging(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def update_parameters(self: nn.Module, model: nn.Module) -> None:
            inside = set(map(id, model.modules()))
            in_half = any(id(one) in inside for one in models())
            original(self, _ExactModel(model, values) if in_half else model)

        return update_parameters

    return {f"{_CLASS}.update_parameters": averaging}


def _lerp_in_place(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Move an average in fp32 towards a weight in half, as ``mul_`` and ``add_`` do."""

    @functools.wraps(original)
    def lerp_(input: Tensor, end: Tensor, weight: Any = None, **kwargs: Any) -> Any:
        return mixed(original, input, widened(input, end), weight, kwargs)

    return hide_from_torchscript(lerp_, original)


def _lerp_each(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def lerp_each(  # by torch's names
        self: Sequence[Tensor], tensors1: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        if list(map(DTYPE, self)) != list(map(DTYPE, tensors1)):
            tensors1 = list(map(widened, self, tensors1))
        return original(self, tensors1, *args, **kwargs)

    return lerp_each


#: What is replaced while a model is stored in half: path -> what makes the replacement.
OF_HALVES: dict[str, Callable[[Any], Any]] = {
    "torch.Tensor.lerp_": _lerp_in_place,
    **dict.fromkeys(("torch._foreach_lerp", "torch._foreach_lerp_"), _lerp_each),
}
