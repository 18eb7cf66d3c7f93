"""Pairs of parameters and masters: each is handled once, however many optimizers hold it."""

import re
import weakref
from types import ModuleType

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD

from amp_patch.gradients.param_pairs import Apart, ParamPairs
from amp_patch.weights.parameter_lists import are_same, listed


@pytest.fixture
def tensors() -> list[Tensor]:
    return [torch.zeros(1) for _ in range(4)]


def test_of_what_is_stepped_itself_there_is_no_half(tensors: list[Tensor]) -> None:
    half, own, master, _ = tensors
    ((param, stepped),) = ParamPairs([own, half], [own, master]).halves()
    assert param is half
    assert stepped is master


def test_what_was_taken_is_left_out_and_the_rest_is_taken(tensors: list[Tensor]) -> None:
    half, own, master, other = tensors
    pairs = ParamPairs([half, own], [master, own])
    taken = {id(own)}
    shared = pairs.share(taken, "model")
    assert are_same(shared.model, [half])
    assert are_same(shared.master, [master])
    assert taken == {id(own), id(half)}
    assert pairs.share(taken, "model") == ParamPairs([], [])
    assert are_same(pairs.share({id(other)}, "master").master, [master, own])


def test_of_two_optimizers_the_first_handles_what_both_hold(tensors: list[Tensor]) -> None:
    half, first, second, _ = tensors  # of one half parameter each has a master of its own
    ones, others = ParamPairs([half], [first]), ParamPairs([half], [second])
    by_model: set[int] = set()
    assert ones.share(by_model, "model") is ones
    assert others.share(by_model, "model").model == []
    by_master: set[int] = set()
    assert ones.share(by_master, "master") is ones
    assert others.share(by_master, "master") is others


@pytest.mark.parametrize("shared", ["", "model", "master"])
def test_pairs_are_apart_until_a_list_is_another(tensors: list[Tensor], shared: str) -> None:
    half, other, first, second = tensors
    ones = ParamPairs(listed([half]), listed([first]))
    others = ParamPairs(
        listed([half if shared == "model" else other]),
        listed([first if shared == "master" else second]),
    )
    apart = Apart()
    for _ in range(2):
        assert apart.are([ones, others]) == (not shared)
    again = ParamPairs(listed(others.model), listed(ones.master))
    assert not apart.are([again, others])
    assert not apart.are([ones, others, again])
    assert apart.are([ones, others]) == (not shared)
    list_of_others = weakref.ref(others.master)
    del others
    assert list_of_others() is None


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("fused_step", [False, True])
def test_a_weight_that_was_resized_is_told_of(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    options = {"verbosity": 0, "loss_scale": 4.0, "fused_step": fused_step}
    amp.initialize(model, optimizer, opt_level=level, **options)
    before, stepped = model.weight.data, model.state_dict()["weight"] - 0.1
    model.weight.data = before.repeat(1, 2)
    with pytest.raises(RuntimeError, match=re.escape("got one of (2, 6), as param.data = larger")):
        scaled_backward(amp, model(torch.ones(1, 6)).sum(), optimizer)
    optimizer.zero_grad()
    model.weight.data = before
    scaled_backward(amp, model(torch.ones(1, 3)).sum(), optimizer)
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["weight"], stepped, rtol=0, atol=1e-3)
