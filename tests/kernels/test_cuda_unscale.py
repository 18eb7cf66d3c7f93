"""What only the CUDA side of unscaling does: launches, and what goes to torch."""

import pytest
import torch
from cuda_on_cpu.launcher import EmulatedModules
from launches_of_torch import Operations
from torch import Tensor

from amp_patch.kernels import resident, torch_kernels
from amp_patch.kernels.cuda_kernels import unscale
from amp_patch.kernels.cuda_unscale import Check, Unscale
from amp_patch.kernels.tensor_tables import CHUNK

INF, NAN = float("inf"), float("nan")


def sparse(*rows: float) -> Tensor:
    indices = torch.arange(len(rows)).reshape(1, -1)
    values = torch.tensor(rows).reshape(-1, 1)
    return torch.sparse_coo_tensor(indices, values, (len(rows), 1), check_invariants=True)


def test_one_launch_per_mix_of_dtypes_whatever_the_number_of_tensors(
    modules: EmulatedModules,
) -> None:
    grads = [torch.ones(n + 1, dtype=torch.float16) for n in range(300)]
    grads += [torch.ones(n, dtype=torch.bfloat16) for n in range(3)]
    targets = [torch.zeros_like(grad, dtype=torch.float32) for grad in grads]
    Unscale(grads, targets).run(grads, targets, 4.0)
    names = ["unscale_float16_to_float32", "unscale_bfloat16_to_float32", "summarize"]
    assert modules.launched == names
    assert all((target == 0.25).all() for target in targets)


def test_torch_launches_nothing_beside_the_kernels(modules: EmulatedModules) -> None:
    grads, scale = [torch.ones(5)], torch.full((1,), 2.0)
    unscale = Unscale(grads, grads)
    unscale.run(grads, grads, scale)  # uploads its tables
    with Operations() as noted:
        unscale.run(grads, grads, scale)
    assert grads[0].tolist() == [0.25] * 5
    assert noted.names == []


def test_lists_that_are_others_at_each_call_share_their_tables(
    modules: EmulatedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[int]] = []
    upload = resident.FixedTable._upload
    noting = lambda table, numbers: made.append(numbers) or upload(table, numbers)  # noqa: E731
    monkeypatch.setattr(resident.FixedTable, "_upload", noting)
    for number in (1.0, 2.0, torch.inf):
        grads = [torch.full((5,), 2.0 * number).half(), torch.ones(7).half()]
        targets = [torch.empty(5), torch.empty(7)]
        check = unscale(grads, targets, torch.full((1,), 2.0))
        assert check.nonfinite() == ([(0, "inf")] if number == torch.inf else [])
        assert (targets[0].tolist(), targets[1].tolist()) == ([number] * 5, [0.5] * 7)
    assert len(made) == 2  # the chunks and the ranges, of the first


def test_a_large_tensor_has_many_chunks(modules: EmulatedModules) -> None:
    grads = [torch.ones(5), torch.ones(2 * CHUNK + 1), torch.ones(CHUNK)]
    grads[1][-1] = NAN
    check = Unscale(grads, grads).run(grads, grads, 2.0)
    assert check.nonfinite() == [(1, "NaN")]
    assert (grads[1][:-1] == 0.5).all()


@pytest.mark.parametrize(
    ("bad", "where"), [(None, None), (INF, "kernel"), (NAN, "kernel"), (INF, "torch")]
)
def test_what_no_kernel_takes_is_unscaled_and_checked_with_the_rest(
    modules: EmulatedModules, bad: float | None, where: str | None
) -> None:
    strided = torch.ones(8)[::2]
    grads = [torch.ones(4), sparse(2.0, 4.0), strided, torch.ones(3).double(), torch.ones(5).half()]
    if bad is not None:
        grads[0 if where == "kernel" else 2][1] = bad
    check = Unscale(grads, grads).run(grads, grads, 2.0)
    index = 0 if where == "kernel" else 2
    kind = "NaN" if bad is NAN else "inf"
    assert check.nonfinite() == ([] if bad is None else [(index, kind)])
    assert check.overflow == (bad is not None)
    assert len(check.found_inf) == 1
    assert grads[1]._values().tolist() == [[1.0], [2.0]]
    assert (grads[3] == 0.5).all()
    assert grads[4].tolist() == [0.5] * 5
    assert "unscale_float32_to_float32" in modules.launched
    if bad is None:
        expected = (4 + 1 + 4 + 4 + 3 + 5) * 0.25 + 3.75
        assert check.norm().item() == pytest.approx(expected**0.5)


