"""LAMB: `FusedLAMB`, which torch has not, and its step by the kernels of lamb.cu.

Knows no loss scales or masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.distributed.shards import any_spread, beside, by_mesh, local, whole
from amp_patch.kernels import cuda_module, torch_optimizers
from amp_patch.kernels.cuda_launch import launch
from amp_patch.kernels.cuda_module import Kernel
from amp_patch.kernels.cuda_optimizers import (
    Operands,
    OptimizerKernels,
    byte_rows,
    learning_rate,
)
from amp_patch.kernels.dense_rows import Part
from amp_patch.kernels.torch_kernels import alike, norms_of
from amp_patch.kernels.torch_norms import combined
from amp_patch.levels import HALVES

from .counted_groups import CountedUpdate, state_columns
from .groups import ParamState, StepInputs

__all__ = ["FusedLAMB", "LambUpdate"]

_DEFAULTS = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}


class FusedLAMB(Optimizer):
    """LAMB (You et al. 2019, arXiv:1904.00962), with the arguments and defaults of apex's.

    Its state is per parameter, as that of torch's Adam: ``exp_avg`` and ``exp_avg_sq`` like the
    parameter, and ``step``, a 0-dim float32 tensor. State that apex saved, with ``step`` in the
    group, loads too. Half parameters are stepped in fp32 and rounded.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide the averages by ``1 - beta ** step``.
        betas: of the averages of the gradient and of its square.
        eps: added to the root of the latter.
        weight_decay: the share of the parameter that is added.
        amsgrad: only False.
        adam_w_mode: add decay to the update, not to the gradient.
        grad_averaging: let the gradient enter its average by ``1 - beta1``, not by 1.
        set_grad_none: whether `zero_grad` sets gradients to None, unless it is told.
        max_grad_norm: all gradients together are clipped to this norm; None or 0: they are not.
        use_nvlamb: scale by the ratio of the norms also without weight decay.

    Raises:
        RuntimeError: amsgrad.
        ValueError: a negative lr, eps, weight_decay or max_grad_norm; a beta outside of [0, 1).
    """

    set_grad_none = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError(
                "LAMB has no AMSGrad variant; got amsgrad=True. Leave it out, or use "
                "torch.optim.AdamW(..., amsgrad=True)."
            )
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        _refuse_negative({**numbers, "max_grad_norm": max_grad_norm or 0.0})
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(
                f"betas must be at least 0 and below 1; got {betas!r}; call "
                "FusedLAMB(..., betas=(0.9, 0.999))."
            )
        self.set_grad_none = set_grad_none
        defaults = {
            **numbers,
            "betas": betas,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded state; apex's groups count the steps and lack what is set for all."""
        super().__setstate__(state)
        for group in self.param_groups:
            steps = group.pop("step", None)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for param in group["params"]:
                entry = self.state.get(param)
                if entry and "step" not in entry:
                    entry["step"] = torch.tensor(float(steps or 0), dtype=torch.float32)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, as ``set_grad_none`` says unless told otherwise."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: evaluates the loss again, and is evaluated once.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [
            (group, [param for param in group["params"] if param.grad is not None])
            for group in self.param_groups
        ]
        grads: list[Any] = [param.grad for _, params in stepped for param in params]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError(
                "LAMB needs dense gradients; got a sparse one. Build the embedding with "
                "sparse=False, or give its weight to torch.optim.SparseAdam."
            )
        factor = LambUpdate.clip_factor(self, lambda: _norms_of(grads))
        for group, params in stepped:
            for (part,) in chain.from_iterable(map(alike, by_mesh(params))):
                self._step_alike(group, part, factor)
        return loss

    def _step_alike(
        self, group: dict[str, Any], params: list[Tensor], factor: Tensor | None
    ) -> None:
        states = [self.state[param] for param in params]
        _make_states(params, states)
        grads: list[Any] = [param.grad for param in params]
        stored = [params, *state_columns(states, "exp_avg", "exp_avg_sq")]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        exact = [grads, *stored]
        if params[0].dtype in HALVES:
            exact = [[tensor.float() for tensor in column] for column in exact]
        if factor is not None:
            exact[0] = torch_optimizers.scaled(exact[0], beside(params[0], factor))
        counts = [float(step) for step in steps]
        _update(group, exact, counts)
        if exact[1] is not params:
            for targets, sources in zip(stored, exact[1:], strict=True):
                torch._foreach_copy_(list(map(local, targets)), list(map(local, sources)))


