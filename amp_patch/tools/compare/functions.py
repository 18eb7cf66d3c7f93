"""Which functions of torch a script's modules call, and which of these left the finite range.

Knows functions by their names, and where they were called only by what it is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amp_patch.casting.argument_casts import tensors_in
from amp_patch.casting.rules import OPERATORS
from amp_patch.debug.watch import UNWRITTEN

Place = tuple[int, str]


class FunctionWatch(TorchFunctionMode):
    """Counts the calls of functions inside of modules.

    Args:
        place: returns the number of the model and the path of the module that runs; None outside.
    """

    def __init__(self, place: Callable[[], Place | None]) -> None:
        super().__init__()
        self._place = place
        self._calls: dict[tuple[Place, str], list[int]] = {}
        self._nonfinite: dict[tuple[Place, str], None] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        place = self._place()
        name = OPERATORS.get(func.__name__, func.__name__)
        # what memory held before is nobody's inf
        if place is not None and not name.startswith("_") and name not in UNWRITTEN:
            self._note((place, name), _floats((args, kwargs)), _floats(result))
        return result

    def table(self, several: bool) -> dict[str, dict[str, list[int]]]:
        """Return module -> function -> ``[calls, elements of what it returned]``."""
        found: dict[str, dict[str, list[int]]] = {}
        for (place, name), counts in self._calls.items():
            found.setdefault(name_of(place, several), {})[name] = counts
        return found

    def left_the_range(self, several: bool) -> list[list[str]]:
        """Return ``[module, function]`` where inf or NaN came of finite values, the first first."""
        return [[name_of(place, several), name] for place, name in self._nonfinite]

    def _note(self, key: tuple[Place, str], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if not outputs:
            return
        counts = self._calls.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += sum(output.numel() for output in outputs)
        if key not in self._nonfinite and not _are_finite(outputs) and _are_finite(inputs):
            self._nonfinite[key] = None


def _floats(value: Any) -> list[Tensor]:
    return [one for one in tensors_in(value) if one.is_floating_point() and not one.is_meta]


@torch.no_grad()  # else a checkpoint would count what this saves for a backward
def _are_finite(tensors: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def name_of(place: Place, several: bool) -> str:
    """Return the path of a module, with the number of its model where there are several."""
    number, path = place
    return f"{number}:{path}" if several else path
