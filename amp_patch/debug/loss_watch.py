"""Looks at the backward of what stands between the models and a loss, as it runs.

That code is the script's own and cannot be run again. Knows autograd's graphs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