def _norms_of(grads: list[Tensor]) -> list[Tensor]:
    """Return 2-norms whose 2-norm is that of all gradients: of those on a mesh that of all."""
    if not any_spread(grads):
        return norms_of(grads, 2.0)
    return [whole(combined(norms_of(some, 2.0), 2.0)) for some in by_mesh(grads)]


class _LambKernels(OptimizerKernels):
    """Two passes, for the ratio of a row needs the norm of its whole update."""

    def update(self, part: Part, operands: Operands, weight: int) -> None:
        """See `OptimizerKernels.update`."""
        rows, coefficients, _, _, found_inf = operands
        norms = byte_rows(part, part.table.chunk_count, _NORMS_BYTES)
        ratios = torch.empty(len(part.rows), dtype=torch.float32, device=part.device)
        name = f"lamb_moments_{{0}}_to_{{{weight}}}"
        launch(part, self.source, name, "PPPPPPP", *operands, per_chunk=norms)
        sums = (part.table.ranges()[0], norms, coefficients, ratios, found_inf)
        cuda_module.modules.launch(_RATIOS, len(part.rows), part.device, *sums)
        name = f"lamb_update_{{{weight}}}"
        launch(part, self.source, name, "PPPPP", rows, coefficients, ratios, found_inf)


_RATIOS = Kernel("lamb.cu", "lamb_ratios", "PPPPP")
#: The size of ``struct Norms`` in lamb.cu.
_NORMS_BYTES = 16


class LambUpdate(CountedUpdate):
    """A group of `FusedLAMB`."""

    kernels = _LambKernels("lamb.cu", 48, "dPddddiiiii")
    numbers = ("betas", "eps", "weight_decay")
    tensors = ("exp_avg", "exp_avg_sq")

    @classmethod
    def max_norm(cls, optimizer: Optimizer) -> float | None:
        """See `GroupUpdate.max_norm`."""
        max_norm: float | None = optimizer.defaults["max_grad_norm"]
        return max_norm

    def cut_with(self, inputs: StepInputs) -> None:
        """See `GroupUpdate.cut_with`: the ratio takes the norm of the whole update."""

    def update(
        self, inputs: StepInputs, columns: Sequence[list[Tensor]], counters: list[Tensor]
    ) -> None:
        """See `CountedUpdate.update`."""
        _update(inputs.options, [inputs.grads, inputs.params, *columns], self.values())

    def make_states(self, inputs: StepInputs) -> None:
        """Make the state of parameters that have none."""
        _make_states(inputs.params, inputs.states)

    def arguments(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the options of a group as ``lamb_prepare`` takes them."""
        names = ("adam_w_mode", "bias_correction", "grad_averaging", "use_nvlamb")
        numbers = (*options["betas"], options["eps"], options["weight_decay"])
        maximizes = 0
        switches = [int(options[name]) for name in names]
        return [*learning_rate(options["lr"]), *numbers, *switches, maximizes]


def _make_states(params: list[Tensor], states: list[ParamState]) -> None:
    for param, state in zip(params, states, strict=True):
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)


def _update(group: Mapping[str, Any], columns: list[list[Tensor]], steps: list[float]) -> None:
    """Step the parameters of a group.

    Args:
        group: its options.
        columns: gradients, clipped already, parameters and the two averages, of one dtype.
        steps: of each parameter, this one included.
    """
    grads, params, exp_avgs, exp_avg_sqs = columns
    torch_optimizers.lamb(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        steps,
        **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
        **{name: group[name] for name in ("bias_correction", "grad_averaging")},
        decoupled=group["adam_w_mode"],
        adapt_always=group["use_nvlamb"],
    )


def _refuse_negative(numbers: dict[str, float]) -> None:
    for name, number in numbers.items():
        if not number >= 0.0:
            raise ValueError(
                f"{name} must be at least 0; got {number!r}; call "
                f"FusedLAMB(..., {name}={_DEFAULTS[name]})."
            )
