"""Gradients that a script averages by hand in the last block of a step alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

WARNING = "gradients that a script averages over ranks must be all of a step"


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def in_place(grads: Sequence[Tensor]) -> None:
    for grad in grads:
        distributed.all_reduce(grad)


def of_data(grads: Sequence[Tensor]) -> None:
    for grad in grads:
        distributed.all_reduce(grad.data)


def to_one_rank(grads: Sequence[Tensor]) -> None:
    for grad in grads:
        distributed.reduce(grad, 0)


def flat(grads: Sequence[Tensor]) -> None:
    distributed.all_reduce(_flatten_dense_tensors(grads))


def averaged(
    amp: ModuleType,
    level: str,
    average: Callable[[Sequence[Tensor]], None] = in_place,
    *,
    in_first: bool = False,
    delayed: bool = False,
    blocks: int = 2,
    wrap: bool = False,
    logs: bool = False,
    hooks: bool = False,
) -> list[str]:
    """Return the warnings of two steps of some blocks, in the last of which a script averages.

    Args:
        in_first: whether it does so in the others as well.
        delayed: whether these have ``delay_unscale``.
        wrap: whether the model is in `DistributedDataParallel`.
        logs: whether each block sums the loss over ranks, for a log.
        hooks: whether hooks average in the backward, as FSDP2 does on a mesh that replicates.
    """
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    is_last = False

    def hook(param: Tensor) -> None:
        if is_last and param.grad is not None:
            distributed.all_reduce(param.grad)

    for param in model.parameters() if hooks else ():
        param.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    run = DistributedDataParallel(model) if wrap else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            for index in range(blocks):
                is_last = index == blocks - 1
                loss = run(torch.ones(4, 3)).float().square().mean()
                delays = delayed and not is_last
                with amp.scale_loss(loss, optimizer, delay_unscale=delays) as scaled_loss:
                    scaled_loss.backward()
                    if logs:
                        distributed.all_reduce(loss.detach().clone())
                    if (is_last or in_first) and not hooks:
                        average([param.grad for param in model.parameters()])
            optimizer.step()
    return [str(one.message) for one in caught if WARNING in str(one.message)]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("average", [in_place, of_data, to_one_rank, flat])
def test_an_average_in_the_last_block_alone_is_told_of(
    amp: ModuleType, level: str, average: Callable[[Sequence[Tensor]], None]
) -> None:
    assert len(averaged(amp, level, average)) == 1


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_nothing_is_said_where_a_block_has_the_sum_of_all(amp: ModuleType, level: str) -> None:
    assert averaged(amp, level) == []


@pytest.mark.parametrize(
    "options",
    [
        {"in_first": True},
        {"delayed": True},
        {"blocks": 1},
        {"wrap": True},
        {"hooks": True},
        {"average": lambda grads: None, "logs": True},
        {"blocks": 1, "logs": True},
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_is_said_of_other_averages(
    amp: ModuleType, level: str, options: dict[str, Any]
) -> None:
    assert averaged(amp, level, **options) == []
