"""Tells who reads the ``.data`` of a parameter, for a write through it moves no version.

``self.weight.data *= self.mask`` in a layer's forward comes behind the first layer's use of its
own weight, with which all of the model's weights are cast. Knows nothing of casts.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from amp_patch.patching import Patches, resolve_in


def install(patches: Patches, tell: Callable[[nn.Parameter], object]) -> None:
    """Have ``tell(param)`` called before each ``param.data``.

    Args:
        patches: undoes it.
        tell: must read no ``.data`` itself.
    """
    _, name, original = resolve_in(nn.Parameter, "data")

    def read(param: nn.Parameter) -> Tensor:
        tell(param)
        value: Tensor = original.__get__(param)
        return value

    patches.replace(nn.Parameter, name, property(read, original.__set__, doc=original.__doc__))
