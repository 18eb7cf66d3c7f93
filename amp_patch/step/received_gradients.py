"""The half gradients that masters have received for a step, and whether they are as they were then.

Knows parameters and their gradients; no master, and no scale.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from amp_patch.weights.lazy_gradients import look_up

from .param_pairs import same
from .used_gradients import Reference, is_of


class Noted(NamedTuple):
    """What tells a gradient from later ones, and from itself when it was written to."""

    version: int
    reference: Reference


class ReceivedGradients:
    """Half parameters of which a pass has given the gradients to masters; false without any.

    A gradient is told from others by its version and by a reference, for a new tensor may have the
    version of the one that it takes the place of.
    """

    def __init__(self) -> None:
        self._passes: list[tuple[list[Tensor], list[int], Sequence[Reference]]] = []

    def __bool__(self) -> bool:
        return bool(self._passes)

    def note(
        self, params: list[Tensor], versions: list[int], references: Sequence[Reference]
    ) -> None:
        """Note what one pass has given, in the order of ``params``."""
        self._passes.append((params, versions, references))

    def clear(self) -> None:
        """Forget all of it."""
        self._passes.clear()

    def params(self) -> list[Tensor]:
        """Return the parameters, those of the first pass first."""
        return [param for params, _, _ in self._passes for param in params]

    def are_untouched(self) -> bool:
        """Return whether no gradient was written to, cleared, or replaced."""
        return all([_untouched(*row) for row in self._passes])  # noqa: C419  # no generator: faster

    def by_param(self) -> dict[int, Noted]:
        """Return what was noted of each parameter's gradient, by the parameter's id."""
        return {
            id(param): Noted(version, reference)
            for row in self._passes
            for param, version, reference in zip(*row, strict=True)
        }

    def keep(self, params: list[Tensor], noted: Mapping[int, Noted]) -> None:
        """Forget all but these parameters, of which `by_param` has returned ``noted``."""
        kept = [noted[id(param)] for param in params]
        self._passes = [(params, [one.version for one in kept], [one.reference for one in kept])]


def _untouched(params: list[Tensor], versions: list[int], references: Sequence[Reference]) -> bool:
    grads: list[Any] = look_up(_GRAD, params)
    try:
        if list(map(_VERSION, grads)) != versions:
            return False
    except AttributeError:  # None has no version
        return False
    return same(grads, references) or all(map(is_of, references, grads))


_GRAD = operator.attrgetter("grad")
_VERSION = operator.attrgetter("_version")
