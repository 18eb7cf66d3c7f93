"""What is looked up once for many steps of an optimizer's groups: states, devices and dtypes.

Knows optimizers of torch; no formula, no masters, loss scales or skipped steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.distributed.shards import any_spread
from amp_patch.kernels.cuda_optimizers import Column
from amp_patch.kernels.getters import IS_SPARSE
from amp_patch.weights.parameter_lists import Tensors, are_complete, are_same

from .groups import GroupUpdate, ParamState, StepInputs


class CachedGroup:
    """What was looked up for the parameters of a group, until somebody changes that.

    Attributes:
        update: how it steps.
        are_float32_on_one_device: what the parameters of the last `inputs` are.
    """

    def __init__(self, owner: CachedGroups, update: GroupUpdate) -> None:
        self.update = update
        self._owner = weakref.proxy(owner)
        self._params: list[Tensor] = []
        self._states: list[ParamState] = []
        self._weights: Column | None = None
        self.are_float32_on_one_device = False
        self._seen = -1

    def inputs(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        grads: list[Tensor | None],
        params: list[Tensor] | None = None,
    ) -> StepInputs | None:
        """Return what the group steps; None where no parameter has a gradient.

        Args:
            optimizer: the group's.
            group: of ``optimizer.param_groups``.
            grads: for each of its parameters the gradient, or None.
            params: those of its parameters that are meant; None: all.
        """
        params, found = _with_grads(group["params"] if params is None else params, grads)
        if not params:
            return None
        options = self.update.options(optimizer, group)
        self._look_up(params, self.update.has_state(options))
        return StepInputs(group, options, params, found, self._states)

    def _look_up(self, params: list[Tensor], has_state: bool) -> None:
        is_known = self._seen == self._owner.changes and has_state == bool(self._states)
        if is_known and (params is self._params or are_same(params, self._params)):
            return
        self._seen = self._owner.changes
        # what `listed` has made nobody changes
        self._params = params if isinstance(params, Tensors) else list(params)
        self._weights = None
        self._states = self._owner.states_of(params) if has_state else []
        kinds = {(param.dtype, param.device) for param in params}
        is_one = len(kinds) == 1 and not any_spread(params)
        self.are_float32_on_one_device = is_one and params[0].dtype is torch.float32

    def weights(self, param_of: Callable[[Tensor], Tensor]) -> Column:
        """Return the half parameters that belong to those of the last `inputs`; None for no such.

        Args:
            param_of: returns the half parameter of a master, and any other tensor itself.
        """
        if self._weights is None:
            self._weights = [None if (one := param_of(p)) is p else one for p in self._params]
        return self._weights

    def are_plain(self, grads: Sequence[Tensor]) -> bool:
        """Return whether parameters and gradients are such as fused steps take.

        Args:
            grads: of the last `inputs`.

        Returns:
            True for parameters of float32 on one device, with dense gradients.
        """
        return self.are_float32_on_one_device and not any(map(IS_SPARSE, grads))


def _with_grads(params: list[Tensor], grads: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    if are_complete(grads):
        return params, grads
    has_grad = [grad is not None for grad in grads]
    return list(compress(params, has_grad)), list(compress(grads, has_grad))


class CachedGroups:
    """A `CachedGroup` for each group of an optimizer.

    Args:
        update_type: how it steps.

    Attributes:
        groups: as many as the optimizer had at the last `look_up`.
        state: the optimizer's.
        changes: how often a look has found that a parameter's state is another object.
    """

    def __init__(self, update_type: type[GroupUpdate]) -> None:
        self._update_type = update_type
        self.groups: list[CachedGroup] = []
        self.state: MutableMapping[Any, ParamState] = {}
        self.changes = 0
        self._states: list[ParamState] = []

    def look_up(self, optimizer: Optimizer) -> None:
        """See what the optimizer has now."""
        groups = optimizer.param_groups
        del self.groups[len(groups) :]
        for _ in groups[len(self.groups) :]:
            self.groups.append(CachedGroup(self, self._update_type()))
        self.state = optimizer.state
        states = list(self.state.values())
        if not are_same(states, self._states):
            self.changes, self._states = self.changes + 1, states

    def states_of(self, params: list[Tensor]) -> list[ParamState]:
        """Return the state of each parameter, as `optimizer.state` makes it where it has none."""
        count = len(self.state)
        states = [self.state[param] for param in params]
        if len(self.state) > count:  # known from now on, so that the next look sees it taken away
            self._states = list(self.state.values())
        return states
