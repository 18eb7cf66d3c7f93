"""Groups of parameters that an initialized optimizer is given later, by ``add_param_group``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.arguments import refuse_half_params
from amp_patch.optimizers.half_eps import warn_of_eps
from amp_patch.optimizers.registry import refuse_options
from amp_patch.weights.master_weights import MasterWeights

from .held_params import HeldParams
from .replaced_methods import ReplacedMethods


class AddedGroups:
    """What stands in the place of one optimizer's ``add_param_group``.

    Args:
        optimizer: held weakly.
        held: its parameters.
        methods: that stand in the place of the optimizer's own.
        is_fused: whether a fused step refuses some options of a group.

    Attributes:
        are_own: True where a wrapper (ZeRO) has groups that are not these.
        when_added: is called after each group that was added.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        held: HeldParams,
        methods: ReplacedMethods,
        is_fused: bool,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._held, self._methods, self._is_fused = held, methods, is_fused
        self.are_own = False
        self.when_added: Callable[[], object] = lambda: None

    def add(self, original: Callable[..., Any], param_group: Any) -> None:
        """Add a group, with masters in it; where the group is refused, nothing has changed.

        Raises:
            RuntimeError: half parameters are to be trained at a level that has no masters for them.
        """
        self._add(original, param_group)
        self.when_added()

    def _add(self, original: Callable[..., Any], param_group: Any) -> None:
        optimizer = self._optimizer()
        if self._is_fused and optimizer is not None:
            refuse_options(optimizer, param_group)
        self._held.look_at_others()
        if self._held.masters is not None:
            self._add_masters(self._held.masters, original, param_group)
            return
        with self._methods.in_original():
            original(param_group)
        if optimizer is None:
            return
        if self._held.steps_halves:
            warn_of_eps(optimizer)
            return
        try:
            refuse_half_params(optimizer, optimizer.param_groups[-1]["params"])
        except RuntimeError:
            del optimizer.param_groups[-1]
            raise

    def _add_masters(
        self, masters: MasterWeights, original: Callable[..., Any], param_group: Any
    ) -> None:
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is None or isinstance(params, set):  # torch says what is wrong with it
            with self._methods.in_original():
                original(param_group)
            return
        if self.are_own:
            param_group = dict(param_group)
        given = [params] if isinstance(params, Tensor) else list(params)
        count = len(masters)
        param_group["params"] = masters.replace(given)
        try:
            with self._methods.in_original():
                original(param_group)
        except BaseException:
            masters.drop_after(count)
            param_group["params"] = given
            raise
