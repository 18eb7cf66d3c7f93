"""Norms and clipping against numpy's and torch's own, by all implementations."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from drawn_tensors import (
    GRADS,
    INF,
    REAL,
    Operations,
    copies,
    doubles,
    numbers,
    rounded,
    tensors,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor


@given(GRADS, st.sampled_from([0.01, 1.0, 1e6]), st.sampled_from([1.0, 2.0, 3.5, INF]))
def test_clip_by_norm_is_that_of_the_dense_gradients(
    ops: Operations, grads: list[Tensor], max_norm: float, norm_type: float
) -> None:
    grads = ops.place(grads)
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
    before = [grad.to(torch.complex128, copy=True).cpu().numpy().ravel() for grad in dense]
    everything = np.abs(np.concatenate([np.zeros(1), *before]))
    expected = np.linalg.norm(everything, norm_type)
    total = ops.module.clip_by_norm(grads, max_norm, norm_type)
    assert total.shape == ()
    assert total.item() == pytest.approx(expected, rel=2e-2 if has_half_sparse(grads) else 1e-5)
    factor = min(1.0, max_norm / (total.item() + 1e-6))
    for grad, old in zip(grads, before, strict=True):
        new = grad.to_dense() if grad.is_sparse else grad
        torch.testing.assert_close(
            new.to(torch.complex128).flatten(),
            torch.as_tensor(old * factor),
            rtol=3e-2 if grad.is_sparse else 2 * torch.finfo(grad.dtype).eps + 1e-6,
            atol=2e-2 if grad.is_sparse else 1e-6,
        )


def has_half_sparse(grads: Sequence[Tensor]) -> bool:
    # to_dense() of the reference adds the entries of one row in half
    return any(grad.is_sparse and grad.dtype in REAL[:2] for grad in grads)


@given(
    st.lists(tensors(REAL[:3]).filter(lambda t: t.numel() > 0), min_size=1, max_size=6),
    st.sampled_from([0.01, 1.0, 1e6]),
    st.sampled_from([1.0, 2.0, INF]),
)
def test_clip_by_norm_is_torchs_clip_grad_norm(
    ops: Operations, grads: list[Tensor], max_norm: float, norm_type: float
) -> None:
    grads = ops.place(grads)
    # torch takes the norm of half gradients in half, so it gets them in fp32
    params = [torch.zeros(grad.shape) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(torch.float32, copy=True)
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, foreach=False)
    total = ops.module.clip_by_norm(grads, max_norm, norm_type)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for grad, param in zip(grads, params, strict=True):
        torch.testing.assert_close(grad, param.grad.to(grad.dtype))


def test_the_norm_of_half_gradients_is_taken_in_fp32(ops: Operations) -> None:
    grads = [torch.full((10000,), 60000.0, dtype=torch.float16)]
    assert ops.module.clip_by_norm(grads, 1e9, 2.0).item() == pytest.approx(
        float(grads[0][0]) * 100, rel=1e-5
    )


def test_a_factor_too_small_for_half_does_not_clear_half_gradients(ops: Operations) -> None:
    grads = [torch.full((4,), 60000.0, dtype=torch.float16), torch.full((1,), 1e12)]
    ops.module.clip_by_norm(grads, 2.0**18, 2.0)
    assert grads[0].tolist() == [pytest.approx(60000 * 2.0**18 / 1e12, rel=1e-3)] * 4


def test_the_norm_is_float64_where_a_gradient_is(ops: Operations) -> None:
    grads = [torch.ones(1, dtype=torch.float64) * (1 + 1e-12), torch.zeros(1)]
    assert ops.module.clip_by_norm(grads, 9.0, 2.0).item() == 1 + 1e-12


def test_the_norm_of_nothing_is_zero(ops: Operations) -> None:
    assert ops.module.clip_by_norm([], 1.0, 2.0).item() == 0.0
    assert ops.module.clip_by_norm([torch.ones(0)], 1.0, INF).item() == 0.0


@given(GRADS, st.sampled_from([0.01, 1.0, 1e6]), st.floats(0.1, 10.0))
def test_clip_by_a_known_norm_does_not_take_it(
    ops: Operations, grads: list[Tensor], max_norm: float, norm: float
) -> None:
    grads = ops.place(grads)
    before = copies(grads)
    known = torch.tensor(norm)
    assert ops.module.clip_by_norm(grads, max_norm, 2.0, known) is known
    factor = min(1.0, max_norm / (known.item() + 1e-6))
    for grad, old in zip(grads, before, strict=True):
        expected = rounded(doubles(old) * factor, grad.dtype)
        # the factor has two roundings in fp32
        rtol = 2 * torch.finfo(expected.dtype).eps + 1e-6
        torch.testing.assert_close(numbers(grad), expected, rtol=rtol, atol=1e-6)
