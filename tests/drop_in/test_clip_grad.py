"""apex.contrib.clip_grad: clips as torch does, and as the norm in float64 demands."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch
from torch import nn

SHARES_APEX = True


@pytest.fixture
def clip(apex: types.ModuleType) -> Any:
    return importlib.import_module("apex.contrib.clip_grad").clip_grad_norm_


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((2, 3), (5,), ())]
    for number, param in enumerate(params[:2], start=1):
        param.grad = torch.full_like(param, float(number))
    return params


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("max_norm", "factor"), [(1.0, 1 / 26**0.5), (100.0, 1.0)])
def test_gradients_are_scaled_to_the_norm(
    clip: Any, dtype: torch.dtype, max_norm: float, factor: float
) -> None:
    params = parameters(dtype)
    norm = clip(params, max_norm)
    tolerance = {"rtol": 1e-2, "atol": 0.0}
    torch.testing.assert_close(norm.double(), torch.tensor(26.0**0.5).double(), **tolerance)
    for number, param in enumerate(params[:2], start=1):
        expected = torch.full_like(param, number * factor)
        torch.testing.assert_close(param.grad, expected, **tolerance)
    assert params[2].grad is None


@pytest.mark.parametrize(("norm_type", "expected"), [(1.0, 16.0), (float("inf"), 2.0)])
def test_other_norms(clip: Any, norm_type: float, expected: float) -> None:
    assert clip(parameters(), 100.0, norm_type).item() == pytest.approx(expected)


def test_one_tensor_and_an_iterator_will_do(clip: Any) -> None:
    params = parameters()
    assert clip(params[0], 100.0).item() == pytest.approx(6.0**0.5)
    assert clip(iter(params), 100.0).item() == pytest.approx(26.0**0.5)


def test_what_is_not_finite_is_refused_on_demand(clip: Any) -> None:
    params = parameters()
    params[0].grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip(params, 1.0, error_if_nonfinite=True)
    assert params[1].grad[0] == 2.0
    assert not torch.isfinite(clip(params, 1.0))


def test_it_lies_where_apex_had_it(clip: Any) -> None:
    module = importlib.import_module("apex.contrib.clip_grad.clip_grad")
    assert module.clip_grad_norm_ is clip
