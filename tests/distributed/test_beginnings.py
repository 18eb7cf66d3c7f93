"""Ranks tell each other with what they begin, and none waits; ranks of a group are played."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
from torch import distributed

from amp_patch.distributed import beginnings
from amp_patch.distributed.beginnings import Beginnings, next_number


class Group(types.SimpleNamespace):
    """What is asked of a process group of two ranks."""

    group_name = "played"

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self.number  # type: ignore[no-any-return]  # as given


#: One wrapper as each of two ranks has it.
WRAPPERS = [types.SimpleNamespace(process_group=Group(number=number)) for number in range(2)]


@pytest.fixture(autouse=True)
def store() -> Iterator[Any]:
    made = distributed.HashStore()
    distributed.init_process_group("gloo", store=made, rank=0, world_size=1)
    yield made
    distributed.destroy_process_group()


def test_ranks_are_compared_when_all_have_told_and_each_raises() -> None:
    first, second = Beginnings(), Beginnings()
    first.tell(WRAPPERS[0], 1, "loss scale 2.0")
    first.look()  # the other is not there yet
    assert first.open
    second.tell(WRAPPERS[1], 1, "loss scale 4.0")
    for rank in (first, second):
        with pytest.raises(RuntimeError, match="2.0 on rank 0; loss scale 4.0 on rank 1"):
            rank.look()
        assert not rank.open
        rank.look()


def test_ranks_that_begin_alike_are_looked_at_once() -> None:
    ranks = Beginnings(), Beginnings()
    for rank, wrapper in zip(ranks, WRAPPERS, strict=True):
        rank.tell(wrapper, 2, "loss scale 2.0")
    for rank in ranks:
        rank.look()
        assert not rank.open


def test_other_wrappers_are_others_texts() -> None:
    first, second = Beginnings(), Beginnings()
    first.tell(WRAPPERS[0], 3, "loss scale 2.0")
    second.tell(WRAPPERS[1], 4, "loss scale 4.0")
    for rank in (first, second):
        rank.look()
        assert rank.open


def test_a_rank_that_never_tells_is_given_up() -> None:
    lone = Beginnings()
    lone.tell(WRAPPERS[0], 5, "loss scale 2.0")
    for _ in range(beginnings._LOOKS):
        assert lone.open
        lone.look()
    assert not lone.open


def test_a_store_that_is_gone_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(keys: list[str]) -> bool:
        raise distributed.DistStoreError("Connection reset by peer")

    lone = Beginnings()
    lone.tell(WRAPPERS[0], 6, "loss scale 2.0")
    lone.open[0].store = types.SimpleNamespace(check=fail)
    lone.look()
    assert not lone.open


def test_a_group_of_one_rank_tells_nobody() -> None:
    lone = Beginnings()
    lone.tell(types.SimpleNamespace(process_group=None), 1, "loss scale 2.0")
    assert not lone.open


def test_wrappers_are_numbered_within_their_group_also_after_another_was_made() -> None:
    first = next_number(WRAPPERS[0])
    of_all = next_number(types.SimpleNamespace())
    assert next_number(WRAPPERS[1]) == first + 1
    distributed.destroy_process_group()
    assert next_number(WRAPPERS[0]) == 0  # no group: nobody to tell
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert next_number(types.SimpleNamespace()) == of_all + 1
