"""Tells who reads or sets the ``.data`` of a parameter, for a write by it moves no version.

``self.weight.data *= self.mask`` in a layer's forward comes after the first layer's use of its
own weight, with which all of the model's weights are cast. Knows nothing of casts and of masters.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from amp_patch.patching import Patches, resolve_in

from .mode import HALVES


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

    def read(tensor: Tensor) -> Tensor:
        if type(tensor) is nn.Parameter:  # to ask for an instance takes torch a call of Python
            tell_of_read(tensor)
        else:
            param = tensor if isinstance(tensor, nn.Parameter) else tensor._base
            if param is not None and isinstance(param, nn.Parameter):
                tell_of_read(param)
            elif tensor.dtype in HALVES:
                tell_of_half()
        value: Tensor = original.__get__(tensor)
        return value

    def set_to(tensor: Tensor, value: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            tell_of_set(tensor, value)
        original.__set__(tensor, value)

    patches.replace(Tensor, name, property(read, set_to, doc=original.__doc__))
