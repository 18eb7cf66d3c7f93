"""Half copies of fp32 parameters that live from one iteration to the next (O1, O4).

Knows nothing of the patched functions that ask for them. A copy keeps its place in the autograd
graph when its data is refreshed, so after the first iteration all copies are brought up to date
by one multi-tensor call and no weight is cast in a forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _pop_mode_temporarily

from amp_patch.kernels.default_device import without_default_device

from .argument_casts import is_on_cast_device
from .cached_casts import Batch, Bulk, Entry, Group, Owner, is_large
from .many_uses import begin_anew, forget
from .mode import FLOATS, mode
from .shared_casts import CAST, is_in_selective_checkpoint, is_recorded

_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch._C._is_tracing
_RUN_AT_ONCE = 1 << 63


class WeightCache:
    """Casts each parameter of the known models once; refreshes all casts of a model in one call.

    A cast is handed out again only while nothing can have changed its parameter: the version
    counter, the storage, ``requires_grad`` and the registration on its module are compared.
    What moves none of these (fused optimizers, writes through ``.data``) is covered by
    `mark_stale` at the end of every step. A cast holds its parameter through its graph node, so
    entries go when the module that owns the parameter goes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: dict[int, Group] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all models and casts."""
        forget()
        with self._lock:
            for group in self._groups.values():  # which its entries hold
                group.entries.clear()
                group.bulk = None
            self._groups = {}
            self._entries: dict[int, Entry] = {}
            self._owners: dict[int, Owner] = {}
            self._watched: dict[int, weakref.ref[nn.Module]] = {}
            self._foreign: dict[int, weakref.ref[nn.Parameter]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def mark_stale(self) -> None:
        """Weights may have changed: the next use of a model's weights refreshes its casts."""
        begin_anew()
        for group in [*self._groups.values()]:
            group.stale = True

    def doubt(self, param: nn.Parameter) -> None:
        """A weight may be about to be written to in a way that moves no version.

        Its next use casts it anew.
        """
        owner = self._owners.get(id(param))
        if owner is None or owner.group.stale:
            return
        with self._lock:
            owner.group.frozen.pop(id(param), None)
            entry = owner.group.entries.get(id(param))
            if entry is not None:
                entry.doubt()

    def begin_backward(self) -> None:
        """Let the casts that no graph reads give their memory back.

        Such is the weight of a first layer, whose input gets no gradient. Under autocast its cast
        goes when the forward ends.
        """
        if not self._groups:
            return
        with self._lock:  # other threads make lists of casts anew
            for group in list(self._groups.values()):
                if group.bulk is not None and not group.pause:
                    group.bulk.give_back_unread()

    def drop_casts(self) -> None:
        """Forget the casts, not the models: the next use of each weight casts it anew."""
        with self._lock:
            for param_id in list(self._entries):
                self._drop(param_id)

    def casts(self) -> list[Tensor]:
        """Return the cached casts; whoever holds one keeps it from being refreshed."""
        return [entry.cast for entry in self._entries.values()]

    def observe(self, model: nn.Module) -> None:
        """Call at the start of a model's forward: a copy of a model becomes known, too.

        A change between training and evaluation makes its casts stale: weights are swapped
        there (for their moving average, say) through ``.data``, which leaves no trace.
        """
        group = self._groups.get(id(model))
        if group is None or group.root() is not model:
            group = self.add_model(model)
        if group.training != model.training:
            group.training = model.training
            group.stale = True

    def add_model(self, model: nn.Module) -> Group:
        """Cache casts of this model's parameters from now on."""
        with self._lock:
            dead = [key for key, group in self._groups.items() if group.root() is None]
            for key in dead:
                del self._groups[key]
            group = self._groups.get(id(model)) or Group(model)
            self._groups[id(model)] = group
            self._scan(group)
            return group

    def cast(self, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return ``param`` in ``dtype``: the cached cast where it is right, else a new one.

        Differentiable. Without grad (except in a checkpoint's own forward, which is repeated
        with grad) the weight is read as it is now.
        """
        may_reuse = _is_grad_enabled() or mode.in_checkpoint
        if may_reuse and not _count_dispatch_modes() and not _is_tracing():
            return self.cast_plainly(param, dtype)
        if is_in_selective_checkpoint():  # its second run may find the cast that its first made
            with _pop_mode_temporarily():
                return self._find_or_cast(param, dtype)
        return self._find_or_cast(param, dtype)

    def cast_plainly(self, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """As `cast`, for a caller who has seen that casts may be used again: with grad, no mode."""
        entry = self._entries.get(id(param))
        # Runs once per use of a weight, so each comparison is of what is cheapest to read. The
        # entry keeps its parameter alive: no other one has its id.
        if entry is not None:
            cast = entry.cast  # before its version is looked at: see Entry.give_back
            if (
                not entry.group.stale
                and entry.version == param._version
                and entry.dtype is dtype
                and entry.pointer == param.data_ptr()
                and entry.requires_grad == param.requires_grad
                and (uses_left := entry.uses_left)
            ):
                entry.uses_left = uses_left - 1
                return cast
            # What an outdated cast holds must go before the next is made (see _drop).
            del cast, entry
        return self._find_or_cast(param, dtype)

    def cast_now(self, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """As `cast`, for a caller who has seen that grad is off, and no mode is on."""
        entry = self._entries.get(id(param))
        if (
            entry is not None
            and entry.dtype is dtype
            and entry.pointer == param.data_ptr()  # on a device whose tensors are cast
            and param.dtype in FLOATS
        ):
            return CAST[dtype](param)
        if not _castable(param, dtype):
            return param
        self._drop_if_moved(param)
        return CAST[dtype](param)

    def _find_or_cast(self, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
        if not _castable(param, dtype):
            return param
        if not _may_cache(param):
            self._drop_if_moved(param)
            return param.to(dtype)
        with self._lock:
            group = self._group_of(param)
            if group is None:
                return param.to(dtype)
            if group.stale:
                self._refresh(group)
            entry = group.entries.get(id(param))
            if entry is not None and entry.dtype is dtype and entry.stands():
                found = self._use(entry)
                if found is not None:
                    return found
            del entry
            return self._cache(param, dtype, group)

    def _use(self, entry: Entry) -> Tensor | None:
        """Return an entry's cast, or one that is equal; None where one has to be made anew."""
        if not entry.has_memory:
            entry.revive()
        if entry.version != entry.param._version and not entry.recast():
            return None
        if not entry.uses_left:
            return self._cache(entry.param, entry.dtype, entry.group, equal=entry.cast)
        entry.uses_left -= 1
        return entry.cast

    def _cache(
        self, param: nn.Parameter, dtype: torch.dtype, group: Group, equal: Tensor | None = None
    ) -> Tensor:
        """Cast a parameter, and keep the cast; one that is equal to an earlier has its memory."""
        self._drop(id(param))
        if not param.requires_grad and is_large(param):
            return _cast_frozen(param, dtype, group)
        with torch.enable_grad():
            cast = param.to(dtype)
        node = cast.grad_fn
        # A mode or a transform may hand out something else than a plain tensor, and a cast of a
        # released storage has no address to compare.
        if type(cast) is Tensor and param.data_ptr() != 0:
            if equal is not None:
                cast.data = equal.data
            entry = Entry(param, cast, group)
            if node is not None:
                # The engine runs later nodes first: the node of a cached cast, older than all of
                # its iteration's, would wait for the end and hold every half gradient till then.
                node._set_sequence_nr(_RUN_AT_ONCE)  # type: ignore[attr-defined]  # no stub
                if entry.is_large:
                    self._add_to_batch(entry, node)
            group.bulk = None
            group.entries[id(param)] = self._entries[id(param)] = entry
        return cast

    def _add_to_batch(self, entry: Entry, node: Any) -> None:
        """Have a large cast give its memory back in each backward that reaches its batch."""
        group = entry.group
        if group.batch is None or not group.batch.has_room(entry):
            group.batch = Batch()
            # The node must keep nothing that keeps the node.
            node.register_prehook(partial(_release, weakref.ref(self), weakref.ref(group.batch)))
        group.batch.add(entry)

    @without_default_device
    def _refresh(self, group: Group) -> None:
        """Bring the casts of a group up to date in one call; drop those that must be made anew."""
        bulk = group.bulk
        if bulk is None or not bulk.usable():
            # First its lists go: they hold each cast, and `is_free` looks for who does.
            group.bulk = bulk = None
            for key, entry in list(group.entries.items()):
                if not self._usable(entry) or not entry.is_free():
                    self._drop(key)
            entries = list(group.entries.values())
            owners = [self._owners[key] for key in group.entries]
            group.bulk = bulk = Bulk(entries, owners)
        group.accumulates = bulk.were_used_again()
        group.pause = max(0, group.pause - 1)
        group.frozen.clear()
        group.batch = None  # what is cast from now on need not be after it in the forward
        bulk.refresh()
        group.stale = False

    def _usable(self, entry: Entry) -> bool:
        owner = self._owners.get(id(entry.param))
        return owner is not None and owner.owns(entry.param) and entry.stands()

    def _group_of(self, param: nn.Parameter) -> Group | None:
        """Find the model that owns ``param``, looking through the models anew after a miss."""
        owner = self._owners.get(id(param))
        if owner is not None and owner.owns(param):
            return owner.group
        foreign = self._foreign.get(id(param))
        if foreign is not None and foreign() is param:
            return None
        self._forget_replaced()
        for group in list(self._groups.values()):
            self._scan(group)
        owner = self._owners.get(id(param))
        if owner is not None and owner.owns(param):
            return owner.group
        self._foreign = {key: ref for key, ref in self._foreign.items() if ref() is not None}
        self._foreign[id(param)] = weakref.ref(param)
        return None

    def _scan(self, group: Group) -> None:
        root = group.root()
        for module, name, param in _registered(root) if root is not None else ():
            owner = self._owners.get(id(param))
            if owner is None or not owner.owns(param):
                self._drop(id(param))
                self._owners[id(param)] = Owner(self._watch(module), name, group)

    def _watch(self, module: nn.Module) -> weakref.ref[nn.Module]:
        """Return a weak reference that drops the casts of ``module``'s parameters with it."""
        known = self._watched.get(id(module))
        if known is not None and known() is module:
            return known
        key = id(module)
        cache = weakref.ref(self)

        def forget(reference: weakref.ref[nn.Module]) -> None:
            alive = cache()
            if alive is not None:
                alive._forget(key, reference)

        self._watched[key] = weakref.ref(module, forget)
        return self._watched[key]

    def _forget(self, key: int, reference: weakref.ref[nn.Module]) -> None:
        with self._lock:
            self._watched.pop(key, None)
            for param_id, owner in list(self._owners.items()):
                if owner.module is reference:
                    del self._owners[param_id]
                    self._drop(param_id)

    def _forget_replaced(self) -> None:
        """Let go of parameters that a living module no longer has."""
        for param_id, owner in list(self._owners.items()):
            if owner.param_id() != param_id:
                self._owners.pop(param_id, None)
                self._drop(param_id)

    def _drop_if_moved(self, param: nn.Parameter) -> None:
        """The address of a storage that was replaced may come back with other values."""
        entry = self._entries.get(id(param))
        if entry is not None and entry.pointer != param.data_ptr():
            self._drop(id(param))

    def _drop(self, param_id: int) -> None:
        """Forget a cast, and with it the graph node that holds the gradient accumulator.

        A parameter whose ``.data`` got another shape needs a new accumulator.
        """
        entry = self._entries.pop(param_id, None)
        if entry is not None:
            entry.group.entries.pop(param_id, None)
            entry.group.bulk = None
            if entry.batch is not None and entry.batch.is_first(entry):
                for other in entry.batch.entries():  # which would give back nothing any more
                    if self._entries.get(id(other.param)) is other:
                        self._drop(id(other.param))


def _cast_frozen(param: nn.Parameter, dtype: torch.dtype, group: Group) -> Tensor:
    """Return the cast of a large frozen weight, which lives as long as a graph that took it.

    No gradient tells when it could go.
    """
    state = dtype, param._version, param.data_ptr()
    if id(param) in group.frozen:
        known, known_cast, known_state = group.frozen[id(param)]
        cast: Any = known_cast()
        if cast is not None and known() is param and known_state == state:
            cast._fix_weakref()
            return cast  # type: ignore[no-any-return]  # of a reference
    made = param.to(dtype)
    if type(made) is Tensor:  # a mode may hand out something else
        group.frozen[id(param)] = weakref.ref(param), weakref.ref(made), state
    return made


def _release(cache: weakref.ref[WeightCache], batch: weakref.ref[Batch], _: object) -> None:
    """Give the memory of casts back, for the gradient of their batch's first has arrived."""
    alive, released = cache(), batch()
    if alive is not None and released is not None:
        with alive._lock:
            released.release(alive._entries)


def _registered(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # casts nothing, and has no dictionary of its parameters
        for name, param in module._parameters.items():
            if type(param) is nn.Parameter:
                yield module, name, param


def _castable(param: Tensor, dtype: torch.dtype) -> bool:
    found = param.dtype
    return found in FLOATS and found is not dtype and is_on_cast_device(param)


def _may_cache(param: nn.Parameter) -> bool:
    """True where a cast made now may be used later: with grad, and on real tensors."""
    if not (torch.is_grad_enabled() or mode.in_checkpoint) or torch.is_inference_mode_enabled():
        return False
    return not (param.is_inference() or is_recorded())
