"""Gradients that the backward of another optimizer's scaled loss wrote; knows no optimizer.

Say that a generator's loss runs through the discriminator, whose optimizer was not given to that
``scale_loss``: its gradients are multiplied by a loss scale that nobody takes out again.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, compress
from typing import NamedTuple

from torch import Tensor

from amp_patch.common.scales import Scale, kept
from amp_patch.weights.parameter_lists import are_same, stored_grad, stored_grads

from .any_values import are_any
from .param_pairs import ParamPairs


class Watch(NamedTuple):
    """Parameters with their gradients as they were.

    Attributes:
        counted: what the caller counts: another number later says that something came between.
    """

    params: Sequence[Tensor]
    grads: list[Tensor | None]
    versions: list[int]
    counted: int

    @classmethod
    def of(cls, params: Sequence[Tensor], counted: int = 0) -> Watch:
        """Return parameters as they are before a backward that is not meant to reach them."""
        grads = stored_grads(params)
        return cls(params, grads, _versions(grads), counted)

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """Return those that have got a gradient since then, or another one, with it."""
        now = stored_grads(self.params)
        if self._are_as_noted(now):  # as nearly always
            return []
        return [
            (param, grad)
            for param, grad, before, version in zip(
                self.params, now, self.grads, self.versions, strict=True
            )
            if grad is not None and (grad is not before or grad._version != version)
        ]

    def is_unchanged(self) -> bool:
        """Return whether no gradient was written to, replaced, cleared or given since then."""
        return self._are_as_noted(stored_grads(self.params))

    def _are_as_noted(self, now: list[Tensor | None]) -> bool:
        return are_same(now, self.grads) and _versions(now) == self.versions


class ForeignGradients:
    """Which of one optimizer's parameters have such gradients.

    Attributes:
        found: parameters with these gradients, of which some may be gone; None for one that an own
            pass has added to. Cleared by whoever clears or steps all gradients.
        own_passes: how many passes of the optimizer itself have ended, perhaps inside of the one
            that is watched; counted by whoever ends them.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, weakref.ref[Tensor] | None]] = []
        self.own_passes = 0
        self._scale: Scale = 1.0

    def watch(self, params: Sequence[Tensor]) -> Watch:
        """Return what `note` needs after a backward that these parameters are not meant to get."""
        return Watch.of(params, self.own_passes)

    def note(self, watch: Watch, unscaled: Iterable[Sequence[Tensor]], scale: Scale) -> None:
        """Find out what that backward wrote.

        Args:
            watch: what `watch` returned before it.
            unscaled: the parameters whose gradients other optimizers unscale, for each of these.
            scale: of its loss.
        """
        written = watch.written() if watch.counted == self.own_passes else []
        if written:
            known = set(map(id, chain.from_iterable(unscaled)))
            self.found += [
                (param, weakref.ref(now)) for param, now in written if id(param) not in known
            ]
            self._scale = kept(scale)

    def scale_of(self, param: Tensor) -> Scale | None:
        """Return what such a gradient of a parameter is multiplied by; None where it has none.

        That of the last such backward: those before it are expected to be cleared.
        """
        return self._scale if any(one is param for one, _ in self._left()) else None

    def add_to(self) -> None:
        """A pass of the optimizer itself begins, and adds to those not dropped or set to zero."""
        left = self._left()
        are_written = are_any([grad for _, grad in left])  # a device is waited for once
        self.found[:] = [(param, None) for param, _ in compress(left, are_written)]

    def drop(self, cleared: Collection[int]) -> None:
        """The user clears the gradients of these parameters, by their ids."""
        self.found = [row for row in self.found if id(row[0]) not in cleared]

    def let_go(self, gone: Iterable[Tensor]) -> list[tuple[Tensor, Scale]]:
        """Forget parameters that the optimizer holds no more; return which have one, and by what.

        Those stay to which an own pass has added, at a scale that nobody knows: they are refused.
        """
        ids = {id(param) for param, _ in self._left()}.intersection(map(id, gone))
        rows = [row for row in self.found if id(row[0]) in ids and row[1] is not None]
        self.found = [row for row in self.found if id(row[0]) not in ids or row[1] is None]
        return [(param, self._scale) for param, _ in rows]

    def drop_given(self, pairs: ParamPairs) -> None:
        """Forget those of half parameters whose masters the script has given others: not read."""
        given = {id(param) for param, master in pairs.halves() if stored_grad(master) is not None}
        self.found = [row for row in self.found if row[1] is None or id(row[0]) not in given]

    def are_left(self) -> bool:
        """Return whether there are any, neither cleared nor replaced."""
        return bool(self.found) and bool(self._left())

    def refuse(self, caller: str, params: Iterable[Tensor]) -> None:
        """Raise where some of these parameters have any.

        Raises:
            RuntimeError: as said.
        """
        # of several backwards, perhaps
        count = len({id(param) for param, _ in self._left()}.intersection(map(id, params)))
        if count:
            raise RuntimeError(
                f"{caller} needs unscaled gradients; got {count} that the backward() of a "
                "scale_loss() wrote which was not given this optimizer: they are multiplied by "
                "the loss scale. Call amp.scale_loss(loss, [optimizer, other_optimizer]) with "
                "all that the loss is to train, or optimizer.zero_grad() before its own "
                "backward()."
            )

    def _left(self) -> list[tuple[Tensor, Tensor]]:
        now = ((param, stored_grad(param), noted) for param, noted in self.found)
        return [
            (param, grad)
            for param, grad, noted in now
            if grad is not None and (noted is None or grad is noted())
        ]


def _versions(grads: list[Tensor | None]) -> list[int]:
    """Return 0 for no gradient."""
    return [0 if grad is None else grad._version for grad in grads]
