"""The cause of an overflow, in words and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amp_patch.scaling.scale_rule import ScaleRule

from .advice import advice_on
from .facts import Facts


def with_one_limit(causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes of a run, of which one advises the loss scale that fits all of them.

    Args:
        causes: of several loss scalers, those of each rule have a scale of their own.
    """
    lowest: dict[ScaleRule, float] = {}
    for one in causes:
        if one.is_loss_scale and one.fits is not None:
            lowest[one.scaling] = min(one.fits, lowest.get(one.scaling, math.inf))
    told = []
    for one in causes:
        limit = lowest.get(one.scaling, 0.0) if one.is_loss_scale else None
        if limit:
            lowest[one.scaling] = 0.0  # said once
        told.append(dataclasses.replace(one, limit=limit))
    return told


@dataclass(frozen=True)
class Cause(Facts):
    """The cause of an overflow: what was found, and how it is told."""

    def title(self) -> str:
        """Return one line: where it was."""
        place = f"{self.model}: " if self.model else ""
        module = f"`{self.module}`" if self.module else "the model itself"
        place += module + (f" (call {self.call})" if self.call > 1 else "")
        kinds = " and ".join(self.result.kinds) if self.result is not None else "not finite"
        of = f"`{self.operator}`"
        if self.operator == "cast":
            of = f"the cast to {self.dtype}"
        return {
            "forward": f"{place}: {of} returned {kinds}, in forward",
            "backward": f"{place}: the backward of {of} returned {kinds}",
            "weight": f"{place}: its {self.operator} holds {kinds} in {self.dtype}",
            "input": f"{place}: it was given {kinds}",
            "loss": f"the loss, outside of the model: {self._title_of_loss(kinds)}",
            "sum": "the sum of gradients: each is finite, and float16 cannot hold their sum",
            "written": "the gradients, after a backward that was finite",
            "unknown": "not found",
        }[self.where]

    def advice(self) -> str:
        """Return what mends it, in a sentence or two."""
        return advice_on(self)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what JSON can hold."""
        return {
            **dataclasses.asdict(self),
            "title": self.title(),
            "advice": self.advice(),
            "rule": self.rule,
            "is_mended_in_part": self.is_mended_in_part,
        }

    def __str__(self) -> str:
        lines = [self.title()]
        if self.line:
            lines.append(f"  line: {self.line}")
        # of a weight, an input and a loss by itself the name says all
        of = "operator: " if self.operator and self.where != "weight" else ""
        for words, ranges in (
            (of, (*self.operands, *([self.result] if self.result else []))),
            ("module: ", self.inputs),
            ("weights: ", self.weights),
        ):
            lines += [f"  {words}{one}" for one in ranges]
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join([*lines, f"  mend: {self.advice()}"])

    def _title_of_loss(self, kinds: str) -> str:
        if not self.operator:
            return f"it is {kinds}"
        of = f"the cast to {self.dtype}" if self.operator == "cast" else f"`{self.operator}`"
        return f"the backward of {of} returned {kinds}"
