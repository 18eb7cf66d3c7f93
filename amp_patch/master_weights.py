"""fp32 values of half parameters, and the masters that the optimizer steps for them (O2, O5).

Knows parameters, masters and one optimizer; nothing of scales, skipped steps or modules' hooks.
A parameter is its fp32 value rounded to half. Whichever of the two the user wrote to, the other
follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from . import kernels

HALVES = (torch.float16, torch.bfloat16)


class _Exact:
    """An fp32 value, and its version when the parameter was last equal to it."""

    __slots__ = ("value", "version")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.version = value._version

    @property
    def wins(self) -> bool:
        """True where the value was written to since it was equal to the parameter."""
        return self.version != self.value._version


class FP32Store:
    """The exact fp32 value of each half parameter, for as long as the parameter lives.

    A value is a master that an optimizer steps, or what the parameter held before it was
    converted, kept for an optimizer that comes later.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every value."""
        self._values = WeakTensorKeyDictionary()

    def set(self, param: Tensor, value: Tensor) -> _Exact:
        """Enter ``value``, of which ``param`` holds the rounded copy."""
        exact = _Exact(value)
        self._values[param] = exact
        return exact

    @torch.no_grad()
    def exact(self, param: Tensor) -> Tensor:
        """Return the fp32 value of a half parameter; writes to the parameter are in it."""
        entry = self._values.get(param)
        if entry is None:
            return param.detach().float()
        value: Tensor = entry.value.detach().to(param.device)
        rounded = value.to(param.dtype)
        if entry.wins or torch.equal(rounded, param):
            return value
        return torch.where(rounded == param, value, param.float())

    def take(self, param: Tensor) -> Tensor:
        """Return the fp32 value for a master to hold: the stored tensor itself if it is right."""
        entry = self._values.get(param)
        value = self.exact(param)
        if entry is not None and entry.value.grad is not None:
            value.grad, entry.value.grad = entry.value.grad, None
        return value

    def write_state(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Put fp32 values for the half entries of ``module`` itself into a state dict."""
        for name, param in module._parameters.items():
            if param is not None and prefix + name in state and param.dtype in HALVES:
                state[prefix + name] = self.exact(param)
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
                entry.version = entry.value._version


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: its ``param_groups`` and ``state`` are changed in place: each half parameter
            gives way to its master. Held weakly.
        store: the fp32 values to start from; the masters are entered there.
    """

    def __init__(self, optimizer: Optimizer, store: FP32Store) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._store = store
        self._masters: dict[int, tuple[Tensor, Tensor, _Exact]] = {}
        self._addresses: list[tuple[int, int]] = []
        self._parts: list[tuple[list[Tensor], ...]] = []
        self._comparison = kernels.Comparison([], [])
        for group in optimizer.param_groups:
            group["params"][:] = self.replace(group["params"])

    def param_of(self, stepped: Tensor) -> Tensor:
        """Return the half parameter of a master; a tensor that is no master stands for itself."""
        found = self._masters.get(id(stepped))
        return stepped if found is None else found[0]

    def replace(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return ``params`` with a master in place of each half one."""
        known = {id(param): master for param, master, _ in self._masters.values()}
        return [
            param if param.dtype not in HALVES else known.get(id(param)) or self._make_master(param)
            for param in params
        ]

    def _make_master(self, param: Tensor) -> Tensor:
        value = self._store.take(param)
        master = nn.Parameter(value, requires_grad=param.requires_grad)
        grad = param.grad if value.grad is None else value.grad
        master.grad = None if grad is None else grad.float()
        # Optimizers look at attributes that users set on parameters.
        vars(master).update(vars(param))
        self._masters[id(master)] = (param, master, self._store.set(param, master))
        optimizer = self._optimizer()
        if optimizer is not None and param in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(param)
        return master

    def expose(self) -> None:
        """The user gets the masters to write to: from now on they win where the two differ."""
        self.reconcile()
        for _, _, exact in self._masters.values():
            exact.version = -1

    @torch.no_grad()
    def reconcile(self) -> None:
        """Let each half parameter and its master follow whichever the user wrote to."""
        if self._compared().differs():
            for param, master, exact in self._masters.values():
                if exact.wins:
                    param.copy_(master)
                else:
                    same = master.to(param.dtype) == param
                    master.copy_(torch.where(same, master, param.float()))
        self._note_equal()

    def publish(self) -> None:
        """Round the masters into the half parameters: one call per dtype."""
        for masters, params in self._parts:
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
        self._note_equal()

    def clear_grads(self) -> None:
        """Drop the masters' gradients; those of the parameters go before the next backward."""
        for _, master, _ in self._masters.values():
            master.grad = None

    def zero_param_grads(self, set_to_none: bool) -> None:
        """Clear the half parameters' gradients, as ``optimizer.zero_grad`` clears the masters'."""
        for param, _, _ in self._masters.values():
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param.grad)

    def release(self) -> None:
        """Give the optimizer its parameters back, with the masters' fp32 values and gradients."""
        self.reconcile()
        optimizer = self._optimizer()
        for param, master, _ in self._masters.values():
            param.grad = None
            param.data = master.data
            param.grad = master.grad
            if optimizer is not None and master in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(master)
        for group in optimizer.param_groups if optimizer is not None else ():
            group["params"][:] = [self.param_of(param) for param in group["params"]]
        self._masters.clear()
        self._addresses = []
        self._parts = []
        self._comparison = kernels.Comparison([], [])

    def _compared(self) -> kernels.Comparison:
        """Return the comparison of masters and parameters, made anew where any was replaced.

        ``model.to(device)``, ``p.data = t`` and new parameter groups do that.
        """
        entries = self._masters.values()
        addresses = [(p.data_ptr(), m.data_ptr()) for p, m, _ in entries]
        if addresses != self._addresses:
            self._follow_devices()
            self._addresses = [(p.data_ptr(), m.data_ptr()) for p, m, _ in entries]
            params, masters = [p for p, _, _ in entries], [m for _, m, _ in entries]
            self._parts = kernels.alike(masters, params)
            self._comparison = kernels.Comparison(masters, params)
        return self._comparison

    def _note_equal(self) -> None:
        for _, master, exact in self._masters.values():
            exact.version = master._version

    def _follow_devices(self) -> None:
        """``model.to(device)`` after initialize moves the parameters: masters and state follow."""
        optimizer = self._optimizer()
        for param, master, _ in self._masters.values():
            if master.device == param.device or optimizer is None:
                continue
            grad, master.grad = master.grad, None
            master.data = master.data.to(param.device)
            master.grad = None if grad is None else grad.to(param.device)
            state = optimizer.state.get(master, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == master.shape:
                    state[key] = value.to(param.device)
