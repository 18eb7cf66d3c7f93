"""Groups of optimizers that count the steps of each parameter beside tensors of its shape.

Knows the state of such parameters, and the rows that kernels get of it; no formula.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_patch.kernels.cuda_optimizers import Column, GroupRows

from .groups import GroupUpdate, ParamState, StepInputs
from .step_counters import StepCounters


class CountedUpdate(GroupUpdate):
    """A group with a counter ``step`` in the state of each parameter.

    Attributes:
        tensors: the names of the tensors that a state may have beside it, as kernels' rows have
            them; each is like the parameter.
    """

    tensors: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._counters = StepCounters()

    @classmethod
    def kept(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return which of `tensors` a state has by these options of a group."""
        return cls.tensors

    @classmethod
    def start(cls, options: Mapping[str, Any]) -> float:
        """Return what new tensors of a state are filled with."""
        return 0.0

    def arguments(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the options of a group as the kernel that prepares takes them."""
        raise NotImplementedError

    def update(
        self, inputs: StepInputs, columns: Sequence[list[Tensor]], counters: list[Tensor]
    ) -> None:
        """Step the parameters and change `columns`, on multi-tensor functions of torch.

        Args:
            inputs: see `step`.
            columns: see `columns`.
            counters: the steps of each parameter, this one included; `self.values` has the numbers.
        """
        raise NotImplementedError

    def values(self) -> list[float]:
        """Return how many steps each parameter of the last `step` has made, that one included."""
        return self._counters.values()

    def step(self, inputs: StepInputs) -> None:
        """See `GroupUpdate.step`. A step that fails, or that the flag skips, is not counted."""
        columns = self.columns(inputs)
        counters = self._counters.advance(inputs.states)
        try:
            self.update(inputs, columns, counters)
        except BaseException:
            self._counters.take_back()
            raise
        if inputs.found_inf is not None:
            self._counters.take_back(inputs.found_inf)

    def cut_with(self, inputs: StepInputs) -> list[Tensor] | None:
        """See `GroupUpdate.cut_with`."""
        state = inputs.states[0]
        return [state[name] for name in self.kept(inputs.options)] if state else []

    def columns(self, inputs: StepInputs) -> list[list[Tensor]]:
        """Return for each of `tensors` that of every state; an empty list where none is kept.

        States that are empty are made first.
        """
        self.make_states(inputs)
        kept = self.kept(inputs.options)
        found = state_columns(inputs.states, *kept)
        if kept == self.tensors:
            return found
        by_name = dict(zip(kept, found, strict=True))
        return [by_name.get(name, []) for name in self.tensors]

    def kernel_rows(self, inputs: StepInputs, weights: Column) -> GroupRows:
        """See `GroupUpdate.kernel_rows`."""
        nothing = [None] * len(inputs.params)
        states = [column or nothing for column in self.columns(inputs)]
        columns: list[Column] = [inputs.grads, inputs.params, *states, weights]
        return GroupRows(self.arguments(inputs.options), [*columns, self.counters(inputs)])

    def counters(self, inputs: StepInputs) -> list[Tensor]:
        """Return the steps so far: a float32 number on the device for each parameter."""
        return self._counters.gather(inputs.states, inputs.params[0].device, torch.float32)

    def make_states(self, inputs: StepInputs) -> None:
        """Make the state of parameters that have none, as torch makes it."""
        if all(inputs.states):
            return
        options, is_fused = inputs.options, inputs.options.get("fused")
        device = inputs.params[0].device if is_fused else torch.device("cpu")
        is_wide = torch.get_default_dtype() is torch.float64 and not is_fused
        dtype = torch.float64 if is_wide else torch.float32
        value = self.start(options)
        for param, state in zip(inputs.params, inputs.states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=dtype, device=device)
                state.update({n: torch.full_like(param, value) for n in self.kept(options)})


def state_columns(states: Sequence[ParamState], *names: str) -> list[list[Tensor]]:
    """Return for each name the list of that tensor of every state."""
    return [list(map(_item(name), states)) for name in names]


_item = functools.cache(operator.itemgetter)
