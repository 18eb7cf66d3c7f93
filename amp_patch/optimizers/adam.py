"""`torch.optim.Adam` and `AdamW`: their step in torch, and by the kernels of adamw.cu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from amp_patch.kernels import torch_optimizers
from amp_patch.kernels.cuda_optimizers import OptimizerKernels, learning_rate

from .counted_groups import CountedUpdate
from .groups import StepInputs


class AdamUpdate(CountedUpdate):
    """A group of `torch.optim.Adam`."""

    kernels = OptimizerKernels("adamw.cu", 36, "dPddddii")
    makes_copies = True  # the denominators
    numbers = ("betas", "eps", "weight_decay")
    tensors = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    #: Whether weight decay is decoupled in groups that do not say.
    decoupled = False

    @classmethod
    def takes_flag(cls, options: Mapping[str, Any]) -> bool:
        """See `GroupUpdate.takes_flag`: torch's fused kernel does."""
        return bool(options.get("fused"))

    @classmethod
    def kept(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """See `CountedUpdate.kept`."""
        return cls.tensors if options["amsgrad"] else cls.tensors[:2]

    def update(
        self, inputs: StepInputs, columns: Sequence[list[Tensor]], counters: list[Tensor]
    ) -> None:
        """See `CountedUpdate.update`."""
        group, found_inf = inputs.options, inputs.found_inf
        options = {name: group[name] for name in _OPTIONS}
        options["decoupled"] = group.get("decoupled_weight_decay", self.decoupled)
        step: Any = torch_optimizers.fused_adam if group["fused"] else torch_optimizers.adam
        counts = counters if group["fused"] else self.values()
        if found_inf is not None:
            options["found_inf"] = found_inf
        for tensors in inputs.pieces(*columns):
            step(*tensors, counts, **options)

    def arguments(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the options of a group as ``adamw_prepare`` takes them."""
        numbers = (*options["betas"], options["eps"], options["weight_decay"])
        decoupled = options.get("decoupled_weight_decay", self.decoupled)
        return [*learning_rate(options["lr"]), *numbers, int(decoupled), int(options["maximize"])]


class AdamWUpdate(AdamUpdate):
    """A group of `torch.optim.AdamW`."""

    decoupled = True


_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")
