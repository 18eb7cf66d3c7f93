"""`torch.optim.Adam` and `AdamW`: their step in torch, and by the kernels of adamw.cu."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
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

from .groups import GroupUpdate, ParamState, StepInputs
from .step_counters import StepCounters


class AdamUpdate(GroupUpdate):
    """A group of `torch.optim.Adam`."""

    kernels = OptimizerKernels("adamw.cu", 36, "dPddddii")
    makes_copies = True  # the denominators
    numbers = ("betas", "eps", "weight_decay")
    #: Whether weight decay is decoupled in groups that do not say.
    decoupled = False

    def __init__(self) -> None:
        self._counters = StepCounters()

    @classmethod
    def takes_flag(cls, options: Mapping[str, Any]) -> bool:
        """See `GroupUpdate.takes_flag`: torch's fused kernel does."""
        return bool(options.get("fused"))

    def cut_with(self, inputs: StepInputs) -> list[Tensor]:
        """See `GroupUpdate.cut_with`."""
        state = inputs.states[0]
        return [state[name] for name in _averages(inputs.options)] if state else []

    def step(self, inputs: StepInputs) -> None:
        """See `GroupUpdate.step`."""
        group, states = inputs.options, inputs.states
        self.make_states(inputs)
        columns = state_columns(states, *_averages(group))
        columns += [[]] * (3 - len(columns))
        options = {name: group[name] for name in _OPTIONS}
        options["decoupled"] = group.get("decoupled_weight_decay", self.decoupled)
        counters, found_inf = self._counters.advance(states), inputs.found_inf
        try:
            step: Any = torch_optimizers.fused_adam if group["fused"] else torch_optimizers.adam
            counts = counters if group["fused"] else self._counters.values()
            if found_inf is not None:
                options["found_inf"] = found_inf
            for tensors in inputs.pieces(*columns):
                step(*tensors, counts, **options)
        except BaseException:
            self._counters.take_back()
            raise
        if found_inf is not None:
            self._counters.take_back(found_inf)

    def kernel_rows(self, inputs: StepInputs, weights: Column) -> GroupRows:
        """See `GroupUpdate.kernel_rows`."""
        _, group, params, grads, states, *_ = inputs
        self.make_states(inputs)
        columns: list[Column] = [grads, params, *state_columns(states, *_averages(group))]
        if not group["amsgrad"]:
            columns.append([None] * len(states))
        return GroupRows(self.arguments(group), [*columns, weights, self.counters(inputs)])

    def counters(self, inputs: StepInputs) -> list[Tensor]:
        """Return the steps so far: a float32 number on the device for each parameter."""
        return self._counters.gather(inputs.states, inputs.params[0].device, torch.float32)

    def arguments(self, group: Any) -> list[Any]:
        """Return the options of a group as ``adamw_prepare`` takes them."""
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        return [*learning_rate(group["lr"]), *numbers, int(decoupled), int(group["maximize"])]

    def make_states(self, inputs: StepInputs) -> None:
        """Make the state of parameters that have none, as torch makes it."""
        if all(inputs.states):
            return
        group, is_fused = inputs.options, inputs.options["fused"]
        device = inputs.params[0].device if is_fused else torch.device("cpu")
        is_wide = torch.get_default_dtype() is torch.float64 and not is_fused
        dtype = torch.float64 if is_wide else torch.float32
        for param, state in zip(inputs.params, inputs.states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=dtype, device=device)
                state.update({name: torch.zeros_like(param) for name in _averages(group)})


class AdamWUpdate(AdamUpdate):
    """A group of `torch.optim.AdamW`."""

    decoupled = True


_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")
_item = functools.cache(operator.itemgetter)


def _averages(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what the state of a parameter holds in its shape."""
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return names if group["amsgrad"] else names[:2]


def state_columns(states: list[ParamState], *names: str) -> list[list[Tensor]]:
    """Return for each name the list of that tensor of every state."""
    return [list(map(_item(name), states)) for name in names]
