"""What is known of half tensors that are their values, rounded, until either is written to."""

import pytest
import torch
from torch import Tensor, nn

from amp_patch.weights.alike_values import AlikeValues


def pairs() -> list[tuple[Tensor, Tensor]]:
    values = [torch.linspace(0, 1, 5), torch.linspace(0, 1, 3000)]
    return [(value, nn.Parameter(value.half())) for value in values]


def test_those_that_are_rounded_are_known_and_no_others() -> None:
    alike, (small, large) = AlikeValues(), pairs()
    other = small[0] + 1.0, small[1].detach().clone()
    alike.compare([small, large, other])
    assert alike.get(small[1]) is small[0]
    assert alike.get(large[1]) is large[0]
    assert alike.get(other[1]) is None
    assert alike.get(torch.zeros(2)) is None


@pytest.mark.parametrize("which", [0, 1])
def test_a_write_to_either_ends_it(which: int) -> None:
    alike, (pair, other) = AlikeValues(), pairs()
    alike.compare([pair, other])
    with torch.no_grad():
        pair[which].mul_(1)
    assert alike.get(pair[1]) is None
    assert alike.get(other[1]) is other[0]


def test_doubts_end_one_and_clear_ends_all() -> None:
    alike, (pair, other) = AlikeValues(), pairs()
    alike.compare([pair, other])
    alike.doubt(pair[1])
    alike.doubt(torch.zeros(1))
    assert (alike.get(pair[1]), alike.get(other[1])) == (None, other[0])
    alike.clear()
    assert alike.get(other[1]) is None
