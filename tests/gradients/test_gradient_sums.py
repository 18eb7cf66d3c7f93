"""Gradients are added to those that were there, of all layouts, as float64 adds them."""

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.gradients.gradient_sums import add_to_earlier
from amp_patch.gradients.param_pairs import ParamPairs

LAYOUTS = st.sampled_from(["none", "dense", "sparse"])


def gradient(layout: str, values: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return numbers that float16 holds exactly; a sparse gradient has each row twice."""
    if layout == "none":
        return None
    if layout == "dense":
        return values.to(dtype)
    rows = torch.arange(len(values)).repeat(2).unsqueeze(0)
    entries = torch.cat([values, torch.zeros_like(values)]).to(dtype)
    return torch.sparse_coo_tensor(rows, entries, values.shape)


def dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return (grad.to_dense() if grad.is_sparse else grad).double()


@given(st.lists(st.tuples(LAYOUTS, st.sampled_from(["dense", "sparse"]), st.booleans())))
def test_sums_are_those_of_float64(rows: list[tuple[str, str, bool]]) -> None:
    params, masters, grads, aside, expected = [], [], [], {}, []
    for place, (earlier, layout, has_master) in enumerate(rows):
        dtype = torch.float32 if has_master else torch.float16
        param = nn.Parameter(torch.zeros(3, 2, dtype=torch.float16))
        master = nn.Parameter(torch.zeros(3, 2)) if has_master else param
        before, grad = torch.full((3, 2), place + 1.0), torch.full((3, 2), 0.5 * place)
        was = gradient(earlier, before, dtype)
        if has_master:
            master.grad = was
        elif was is not None:
            aside[id(param)] = was
        params.append(param)
        masters.append(master)
        grads.append(gradient(layout, grad, dtype))
        expected.append(grad.double() + (0 if was is None else before.double()))
    sums = add_to_earlier(ParamPairs(params, masters), grads, aside)
    assert sums.were_made == any(earlier != "none" for earlier, _, _ in rows)
    assert not any(flag.item() for flag in sums.found_inf)
    for master, sum_ in zip(masters, expected, strict=True):
        assert torch.equal(dense(master.grad), sum_)


@pytest.mark.parametrize(
    ("earlier", "is_found"), [(60000.0, True), (1.0, False), (torch.inf, False)]
)
def test_only_a_sum_that_overflows_is_told_of(earlier: float, is_found: bool) -> None:
    """An earlier inf was an overflow of another loss."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    aside = {id(param): torch.full((2,), earlier, dtype=torch.float16)}
    grads = [torch.full((2,), 60000.0, dtype=torch.float16)]
    (flag,) = add_to_earlier(ParamPairs([param], [param]), grads, aside).found_inf
    assert bool(flag) is is_found
    assert flag.shape == (1,)
    assert flag.dtype is torch.float32


@pytest.mark.parametrize(("in_half", "most"), [(True, 256.0), (False, 512.0)])
def test_blocks_add_many_micro_batches_in_float32(
    amp: ModuleType, in_half: bool, most: float
) -> None:
    """In bfloat16 a sum of ones ends at 256."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    for left in reversed(range(512)):
        loss = model(torch.ones(1, 1)).sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=in_half and left > 0) as scaled_loss:
            scaled_loss.backward()
    assert [param.grad.item() for param in amp.master_params(optimizer)] == [most, most]
