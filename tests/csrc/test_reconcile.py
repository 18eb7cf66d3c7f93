"""The CUDA text of reconcile, run on the CPU, against torch's own rounding, bit for bit."""

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Kernels
from cuda_on_cpu.drawing import SEEDS, Drawn, tensor_lists
from cuda_on_cpu.memory import Memory, chunk_table
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("reconcile.cu", pytestconfig)


def row_table(masters: list[Tensor], copies: list[Tensor], wins: list[bool]) -> Tensor:
    columns = (map(Tensor.data_ptr, masters), map(Tensor.data_ptr, copies), wins, map(len, masters))
    return torch.tensor(list(zip(*columns, strict=True)), dtype=torch.int64)


def written(values: Tensor, share: float, seed: int) -> Tensor:
    """Write other values to about a share of a tensor's elements."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(values.shape, generator=generator) < share
    return torch.where(chosen, torch.randn(values.shape, generator=generator), values)


@given(
    drawn=tensor_lists(st.integers(-30, 20), bad=False),
    half=st.sampled_from(sorted(HALVES)),
    wins=st.lists(st.booleans(), min_size=4, max_size=4),
    offsets=st.lists(st.sampled_from([0, 0, 1, 4]), min_size=4, max_size=4),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.5, 1.0]), min_size=4, max_size=4),
    seed=SEEDS,
)
def test_whichever_was_written_to_the_other_follows(
    kernels: Kernels,
    drawn: list[Drawn],
    half: str,
    wins: list[bool],
    offsets: list[int],
    shares: list[float],
    seed: int,
) -> None:
    memory = Memory()
    masters = [memory.place(one.values, one.offset) for one in drawn]
    copies = [
        memory.place(written(one.values, share, seed).to(HALVES[half]), offset)
        for one, share, offset in zip(drawn, shares, offsets, strict=False)
    ]
    wins = wins[: len(drawn)]
    before = [(master.clone(), copy.clone()) for master, copy in zip(masters, copies, strict=True)]
    chunks = chunk_table([len(master) for master in masters])
    rows = row_table(masters, copies, wins)
    kernels.launch(f"reconcile_{half}", len(chunks), rows, chunks, seed=seed)
    memory.check()
    for (master, copy), win, exact, rounded in zip(before, wins, masters, copies, strict=True):
        same = master.to(copy.dtype).view(torch.int16) == copy.view(torch.int16)
        expected = master if win else torch.where(same, master, copy.float())
        assert torch.equal(exact.view(torch.int32), expected.view(torch.int32))
        expected = master.to(copy.dtype) if win else copy
        assert torch.equal(rounded.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("wins", [False, True])
def test_zeros_of_other_signs_differ(kernels: Kernels, wins: bool) -> None:
    master, copy = torch.tensor([-1e-30, 1e-30]), torch.tensor([0.0, -0.0]).half()
    kernels.launch("reconcile_float16", 1, row_table([master], [copy], [wins]), chunk_table([2]))
    assert torch.equal(master.abs(), torch.full((2,), 1e-30 if wins else 0.0))
    assert torch.equal(copy.signbit(), torch.tensor([wins, not wins]))
    assert torch.equal(master.signbit(), copy.signbit())
