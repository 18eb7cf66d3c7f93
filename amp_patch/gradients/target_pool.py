"""The one memory of the gradients that small masters get on a CPU: few calls of torch fill it.

Knows gradients and the tensors that they are unscaled into; no parameter and no loss scaler.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from amp_patch.common.scales import Scale
from amp_patch.kernels import GradCheck, small_tensors, torch_kernels
from amp_patch.kernels.getters import IS_SPARSE
from amp_patch.kernels.reusable import Reusable
from amp_patch.kernels.without_grad import without_grad
from amp_patch.weights.parameter_lists import are_same

from .rounded_gradients import write


class InPlaceCheck:
    """Unscales memory on the CPU in place, and checks it, by one call of torch.

    Attributes:
        flag: float32, one element: what a check has found, until the next one.
    """

    def __init__(self) -> None:
        self.flag = torch.zeros(1, dtype=torch.float32, device="cpu")
        # A scale and its inverse, in one field: an interrupt may come between two.
        self._factor = 1.0, torch_kernels.inverse_of(1.0)

    def run(self, memory: list[Tensor], grads: list[Tensor], scale: float) -> GradCheck:
        """Divide ``memory``, which is that of ``grads``, by the scale; return what was found."""
        if scale != self._factor[0]:
            self._factor = scale, torch_kernels.inverse_of(scale)
        found_inf = self.flag.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(memory, found_inf, self._factor[1])
        return GradCheck(grads, [found_inf])


class TargetPool:
    """Tensors in one memory, into which the same half gradients are unscaled step after step.

    Fp32 gradients beside them, those of norms, are unscaled where they are, by the same call.

    Args:
        memory: of all targets, in a list for torch's calls.
        targets: fp32, one for each half gradient.
        check: of this memory.
        reusable: knows whether anybody holds a target, or the flag of ``check``, apart from the
            caller, who is to hold them as long.
        have_target: of each gradient, whether it has a target, or is unscaled in place.

    Attributes:
        targets: as given.
    """

    def __init__(
        self,
        memory: list[Tensor],
        targets: list[Tensor],
        check: InPlaceCheck,
        reusable: Reusable,
        have_target: list[bool],
    ) -> None:
        self._memory, self.targets = memory, targets
        self._check, self._reusable = check, reusable
        self._have_target = have_target
        self._in_place = [] if all(have_target) else list(map(operator.not_, have_target))
        # Where the gradients of later passes go first; None until there is one.
        self._more: TargetPool | None = None

    @without_grad
    def take(self, grads: list[Tensor], scale: Scale | None, shows: bool) -> GradCheck | None:
        """Copy half gradients to the targets, and unscale and check their memory.

        Args:
            grads: as a backward wrote them.
            scale: see `GradientBuffers.unscale`.
            shows: whether the half gradients are to hold what is unscaled, too.

        Returns:
            What was found, with the targets, and the gradients that have none, in the order of all.
            None, with nothing done, where the scale is a tensor or below 1, somebody holds a
            target, or a gradient is sparse, which torch does not copy.
        """
        targets, memory, unscaled = self.targets, self._memory, self.targets
        if isinstance(scale, Tensor) or (scale is not None and scale < 1.0):
            return None
        if not self._reusable.are_free():
            return None
        if self._in_place:
            own = list(compress(grads, self._in_place))
            if any(map(IS_SPARSE, own)):
                return None
            memory, unscaled = [*memory, *own], self._beside(grads)
            grads = list(compress(grads, self._have_target))
        try:
            torch._foreach_copy_(targets, grads)
        except RuntimeError:
            return None
        if scale is None:
            return GradCheck(unscaled, [])
        check = self._check.run(memory, unscaled, scale)
        if shows and scale != 1.0:
            write(grads, targets)
        return check

    def _beside(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the targets, and the gradients that have none, in the order of all."""
        targets = iter(self.targets)
        rows = zip(grads, self._have_target, strict=True)
        return [next(targets) if has_target else grad for grad, has_target in rows]

    def are_targets(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether these are what `take` has unscaled into."""
        return are_same(grads, self.targets)

    @without_grad
    def show(self, grads: list[Tensor]) -> None:
        """Let half gradients, of all of these, hold what the targets have."""
        write(list(compress(grads, self._have_target)), self.targets)

    @without_grad
    def take_more(self, grads: list[Tensor], scale: Scale | None) -> GradCheck | None:
        """Do `take` for a later pass of the same step: add to what the targets have.

        What is unscaled in place is the caller's to add up.

        Args:
            grads, scale: see `take`.

        Returns:
            As `take`, of what this pass brought.
        """
        if self._more is None:
            self._more = self._another()
        check = self._more.take(grads, scale, shows=False)
        if check is not None:
            torch._foreach_add_(self._memory, self._more._memory)
        return check

    def _another(self) -> TargetPool:
        memory, made = small_tensors.allocate(self.targets)
        targets: Any = made  # no second list: references to the targets are counted
        check = InPlaceCheck()
        reusable = Reusable([*targets, check.flag])
        return TargetPool(memory, targets, check, reusable, self._have_target)
