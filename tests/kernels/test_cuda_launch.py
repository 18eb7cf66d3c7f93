"""One kernel for each mix of dtypes, with the tables of its own rows."""

import pytest
import torch
from cuda_on_cpu.launcher import EmulatedModules

from amp_patch.kernels import cuda_launch
from amp_patch.kernels.cuda_launch import launch, note_written
from amp_patch.kernels.dense_rows import split
from amp_patch.kernels.tensor_tables import CHUNK


def test_each_mix_gets_its_kernel_its_chunks_and_their_memory(modules: EmulatedModules) -> None:
    sources = [torch.ones(3), torch.full((CHUNK + 1,), 2.0), torch.full((2,), 3.0).half()]
    targets = [torch.zeros_like(source) for source in sources]
    (part,), _ = split("test_cuda_launch", sources, targets)
    rows = part.table.rows(sources, targets)
    statistics = torch.zeros((part.table.chunk_count, 16), dtype=torch.uint8)
    scale = torch.full((1,), 2.0)
    launch(part, "unscale.cu", "unscale_{}_to_{}", "PPPP", rows, scale, per_chunk=statistics)
    assert modules.launched == ["unscale_float32_to_float32", "unscale_float16_to_float16"]
    assert all(torch.equal(b * 2, a) for a, b in zip(sources, targets, strict=True))
    squares = statistics.view(torch.float64)[:, 0].tolist()
    assert squares == [3 * 0.25, CHUNK * 1.0, 1.0, 2 * 1.5**2]


@pytest.mark.parametrize("takes_lists", [True, False])
def test_what_was_written_to_by_address_has_another_version(
    monkeypatch: pytest.MonkeyPatch, takes_lists: bool
) -> None:
    if not takes_lists:  # as older versions of torch, whose function takes one tensor
        monkeypatch.setattr(cuda_launch, "_TAKES_LISTS", False)
        one = cuda_launch.increment_version
        monkeypatch.setattr(cuda_launch, "increment_version", lambda tensor: one(tensor.view(-1)))
    tensors = [torch.ones(1), torch.ones(2)]
    versions = [tensor._version for tensor in tensors]
    note_written(tensors)
    assert [tensor._version for tensor in tensors] == [version + 1 for version in versions]
