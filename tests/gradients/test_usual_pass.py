"""The usual pass of one optimizer leaves what the long way of any pass leaves, equal to the bit."""

import itertools
from typing import Any

import pytest
from drawn_passes import ODDITIES, PASSES, Pass, Received
from hypothesis import example, given
from hypothesis import strategies as st


def one_odd(oddity: str) -> list[Pass]:
    """Return passes like most, of which the second is not."""
    return [Pass((1, 2, 3), 8.0, oddity if row == 1 else "") for row in range(3)]


@example(passes=one_odd("no step"), is_lazy=True, in_place=0)
@example(passes=4 * [Pass((1, 2, 3), 8.0, ODDITIES[-1])], is_lazy=False, in_place=0)
@example(passes=4 * [Pass((1, 2, 3), 8.0, ODDITIES[-1])], is_lazy=False, in_place=3)
@example(passes=one_odd("delayed"), is_lazy=False, in_place=0)
@example(passes=one_odd("not cleared"), is_lazy=False, in_place=0)
@example(passes=4 * [Pass((1, 2, 3), 8.0, ODDITIES[-1])], is_lazy=False, in_place=1)
@example(passes=one_odd("no gradient at the last"), is_lazy=False, in_place=1)
@given(passes=PASSES, is_lazy=st.booleans(), in_place=st.sampled_from([0, 0, 1, 2, 3]))
def test_a_pass_of_one_optimizer_alone_leaves_what_three_calls_leave(
    passes: list[Pass], is_lazy: bool, in_place: int
) -> None:
    ours, theirs = Received(is_lazy, in_place), Received(is_lazy, in_place)
    for one in passes:
        ours.run(one, is_alone=True)
        theirs.run(one, is_alone=False)
    assert ours.state() == theirs.state()


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("before", ["", ODDITIES[-1]])
@pytest.mark.parametrize(
    ("odd", "in_place"),
    [
        ("", 3),
        *itertools.product(
            ["", "no gradient", "sparse", "sparse at the last", "a master has one", "scale"], [0, 1]
        ),
    ],
)
def test_the_short_way_is_for_what_most_steps_find(
    monkeypatch: pytest.MonkeyPatch, is_lazy: bool, odd: str, before: str, in_place: int
) -> None:
    received = Received(is_lazy, in_place)
    # which makes the buffers; of an earlier micro-batch, or of another step
    received.run(Pass((1, 2, 3), 8.0, before), is_alone=True)
    long: list[Any] = []
    passes = received.gradients.passes
    receive = passes.receive
    monkeypatch.setattr(passes, "receive", lambda *args: long.append(args) or receive(*args))
    scale = 0.5 if odd == "scale" else 8.0
    received.run(Pass((1, 2, 3), scale, odd), is_alone=True)
    is_odd = odd != "" and not (before and odd == "a master has one")
    assert bool(long) == is_odd
