"""The CUDA text of accumulate, run on the CPU, against float64 arithmetic of torch."""

from itertools import product

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import CHUNK, Kernels
from cuda_on_cpu.drawing import SEEDS, Drawn, tensor_lists
from cuda_on_cpu.kernel_names import DTYPES
from cuda_on_cpu.memory import Memory, chunk_table, row_table
from cuda_on_cpu.statistics import HAS_INF, HAS_NAN, Statistics, summarize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

MIXES = list(product(DTYPES, DTYPES, DTYPES))
SCALES = st.sampled_from([None, 2.0**16, 3.0, 0.25])
COEFFICIENTS = st.sampled_from([1.0, 1.0, 0.5, -2.5])
PLACES = st.sampled_from(["x", "y", "elsewhere", "misaligned"])


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("accumulate.cu", pytestconfig)


@pytest.fixture(scope="module")
def totals(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("summarize.cu", pytestconfig)


def rounded(value: Tensor) -> Tensor:
    return value.float().double()


def scaled_sum(
    x: Tensor, y: Tensor, a: float, b: float, scales: tuple[float | None, float | None]
) -> Tensor:
    """Form the sum in float64, rounded to float32 after each operation."""
    terms = []
    for values, coefficient, scale in ((x, a, scales[0]), (y, b, scales[1])):
        factor = torch.tensor(coefficient, dtype=torch.float64)
        if scale is not None:
            factor = rounded(factor * rounded(1.0 / torch.tensor(scale, dtype=torch.float64)))
        terms.append(rounded(factor * values.double()))
    return (terms[0] + terms[1]).float()


@given(
    drawn=tensor_lists(),
    mix=st.sampled_from(MIXES),
    where=PLACES,
    coefficients=st.tuples(COEFFICIENTS, COEFFICIENTS),
    scales=st.tuples(SCALES, SCALES),
    seed=SEEDS,
)
def test_every_mix_is_added_and_examined_as_stored(
    kernels: Kernels,
    totals: Kernels,
    drawn: list[Drawn],
    mix: tuple[str, str, str],
    where: str,
    coefficients: tuple[float, float],
    scales: tuple[float | None, float | None],
    seed: int,
) -> None:
    x_dtype, y_dtype, dtype = (DTYPES[name] for name in mix)
    memory = Memory()
    xs = [memory.place(one.values.to(x_dtype), one.offset) for one in drawn]
    ys = [memory.place(one.values.roll(1).to(y_dtype), one.offset // 2) for one in drawn]
    expected = [
        scaled_sum(x, y, *coefficients, scales).to(dtype) for x, y in zip(xs, ys, strict=True)
    ]
    in_place = {"x": (xs, x_dtype), "y": (ys, y_dtype)}.get(where)
    if in_place and in_place[1] is dtype:
        targets = in_place[0]
    else:
        offset = 1 if where == "misaligned" else 0
        targets = [memory.place(torch.zeros_like(one), offset) for one in expected]
    lengths = [len(x) for x in xs]
    chunks = chunk_table(lengths)
    found = memory.empty(torch.uint8, 16 * len(chunks))
    x_scale, y_scale = (None if scale is None else torch.tensor(scale) for scale in scales)
    kernels.launch(
        "accumulate_{}_{}_to_{}".format(*mix),
        len(chunks),
        row_table(list(zip(xs, ys, targets, strict=True))),
        chunks,
        coefficients[0],
        x_scale,
        coefficients[1],
        y_scale,
        found,
        seed=seed,
    )
    memory.check()
    for target, one in zip(targets, expected, strict=True):
        torch.testing.assert_close(target, one, rtol=0, atol=0, equal_nan=True)
    summary = summarize(totals, memory, lengths, found, seed=seed)
    Statistics.read(summary.tensors).assert_close(Statistics.of(expected))
    Statistics.read(summary.total).assert_close(Statistics.of([torch.cat(expected)]))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("mix", MIXES, ids="_".join)
def test_a_bad_value_of_either_operand_is_found(
    kernels: Kernels, mix: tuple[str, str, str], operand: int, bad: float
) -> None:
    memory = Memory()
    values = [torch.ones(CHUNK + 5, dtype=DTYPES[name]) for name in mix]
    values[operand][-1] = bad
    row = [memory.place(one) for one in values]
    chunks = chunk_table([CHUNK + 5])
    found = memory.empty(torch.uint8, 32)
    arguments = (row_table([row]), chunks, 1.0, None, 1.0, None, found)
    kernels.launch("accumulate_{}_{}_to_{}".format(*mix), 2, *arguments)
    flag = HAS_INF if bad == torch.inf else HAS_NAN
    assert Statistics.read(found).flags.tolist() == [0, flag]
