"""An optimizer's own ``zero_grad`` clears of half parameters what it clears of masters."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD

from amp_patch.step.own_zero_grad import OwnZeroGrad

Row = tuple[Tensor, Tensor]


def rows(count: int) -> list[Row]:
    """Return half parameters with gradients of ones, and masters without."""
    found = []
    for size in range(1, count + 1):
        param = nn.Parameter(torch.ones(size, dtype=torch.float16))
        param.grad = torch.ones_like(param)
        found.append((param, nn.Parameter(torch.ones(size))))
    return found


def groups_of(*groups: list[Row]) -> list[dict[str, Any]]:
    return [{"params": [master for _, master in group]} for group in groups]


def to_none(group: list[Row]) -> None:
    for _, master in group:
        master.grad = None


def to_zeros(group: list[Row]) -> None:
    for _, master in group:
        if master.grad is not None:
            master.grad.detach_().zero_()


def to_zeros_by_data(group: list[Row]) -> None:
    for _, master in group:
        if master.grad is not None:
            master.grad.data.zero_()


def halves(group: list[Row]) -> set[float | None]:
    return {None if param.grad is None else param.grad.max().item() for param, _ in group}


@pytest.mark.parametrize(
    ("clear", "left"), [(to_none, None), (to_zeros, 0.0), (to_zeros_by_data, 0.0)]
)
def test_each_group_is_cleared_as_its_masters_are(clear: Any, left: float | None) -> None:
    first, second, third = rows(2), rows(3), rows(1)
    call = OwnZeroGrad(groups_of(first, second, third), [*first, *second, *third])
    clear(first)
    to_none(third)
    assert call.follow() == {id(param) for param, _ in (*first, *third)}
    assert [halves(group) for group in (first, second, third)] == [{left}, {1.0}, {None}]
    assert all(master.grad is None for _, master in (*first, *second, *third))


def test_what_a_master_had_of_its_own_is_left_with_it() -> None:
    (row,) = rows(1)
    own = row[1].grad = torch.ones(1)
    assert OwnZeroGrad(groups_of([row]), [row]).follow() == set()
    assert row[1].grad is own
    assert halves([row]) == {1.0}


def test_all_is_cleared_where_all_groups_are() -> None:
    group, without = rows(2), rows(1)
    without[0][0].grad = None
    call = OwnZeroGrad(groups_of(group, without), [*group, *without])
    to_none(group)
    assert call.follow() is None
    assert halves(group) == {None}


def test_halves_whose_masters_are_in_no_group_are_cleared() -> None:
    group = rows(1)
    call = OwnZeroGrad([{"params": [group[0][0]]}], group)
    assert call.follow() is None
    assert halves(group) == {None}


class ClearsTheFirstGroup(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_gradients_of_the_other_group_add_up(amp: ModuleType, level: str, delay: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 8))
    groups = [{"params": part.parameters()} for part in model]
    optimizer = ClearsTheFirstGroup(groups, lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def backward(**options: bool) -> None:
        loss = model(torch.linspace(-1, 1, 12).reshape(3, 4)).float().square().mean()
        scaled_backward(amp, loss, optimizer, **options)

    def gradients() -> list[Tensor]:
        return [master.grad.clone() for master in amp.master_params(optimizer)]

    backward()
    once = gradients()
    model.zero_grad()
    for master in amp.master_params(optimizer):
        master.grad = None
    backward(delay_unscale=delay)
    optimizer.zero_grad()
    backward()
    twice = gradients()
    torch.testing.assert_close(twice[:2], once[:2])
    torch.testing.assert_close(twice[2:], [2 * grad for grad in once[2:]])


class ClearsMatrices(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() > 1:
                    param.grad = None


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_matrices_of_a_group_may_be_cleared_and_vectors_left(amp: ModuleType, level: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = ClearsMatrices(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    scaled_backward(amp, model(torch.ones(1, 3)).float().sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert [param.grad is None for param in (model.weight, model.bias)] == [True, False]


class Fails(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        raise ArithmeticError


def test_a_call_that_fails_leaves_masters_without_gradients(amp: ModuleType) -> None:
    model = nn.Linear(3, 2)
    optimizer = Fails(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    scaled_backward(amp, model(torch.ones(1, 3)).float().sum(), optimizer)
    optimizer.step()
    with pytest.raises(ArithmeticError):
        optimizer.zero_grad()
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    assert [master.grad for master in masters] == [None, None]
    assert all(param.grad is not None for param in model.parameters())
