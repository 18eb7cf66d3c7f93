"""Hooks that only multiply a gradient are told from those that may depend on its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import get_world_size

from amp_patch.mistakes.linear_hooks import is_linear_in_grad, only_multiplies


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


Hook = Callable[[Any], Any]
FACTOR = 0.5
MASK = torch.tensor([1.0, 0.0, 1.0])
SEEN: list[Any] = []


def with_closure(mask: Tensor) -> Iterator[Hook]:
    yield lambda g: g * mask

    def clears_some(grad: Any) -> Any:
        grad = grad.clone()
        grad[:1] = 0
        return grad

    def clears_masked(grad: Any) -> Any:
        grad[mask == 0] = 0.0
        return grad

    yield clears_some
    yield lambda g: g / FACTOR

    def moves_the_mask(grad: Any) -> Any:
        masked = grad * mask.to(grad.device)
        return masked * 3

    yield moves_the_mask


def assigns(grad: Any) -> Any:
    grad *= MASK
    return grad


def writes(grad: Any) -> None:
    grad.mul_(MASK)


def averages(grad: Any) -> None:
    distributed.all_reduce(grad)
    grad /= distributed.get_world_size()


def averages_a_copy(grad: Any) -> Any:
    grad = grad.clone()
    work = torch.distributed.all_reduce(grad, op=torch.distributed.ReduceOp.SUM, async_op=True)
    work.wait()
    return grad / torch.distributed.get_world_size()


def averages_by_names(grad: Any) -> Any:
    mean = grad / get_world_size()
    distributed.all_reduce(mean)
    return mean


MULTIPLY: list[Hook] = [
    lambda g: g * 0.5,
    lambda g: -FACTOR * g,
    lambda g: -g,
    lambda g: g.neg(),
    lambda g: g.mul(MASK),
    lambda g: torch.mul(g, FACTOR),
    lambda g: g * MASK[0],
    lambda g: g.clone() * 2,
    assigns,
    writes,
    averages,
    averages_a_copy,
    averages_by_names,
    *with_closure(MASK),
]


def keeps(grad: Any) -> None:
    SEEN[0] = grad


def sets_a_number(grad: Any) -> Any:
    grad[:1] = 1e-3
    return grad


def has_a_branch(grad: Any) -> Any:
    return grad * 2 if grad.sum() > 1 else grad


def squares(grad: Any) -> Any:
    twice = grad * 2
    return grad * twice


def returns_another(grad: Any) -> Any:
    another = MASK.to(grad.device)
    another *= FACTOR
    return another


def has_two_arguments(grad: Any, seen: list[Any] = SEEN) -> Any:
    return grad * 2


MAY_DEPEND: list[Hook] = [
    lambda g: g * g,
    lambda g: g.mul(g),
    lambda g: 1 / g,
    lambda g: 3 / (g * 2),
    lambda g: torch.div(1, g),
    lambda g: g / g.norm(),
    lambda g: g.clamp(-1, 1),
    lambda g: torch.clamp(g, -1, 1),
    lambda g: g + 1,
    lambda g: g - MASK,
    lambda g: g**2,
    lambda g: g * (g > 1),
    lambda g: MASK,
    lambda g: MASK.to(g.device),
    lambda g: g.sign(),
    lambda g: get_world_size() / g,
    lambda g: g + get_world_size(),
    lambda g: distributed.broadcast(g, 0),
    lambda g: SEEN.append(g),
    lambda g: print(g),
    lambda g: squares(g),
    keeps,
    sets_a_number,
    has_a_branch,
    squares,
    returns_another,
    has_two_arguments,
    print,
    SEEN.append,
]


@pytest.mark.parametrize("hook", MULTIPLY)
def test_one_that_multiplies_is_seen_to_and_does(hook: Hook) -> None:
    assert only_multiplies(hook)
    grads = [torch.tensor([1.0, 2.0, -3.0]), 64 * torch.tensor([1.0, 2.0, -3.0])]
    given = [grad if (new := hook(grad)) is None else new for grad in grads]
    torch.testing.assert_close(given[1], 64 * given[0])


@pytest.mark.parametrize("hook", MAY_DEPEND)
def test_any_other_is_not(hook: Hook) -> None:
    assert not only_multiplies(hook)


def averages_at_last(param: Any) -> None:
    if SEEN and param.grad is not None:
        distributed.all_reduce(param.grad)
        param.grad /= get_world_size()


def multiplies_masked(mask: Tensor) -> Hook:
    return lambda param: param.grad.mul_(mask)


def drops_large(param: Any) -> None:
    param.grad[param.grad > 1] = 0


def decays(param: Any) -> None:
    param.grad = param.grad + 0.1 * param.data


OF_PARAMETERS: dict[Hook, bool] = {
    averages_at_last: False,  # at a place that it asks for by a name
    multiplies_masked(MASK): True,
    lambda param: distributed.all_reduce(param.grad): True,
    lambda param: torch.distributed.all_reduce(param.grad.mul_(0.5)): True,
    lambda param: param.grad.clamp_(-1, 1): False,
    lambda param: SEEN.append(param.grad.norm()): False,
    drops_large: False,
    decays: False,
    print: False,
}


@pytest.mark.parametrize(("hook", "is_linear"), [*OF_PARAMETERS.items()])
def test_what_is_linear_in_the_gradient_of_a_parameter(hook: Hook, is_linear: bool) -> None:
    assert is_linear_in_grad(hook) == is_linear
