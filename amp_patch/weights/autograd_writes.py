"""Gradients of masters that autograd itself has written: of a loss that is computed of masters.

A penalty on the weights may be, of those in ``optimizer.param_groups``. Knows no half parameters.
"""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .parameter_lists import stored_grad


class NotedGradients:
    """Gradients as they were when they were noted, told from others by object and version."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[TensorWeakRef, int]] = {}

    def note(self, param: Tensor) -> None:
        """Note the gradient that is stored at a parameter now, if there is one."""
        grad = stored_grad(param)
        if grad is not None:
            self._noted[id(param)] = TensorWeakRef(grad), grad._version

    def knows(self, param: Tensor) -> bool:
        """Return whether a gradient of a parameter was noted, whatever it has become."""
        return id(param) in self._noted

    def has(self, param: Tensor) -> bool:
        """Return whether the gradient that is stored at a parameter was noted, and is as it was."""
        reference, version = self._noted.get(id(param), (None, 0))
        grad = stored_grad(param)
        if grad is None or reference is None or reference() is not grad:
            return False
        return grad._version == version

    def forget(self) -> None:
        """Forget all of them."""
        self._noted.clear()


class AutogradWrites(NotedGradients):
    """Notes what each backward writes to the gradients of the masters that are watched."""

    def watch(self, master: Tensor) -> None:
        """Note, from now on, what a backward writes to this master's gradient."""
        reference = weakref.ref(self)

        def note(master: Tensor) -> None:
            if (writes := reference()) is not None:
                writes.note(master)

        attached = master.requires_grad
        master.requires_grad_()  # torch takes hooks of no other; this one stays when it is frozen
        master.register_post_accumulate_grad_hook(note)
        master.requires_grad_(attached)
