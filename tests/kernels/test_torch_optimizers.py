"""The updates on multi-tensor functions: the bits of torch's own optimizers, and their rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from amp_patch.kernels import torch_optimizers
from amp_patch.kernels.torch_kernels import clip_factor, combined, norms_of

SHAPES = st.lists(
    st.sampled_from([(), (1,), (0,), (3, 5), (8,), (17,), (33, 9), (64, 8)]), min_size=1, max_size=4
)
SEEDS = st.integers(0, 2**32)
VARIANTS = st.sampled_from([{"foreach": False}, {"foreach": True}, {"fused": True}])


def tensors(shapes: list[tuple[int, ...]], generator: torch.Generator) -> list[Tensor]:
    return [
        torch.randn(shape, generator=generator) * 10.0 ** (index - 2)
        for index, shape in enumerate(shapes)
    ]


@given(
    shapes=SHAPES,
    seed=SEEDS,
    variant=VARIANTS,
    decoupled=st.booleans(),
    amsgrad=st.booleans(),
    late=st.sampled_from([0, 0, 1, 2]),
    options=st.fixed_dictionaries(
        {
            "lr": st.sampled_from([1e-3, 0.1]),
            "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)]),
            "eps": st.sampled_from([1e-8, 1e-3]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "maximize": st.booleans(),
        }
    ),
)
def test_adam_has_the_bits_of_torchs(
    shapes: list[tuple[int, ...]],
    seed: int,
    variant: dict[str, Any],
    decoupled: bool,
    amsgrad: bool,
    late: int,
    options: dict[str, Any],
) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = tensors(shapes, generator)
    ours = [param.clone() for param in params]
    kind = AdamW if decoupled else Adam
    optimizer = kind(params, amsgrad=amsgrad, **options, **variant)
    averages, squares, largest = ([torch.zeros_like(p) for p in params] for _ in range(3))
    steps = [torch.tensor(0.0) for _ in params]
    for turn in range(3):
        grads = tensors(shapes, generator)
        first = late if turn == 0 and late < len(params) else 0  # some begin later
        for param, grad in zip(params[first:], grads[first:], strict=True):
            param.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        update: Callable[..., None] = torch_optimizers.adam
        counts: Any = [float(step + 1) for step in steps[first:]]
        for step in steps[first:]:
            step += 1
        if "fused" in variant:
            update, counts = torch_optimizers.fused_adam, steps[first:]
        columns = (ours, grads, averages, squares, largest if amsgrad else [])
        update(*(column[first:] for column in columns), counts, decoupled=decoupled, **options)
        assert all(map(torch.equal, ours, params))


@given(
    shapes=SHAPES,
    seed=SEEDS,
    variant=VARIANTS,
    options=st.fixed_dictionaries(
        {
            "lr": st.sampled_from([1e-3, 0.5]),
            "momentum": st.sampled_from([0.0, 0.9]),
            "dampening": st.sampled_from([0.0, 0.25]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "nesterov": st.booleans(),
            "maximize": st.booleans(),
        }
    ).filter(lambda o: not o["nesterov"] or (o["momentum"] > 0 and o["dampening"] == 0)),
    late=st.booleans(),
)
def test_sgd_has_the_bits_of_torchs(
    shapes: list[tuple[int, ...]],
    seed: int,
    variant: dict[str, Any],
    options: dict[str, Any],
    late: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = tensors(shapes, generator)
    ours = [param.clone() for param in params]
    optimizer = SGD(params, **options, **variant)
    buffers: list[Tensor | None] = [None] * len(params)
    fused = "fused" in variant
    for turn in range(3):
        grads = tensors(shapes, generator)
        # torch's fused kernel takes no momentum that begins later
        first = 1 if turn == 0 and late and not fused and len(params) > 1 else 0
        for param, grad in zip(params[first:], grads[first:], strict=True):
            param.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        own = buffers[first:]
        update = torch_optimizers.fused_sgd if fused else torch_optimizers.sgd
        update(ours[first:], grads[first:], own, **options)
        buffers[first:] = own
        assert all(map(torch.equal, ours, params))


def test_no_gradient_is_changed() -> None:
    param, grad = torch.ones(3), torch.full((3,), 2.0)
    options = {"lr": 0.1, "weight_decay": 0.1, "maximize": True}
    momentum = {"momentum": 0.9, "dampening": 0.0, "nesterov": True}
    buffers: list[Tensor | None] = [None]
    for _ in range(2):
        torch_optimizers.sgd([param], [grad], buffers, **options, **momentum)
        state = [[torch.zeros(3)] for _ in range(2)]
        torch_optimizers.adam(
            [param], [grad], *state, [], [1.0], betas=(0.9, 0.9), eps=1e-8, decoupled=False,
            **options,
        )  # fmt: skip
    assert torch.equal(grad, torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("grads", "max_norm", "factor"),
    [
        ([[3.0], [4.0]], 1.0, 0.2),
        ([[3.0], [4.0]], 10.0, 1.0),
        ([[0.0], []], 1.0, 1.0),
        ([[1e30], [1e30]], 1.0, 0.0),
    ],
)
def test_the_clip_factor(grads: list[list[float]], max_norm: float, factor: float) -> None:
    norm = combined(norms_of([torch.tensor(grad) for grad in grads], 2.0), 2.0)
    found = clip_factor(norm, max_norm)
    torch.testing.assert_close(found, torch.tensor(factor))


def test_the_clip_factor_of_halves_is_taken_in_float32() -> None:
    grads = [torch.full((4,), 300.0, dtype=torch.float16)]
    assert clip_factor(combined(norms_of(grads, 2.0), 2.0), 60.0) == torch.tensor(0.1)
