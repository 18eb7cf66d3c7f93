"""What a second run of a model changes, saved and put back.

That is: random numbers, parameters, buffers, attributes of modules. Knows these, nothing of why a
model is run again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amp_patch import patching


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

    A forward may write to parameters, too: a momentum encoder follows another one there. Of a list
    or another object in an attribute the reference is kept, not what it holds, but for a
    `torch.Generator`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
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
        self._generators = [
            (one, one.get_state())
            for module in model.modules()
            for one in vars(module).values()
            if isinstance(one, torch.Generator)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back; what did not change is not written to."""
        for module, attributes in self._attributes:
            _set_attributes(module, attributes)
        for generator, state in self._generators:
            generator.set_state(state)
        for param, data, values in self._params:
            _set_data(param, data, values)
        for module, name, buffer, values in self._buffers:
            if module._buffers.get(name) is not buffer:
                patching.put(module._buffers, name, buffer)
            if not torch.equal(buffer, values):
                buffer.data.copy_(values)  # a graph that has saved it goes by its version


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


@torch.no_grad()
def set_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give buffers the values that they had."""
    current: dict[str, Any] = dict(model.named_buffers())
    for name, values in buffers.items():
        if name in current and current[name].shape == values.shape:
            current[name].data.copy_(values)  # see above
