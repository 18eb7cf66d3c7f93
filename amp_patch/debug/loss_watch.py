"""Looks at the backward of what stands between the models and a loss, as it runs.

That code is the script's own and cannot be run again. Knows autograd's graphs only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch.casting.mode import HALVES

from .places import readable
from .ranges import Range, can_look, numbers_of, ranges_of

#: Nodes that are looked at: the graph of a loss has a few; more is a model that nobody initialized.
_MOST_NODES = 500
#: Operators that compute nothing, on the outputs of a model in half.
_MOVING = {
    *("as_strided", "cat", "clone", "expand", "index", "permute", "select", "slice", "split"),
    *("squeeze", "stack", "t", "transpose", "unbind", "unsafe_view", "unsqueeze", "view"),
}


#: What an operator was given, as its node has saved it, and of which numbers inf or NaN comes.
_UNDEFINED: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "acos": ("self", lambda numbers: numbers.abs() > 1),
    "asin": ("self", lambda numbers: numbers.abs() > 1),
    "div": ("other", lambda numbers: numbers == 0),
    "log": ("self", lambda numbers: numbers <= 0),
    "log10": ("self", lambda numbers: numbers <= 0),
    "log1p": ("self", lambda numbers: numbers <= -1),
    "log2": ("self", lambda numbers: numbers <= 0),
}


class LossStep(NamedTuple):
    """The first backward of an operator outside of the models that was not finite.

    Attributes:
        operator: such as "sqrt", or "cast".
        given, made: the ranges of the gradients that it got, and returned.
        uncast: of what does no more than cast, what it cast: a lower loss scale would mend that.
    """

    operator: str
    given: tuple[Range, ...]
    made: tuple[Range, ...]
    uncast: Tensor | None


class LossWatch:
    """Hooks on the nodes of a loss's graph, down to the outputs of the models.

    Args:
        loss: before it is scaled.
        made_in_model: whether a node belongs to a model.

    Attributes:
        loss: the loss's range.
        found: what was not finite first; None where all was.
        in_half: an operator whose result is in half, "" for none.
        spoiled_by: of a loss that is not finite, the first operator whose saved tensors show it,
            and the ranges of these; None where none does.
    """

    def __init__(self, loss: Tensor, made_in_model: Callable[[Any], bool]) -> None:
        self.loss = ranges_of({"loss": loss.detach()})
        self.found: LossStep | None = None
        self.in_half = ""
        waiting: list[Any] = [loss.grad_fn]
        seen: set[Any] = set()
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            if node is None or node in seen or made_in_model(node):
                continue
            seen.add(node)
            if node.name() != "torch::autograd::AccumulateGrad":
                node.register_hook(_Look(self, node))
                if any(one.dtype in HALVES for one in node._input_metadata):
                    name = readable(node.name())
                    if name not in _MOVING and not (self.in_half and name == "cast"):
                        self.in_half = name
            waiting += [following for following, _ in node.next_functions]
        not_finite = any(one.kinds for one in self.loss)
        self.spoiled_by: tuple[str, tuple[Range, ...]] | None = None
        # torch refuses what was saved and has been written to since; the backward says so
        with contextlib.suppress(RuntimeError):
            self.spoiled_by = _first_not_finite(seen) if not_finite else None


def _first_not_finite(nodes: set[Any]) -> tuple[str, tuple[Range, ...]] | None:
    """Return the first operator that was given or returned inf or NaN, or what makes it."""
    for node in sorted(nodes, key=lambda one: one._sequence_nr()):
        operator, saved = readable(node.name()), _saved_by(node)
        name, is_undefined = _UNDEFINED.get(operator, ("", torch.isnan))
        ranges = ranges_of(saved)
        if any(set(one.kinds) - {"-inf"} for one in ranges) or (  # -inf may be a mask
            name in saved and not saved[name].is_complex() and bool(is_undefined(saved[name]).any())
        ):
            return operator, ranges
    return None


def _saved_by(node: Any) -> dict[str, Tensor]:
    """Return the tensors that a node has saved, by their names.

    Left out is what a hook unpacks: a checkpoint would run the script's function again for each.
    """
    start = "_raw_saved_"
    raw = {name.removeprefix(start): name for name in dir(node) if name.startswith(start)}
    return {
        name: value
        for name, attribute in raw.items()
        if getattr(getattr(node, attribute), "unpack_hook", None) is None
        and can_look(value := getattr(node, f"_saved_{name}"))
    }


class _Look:
    """The hook of one node, which it does not hold: it would never be freed."""

    def __init__(self, watch: LossWatch, node: Any) -> None:
        self._watch, self._operator = watch, readable(node.name())
        keeps = getattr(node, "_saved_keepdim", False)
        self._summed = () if keeps else getattr(node, "_saved_dim", ())

    def __call__(self, made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        if self._watch.found is not None or are_finite(made) or not are_finite(given):
            return
        ranges = ranges_of(enumerate_as("gradient", given)), ranges_of(enumerate_as("result", made))
        uncast = self._uncast(made[0], given[0])
        self._watch.found = LossStep(self._operator, *ranges, uncast)

    def _uncast(self, made: Tensor, given: Tensor) -> Tensor | None:
        """Return what was cast to half; None of an operator that computes more."""
        if self._operator == "cast":
            return given.detach()
        if self._operator != "sum" or made.dtype not in HALVES or given.dtype in HALVES:
            return None
        # A sum in fp32 of half numbers hands on its gradient to each of them.
        return given.detach()[_places(self._summed, made.dim())].expand(made.shape)


def _places(summed: tuple[int, ...], dims: int) -> tuple[Any, ...]:
    """Return an index that gives a sum back the dimensions it was over; torch shows -1 unsigned."""
    taken = {(one - 2**64 if one >= 2**63 else one) % dims for one in summed}
    return tuple(None if one in taken else slice(None) for one in range(dims)) if taken else ()


def enumerate_as(name: str, tensors: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return tensors with names of a number each."""
    return [(f"{name} {number}", tensor) for number, tensor in enumerate(tensors)]


@torch.no_grad()
def are_finite(tensors: tuple[Any, ...]) -> bool:
    """Return whether all numbers that can be read are."""
    bounds = [torch.stack(torch.aminmax(numbers_of(one))) for one in tensors if can_look(one)]
    return all(math.isfinite(one) for bound in bounds for one in bound.tolist())
