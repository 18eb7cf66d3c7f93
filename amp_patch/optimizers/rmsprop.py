"""`torch.optim.RMSprop`: its step in torch, and by the kernels of rmsprop.cu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from amp_patch.kernels import torch_optimizers
from amp_patch.kernels.cuda_optimizers import OptimizerKernels, learning_rate

from .counted_groups import CountedUpdate
from .groups import StepInputs


class RMSpropUpdate(CountedUpdate):
    """A group of `torch.optim.RMSprop`."""

    kernels = OptimizerKernels("rmsprop.cu", 32, "dPddddii")
    makes_copies = True  # the denominators
    numbers = ("alpha", "eps", "weight_decay", "momentum")
    tensors = ("square_avg", "momentum_buffer", "grad_avg")

    @classmethod
    def kept(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """See `CountedUpdate.kept`."""
        square_avg, momentum_buffer, grad_avg = cls.tensors
        kept = (square_avg, momentum_buffer) if options["momentum"] > 0 else (square_avg,)
        return (*kept, grad_avg) if options["centered"] else kept

    def update(
        self, inputs: StepInputs, columns: Sequence[list[Tensor]], counters: list[Tensor]
    ) -> None:
        """See `CountedUpdate.update`."""
        options = {name: inputs.options[name] for name in ("lr", *self.numbers, "maximize")}
        for tensors in inputs.pieces(*columns):
            torch_optimizers.rmsprop(*tensors, **options)

    def arguments(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the options of a group as ``rmsprop_prepare`` takes them."""
        numbers = [options[name] for name in self.numbers]
        switches = [int(options["centered"]), int(options["maximize"])]
        return [*learning_rate(options["lr"]), *numbers, *switches]
