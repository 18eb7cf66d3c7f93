"""fp32 values of half parameters, and the masters that the optimizer steps for them (O2, O5).

Knows parameters, masters and one optimizer; nothing of scales, skipped steps or modules' hooks.
A parameter is its fp32 value rounded to half. Whichever of the two the user wrote to, the other
follows.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from . import kernels, pooling
from .lazy_gradients import LazyGradients, clear_grads

_VERSION = operator.attrgetter("_version")
HALVES = (torch.float16, torch.bfloat16)


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


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: its ``param_groups`` and ``state`` are changed in place: each half parameter
            gives way to its master. Held weakly.
        store: the fp32 values to start from; the masters are entered there.
        lazy: what makes the masters' gradients when they are asked for; None: they are there.
    """

    def __init__(
        self, optimizer: Optimizer, store: FP32Store, lazy: LazyGradients | None = None
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lazy = lazy
        self._store = store
        self._params: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._versions: list[int] = []
        self._exposed: list[int] | None = None
        self._params_by_master: dict[int, Tensor] = {}
        self._forget_places()
        for group in optimizer.param_groups:
            group["params"][:] = self.replace(group["params"])
        pooling.move_together(self._params)

    def param_of(self, stepped: Tensor) -> Tensor:
        """Return the half parameter of a master; a tensor that is no master stands for itself."""
        return self._params_by_master.get(id(stepped), stepped)

    def __len__(self) -> int:
        return len(self._masters)

    def replace(self, params: Sequence[Any]) -> list[Any]:
        """Return ``params`` with a master in place of each half one.

        Args:
            params: tensors, or ``(name, tensor)``; anything else stays for torch to refuse.
        """
        known = dict(zip(map(id, self._params), self._masters, strict=True))

        def replaced(param: Any) -> Any:
            if isinstance(param, tuple):
                return (*param[:-1], *map(replaced, param[-1:]))
            if isinstance(param, Tensor) and param.dtype in HALVES and id(param) not in known:
                known[id(param)] = self._make(param)
            return known.get(id(param), param)

        return [replaced(param) for param in params]

    def drop_after(self, count: int) -> None:
        """Undo `replace` for all masters but the first ``count``, which no group holds."""
        optimizer = self._optimizer()
        while len(self._masters) > count:
            param, master = self._params.pop(), self._masters.pop()
            self._store.forget_versions(param, self._versions)
            self._versions.pop()
            del self._params_by_master[id(master)]
            if optimizer is not None and master in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(master)

    def _make(self, param: Tensor) -> Tensor:
        value = self._store.take(param)
        attached = param.requires_grad
        lazy = self._lazy
        master = nn.Parameter(value, attached) if lazy is None else lazy.parameter(value, attached)
        grad = param.grad if value.grad is None else value.grad
        master.grad = None if grad is None else grad.to(torch.float32, copy=True)
        # Optimizers look at attributes that users set on parameters.
        vars(master).update(vars(param))
        self._params.append(param)
        self._masters.append(master)
        self._versions.append(0)
        self._params_by_master[id(master)] = param
        self._store.set(param, master, self._versions, len(self._versions) - 1)
        optimizer = self._optimizer()
        if optimizer is not None and param in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(param)
        return master

    def expose(self) -> None:
        """The user gets the masters to write to, until the step that follows."""
        self.end_exposure()
        self.reconcile()
        self._exposed = list(map(_VERSION, self._params))
        for param, master in zip(self._params, self._masters, strict=True):
            self._store.expose(param)
            master.requires_grad_(param.requires_grad)

    def end_exposure(self) -> None:
        """No step follows: what was written to the masters goes to the parameters now."""
        if self._exposed is not None:
            self._compare().forget()
            self.reconcile()
            self._end_exposure()

    def _end_exposure(self) -> None:
        for param in self._params:
            self._store.end_exposure(param)
        self._exposed = None

    def reconcile(self) -> None:
        """Let each half parameter and its master follow whichever the user wrote to."""
        comparison = self._compare()
        if self._exposed is not None and self._exposed != list(map(_VERSION, self._params)):
            comparison.forget()  # written may be both, and the parameters what they were
        if comparison.reconcile(self._take_wins):
            self._note_equal()

    def _take_wins(self) -> list[bool]:
        """Return which masters win; after this they are equal, and only exposed ones still win."""
        versions = list(map(_VERSION, self._masters))
        if versions == self._versions and self._exposed is None:
            return [False] * len(versions)
        wins = list(map(self._store.wins, self._params))
        self._versions[:] = versions
        return wins

    def publish(self, are_written: bool = False) -> None:
        """Round the masters into the half parameters, unless the step has written these, too."""
        if not are_written:
            self._cast.run()
        self._comparison.note_equal()
        self._note_equal()
        if self._exposed is not None:
            self._end_exposure()

    def clear_grads(self) -> None:
        """Drop the masters' gradients; those of the parameters go before the next backward."""
        clear_grads(self._masters)

    def zero_param_grads(self, set_to_none: bool) -> None:
        """Clear the half parameters' gradients, as ``optimizer.zero_grad`` clears the masters'."""
        for param in self._params:
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param.grad)

    def release(self) -> None:
        """Give the optimizer its parameters back, with the masters' fp32 values and gradients."""
        self.end_exposure()
        self.reconcile()
        optimizer = self._optimizer()
        for param, master in zip(self._params, self._masters, strict=True):
            param.grad = None
            param.data = master.data
            param.grad = master.grad
            self._store.forget_versions(param, self._versions)
            if optimizer is not None and master in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(master)
        for group in optimizer.param_groups if optimizer is not None else ():
            group["params"][:] = [self.param_of(param) for param in group["params"]]
        self._params.clear()
        self._masters.clear()
        self._versions.clear()
        self._params_by_master.clear()
        self._forget_places()

    def _forget_places(self) -> None:
        self._places: list[int] = []
        self._cast = kernels.Cast([], [])
        self._comparison = kernels.Comparison([], [])

    def _compare(self) -> kernels.Comparison:
        """Return the comparison of masters and parameters, made anew where any was replaced.

        ``model.to(device)``, ``p.data = t`` and new parameter groups do that; so does a load,
        after which what the parameters held before tells nothing.
        """
        places = [self._store.loads, *map(Tensor.data_ptr, self._params)]
        if places != self._places:
            self._follow_devices()
            self._places = places
            self._cast = kernels.Cast(self._masters, self._params)
            self._comparison = kernels.Comparison(self._masters, self._params)
        return self._comparison

    def _note_equal(self) -> None:
        self._versions[:] = map(_VERSION, self._masters)

    def _follow_devices(self) -> None:
        """``model.to(device)`` after initialize moves the parameters: masters and state follow."""
        optimizer = self._optimizer()
        for param, master in zip(self._params, self._masters, strict=True):
            if master.device == param.device or optimizer is None:
                continue
            grad, master.grad = master.grad, None
            master.data = master.data.to(param.device)
            master.grad = None if grad is None else grad.to(param.device)
            state = optimizer.state.get(master, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == master.shape:
                    state[key] = value.to(param.device)
