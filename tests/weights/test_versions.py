"""Which of a value and its rounded copy wins, by the versions of both."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.weights.versions import NotedValue, Versions


class Pair:
    """A value and its parameter, noted at the second place of two."""

    def __init__(self) -> None:
        self.value, self.param = torch.zeros(2), torch.zeros(2, dtype=torch.float16)
        self.versions = Versions([0, 0])
        self.entry = NotedValue(self.value)
        self.entry.noted.append((self.versions, 1))
        self.entry.note_equal()

    def give(self) -> None:
        now = self.param._version, self.value._version
        self.versions.give([0, now[0]], [0, now[1]])

    def wins(self) -> bool:
        return self.entry.wins(self.param._version)


def write(tensor: Tensor) -> None:
    tensor.add_(1)


@given(st.lists(st.sampled_from(["value", "param", "equal", "give", "end"]), max_size=8))
def test_the_rule_holds_of_any_series_of_writes(events: list[str]) -> None:
    """A value wins that was written to, or that the user has and of whose pair not p alone was."""
    pair = Pair()
    given, value_written, param_written = False, False, False
    wrote_value = False  # since the two were equal
    for event in events:
        if event in ("value", "param"):
            write(getattr(pair, event))
            wrote_value |= event == "value"
            value_written |= event == "value"
            param_written |= event == "param"
        elif event == "give":
            pair.give()
            given, value_written, param_written = True, False, False
        elif event == "equal":
            pair.entry.note_equal()
            given = wrote_value = False
        else:
            pair.versions.end_giving()
            given = False
        expected = (not param_written or value_written) if given else wrote_value
        assert pair.wins() is expected


def test_all_win_where_no_parameter_was_written_to_since_all_were_given() -> None:
    versions = Versions([0, 0])
    assert not versions.all_win([3, 4])
    versions.give([3, 4], [0, 0])
    assert versions.all_win([3, 4])
    assert not versions.all_win([3, 5])
    assert not versions.all_win([3])
    versions.give_again([1], [3, 5], [0, 0])
    assert versions.all_win([3, 5])


@pytest.mark.parametrize("end", [False, True])
def test_what_another_optimizer_is_told_makes_all_uncertain(end: bool) -> None:
    versions, other = Versions([0]), Versions([0])
    versions.give([1], [0])
    if end:
        other.end_giving()
    else:
        other.give([1], [0])
    assert not versions.all_win([1])
