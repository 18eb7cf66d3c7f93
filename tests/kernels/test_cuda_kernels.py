"""What only the CUDA side of adding, casting and comparing does, on the CPU."""

import pytest
import torch
from cuda_on_cpu.kernel_names import KERNELS
from cuda_on_cpu.launcher import EmulatedModules

from amp_patch.kernels import cuda_kernels
from amp_patch.kernels.cuda_kernels import Cast, Comparison, Unscale


def test_every_operation_launches_its_kernels(modules: EmulatedModules) -> None:
    full, half = [torch.ones(3)], [torch.ones(3).half()]
    cuda_kernels.accumulate(full, half)
    Cast(full, half).run()
    Comparison(full, half).reconcile(lambda: [True])
    cuda_kernels.clip_by_norm(half, 1.0, 2.0)
    assert modules.launched == [
        "accumulate_float32_float16_to_float32",
        "cast_float32_to_float16",
        "reconcile_float16",
        "unscale_float16_to_float16",
        "summarize",
        "clip_coefficient",
    ]


def test_every_source_of_an_operation_is_there() -> None:
    assert {source for sources in cuda_kernels.SOURCES.values() for source in sources} <= set(
        KERNELS
    )


def test_tensors_without_elements_launch_nothing_but_their_summary(
    modules: EmulatedModules,
) -> None:
    empty = [torch.zeros(0)]
    check = Unscale(empty, empty).run(empty, empty, 2.0)
    Cast(empty, empty).run()
    assert modules.launched == ["summarize"]
    assert (check.overflow, check.norm().item()) == (False, 0.0)


def test_operations_do_not_take_each_others_tables(
    modules: EmulatedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    tensor = torch.tensor
    ones, others = [torch.ones(3)], [torch.ones(3)]
    for _ in range(2):
        made.clear()
        cuda_kernels.accumulate(ones, others)
        cuda_kernels.clip_by_norm(ones, 1.0, 2.0)
        monkeypatch.setattr(
            torch, "tensor", lambda *args, **kw: made.append(args) or tensor(*args, **kw)
        )
    assert made == []


def test_a_cast_follows_moved_tensors(modules: EmulatedModules) -> None:
    source, target = torch.ones(3), torch.zeros(3).half()
    cast = Cast([source], [target])
    cast.run()
    source.data = torch.full((3,), 2.0)
    cast.run()
    assert target.tolist() == [2.0] * 3


def test_reconcile_asks_nothing_and_counts_as_no_write(modules: EmulatedModules) -> None:
    source, half = torch.ones(3), torch.full((3,), 2.0).half()
    comparison = Comparison([source], [half])
    comparison.note_equal()
    versions = source._version, half._version
    assert comparison.reconcile(lambda: [False]) is False
    assert (source._version, half._version) == versions
    assert source.tolist() == [2.0] * 3


def test_reconcile_knows_of_what_torch_compared(modules: EmulatedModules) -> None:
    sources = [torch.ones(3), torch.ones(6)[::2]]
    copies = [torch.full((3,), 2.0).half(), torch.ones(6).half()[::2]]
    comparison = Comparison(sources, copies)
    assert comparison.reconcile(lambda: [True, False]) is False
    copies[1][0] = 5.0
    assert comparison.reconcile(lambda: [True, False]) is True
    assert [source.tolist() for source in sources] == [[1.0] * 3, [5.0, 1.0, 1.0]]
    assert copies[0].tolist() == [1.0] * 3
