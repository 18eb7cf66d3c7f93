"""Stores a model's parameters and buffers in half precision, or in fp32 again (O0, O2, O3, O5).

Knows nothing of optimizers or masters: `convert` hands back the storage that it replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_patch.casting.mode import FLOATS
from amp_patch.distributed.shards import are_equal_here, set_data
from amp_patch.levels import HALVES

from . import parametrizations

T = TypeVar("T", bound=Tensor)


class Originals(NamedTuple):
    """What a model held before it was converted: the old storage, not copies.

    Attributes:
        params: of each parameter that is stored as the level says now, with its gradient.
        buffers: those that came in half, by their paths in the model.
        rounded: of each other buffer that is in half now.
    """

    params: dict[nn.Parameter, Tensor]
    buffers: dict[str, Tensor]
    rounded: dict[Tensor, Tensor]


def convert(
    model: nn.Module,
    dtype: torch.dtype,
    keep_batchnorm_fp32: bool,
    stored: Collection[int] = (),
    in_float: Collection[nn.Module] = (),
) -> Originals:
    """Store the parameters and buffers of ``model`` as ``dtype``, parameters in the same objects.

    Args:
        model: its float64, complex and integer tensors are left alone, half parameters that are
            trained, with all that is in half beside them in a module, and what `kept_by_name` says.
        dtype: float16, bfloat16 or float32.
        keep_batchnorm_fp32: see `kept_in_fp32`.
        stored: ids of parameters and buffers of models that were converted before; these may share
            some with this one.
        in_float: modules that compute in fp32: their buffers are stored in it, which nothing trains
            and so has no master.

    Returns:
        What it held before; of half parameters also where they are in ``dtype`` already.
    """
    kept = kept_in_fp32(model, keep_batchnorm_fp32)
    stored = {*stored, *map(id, kept_by_name(model, dtype))}
    conversion = _Conversion(stored)
    for path, module in model.named_modules():
        halves = HALVES if _trains_no_half(module) else ()  # asked before any of it is cast
        to = torch.float32 if module in kept else dtype
        conversion.store_params(module, to, _cast_to(to, halves))
        to = torch.float32 if module in in_float else to
        conversion.store_buffers(module, path, to, _cast_to(to, halves))
    return conversion.originals


def _cast_to(dtype: torch.dtype, halves: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the tensors of a module that become ``dtype``."""
    return halves if dtype is torch.float32 else (*halves, torch.float32)


