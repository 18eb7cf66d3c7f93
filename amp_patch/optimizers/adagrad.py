"""`torch.optim.Adagrad`: its step in torch, and by the kernels of adagrad.cu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.kernels import torch_optimizers
from amp_patch.kernels.cuda_optimizers import OptimizerKernels, learning_rate

from .counted_groups import CountedUpdate
from .groups import StepInputs

_START = "initial_accumulator_value"


class AdagradUpdate(CountedUpdate):
    """A group of `torch.optim.Adagrad`."""

    kernels = OptimizerKernels("adagrad.cu", 16, "dPdddi")
    makes_copies = True  # the denominators
    numbers = ("lr_decay", "weight_decay", "eps")
    tensors = ("sum",)

    @classmethod
    def options(cls, optimizer: Optimizer, group: dict[str, Any]) -> Mapping[str, Any]:
        """See `GroupUpdate.options`: torch starts all sums alike, whatever a group says."""
        start = optimizer.defaults[_START]
        return group if group.get(_START) == start else {**group, _START: start}

    @classmethod
    def start(cls, options: Mapping[str, Any]) -> float:
        """See `CountedUpdate.start`."""
        start: float = options[_START]
        return start

    @classmethod
    def takes_flag(cls, options: Mapping[str, Any]) -> bool:
        """See `GroupUpdate.takes_flag`: torch's fused kernel does, in torch's own step."""
        return bool(options.get("fused"))

    def suits_reference(self, inputs: StepInputs) -> bool:
        """See `GroupUpdate.suits_reference`: torch's fused kernel rounds in its own way."""
        return not inputs.options.get("fused") and super().suits_reference(inputs)

    def update(
        self, inputs: StepInputs, columns: Sequence[list[Tensor]], counters: list[Tensor]
    ) -> None:
        """See `CountedUpdate.update`."""
        options = {name: inputs.options[name] for name in ("lr", *self.numbers, "maximize")}
        step: Any = torch_optimizers.adagrad
        counts = self.values()
        for tensors in inputs.pieces(*columns):
            step(*tensors, counts, **options)

    def arguments(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the options of a group as ``adagrad_prepare`` takes them."""
        numbers = [options[name] for name in self.numbers]
        return [*learning_rate(options["lr"]), *numbers, int(options["maximize"])]
