"""Counts of steps as apex keeps them, one in a group, for kernels that take one per parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_patch.kernels.graph_capture import captures
from amp_patch.optimizers.groups import GroupUpdate, StepInputs

#: 1 - beta ** inf is 1, the correction that corrects nothing.
_FOREVER = float("inf")


class CountedByGroup(GroupUpdate):
    """A group that counts its steps in ``group["step"]``, and keeps averages of gradients.

    To be inherited from before the class whose formula it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._all = torch.zeros(0, dtype=torch.float32)
        self._one_each: list[Tensor] = []

    @classmethod
    def changed_options(cls, group: dict[str, Any]) -> dict[str, Any]:
        """See `GroupUpdate.changed_options`: a step counts also where no parameter has one."""
        return {"step": int(group.get("step", 0)) + 1} if group["params"] else {}

    def suits_reference(self, inputs: StepInputs) -> bool:
        """See `GroupUpdate.suits_reference`: the optimizer's own step is the reference."""
        return False

    def counters(self, inputs: StepInputs) -> list[Tensor]:
        """Return the steps so far: a float32 number on the device for each parameter.

        Raises:
            RuntimeError: a CUDA graph is captured, whose replays the host does not count.
        """
        params = inputs.params
        captures.refuse_waiting(params[0].device)
        if len(params) != len(self._one_each) or self._all.device != params[0].device:
            self._all = torch.zeros(len(params), dtype=torch.float32, device=params[0].device)
            self._one_each = [self._all[index] for index in range(len(params))]
        corrects = inputs.options["bias_correction"]
        self._all.fill_(float(inputs.group.get("step", 0)) if corrects else _FOREVER)
        return self._one_each

    def make_states(self, inputs: StepInputs) -> None:
        """Make the averages of parameters that have none."""
        for param, state in zip(inputs.params, inputs.states, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if state.get(name) is None:
                    state[name] = torch.zeros_like(param)
