"""Elements after the 2**31st, by every kernel that has chunks, with the CPU running its text."""

from dataclasses import dataclass
from typing import Any

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import CHUNK
from cuda_on_cpu.kernel_names import KERNELS
from cuda_on_cpu.memory import Memory
from torch import Tensor

HALF, FULL = torch.float16, torch.float32
#: Whole chunks that lie before the tensors' own: in elements, more than an int holds.
SKIPPED = 2**31 // CHUNK + 1
LENGTH = CHUNK // 2 + 3
NUMBERS = "16 of them, which a kernel reads or writes"


@dataclass(frozen=True)
class Case:
    """A kernel with the dtypes of a row's tensors, other entries of the row, and its arguments."""

    kernel: str
    columns: tuple[torch.dtype, ...]
    entries: tuple[int, ...] = ()
    arguments: tuple[Any, ...] = ()


def stepped(name: str, states: int) -> list[Case]:
    """Return the case of an optimizer that takes one launch, with so many tensors of state."""
    columns = (HALF, FULL, *[FULL] * states, HALF)
    return [Case(f"{name}_float16_to_float16", columns, (0, 0), (NUMBERS, None, None, None))]


CASES = {
    "accumulate.cu": [
        Case(
            "accumulate_float16_float16_to_float32",
            (HALF, HALF, FULL),
            arguments=(1.0, None, 1.0, None, NUMBERS),
        )
    ],
    "adagrad.cu": stepped("adagrad", 1),
    "adamw.cu": stepped("adamw", 3),
    "cast.cu": [Case("cast_float32_to_float16", (FULL, HALF))],
    "lamb.cu": [
        Case(
            "lamb_moments_float16_to_float16",
            (HALF, FULL, FULL, FULL, HALF),
            (0, 0),
            (NUMBERS, None, None, None, NUMBERS),
        ),
        Case(
            "lamb_update_float16", (HALF, FULL, FULL, FULL, HALF), (0, 0), (NUMBERS, NUMBERS, None)
        ),
    ],
    "reconcile.cu": [Case("reconcile_float16", (FULL, HALF), (1,))],
    "rmsprop.cu": stepped("rmsprop", 3),
    "sgd.cu": stepped("sgd", 1),
    "unscale.cu": [Case("unscale_float16_to_float32", (HALF, FULL), arguments=(None, NUMBERS))],
}


def test_every_source_with_chunks_has_a_case() -> None:
    without = {"cross_entropy.cu", "summarize.cu", "update_scale.cu"}
    assert set(KERNELS) - set(CASES) == without


def launch(kernels: cuda_on_cpu.Kernels, case: Case, skipped: int) -> list[Tensor]:
    """Launch on the last chunk of tensors that begin so many chunks before their memory does."""
    memory, generator = Memory(), torch.Generator().manual_seed(0)
    tensors = [
        memory.place(torch.rand(LENGTH, generator=generator).to(dtype)) for dtype in case.columns
    ]
    begins = [one.data_ptr() - skipped * CHUNK * one.element_size() for one in tensors]
    rows = torch.tensor([[*begins, *case.entries, skipped * CHUNK + LENGTH]])
    # coefficients, ratios, sums: any numbers will do
    others = [torch.full((16,), 0.5) if one is NUMBERS else one for one in case.arguments]
    chunks = torch.tensor([[0, skipped]], dtype=torch.int32)
    kernels.launch(case.kernel, 1, rows, chunks, *others)
    memory.check()
    return [*tensors, *(one for one in others if isinstance(one, Tensor))]


@pytest.mark.parametrize(
    ("source", "case"),
    [(source, case) for source, cases in CASES.items() for case in cases],
    ids=lambda one: getattr(one, "kernel", ""),
)
def test_they_are_worked_on_as_the_first_ones_are(
    pytestconfig: pytest.Config, source: str, case: Case
) -> None:
    kernels = cuda_on_cpu.compiled(source, pytestconfig)
    near, far = (launch(kernels, case, skipped) for skipped in (0, SKIPPED))
    for one, other in zip(near, far, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
