"""What apex's optimizers share: state, its layouts, gradients cleared; knows no formula.

A group counts its steps in ``group["step"]``, where torch keeps a tensor per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.kernels.graph_capture import captures
from amp_patch.levels import HALVES
from amp_patch.optimizers import registry
from amp_patch.optimizers.cuda_step import CudaStep
from amp_patch.weights.lazy_gradients import LazyGradients


class MultiTensorOptimizer(Optimizer):
    """An optimizer that steps the parameters of a group by one operation of amp_C.

    State of half parameters is float32, unless a subclass says otherwise. State that apex or torch
    saved loads, too.

    Args:
        params: parameters, or groups of them.
        defaults: options of groups that say nothing else.
        set_grad_none: whether `zero_grad` sets gradients to None, unless it is told.

    Raises:
        TypeError: one of the defaults is a string.
    """

    set_grad_none = True
    #: Whether state of half parameters is float32; else it has their dtype.
    has_wide_state = True
    #: What else belongs to the optimizer where it is copied or pickled.
    kept: tuple[str, ...] = ("set_grad_none",)
    _cuda_step: CudaStep | None = None

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], set_grad_none: bool
    ) -> None:
        for name, value in defaults.items():
            if isinstance(value, str):  # YAML reads 1e-3 as one, for it has no point
                raise TypeError(
                    f"{name} must be a number; got the string {value!r}; call "
                    f"{type(self).__name__}(params, {name}=float({value!r})). In YAML 1.0e-3 is a "
                    "number, and 1e-3 a string."
                )
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none
        # Under the name that scripts hand it on by. It is never set.
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=self._device())

    def _device(self) -> torch.device:
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        first: Tensor | None = next(params, None)
        return torch.device("cpu") if first is None else first.device

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, as ``set_grad_none`` says unless told otherwise."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        kept = (*self.kept, "_dummy_overflow_buf")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded state; groups of other optimizers lack options, and count no steps."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            entries = [self.state.get(param, {}) for param in group["params"]]
            steps = [int(entry.pop("step")) for entry in entries if "step" in entry]
            if steps:
                group["step"] = max(steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as `torch.optim.Optimizer` does, but round none to half that is float32."""
        super().load_state_dict(state_dict)
        if not self.has_wide_state:
            return
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if param.dtype in HALVES and name in self.state[param] and _is_floating(value):
                    copy = value.detach().to(param.device, torch.float32, copy=True)
                    self.state[param][name] = copy

    def _step_by_kernels(self) -> bool:
        """Step all groups by the CUDA kernels that `registry` has for this very type.

        They take float32 parameters. In a CUDA graph the operations of amp_C serve, which apex's
        users know there.

        Returns:
            False, with no parameter changed, where the operations of amp_C have to.
        """
        update = registry.UPDATES.get(type(self))
        if update is None or update.kernels is None or captures.are_made(self._device()):
            return False
        if self._cuda_step is None:
            self._cuda_step = CudaStep(update, update.kernels, LazyGradients())
        return self._cuda_step.step(self, None, None)

    def _count_step(self, group: dict[str, Any]) -> int:
        count = int(group.get("step", 0)) + 1
        group["step"] = count
        return count

    def _with_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the parameters of a group that have gradients.

        Raises:
            RuntimeError: one of them is sparse.
        """
        params = [param for param in group["params"] if param.grad is not None]
        if any(param.grad.is_sparse for param in params):
            name = type(self).__name__
            raise RuntimeError(
                f"{name} needs dense gradients; got a sparse one. Build the embedding with "
                "sparse=False, or give its weight to torch.optim.SparseAdam."
            )
        return params

    def _state_of(self, params: list[Tensor], *names: str) -> list[list[Tensor]]:
        """Return a list of state tensors for each name; what is missing begins as 0."""
        columns: list[list[Tensor]] = []
        for name in names:
            for param in params:
                if self.state[param].get(name) is None:
                    is_wide = self.has_wide_state and param.dtype in HALVES
                    dtype = torch.float32 if is_wide else None
                    self.state[param][name] = torch.zeros_like(param, dtype=dtype)
            columns.append([self.state[param][name] for param in params])
        return columns


def gradients_of(params: Iterable[Tensor]) -> list[Any]:
    """Return the gradients of parameters that have one."""
    return [param.grad for param in params]


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of a closure, evaluated with gradients; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raise for the variant that apex has not.

    Raises:
        RuntimeError: amsgrad.
    """
    if amsgrad:
        raise RuntimeError(
            f"{name} has no AMSGrad variant; got amsgrad=True. Leave it out, or use "
            "torch.optim.AdamW(..., amsgrad=True)."
        )


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