class _Conversion:
    """What was converted of one model.

    Args:
        stored: ids of parameters and buffers that are left alone.

    Attributes:
        originals: what it held before.
    """

    def __init__(self, stored: Collection[int]) -> None:
        self.originals = Originals({}, {}, {})
        self._stored = stored
        # by id and dtype, for modules may share a buffer; `originals` keeps it alive
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def store_params(
        self, module: nn.Module, dtype: torch.dtype, sources: tuple[torch.dtype, ...]
    ) -> None:
        """Store the parameters of a module itself that are of one of the source dtypes."""
        converted = [
            param for param in module._parameters.values() if self._is_from(param, sources)
        ]
        for param in converted:
            if param not in self.originals.params:
                original = param.data
                original.grad, param.grad = param.grad, None
                self.originals.params[param] = original
                set_data(param, _converted(original, dtype))
        if converted and isinstance(module, nn.RNNBase):
            module.flatten_parameters()

    def store_buffers(
        self, module: nn.Module, path: str, dtype: torch.dtype, sources: tuple[torch.dtype, ...]
    ) -> None:
        """Store the buffers of a module itself, at a path in the model, likewise."""
        for name, buffer in module._buffers.items():
            if not self._is_from(buffer, sources):
                continue
            key = id(buffer), dtype
            if key not in self._buffers:
                self._buffers[key] = _converted(buffer, dtype)
            module._buffers[name] = self._buffers[key]
            if buffer.dtype in HALVES:
                self.originals.buffers[f"{path}.{name}"] = buffer
            else:
                self.originals.rounded[self._buffers[key]] = buffer

    def _is_from(self, tensor: T | None, sources: tuple[torch.dtype, ...]) -> TypeGuard[T]:
        return tensor is not None and tensor.dtype in sources and id(tensor) not in self._stored


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype, which other processes see if they see the tensor."""
    converted = tensor.to(dtype)
    is_shared = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_shared()
    return converted.share_memory_() if is_shared else converted


def _trains_no_half(module: nn.Module) -> bool:
    params = [param for param in module._parameters.values() if param is not None]
    return not any(param.requires_grad and param.dtype in HALVES for param in params)


def kept_in_fp32(model: nn.Module, batch_norms: bool) -> set[nn.Module]:
    """Return the modules that `convert` stores in fp32: those that compute weights of layers.

    Args:
        model: any.
        batch_norms: whether these stay as well, also those without weights.
    """
    norms = {module for module in model.modules() if isinstance(module, _BatchNorm)}
    return parametrizations.modules_of(model) | (norms if batch_norms else set())


def kept_by_name(model: nn.Module, dtype: torch.dtype | None) -> list[Tensor]:
    """Return what a model of transformers, or one in the model, names to be kept in fp32.

    ``_keep_in_fp32_modules`` for float16, ``_keep_in_fp32_modules_strict`` for bfloat16 as well.
    Its forward casts to what is kept, as to what ``from_pretrained(..., dtype=...)`` keeps.
    """
    kept: list[Tensor] = []
    for module in model.modules() if dtype in HALVES else ():
        names = _names_in(module, "_keep_in_fp32_modules_strict")
        if dtype is torch.float16:
            names |= _names_in(module, "_keep_in_fp32_modules")
        if names:
            named = re.compile(rf"(^|\.)({'|'.join(map(re.escape, names))})($|\.)")
            tensors = chain(module.named_parameters(), module.named_buffers())
            kept += [tensor for path, tensor in tensors if named.search(path)]
    return kept


def layers_kept_by_name(model: nn.Module, dtype: torch.dtype | None) -> list[nn.Module]:
    """Return the layers without parts of which `kept_by_name` keeps every parameter."""
    kept = set(map(id, kept_by_name(model, dtype)))
    return [
        module
        for module in model.modules()
        if next(module.children(), None) is None
        and (own := [param for param in module._parameters.values() if param is not None])
        and kept.issuperset(map(id, own))
    ]


def _names_in(module: nn.Module, attribute: str) -> set[str]:
    """Return the names in an attribute of a module, whose ``__getattr__`` may know any."""
    names = vars(module).get(attribute, getattr(type(module), attribute, None))
    return set(names) if isinstance(names, (list, tuple, set)) else set()


def restore(
    model: nn.Module,
    dtype: torch.dtype,
    exact: Callable[[Tensor], Tensor],
    buffers: Mapping[str, Tensor],
) -> None:
    """Undo `convert`: what ``exact`` says of a parameter or buffer stands in its place.

    Args:
        model: as `convert` left it.
        dtype: that it got.
        exact: returns the value of a parameter or buffer in the dtype that it is to have.
        buffers: those that came in half, as `convert` returned them.
    """
    restored: dict[Tensor, Tensor] = {}  # buffers, which modules may share
    for path, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None and param.dtype in FLOATS:
                _set_value(param, exact(param))
        for name, buffer in module._buffers.items():
            original = buffers.get(f"{path}.{name}")
            if buffer is None or (original is None and buffer.dtype is not dtype):
                continue
            if buffer not in restored:
                restored[buffer] = (
                    exact(buffer) if original is None else _as_it_came(buffer, original)
                )
            module._buffers[name] = restored[buffer]
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _set_value(param: nn.Parameter, value: Tensor) -> None:
    """Let a parameter hold a value; in its own dtype it is what it holds already."""
    if value.dtype is not param.dtype:
        grad, param.grad = param.grad, None
        set_data(param, value)
        param.grad = None if grad is None else grad.to(value.dtype)


def _as_it_came(buffer: Tensor, original: Tensor) -> Tensor:
    """Return a buffer in the dtype of the original, with its very bits if nobody wrote to it."""
    is_same = are_equal_here(original.to(buffer), buffer)
    return (original if is_same else buffer).to(buffer.device, original.dtype)
