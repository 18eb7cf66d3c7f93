"""Half weights that somebody writes to while an optimizer steps their masters (O2, O5).

The end of the step rounds the masters into the half weights, over what was written. Gradients that
hooks give to half parameters, or clear, are told of as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from amp_patch.common.warn_once import warn_once
from amp_patch.weights.master_weights import MasterWeights

from .replaced_methods import takes_hooks


class WritesInStep:
    """What hooks write before a step goes to the masters; what the step writes itself is told of.

    Args:
        optimizer: gets a hook.
        wrapped: that it steps itself, or that are stepped in its place, as SAM's; get one, too.
        masters: of its half weights.
        is_foreign: whether its step is not torch's, and may write to whatever it holds.
        follow_gradients: a method that is called after hooks of the script, which may have changed
            half gradients; held weakly, for what owns it owns this.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        wrapped: Sequence[Optimizer],
        masters: MasterWeights,
        is_foreign: bool,
        follow_gradients: Callable[[], None],
    ) -> None:
        self._follow_gradients: Any = weakref.WeakMethod(follow_gradients)
        self._has_hooks = False
        self._masters, self._is_foreign = masters, is_foreign
        self._name = type(optimizer).__name__
        self._before: list[int] | None = None
        self._agreements = self._reads = 0
        self._hook = self._follow_hooks_of(optimizer)
        self._hooks = [self._hook, *map(self._follow_hooks_of, wrapped)]

    def begin(self, optimizer: Optimizer) -> None:
        """A step begins, for which masters and half weights agree."""
        self._before = None  # versions cost a look at each weight: only where somebody may write
        hooks: Any = getattr(optimizer, "_optimizer_step_pre_hooks", ())
        # more than this package's
        self._has_hooks = len(hooks) > 1 or len(_global_optimizer_pre_hooks) > 1
        if self._hook is not None and self._has_hooks:
            hooks.move_to_end(self._hook.id)
        elif not self._is_foreign:
            return
        self._note()

    def tell(self) -> None:
        """The masters were stepped, and are published now: warn of writes to half weights."""
        self._has_hooks = False
        if self._is_foreign and self._is_noted() and self._were_made():  # a kernel may write both
            warn_once(
                "at a level with fp32 masters a step writes to the masters, and its end rounds "
                f"them into the half weights; got {self._name}.step(), which wrote to "
                "half weights itself; that is lost. Let it write to the parameters of "
                "optimizer.param_groups, or write to the model's after optimizer.step()."
            )

    def follow(self) -> bool:
        """Bring what was written since the masters agreed to them; return whether anything was.

        A step that calls another one, ``super().step()`` say, goes on when the masters are
        published.
        """
        if not (self._is_noted() and (self._were_made() or self._may_be_unseen())):
            return False
        self._masters.reconcile()
        self._note()
        return True

    def published(self) -> None:
        """Masters and half weights agree again; the step may go on."""
        if self._before is not None:
            self._note()

    def remove(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            if hook is not None:
                hook.remove()

    def _is_noted(self) -> bool:
        """Return whether it is known how masters and half weights were when they agreed last.

        Not after a forward in the step, as of a closure, which has rounded masters into weights.
        """
        return self._before is not None and self._agreements == self._masters.agreements

    def _were_made(self) -> bool:
        return self._masters.pairs.half_versions() != self._before

    def _may_be_unseen(self) -> bool:
        """Tell whether hooks have read ``.data`` of a half tensor, and may have written to it."""
        return self._masters.count_data_reads() != self._reads

    def _note(self) -> None:
        self._before, self._reads = (
            self._masters.pairs.half_versions(),
            self._masters.count_data_reads(),
        )
        self._agreements = self._masters.agreements

    def _follow_hooks_of(self, optimizer: Optimizer) -> RemovableHandle | None:
        if not takes_hooks(optimizer, "_optimizer_step_pre_hooks"):
            return None
        return optimizer.register_step_pre_hook(self._follow_hooks)

    def _follow_hooks(self, *_: object) -> None:
        """All other hooks were called: what they wrote to half weights and gradients is stepped."""
        self.follow()
        if self._has_hooks and (follow := self._follow_gradients()) is not None:
            follow()
