"""Implementations of the fused operations, and the lists of tensors that they are tested with.

One table for the reference, for the CUDA kernels as the CPU runs their text, and for a GPU: the
fixture `ops` of conftest.py gives each in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.kernels.torch_kernels import GradCheck

INF, NAN = float("inf"), float("nan")
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*REAL, torch.complex64, torch.complex128)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4), (33,))
POWERS = st.integers(-24, 24).map(lambda power: 2.0**power)
SEEDS = st.integers(0, 2**16)
SCALES = POWERS | st.sampled_from([3.0, 1000.0, 0.7])


@dataclass(frozen=True)
class Operations:
    """An implementation, and the device that it is tested on."""

    module: ModuleType
    device: torch.device

    def place(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Move tensors, with their strides."""
        if self.device.type == "cpu":
            return list(tensors)
        return [
            tensor.to(self.device)
            if tensor.is_sparse
            else torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            ).copy_(tensor)
            for tensor in tensors
        ]

    def unscale(
        self, sources: list[Tensor], targets: list[Tensor], scale: float | Tensor
    ) -> GradCheck:
        check = self.module.Unscale(sources, targets).run(sources, targets, scale)
        assert isinstance(check, self.module.GradCheck)
        return check


def normal(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def laid_out(kind: tuple[torch.dtype, tuple[int, ...], str], seed: int) -> Tensor:
    """Make normal numbers times a power of 2, which the seed chooses, too."""
    dtype, shape, layout = kind
    magnitude = 2.0 ** (seed % 17 - 8)
    if layout == "transposed":
        values = normal(shape[::-1], seed).permute(tuple(reversed(range(len(shape)))))
        return (values * magnitude).to(dtype)
    if layout == "strided" and shape:
        values = normal((*shape[:-1], 2 * shape[-1]), seed)
        return (values * magnitude).to(dtype)[..., ::2]
    return (normal(shape, seed) * magnitude).to(dtype)


def tensors(dtypes: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[Tensor]:
    """Draw a tensor of normal magnitudes: dense, transposed or a strided view."""
    kinds = list(product(dtypes, SHAPES, ("contiguous", "transposed", "strided")))
    return st.builds(laid_out, st.sampled_from(kinds), SEEDS)


def sparse(rows: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Make a sparse gradient as an embedding writes it."""
    indices = torch.tensor([rows], dtype=torch.long, device="cpu").reshape(1, -1)
    values = normal((len(rows), 3), seed).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (5, 3), check_invariants=True)


def sparse_tensors(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Tensor]:
    """Draw a sparse gradient, some of its rows twice."""
    rows = st.lists(st.integers(0, 4), max_size=6)
    return st.builds(sparse, rows, st.sampled_from(dtypes), SEEDS)


def write(grads: list[Tensor], places: list[tuple[int, float, float]]) -> list[Tensor]:
    """Write values at these shares of the lengths of gradients of these indices."""
    for index, share, value in places if grads else ():
        flat = numbers(grads[index % len(grads)])
        if flat.numel():
            flat[np.unravel_index(int(share * flat.numel()), flat.shape)] = value
    return grads


def with_bad_values(grads: st.SearchStrategy[list[Tensor]]) -> st.SearchStrategy[list[Tensor]]:
    """Write inf and NaN at drawn places of the gradients."""
    share, value = st.floats(0, 1, exclude_max=True), st.sampled_from([INF, -INF, NAN])
    places = st.lists(st.tuples(st.integers(0, 5), share, value), max_size=4)
    return st.builds(write, grads, places)


GRADS = st.lists(tensors() | sparse_tensors(REAL), max_size=6)
GRADS_WITH_BAD_VALUES = with_bad_values(GRADS)


def numbers(tensor: Tensor) -> Tensor:
    """Return the dense real tensor in which a test may write."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def doubles(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return all numbers of a tensor, widened to float64."""
    return numbers(tensor).detach().double().cpu().numpy().copy()


def copies(grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad.clone() for grad in grads]


def rounded(values: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    real = torch.empty((), dtype=dtype).real.dtype if dtype.is_complex else dtype
    return torch.as_tensor(values).to(real)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the result and one of the fp32 inverse."""
    unit = torch.finfo(dtype).eps
    return {"rtol": max(unit, 2.0**-23), "atol": torch.finfo(dtype).smallest_normal}


def kinds_in(values: np.ndarray[Any, Any]) -> str:
    kinds = [("inf", np.isinf(values).any()), ("NaN", np.isnan(values).any())]
    return " and ".join(name for name, there in kinds if there)


Pair = tuple[list[Tensor], list[Tensor]]


def copied_to(sources: list[Tensor], dtypes: list[torch.dtype]) -> Pair:
    return sources, [s.to(dtype, copy=True) for s, dtype in zip(sources, dtypes, strict=False)]


COPIED = st.builds(
    copied_to,
    st.lists(tensors(REAL), max_size=8),
    st.lists(st.sampled_from(REAL), min_size=8, max_size=8),
)
