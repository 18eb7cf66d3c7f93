"""The half parameters of one optimizer, each with the fp32 master that is stepped in its place.

Knows the optimizer's groups and its state; not which of the two follows the other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.distributed.shards import are_equal_here, is_spread, local, set_data, version_of
from amp_patch.kernels.getters import VERSION
from amp_patch.levels import HALVES

from .followed_memory import FollowedMemory
from .fp32_values import FP32Values
from .lazy_gradients import LazyGradients
from .own_gradients import OwnGradients
from .parameter_lists import (
    are_complete,
    listed,
    look_up,
    store_grad,
    stored_grads,
)
from .stepped_state import SteppedState
from .versions import Versions


class MasterPairs:
    """Pairs, in the order in which the parameters came; to iterate over, each half one first.

    Args:
        optimizer: its ``param_groups`` and ``state`` are changed in place. Held weakly.
        values: the fp32 values to start from; the masters are entered there.
        lazy: what makes the masters' gradients when they are asked for; None: they are there.
        wrapped: optimizers that step the same groups, and have a state of their own.

    Attributes:
        params: the half parameters.
        masters: of each.
        param_by_id: the half parameter of each master, by the master's id.
        versions: noted of each pair.
        own_gradients: those of masters that no script has written.
        memory: has the masters lie as their half parameters do.
        are_spread: whether any is a DTensor.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        values: FP32Values,
        lazy: LazyGradients | None,
        wrapped: Sequence[Optimizer],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._state = SteppedState((optimizer, *wrapped))
        self._values = values
        self.lazy = lazy
        self.params: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.param_by_id: dict[int, Tensor] = {}
        self.versions = Versions()
        self.own_gradients = OwnGradients()
        self.memory = FollowedMemory(values, self._state, self.own_gradients, lazy)
        self.are_spread = False

    def __len__(self) -> int:
        return len(self.masters)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.params, self.masters, strict=True)

    def param_of(self, stepped: Tensor) -> Tensor:
        """Return the half parameter of a master; a tensor that is no master stands for itself."""
        return self.param_by_id.get(id(stepped), stepped)

    def by_param(self) -> dict[int, Tensor]:
        """Return the masters by the ids of their half parameters."""
        return dict(zip(map(id, self.params), self.masters, strict=True))

    def others(self, stepped: Iterable[Any]) -> dict[int, Tensor]:
        """Return the half parameters of those among ``stepped`` that other optimizers' masters are.

        A script has put a group of one optimizer into another.

        Returns:
            By the masters' ids.
        """
        singles = [one for one in stepped if isinstance(one, Tensor) and one.dtype is torch.float32]
        unknown = set(map(id, singles)).difference(self.param_by_id)
        by_value = self._values.params_by_value() if unknown else {}
        return {one: by_value[one] for one in unknown.intersection(by_value)}

    def replace(self, params: Sequence[Any]) -> list[Any]:
        """Return ``params`` with a master in place of each half one, but frozen ones that came so.

        Masters of other optimizers stand for the half parameters that these have them for.

        Args:
            params: tensors, or ``(name, tensor)``; anything else stays for torch to refuse.
        """
        known = self.by_param()
        count, others = len(self), self.others(params)
        # Copies: a list that `listed` has made knows the classes of its tensors, and gets no more.
        self.params, self.masters = list(self.params), list(self.masters)
        replaced: list[Any] = []
        try:
            for given in params:
                is_named = isinstance(given, tuple) and len(given) > 0
                stands = given[-1] if is_named else given
                param: Any = others.get(id(stands), stands)
                is_half = isinstance(param, Tensor) and param.dtype in HALVES
                if is_half and id(param) not in known and not self._values.is_frozen_half(param):
                    known[id(param)] = self._make(param)
                stepped = known.get(id(param), param)
                replaced.append((*given[:-1], stepped) if is_named else stepped)
        except BaseException:  # out of memory, say
            self.drop_after(count)
            raise
        self.params, self.masters = listed(self.params), listed(self.masters)
        return replaced

    def drop_after(self, count: int) -> None:
        """Undo `replace` for all masters but the first ``count``, which no group holds."""
        # `_make` may have been interrupted between two lists, which then differ in length.
        for param, master in zip(self.params[count:], self.masters[count:], strict=False):
            self._values.forget_versions(param, self.versions)
            self.param_by_id.pop(id(master), None)
            self._state.move(master, param)
        self.versions.drop_after(count)
        self.memory.drop_after(count)
        self.params, self.masters = listed(self.params[:count]), listed(self.masters[:count])

    def _make(self, param: Tensor) -> Tensor:
        value = self._values.take(param)
        lazy, own, attached = self.lazy, type(param), param.requires_grad
        master = nn.Parameter(value, attached) if lazy is None else lazy.parameter(value, attached)
        if lazy is None and nn.Parameter in own.__mro__:
            # Optimizers look at a user's own class, too: Riemannian ones find manifolds by it.
            master = Tensor._make_subclass(own, master, attached)  # type: ignore[assignment]
        grad = param.grad if value.grad is None else value.grad
        # Not by `master.grad =`, which would have the gradients made that wait for other masters.
        store_grad(master, None if grad is None else grad.to(torch.float32, copy=True))
        self.own_gradients.watch(master)
        # Optimizers look at attributes that users set on parameters.
        vars(master).update(vars(param))
        self.params.append(param)
        self.are_spread |= is_spread(param)
        self.masters.append(master)
        self.versions.equal.append(0)
        self.param_by_id[id(master)] = param
        self._values.set(param, master, self.versions, len(self.masters) - 1)
        self._state.move(param, master)
        if not self.are_spread:
            self.memory.add(param, master)
        return master

    def local_params(self) -> list[Tensor]:
        """Return what this rank holds of the half parameters."""
        return list(map(local, self.params)) if self.are_spread else self.params

    def local_masters(self) -> list[Tensor]:
        """Return what this rank holds of the masters."""
        return list(map(local, self.masters)) if self.are_spread else self.masters

    def master_versions(self) -> list[int]:
        """Return what `version_of` does of each master."""
        return look_up(version_of if self.are_spread else VERSION, self.masters)

    def half_versions(self) -> list[int]:
        """Return what `FP32Values.version_of` does of each half parameter."""
        versions = look_up(version_of if self.are_spread else VERSION, self.params)
        writes = self._values.writes
        if not writes:  # else of a few, in all steps to come
            return versions
        rows = zip(self.params, versions, strict=True)
        return [now + writes.get(id(one), 0) for one, now in rows]

    def places(self) -> list[tuple[int, Sequence[int]]]:
        """Return where the masters are, each by its address and its strides."""
        held = self.local_masters()
        return list(zip(look_up(Tensor.data_ptr, held), look_up(Tensor.stride, held), strict=True))

    def agree(self, row: int) -> bool:
        """Return whether a half parameter has the numbers of its master, rounded."""
        param, master = self.params[row], self.masters[row]
        return are_equal_here(master.detach().to(param.dtype), param)

    def _is_newer_in_half(self, row: int) -> bool:
        """Return whether a half parameter has other numbers than a master that none wrote to."""
        master = self.masters[row]
        if self.params[row].shape != master.shape:
            return False
        return version_of(master) == self.versions.equal[row] and not self.agree(row)

    def left_out(self, versions: list[int]) -> list[Tensor]:
        """Return the half parameters whose masters a step had no gradient for, and did not write.

        Args:
            versions: of the masters, after the step.
        """
        waiting = () if self.lazy is None else self.lazy.params  # a fused step has used these
        if self.are_spread or len(waiting) == len(self.masters):
            return []
        grads = stored_grads(self.masters)
        if are_complete(grads):  # as most often
            return []
        used = set(map(id, waiting))
        rows = zip(self.params, self.masters, grads, versions, self.versions.equal, strict=True)
        return [
            param
            for param, master, grad, now, before in rows
            if now == before and grad is None and id(master) not in used
        ]

    def follow_memory(self) -> None:
        """Bring masters to where their parameters were moved to, see `FollowedMemory`."""
        self.memory.follow_devices(self.params, self.masters)
        if not self.are_spread:
            self.memory.follow_orders(self.params, self.masters, self._is_newer_in_half)

    def follow_loaded_state(self) -> None:
        """A state was loaded, from before parameters were given another order, perhaps."""
        if not self.are_spread:
            for master in self.masters:
                self._state.follow_order(master)

    def follow_shapes(self) -> None:
        """Masters follow parameters of another shape, after ``p.data = t``, that no step took."""
        for param, master in self:
            if param.shape != master.shape:
                set_data(master, param.detach().float())
                master.grad = None

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """Let the optimizer step the parameters themselves in the block, see `MasterWeights`."""
        optimizer = self._optimizer()
        assert optimizer is not None
        halves = [param.data for param in self.params]
        for param, master in self:
            set_data(param, master.data)
            self._state.move(master, param)
        for group in optimizer.param_groups:
            group["params"][:] = map(self.param_of, group["params"])
        try:
            yield
        finally:
            for param, master, half in zip(self.params, self.masters, halves, strict=True):
                if param.data_ptr() != master.data_ptr():
                    master.data.copy_(param.data)
                set_data(param, half)
                self._state.move(param, master)
            for group in optimizer.param_groups:
                group["params"][:] = self.replace(group["params"])

    def release(self) -> None:
        """Give the optimizer its parameters back, with the masters' fp32 values and gradients.

        What has left the optimizer keeps the gradient that it has itself.
        """
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        held = {id(one) for group in groups for one in group["params"]}
        for param, master in self:
            grad = _given_back(param, master, id(master) in held)
            param.grad = None
            set_data(param, master.data)
            param.grad = grad
            self._values.forget_versions(param, self.versions)
            self._state.move(master, param)
        for group in groups:
            group["params"][:] = map(self.param_of, group["params"])
        self.params.clear()
        self.masters.clear()
        self.versions.clear()
        self.param_by_id.clear()
        self.memory.drop_after(0)


def _given_back(param: Tensor, master: Tensor, is_held: bool) -> Tensor | None:
    """Return the gradient of a parameter that its optimizer steps itself from now on."""
    if is_held and (master.grad is not None or param.dtype is not master.dtype):
        return master.grad
    own = param.grad  # what has left, or another optimizer has given back before
    return None if own is None or own.shape != master.shape else own.to(master.dtype)
