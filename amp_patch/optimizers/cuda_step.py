"""One optimizer's step by the CUDA kernels: half gradient in, half weight out.

Knows its groups, what gradients wait and which half parameter a master belongs to; nothing of
hooks, closures, formulas or how the loss scale moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.common.scales import Scale
from amp_patch.gradients.half_gradients import HalfGradients
from amp_patch.kernels import are_on_cuda, are_used, cuda_kernels, cuda_norms
from amp_patch.kernels.cuda_optimizers import Factors, GroupRows, KernelStep, OptimizerKernels
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.resident import Resident, scalar
from amp_patch.kernels.without_grad import without_grad
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.parameter_lists import are_none, are_same, stored_grads

from .cached_groups import CachedGroups
from .groups import GroupUpdate, params_of


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
        self._update_type, self._lazy = update_type, lazy
        self._sources = (kernels.source, *cuda_kernels.SOURCES["clip_by_norm"])
        # One launch takes gradients that all bear the same scale, so rows whose gradients wait,
        # still scaled, have launches of their own.
        self._scaled, self._unscaled = (_Launches(update_type, kernels) for _ in range(2))
        self._scales: dict[torch.device, Resident[Tensor]] = {}

    def forget(self) -> None:
        """Let go of what was looked up, the state of the optimizer with it."""
        self._scaled.forget()
        self._unscaled.forget()

    def is_expected(self, optimizer: Optimizer) -> bool:
        """Return whether kernels can step all groups, as far as the first tensor of each tells."""
        return _is_on_cuda(optimizer) and self._are_used(optimizer, _first_of_groups(optimizer))

    def step(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        found_inf: Tensor | None,
    ) -> bool:
        """Step all groups; return False, with no parameter changed, where kernels cannot.

        Args:
            optimizer: whose groups and state are read.
            masters: whose half parameters are written, too; None: there are none.
            found_inf: float32, one element; not 0: nothing changes. None: it is 0. It is waited
                for where the host enters new state, of which a skipped step is to leave no trace.
        """
        if not _is_on_cuda(optimizer):
            return False  # most often seen at once, in less time than to ask the environment
        params = params_of(optimizer)
        if not self._are_used(optimizer, params):  # before a state is made for any of them
            return False
        try:
            stored = stored_grads(params)
            half = self._half_gradients(not are_none(stored))
            if half is None:
                stored = stored_grads(params)
            waiting = self._waiting(params, half)
            param_of = _itself if masters is None else masters.pairs.param_of
            if not self._take(optimizer, param_of, waiting, stored):
                return False
            entries = self._new_entries(optimizer)
            if entries and found_inf is not None and captures.wait_for(found_inf):
                return True
            for owner, name, value in entries:
                owner[name] = value
            self._launch(optimizer, half, found_inf, self._wins(masters))
            return True
        finally:  # nobody but the user keeps gradients alive
            self._scaled.release()
            self._unscaled.release()

    def _waiting(self, params: list[Tensor], half: HalfGradients | None) -> list[Any]:
        """Return for each parameter the gradient that waits in half, or None."""
        if half is None:
            return [None] * len(params)
        if are_same(params, self._lazy.params):  # most often, and in less time than to look up
            return half.grads
        waiting = dict(zip(map(id, self._lazy.params), half.grads, strict=True))
        return list(map(waiting.get, map(id, params)))

    def _take(
        self,
        optimizer: Optimizer,
        param_of: Callable[[Tensor], Tensor],
        waiting: list[Tensor | None],
        stored: list[Tensor | None],
    ) -> bool:
        """Take the rows to step; return whether there are kernels for all of them."""
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        spans = list(pairwise(accumulate(lengths, initial=0)))
        scaled = [waiting[begin:end] for begin, end in spans]
        unscaled = [stored[begin:end] for begin, end in spans]
        # Those that wait have been checked by kernels, which take dense ones.
        return self._scaled.take(optimizer, param_of, scaled, True) and self._unscaled.take(
            optimizer, param_of, unscaled, False
        )

    def _new_entries(self, optimizer: Optimizer) -> list[tuple[dict[str, Any], str, Any]]:
        """Return what the host enters in dicts where the step is not skipped."""
        options = [
            (group, name, value)
            for group in optimizer.param_groups
            for name, value in self._update_type.changed_options(group).items()
        ]
        return [*options, *self._scaled.new_state(), *self._unscaled.new_state()]

    def _wins(self, masters: MasterWeights | None) -> list[bool]:
        """Return for each row that was taken whether its half weight is to follow its master."""
        scaled, unscaled = self._scaled, self._unscaled
        stepped = [*scaled.params, *unscaled.params]
        if masters is None:
            return [True] * len(stepped)
        return masters.reconcile_all_but(stepped, [*scaled.places, *unscaled.places])

    def _launch(
        self,
        optimizer: Optimizer,
        half: HalfGradients | None,
        found_inf: Tensor | None,
        wins: list[bool],
    ) -> None:
        """Step the rows that were taken."""
        scaled, unscaled = self._scaled, self._unscaled
        count = len(scaled.params)
        clip = self._own_clip(optimizer, half)
        if half is not None and scaled.groups:
            scaled.step(self._factors(half, clip), found_inf, wins[:count])
        if unscaled.groups:
            unscaled.step(Factors(None, clip), found_inf, wins[count:])

    def _own_clip(self, optimizer: Optimizer, half: HalfGradients | None) -> Tensor | None:
        """Return what the optimizer itself clips the gradients that were taken by, if it does."""
        max_norm = self._update_type.max_norm(optimizer)
        if not max_norm:
            return None
        squares = [] if half is None else half.squares()
        squares += cuda_norms.squares_of(self._unscaled.grads())[0]
        return cuda_norms.clip_factor(squares, max_norm, 0.0)[1] if squares else None

    @without_grad
    def clip(
        self,
        optimizer: Optimizer,
        max_norm: float,
        accept: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Clip gradients to a total 2-norm: those that wait when the step unscales them.

        Returns:
            The norm before, 0-dim; None, with nothing done, where none wait in half.
        """
        others = [grad for grad in stored_grads(params_of(optimizer)) if grad is not None]
        half = self._half_gradients(bool(others))
        if half is None or half.clip is not None:
            return None
        norm, half.clip = cuda_norms.clip_together(half.squares(), others, max_norm, accept)
        return norm

    def _are_used(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        if not are_used(self._sources, params):
            return False
        update = self._update_type
        options = (update.options(optimizer, group) for group in optimizer.param_groups)
        return all(map(update.suits_kernels, options))

    def _half_gradients(self, are_stored: bool) -> HalfGradients | None:
        """Return the gradients that wait in half, checked; where there are none, all are stored.

        Args:
            are_stored: whether any parameter has one that is stored now.
        """
        source = self._lazy.source
        are_alone = not are_stored or self._lazy.are_alone()
        if not isinstance(source, HalfGradients) or not are_alone:
            self._lazy.materialize()
            return None
        source.refuse_written(range(len(source.grads)))
        return source

    def _factors(self, half: HalfGradients, clip: Tensor | None) -> Factors:
        if half.clip is not None:
            clip = half.clip if clip is None else half.clip * clip.to(half.clip.device)
        return Factors(self._scale(half.scale, self._scaled.device), clip)

    def _scale(self, scale: Scale, device: torch.device) -> Tensor:
        if isinstance(scale, Tensor):
            return scale
        if device not in self._scales:
            self._scales[device] = scalar(device)
        return self._scales[device].holding(scale)


def _is_on_cuda(optimizer: Optimizer) -> bool:
    """Return whether the first tensor of each group is."""
    for group in optimizer.param_groups:  # noqa: SIM110  # no generator: faster
        if not are_on_cuda(group["params"][:1]):
            return False
    return True


def _first_of_groups(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"][:1]]


class _Launches:
    """The launches for rows of one kind, and what was looked up for them.

    Attributes:
        groups: the rows of the groups that the last `take` found gradients for.
    """

    def __init__(self, update_type: type[GroupUpdate], kernels: OptimizerKernels) -> None:
        self._make_cached = functools.partial(CachedGroups, update_type)
        self._make_step = functools.partial(KernelStep, kernels)
        self.forget()

    def forget(self) -> None:
        """See `CudaStep.forget`."""
        self._cached, self._kernel_step = self._make_cached(), self._make_step()
        self.groups: list[GroupRows] = []

    def take(
        self,
        optimizer: Optimizer,
        param_of: Callable[[Tensor], Tensor],
        grads: list[list[Tensor | None]],
        are_dense: bool,
    ) -> bool:
        """Take the rows to step; return whether there are kernels for all of them.

        Args:
            optimizer: whose groups and state are read.
            param_of: see `CachedGroup.weights`.
            grads: for each group and parameter the gradient, or None.
            are_dense: whether it is known that no gradient is sparse.
        """
        self.groups = []
        if all(map(are_none, grads)):
            if self._cached.groups:  # what is known of them may be gone
                self.forget()
            return True
        self._cached.look_up(optimizer)
        columns = zip(self._cached.groups, optimizer.param_groups, grads, strict=True)
        for cached, group, found in columns:
            inputs = cached.inputs(optimizer, group, found)
            if inputs is None:
                continue
            # before a state is made
            if not cached.are_plain(() if are_dense else inputs.grads):
                return False
            self.groups.append(cached.update.kernel_rows(inputs, cached.weights(param_of)))
        return self._kernel_step.take(self.groups)

    def new_state(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return what is to be entered where these rows are stepped."""
        return [one for group in self.groups for one in group.new_state]

    def grads(self) -> list[Any]:
        """Return the gradients of all rows."""
        return [grad for group in self.groups for grad in group.columns[0]]

    @property
    def params(self) -> Sequence[Any]:
        """The float32 parameters of all rows."""
        return self._kernel_step.params if self.groups else ()

    @property
    def places(self) -> Sequence[int]:
        """The addresses of their half weights; 0 for none."""
        return self._kernel_step.places if self.groups else ()

    @property
    def device(self) -> torch.device:
        """That of the first row."""
        first: Any = self.groups[0].columns[1][0]
        device: torch.device = first.device
        return device

    def step(self, factors: Factors, found_inf: Tensor | None, wins: list[bool]) -> None:
        """Step the rows, of which there are some; see `KernelStep.step`."""
        self._kernel_step.step(factors, found_inf, wins)

    def release(self) -> None:
        """Let go of the tensors of the last `take`, but for the parameters."""
        self.groups = []
        self._kernel_step.release()


def _itself(tensor: Tensor) -> Tensor:
    return tensor
