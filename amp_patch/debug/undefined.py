"""Operators of a loss that make inf or NaN of a number, and whether half precision has made that.

A logarithm of 0 is infinite, and so is the gradient of a square root of 0; a model's output may be
0 in half precision alone. Knows tensors, and what nodes of autograd's graphs save; no model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .places import readable
from .ranges import can_look, numbers_of

_Function = Callable[[Tensor], Tensor]


class _Operator(NamedTuple):
    """What an operator makes inf or NaN of.

    Attributes:
        saved: the name of what its node has saved: its argument, or its result.
        fails_at: tells numbers of which its backward, or its result, is not finite.
        spoils_at: tells numbers of which its result is not; None where that is to be seen.
        function: returns what is saved, of an argument.
    """

    saved: str
    fails_at: _Function
    spoils_at: _Function | None = None
    function: _Function = torch.clone


_OPERATORS = {
    "acos": _Operator("self", lambda x: x.abs() >= 1, lambda x: x.abs() > 1),
    "asin": _Operator("self", lambda x: x.abs() >= 1, lambda x: x.abs() > 1),
    "atanh": _Operator("self", lambda x: x.abs() >= 1, lambda x: x.abs() >= 1),
    "div": _Operator("other", lambda x: x == 0, lambda x: x == 0),
    "log": _Operator("self", lambda x: x <= 0, lambda x: x <= 0),
    "log10": _Operator("self", lambda x: x <= 0, lambda x: x <= 0),
    "log1p": _Operator("self", lambda x: x <= -1, lambda x: x <= -1),
    "log2": _Operator("self", lambda x: x <= 0, lambda x: x <= 0),
    "logit": _Operator("self", lambda x: (x <= 0) | (x >= 1), lambda x: (x <= 0) | (x >= 1)),
    "pow": _Operator("self", lambda x: x <= 0),
    "reciprocal": _Operator("result", lambda x: x == 0, function=torch.reciprocal),
    "rsqrt": _Operator("result", lambda x: x <= 0, function=torch.rsqrt),
    "sqrt": _Operator("result", lambda x: x <= 0, function=torch.sqrt),
}
#: What losses make of a model's outputs before they call such an operator.
_DERIVED: tuple[_Function, ...] = (
    lambda x: x,
    lambda x: -x,
    lambda x: 1 - x,
    lambda x: 1 + x,
)
#: So many numbers of an operator's are looked for among a model's outputs.
_MOST = 4096


class Given(NamedTuple):
    """What an operator was given, as its node has saved that.

    Attributes:
        operator: such as "log".
        numbers: its argument, or its result.
    """

    operator: str
    numbers: Tensor


def given_to(node: Any) -> Given | None:
    """Return what an operator was given that may make inf or NaN of it; None for any other."""
    name = readable(node.name())
    if name in _OPERATORS:
        with contextlib.suppress(RuntimeError):  # it was written to since, or freed
            numbers = saved_by(node).get(_OPERATORS[name].saved)
            return None if numbers is None else Given(name, numbers.detach())
    return None


def spoils(given: Given) -> bool:
    """Return whether the operator's result is not finite, of what it was given."""
    spoils_at = _OPERATORS[given.operator].spoils_at
    if spoils_at is None or given.numbers.is_complex():
        return False
    return bool(spoils_at(given.numbers).any())


@torch.no_grad()
def rounded_to(given: Given, narrow: Tensor, wide: Tensor, half: torch.dtype) -> dict[float, bool]:
    """Return which outputs of a model half precision has rounded to what an operator fails at.

    Args:
        given: to the operator. It must be the outputs, or some of them, or 1 less those, say.
        narrow: outputs that were computed in half.
        wide: the same, computed in float32.
        half: the dtype that rounds.

    Returns:
        For 0, 1 and -1, of those that it is, whether others are exactly so in float32 as well.
    """
    found: dict[float, bool] = {}
    if not (can_look(narrow) and can_look(wide) and narrow.shape == wide.shape):
        return found
    narrow, wide = numbers_of(narrow), numbers_of(wide).float()
    operator, rounded = _OPERATORS[given.operator], wide.to(half).float()
    for derived in _DERIVED:
        if _are_among(given.numbers, _made_of(narrow, half, derived, operator.function)):
            fails = operator.fails_at(derived(narrow.float())) & ~operator.fails_at(derived(wide))
            for bound in (0.0, 1.0, -1.0):
                if bool((fails & (narrow == bound) & (rounded == bound)).any()):
                    found[bound] = bool((wide == bound).any())
            break
    return found


def _made_of(x: Tensor, half: torch.dtype, derived: _Function, function: _Function) -> Tensor:
    """Return what an operator saves of numbers derived from outputs, in half and in float32."""
    arguments = derived(x.float()), derived(x.to(half))
    made = [function(one.float()) for one in arguments] + [function(arguments[1])]
    return torch.cat([one.float().flatten() for one in made])


def _are_among(numbers: Tensor, others: Tensor) -> bool:
    """Return whether all numbers are among others; a single one of many may be so by chance."""
    numbers = numbers_of(numbers).flatten()
    some = numbers[:: max(1, len(numbers) // _MOST)].float().unique()
    is_chance = len(some) == 1 < len(others.unique())
    return not is_chance and bool(torch.isin(some[~some.isnan()], others).all())


def saved_by(node: Any) -> dict[str, Tensor]:
    """Return the tensors that a node has saved, by their names.

    Left out is what a hook unpacks: a checkpoint would run the script's function again for each.

    Raises:
        RuntimeError: one has been written to since, or was freed.
    """
    return {
        name: value
        for name in saved_names(node)
        if not is_unpacked(getattr(node, f"_raw_saved_{name}"))
        and can_look(value := getattr(node, f"_saved_{name}"))
    }


def saved_names(node: Any) -> Iterator[str]:
    """Yield the names of what a node has saved."""
    start = "_raw_saved_"
    return (name.removeprefix(start) for name in dir(node) if name.startswith(start))


def is_unpacked(saved: Any) -> bool:
    """Return whether a hook unpacks a tensor, or some of several, that a node has saved."""
    return getattr(saved, "unpack_hook", None) is not None
