"""Cached casts of parameters, and what must still hold for each to be right.

Knows parameters and the modules that they are registered on; nothing of modes or of functions.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch import kernels
from amp_patch.kernels.getters import VERSION
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.reusable import Reusable, is_held

from .shared_casts import USES

#: Elements from which on a cast gives its memory back in the backward. To give it back and to get
#: it again takes the host about 4 us, as long as casting that many elements takes one core. Beside
#: a GPU, which casts them in no time, the host is what takes long, and half a megabyte is little.
LARGE, LARGE_ON_GPU = 1 << 14, 1 << 18
#: So many elements at most give their memory back together, or one cast that has more. A hook in
#: the backward takes the host 8 us beside a GPU, and what it gives back twice as long, so far from
#: all else.
TOGETHER, TOGETHER_ON_GPU = 1, 1 << 23
_NO_VERSION = -1
#: In which backward passes all large casts are looked at for those that no graph reads. An odd
#: number: two losses that take turns, as in a GAN, are looked at both.
_LOOK_EVERY = 17
_FIRST_PAUSE = 16
#: `kernels.caster` has one list of what it writes to.
_LISTS_OF_BULK = 1
_SHAPE = operator.attrgetter("shape")


class Group:
    """The parameters of one model: they go stale and are refreshed together.

    Attributes:
        root: the model, held weakly.
        stale: True where weights may have changed since the casts were made.
        training: the model's mode when its forward was last seen.
        accumulates: True where casts are used again after a backward and before they go stale, so
            that they keep their memory; until a refresh finds that they were not.
        pause: for how many refreshes casts that no graph reads keep their memory: one was needed
            before its own gradient came, for a checkpoint ran its forward again.
        next_pause: how many these will be the next time; twice as many each time.
        frozen: casts of large frozen parameters by their ids: references to both, and the dtype,
            the version and the address that the parameter had.
        entries: by the id of the parameter, which its entry keeps alive.
        batch: takes the next large cast; None where one has to be made.
        bulk: all entries as lists; None where any came or went since it was made.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        self.stale = True
        self.training = root.training
        self.accumulates = False
        self.pause, self.next_pause = 0, _FIRST_PAUSE
        self.frozen: dict[int, tuple[Any, ...]] = {}
        self.entries: dict[int, Entry] = {}
        self.batch: Batch | None = None
        self.bulk: Bulk | None = None

    def keeps_memory(self, device: torch.device) -> bool:
        """Return whether no cast on a device may give its memory back now."""
        # A graph that is captured replays its casts at the addresses of now.
        return self.accumulates or captures.are_made(device)


class Entry:
    """A parameter, its cast, and what must still hold for the cast to be right.

    The cast of a large parameter gives its memory back in the backward, see `Batch`. Autocast's
    casts go at the same time: kept to the step, ours would lie beside the fp32 gradients, 2 bytes
    more per parameter.

    Attributes:
        arrivals: how many gradients of a large one have arrived since the last refresh.
        has_memory: False from the arrival of the gradient until the cast is made again.
        is_large: True where it gives its memory back.
        uses_left: how often the cast may be used before the next refresh, see `shared_casts.USES`.
        batch: of a large one, with which it does.
    """

    __slots__ = (
        "__weakref__",
        "arrivals",
        "batch",
        "cast",
        "dtype",
        "empty",
        "group",
        "has_memory",
        "is_large",
        "layout",
        "param",
        "pointer",
        "requires_grad",
        "strides",
        "uses_left",
        "version",
    )

    def __init__(self, param: nn.Parameter, cast: Tensor, group: Group) -> None:
        self.param = param
        self.cast = cast
        self.group = group
        self.dtype = cast.dtype
        self.version = param._version
        self.requires_grad = param.requires_grad
        self.pointer = param.data_ptr()
        self.layout = (param.shape, param.stride())
        self.arrivals = 0
        self.has_memory = True
        self.uses_left = USES[cast.dtype]
        self.is_large = is_large(param)
        self.batch: Batch | None = None
        if self.is_large:
            self.strides = cast.stride()
            self.empty = _empty(cast.dtype, cast.device)

    def stands(self) -> bool:
        """True while the parameter is the tensor that this was cast from, whatever its values."""
        param = self.param
        return (
            self.pointer == param.data_ptr()
            and self.requires_grad == param.requires_grad
            and self.layout == (param.shape, param.stride())
        )

    def is_free(self) -> bool:
        """Return whether nobody would see it if the cast were written to, or lost its memory."""
        lists = 0 if self.group.bulk is None else _LISTS_OF_BULK
        return not self.has_memory or not is_held(self.cast, lists)

    def give_back(self) -> None:
        """Give the memory back, but where somebody holds the cast; see `Group.keeps_memory`."""
        if not self.has_memory:
            return
        # In this order: another thread takes the cast before it looks at the version.
        version, self.version = self.version, _NO_VERSION
        if not self.is_free():
            self.version = version
            return
        # Not by emptying the storage: an operator that is given the cast all the same would read
        # memory that is gone, and crash. An empty tensor is of another shape: it raises.
        self.has_memory = False
        self.cast.data = self.empty

    def claim(self) -> None:
        """See that the cast has memory; what is in it is not known."""
        if not self.has_memory:
            shape, device = self.param.shape, self.cast.device
            self.cast.data = torch.empty_strided(
                shape, self.strides, dtype=self.dtype, device=device
            )
            self.has_memory = True

    def doubt(self) -> None:
        """The parameter may be written to, and its version will not tell."""
        self.version = _NO_VERSION

    @torch.no_grad()
    def recast(self) -> bool:
        """Cast a parameter again that was written to; return False where somebody would see it."""
        if not self.is_free():
            return False
        self.cast.copy_(self.param)
        self.version = self.param._version
        return True

    @torch.no_grad()
    def revive(self) -> None:
        """Cast the parameter again, into new memory, which the model's casts keep from now on."""
        self.group.accumulates = True
        if self.arrivals == 0:
            self.group.pause = self.group.next_pause
            self.group.next_pause *= 2
        self.claim()
        self.cast.copy_(self.param)
        self.version = self.param._version


