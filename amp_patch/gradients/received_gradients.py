"""The half gradients that masters have received for a step, and whether they are as they were then.

Knows pairs of parameters and masters; no scale, and not what follows of a change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from amp_patch import kernels
from amp_patch.distributed.shards import local
from amp_patch.kernels.default_device import without_default_device
from amp_patch.kernels.getters import GRAD, VERSION
from amp_patch.kernels.tensor_values import is_any, same_numbers
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.parameter_lists import are_complete, are_same, look_up, stored_grad

from .half_gradients import HalfGradients
from .param_pairs import ParamPairs
from .unseen_gradient_writes import UnseenGradientWrites
from .used_gradients import Reference, are_of, is_of


class Noted(NamedTuple):
    """What tells a gradient from later ones, and from itself when it was written to."""

    version: int
    reference: Reference


class Changes(NamedTuple):
    """What a script has done to noted gradients.

    Attributes:
        cleared: parameters whose gradient is gone, or 0 now, and their masters.
        given: parameters with another gradient, of other values, and their masters.
        written: gradients with other values than they had.

    One with the same values is none of these: `DistributedDataParallel` moves gradients to new
    buckets before its second backward (``gradient_as_bucket_view=True``), and a script that
    replaces NaN in place finds none most often.
    """

    cleared: ParamPairs
    given: ParamPairs
    written: list[Tensor]


#: Parameters, the versions of their gradients, references to these, and to those of masters.
_Pass = tuple[list[Tensor], list[int], Sequence[Reference], Sequence[Reference]]


class ReceivedGradients:
    """Half parameters of which a pass has given the gradients to masters; false without any.

    A gradient is told from others by its version and by a reference, for a new tensor may have the
    version of the one that it takes the place of. In the first passes its bits are watched as well.

    Args:
        lazy: what keeps the masters' gradients until they are read; None: they are stored.
        count_data_reads: returns how often a script has read the ``.data`` of a half tensor, by
            which it may have written without a version.

    Attributes:
        stepped: the passes that `end` has ended, until others are noted.
    """

    def __init__(
        self,
        lazy: LazyGradients | None = None,
        count_data_reads: Callable[[], int] = lambda: 0,
    ) -> None:
        self._lazy, self._count_data_reads = lazy, count_data_reads
        self._passes: list[_Pass] = []
        self.stepped: list[_Pass] = []
        self._data_reads = 0  # as counted when `stepped` was ended
        self._unseen = UnseenGradientWrites()
        self._unreached: dict[int, Tensor] = {}  # by the id of a parameter

    def __bool__(self) -> bool:
        return bool(self._passes)

    def note(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        references: Sequence[Reference],
        stored: Sequence[Reference],
        unreached: Iterable[Tensor] = (),
    ) -> None:
        """Note what one pass has given, the last one of these parameters, in their order.

        Args:
            params: half parameters.
            grads: theirs.
            references: to these.
            stored: references to what masters have got; none to what waits.
            unreached: trained half parameters of the optimizer that it has not come to.
        """
        source = self._source_of(grads)  # which has asked these very gradients
        versions = list(map(VERSION, grads)) if source is None else source.versions
        self._passes = [row for row in self._passes if not are_same(row[0], params)]
        self._passes.append((params, versions, references, stored))
        self.stepped = []  # which may keep small gradients alive
        if unreached or self._unreached:
            known = set(map(id, self.params()))
            others = [*self._unreached.values(), *unreached]
            self._unreached = {id(one): one for one in others if id(one) not in known}
        # A step that unscales half gradients later refuses changed ones itself.
        are_read = self._lazy is None or not isinstance(self._lazy.source, HalfGradients)
        if are_read and self._unseen.looks.left:
            self._unseen.note(params)

    def all_wait(self, grads: list[Tensor]) -> bool:
        """Return whether a fused step unscales all of these, so that masters have got none."""
        return self._source_of(grads) is not None

    def _source_of(self, grads: list[Tensor]) -> HalfGradients | None:
        source = None if self._lazy is None else self._lazy.source
        if isinstance(source, HalfGradients) and are_same(source.grads, grads):
            return source
        return None

    def clear(self) -> None:
        """Forget all of it, as if masters had received none."""
        self._passes, self._unreached = [], {}
        if self._unseen.sums:
            self._unseen.forget()

    def end(self) -> None:
        """The gradients were stepped or cleared: no step is to use them any more."""
        self.stepped, self._data_reads = self._passes, self._count_data_reads()
        self.clear()

    def are_as_stepped(self) -> bool:
        """Return whether all are there still that were when they ended, and nobody wrote to them.

        A device is not asked for it.
        """
        if not self.stepped or self._count_data_reads() != self._data_reads:
            return False
        for params, versions, references, _ in self.stepped:
            grads: list[Any] = look_up(GRAD, params)
            # of another class nobody counts the reads of ``.data``
            if {*map(type, grads)} != {Tensor} or not _are_noted(grads, versions, references):
                return False
        return True

    def note_again(self, params: list[Tensor]) -> None:
        """Note the gradients of some parameters as they are now, where they were noted before."""
        self._passes = [_as_they_are_now(row, params) for row in self._passes]
        if self._unseen.looks.left:
            self._unseen.note(params)

    def params(self) -> list[Tensor]:
        """Return the parameters, those of the first pass first."""
        return [param for row in self._passes for param in row[0]]

    @without_default_device
    def are_untouched(self) -> bool:
        """Return whether no gradient was written to, cleared, or replaced."""
        for row in self._passes:
            if not _untouched(*row[:3]):
                return False
        return not (self._unseen.sums and self._unseen.written(self.params()))

    def are_more(self) -> bool:
        """Return whether there are gradients where no pass has left any: a script's."""
        if not self._unreached:  # as most often
            return False
        return any(stored_grad(one) is not None for one in self._unreached.values())

    def changes(self, pairs: ParamPairs, by_value: bool = False) -> Changes:
        """Return what was done to the noted gradients of these parameters.

        Args:
            pairs: of the optimizer.
            by_value: whether each is asked for 0, which a write through ``.data`` leaves unseen.
        """
        noted, written = self._by_param(), self._unseen.written(self.params())
        cleared: list[tuple[Tensor, Tensor]] = []
        given: list[tuple[Tensor, Tensor]] = []
        changed: list[Tensor] = []
        for param, master in pairs.halves():
            known, grad = noted.get(id(param)), param.grad
            if known is None:
                continue
            is_noted = is_of(known.reference, grad)
            is_whole = grad is not None and is_noted and grad._version == known.version
            is_whole = is_whole and id(param) not in written
            if is_whole and not by_value:
                continue
            if grad is None or not is_any(kernels.values(grad)):
                cleared.append((param, master))
            elif is_whole or _is_copy(grad, None if is_noted else known.reference, master):
                continue
            elif is_noted:
                changed.append(grad)
            else:
                given.append((param, master))
        return Changes(ParamPairs.of(cleared), ParamPairs.of(given), changed)

    def stored(self) -> set[int]:
        """Return the ids of the gradients that masters have got of passes, and no script's."""
        made = () if self._lazy is None else self._lazy.stored
        references = chain(made, *(stored for *_, stored in self._passes))
        found = (one if isinstance(one, Tensor) else one() for one in references)
        return {id(grad) for grad in found if grad is not None}

    def keep(self, params: list[Tensor], cleared: Collection[int]) -> None:
        """Forget all but what came last of these parameters, less those of the cleared ids."""
        noted = self._by_param()
        self._unreached |= {id(one): one for one in self.params() if id(one) in cleared}
        kept = [param for param in params if id(param) in noted and id(param) not in cleared]
        versions = [noted[id(param)].version for param in kept]
        references = [noted[id(param)].reference for param in kept]
        stored = list(chain.from_iterable(stored for *_, stored in self._passes))
        self._passes = [(kept, versions, references, stored)] if kept else []

    def _by_param(self) -> dict[int, Noted]:
        """Return what was noted last of each parameter's gradient, by the parameter's id."""
        return {
            id(param): Noted(version, reference)
            for row in self._passes
            for param, version, reference in zip(*row[:3], strict=True)
        }


