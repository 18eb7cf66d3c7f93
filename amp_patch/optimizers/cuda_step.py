"""One optimizer's step by the CUDA kernels: half gradient in, half weight out.

Knows its groups, what gradients wait and which half parameter a master belongs to; nothing of
hooks, closures, formulas or how the loss scale moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.kernels import alike, are_used, tensor_tables, torch_kernels
from amp_patch.kernels.cuda_optimizers import Factors, GroupRows, KernelStep, OptimizerKernels
from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.half_gradients import HalfGradients
from amp_patch.weights.lazy_gradients import LazyGradients, stored_grad

from .groups import CachedGroups, GroupUpdate


class CudaStep:
    """Steps one optimizer by kernels, again and again.

    Args:
        update_type: how the optimizer steps.
        kernels: those of ``update_type``.
        lazy: what gradients wait.
    """

    def __init__(
        self, update_type: type[GroupUpdate], kernels: OptimizerKernels, lazy: LazyGradients
    ) -> None:
        self._update_type, self._source, self._lazy = update_type, kernels.source, lazy
        # One launch takes gradients that all bear the same scale, so rows whose gradients wait,
        # still scaled, have launches of their own.
        self._scaled, self._unscaled = (_Launches(update_type, kernels) for _ in range(2))
        self._scales: dict[torch.device, tensor_tables.Resident] = {}

    def is_expected(self, optimizer: Optimizer) -> bool:
        """Return whether kernels can step all groups, as far as the first tensor of each tells."""
        first = [param for group in optimizer.param_groups for param in group["params"][:1]]
        return self._are_used(optimizer, first)

    def step(
        self,
        optimizer: Optimizer,
        param_of: Callable[[Tensor], Tensor],
        found_inf: Tensor | None,
    ) -> bool:
        """Step all groups; return False, with no parameter changed, where kernels cannot.

        Args:
            optimizer: whose groups and state are read.
            param_of: returns the half parameter of a master, or what it is given.
            found_inf: float32, one element; not 0: nothing changes. None: it is 0. It is waited
                for where the host enters new state, of which a skipped step is to leave no trace.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not self._are_used(optimizer, params):
            return False
        try:
            half = self._half_gradients()
            if not self._take(optimizer, param_of, half):
                return False
            entries = self._new_entries(optimizer)
            if entries and found_inf is not None and captures.wait_for(found_inf):
                return True
            for owner, name, value in entries:
                owner[name] = value
            self._launch(optimizer, half, found_inf)
            return True
        finally:  # nobody but the user keeps gradients alive
            self._scaled.release()
            self._unscaled.release()

    def _take(
        self,
        optimizer: Optimizer,
        param_of: Callable[[Tensor], Tensor],
        half: HalfGradients | None,
    ) -> bool:
        """Take the rows to step; return whether there are kernels for all of them."""
        waiting: dict[int, Tensor] = {}
        if half is not None:
            waiting = dict(zip(map(id, self._lazy.params), half.grads, strict=True))
        return self._scaled.take(
            optimizer, param_of, lambda param: waiting.get(id(param))
        ) and self._unscaled.take(optimizer, param_of, stored_grad)

    def _new_entries(self, optimizer: Optimizer) -> list[tuple[dict[str, Any], str, Any]]:
        """Return what the host enters in dicts where the step is not skipped."""
        options = [
            (group, name, value)
            for group in optimizer.param_groups
            for name, value in self._update_type.changed_options(group).items()
        ]
        return [*options, *self._scaled.new_state(), *self._unscaled.new_state()]

    def _launch(
        self, optimizer: Optimizer, half: HalfGradients | None, found_inf: Tensor | None
    ) -> None:
        """Step the rows that were taken."""
        scaled, unscaled = self._scaled, self._unscaled
        clip = self._update_type.clip_factor(optimizer, lambda: _norms(half, unscaled.grads()))
        if half is not None and scaled.groups:
            scaled.step(self._factors(half, clip), found_inf)
        if unscaled.groups:
            unscaled.step(Factors(None, clip), found_inf)

    @torch.no_grad()
    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor | None:
        """Clip gradients to a total 2-norm: those that wait when the step unscales them.

        Returns:
            The norm before, 0-dim; None, with nothing done, where none wait in half.
        """
        half = self._half_gradients()
        if half is None or half.clip is not None:
            return None
        stored = [stored_grad(p) for group in optimizer.param_groups for p in group["params"]]
        others = [grad for grad in stored if grad is not None]
        total = torch_kernels.combined([half.norm(), *torch_kernels.norms_of(others, 2.0)], 2.0)
        half.clip = torch_kernels.clip_factor(total, max_norm, torch_kernels.CLIP_EPS)
        torch_kernels.multiply(others, half.clip)
        return total

    def _are_used(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        update = self._update_type
        options = (update.options(optimizer, group) for group in optimizer.param_groups)
        return all(map(update.suits_kernels, options)) and are_used((self._source,), params)

    def _half_gradients(self) -> HalfGradients | None:
        """Return the gradients that wait in half, checked; all others are stored."""
        source = self._lazy.source
        if not isinstance(source, HalfGradients) or not self._lazy.are_alone():
            self._lazy.materialize()
            return None
        source.refuse_written(range(len(source.grads)))
        return source

    def _factors(self, half: HalfGradients, clip: Tensor | None) -> Factors:
        if half.clip is not None:
            clip = half.clip if clip is None else half.clip * clip.to(half.clip.device)
        return Factors(self._scale(half.scale, self._scaled.device), clip)

    def _scale(self, scale: float | Tensor, device: torch.device) -> Tensor:
        if isinstance(scale, Tensor):
            return scale
        if device not in self._scales:
            self._scales[device] = tensor_tables.scalar(device)
        return self._scales[device].holding(scale)


class _Launches:
    """The launches for rows of one kind, and what was looked up for them.

    Attributes:
        groups: the rows of the groups that the last `take` found gradients for.
    """

    def __init__(self, update_type: type[GroupUpdate], kernels: OptimizerKernels) -> None:
        self._kernel_step = KernelStep(kernels)
        self._cached = CachedGroups(update_type)
        self.groups: list[GroupRows] = []

    def take(
        self,
        optimizer: Optimizer,
        param_of: Callable[[Tensor], Tensor],
        grad_of: Callable[[Tensor], Tensor | None],
    ) -> bool:
        """Take the rows to step; return whether there are kernels for all of them."""
        self.groups = []
        self._cached.look_up(optimizer)
        for cached, group in zip(self._cached.groups, optimizer.param_groups, strict=True):
            inputs = cached.inputs(optimizer, group, list(map(grad_of, group["params"])))
            if inputs is None:
                continue
            if not cached.are_plain(inputs.grads):
                return False
            weights = [None if (one := param_of(p)) is p else one for p in inputs.params]
            self.groups.append(cached.update.kernel_rows(inputs, weights))
        return not self.groups or self._kernel_step.take(self.groups)

    def new_state(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return what is to be entered where these rows are stepped."""
        return [one for group in self.groups for one in group.new_state]

    def grads(self) -> list[Any]:
        """Return the gradients of all rows."""
        return [grad for group in self.groups for grad in group.columns[0]]

    @property
    def device(self) -> torch.device:
        """That of the first row."""
        first: Any = self.groups[0].columns[1][0]
        device: torch.device = first.device
        return device

    def step(self, factors: Factors, found_inf: Tensor | None) -> None:
        """Step the rows, of which there are some; see `KernelStep.step`."""
        self._kernel_step.step(factors, found_inf)

    def release(self) -> None:
        """Let go of the tensors of the last `take`, but for the parameters."""
        self.groups = []
        self._kernel_step.release()


def _norms(half: HalfGradients | None, stored: list[Tensor]) -> list[Tensor]:
    """Return 2-norms whose 2-norm is that of all gradients, unscaled."""
    norms = [norm for (part,) in alike(stored) for norm in _norms_alike(part)]
    return norms if half is None else [half.norm(), *norms]


def _norms_alike(grads: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(grads, 2.0, dtype=torch.float32))