class Batch:
    """Large casts that were made one after the other, and give their memory back together.

    They do when the gradient of the first arrives: all that read it in this backward have run
    then, and all that read the others, which the forward came to later. Who holds one of them has
    it keep its memory.
    """

    __slots__ = ("__weakref__", "_elements", "_entries")

    def __init__(self) -> None:
        self._elements = 0
        self._entries: list[weakref.ref[Entry]] = []

    def add(self, entry: Entry) -> None:
        """Take one in."""
        entry.batch = self
        self._elements += entry.param.numel()
        self._entries.append(weakref.ref(entry))

    def has_room(self, entry: Entry) -> bool:
        """Return whether another one is to wait for the first, which lives."""
        first = self._entries[0]()
        if first is None:
            return False
        at_most = TOGETHER if first.param.is_cpu else TOGETHER_ON_GPU
        return self._elements + entry.param.numel() <= at_most

    def is_first(self, entry: Entry) -> bool:
        """Return whether the others wait for this one's gradient."""
        return self._entries[0]() is entry

    def entries(self) -> list[Entry]:
        """Return those that are there still."""
        return [entry for reference in self._entries if (entry := reference()) is not None]

    def release(self, known: Mapping[int, Entry]) -> None:
        """The gradient of the first has arrived: give the memory of all back.

        Args:
            known: the cache's entries, by the ids of their parameters.
        """
        # Not those that the cache has dropped: another thread may have found one just before.
        entries = [one for one in self.entries() if known.get(id(one.param)) is one]
        for entry in entries:
            entry.arrivals += 1
        if entries and not entries[0].group.keeps_memory(entries[0].cast.device):
            for entry in entries:
                entry.give_back()


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def is_large(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor's cast is worth what it takes the host to save it.

    That of a parameter has memory only from its forward to its backward then.
    """
    return tensor.numel() >= (LARGE if tensor.is_cpu else LARGE_ON_GPU)


class Bulk:
    """All casts of a model as lists: to check and to refresh them takes a few calls.

    Args:
        entries: each just found to be usable, and its cast held by nobody.
        owners: where each entry's parameter is registered.
    """

    def __init__(self, entries: Sequence[Entry], owners: Sequence[Owner]) -> None:
        self.entries = list(entries)
        self.params = [entry.param for entry in entries]
        self._large = [entry for entry in entries if entry.is_large]
        self._cast = kernels.caster(self.params, [entry.cast for entry in entries])
        slots = [owner.slot() for owner in owners]
        self._registries = [registry for registry, _ in slots]
        self._names = [name for _, name in slots]
        self._pointers = [entry.pointer for entry in entries]
        self._shapes = list(map(_SHAPE, self.params))
        self._versions: list[int] = []
        self._small = Reusable([entry.cast for entry in entries if not entry.is_large])
        # Large ones that no graph has read in some backward, and how many of these there were.
        self._unread: set[Entry] = set()
        self._backwards = 0

    def usable(self) -> bool:
        """True while every parameter stands and nobody holds a cast (see `Entry`)."""
        params = self.params
        return (
            list(map(Tensor.data_ptr, params)) == self._pointers
            and list(map(_SHAPE, params)) == self._shapes
            and all(map(operator.is_, map(dict.get, self._registries, self._names), params))
            and self._small.are_free()
            and all(map(Entry.is_free, self._large))
        )

    def were_used_again(self) -> bool:
        """Return whether casts were used in several backward passes since the last refresh."""
        return any(one.arrivals > 1 for one in self._large)

    def give_back_unread(self) -> None:
        """Let the casts that no graph reads give their memory back.

        Those are tried that no graph has read before, and all in one backward of some, for to look
        at each takes the host 1 us.
        """
        is_look = self._backwards % _LOOK_EVERY == 0
        self._backwards += 1
        tried = self._large if is_look else self._unread
        first = next(iter(tried), None)
        if first is None or first.group.keeps_memory(first.cast.device):
            return
        for entry in tried:
            entry.give_back()
        if is_look:
            self._unread.update(entry for entry in self._large if not entry.has_memory)

    def refresh(self) -> None:
        """Copy the parameters into their casts, one call per device and dtype."""
        for entry in self._large:
            entry.claim()
        self._cast.run()
        for entry in self._large:
            entry.version, entry.arrivals = entry.param._version, 0
        for entry in self.entries:
            entry.uses_left = USES[entry.dtype]
        versions = list(map(VERSION, self.params))
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
