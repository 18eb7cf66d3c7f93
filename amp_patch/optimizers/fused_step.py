"""Steps an optimizer in one pass over what it holds; knows no models, and no formula.

Gradients come from the parameters, or wait in a `LazyGradients` until they are needed. On CUDA
devices the kernels do it all, where they work; elsewhere the reference in torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.without_grad import without_grad
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.parameter_lists import as_plain_tensors

from .cuda_step import CudaStep
from .device_flag import step_by_flag
from .reference_step import ReferenceStep
from .registry import update_of


class FusedStep:
    """The step of one optimizer, with all that torch runs around it: hooks, profiler marks.

    Args:
        optimizer: such as `registry.refuse_unknown` lets pass.
        lazy: the gradients that its masters have unless somebody reads or sets them.
        masters: of half parameters; None where there are none.
        by_kernels: whether kernels of csrc/ may step it, and gradients may wait for them. Where
            they may not, its own step makes what torch's fused kernels cannot.

    Attributes:
        lazy: as given.
        has_published: True where the last step wrote the half weights, too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lazy: LazyGradients,
        masters: MasterWeights | None,
        by_kernels: bool = True,
    ) -> None:
        self.lazy, self._masters = lazy, masters
        self._found_inf: Tensor | None = None
        self._own_hooks: list[Any] = []  # that came before the last step, and are amp_patch's
        self.has_published = False
        self._update_type = update_of(optimizer)
        self._reference = ReferenceStep(self._update_type, self.lazy)
        kernels = self._update_type.kernels if by_kernels else None
        self._cuda_step = (
            None if kernels is None else CudaStep(self._update_type, kernels, self.lazy)
        )
        self._plain = _without_hooks(type(optimizer).step)
        step = weakref.WeakMethod(self._step)
        # A method bound to this object would be a cycle, which only the collector ends. mypy does
        # not know that the reference lives as long as what calls it.
        self._hooked = Optimizer.profile_hook_step(lambda *args, **kw: step()(*args, **kw))  # type: ignore[misc]

    def forget(self) -> None:
        """Let go of the optimizer's state, which is looked up again in the next step."""
        self._reference.forget()
        if self._cuda_step is not None:
            self._cuda_step.forget()

    def clip(
        self,
        optimizer: Optimizer,
        max_norm: float,
        accept: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Clip gradients that wait to a total 2-norm; return that, or None where none can wait.

        Args:
            optimizer: whose gradients they are.
            max_norm: what the norm is to be at most.
            accept: see `distributed.norms.clip_by_norm`.
        """
        norm = self._reference.clip(optimizer, max_norm, accept)
        if norm is None and self._cuda_step is not None:
            norm = self._cuda_step.clip(optimizer, max_norm, accept)
        return norm

    def skips_by_flag(self, optimizer: Optimizer) -> bool:
        """Return whether the next step's kernels can skip it; else it waits for the flag."""
        return self._cuda_step is not None and self._cuda_step.is_expected(optimizer)

    def reconciles(self, optimizer: Optimizer) -> bool:
        """Return whether the next step's kernels make masters and half parameters agree.

        Not where hooks come before them, who see and change what is stepped.
        """
        return self.skips_by_flag(optimizer) and _are_own(_pre_hooks(optimizer))

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
            hooks = _pre_hooks(optimizer)
            if hooks != self._own_hooks and _are_own(hooks):
                self._own_hooks = hooks
            if args or kwargs or hooks != self._own_hooks or _is_profiled():
                return self._hooked(optimizer, *args, **kwargs)
            self._step_unmarked(optimizer, hooks)
            return None
        finally:
            self._found_inf = None

    def _step_unmarked(self, optimizer: Optimizer, pre_hooks: list[Any]) -> None:
        """Step as `_hooked` does, without its mark for a profiler: that takes the host 15 us."""
        given: tuple[tuple[Optimizer], dict[str, Any]] = (optimizer,), {}
        for hook in pre_hooks:
            hook(optimizer, *given)
        self._step_now(optimizer)
        own_hooks = optimizer._optimizer_step_post_hooks
        for hook in (*own_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(optimizer, *given)

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_now(optimizer)
        return loss

    @without_grad
    def _step_now(self, optimizer: Optimizer) -> None:
        if self._masters is None:
            is_over = self._step_or_skip(optimizer, self._found_inf)
        else:
            every = chain.from_iterable([group["params"] for group in optimizer.param_groups])
            with as_plain_tensors(every):  # no list of them: that takes longer
                is_over = self._step_or_skip(optimizer, self._found_inf)
        if not is_over:
            self.lazy.materialize()
            if self._found_inf is not None and self._reference.takes_flag(optimizer):
                step_by_flag(optimizer, self._found_inf, lambda: self._plain(optimizer))
            else:  # it is 0, or was waited for
                self._plain(optimizer)

    def _step_or_skip(self, optimizer: Optimizer, found_inf: Tensor | None) -> bool:
        """Step by kernels or the reference, or not where ``found_inf`` says so; False: neither."""
        if self._cuda_step is not None:
            self.has_published = self._cuda_step.step(optimizer, self._masters, found_inf)
        if self._masters is not None:
            self._masters.catch_up()  # where kernels have stepped nothing
        if self.has_published:
            return True
        if found_inf is not None and not self._reference.takes_flag(optimizer):
            if captures.wait_for(found_inf):
                return True
            found_inf = None
        return self._reference.step(optimizer, found_inf)


def _pre_hooks(optimizer: Optimizer) -> list[Any]:
    """Return what torch calls before a step, in that order."""
    own_hooks = optimizer._optimizer_step_pre_hooks
    return [*_global_optimizer_pre_hooks.values(), *own_hooks.values()]


def _are_own(hooks: list[Any]) -> bool:
    """Return whether all of these hooks are amp_patch's, which write nothing."""
    return all([str(hook.__module__).startswith("amp_patch.") for hook in hooks])  # noqa: C419  # faster


def _is_profiled() -> bool:
    """Return whether this thread is profiled, or a profile was begun that may be of all threads."""
    return profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()


def _without_hooks(step: Any) -> Callable[..., Any]:
    """Return the step that ``Optimizer.profile_hook_step`` wrapped for a class of optimizers."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner
