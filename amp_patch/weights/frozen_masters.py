"""Half parameters whose masters a script has frozen, as what trains one optimizer at a time does.

Lightning's `toggle_optimizer` sets ``requires_grad`` of all that the other optimizers hold, which
are masters; it is the half parameters that must not learn meanwhile. Knows pairs, and no forward.
"""

from __future__ import annotations

import weakref

import torch

from amp_patch.kernels.default_device import without_default_device
from amp_patch.kernels.getters import REQUIRES_GRAD

from .master_pairs import MasterPairs
from .parameter_lists import look_up

#: Those that have frozen half parameters since the last step.
_freezing: list[weakref.ref[FrozenMasters]] = []


def end_turn() -> None:
    """The step of an optimizer is over: what was frozen for its turn learns again.

    The next call of a model freezes it anew, if its masters are frozen still. Else a part of a
    model would not learn whose own call, past the model's, nobody sees.
    """
    while _freezing:
        frozen = _freezing.pop()()
        if frozen is not None:
            frozen.let_learn()


class FrozenMasters:
    """Hands on to half parameters what a script sets ``requires_grad`` of their masters to.

    A half parameter that the script had frozen itself before stays so when its master learns again.

    Args:
        pairs: of one optimizer.
    """

    def __init__(self, pairs: MasterPairs) -> None:
        self._pairs = pairs
        self._learned: list[bool] = []
        self._froze: set[int] = set()

    def note_new(self) -> None:
        """Masters were made, which learn as their half parameters do."""
        new = self._pairs.masters[len(self._learned) :]
        self._learned = [*self._learned, *look_up(REQUIRES_GRAD, new)]

    def drop_after(self, count: int) -> None:
        """Masters but the first ``count`` are undone."""
        del self._learned[count:]
        self._froze = {row for row in self._froze if row < count}

    @without_default_device
    def follow(self) -> None:
        """A forward comes, or the masters are handed out: freeze, and let learn again.

        Not within a transform of torch.func, where no `requires_grad` can be set: the forward after
        it follows. Nor without grad, where nothing learns.
        """
        if not torch.is_grad_enabled():
            return
        learn = look_up(REQUIRES_GRAD, self._pairs.masters)
        if learn == self._learned or torch._C._are_functorch_transforms_active():
            return
        before, self._learned = self._learned, learn
        for row, (was, now) in enumerate(zip(before, learn, strict=False)):
            if was is not now:
                self._hand_on(row, now)

    def _hand_on(self, row: int, learns: bool) -> None:
        param = self._pairs.params[row]
        if not learns and param.requires_grad:
            if not self._froze:
                _freezing.append(weakref.ref(self))
            self._froze.add(row)
            param.requires_grad_(False)
        elif learns and row in self._froze:
            self._froze.remove(row)
            param.requires_grad_()

    def let_learn(self) -> None:
        """Undo what `follow` has frozen, which may be frozen again."""
        for row in self._froze:
            self._pairs.params[row].requires_grad_()
            self._learned[row] = True
        self._froze.clear()

    def expose(self) -> None:
        """The masters are handed out: each says whether its half parameter learns."""
        self.follow()
        for param, master in self._pairs:
            if param.requires_grad is not master.requires_grad:
                master.requires_grad_(param.requires_grad)
        self._learned = look_up(REQUIRES_GRAD, self._pairs.masters)
