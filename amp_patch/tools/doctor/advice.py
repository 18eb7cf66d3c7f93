"""Which level to start with, from what was measured; a pure function of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .self_test import Outcome
from .speed import Speed


class Advice(NamedTuple):
    """A level, and why."""

    level: str
    reason: str


def advise(speeds: Sequence[Speed], tested: Sequence[Outcome]) -> Advice:
    """Return the level to start with.

    Matrix products decide, for most of a network's time goes there. bfloat16 comes first where
    both dtypes are fast, unless float16 is faster by a third: it needs no loss scale.
    """
    works = {one.level for one in tested if one.passed}
    products = {one.dtype: one for one in speeds if one.operation.startswith("matmul")}
    fast = {dtype: one.ratio for dtype, one in products.items() if one.is_fast}
    bf16, fp16 = fast.get("bfloat16", 0.0), fast.get("float16", 0.0)
    if bf16 and "O4" in works and bf16 * 4 / 3 >= fp16:
        reason = f"bfloat16 products are {bf16:.1f} x as fast as float32's, and need no loss scale"
        return Advice("O4", f"{reason}. Then try O5, which also halves the model.")
    if fp16 and "O1" in works:
        reason = f"float16 products are {fp16:.1f} x as fast as float32's"
        return Advice("O1", f"{reason}. Then try O2, which also halves the model.")
    ratios = [f"{one.dtype} {one.ratio:.2f} x" for one in products.values()]
    measured = f" ({', '.join(ratios)} float32's speed)" if ratios else ""
    return Advice("O0", f"half precision is not faster here{measured}; try scripts at O1 or O4.")
