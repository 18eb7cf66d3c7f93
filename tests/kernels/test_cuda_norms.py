"""What only the CUDA side of norms and clipping does: launches, and what goes to torch."""

import pytest
import torch
from cuda_on_cpu.launcher import EmulatedModules
from launches_of_torch import Operations
from torch import Tensor

from amp_patch.kernels import cuda_kernels, cuda_norms
from amp_patch.kernels.torch_norms import CLIP_EPS, clip_factor

INF = float("inf")


def sums(*squares: float) -> list[Tensor]:
    return [torch.tensor(one, dtype=torch.float64) for one in squares]


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_gradients_that_wait_are_clipped_by_one_launch(
    modules: EmulatedModules, max_norm: float
) -> None:
    squares = sums(25.0)
    with Operations() as operations:
        norm, factor = cuda_norms.clip_together(squares, [], max_norm)
    assert (modules.launched, operations.names) == (["clip_coefficient"], [])
    assert norm == 5.0
    assert torch.equal(factor, clip_factor(norm, max_norm, CLIP_EPS))
    assert norm.shape == factor.shape == ()


def test_gradients_beside_them_are_read_in_one_pass(modules: EmulatedModules) -> None:
    grads = [torch.full((n,), 2.0) for n in (1, 3, 70)]
    norm, factor = cuda_norms.clip_together(sums(104.0), grads, 2.0)
    names = ["unscale_float32_to_float32", "summarize", "clip_coefficient"]
    assert modules.launched == names
    assert (norm.item(), factor.item()) == (20.0, pytest.approx(0.1, rel=1e-6))
    assert all((grad == 2.0 * factor).all() for grad in grads)


def test_those_that_no_kernel_takes_count_too(modules: EmulatedModules) -> None:
    grads = [torch.full((4,), 2.0), torch.full((8,), 3.0)[::2], torch.tensor([2.0]).double()]
    norm, factor = cuda_norms.clip_together(sums(8.0), grads, 4.0)
    assert norm.item() == pytest.approx(8.0)
    assert [grad[0].item() for grad in grads] == pytest.approx([1.0, 1.5, 1.0])
    assert factor.item() == pytest.approx(0.5)


def test_nothing_has_the_norm_zero(modules: EmulatedModules) -> None:
    assert [one.item() for one in cuda_norms.clip_together((), [], 1.0)] == [0.0, 1.0]


def test_sums_of_several_devices_are_one_norm(modules: EmulatedModules) -> None:
    norm, factor = cuda_norms.clip_factor(sums(9.0, 16.0), 1.0, 0.0)
    assert (norm.item(), factor.item()) == (5.0, pytest.approx(0.2))


def test_the_norm_is_not_written_to_the_factor(modules: EmulatedModules) -> None:
    norm, factor = cuda_norms.clip_factor(sums(4.0), 1.0, 0.0)
    norm.fill_(7.0)
    assert factor.item() == 0.5


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_the_norm_of_kernels_and_torch_together_clips_all(
    modules: EmulatedModules, max_norm: float
) -> None:
    grads = [torch.full((4,), 3.0), torch.full((4,), 4.0).double()]
    assert cuda_kernels.clip_by_norm(grads, max_norm, 2.0).item() == pytest.approx(10.0)
    factor = min(1.0, max_norm / 10)
    assert torch.cat([grads[0].double(), grads[1]]).tolist() == pytest.approx(
        [3.0 * factor] * 4 + [4.0 * factor] * 4, rel=1e-5
    )


def test_what_does_not_accept_the_norm_has_nothing_clipped(modules: EmulatedModules) -> None:
    def accept(total: Tensor) -> None:
        raise ArithmeticError(total.item())

    grads = [torch.full((4,), 3.0)]
    with pytest.raises(ArithmeticError, match=r"^10\.0$"):
        cuda_norms.clip_together(sums(64.0), grads, 1.0, accept)
    assert grads[0].tolist() == [3.0] * 4


def test_other_norms_are_torchs(modules: EmulatedModules) -> None:
    grads = [torch.tensor([3.0, -4.0])]
    assert cuda_kernels.clip_by_norm(grads, 1.0, INF).item() == 4.0
    assert modules.launched == []
