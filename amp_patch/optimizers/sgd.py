"""`torch.optim.SGD`: its step in torch, and by the kernels of sgd.cu."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from amp_patch.kernels import torch_optimizers
from amp_patch.kernels.cuda_optimizers import (
    Column,
    GroupRows,
    OptimizerKernels,
    learning_rate,
)
from amp_patch.weights.parameter_lists import are_complete

from .groups import GroupUpdate, ParamState, StepInputs

_OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


class SgdUpdate(GroupUpdate):
    """A group of `torch.optim.SGD`."""

    kernels = OptimizerKernels("sgd.cu", 32, "dPdddiii")
    numbers = ("momentum", "dampening", "weight_decay")

    def has_state(self, options: Mapping[str, Any]) -> bool:
        """See `GroupUpdate.has_state`."""
        return bool(options["momentum"] != 0)

    def suits_reference(self, inputs: StepInputs) -> bool:
        """See `GroupUpdate.suits_reference`."""
        if not super().suits_reference(inputs):
            return False
        if not inputs.options["fused"]:
            return True
        # torch's fused kernel refuses momentum that only some parameters have
        return len(set(map(operator.is_, _momentum_of(inputs.states), repeat(None)))) <= 1

    @classmethod
    def takes_flag(cls, options: Mapping[str, Any]) -> bool:
        """See `GroupUpdate.takes_flag`: torch's fused kernel does."""
        return bool(options.get("fused"))

    def cut_with(self, inputs: StepInputs) -> list[Tensor] | None:
        """See `GroupUpdate.cut_with`: not where the step is to make the momentum."""
        buffers = _momentum_of(inputs.states)
        return None if any(one is None for one in buffers) else buffers

    def step(self, inputs: StepInputs) -> None:
        """See `GroupUpdate.step`."""
        group, states = inputs.options, inputs.states
        step = torch_optimizers.fused_sgd if group["fused"] else torch_optimizers.sgd
        buffers = _momentum_of(states)
        are_there = are_complete(buffers)
        options = {name: group[name] for name in _OPTIONS}
        if inputs.found_inf is not None:
            options["found_inf"] = inputs.found_inf
        for tensors in inputs.pieces(buffers):
            step(*tensors, **options)
        if not are_there:
            for state, buffer in zip(states, buffers, strict=True):
                state["momentum_buffer"] = buffer

    def kernel_rows(self, inputs: StepInputs, weights: Column) -> GroupRows:
        """See `GroupUpdate.kernel_rows`.

        A buffer made now gets a counter of 0: the kernel puts the gradient into it. One that is
        there gets none, and holds momentum.
        """
        _, group, params, grads, states, *_ = inputs
        buffers: list[Any] = [None] * len(params)
        counters: list[Any] = [None] * len(params)
        new_state = []
        if group["momentum"] != 0:
            buffers = _momentum_of(states)
            for i in [i for i, buffer in enumerate(buffers) if buffer is None]:
                buffers[i] = torch.zeros_like(params[i])
                counters[i] = torch.zeros((), dtype=torch.float32, device=params[i].device)
                new_state.append((states[i], "momentum_buffer", buffers[i]))
        columns: list[Column] = [grads, params, buffers, weights, counters]
        return GroupRows(self.arguments(group), columns, new_state)

    def arguments(self, group: Mapping[str, Any]) -> list[Any]:
        """Return the options of a group as ``sgd_prepare`` takes them."""
        numbers = [group[name] for name in self.numbers]
        decoupled = int(group.get("decoupled_weight_decay", False))
        switches = (decoupled, int(group["nesterov"]), int(group["maximize"]))
        return [*learning_rate(group["lr"]), *numbers, *switches]


def _momentum_of(states: Sequence[ParamState]) -> list[Any]:
    """Return the momentum of each parameter; None where there is none yet."""
    return list(map(dict.get, states, repeat("momentum_buffer")))
