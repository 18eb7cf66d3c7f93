"""Gradients that are made when they are asked for."""

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.weights.lazy_gradients import (
    LazyGradients,
    LazyGradParameter,
    Made,
    all_are,
    are_still,
    as_plain_tensors,
    clear_grads,
    have_none,
    listed,
    look_up,
    store_grad,
    store_grads,
    stored_grad,
)


class Waiting:
    """Two parameters whose gradients wait; counts how often they are made."""

    def __init__(self) -> None:
        self.lazy = LazyGradients()
        self.params = [self.lazy.parameter(torch.ones(n), True) for n in (2, 3)]
        self.grads = [torch.full((n,), float(n)) for n in (2, 3)]
        self.count = 0
        self.lazy.hold(self.params, self)

    def make(self, rows: Sequence[int]) -> list[Tensor]:
        self.count += 1
        return [self.grads[row] for row in rows]


@pytest.fixture
def made() -> Waiting:
    return Waiting()


def test_to_read_one_makes_all_once(made: Waiting) -> None:
    assert [stored_grad(param) for param in made.params] == [None, None]
    assert made.count == 0
    for param, grad in zip(made.params, made.grads, strict=True):
        assert param.grad is grad
        assert stored_grad(param) is grad
    assert made.count == 1
    assert not made.lazy.are_waiting


def test_to_set_one_makes_the_others(made: Waiting) -> None:
    made.params[0].grad = None
    assert [param.grad for param in made.params] == [None, made.grads[1]]


def test_to_delete_one_makes_the_others(made: Waiting) -> None:
    del made.params[1].grad
    assert [param.grad for param in made.params] == [made.grads[0], None]


def test_what_was_dropped_is_not_made(made: Waiting) -> None:
    made.lazy.drop()
    assert [param.grad for param in made.params] == [None, None]
    assert made.count == 0


def test_one_that_is_discarded_is_none_and_the_others_are_stored(made: Waiting) -> None:
    made.lazy.discard(made.params[:1])
    assert [stored_grad(param) for param in made.params] == [None, made.grads[1]]
    assert not made.lazy.are_waiting


def test_when_all_are_discarded_none_is_made(made: Waiting) -> None:
    made.lazy.discard(made.params)
    assert [param.grad for param in made.params] == [None, None]
    assert made.count == 0


def test_gradients_that_are_there_are_made_by_row() -> None:
    grads = [torch.ones(n) for n in range(3)]
    assert Made(grads).make([2, 0]) == [grads[2], grads[0]]


def test_a_gradient_of_another_backward_is_added(made: Waiting) -> None:
    (made.params[1] * 10).sum().backward()
    assert torch.equal(made.params[1].grad, torch.full((3,), 13.0))
    assert made.params[0].grad is made.grads[0]


def test_clearing_leaves_what_waits(made: Waiting) -> None:
    store_grad(made.params[0], torch.ones(2))
    clear_grads(made.params)
    assert stored_grad(made.params[0]) is None
    assert made.params[0].grad is made.grads[0]


def test_it_is_a_parameter_whose_results_are_tensors(made: Waiting) -> None:
    param = made.params[0]
    assert isinstance(param, nn.Parameter)
    assert param.is_leaf
    assert type(param.detach()) is type(param * 2) is type(param.data) is Tensor


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_is_without(made: Waiting, copied) -> None:
    param = made.params[0]
    param.note = "kept by pickle"
    twin = copied(param)
    assert isinstance(twin, nn.Parameter)
    assert torch.equal(twin, param)
    assert twin.requires_grad
    assert twin.grad is None
    assert getattr(twin, "note", param.note) == param.note
    twin.grad = torch.zeros(2)
    assert made.count == 0


def test_a_parameter_does_not_keep_the_others_alive(made: Waiting) -> None:
    param = made.params[0]
    reference = weakref.ref(made.params[1])
    gc.disable()
    try:
        made.params.clear()
        made.lazy.drop()
        del made.lazy
        assert reference() is None
    finally:
        gc.enable()
    assert param.grad is None


def test_without_a_source_it_is_like_any_other() -> None:
    param = LazyGradParameter(torch.ones(2))
    param.sum().backward()
    assert torch.equal(param.grad, torch.ones(2))


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


def test_only_classes_that_have_no_torch_function_are_plain(made: Waiting) -> None:
    ones = torch.ones(2)
    for others, asks in [([ones, nn.Parameter(ones)], False), ([Asked(ones)], True)]:
        with as_plain_tensors([*made.params, *others]):
            assert torch._C._is_torch_function_enabled() == asks
        assert torch._C._is_torch_function_enabled()


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_class_of_its_own_among_plain_parameters_is_not_asked(
    made: Waiting, is_lazy: bool
) -> None:
    own = made.params[0] if is_lazy else Asked(torch.ones(2))
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
    assert made.count == 0


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
