"""Which of a half parameter and its fp32 value the other follows: whichever was written to."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.versions import Versions

HALVES = (torch.float16, torch.bfloat16)
#: Neither half dtype has it.
THIRD = 1 / 3


def entered(dtype: torch.dtype = torch.float16) -> tuple[FP32Values, nn.Parameter, Tensor]:
    """Return the values of one parameter, which is [1/3, 1/3], with both."""
    value = torch.full((2,), THIRD)
    param = nn.Parameter(value.to(dtype))
    values = FP32Values()
    values.set(param, value)
    return values, param, value


@pytest.mark.parametrize("dtype", HALVES, ids=str)
class TestWhichWins:
    def test_untouched_the_value_keeps_its_bits(self, dtype: torch.dtype) -> None:
        values, param, value = entered(dtype)
        assert not values.wins(param)
        assert torch.equal(values.exact(param), value)

    def test_a_written_element_of_the_parameter_counts_and_the_others_keep_their_bits(
        self, dtype: torch.dtype
    ) -> None:
        values, param, _ = entered(dtype)
        param.data[0] = 2.0
        assert values.exact(param).tolist() == torch.tensor([2.0, THIRD]).tolist()

    def test_a_written_value_wins_over_a_written_parameter(self, dtype: torch.dtype) -> None:
        values, param, value = entered(dtype)
        param.data.fill_(2.0)
        value.fill_(3.0)
        assert values.wins(param)
        assert values.exact(param).tolist() == [3.0, 3.0]

    def test_a_given_value_wins_unless_only_the_parameter_is_written_to(
        self, dtype: torch.dtype
    ) -> None:
        values, param, value = entered(dtype)
        versions = Versions([value._version])
        values.set(param, value, versions)
        versions.give([param._version], [value._version])
        value.data.fill_(3.0)  # moves no version
        assert values.wins(param)
        with torch.no_grad():
            param.fill_(2.0)
        assert not values.wins(param)
        versions.end_giving()
        assert not values.wins(param)
        versions.give([param._version], [value._version])
        with torch.no_grad():
            param.fill_(2.0)
        value.fill_(3.0)
        assert values.wins(param)


def test_what_was_never_entered_is_the_parameter_itself_in_fp32() -> None:
    param = nn.Parameter(torch.tensor([THIRD]).half())
    exact = FP32Values().exact(param)
    assert exact.dtype is torch.float32
    assert torch.equal(exact, param.detach().float())


def test_a_value_of_two_optimizers_was_written_to_only_if_neither_noted_it() -> None:
    values, param, value = entered()
    first, second = Versions([0]), Versions([0])
    values.set(param, value, first)
    values.set(param, value, second)
    value.fill_(3.0)
    assert values.wins(param)
    second.equal[0] = value._version  # as the second optimizer's step does
    assert not values.wins(param)
    values.forget_versions(param, second)
    assert values.wins(param)


def test_of_two_optimizers_that_give_a_value_the_last_one_says_since_when() -> None:
    values, param, value = entered()
    first, second = Versions([0]), Versions([0])
    values.set(param, value, first)
    values.set(param, value, second)
    first.give([param._version], [value._version])
    value.fill_(3.0)
    second.give([param._version], [value._version])
    param.data.fill_(2.0)  # moves no version
    assert values.wins(param)
    with torch.no_grad():
        param.fill_(2.0)
    assert not values.wins(param)  # the value was written to before
    values.receive(param, value)  # now both are equal
    assert not values.wins(param)
    second.end_giving()
    assert not values.wins(param)  # though the first one has not ended


def write_to(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


@given(st.lists(st.integers(0, 6), max_size=8))
def test_where_all_win_at_once_each_does(actions: list[int]) -> None:
    params = [nn.Parameter(torch.ones(2).half()) for _ in range(3)]
    held = [torch.ones(2) for _ in params]
    values, own, other = FP32Values(), Versions([0] * 3), Versions([0])
    for row, (param, value) in enumerate(zip(params, held, strict=True)):
        values.set(param, value, own, row)
    values.set(params[1], held[1], other)  # a second optimizer

    def now(tensors: list[Tensor]) -> list[int]:
        return [tensor._version for tensor in tensors]

    one, its_value = params[1:2], held[1:2]
    acts: list[Callable[[], object]] = [
        lambda: own.give(now(params), now(held)),
        lambda: own.given and own.give_again([1], now(params), now(held)),
        own.end_giving,
        lambda: other.give(now(one), now(its_value)),
        other.end_giving,
        lambda: write_to(params[1]),
        lambda: write_to(held[1]),
    ]
    for action in actions:
        acts[action]()
        all_win = own.all_win(now(params))
        assert all_win <= all(map(values.wins, params))
        assert all_win or action != 0


def test_a_value_that_came_later_was_not_given() -> None:
    values, _, value = entered()
    versions = Versions([value._version, 0])
    values.set(nn.Parameter(value.half()), value, versions)
    versions.give([0], [0])
    later = nn.Parameter(torch.ones(2).half())
    values.set(later, torch.ones(2), versions, 1)
    assert not values.wins(later)


def test_values_go_with_their_parameters() -> None:
    values, param, _ = entered()
    assert values.holds(param)
    values.forget([param])
    assert not values.holds(param)
    values, param, _ = entered()
    del param
    gc.collect()
    assert len(values._values) == 0


def test_a_master_lives_in_the_memory_of_the_value_and_has_its_gradient() -> None:
    values, param, value = entered()
    value.grad = torch.ones(2)
    param.data[0] = 2.0
    master = values.take(param)
    assert master.data_ptr() == value.data_ptr()
    assert master.tolist() == torch.tensor([2.0, THIRD]).tolist()
    assert master.grad is value.grad


def test_a_captured_step_does_not_wait_for_what_data_is_set_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To compare numbers would end the capture."""
    values, param, _ = entered()
    monkeypatch.setattr(captures, "are_made", lambda device: True)
    monkeypatch.setattr(torch, "equal", None)
    before = values.version_of(param)
    values.note_set(param, param.detach().clone())
    assert values.version_of(param) == before + 1
