"""Looks at the backward of what stands between the models and a loss, as it runs.

That code is the script's own and cannot be run again. Knows autograd's graphs only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch.levels import HALVES

from .places import readable
from .ranges import Range, can_look, largest_scale, numbers_of, ranges_of
from .undefined import Given, given_to, is_unpacked, saved_by, saved_names, spoils
from .watch import Counts

#: Nodes that are looked at: the graph of a loss has a few; more is a model that nobody initialized.
_MOST_NODES = 500
#: The default floor of a dynamic loss scale.
_SMALLEST_SCALE = 2.0**-24
#: The smallest number of float16 above 0.
_SMALLEST = 2.0**-24
#: Operators that compute nothing, on the outputs of a model in half.
_MOVING = {
    *("alias", "as_strided", "cat", "clone", "diagonal", "expand", "flip", "gather", "index"),
    *("index_select", "masked_select", "permute", "repeat", "reshape_alias", "roll", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind"),
    *("unsafe_view", "unsqueeze", "view"),
}


#: A file and the number of a line.
Line = tuple[str, int] | None


class LossStep(NamedTuple):
    """The first backward of an operator outside of the models that was not finite.

    Attributes:
        operator: such as "sqrt", or "cast".
        given, made: the ranges of the gradients that it got, and returned.
        fits: the largest power of two that is no overflow as a loss scale; None: not found.
        cast: gradients that it made half of float32 ones, as they are at a loss scale of 1.
        argument: what the operator was given in the forward, where it may fail at that.
        line: that has called it in the forward, where it is known.
    """

    operator: str
    given: tuple[Range, ...]
    made: tuple[Range, ...]
    fits: float | None
    cast: tuple[Tensor, ...]
    argument: Given | None
    line: Line


class Spoiled(NamedTuple):
    """The first operator of a loss that is not finite whose saved tensors show it.

    Attributes:
        operator: such as "log".
        saved: the ranges of these tensors.
        argument: what it was given, where it may fail at that.
        line: that has called it, where it is known.
    """

    operator: str
    saved: tuple[Range, ...]
    argument: Given | None
    line: Line


class LossWatch:
    """Hooks on the nodes of a loss's graph, down to the outputs of the models.

    Args:
        loss: before it is scaled.
        scale: that it is multiplied by.
        made_in_model: whether a node belongs to a model.
        line_of: the line that has made a node, by the node's number.

    Attributes:
        loss: the loss's range.
        found: what was not finite first; None where all was.
        is_whole: whether all of the graph is looked at.
        in_half: an operator whose result is in half, "" for none.
        counts: of the gradients that come to the models in float16 from float32.
        spoiled_by: of a loss that is not finite, see `Spoiled`; None where no operator shows it.
    """

    def __init__(
        self,
        loss: Tensor,
        scale: float,
        made_in_model: Callable[[Any], bool],
        line_of: Callable[[int], Line],
    ) -> None:
        self.line_of = line_of
        self.loss = ranges_of({"loss": loss.detach()})
        self.scale = scale
        self.found: LossStep | None = None
        self.in_half = ""
        self.counts = Counts()
        waiting: list[Any] = [loss.grad_fn]
        seen: set[Any] = set()
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            if node is None or node in seen or made_in_model(node):
                continue
            seen.add(node)
            if node.name() != "torch::autograd::AccumulateGrad":
                node.register_hook(_Look(self, readable(node.name())))
                if any(one.dtype in HALVES for one in node._input_metadata):
                    name = readable(node.name())
                    if name not in _MOVING and not (self.in_half and name == "cast"):
                        self.in_half = name
            waiting += [following for following, _ in node.next_functions]
        self.is_whole = not waiting
        not_finite = any(one.kinds for one in self.loss)
        self.spoiled_by: Spoiled | None = None
        # torch refuses what was saved and has been written to since; the backward says so
        with contextlib.suppress(RuntimeError):
            self.spoiled_by = self._first_not_finite(seen) if not_finite else None

    def _first_not_finite(self, nodes: set[Any]) -> Spoiled | None:
        """Return the first operator that was given or returned inf or NaN, or what makes it."""
        for node in sorted(nodes, key=lambda one: one._sequence_nr()):
            given, ranges = given_to(node), ranges_of(saved_by(node))
            is_shown = any(set(one.kinds) - {"-inf"} for one in ranges)  # -inf may be a mask
            if is_shown or (given is not None and spoils(given)):
                line = self.line_of(node._sequence_nr())
                return Spoiled(readable(node.name()), ranges, given, line)
        return None


class _Look:
    """The hook of one node, which it does not hold: it would never be freed."""

    def __init__(self, watch: LossWatch, operator: str) -> None:
        self._watch, self._operator = watch, operator

    def __call__(self, made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        if self._watch.found is not None:
            return
        if are_finite(made):
            self._count(made, given)
        if are_finite(made) or not are_finite(given):
            return
        ranges = ranges_of(enumerate_as("gradient", given)), ranges_of(enumerate_as("result", made))
        other_scales = self._at_other_scales(made, given)
        node = torch._C._current_autograd_node()
        argument = None if node is None else given_to(node)
        line = None if node is None else self._watch.line_of(node._sequence_nr())
        self._watch.found = LossStep(self._operator, *ranges, *other_scales, argument, line)

    @torch.no_grad()
    def _count(self, made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """Count what becomes 0 where a gradient of float32 is cast to float16."""
        node: Any = torch._C._current_autograd_node()
        targets = () if node is None else node.next_functions
        for index, (one, (following, place)) in enumerate(zip(made, targets, strict=False)):
            # Ranks would have to count a part of a gradient together.
            if following is None or type(one) is not Tensor or not can_look(one) or one.is_sparse:
                continue
            wide: Tensor | None = one
            if one.dtype is torch.float16:
                wide = given[0] if self._operator == "cast" else _wide(one, index, given)
            elif following._input_metadata[place].dtype is not torch.float16:
                continue  # else the engine casts it
            if wide is not None:
                half = wide.to(torch.float16)
                self._watch.counts.grads += half.numel()
                self._watch.counts.nonzero += int(half.count_nonzero())
                self._watch.counts.add_cast(wide, half)

    @torch.no_grad()
    def _at_other_scales(
        self, made: tuple[Any, ...], given: tuple[Any, ...]
    ) -> tuple[float | None, tuple[Tensor, ...]]:
        """Return the largest loss scale that fits, and what is cast to half at a scale of 1."""
        are_wide = not any(can_look(one) and one.dtype in HALVES for one in given)
        # A division by zero is not finite at any scale. Half gradients would be 0 at the smallest.
        for scale in (1.0, _SMALLEST_SCALE) if are_wide else (1.0,):
            factor = scale / self._watch.scale
            again = _made_again([one * factor if can_look(one) else one for one in given])
            if again and are_finite(again):
                pairs = zip(again, made, strict=True)
                halves = [one for one, shown in pairs if shown is not None and _is_half(shown)]
                peak = max((numbers_of(one).abs().max().item() for one in halves), default=0.0)
                fits = largest_scale(peak / scale) if peak else None
                return fits, tuple(halves) if are_wide and scale == 1.0 else ()
        return None, ()


def _wide(half: Tensor, index: int, given: tuple[Any, ...]) -> Tensor | None:
    """Return a gradient as it was before the node whose hook runs has rounded it to float16.

    None where it was given half ones, or is not asked. It makes the gradient again, of larger ones.

    Args:
        half: the gradient.
        index: of the gradient among those that the node has made.
        given: to the node.
    """
    if any(not can_look(one) or one.dtype in HALVES for one in given):
        return None
    largest = max(half.abs().max().item(), _SMALLEST)
    factor = largest_scale(largest)
    again = _made_again([one * factor for one in given])
    return again[index].float() / factor if index < len(again) else None


def _is_half(tensor: Tensor) -> bool:
    return can_look(tensor) and tensor.dtype is torch.float16


def _made_again(given: list[Any]) -> tuple[Any, ...]:
    """Return what the node whose hook runs makes of other gradients; () where it is not asked.

    The engine casts it afterwards to the dtype of what it is a gradient of. A function of the
    user's own may count its calls, and what a hook unpacks may be gone.
    """
    node: Any = torch._C._current_autograd_node()
    if isinstance(node, torch.autograd.function.BackwardCFunction) or any(
        is_unpacked(getattr(node, f"_raw_saved_{name}")) for name in saved_names(node)
    ):
        return ()
    try:
        made = node(*given)
    except RuntimeError:  # of a node that takes no plain tensors: nothing is known then
        return ()
    return made if isinstance(made, tuple) else (made,)


def enumerate_as(name: str, tensors: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return tensors with names of a number each."""
    return [(f"{name} {number}", tensor) for number, tensor in enumerate(tensors)]


@torch.no_grad()
def are_finite(tensors: tuple[Any, ...]) -> bool:
    """Return whether all numbers that can be read are."""
    bounds = [torch.stack(torch.aminmax(numbers_of(one))) for one in tensors if can_look(one)]
    return all(math.isfinite(one) for bound in bounds for one in bound.tolist())
