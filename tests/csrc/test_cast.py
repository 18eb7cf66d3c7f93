"""The CUDA text of cast, run on the CPU, against torch's own rounding, bit for bit."""

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import CHUNK, Kernels
from cuda_on_cpu.drawing import SEEDS, Drawn, tensor_lists
from cuda_on_cpu.kernel_names import DTYPES, PAIRS
from cuda_on_cpu.memory import Memory, chunk_table, row_table
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("cast.cu", pytestconfig)


@given(
    drawn=tensor_lists(st.integers(-30, 20)),
    pair=st.sampled_from(PAIRS),
    offsets=st.lists(st.sampled_from([0, 0, 1, 4]), min_size=4, max_size=4),
    seed=SEEDS,
)
def test_every_mix_is_rounded_as_torch_does(
    kernels: Kernels, drawn: list[Drawn], pair: tuple[str, str], offsets: list[int], seed: int
) -> None:
    source_dtype, target_dtype = (DTYPES[name] for name in pair)
    memory = Memory()
    sources = [memory.place(one.values.to(source_dtype), one.offset) for one in drawn]
    targets = [
        memory.place(torch.full_like(source, torch.nan, dtype=target_dtype), offset)
        for source, offset in zip(sources, offsets, strict=False)
    ]
    chunks = chunk_table([one.values.numel() for one in drawn])
    rows = row_table(list(zip(sources, targets, strict=True)))
    kernels.launch("cast_{}_to_{}".format(*pair), len(chunks), rows, chunks, seed=seed)
    memory.check()
    for one, target in zip(drawn, targets, strict=True):
        expected = one.values.to(source_dtype).to(target_dtype)
        torch.testing.assert_close(target, expected, rtol=0, atol=0, equal_nan=True)


def test_a_launch_touches_only_the_rows_that_its_chunks_name(kernels: Kernels) -> None:
    memory = Memory()
    sources = [memory.place(torch.full((CHUNK + 1,), float(i))) for i in range(3)]
    targets = [memory.place(torch.full((CHUNK + 1,), -1.0)) for _ in range(3)]
    rows = row_table(list(zip(sources, targets, strict=True)))
    chunks = chunk_table([CHUNK + 1, CHUNK + 1], rows=[2, 0])
    kernels.launch("cast_float32_to_float32", len(chunks), rows, chunks)
    memory.check()
    assert [target.unique().tolist() for target in targets] == [[0.0], [-1.0], [2.0]]
