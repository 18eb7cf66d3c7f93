"""Lists of parameters: what torch knows of each, past its class, and which lists are the same."""

import weakref
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from amp_patch.weights.lazy_gradients import LazyGradients, Made
from amp_patch.weights.parameter_lists import (
    Tensors,
    all_are,
    are_same,
    are_still,
    as_plain_tensors,
    clear_grads,
    have_none,
    in_shares,
    listed,
    look_up,
    store_grads,
    stored_grad,
)


class Asked(nn.Parameter):
    """A user's parameter; lists what torch asks of it."""

    functions: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.functions.append(function.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_only_classes_that_have_no_torch_function_are_plain() -> None:
    ones = torch.ones(2)
    master = LazyGradients().parameter(ones, True)
    for others, asks in [([ones, nn.Parameter(ones)], False), ([Asked(ones)], True)]:
        with as_plain_tensors([master, *others]):
            assert torch._C._is_torch_function_enabled() == asks
        assert torch._C._is_torch_function_enabled()


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_class_of_its_own_among_plain_parameters_is_not_asked(is_lazy: bool) -> None:
    lazy = LazyGradients()
    own = lazy.parameter(torch.ones(2), True) if is_lazy else Asked(torch.ones(2))
    lazy.hold([own], Made([torch.ones(2)]))
    params = listed([nn.Parameter(torch.ones(2)), own])
    grads = [torch.zeros(2), torch.ones(2)]
    Asked.functions.clear()
    assert have_none(params)
    store_grads(params, grads)
    assert look_up(stored_grad, params) == grads
    assert not have_none(params)
    assert all_are(torch.Tensor.is_floating_point, params)
    clear_grads(params)
    assert have_none(params)
    assert not Asked.functions
    assert lazy.are_waiting


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_users_class_of_parameters_is_asked_in_the_step(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    model = nn.Linear(2, 1)
    model.weight = Asked(torch.ones(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, fused_step=fused_step)
    with amp.scale_loss(model(torch.ones(1, 2)).sum() / 8, optimizer) as scaled_loss:
        scaled_loss.backward()
    Asked.functions.clear()
    optimizer.step()
    assert "_foreach_copy_" in Asked.functions
    assert model.weight.tolist() == [[0.875, 0.875]]


#: Of one value and of several shapes, so that many of two are equal, or broadcast to each other.
_MAKES: list[Any] = [
    *[lambda shape=shape: torch.ones(shape) for shape in [(), (1,), (2,), (1, 2), (2, 1), (0,)]],
    lambda: torch.ones(2, dtype=torch.float16),
    lambda: nn.Parameter(torch.ones(2)),
    lambda: nn.Parameter(torch.ones(1)),
    lambda: LazyGradients().parameter(torch.ones(2), True),
]


@given(st.lists(st.integers(0, len(_MAKES) - 1), max_size=4), st.data())
def test_a_list_still_holds_what_it_held_or_not(makes: list[int], data: st.DataObject) -> None:
    tensors = [_MAKES[make]() for make in makes]
    known, others = listed(tensors), list(tensors)
    for change in data.draw(st.lists(st.sampled_from(["make", "none", "drop", "add"]), max_size=2)):
        place = data.draw(st.integers(0, max(len(others) - 1, 0)))
        made = None if change == "none" else _MAKES[data.draw(st.integers(0, len(_MAKES) - 1))]()
        if change == "drop":
            del others[place : place + 1]
        elif change == "add":
            others.insert(place, made)
        else:
            others[place : place + 1] = [made]
    assert are_still(known, others) == (list(map(id, others)) == list(map(id, known)))
    assert are_still(known, tuple(others)) == are_still(known, others)


def test_lists_are_the_same_by_their_objects() -> None:
    tensors = [torch.zeros(1) for _ in range(4)]
    assert are_same(tensors, list(tensors))
    assert not are_same(tensors, [tensor.clone() for tensor in tensors])
    assert not are_same(tensors, tensors[:-1])


def test_parameters_can_be_referenced_weakly() -> None:
    tensors = [torch.zeros(1) for _ in range(4)]
    params = Tensors(tensors)
    reference = weakref.ref(params)
    assert are_same(reference(), tensors)
    del params
    assert reference() is None


@given(st.lists(st.integers(0, 9)), st.integers(0, 12))
def test_shares_have_all_rows_and_as_many_as_fit(sizes: list[int], at_most: int) -> None:
    shares = list(in_shares([torch.empty(size) for size in sizes], at_most))
    assert [row for share in shares for row in share] == list(range(len(sizes)))
    totals = [sum(sizes[row] for row in share) for share in shares]
    assert all(len(share) == 1 or n <= at_most for share, n in zip(shares, totals, strict=True))
    firsts = [sizes[share[0]] for share in shares[1:]]
    assert all(n + first > at_most for n, first in zip(totals, firsts, strict=False))
