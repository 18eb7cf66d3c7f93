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
        uncast: of a cast, the gradient that it got: what a lower loss scale would bring.
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
                node.register_hook(_Look(self, node.name()))
                if any(one.dtype in HALVES for one in node._input_metadata):
                    name = readable(node.name())
                    self.in_half = name if name not in _MOVING else self.in_half
            waiting += [following for following, _ in node.next_functions]


class _Look:
    """The hook of one node."""

    def __init__(self, watch: LossWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        if self._watch.found is not None or are_finite(made) or not are_finite(given):
            return
        ranges = ranges_of(enumerate_as("gradient", given)), ranges_of(enumerate_as("result", made))
        operator = readable(self._name)
        uncast = given[0].detach() if operator == "cast" else None
        self._watch.found = LossStep(operator, *ranges, uncast)


def enumerate_as(name: str, tensors: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return tensors with names of a number each."""
    return [(f"{name} {number}", tensor) for number, tensor in enumerate(tensors)]


@torch.no_grad()
def are_finite(tensors: tuple[Any, ...]) -> bool:
    """Return whether all numbers that can be read are."""
    bounds = [torch.stack(torch.aminmax(numbers_of(one))) for one in tensors if can_look(one)]
    return all(math.isfinite(one) for bound in bounds for one in bound.tolist())
