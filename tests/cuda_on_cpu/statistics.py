"""What a pass found, as the kernels lay it out, and the same by float64 arithmetic of torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_on_cpu import Kernels
from cuda_on_cpu.memory import Memory, chunk_ranges

HAS_INF, HAS_NAN = 1, 2


@dataclass(frozen=True)
class Statistics:
    """Of some tensors: one entry each."""

    sums_of_squares: Tensor
    largest: Tensor
    flags: Tensor

    @classmethod
    def read(cls, memory: Tensor) -> "Statistics":
        """Take them from a kernel's 16 bytes per entry."""
        rows = memory.reshape(-1, 16)
        parts = (rows[:, :8], rows[:, 8:12], rows[:, 12:])
        dtypes = (torch.float64, torch.float32, torch.int32)
        views = (
            part.contiguous().view(dtype).flatten()
            for part, dtype in zip(parts, dtypes, strict=True)
        )
        return cls(*views)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Statistics":
        """Compute them from the values, in float64."""
        sums = [tensor.double().square().sum() for tensor in tensors]
        known = [tensor[~tensor.isnan()].float().abs() for tensor in tensors]
        largest = [one.max() if len(one) else torch.zeros(()) for one in known]
        flags = [
            HAS_INF * tensor.isinf().any().int() + HAS_NAN * tensor.isnan().any().int()
            for tensor in tensors
        ]
        return cls(torch.stack(sums), torch.stack(largest), torch.stack(flags).int())

    def assert_close(self, other: "Statistics") -> None:
        """Compare: flags and largest magnitudes exactly, sums up to float32's rounding."""
        torch.testing.assert_close(self.flags, other.flags, rtol=0, atol=0)
        torch.testing.assert_close(self.largest, other.largest, rtol=0, atol=0)
        torch.testing.assert_close(
            self.sums_of_squares, other.sums_of_squares, rtol=1e-6, atol=0, equal_nan=True
        )


@dataclass(frozen=True)
class Summary:
    """What `summarize` wrote."""

    tensors: Tensor
    total: Tensor
    found_inf: Tensor
    ticket: Tensor


def summarize(
    kernels: Kernels,
    memory: Memory,
    lengths: Sequence[int],
    found: Tensor,
    *,
    found_inf: Tensor | None = None,
    keep: int = 0,
    seed: int = 0,
) -> Summary:
    """Launch `summarize` over what was found in the chunks of tensors of these lengths."""
    summary = Summary(
        memory.empty(torch.uint8, 16 * len(lengths)),
        memory.empty(torch.uint8, 16),
        memory.empty(torch.float32, 1) if found_inf is None else found_inf,
        memory.place(torch.zeros(1, dtype=torch.int32)),
    )
    kernels.launch(
        "summarize",
        len(lengths),
        chunk_ranges(lengths),
        found,
        summary.tensors,
        summary.total,
        summary.found_inf,
        keep,
        summary.ticket,
        seed=seed,
    )
    memory.check()
    return summary
