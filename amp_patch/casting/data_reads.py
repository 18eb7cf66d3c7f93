"""Tells who reads or sets the ``.data`` of a parameter, for a write by it moves no version.

``self.weight.data *= self.mask`` in a layer's forward comes after the first layer's use of its
own weight, with which all of the model's weights are cast. Knows nothing of casts and of masters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.levels import HALVES
from amp_patch.patching import Patches, resolve_in


def install(
    patches: Patches,
    tell_of_read: Callable[[nn.Parameter], object],
    tell_of_set: Callable[[nn.Parameter, Tensor], object],
    tell_of_half: Callable[[], object],
) -> None:
    """Have these called before each ``param.data`` and ``param.data = tensor``.

    Args:
        patches: undoes it.
        tell_of_read: gets the parameter, of which a view's may be read, as by ``weight[0].data``;
            must read no ``.data`` itself.
        tell_of_set: gets the parameter and the tensor; must set none.
        tell_of_half: called where the ``.data`` of any other half tensor is read, which may be what
            a parameter's ``detach()`` has returned.
    """
    _, name, original = resolve_in(Tensor, "data")
    patches.replace(Tensor, name, _TellingData(original, tell_of_read, tell_of_set, tell_of_half))


class _TellingData:
    """Stands for ``Tensor.data``; arguments are those of `install`, and torch's own."""

    def __init__(
        self,
        original: Any,
        tell_of_read: Callable[[Any], object],
        tell_of_set: Callable[[Any, Tensor], object],
        tell_of_half: Callable[[], object],
    ) -> None:
        self._original, self._get = original, original.__get__
        self._tell_of_read, self._tell_of_set = tell_of_read, tell_of_set
        self._tell_of_half = tell_of_half

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        # By `type`, for torch answers `isinstance(..., nn.Parameter)` by a function of Python.
        kind = type(tensor)
        if kind is Tensor:
            self._look_at(tensor)
        elif tensor is None:  # of the class: it stands in tables of functions
            return self._original
        elif nn.Parameter in kind.__mro__:
            self._tell_of_read(tensor)
        return self._get(tensor)

    def __set__(self, tensor: Any, value: Tensor) -> None:
        if nn.Parameter in type(tensor).__mro__:
            self._tell_of_set(tensor, value)
        self._original.__set__(tensor, value)

    def __delete__(self, tensor: Any) -> None:
        self._original.__delete__(tensor)

    def _look_at(self, tensor: Tensor) -> None:
        if _count_modes():  # which are to see one read, as without amp_patch
            with torch._C.DisableTorchFunction():
                base, dtype = tensor._base, tensor.dtype
        else:
            base, dtype = tensor._base, tensor.dtype
        if base is not None and nn.Parameter in type(base).__mro__:
            self._tell_of_read(base)
        elif dtype in HALVES:
            self._tell_of_half()


_count_modes = torch._C._len_torch_function_stack
