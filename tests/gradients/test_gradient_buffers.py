"""Where unscaled gradients go: in place without masters, else to tensors that are used again."""

import pytest
import torch
from torch import Tensor

from amp_patch.gradients.gradient_buffers import GradientBuffers
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.kernels import small_tensors

F16, F32 = torch.float16, torch.float32
SCALE = 4.0


def half_pairs(*sizes: int) -> ParamPairs:
    """Return half parameters with their masters."""
    return ParamPairs([torch.zeros(n, dtype=F16) for n in sizes], [torch.zeros(n) for n in sizes])


def grads_of(pairs: ParamPairs, value: float = 8.0) -> list[Tensor]:
    return [torch.full_like(param, value) for param in pairs.model]


def test_without_masters_gradients_are_unscaled_in_place() -> None:
    params = [torch.zeros(3), torch.zeros(2)]
    buffers = GradientBuffers(ParamPairs(params, params))
    grads = grads_of(ParamPairs(params, params))
    check = buffers.unscale(grads, SCALE)
    assert buffers.is_in_place
    assert [id(grad) for grad in check.grads] == [id(grad) for grad in grads]
    assert [grad.tolist() for grad in grads] == [[2.0] * 3, [2.0] * 2]
    assert not check.overflow


@pytest.mark.parametrize("sizes", [(3, 2), (3, 1 << 20), (1 << 20,)])
def test_half_gradients_become_those_of_masters_and_stay_what_they_are(
    sizes: tuple[int, ...],
) -> None:
    pairs = half_pairs(*sizes)
    grads = grads_of(pairs)
    check = GradientBuffers(pairs).unscale(grads, SCALE)
    for grad, unscaled in zip(grads, check.grads, strict=True):
        assert torch.equal(unscaled, torch.full(grad.shape, 2.0))
        assert unscaled.dtype is F32
        assert torch.equal(grad, torch.full_like(grad, 8.0))


@pytest.mark.parametrize("sizes", [(3, 2), (3, 1 << 20), (1 << 20,)])
def test_where_no_overflow_counts_gradients_are_copied(sizes: tuple[int, ...]) -> None:
    pairs = half_pairs(*sizes)
    grads = grads_of(pairs)
    grads[0][0] = float("inf")
    buffers = GradientBuffers(pairs)
    check = buffers.unscale(grads, None)
    assert check.found_inf == []
    assert all(map(torch.equal, check.grads, [grad.float() for grad in grads]))
    late = buffers.unscale_small(grads, None)
    assert late is None or late.found_inf == []
    assert (late is None) == (max(sizes) < 1 << 20)


@pytest.mark.parametrize(("bad", "kind"), [(float("inf"), "inf"), (float("nan"), "NaN")])
def test_what_is_not_finite_is_found_by_its_row(bad: float, kind: str) -> None:
    pairs = half_pairs(3, 2)
    grads = grads_of(pairs)
    grads[1][0] = bad
    check = GradientBuffers(pairs).unscale(grads, SCALE)
    assert check.overflow
    assert check.nonfinite() == [(1, kind)]


def test_small_buffers_are_used_again_when_nobody_holds_them() -> None:
    pairs = half_pairs(3, 1 << 20)
    assert [small_tensors.is_small(one) for one in pairs.master] == [True, False]
    buffers = GradientBuffers(pairs)
    first = buffers.unscale(grads_of(pairs), SCALE).grads
    places = [grad.data_ptr() for grad in first]
    held = first[0]
    second = buffers.unscale(grads_of(pairs, 16.0), SCALE).grads
    assert held.tolist() == [2.0] * 3  # who holds a gradient keeps its values
    del first, held, second
    third = buffers.unscale(grads_of(pairs), SCALE).grads
    assert third[0].data_ptr() == places[0]


@pytest.mark.parametrize("odd", ["", "sparse", "small scale", "held", "mixed"])
def test_gradients_in_place_take_one_call_where_all_are_alike(
    monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    params = [torch.zeros(2, dtype=F16 if odd == "mixed" else F32), torch.zeros(3)]
    buffers, scale = GradientBuffers(ParamPairs(params, params)), 0.5 if odd == "small scale" else 8
    held = buffers.unscale([torch.full_like(one, torch.inf) for one in params], scale)
    if odd != "held":
        del held
    long: list[bool] = []
    run = buffers._unscale.run
    monkeypatch.setattr(buffers._unscale, "run", lambda *args: long.append(True) or run(*args))
    grads = [torch.full_like(one, 3.0) for one in params]
    grads = [grads[0].to_sparse(), grads[1]] if odd == "sparse" else grads
    check = buffers.unscale(grads, scale)
    assert bool(long) == bool(odd)
    assert not check.overflow
    assert [grad.to_dense().tolist() for grad in grads] == [[3 / scale] * n for n in (2, 3)]
    assert odd != "held" or held.overflow  # whoever keeps a check keeps what it found


def test_sparse_gradients_are_not_coalesced() -> None:
    pairs = ParamPairs([torch.zeros(2, 1, dtype=F16)], [torch.zeros(2, 1)])
    values = torch.tensor([[1.0], [2.0**-12]], dtype=F16)  # their sum rounds in half
    grad = torch.sparse_coo_tensor([[1, 1]], values, (2, 1))
    (unscaled,) = GradientBuffers(pairs).unscale([grad], 1.0).grads
    assert unscaled.dtype is F32
    assert unscaled.to_dense().tolist() == [[0.0], [1.0 + 2.0**-12]]


def test_they_fit_the_tensors_that_they_were_made_for() -> None:
    pairs = half_pairs(3, 2)
    buffers = GradientBuffers(pairs)
    assert buffers.fits(pairs)
    assert buffers.fits(ParamPairs(list(pairs.model), list(pairs.master)))
    assert not buffers.fits(half_pairs(3, 2))
    assert not buffers.fits(pairs.select([True, False]))


def test_columns_are_parted_by_who_has_a_master() -> None:
    half, own, master = torch.zeros(1, dtype=F16), torch.zeros(1), torch.zeros(1)
    buffers = GradientBuffers(ParamPairs([own, half], [own, master]))
    assert buffers.rows_of_masters == [1]
    assert [id(one) for one in buffers.of_masters([own, master])] == [id(master)]
    assert [id(one) for one in buffers.in_place([own, master])] == [id(own)]
