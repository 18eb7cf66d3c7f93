"""Which parameters of an optimizer are stepped at once on functions of torch.

A step takes memory for the fp32 values of gradients that wait in half, and for what its formula
computes on the way: both for as many parameters as are stepped at once. So large parameters are
stepped some at a time, and on a CPU a parameter that is larger than that in strips. On a GPU more
are stepped at once, for the host must keep it busy. Knows groups and their parameters; no
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.kernels import small_tensors
from amp_patch.kernels.strips import strip_length
from amp_patch.weights.lazy_gradients import LazyGradParameter
from amp_patch.weights.parameter_lists import are_still, in_shares, listed

from .cached_groups import CachedGroup, CachedGroups
from .groups import GroupUpdate

#: How many elements of large parameters are stepped at once, about: a share of all, within these
#: bounds (0.5 MB to 4 MB of fp32 gradients; with less the host would take longer than the step).
_SHARE, _LEAST, _MOST = 1 / 32, 1 << 17, 1 << 20
#: The same where all gradients are there and a GPU steps, which the host must keep busy: a dozen
#: calls step a share, whatever its size.
_SHARE_OF_GPU, _LEAST_OF_GPU = 1 / 4, 1 << 24


class Part(NamedTuple):
    """Parameters of one group that are stepped at once.

    Attributes:
        group: its place in ``optimizer.param_groups``.
        params: in the group's order.
        places: theirs among the parameters of all groups.
        are_large: whether their gradients may wait in half.
        strip: the length of a strip, where there is one parameter that is cut; else None.
        cached: what was looked up for them.
    """

    group: int
    params: list[Tensor]
    places: list[int]
    are_large: bool
    strip: int | None
    cached: CachedGroup


class StepParts:
    """The parameters of one optimizer in parts.

    Args:
        update_type: how the optimizer steps.

    Attributes:
        groups: what is looked up for them in each step.
        every: the parts, those of the first group first; the same list until there are others.
        at_once: how many elements of large parameters are stepped at once.
    """

    def __init__(self, update_type: type[GroupUpdate]) -> None:
        self._update_type = update_type
        self.forget()

    def forget(self) -> None:
        """Let go of what was looked up, the state of the optimizer with it."""
        # First, so that a step after a Ctrl-C here looks all up anew.
        self._params = listed(())
        self._lengths: list[int] | None = None
        self.groups = CachedGroups(self._update_type)
        self.every: list[Part] = []
        self.at_once: float = _LEAST

    def look_up(self, optimizer: Optimizer) -> None:
        """Share the parameters among parts, unless they are those of the last time."""
        groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        params = groups[0] if len(groups) == 1 else list(chain.from_iterable(groups))
        lengths = list(map(len, groups))
        if lengths == self._lengths and are_still(self._params, params):
            return
        self._lengths = None
        elements = sum(map(Tensor.numel, params))
        self.at_once = min(max(_LEAST, _SHARE * elements), _MOST)
        every: list[Part] = []
        begin = 0
        for place, group in enumerate(optimizer.param_groups):
            every += self._parts_of(group, place, begin, elements)
            begin += lengths[place]
        self.every = every
        # Last, for these tell that the parts are those of now.
        self._params, self._lengths = listed(params), lengths

    def _parts_of(
        self, group: dict[str, Any], place: int, begin: int, elements: int
    ) -> Iterator[Part]:
        """Yield the parts of a group.

        Args:
            group: of ``optimizer.param_groups``.
            place: its own there.
            begin: the place of its first parameter among all.
            elements: of all parameters.
        """
        members, is_fused = group["params"], group.get("fused")
        makes_copies = not is_fused and self._update_type.makes_copies
        on_cpu = bool(members) and members[0].is_cpu
        if makes_copies and not on_cpu and not any(map(_is_large, members)):
            shares = in_shares(members, max(_LEAST_OF_GPU, _SHARE_OF_GPU * elements))
        else:
            shares = _shares(members, self.at_once, are_alone=not is_fused and on_cpu)
        for rows in shares:
            own = listed([members[row] for row in rows])
            are_large = _is_large(own[0])
            saves_memory = are_large or makes_copies
            strip = _length_of_strips(own, self.at_once) if saves_memory else None
            cached = CachedGroup(self.groups, self._update_type())
            yield Part(place, own, [begin + row for row in rows], are_large, strip, cached)


def _is_large(param: Tensor) -> bool:
    """Return whether a parameter's gradient may wait in half, as `LargeInHalf` has it."""
    return isinstance(param, LazyGradParameter) and not small_tensors.is_small(param)


def _length_of_strips(params: Sequence[Tensor], at_once: float) -> int | None:
    """Return how long the strips of a part are; None where it is stepped as a whole."""
    if len(params) > 1 or not params[0].is_cpu:
        return None
    return strip_length(params[0].numel(), at_once)


def _shares(params: Sequence[Tensor], at_once: float, are_alone: bool) -> Iterator[list[int]]:
    """Yield the rows that are stepped at once: all but the large ones, then some of these.

    Args:
        params: of one group.
        at_once: the most elements of large ones, but for one that has more.
        are_alone: whether the optimizer's own step takes one parameter after the other, on a CPU.
            All large ones count then, for what is computed for many takes memory for many.
    """
    are_large = [
        _is_large(one) or (are_alone and not small_tensors.is_small(one)) for one in params
    ]
    rest = [row for row, is_large in enumerate(are_large) if not is_large]
    if rest:
        yield rest
    large = [row for row, is_large in enumerate(are_large) if is_large]
    for share in in_shares([params[row] for row in large], at_once):
        yield [large[place] for place in share]
