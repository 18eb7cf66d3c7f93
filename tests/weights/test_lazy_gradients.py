"""Gradients that are made when they are asked for."""

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from amp_patch.weights.lazy_gradients import LazyGradients, LazyGradParameter, Made
from amp_patch.weights.parameter_lists import (
    clear_grads,
    store_grad,
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


def test_a_gradient_goes_to_the_device_of_a_master_that_has_not_followed_yet() -> None:
    lazy = LazyGradients()
    params = [lazy.parameter(torch.ones(2, device=device), True) for device in ("meta", "cpu")]
    grads = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    lazy.hold(params, Made(grads))
    assert [str(param.grad.device) for param in params] == ["meta", "cpu"]
    assert params[1].grad is grads[1]


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


def test_what_was_stored_and_is_gone_is_forgotten(made: Waiting) -> None:
    for _ in range(3):
        made.grads = [torch.ones(2), torch.ones(3)]
        made.lazy.hold(made.params, made)
        assert [param.grad for param in made.params] == made.grads
        for param in made.params:
            param.grad = None
    assert len(made.lazy.stored) == 2
