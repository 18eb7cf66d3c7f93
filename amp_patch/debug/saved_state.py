"""What a second run of a model changes, saved and put back.

That is: random numbers, parameters, buffers, attributes of modules and what these hold. Knows
models, nothing of why one is run again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amp_patch import patching
from amp_patch.common.imported_modules import is_left_alone

from .held_values import HeldValue

#: A module's path, and the name of an attribute of it.
AttributeName = tuple[str, str]
#: Of a buffer, or of an attribute.
Name = str | AttributeName
#: What torch keeps in every module, but for what a script switches.
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


class RandomState:
    """The state of all random numbers when this was made: Python's, NumPy's, torch's."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state_all() if on_cuda else []
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Let all random numbers go on from there."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class ModelState:
    """The parameters, buffers and attributes of a model's modules when this was made.

    A forward may write to parameters, too: a momentum encoder follows another one there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        self._held = [HeldValue(value) for value in attributes_of(model).values()]
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._params = [
            (param, param.data, param.data.clone())
            for param in model.parameters()
            if not is_lazy(param)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back; what did not change is not written to."""
        for module, attributes in self._attributes:
            _set_attributes(module, attributes)
        for held in self._held:
            held.put_back()
        for param, data, values in self._params:
            _set_data(param, data, values)
        for module, name, buffer, values in self._buffers:
            if module._buffers.get(name) is not buffer:
                patching.put(module._buffers, name, buffer)
            if not torch.equal(buffer, values):
                buffer.data.copy_(values)  # a graph that has saved it goes by its version


class CallState:
    """The buffers and attributes of a model as a call of it has found them.

    Args:
        model: whose forward begins; not held.
        names: those to keep, which `keep_changed` has returned; None keeps all.

    Attributes:
        buffers: copies, by name.
    """

    def __init__(self, model: nn.Module, names: Set[Name] | None = None) -> None:
        buffers = dict(model.named_buffers())
        attributes = attributes_of(model) if names is None else _some_attributes(model, names)
        known = buffers.keys() if names is None else buffers.keys() & names
        self.buffers = {name: buffers[name].clone() for name in known}
        self._attributes = {
            name: HeldValue(_without_graph(value)) for name, value in attributes.items()
        }
        self._absent = {name for name in names or () if isinstance(name, tuple)} - attributes.keys()

    def keep_changed(self, model: nn.Module) -> set[Name]:
        """The forward is over: keep only what it has changed, and return the names of that."""
        now, attributes = dict(model.named_buffers()), attributes_of(model)
        self.buffers = {
            name: values
            for name, values in self.buffers.items()
            if name not in now or not torch.equal(now[name], values)
        }
        self._absent = attributes.keys() - self._attributes.keys()
        self._attributes = {
            name: held
            for name, held in self._attributes.items()
            if attributes.get(name) is not held.value or not held.is_unchanged()
        }
        return {*self.buffers, *self._attributes, *self._absent}

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Give them what they held; who calls this has a `ModelState` to put back."""
        current = dict(model.named_buffers())
        for name, values in self.buffers.items():
            if name in current and current[name].shape == values.shape:
                current[name].data.copy_(values)  # see above
        for (path, name), held in self._attributes.items():
            held.put_back()
            patching.put(model.get_submodule(path), name, held.value)
        for path, name in self._absent:
            module = model.get_submodule(path)
            if name in vars(module):
                patching.remove(module, name, vars(module)[name])


def attributes_of(model: nn.Module) -> dict[AttributeName, Any]:
    """Return what modules hold beside parameters, buffers, modules and hooks."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        if not is_left_alone(type(module).__module__)  # torch's keep numbers in buffers
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }


def _some_attributes(model: nn.Module, names: Set[Name]) -> dict[AttributeName, Any]:
    """Return those of some names which there are."""
    attributes = [name for name in names if isinstance(name, tuple)]
    modules = dict(model.named_modules()) if attributes else {}
    return {
        (path, name): vars(modules[path])[name]
        for path, name in attributes
        if path in modules and name in vars(modules[path])
    }


def _without_graph(value: Any) -> Any:
    """Return a value that keeps no graph of a step before, if it is a tensor."""
    has_graph = isinstance(value, Tensor) and value.grad_fn is not None
    return value.detach() if has_graph else value


def _set_data(param: Tensor, data: Tensor, values: Tensor) -> None:
    if param.data_ptr() != data.data_ptr():
        param.data = data
    if not torch.equal(data, values):
        data.copy_(values)


def _set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    for name, value in list(vars(module).items()):
        if name not in attributes:
            patching.remove(module, name, value)
    for name, value in attributes.items():
        if vars(module).get(name) is not value:
            patching.put(module, name, value)
