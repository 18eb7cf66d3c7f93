"""Pairs of parameters and masters: each is handled once, however many optimizers hold it."""

import weakref

import pytest
import torch
from torch import Tensor

from amp_patch.step.param_pairs import ParamPairs, Params, same


@pytest.fixture
def tensors() -> list[Tensor]:
    return [torch.zeros(1) for _ in range(4)]


def test_what_was_taken_is_left_out_and_the_rest_is_taken(tensors: list[Tensor]) -> None:
    half, own, master, other = tensors
    pairs = ParamPairs([half, own], [master, own])
    taken = {id(own)}
    shared = pairs.share(taken, "model")
    assert same(shared.model, [half])
    assert same(shared.master, [master])
    assert taken == {id(own), id(half)}
    assert pairs.share(taken, "model") == ParamPairs([], [])
    assert same(pairs.share({id(other)}, "master").master, [master, own])


def test_of_two_optimizers_the_first_handles_what_both_hold(tensors: list[Tensor]) -> None:
    half, first, second, _ = tensors  # of one half parameter each has a master of its own
    ones, others = ParamPairs([half], [first]), ParamPairs([half], [second])
    by_model: set[int] = set()
    assert ones.share(by_model, "model") is ones
    assert others.share(by_model, "model").model == []
    by_master: set[int] = set()
    assert ones.share(by_master, "master") is ones
    assert others.share(by_master, "master") is others


def test_lists_are_the_same_by_their_objects(tensors: list[Tensor]) -> None:
    assert same(tensors, list(tensors))
    assert not same(tensors, [tensor.clone() for tensor in tensors])
    assert not same(tensors, tensors[:-1])


def test_parameters_can_be_referenced_weakly(tensors: list[Tensor]) -> None:
    params = Params(tensors)
    reference = weakref.ref(params)
    assert same(reference(), tensors)
    del params
    assert reference() is None
