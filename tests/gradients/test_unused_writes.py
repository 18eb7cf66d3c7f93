"""What is written to half gradients after a block is told, and nothing else is taken for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from trained_pair import INPUTS, Pair

LEVELS = ("O1", "O2", "O5")

WRITES: dict[str, Callable[[Any], Any]] = {
    "clamp": lambda param: param.grad.clamp_(-1e-3, 1e-3),
    "data": lambda param: param.grad.data.clamp_(-1e-3, 1e-3),
    "sign": lambda param: param.grad.data.neg_(),
    "foreach": lambda param: torch._foreach_mul_([param.grad], 3.0),
}


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_them_is_told(amp: ModuleType, level: str, write: str) -> None:
    pair = Pair(amp, level)
    for _ in range(3):
        pair.optimizer.zero_grad()
        pair.backward(INPUTS[0])
        pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.backward(INPUTS[0])
    for param in pair.model.parameters():
        WRITES[write](param)
    with pytest.warns(UserWarning, match="What is written to the gradients of half parameters"):
        pair.optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_writes_to_masters_and_steps_that_are_right_are_not_told(
    amp: ModuleType, level: str
) -> None:
    pair = Pair(amp, level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(20):
            pair.optimizer.zero_grad()
            pair.backward(INPUTS[step % 4])
            for master in amp.master_params(pair.optimizer):
                master.grad.data.mul_(0.5)
            pair.optimizer.step()


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("moves_late", [False, True])
@pytest.mark.parametrize("options", [{}, {"fused_step": True}])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_that_ddp_moves_to_other_buckets_are_not_told(
    amp: ModuleType, level: str, options: dict[str, bool], moves_late: bool
) -> None:
    pair = Pair(amp, level, **options)
    # with a static graph they move before the third backward
    pair.model = DistributedDataParallel(
        pair.model, gradient_as_bucket_view=True, static_graph=moves_late
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs in INPUTS[: 3 if moves_late else 2]:
            pair.backward(inputs)
        pair.optimizer.step()
    for param, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        expected = plain.detach() - 0.5 * plain.grad
        torch.testing.assert_close(param.detach().float(), expected, rtol=1e-2, atol=3e-3)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_is_shown_in_a_bucket_of_two_optimizers_is_no_write_of_the_script(
    amp: ModuleType, level: str, is_written: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with amp.scale_loss(wrapper(torch.ones(2, 4)).sum(), optimizers) as scaled_loss:
                scaled_loss.backward()
            if is_written:
                model[0].weight.grad.mul_(0.5)
            for optimizer in optimizers:
                amp.clip_grad_norm_(optimizer, 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert all("has no effect" in str(one.message) for one in caught)
    assert bool(caught) is is_written
