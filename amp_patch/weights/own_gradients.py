"""Which gradients of masters no script has written: shown ones, and what autograd adds to them.

Autograd writes to a master itself where a loss is computed of it: a penalty on the weights may be,
of those in ``optimizer.param_groups``. Knows no half parameters.
"""

from __future__ import annotations

import weakref
from collections import Counter

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch.distributed.shards import local

from .parameter_lists import stored_grad


class OwnGradients:
    """Notes gradients of masters, and follows them through backwards that add to them.

    Attributes:
        sums: by the ids of masters, what backwards have written to them since `forget`.
        keeps_sums: whether what the next backward writes goes there.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}
        self.keeps_sums = True
        self._noted: dict[int, tuple[TensorWeakRef, int]] = {}
        self._before: dict[int, bool] = {}
        # Gradients that are views of one memory have one version: how often autograd has moved it.
        self._additions: Counter[int] = Counter()

    def watch(self, master: Tensor) -> None:
        """Follow, from now on, what backwards write to this master's gradient."""
        reference, watched = weakref.ref(self), weakref.ref(master)

        def before(grad: Tensor) -> None:
            own, master = reference(), watched()
            if own is not None and master is not None:
                own._before_addition(master, grad)

        def after(master: Tensor) -> None:
            if (own := reference()) is not None:
                own._after_addition(master)

        attached = master.requires_grad
        master.requires_grad_()  # torch takes hooks of no other; they stay when it is frozen
        master.register_hook(before)
        master.register_post_accumulate_grad_hook(after)
        master.requires_grad_(attached)

    def note(self, master: Tensor) -> None:
        """Note the gradient that is stored at a master now, if there is one."""
        grad = stored_grad(master)
        if grad is not None:
            self._noted[id(master)] = TensorWeakRef(grad), self._version(grad)

    def note_written(self, master: Tensor) -> None:
        """Note that a script has written to the gradient that is stored at a master, if any."""
        grad = stored_grad(master)
        if grad is not None:
            self._noted[id(master)] = TensorWeakRef(grad), -1  # which no gradient has

    def has(self, master: Tensor) -> bool:
        """Return whether a master's gradient was noted, and only autograd has added to it since."""
        reference, version = self._noted.get(id(master), (None, 0))
        grad = stored_grad(master)
        if grad is None or reference is None or reference() is not grad:
            return False
        return self._version(grad) == version

    def has_stored(self, master: Tensor) -> bool:
        """Return whether a master's gradient was noted, whoever has written to it since."""
        reference, _ = self._noted.get(id(master), (None, 0))
        grad = stored_grad(master)
        return grad is not None and reference is not None and reference() is grad

    def forget(self) -> None:
        """Forget all of them: they were stepped or cleared."""
        self.sums.clear()
        self._noted.clear()
        self._additions.clear()

    def _before_addition(self, master: Tensor, grad: Tensor) -> None:
        is_first = stored_grad(master) is None
        self._before[id(master)] = is_first or self.has(master)
        if self.keeps_sums:
            earlier = None if is_first else self.sums.get(id(master))
            self.sums[id(master)] = grad if earlier is None else earlier + grad

    def _after_addition(self, master: Tensor) -> None:
        reference, _ = self._noted.get(id(master), (None, 0))
        grad, was_own = stored_grad(master), self._before.pop(id(master), False)
        if grad is not None and reference is not None and reference() is grad:
            self._additions[_counted_at(grad)] += 1
        elif was_own:
            self.note(master)

    def _version(self, grad: Tensor) -> int:
        return grad._version - self._additions[_counted_at(grad)]


def _counted_at(grad: Tensor) -> int:
    """Return what has a gradient's version: it, or the memory of a view; 0 for a sparse one."""
    if grad.is_sparse:
        return 0
    own = local(grad)
    return own.untyped_storage()._cdata if own._is_view() or own is not grad else id(grad)
