"""Gradients of half tables that a CPU looks up rows of are float64's, rounded once."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from amp_patch.casting.libraries.lookups import looking_up

HALVES = [torch.float16, torch.bfloat16]
LEVELS = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
ROWS, WIDTH = 7, 3
embedding, embedding_bag = looking_up(torch.embedding), looking_up(torch.embedding_bag)


def table(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()


def is_near(found: Tensor, expected: Tensor) -> None:
    """Compare half gradients with float64's, whose largest number gives the tolerance."""
    tolerance = torch.finfo(found.dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@given(
    dtype=st.sampled_from(HALVES),
    count=st.sampled_from([1, 256, 257, 3000]),
    kinds=st.integers(1, ROWS),
    padding=st.integers(-1, ROWS - 1),
    by_freq=st.booleans(),
    integers=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 9),
)
def test_an_embedding_s_gradient(
    dtype: torch.dtype,
    count: int,
    kinds: int,
    padding: int,
    by_freq: bool,
    integers: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weight, ids = table(dtype), torch.randint(0, kinds, (count, 1), dtype=integers)
    wide = weight.detach().double().requires_grad_()
    options = (padding, by_freq)
    found, expected = embedding(weight, ids, *options), torch.embedding(wide, ids, *options)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0)
    grad = (torch.randn(found.shape) + 1).to(dtype)
    found.backward(grad)
    expected.backward(grad.double())
    if count <= 256:  # torch's own
        same = weight.detach().clone().requires_grad_()
        torch.embedding(same, ids, *options).backward(grad)
        torch.testing.assert_close(weight.grad, same.grad, rtol=0, atol=0)
    else:
        is_near(weight.grad, wide.grad)


@given(
    dtype=st.sampled_from(HALVES),
    count=st.sampled_from([257, 3000]),
    mode=st.sampled_from(["sum", "mean", "max"]),
    is_weighted=st.booleans(),
    padding=st.sampled_from([None, 0, ROWS - 1, -1]),
    by_freq=st.booleans(),
    integers=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 9),
)
def test_an_embedding_bag_s_gradient(
    dtype: torch.dtype,
    count: int,
    mode: str,
    is_weighted: bool,
    padding: int | None,
    by_freq: bool,
    integers: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weight, ids = table(dtype), torch.randint(0, ROWS, (count,), dtype=integers)
    offsets = torch.tensor([0, 2, 2, count // 2], dtype=integers)
    weights = torch.randn(count).to(dtype).requires_grad_() if is_weighted else None
    wide = [None if one is None else one.detach().double() for one in (weight, weights)]
    for one in wide:
        if one is not None:
            one.requires_grad_()
    by_freq = by_freq and mode != "max"
    number = ["sum", "mean", "max"].index(mode)
    weighted = is_weighted and mode == "sum"

    def call(function: Any, own: Tensor, per_sample: Any) -> Any:
        given = per_sample if weighted else None
        return function(own, ids, offsets, by_freq, number, False, given, False, padding)[0]

    found, expected = call(embedding_bag, weight, weights), call(torch.embedding_bag, *wide)
    assert found.dtype is dtype
    is_near(found.detach(), expected.detach())
    grad = (torch.randn(found.shape) + 1).to(dtype)
    found.backward(grad)
    expected.backward(grad.double())
    is_near(weight.grad, wide[0].grad)
    if weighted:
        is_near(weights.grad, wide[1].grad)


class Bags(nn.EmbeddingBag):
    """Makes the factors of its rows itself, in float32."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]  # makes the others
        self.factors = torch.linspace(0.5, 2.0, ids.numel()).view(ids.shape).requires_grad_()
        return super().forward(ids, per_sample_weights=self.factors)


@pytest.mark.parametrize("count", [4, 300])
@pytest.mark.parametrize("level", LEVELS)
def test_float32_factors_meet_a_half_table(amp: ModuleType, level: str, count: int) -> None:
    torch.manual_seed(0)
    plain, ids = Bags(ROWS, WIDTH, mode="sum"), torch.randint(ROWS, (2, count))
    model = amp.initialize(copy.deepcopy(plain), opt_level=level, verbosity=0)
    for bags in (model, plain):
        bags(ids).sum().backward()
    half = LEVELS[level]
    assert model.weight.dtype is half
    for found, expected in ((model.factors, plain.factors), (model.weight, plain.weight)):
        is_near(found.grad.to(half), expected.grad.double())


@pytest.mark.parametrize(("rows", "count"), [(1, 65), (2, 129)])
def test_few_rows_of_a_small_table_add_up_in_float32(rows: int, count: int) -> None:
    weight = torch.zeros(rows, 1, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.linspace(1.0, 2.0, count)[:, None].to(torch.bfloat16)
    embedding(weight, torch.zeros(count, dtype=torch.int64), -1).backward(grad)
    assert weight.grad[0] == grad.double().sum().to(torch.bfloat16)


def test_a_second_derivative_adds_up_in_float32_as_well() -> None:
    weight, ids = table(torch.bfloat16), torch.zeros(4096, dtype=torch.int64)
    found = embedding(weight, ids, -1)
    (first,) = torch.autograd.grad((found * found).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    expected[0] = 2 * 4096
    is_near(second, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # which torch calls for these
def test_batches_of_gradients_and_forward_derivatives_are_torch_s() -> None:
    weight, ids = table(torch.bfloat16), torch.randint(0, ROWS, (300,))
    found, expected = embedding(weight, ids, -1), torch.embedding(weight, ids, -1)
    grads = torch.randn(2, *found.shape).to(torch.bfloat16)
    ours, theirs = (
        torch.autograd.grad(one, weight, grads, is_grads_batched=True)[0]
        for one in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with forward_ad.dual_level():
        tangent = torch.randn_like(weight)
        dual = embedding(forward_ad.make_dual(weight, tangent), ids, -1)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent[ids])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, padding_idx=0)
        self.kinds = nn.Embedding(2, 8)
        self.bags = nn.EmbeddingBag(20, 8)
        self.out = nn.Linear(8, 50)

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        x = self.words(ids) + self.kinds(torch.zeros_like(ids)) + self.bags(bags)[:, None]
        return self.out(x)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_in_half_has_float32_s_gradients_of_frequent_words(
    amp: ModuleType, level: str
) -> None:
    torch.manual_seed(0)
    ids, bags = torch.randint(0, 50, (64, 64)), torch.randint(0, 20, (64, 10))
    model = Words()
    expected = torch.autograd.grad(F.cross_entropy(model(ids, bags).mT, ids), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    outputs = model(ids, bags)
    with amp.scale_loss(F.cross_entropy(outputs.mT, ids), optimizer) as scaled:
        scaled.backward()
    for found, one in zip(amp.master_params(optimizer), expected, strict=True):
        error = (found.grad.float() - one).norm() / one.norm()
        assert error < 2 * torch.finfo(LEVELS[level]).eps
    assert outputs.dtype is torch.float32


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_what_is_recorded_or_compiled_or_needs_no_gradient_is_torch_s(amp: ModuleType) -> None:
    model = Words()
    amp.initialize(model, opt_level="O5", verbosity=0)
    ids, bags = torch.randint(0, 50, (64, 64)), torch.randint(0, 20, (64, 10))
    expected = model(ids, bags)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, bags), expected, rtol=0.02, atol=0.02)
    traced = torch.jit.trace(model, (ids, bags), check_trace=False)
    torch.testing.assert_close(traced(ids, bags), expected, rtol=0.02, atol=0.02)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, bags), expected, rtol=0.02, atol=0.02)
    compiled(ids, bags).sum().backward()
    assert model.words.weight.grad.isfinite().all()
