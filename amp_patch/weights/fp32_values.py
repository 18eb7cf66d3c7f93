"""The fp32 values of parameters that are stored in half; knows no optimizer and no scale.

A parameter is its fp32 value rounded to half. Whichever of the two the user wrote to, the other
follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_patch.casting.mode import HALVES


class _Exact:
    """An fp32 value, and its version when the parameter was last equal to it.

    The version stands in a list that may belong to several values: a step notes them all at once.
    Where two optimizers step the parameter each has a list, and what either knows counts.
    """

    __slots__ = ("_exposed", "noted", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.noted: list[tuple[list[int], int]] = []
        self._exposed: tuple[int, int] | None = None

    def note_equal(self) -> None:
        for versions, index in self.noted:
            versions[index] = self.value._version
        self._exposed = None

    def expose(self, param: Tensor) -> None:
        """The user may write to the value in ways that leave no trace."""
        self._exposed = param._version, self.value._version

    def end_exposure(self) -> None:
        self._exposed = None

    def wins(self, param: Tensor) -> bool:
        """Return whether the value was written to since it was equal to the parameter."""
        version = self.value._version
        if self._exposed is not None:
            half_then, exact_then = self._exposed
            return param._version == half_then or version != exact_then
        return all(versions[index] != version for versions, index in self.noted)


class FP32Store:
    """The exact fp32 value of each half parameter, for as long as the parameter lives.

    A value is a master that an optimizer steps, or what the parameter held before it was
    converted, kept for an optimizer that comes later.

    Attributes:
        loads: how often values were set from a state dict.
    """

    def __init__(self) -> None:
        self.loads = 0
        self.clear()

    def clear(self) -> None:
        """Forget every value."""
        self._values = WeakTensorKeyDictionary()
        self._converted: set[int] = set()

    def set(
        self, param: Tensor, value: Tensor, versions: list[int] | None = None, index: int = 0
    ) -> None:
        """Enter ``value``, of which ``param`` holds the rounded copy.

        Args:
            param: the half parameter.
            value: fp32, same shape.
            versions: where the version of ``value`` is noted; a list of its own if None.
            index: the place in ``versions``.
        """
        entry, known = _Exact(value), self._values.get(param)
        entry.noted.append(([0] if versions is None else versions, index))
        entry.note_equal()
        is_same = known is not None and known.value.data_ptr() == value.data_ptr()
        if versions is not None and is_same:
            entry.noted += known.noted
        self._values[param] = entry

    def holds(self, param: Tensor) -> bool:
        """Return whether there is an fp32 value of a parameter."""
        return param in self._values

    def forget_versions(self, param: Tensor, versions: list[int]) -> None:
        """Note the version of a parameter's value elsewhere than in ``versions`` from now on."""
        entry = self._values.get(param)
        if entry is not None:
            wins = entry.wins(param)
            entry.noted = [(other, i) for other, i in entry.noted if other is not versions]
            if not entry.noted:
                entry.noted.append(([-1 if wins else entry.value._version], 0))

    def wins(self, param: Tensor) -> bool:
        """Return whether the fp32 value was written to since the parameter was equal to it."""
        return bool(self._values[param].wins(param))

    def expose(self, param: Tensor) -> None:
        """The value wins where the two differ, unless only the parameter is seen to be written."""
        self._values[param].expose(param)

    def end_exposure(self, param: Tensor) -> None:
        """As `expose`, but the two are equal now."""
        self._values[param].end_exposure()

    def set_converted(self, param: Tensor, value: Tensor) -> None:
        """As `set`, for a parameter converted just now; until `end_conversion` nothing writes."""
        self.set(param, value)
        self._converted.add(id(param))

    def forget(self, params: Iterable[Tensor]) -> None:
        """Drop the values of these parameters, whose conversion was undone."""
        for param in params:
            self._values.pop(param, None)

    def end_conversion(self) -> None:
        """From now on the user may write to the parameters."""
        self._converted.clear()

    @torch.no_grad()
    def exact(self, param: Tensor) -> Tensor:
        """Return the fp32 value of a half parameter; writes to the parameter are in it."""
        entry = self._values.get(param)
        if entry is None:
            return param.detach().float()
        value: Tensor = entry.value.detach().to(param.device)
        rounded = value.to(param.dtype)
        if entry.wins(param) or torch.equal(rounded, param):
            return value
        return torch.where(rounded == param, value, param.float())

    @torch.no_grad()
    def take(self, param: Tensor) -> Tensor:
        """Return the fp32 value for a master to hold, in the stored tensor's own memory."""
        entry = self._values.get(param)
        # To compare a whole model again would take longer than to convert it.
        converted = entry is not None and id(param) in self._converted
        value = entry.value.detach() if converted else self.exact(param)
        if entry is None or entry.value.device != param.device:
            return value
        # Another optimizer may step the same parameter, and with it the same memory.
        if value.data_ptr() != entry.value.data_ptr():
            entry.value.copy_(value)
            value = entry.value.detach()
        value.grad = entry.value.grad
        return value

    def write_state(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Put fp32 values for the half entries of ``module`` itself into a state dict."""
        for name, param in module._parameters.items():
            if param is not None and prefix + name in state and param.dtype in HALVES:
                attached = state[prefix + name].requires_grad  # keep_vars=True
                state[prefix + name] = self.exact(param).requires_grad_(attached)
        for name in module._buffers:
            buffer = state.get(prefix + name)
            if buffer is not None and buffer.dtype in HALVES:
                state[prefix + name] = buffer.float()

    @torch.no_grad()
    def read_state(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Set the values of ``module`` itself from a state dict that is about to be loaded."""
        for name, param in module._parameters.items():
            new = state.get(prefix + name)
            entry = None if param is None else self._values.get(param)
            if isinstance(new, Tensor) and entry is not None and new.shape == entry.value.shape:
                entry.value.copy_(new)
                entry.note_equal()
                self.loads += 1
