"""Random numbers that do not depend on the precision: two levels then drop out the same values.

torch draws other numbers for a tensor in half than for one in fp32. Without this the levels of a
script with dropout would differ by its chance, and no rounding could be seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch.casting.argument_casts import tensors_in
from amp_patch.casting.nested import map_tensors
from amp_patch.levels import HALVES


class SameRandomNumbers(TorchDispatchMode):
    """Has every operator that draws random numbers draw them in fp32; the results are cast."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Fused attention keeps fp32 sums for its backward, whatever it is given. With dropout it
        # draws by position, and not by dtype.
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in func._schema.name:
            return func(*args, **kwargs)
        dtype = _half_of(args, kwargs)
        if dtype is None:
            return func(*args, **kwargs)
        drawn_args, drawn_kwargs = map_tensors(_in_float, (args, kwargs))
        if drawn_kwargs.get("dtype") is not None:
            drawn_kwargs = {**drawn_kwargs, "dtype": torch.float32}
        result = func(*drawn_args, **drawn_kwargs)
        _write_back(func, args, drawn_args)
        if func._schema.name.endswith("_"):
            return args[0]
        return map_tensors(lambda one: one.to(dtype) if one.dtype is torch.float32 else one, result)


def _half_of(args: Any, kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the half dtype that a call would draw in; None where it is not one."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"] if kwargs["dtype"] in HALVES else None
    dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs))]
    return next((dtype for dtype in dtypes if dtype in HALVES), None)


def _in_float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _write_back(func: Any, args: tuple[Any, ...], drawn: tuple[Any, ...]) -> None:
    for argument, given, written in zip(func._schema.arguments, args, drawn, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(given, Tensor) and written is not given:
            given.copy_(written)
