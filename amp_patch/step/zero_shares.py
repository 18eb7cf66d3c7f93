"""Parameters of a `ZeroRedundancyOptimizer` of which other ranks step the masters.

This rank steps its own share by a local optimizer, which is the one that was set up; users step,
and add groups to, the one around it. Knows both, and the fp32 values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from amp_patch.optimizers.groups import params_of
from amp_patch.weights.fp32_values import FP32Values

from .optimizer_backward import OptimizerBackward
from .replaced_methods import ReplacedMethods


class ZeroShares:
    """Follows which parameters are of this rank's share.

    Args:
        zero: held weakly; its ``add_param_group`` is replaced.
        values: the fp32 values, of which this rank keeps those of its own share.
        backward: of the local optimizer.
        methods: that stand in the place of optimizers' own.
    """

    def __init__(
        self,
        zero: Optimizer,
        values: FP32Values,
        backward: OptimizerBackward,
        methods: ReplacedMethods,
    ) -> None:
        self._zero = weakref.ref(zero)
        self._values, self._backward, self._methods = values, backward, methods
        self._follow(zero)
        methods.replace(zero, "add_param_group", self._add, is_wrapped=True)

    def _add(self, original: Callable[..., Any], param_group: Any) -> None:
        """Add a group, of which the local optimizer is given this rank's share."""
        with self._methods.in_original():
            original(param_group)
        zero = self._zero()
        assert zero is not None  # whoever calls has it
        self._follow(zero)

    def _follow(self, zero: Optimizer) -> None:
        """Note what other ranks step: it has no values here, and gradients that nobody steps."""
        elsewhere = set(params_of(zero)).difference(self._backward.pairs().model)
        self._values.forget(elsewhere)
        self._backward.gradients.elsewhere = list(elsewhere)
