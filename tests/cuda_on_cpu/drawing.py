"""Hypothesis strategies for what kernels get: lengths, alignments, values, inf and NaN anywhere."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from cuda_on_cpu import CHUNK, THREADS

_SWEEP = 4 * THREADS
LENGTHS = (
    st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 31, _SWEEP - 1, _SWEEP, _SWEEP + 1])
    | st.sampled_from([4 * _SWEEP - 1, 8 * _SWEEP + 9, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
    | st.integers(0, 2 * CHUNK)
)
SEEDS = st.integers(0, 2**32)
BAD_VALUES = st.sampled_from([float("inf"), -float("inf"), float("nan")])


@dataclass(frozen=True)
class Drawn:
    """A tensor to be: `values` float32, laid `offset` elements from an aligned address."""

    values: Tensor
    offset: int


@st.composite
def tensors(draw: st.DrawFn, powers: st.SearchStrategy[int], bad: bool = True) -> Drawn:
    """Draw normal values times 2**power, some of them exactly 0, and inf and NaN if `bad`."""
    length = draw(LENGTHS)
    generator = torch.Generator().manual_seed(draw(SEEDS))
    values = torch.randn(length, generator=generator) * 2.0 ** draw(powers)
    if length and draw(st.booleans()):
        values[draw(st.integers(0, length - 1))] = 0.0
    for _ in range(draw(st.integers(0, 2)) if bad and length else 0):
        values[draw(st.integers(0, length - 1))] = draw(BAD_VALUES)
    return Drawn(values, draw(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 8])))


def tensor_lists(
    powers: st.SearchStrategy[int] | None = None, bad: bool = True, max_size: int = 4
) -> st.SearchStrategy[list[Drawn]]:
    """Draw one to `max_size` tensors, of magnitudes around 2**power."""
    powers = st.integers(-8, 8) if powers is None else powers
    return st.lists(tensors(powers, bad), min_size=1, max_size=max_size)
