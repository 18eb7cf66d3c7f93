"""The fp32 values of what is stored in half, in state dicts: written there, and read from there.

Knows when torch's hooks of a model call; `FP32Values` has the values.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.common.warn_once import warn_once
from amp_patch.distributed.process_groups import is_on
from amp_patch.distributed.shards import are_equal_here
from amp_patch.kernels.without_grad import without_grad
from amp_patch.levels import HALVES

from .fp32_values import FP32Values
from .half_bits import bits_of, is_plain


class StateDicts:
    """Puts the fp32 values of models in half into their state dicts, and takes them from there.

    Args:
        values: of all half parameters and buffers.
    """

    def __init__(self, values: FP32Values) -> None:
        self._values = values
        self._state_of = 0  # the id of the model whose state dict is being made
        self._state: weakref.ref[Any] | None = None  # that state dict, once a module has written

    @without_grad
    def begin_state(self, model: nn.Module) -> None:
        """A state dict of a model begins: compare at once what its modules ask for one by one.

        On a device each comparison would be waited for. Not buffers, of whose ``.data`` nobody
        tells who reads it.
        """
        self._state_of, self._state = 0, None  # one that raised may have left them
        if _is_exporting():
            return
        modules = list(model.modules())
        self._values.handed_out.take_over(modules)
        self._values.compare(
            param for one in modules for param in one._parameters.values() if param is not None
        )
        self._state_of = id(model)

    def write_state(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Put the values of what was converted in ``module`` itself into a state dict."""
        if not self._has_begun(state):
            if _is_exporting():
                return
            self._values.handed_out.take_over([module])
        has_any = bool(module._parameters or module._buffers)
        is_saved_by_ranks = has_any and is_on()
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is None or prefix + name not in state:
                continue
            if tensor.dtype in HALVES or self._values.came_in_half(tensor):
                attached = state[prefix + name].requires_grad  # keep_vars=True, not in torch.func
                value = state[prefix + name] = self._hand_out(module, tensor, attached)
                if is_saved_by_ranks:
                    self._values.handed_out.note(module, value)
        if id(module) == self._state_of:  # the last one
            self._state_of, self._state = 0, None
            self._values.alike.clear()

    def _has_begun(self, state: dict[str, Any]) -> bool:
        """Return whether `begin_state` has asked for all modules what else each has to ask."""
        if self._state_of and self._state is None and isinstance(state, OrderedDict):
            self._state = weakref.ref(state)
        return self._state is not None and self._state() is state

    def _hand_out(self, module: nn.Module, tensor: Tensor, attached: bool) -> Tensor:
        """Return the value of a half tensor for a state dict, and note it."""
        # Before the value: what another thread's step writes between the two is then taken for
        # newer than the value, and not for older.
        bits = bits_of(tensor) if is_plain(tensor) else None
        known = self._values.alike.get(tensor)
        if known is not None:
            value = self._values.as_it_came(tensor, known.detach())
            is_master = isinstance(known, nn.Parameter) and value.dtype is known.dtype
        else:
            value = self._values.exact(tensor)
            is_master = self._values.is_stepped(tensor, value)
            if is_master and self._is_to_follow(tensor, value):
                bits = None  # which tell of no write then
        if attached:
            value.requires_grad_()
            if not value.is_inference():
                value.register_post_accumulate_grad_hook(_tell_of_unused)
        self._values.handed_out.add(module, tensor, value, bits, is_master=is_master)
        return value

    def _is_to_follow(self, tensor: Tensor, master: Tensor) -> bool:
        """Return whether a master was written to, and its half tensor does not have that yet."""
        return self._values.wins(tensor) and not are_equal_here(master.to(tensor.dtype), tensor)

    @torch.inference_mode(False)  # what is kept of the state must be no inference tensors
    @torch.no_grad()
    def read_state(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Set the values of ``module`` itself from a state dict that is about to be loaded."""
        self._values.handed_out.take_over([module])
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            new = state.get(prefix + name)
            if tensor is not None and isinstance(new, Tensor) and new.shape == tensor.shape:
                self._values.enter(tensor, new)


def _is_exporting() -> bool:
    """Return whether ONNX's exporter by tracing asks for a state: for the traced parameters."""
    onnx = sys.modules.get("torch.onnx")  # an import that a script without it need not wait for
    return onnx is not None and bool(onnx.is_in_onnx_export())


def _tell_of_unused(value: Tensor) -> None:
    """Warn of a backward that comes to what ``state_dict(keep_vars=True)`` gave."""
    warn_once(
        "the values of state_dict(keep_vars=True) are float32 copies for a model in half, and not "
        "its parameters: what is computed of them trains nothing, and to freeze one freezes "
        "nothing; got a backward() that adds a gradient to one. Take "
        "dict(model.named_parameters()) in its place."
    )