def test_gradients_that_become_sparse_go_to_torch(modules: EmulatedModules) -> None:
    params = [torch.zeros(2, 1), torch.zeros(3)]
    unscale = Unscale(params, params)
    for first in (torch.ones(2, 1), sparse(2.0, 2.0), torch.ones(2, 1)):
        grads = [first, torch.ones(3)]
        unscale.run(grads, grads, 2.0)
        assert (grads[0].to_dense() * 2 == (2.0 if first.is_sparse else 1.0)).all()
        assert (grads[1] == 0.5).all()


def test_gradients_that_change_their_dtype_are_read_as_what_they_are(
    modules: EmulatedModules,
) -> None:
    targets = [torch.zeros(3), torch.zeros(2)]
    unscale = Unscale([one.half() for one in targets], targets)
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64):
        grads = [torch.full_like(one, 6.0, dtype=dtype) for one in targets]
        assert not unscale.run(grads, targets, 4.0).overflow
        assert [one.tolist() for one in targets] == [[1.5] * 3, [1.5] * 2]
    launched = [name for name in modules.launched if name != "summarize"]
    assert launched == [f"unscale_{name}_to_float32" for name in ("float16", "float32", "bfloat16")]


def test_what_a_check_found_is_not_what_is_written_later(modules: EmulatedModules) -> None:
    grads = [torch.tensor([1.0, INF])]
    unscale = Unscale(grads, grads)
    check = unscale.run(grads, grads, 2.0)
    grads[0].fill_(3.0)
    later = unscale.run(grads, grads, 2.0)
    assert (check.nonfinite(), check.overflow) == ([(0, "inf")], True)
    assert (later.nonfinite(), later.overflow) == ([], False)


def test_tables_stay_where_the_addresses_do(
    modules: EmulatedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    upload = resident._without_waiting
    grads = [torch.ones(3), torch.ones(4)]
    unscale = Unscale(grads, grads)
    unscale.run(grads, grads, 2.0)
    monkeypatch.setattr(
        resident, "_without_waiting", lambda *args: made.append(args) or upload(*args)
    )
    unscale.run(grads, grads, 2.0)
    assert made == []
    others = [torch.ones(3), grads[1]]
    unscale.run(others, others, 2.0)
    assert len(made) == 1


def test_the_scale_of_the_next_step_is_another(modules: EmulatedModules) -> None:
    grads = [torch.ones(3)]
    unscale = Unscale(grads, grads)
    for scale, expected in ((2.0, 0.5), (4.0, 0.125), (4.0, 0.03125)):
        unscale.run(grads, grads, scale)
        assert grads[0].tolist() == [expected] * 3


def test_the_first_launch_of_an_unscale_may_be_without_rows(modules: EmulatedModules) -> None:
    check = Unscale([], []).run([], [], 2.0)
    assert (check.overflow, check.nonfinite(), check.norm().item()) == (False, [], 0.0)
    assert isinstance(check, torch_kernels.GradCheck)
    assert modules.launched == []


def test_a_check_notices_gradients_that_are_not_like_those_before(modules: EmulatedModules) -> None:
    models = [torch.zeros(3), torch.zeros(2, 2)]
    square = torch.ones(2, 2, dtype=torch.float16)
    check = Check([one.half() for one in models], models)

    def look(first: Tensor, second: Tensor = square) -> bool:
        """Return whether the check was made by kernels, and found nothing."""
        found = check.look([first, second], models, [False, False], 1.0)
        return found is not None and not found.overflow

    dense = torch.ones(3, dtype=torch.float16)
    assert look(dense)
    assert not look(dense[:1].expand(3))  # its memory ends after the first element
    assert not look(sparse(1.0, 1.0, 1.0).half())
    assert not look(dense, square.t().contiguous().t())
    assert look(dense)
    modules.launched.clear()
    assert look(dense.bfloat16())
    assert modules.launched[:1] == ["unscale_bfloat16_to_float32"]
    assert look(dense)
