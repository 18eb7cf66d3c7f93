"""What a state dict has of half tensors: fp32 copies, of which writes are to reach the model.

``own = model.state_dict(); own[name].copy_(value)`` loads a part of a state, for torch's dict has
the very tensors of the model; averages and federated training write ``own[name].data``, of which
no version tells. Knows no values, and no optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.common.weak_modules import ModuleTable
from amp_patch.distributed.shards import place, version_of
from amp_patch.kernels.tensor_values import same_numbers

from .half_bits import bits_of, can_be_compared, compared, is_plain


class _Handed(NamedTuple):
    """A half tensor, and what a state dict has of it: a copy, or its master.

    Attributes:
        version: of ``value``; None of a master, whose version is looked at elsewhere.
        half_version: of ``tensor``, which a later write to it has moved.
        bits: see `bits_of`, of ``tensor``; None of other than plain ones.
    """

    tensor: Tensor
    value: Tensor
    version: int | None
    half_version: int
    bits: Tensor | None

    def was_written_to(self) -> bool:
        """Return whether what the state dict has was written to, also through ``.data``.

        Where the two differ and no version tells, it was if the half tensor has its bits of then.
        """
        if self.has_other_version():
            return True
        if self.bits is None or not is_plain(self.tensor) or self.has_the_numbers():
            return False
        is_as_it_was = version_of(self.tensor) == self.half_version
        return is_as_it_was and torch.equal(bits_of(self.tensor), self.bits)

    def has_other_version(self) -> bool:
        """Return whether a version tells that what the state dict has was written to."""
        return self.version is not None and version_of(self.value) != self.version

    def has_the_numbers(self) -> bool:
        """Return whether the half tensor has the numbers of the value, NaN at the same places."""
        is_alike = self.value.shape == self.tensor.shape
        return is_alike and bool(same_numbers(self.tensor, self.value))


class HandedOut:
    """What the last state dict of each module has of half tensors, until the model is used.

    Args:
        enter: called with a half tensor and what was written to its copy.
        is_master: returns of a half tensor and a value whether this is in its master's memory.

    Attributes:
        are_held: whether a state dict was made since the last use; each forward asks.
    """

    def __init__(
        self,
        enter: Callable[[Tensor, Tensor], None],
        is_master: Callable[[Tensor, Tensor], bool],
    ) -> None:
        self._enter, self._is_master = enter, is_master
        self.are_held = False
        self._handed: ModuleTable[list[_Handed]] = ModuleTable()
        self._places: ModuleTable[set[int]] = ModuleTable()

    def add(
        self,
        module: nn.Module,
        tensor: Tensor,
        value: Tensor,
        bits: Tensor | None,
        *,
        is_master: bool,
    ) -> None:
        """A state dict gets the value of a half tensor of a module; held until `take_over`.

        Args:
            module: the tensor's.
            tensor: a parameter or a buffer.
            value: its own.
            bits: what `bits_of` returned of the tensor before the value was made.
            is_master: whether the value is a master.
        """
        if not value.is_inference():  # which nobody may write to, and has no version
            version = None if is_master else version_of(value)
            handed = _Handed(tensor, value, version, version_of(tensor), bits)
            self._handed.setdefault(module, []).append(handed)
            self.are_held = True

    def note(self, module: nn.Module, value: Tensor) -> None:
        """A state dict gets an fp32 value of a module, a copy or a master; see `has`."""
        self._places.setdefault(module, set()).add(place(value))
        self.are_held = True

    def has(self, tensor: Tensor) -> bool:
        """Return whether a state dict has got a tensor as an fp32 value since the last use."""
        if not self.are_held:
            return False
        found = place(tensor)
        return any(found in places for places in self._places.values())

    def take_over(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Enter what was written to values, and let go of these.

        Args:
            modules: whose; None: all.
        """
        if not self.are_held:  # as where a state is read module by module
            return
        used = [*self._handed, *self._places] if modules is None else list(modules)
        found = [self._handed.pop(one, []) for one in used]
        for one in used if self._places else ():
            self._places.pop(one, None)
        self.are_held = bool(self._handed or self._places)
        if not any(found):
            return
        # What is kept of them must be no inference tensors, nor what torch.func wraps.
        with (
            torch.inference_mode(False),
            torch._C._DisableFuncTorch(),
            torch.no_grad(),
            _untraced(),
        ):
            for handed in _suspects(chain.from_iterable(found)):
                if handed.was_written_to() and self._is_held(handed):
                    self._enter(handed.tensor, handed.value)

    def _is_held(self, handed: _Handed) -> bool:
        """Tell whether what a state dict has is its own, or in the memory of the master still."""
        return handed.version is not None or self._is_master(handed.tensor, handed.value)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Keep what is done out of the graph that torch.jit.trace or ONNX's exporter records."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # torch's stubs lack it
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]  # as above


def _suspects(rows: Iterable[_Handed]) -> Iterator[_Handed]:
    """Yield what may have been written to: not where the half tensor has the value's numbers.

    To ask of one after the other would wait for a device each time.
    """
    open_rows = []
    for row in rows:
        if can_be_compared(row.value, row.tensor) and not row.has_other_version():
            open_rows.append(row)
        else:
            yield row
    alike = compared([(row.value, row.tensor) for row in open_rows])
    yield from (row for row, is_alike in zip(open_rows, alike, strict=True) if not is_alike)
