"""The step counters that optimizers keep for each parameter, as one tensor; knows no formula."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_patch.weights.parameter_lists import are_same

from .groups import ParamState


class StepCounters:
    """The step counters of many parameters, in one memory: one call advances all."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._places: list[int] = []
        # until `gather` sees the first counters
        self._all = self._one = torch.zeros(0, dtype=torch.float32)

    def advance(self, states: Sequence[ParamState]) -> list[Tensor]:
        """Add 1 to each ``state["step"]``, which is replaced where it was not in that memory.

        Returns:
            The counters, 0-dim.
        """
        steps = list(map(_STEP, states))
        if not self._are_in_place(steps):
            self._move_together(states, steps[0].device, steps[0].dtype)
        self._all += self._one  # adding a number of Python's would first make a tensor of it
        return self._steps

    def gather(
        self, states: Sequence[ParamState], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        """As `advance`, but the counters stay what they are, and are of this device and dtype."""
        is_known = (self._all.device, self._all.dtype) == (device, dtype)
        if not (is_known and self._are_in_place(list(map(_STEP, states)))):
            self._move_together(states, device, dtype)
        return self._steps

    def _are_in_place(self, steps: list[Tensor]) -> bool:
        """Return whether these counters are the known ones, and none was moved by its ``.data``."""
        is_known = are_same(steps, self._steps)
        return is_known and list(map(Tensor.data_ptr, steps)) == self._places

    def _move_together(
        self, states: Sequence[ParamState], device: torch.device, dtype: torch.dtype
    ) -> None:
        with torch.inference_mode(False):  # or no later step could write to them
            self._all = torch.stack([state["step"].to(device, dtype) for state in states])
            self._steps = [self._all[index] for index in range(len(states))]
            self._one = torch.ones((), device=device, dtype=dtype)
        self._places = list(map(Tensor.data_ptr, self._steps))
        for state, step in zip(states, self._steps, strict=True):
            state["step"] = step

    def take_back(self, share: Tensor | float = 1.0) -> None:
        """Subtract what `advance` added, for the step was not made.

        Args:
            share: a flag (float32, one element), 1 where that is so, else 0.
        """
        self._all -= share

    def values(self) -> list[float]:
        """Return what they count. Waits for the device."""
        values: list[float] = self._all.tolist()
        return values


_STEP = operator.itemgetter("step")
