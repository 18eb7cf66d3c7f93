"""Gradients that come when a script reads or sets one of a few parameters."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_patch.gradients.gradient_offer import GradientOffer


class Own(nn.Parameter):
    """A user's own class of parameters."""


class Giver:
    """Gives each of its parameters ones."""

    def __init__(self, kinds: tuple[type[nn.Parameter], ...] = (nn.Parameter, nn.Parameter)):
        self.params: list[Tensor] = [kind(torch.zeros(2)) for kind in kinds]
        self.kinds = list(kinds)
        self.offer = GradientOffer(self)
        self.given = 0
        self.refuses = False
        self.looked_at: list[Tensor] = []

    def show_gradients(self) -> None:
        self.offer.withdraw()
        self.given += 1
        for param in self.params:
            param.grad = torch.ones(2)

    def refuse_assignment(self) -> None:
        if self.refuses:
            raise RuntimeError("refused")

    def look_at(self, master: Tensor) -> None:
        self.looked_at.append(master)

    def offer_gradients(self) -> None:
        self.offer.make([nn.Parameter(torch.zeros(2).half()) for _ in self.params], self.params)

    def watch_gradients(self) -> None:
        self.offer.watch([nn.Parameter(torch.zeros(2).half()) for _ in self.params], self.params)

    def has_own_classes(self) -> bool:
        return list(map(type, self.params)) == self.kinds


@pytest.fixture(params=[(nn.Parameter,) * 2, (Own, nn.Parameter)], ids=["torch's", "own"])
def giver(request: pytest.FixtureRequest) -> Giver:
    return Giver(request.param)


def test_an_assignment_may_be_refused_and_a_gradient_cleared(giver: Giver) -> None:
    giver.offer_gradients()
    giver.refuses = True
    with pytest.raises(RuntimeError, match="refused"):
        giver.params[0].grad = torch.zeros(2)
    assert not giver.given
    giver.params[0].grad = None
    assert giver.given == 1
    assert giver.params[0].grad is None


def test_the_first_that_is_read_brings_all(giver: Giver) -> None:
    giver.offer_gradients()
    assert isinstance(giver.params[0], giver.kinds[0])
    assert not giver.given
    assert [param.grad.tolist() for param in giver.params] == [[1.0, 1.0]] * 2
    assert giver.given == 1
    assert giver.has_own_classes()


def test_one_that_is_set_is_set_behind_the_others(giver: Giver) -> None:
    giver.offer_gradients()
    giver.params[0].grad = torch.zeros(2)
    assert [param.grad.tolist() for param in giver.params] == [[0.0, 0.0], [1.0, 1.0]]
    giver.offer_gradients()
    del giver.params[1].grad
    assert giver.params[1].grad is None
    assert giver.given == 2


def test_what_is_withdrawn_asks_no_more(giver: Giver) -> None:
    giver.offer_gradients()
    giver.offer_gradients()  # after a second backward
    giver.offer.withdraw()
    assert giver.has_own_classes()
    assert [param.grad for param in giver.params] == [None, None]
    assert not giver.given


def test_a_parameter_that_is_its_own_master_never_asks(giver: Giver) -> None:
    giver.offer.make([giver.params[0], nn.Parameter(torch.zeros(2).half())], giver.params)
    assert type(giver.params[0]) is giver.kinds[0]
    assert giver.params[0].grad is None
    assert not giver.given
    assert giver.params[1].grad.tolist() == [1.0, 1.0]


def test_others_are_offered_where_the_list_is_another(giver: Giver) -> None:
    giver.offer_gradients()
    others = Giver((Own,))
    giver.offer.make([nn.Parameter(torch.zeros(2).half())], others.params)
    assert giver.has_own_classes()
    assert not others.has_own_classes()


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda param: pickle.loads(pickle.dumps(param))], ids=["copy", "pickle"]
)
def test_a_copy_is_as_of_a_parameter_that_never_asked(giver: Giver, make: Any) -> None:
    expected = type(make(giver.params[0]))
    giver.offer_gradients()
    copied = make(giver.params[0])
    assert type(copied) is expected
    assert copied.tolist() == [0.0, 0.0]
    assert giver.has_own_classes()


def test_parameters_outlive_who_gives() -> None:
    giver = Giver()
    params, reference = giver.params, weakref.ref(giver)
    giver.offer_gradients()
    gc.disable()
    try:
        del giver
        assert reference() is None
    finally:
        gc.enable()
    assert params[0].grad is None
    params[1].grad = torch.ones(2)
    assert list(map(type, params)) == [nn.Parameter] * 2


def test_torch_takes_them_for_what_they_are() -> None:
    giver = Giver()
    giver.offer_gradients()
    param = giver.params[0]
    assert isinstance(param, nn.Parameter)
    assert type(param).__name__ == "Parameter"
    assert (param + 1).tolist() == [1.0, 1.0]
    assert type(param + 1) is Tensor
    assert giver.given == 0


def test_it_is_printed_as_any_parameter(giver: Giver) -> None:
    expected = repr(giver.params[0])
    giver.offer_gradients()
    assert repr(giver.params[0]) == expected


def test_who_asks_one_that_is_watched_is_told_of_and_gets_what_is_there(giver: Giver) -> None:
    giver.offer_gradients()
    giver.watch_gradients()
    first, second = giver.params
    first.grad = torch.ones(2)
    second.grad = None
    assert first.grad.tolist() == [1.0, 1.0]
    assert [id(one) for one in giver.looked_at] == [id(one) for one in (first, second, first)]
    assert giver.given == 0
    giver.offer.withdraw()
    assert giver.has_own_classes()
    assert second.grad is None
    assert len(giver.looked_at) == 3


@pytest.mark.parametrize("make", [copy.deepcopy, lambda param: pickle.loads(pickle.dumps(param))])
def test_a_copy_of_one_that_is_watched_is_not(giver: Giver, make: Any) -> None:
    expected = type(make(giver.params[0]))
    giver.watch_gradients()
    assert type(make(giver.params[0])) is expected


def test_one_that_is_watched_outlives_who_gives() -> None:
    giver = Giver()
    params = giver.params
    giver.watch_gradients()
    del giver
    gc.collect()
    params[0].grad = torch.ones(2)
    assert params[1].grad is None
    assert list(map(type, params)) == [nn.Parameter] * 2
