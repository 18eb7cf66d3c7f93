"""What the host can still tell of a check when a device's outcome comes late.

By then the gradients may be gone or written to: none is kept for it. What is not known any more is
said to be unknown. Knows parameters and the check of one pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from amp_patch.distributed.shards import local
from amp_patch.kernels import Flags, GradCheck
from amp_patch.weights.parameter_lists import Tensors


class LateCheck(GradCheck):
    """A check that overflowed, as the host sees it afterwards.

    Args:
        check: of the pass; its flags are kept, its gradients are not.
        params: those that got a gradient, in the check's order; held weakly.
    """

    def __init__(self, check: GradCheck, params: Sequence[Tensor]) -> None:
        super().__init__([], [])
        self._kept = check.flags()
        self._params = weakref.ref(params) if isinstance(params, Tensors) else None
        # One of the gradients speaks for all: they are cleared and written to together.
        first = params[0].grad if params else None
        self._first = None if first is None else (weakref.ref(first), first._version)

    def flags(self) -> Flags | None:
        """See `GradCheck.flags`."""
        return self._kept

    @property
    def overflow(self) -> bool:
        """True: it is asked only where the step was skipped."""
        return True

    @property
    def is_known(self) -> bool:
        """Whether `nonfinite` can tell."""
        return bool(self.params()) and (self._kept is not None or self.gradients() is not None)

    def params(self) -> list[Tensor]:
        """Return the parameters, or none where the optimizer is gone or steps others now."""
        params = None if self._params is None else self._params()
        return [] if params is None else list(params)

    def nonfinite(self) -> list[tuple[int, str]]:
        """See `GradCheck.nonfinite`; empty where nobody can tell any more. Waits for the device."""
        if self._kept is not None:
            return self._kept.nonfinite()
        return GradCheck(list(map(local, self.gradients() or [])), []).nonfinite()

    def gradients(self) -> list[Tensor] | None:
        """Return the gradients of that pass, half and scaled ones maybe; None if they are gone."""
        grads = [param.grad for param in self.params() if param.grad is not None]
        if self._first is None or not grads or len(grads) < len(self.params()):
            return None
        reference, version = self._first
        first = reference()
        is_same = first is not None and first is grads[0] and first._version == version
        return grads if is_same else None