def _as_they_are_now(row: _Pass, again: list[Tensor]) -> _Pass:
    """Return what is noted of a pass, anew for some parameters."""
    params, versions, references, stored = row
    grads: list[Any] = look_up(GRAD, params)
    if are_same(params, again) and are_complete(grads) and are_of(references, grads):
        return params, list(map(VERSION, grads)), references, stored
    ids, versions, references = set(map(id, again)), list(versions), list(references)
    for place, param in enumerate(params):
        grad = stored_grad(param) if id(param) in ids else None
        if grad is not None:
            versions[place] = grad._version
            if not is_of(references[place], grad):
                references[place] = weakref.ref(grad)
    return params, versions, references, stored


def _is_copy(grad: Tensor, reference: Reference | None, master: Tensor) -> bool:
    """Return whether a gradient has the numbers of the one that it was, or took the place of.

    Args:
        grad: of the half parameter.
        reference: to the earlier one, which others may have written to by now; None: it is this.
        master: of the parameter. It has the numbers, unless its gradient waits, or is the sum of
            several passes, which a fused step does not show.
    """
    earlier = reference() if isinstance(reference, weakref.ref) else reference
    return any(_are_same_numbers(grad, one) for one in (stored_grad(master), earlier))


def _are_same_numbers(grad: Tensor, earlier: Tensor | None) -> bool:
    if earlier is None or grad.shape != earlier.shape or grad.is_sparse or earlier.is_sparse:
        return False
    return bool(same_numbers(local(grad), local(earlier)))


def _untouched(params: list[Tensor], versions: list[int], references: Sequence[Reference]) -> bool:
    return _are_noted(look_up(GRAD, params), versions, references)


def _are_noted(grads: list[Any], versions: list[int], references: Sequence[Reference]) -> bool:
    """Return whether these are the gradients that were noted, and nobody wrote to them."""
    try:
        if list(map(VERSION, grads)) != versions:
            return False
    except AttributeError:  # None has no version
        return False
    # Where all are small, the references are the gradients themselves.
    return are_same(references, grads) or are_of(references, grads)
