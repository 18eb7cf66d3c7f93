"""The fp32 values of what is stored in half; knows no optimizer and no scale.

A half parameter is its fp32 value, rounded. One that came in half and stays frozen has a value in
the dtype that it came in. Users write to either: to the parameter
(``nn.init``, ``load_state_dict``, ``p.data.clamp_()``), or to the master that
``amp.master_params`` gives them. `FP32Values` says which of the two the other has to follow.
A half buffer has a value as well, where half precision cannot hold it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_patch.distributed.shards import are_equal_here, detached, is_spread, place, version_of
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.without_grad import without_grad
from amp_patch.levels import HALVES

from .alike_values import AlikeValues
from .half_bits import have_same_bits
from .handed_out import HandedOut
from .versions import NotedValue, Versions


class FP32Values:
    """The fp32 value of each half parameter and buffer, for as long as this tensor lives.

    A value is a master that an optimizer steps, or what the parameter held before it was
    converted, kept for an optimizer that comes later. That of a buffer is what it held before, or
    what was loaded: a constant is to be given back as it came.

    The rule by which parameter ``p`` and value ``x`` are made to agree, before each step and
    wherever the value is asked for::

        value_wins = x was written to since the two were equal
                     or the user was given x (amp.master_params), and not p alone was written to
        if value_wins:
            p = round(x)
        else:    # by element: what was not written to keeps its fp32 bits
            x = where(round(x) == p, x, p)

    After each step ``p = round(x)``, and the two count as equal.

    Attributes:
        loads: how often values were set from a state dict.
        handed_out: what state dicts have got since the models were used.
        writes: how often each half parameter was written to without a version, by its id.
        moves: how often any was given other memory.
        data_reads: how often a script has read, or set, the ``.data`` of a half tensor.
        sums: see `UnseenMasterWrites`.
    """

    def __init__(self) -> None:
        self.loads = 0
        self.sums: dict[int, tuple[int, int]] = {}
        self.writes: dict[int, int] = {}
        self.moves = 0
        self.data_reads = 0
        self.handed_out = HandedOut(self._take_over, self.is_stepped)
        self.clear()

    def clear(self) -> None:
        """Forget every value."""
        self.sums.clear()
        self.writes.clear()
        self.alike = AlikeValues()
        self._values: MutableMapping[Tensor, NotedValue] = WeakTensorKeyDictionary()
        self._came_in: MutableMapping[Tensor, torch.dtype] = WeakTensorKeyDictionary()
        self._stored: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        # By id, until `end_conversion`: the parameter, and its value with the gradient from before.
        self._converted: dict[int, tuple[Tensor, Tensor]] = {}

    def set(
        self, param: Tensor, value: Tensor, versions: Versions | None = None, index: int = 0
    ) -> None:
        """Enter ``value``, of which ``param`` holds the rounded copy.

        Args:
            param: the half parameter.
            value: fp32, same shape.
            versions: where those of ``value`` are noted; an object of its own if None.
            index: the place in ``versions``.
        """
        entry, known = NotedValue(value), self._values.get(param)
        entry.noted.append((Versions([0]) if versions is None else versions, index))
        entry.note_equal()
        if versions is not None and known is not None and _share_memory(known.value, value):
            entry.noted += known.noted
            entry.others = [weakref.ref(known.value), *known.others]
        self._values[param] = entry
        self._came_in.pop(param, None)  # it is trained now

    def doubt(self, param: Tensor) -> None:
        """A script is about to read a half parameter's ``.data``, to which it may write."""
        self.alike.doubt(param)
        self.data_reads += 1

    def note_alias(self) -> None:
        """A script is about to read the ``.data`` of what may be in a half parameter's memory."""
        self.data_reads += 1

    def note_set(self, param: Tensor, new: Tensor) -> None:
        """A script is about to set ``param.data``, which moves no version.

        ``model.to(device)`` sets each parameter's, most often to the numbers that it has.
        """
        if param.dtype not in HALVES:
            return
        self.doubt(param)
        if param not in self._values or new is param:
            return
        if _is_elsewhere(param, new):
            self.moves += 1
            if _are_comparable(param, new) and not _are_surely_equal(param, new):
                self.note_write(param)

    def note_write(self, param: Tensor) -> None:
        """A half parameter was written to in a way that moves no version."""
        self.writes[id(param)] = self.writes.get(id(param), 0) + 1

    def version_of(self, param: Tensor) -> int:
        """Return a number that each write to a half parameter moves, but one by its ``.data``.

        What is set as its ``.data`` does.
        """
        return version_of(param) + self.writes.get(id(param), 0)

    def holds(self, param: Tensor) -> bool:
        """Return whether there is an fp32 value of a parameter."""
        return param in self._values

    def value_of(self, param: Tensor) -> Tensor | None:
        """Return the very tensor that holds a parameter's value, a master say; None without."""
        entry = self._values.get(param)
        return None if entry is None else entry.value

    def masters_of(self, param: Tensor) -> list[Tensor]:
        """Return what has held a parameter's value in one memory, the masters of optimizers say."""
        entry = self._values.get(param)
        if entry is None:
            return []
        alive = (reference() for reference in entry.others)
        return [entry.value, *(one for one in alive if one is not None)]

    def params_by_value(self) -> dict[int, Tensor]:
        """Return each parameter by the id of the very tensor that holds its value, a master say."""
        return {id(entry.value): param for param, entry in list(self._values.items())}

    def params_by_master(self) -> dict[int, Tensor]:
        """Return each parameter by the ids of all that `masters_of` returns of it."""
        return {id(one): param for param in list(self._values) for one in self.masters_of(param)}

    def add_stored(self, tensors: Iterable[Tensor]) -> None:
        """The level stores these parameters and buffers in half from now on."""
        self._stored.update(dict.fromkeys(tensors))

    def stored_halves(self) -> list[Tensor]:
        """Return what the level stored in half and lives, but what came so."""
        return [one for one in self._stored if one.dtype in HALVES and one not in self._came_in]

    def are_made_from(self, param: Tensor) -> bool:
        """Return whether a half parameter is the rounded copy of a value, on every rank alike."""
        return param in self._values and param not in self._came_in

    def came_in_half(self, tensor: Tensor) -> bool:
        """Return whether a parameter came in half, and was not trained before."""
        return tensor in self._came_in

    def is_frozen_half(self, param: Tensor) -> bool:
        """Return whether a parameter came in half and is not trained."""
        return param in self._came_in and not param.requires_grad

    def forget_versions(self, param: Tensor, versions: Versions) -> None:
        """Note the versions of a parameter's value elsewhere than in ``versions`` from now on."""
        entry = self._values.get(param)
        if entry is not None:
            wins = entry.wins(self.version_of(param))
            entry.noted = [(other, i) for other, i in entry.noted if other is not versions]
            if not entry.noted:
                entry.noted.append((Versions([-1 if wins else version_of(entry.value)]), 0))

    def wins(self, param: Tensor) -> bool:
        """Return whether a parameter has to follow its fp32 value, and not the reverse."""
        return bool(self._values[param].wins(self.version_of(param)))

    def set_converted(self, param: Tensor, value: Tensor) -> None:
        """As `set`, for a parameter converted just now; until `end_conversion` nothing writes."""
        self.set(param, value)
        self._converted[id(param)] = param, value

    def set_frozen(self, param: Tensor, original: Tensor) -> None:
        """Enter a frozen parameter that came in half.

        Its own numbers are kept where the dtype that it is stored in cannot hold all of them.

        Args:
            param: stored in the level's dtype.
            original: its numbers, in the dtype that it came in.
        """
        self._values.pop(param, None)
        if not _can_hold(param.dtype, original):
            self.set(param, original)
        self._came_in[param] = original.dtype

    def set_buffer(self, buffer: Tensor, original: Tensor) -> None:
        """Enter the fp32 numbers of a half buffer, where it cannot hold all of them.

        A mask or a counter, which it can, costs no memory so. torch does not compare sparse
        tensors, nor those without data: they have no value.
        """
        self._values.pop(buffer, None)
        is_dense = original.layout is torch.strided and not original.is_meta
        if is_dense and not _can_hold(buffer.dtype, original):
            self.set(buffer, original)

    def forget(self, params: Iterable[Tensor]) -> None:
        """Drop the values of these tensors, whose conversion was undone."""
        for param in params:
            self._values.pop(param, None)
            self._came_in.pop(param, None)
            self._stored.pop(param, None)

    def end_conversion(self) -> None:
        """`initialize` is over: from now on the user may write to the parameters.

        The gradients of those for which no master came are the parameters' again.
        """
        for param, value in self._converted.values():
            entry = self._values.get(param)
            if value.grad is not None and entry is not None and entry.value is value:
                param.grad, value.grad = value.grad.to(param.dtype), None
        self._converted.clear()

    @without_grad
    def exact_ones(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return what `exact` does of each, all compared at once."""
        self.compare(params)
        try:
            return list(map(self._compared_value, params))
        finally:
            self.alike.clear()

    @without_grad
    def exact(self, param: Tensor) -> Tensor:
        """Return the value of a parameter or buffer; writes to it are in the value.

        It is fp32. A frozen parameter that came in half has it in the dtype of then, unless it was
        trained or written to, and that dtype cannot hold what it is now.
        """
        entry = self._values.get(param)
        if entry is None or not _fits(entry.value, param):
            return self.as_it_came(param, param.detach().float())
        value: Tensor = detached(entry.value).to(param.device, torch.float32)
        rounded = value.to(param.dtype)
        wins = entry.wins(self.version_of(param)) or have_same_bits(rounded, param)
        if not (wins or are_equal_here(rounded, param)):
            value = torch.where(rounded == param, value, param.float())
        return self.as_it_came(param, value)

    def _compared_value(self, param: Tensor) -> Tensor:
        """Return what `exact` does, without a look where `compare` has looked at it before."""
        known = self.alike.get(param)
        return self.exact(param) if known is None else self.as_it_came(param, known.detach())

    def as_it_came(self, param: Tensor, value: Tensor) -> Tensor:
        """Return a value in the dtype that the parameter or buffer came in, if that holds it."""
        came_in = None if param.requires_grad else self._came_in.get(param)
        if came_in is not None and _can_hold(came_in, value):
            return value.to(came_in)
        return value

    @torch.no_grad()
    def take(self, param: Tensor) -> Tensor:
        """Return the fp32 value for a master to hold, in the stored tensor's own memory."""
        if self.handed_out.are_held:  # what a script wrote to a state dict's values is in force
            self.handed_out.take_over()
        entry = self._values.get(param)
        # To compare a whole model again would take longer than to convert it.
        if entry is not None and id(param) in self._converted:
            value = entry.value.detach()
        else:
            value = self.exact(param)
        value = value.float()
        if entry is None or entry.value.dtype is not value.dtype:
            return value
        if entry.value.device != param.device or not _fits(entry.value, param):
            return value
        # Another optimizer may step the same parameter, and with it the same memory.
        if not _share_memory(value, entry.value):
            entry.value.copy_(value)
            value = entry.value.detach()
        value.grad = entry.value.grad
        return value

    @torch.no_grad()
    def receive(self, param: Tensor, value: Tensor) -> None:
        """Enter the fp32 value that another rank has of a parameter."""
        entry = self._values[param]
        entry.value.copy_(value)
        if not are_equal_here(value.to(param.dtype), param):
            param.copy_(value)
        entry.note_equal()
        self.loads += 1

    def compare(self, tensors: Iterable[Tensor]) -> None:
        """Look which half tensors are their values, rounded; see `AlikeValues`."""
        pairs = [(value, one) for one in tensors if (value := self.value_of(one)) is not None]
        self.alike.compare(pairs)

    def is_stepped(self, tensor: Tensor, value: Tensor) -> bool:
        """Return whether a value is a master, whose version tells of most writes."""
        known = self.value_of(tensor)
        return isinstance(known, nn.Parameter) and _share_memory(known, value)

    def _take_over(self, tensor: Tensor, written: Tensor) -> None:
        self.enter(tensor, written)
        if not are_equal_here(written.to(tensor), tensor):
            tensor.copy_(written)

    def enter(self, tensor: Tensor, new: Tensor) -> None:
        """Set the value of a parameter or buffer to what is about to be copied into it."""
        entry, came_in = self._values.get(tensor), self._came_in.get(tensor)
        if came_in is not None:
            new = new.detach().to(tensor.device, copy=True)
            if _can_hold(came_in, new) and not tensor.requires_grad:
                self.set_frozen(tensor, new.to(came_in))
            else:  # it was trained, or is to be
                self.set(tensor, new.float())
        elif tensor in self._stored and not isinstance(tensor, nn.Parameter):
            self.set_buffer(tensor, new.detach().to(tensor.device, torch.float32, copy=True))
        elif entry is not None and _fits(entry.value, tensor):
            entry.value.copy_(new)
            entry.note_equal()
            self.loads += 1


def _is_elsewhere(param: Tensor, new: Tensor) -> bool:
    """Return whether a parameter would get other memory, and not in another dtype or elsewhere."""
    if new.dtype is not param.dtype or new.device != param.device or is_spread(param):
        return False
    return place(new) != place(param) or new.stride() != param.stride()


def _are_comparable(param: Tensor, new: Tensor) -> bool:
    """Return whether the numbers of both can be compared: FSDP takes the memory of its own away."""
    if (
        param.shape != new.shape
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or hasattr(param, "_is_flat_param")
    ):
        return False
    return (
        type(new) in (Tensor, nn.Parameter)
        and not param.is_meta
        and param.untyped_storage().nbytes() > 0
    )


def _are_surely_equal(param: Tensor, new: Tensor) -> bool:
    """Return whether two have the same numbers; False in a captured step, where no host waits."""
    if captures.are_made(param.device):
        return False
    return torch.equal(param.detach(), new.detach())


def _fits(value: Tensor, param: Tensor) -> bool:
    """Return whether a value is one of a parameter still, which the user may have resized."""
    return value.shape == param.shape and not value.is_meta


def _can_hold(dtype: torch.dtype, value: Tensor) -> bool:
    return are_equal_here(value.to(dtype).to(value.dtype), value)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return place(one) == place(other)
