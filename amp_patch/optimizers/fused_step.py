"""Steps an optimizer in one pass over what it holds; knows no models, and no formula.

Gradients come from the parameters, or wait in a `LazyGradients` until they are needed. On CUDA
devices the kernels do it all, where they work; elsewhere the reference in torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.kernels import torch_kernels, torch_optimizers
from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.lazy_gradients import LazyGradients

from .cuda_step import CudaStep
from .groups import CachedGroups, GroupUpdate, StepInputs
from .registry import refuse_unknown, update_of


class FusedStep:
    """The step of one optimizer, with all that torch runs around it: hooks, profiler marks.

    Args:
        optimizer: of a type that `registry` knows.

    Attributes:
        lazy: the gradients that its masters have unless somebody reads or sets them.
        param_of: returns the half parameter of a master, and any other tensor itself.
        has_published: True where the last step wrote the half weights, too.

    Raises:
        TypeError, RuntimeError: see `registry.refuse_unknown`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        refuse_unknown(optimizer)
        self.lazy = LazyGradients()
        self.param_of: Callable[[Tensor], Tensor] = _itself
        self._found_inf: Tensor | None = None
        self.has_published = False
        self._update_type = update_of(optimizer)
        self._groups = CachedGroups(self._update_type)
        kernels = self._update_type.kernels
        self._cuda_step = (
            None if kernels is None else CudaStep(self._update_type, kernels, self.lazy)
        )
        self._plain = _without_hooks(type(optimizer).step)
        step = weakref.WeakMethod(self._step)
        # A method bound to this object would be a cycle, which only the collector ends. mypy does
        # not know that the reference lives as long as what calls it.
        self._hooked = Optimizer.profile_hook_step(lambda *args, **kw: step()(*args, **kw))  # type: ignore[misc]

    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor | None:
        """Clip gradients to a 2-norm; see `CudaStep.clip`."""
        return None if self._cuda_step is None else self._cuda_step.clip(optimizer, max_norm)

    def skips_by_flag(self, optimizer: Optimizer) -> bool:
        """Return whether the next step's kernels can skip it; else it waits for the flag."""
        return self._cuda_step is not None and self._cuda_step.is_expected(optimizer)

    def run(self, optimizer: Optimizer, found_inf: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Step as ``type(optimizer).step`` does.

        Args:
            optimizer: to step.
            found_inf: float32, one element; not 0: nothing changes. None: it is 0.
            args, kwargs: of the step.

        Returns:
            What the step returns.
        """
        # Schedulers built before `initialize` see to it that they are not told of a missing step.
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers set it
        self.has_published, self._found_inf = False, found_inf
        try:
            return self._hooked(optimizer, *args, **kwargs)
        finally:
            self._found_inf = None

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = self._found_inf
        if self._cuda_step is not None:
            self.has_published = self._cuda_step.step(optimizer, self.param_of, found_inf)
        if self.has_published or (found_inf is not None and captures.wait_for(found_inf)):
            return loss
        if not self._step_by_reference(optimizer):
            self.lazy.materialize()
            self._plain(optimizer)
        return loss

    def _step_by_reference(self, optimizer: Optimizer) -> bool:
        """Step all groups, or return False where one does not suit."""
        groups = optimizer.param_groups
        self._groups.look_up(optimizer)
        work: list[tuple[GroupUpdate, StepInputs]] = []
        found = self.lazy.take([group["params"] for group in groups])
        for cached, group, grads in zip(self._groups.groups, groups, found, strict=True):
            inputs = cached.inputs(optimizer, group, grads)
            if inputs is None:
                continue
            if not (cached.are_plain(inputs.grads) and cached.update.suits_reference(inputs)):
                return False
            work.append((cached.update, inputs))
        clip = self._update_type.clip_factor(optimizer, lambda: _norms(work))
        for update, inputs in work:
            update.step(inputs if clip is None else _clipped(inputs, clip))
        return True


def _norms(work: list[tuple[GroupUpdate, StepInputs]]) -> list[Tensor]:
    return torch_kernels.norms_of([grad for _, inputs in work for grad in inputs.grads], 2.0)


def _clipped(inputs: StepInputs, factor: Tensor) -> StepInputs:
    return inputs._replace(grads=torch_optimizers.scaled(inputs.grads, factor))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _without_hooks(step: Any) -> Callable[..., Any]:
    """Return the step that ``Optimizer.profile_hook_step`` wrapped for a class of optimizers."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner
