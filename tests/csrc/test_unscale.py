"""The CUDA text of unscale and summarize, run on the CPU, against float64 arithmetic of torch."""

import mmap

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import CHUNK, THREADS, Kernels
from cuda_on_cpu.drawing import SEEDS, Drawn, tensor_lists
from cuda_on_cpu.kernel_names import DTYPES, PAIRS
from cuda_on_cpu.memory import Memory, chunk_table, row_table
from cuda_on_cpu.statistics import HAS_INF, HAS_NAN, Statistics, summarize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

INF, NAN = float("inf"), float("nan")
SCALES = st.integers(-24, 24).map(lambda power: 2.0**power) | st.sampled_from([3.0, 1000.0, 0.7])


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("unscale.cu", pytestconfig)


@pytest.fixture(scope="module")
def totals(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("summarize.cu", pytestconfig)


def exactly_rounded(source: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Multiply by the float32 inverse in float64, where it is exact; round as the kernel must."""
    inverse = torch.tensor(1.0 / torch.tensor(scale).double().item(), dtype=torch.float32).double()
    return (source.double() * inverse).float().to(dtype)


def unscale(
    kernels: Kernels,
    memory: Memory,
    rows: list[tuple[Tensor, Tensor | None]],
    target: str,
    scale: float | None,
    seed: int = 0,
) -> Tensor:
    """Launch over rows of one dtype mix; return what was found, per chunk."""
    chunks = chunk_table([source.numel() for source, _ in rows])
    found = memory.empty(torch.uint8, 16 * len(chunks))
    names = {dtype: name for name, dtype in DTYPES.items()}
    kernels.launch(
        f"unscale_{names[rows[0][0].dtype]}_to_{target}",
        len(chunks),
        row_table(rows),
        chunks,
        None if scale is None else torch.tensor(scale),
        found,
        seed=seed,
    )
    memory.check()
    return found


@given(
    drawn=tensor_lists(),
    pair=st.sampled_from(PAIRS),
    where=st.sampled_from(["in place", "elsewhere", "misaligned", "nowhere"]),
    scale=SCALES,
    seed=SEEDS,
)
def test_all_is_unscaled_and_examined_as_stored(
    kernels: Kernels,
    totals: Kernels,
    drawn: list[Drawn],
    pair: tuple[str, str],
    where: str,
    scale: float,
    seed: int,
) -> None:
    source_dtype, target_dtype = (DTYPES[name] for name in pair)
    memory = Memory()
    sources = [memory.place(one.values.to(source_dtype), one.offset) for one in drawn]
    expected = [exactly_rounded(source.clone(), scale, target_dtype) for source in sources]
    targets: list[Tensor | None]
    if where == "nowhere":
        targets = [None for _ in drawn]
    elif where == "in place" and source_dtype == target_dtype:
        targets = list(sources)
    else:
        offset = 1 if where == "misaligned" else 0
        targets = [memory.place(torch.zeros_like(one), offset) for one in expected]
    rows = list(zip(sources, targets, strict=True))
    found = unscale(kernels, memory, rows, pair[1], scale, seed)
    for target, one in zip(targets, expected, strict=True):
        if target is not None:
            torch.testing.assert_close(target, one, rtol=0, atol=0, equal_nan=True)
    summary = summarize(totals, memory, [len(one) for one in expected], found, seed=seed)
    Statistics.read(summary.tensors).assert_close(Statistics.of(expected))
    Statistics.read(summary.total).assert_close(Statistics.of([torch.cat(expected)]))
    bad = not all(one.isfinite().all() for one in expected)
    assert summary.found_inf.tolist() == [float(bad)]
    assert summary.ticket.tolist() == [0]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("pair", PAIRS, ids="_to_".join)
def test_one_bad_value_is_found_wherever_it_is(
    kernels: Kernels, totals: Kernels, pair: tuple[str, str], bad: float
) -> None:
    length = CHUNK + 8 * THREADS + 3
    for position in (0, 3, 4, 4 * THREADS, CHUNK - 1, CHUNK, length - 4, length - 1):
        memory = Memory()
        values = torch.ones(length, dtype=DTYPES[pair[0]])
        values[position] = bad
        rows = [(memory.place(torch.ones_like(values)), None), (memory.place(values), None)]
        found = unscale(kernels, memory, rows, pair[1], 2.0)
        summary = summarize(totals, memory, [length, length], found)
        assert Statistics.read(summary.tensors).flags.tolist() == [
            0,
            HAS_NAN if bad != bad else HAS_INF,
        ]
        assert summary.found_inf.tolist() == [1.0]


SPECIAL = {
    "NaN only": [NAN],
    "NaN before inf": [NAN, INF],
    "-inf before NaN": [-INF, NAN],
    "-inf": [-INF, 2.0],
    "-inf and inf": [-INF, INF],
    "NaN before a number": [NAN, -3.0],
    "-0": [-0.0],
    "subnormal": [-(2.0**-24), 2.0**-130],
    "NaN beside a subnormal": [2.0**-24, NAN],
    "as large as it gets": [-65504.0, 65504.0],
}


@pytest.mark.parametrize("pair", PAIRS, ids="_to_".join)
def test_special_values_are_told_apart_in_packs_and_alone(
    kernels: Kernels, pair: tuple[str, str]
) -> None:
    memory, (source, target) = Memory(), (DTYPES[name] for name in pair)
    rows = [
        memory.place(torch.tensor(values).repeat(length)[:length].to(source), offset)
        for values in SPECIAL.values()
        for length, offset in ((1, 0), (2, 0), (8, 0), (8, 1), (8 * THREADS * 4 + 9, 0))
    ]
    found = Statistics.read(unscale(kernels, memory, [(row, None) for row in rows], pair[1], 1.0))
    expected = Statistics.of([row.to(target) for row in rows])
    torch.testing.assert_close(found.flags, expected.flags, rtol=0, atol=0)
    assert torch.equal(found.largest.view(torch.int32), expected.largest.view(torch.int32))
    squares = [row.to(target).float().square().double().sum() for row in rows]
    sums = (found.sums_of_squares, torch.stack(squares))
    torch.testing.assert_close(*sums, rtol=1e-6, atol=0, equal_nan=True)


def test_a_square_that_overflows_is_no_inf(kernels: Kernels) -> None:
    memory = Memory()
    rows = [(memory.place(torch.tensor(values)), None) for values in ([-3e38], [3e38, NAN])]
    found = Statistics.read(unscale(kernels, memory, rows, "float32", None))
    assert found.flags.tolist() == [0, HAS_NAN]
    torch.testing.assert_close(found.largest, torch.tensor([3e38, 3e38]), rtol=0, atol=0)
    assert found.sums_of_squares[0] == INF


def test_what_overflows_only_when_rounded_to_the_target_is_found(
    kernels: Kernels, totals: Kernels
) -> None:
    memory = Memory()
    source = memory.place(torch.tensor([1.0, -40000.0]))
    found = unscale(kernels, memory, [(source, None)], "float16", 0.5)
    summary = summarize(totals, memory, [2], found)
    statistics = Statistics.read(summary.total)
    assert statistics.flags.tolist() == [HAS_INF]
    assert statistics.largest.tolist() == [INF]
    assert unscale(kernels, memory, [(source, None)], "float32", 0.5)[12:].tolist() == [0, 0, 0, 0]


def test_without_a_scale_values_are_examined_as_they_are(kernels: Kernels) -> None:
    memory = Memory()
    found = unscale(
        kernels, memory, [(memory.place(torch.tensor([3.0, -4.0])), None)], "float32", None
    )
    statistics = Statistics.read(found)
    assert (statistics.sums_of_squares.item(), statistics.largest.item()) == (25.0, 4.0)


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("target", ["float32", "float16"])
def test_tensors_misaligned_alike_move_in_packs_all_the_same(
    kernels: Kernels, target: str, offset: int
) -> None:
    # in a pack 4096 ** 2 + 1 is added up in float32, where the 1 is lost; elsewhere it is not
    width, packs = 8 if target == "float16" else 4, 2 * THREADS + 3
    memory, head = Memory(), -offset % width
    values = torch.zeros(head + packs * width + 2)
    values[head::width], values[head + 1 :: width] = 4096.0, 1.0
    source = memory.place(values.half(), offset)
    targets = [memory.place(values.to(DTYPES[target]), other) for other in range(width)]
    rows = [(source, None), *((source, one) for one in targets)]
    found = Statistics.read(unscale(kernels, memory, rows, target, 1.0)).sums_of_squares
    in_packs = torch.tensor([True, *(other == offset % width for other in range(width))])
    kept = torch.where(in_packs, 1, packs + 1)
    assert torch.equal(found, kept.double() + (packs + 1) * 2.0**24)
    assert all(torch.equal(one, values.to(one.dtype)) for one in targets)


def test_a_tensor_may_end_before_its_first_pack(kernels: Kernels) -> None:
    memory = Memory()
    rows = [(memory.place(torch.ones(n), 1), memory.place(torch.zeros(n), 1)) for n in (1, 2, 3, 4)]
    found = Statistics.read(unscale(kernels, memory, rows, "float32", 0.5))
    assert found.sums_of_squares.tolist() == [4.0 * n for n in (1, 2, 3, 4)]
    assert all((target == 2.0).all() for _, target in rows)


def test_the_same_bits_come_out_in_any_order_of_threads(kernels: Kernels, totals: Kernels) -> None:
    values = torch.randn(5 * CHUNK + 77)
    results = []
    for seed in range(5):
        memory = Memory()
        rows = [(memory.place(values), None), (memory.place(values[:CHUNK]), None)]
        found = unscale(kernels, memory, rows, "float32", 3.0, seed)
        summary = summarize(totals, memory, [len(values), CHUNK], found, seed=seed)
        results.append([summary.tensors.tolist(), summary.total.tolist()])
    assert all(result == results[0] for result in results)


def test_more_than_2_to_the_31_elements(kernels: Kernels) -> None:
    # the tensor's pages are made when touched: of its 4 GiB the two chunks' only
    length = 2**31 + 3 * CHUNK + 5
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, 2 * length, flags=flags)
    tensor = torch.frombuffer(memory, dtype=torch.float16)
    last = length // CHUNK
    tensor[(last - 1) * CHUNK :] = 8.0
    chunks = torch.tensor([[0, last - 1], [0, last]], dtype=torch.int32)
    found = torch.zeros(32, dtype=torch.uint8)
    kernels.launch(
        "unscale_float16_to_float16",
        2,
        row_table([[tensor, tensor]]),
        chunks,
        torch.tensor(2.0),
        found,
    )
    assert last * CHUNK > 2**31
    assert (tensor[(last - 1) * CHUNK :] == 4.0).all()
    assert Statistics.read(found).sums_of_squares.tolist() == [16.0 * CHUNK, 16.0 * 5]


def test_thousands_of_chunks_of_one_tensor_are_added_up(totals: Kernels) -> None:
    # around the sizes at which a thread, which takes eight at once, begins with others
    counts = [1, THREADS, 7 * THREADS + 1, 8 * THREADS, 8 * THREADS + 1, 0, 17 * THREADS + 9]
    found = torch.rand(sum(counts), 2, dtype=torch.float64).view(torch.float32).view(-1, 4)
    found[:, 2] = torch.rand(len(found))
    found[:, 3] = 0.0
    found[sum(counts[:3]) - 1, 3] = torch.tensor(HAS_INF, dtype=torch.int32).view(torch.float32)
    found[-1, 3] = torch.tensor(HAS_NAN, dtype=torch.int32).view(torch.float32)
    lengths = [count * CHUNK for count in counts]
    summaries = [
        summarize(totals, Memory(), lengths, found.view(torch.uint8), seed=seed) for seed in (0, 1)
    ]
    assert torch.equal(summaries[0].tensors, summaries[1].tensors)
    ours = Statistics.read(summaries[0].tensors)
    assert ours.flags.tolist() == [0, 0, HAS_INF, 0, 0, 0, HAS_NAN]
    parts = found.split(counts)
    assert ours.largest.tolist() == [part[:, 2].max().item() if len(part) else 0 for part in parts]
    sums = torch.stack([part.contiguous().view(torch.float64)[:, 0].sum() for part in parts])
    torch.testing.assert_close(ours.sums_of_squares, sums, rtol=1e-12, atol=0)
    assert Statistics.read(summaries[0].total).flags.item() == HAS_INF | HAS_NAN


@pytest.mark.parametrize(("bad", "keep", "before", "after"), [
    (False, 0, 1.0, 0.0), (False, 1, 1.0, 1.0), (False, 1, 0.0, 0.0), (True, 0, 0.0, 1.0),
    (True, 1, 0.0, 1.0),
])  # fmt: skip
def test_a_flag_that_is_up_stays_up_if_told_so(
    totals: Kernels, bad: bool, keep: int, before: float, after: float
) -> None:
    memory = Memory()
    found = torch.zeros(32, dtype=torch.uint8)
    found[28] = HAS_NAN if bad else 0
    flag = memory.place(torch.tensor([before]))
    summarize(totals, memory, [1, 1], found, found_inf=flag, keep=keep)
    assert flag.item() == after


def test_no_flag_is_written_where_none_is_given(totals: Kernels) -> None:
    total = torch.empty(16, dtype=torch.uint8)
    arguments = (torch.zeros(1, 2, dtype=torch.int32), None, torch.empty(16, dtype=torch.uint8))
    totals.launch("summarize", 1, *arguments, total, None, 0, torch.zeros(1, dtype=torch.int32))
    assert total.tolist() == [0] * 16


def clipped(
    totals: Kernels, sum_of_squares: float, max_norm: float, eps: float
) -> tuple[Tensor, Tensor]:
    norm, coefficient = torch.full((1,), NAN), torch.full((1,), -1.0)
    total = torch.tensor([sum_of_squares, 0.0], dtype=torch.float64)
    arguments = (total, max_norm, eps, norm, coefficient)
    totals.launch("clip_coefficient", 1, *arguments, threads=32)
    return norm, coefficient


@given(
    sum_of_squares=st.floats(0, 1e30) | st.sampled_from([INF, NAN]),
    max_norm=st.floats(2.0**-10, 2.0**10, width=32),
    eps=st.sampled_from([0.0, 1e-6]),
)
def test_the_clip_coefficient_is_torchs(
    totals: Kernels, sum_of_squares: float, max_norm: float, eps: float
) -> None:
    norm, coefficient = clipped(totals, sum_of_squares, max_norm, eps)
    expected = torch.tensor([sum_of_squares], dtype=torch.float64).sqrt().float()
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    factor = (max_norm / (expected + eps)).clamp(max=1.0)
    torch.testing.assert_close(coefficient, factor, rtol=0, atol=0, equal_nan=True)
