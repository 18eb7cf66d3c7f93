"""Cached casts of parameters, and what must still hold for each to be right.

Knows parameters and the modules that they are registered on; nothing of modes or of functions.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from amp_patch import kernels
from amp_patch.kernels.reusable import Reusable

_VERSION = operator.attrgetter("_version")
_SHAPE = operator.attrgetter("shape")


class Group:
    """The parameters of one model: they go stale and are refreshed together.

    Attributes:
        root: the model, held weakly.
        stale: True where weights may have changed since the casts were made.
        training: the model's mode when its forward was last seen.
        entries: by the id of the parameter, which its entry keeps alive.
        bulk: all entries as lists; None where any came or went since it was made.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        self.stale = True
        self.training = root.training
        self.entries: dict[int, Entry] = {}
        self.bulk: Bulk | None = None


class Entry:
    """A parameter, its cast, and what must still hold for the cast to be right."""

    __slots__ = ("cast", "dtype", "group", "layout", "param", "pointer", "requires_grad", "version")

    def __init__(self, param: nn.Parameter, cast: Tensor, group: Group) -> None:
        self.param = param
        self.cast = cast
        self.group = group
        self.dtype = cast.dtype
        self.version = param._version
        self.requires_grad = param.requires_grad
        self.pointer = param.data_ptr()
        self.layout = (param.shape, param.stride())

    def stands(self) -> bool:
        """True while the parameter is the tensor that this was cast from, whatever its values."""
        param = self.param
        return (
            self.pointer == param.data_ptr()
            and self.requires_grad == param.requires_grad
            and self.layout == (param.shape, param.stride())
        )


class Bulk:
    """All casts of a model as lists: to check and to refresh them takes a few calls.

    Args:
        entries: each just found to be usable, and its cast held by nobody.
        owners: where each entry's parameter is registered.
    """

    def __init__(self, entries: Sequence[Entry], owners: Sequence[Owner]) -> None:
        self.entries = list(entries)
        self.params = [entry.param for entry in entries]
        casts = [entry.cast for entry in entries]
        self._cast = kernels.Cast(self.params, casts)
        slots = [owner.slot() for owner in owners]
        self._registries = [registry for registry, _ in slots]
        self._names = [name for _, name in slots]
        self._pointers = [entry.pointer for entry in entries]
        self._shapes = list(map(_SHAPE, self.params))
        self._versions: list[int] = []
        self._casts = Reusable(casts)

    def usable(self) -> bool:
        """True while every parameter stands and nobody holds a cast (see `Entry`)."""
        params = self.params
        return (
            list(map(Tensor.data_ptr, params)) == self._pointers
            and list(map(_SHAPE, params)) == self._shapes
            and all(map(operator.is_, map(dict.get, self._registries, self._names), params))
            and self._casts.are_free()
        )

    def refresh(self) -> None:
        """Copy the parameters into their casts, one call per device and dtype."""
        self._cast.run()
        versions = list(map(_VERSION, self.params))
        if versions != self._versions:  # fused optimizers do not move them
            self._versions = versions
            for entry, version in zip(self.entries, versions, strict=True):
                entry.version = version


class Owner:
    """The module that a parameter is registered on; weak, so that a dropped model is freed."""

    __slots__ = ("group", "module", "name")

    def __init__(self, module: weakref.ref[nn.Module], name: str, group: Group) -> None:
        self.module = module
        self.name = name
        self.group = group

    def owns(self, param: nn.Parameter) -> bool:
        """Return whether the parameter still stands at this place."""
        return self.param_id() == id(param)

    def slot(self) -> tuple[dict[str, nn.Parameter | None], str]:
        """Return the dictionary and the name under which the parameter is registered."""
        module = self.module()
        return ({} if module is None else module._parameters), self.name

    def param_id(self) -> int:
        """Return the id of the parameter that stands at this place now."""
        module = self.module()
        return id(None if module is None else module._parameters.get(self.name))
