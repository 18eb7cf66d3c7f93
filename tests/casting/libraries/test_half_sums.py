"""Sums of half rows at indices have float64's values, rounded once, and take little memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from amp_patch.casting.libraries import half_sums
from amp_patch.casting.libraries.half_sums import add_rows, can_add
from amp_patch.tools.sweep.memory import LivingTensors

HALVES = [torch.float16, torch.bfloat16]
INDEX = torch.tensor([0, 2, 2, 0, 5, 2, 2])


def exact(rows: Tensor, dim: int, size: int, is_mean: bool) -> Tensor:
    """Return the sums in float64, of which each is made by itself."""
    parts = []
    for place in range(size):
        own = rows.double().index_select(dim, (place == INDEX).nonzero().flatten())
        total = own.sum(dim)
        parts.append(total / max(1, own.size(dim)) if is_mean else total)
    return torch.stack(parts, dim % rows.dim())


@pytest.fixture(params=[1, 1 << 21], ids=["in pieces", "at once"])
def _piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_sums, "_LEAST", request.param)
    monkeypatch.setattr(half_sums, "_SHARE", 1 / 3)


@pytest.mark.usefixtures("_piece")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((7,), 0), ((7, 3), -2), ((2, 7), 1), ((2, 7, 4), -2)])
def test_sums_and_gradients_are_those_of_float64(
    dtype: torch.dtype, is_mean: bool, shape: tuple[int, ...], dim: int
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(shape).to(dtype).requires_grad_()
    assert can_add(rows, INDEX, dim, None)
    found = add_rows(rows, INDEX, dim, None, is_mean)
    expected = exact(rows, dim, 6, is_mean)
    eps = torch.finfo(dtype).eps
    assert found.dtype is dtype
    assert found.is_contiguous()  # as what torch adds to, which may be viewed
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=1e-6)
    weights = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, rows, weights)
    (expected,) = torch.autograd.grad(expected, rows, weights.double())
    torch.testing.assert_close(grad, expected, rtol=2 * eps, atol=1e-6)


@pytest.mark.usefixtures("_piece")
@pytest.mark.parametrize("is_mean", [False, True])
def test_a_hub_is_added_up_in_float32_in_the_second_derivative_as_well(is_mean: bool) -> None:
    rows = torch.ones(4096, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(4096, dtype=torch.long)
    found = add_rows(rows, index, 0, 1, is_mean)
    (grad,) = torch.autograd.grad(found.square().sum() / 2, rows, create_graph=True)
    (second,) = torch.autograd.grad(grad.float().sum(), rows)
    size = 1 if is_mean else 4096
    assert found.item() == size
    assert grad.unique().item() == size / (4096 if is_mean else 1)
    assert second.unique().item() == size / (4096 if is_mean else 1)


def test_no_float32_copy_of_all_rows_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_sums, "_LEAST", 1)
    rows = torch.randn(8000, 64, dtype=torch.float16, requires_grad=True)
    index = torch.randint(10, (8000,))
    weights = torch.ones(10, 64, dtype=torch.float16)
    taken: Any = rows * 1
    with LivingTensors() as living:
        before = living.peak
        found = add_rows(taken, index, 0, 10, is_mean=False)
        in_forward = living.peak - before
        del taken
        found.backward(weights)
    half = rows.nbytes
    assert in_forward < 0.15 * half  # a sixteenth of the rows in float32, and the sums
    assert living.peak - before < 1.05 * half  # their gradient, when the rows are gone or not


@pytest.mark.parametrize(
    "make",
    [
        lambda rows, index: (rows.float(), index, 0, 6),
        lambda rows, index: (rows, index.int(), 0, 6),
        lambda rows, index: (rows, index[None], 0, 6),
        lambda rows, index: (rows, index[:3], 0, 6),
        lambda rows, index: (rows, index, 2, 6),
        lambda rows, index: (rows[:0], index[:0], 0, 6),
        lambda rows, index: (rows.to_sparse(), index, 0, 6),
        lambda rows, index: (rows, index, 0, torch.tensor(6)),
    ],
    ids=["float32", "int32", "matrix", "too few", "no dimension", "empty", "sparse", "tensor"],
)
def test_others_are_left_alone(make: Callable[..., Any]) -> None:
    assert not can_add(*make(torch.ones(7, 2, dtype=torch.float16), INDEX))


def test_so_are_derivatives_in_forward_mode_and_transforms() -> None:
    rows = torch.ones(7, 2, dtype=torch.float16)
    seen = []

    def ask(one: Tensor) -> Tensor:
        seen.append(can_add(one, INDEX, 0, 6))
        return one

    torch.func.vmap(ask)(rows[None])
    with forward_ad.dual_level():
        ask(rows)
    assert seen == [False, False]
    assert can_add(rows, INDEX, 0, 6)
