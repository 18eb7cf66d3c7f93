"""Masters share memory where their half parameters do (trainings: `test_published_writes`)."""

import torch
from torch import nn

from amp_patch.weights.ties import Pair, Ties


def pair(number: float) -> Pair:
    """Return a half parameter and a master that rounds to it."""
    master = torch.full((2, 3), number + 2.0**-20)
    return nn.Parameter(master.half()), nn.Parameter(master)


def places(*pairs: Pair) -> int:
    """Return how many places in memory the masters have."""
    return len({master.data_ptr() for _, master in pairs})


def follow(ties: Ties, *pairs: Pair) -> None:
    def agrees(row: int) -> bool:
        param, master = pairs[row]
        return torch.equal(master.half(), param)

    ties.follow(pairs, agrees)


def test_they_share_the_memory_of_the_one_whose_half_weight_is_there() -> None:
    for first_is_kept in (True, False):
        ties, one, two, other = Ties(), pair(1), pair(2), pair(1)
        kept, left = (one, two) if first_is_kept else (two, one)
        left[0].data = kept[0].data
        follow(ties, one, two, other)
        assert places(one, two) == 1
        assert places(one, two, other) == 2
        for master in (one[1], two[1]):
            assert torch.equal(master, torch.full((2, 3), (1 if first_is_kept else 2) + 2.0**-20))


def test_a_tie_that_ends_leaves_both_their_numbers() -> None:
    ties, one, two, three = Ties(), pair(1), pair(2), pair(3)
    two[0].data = three[0].data = one[0].data
    follow(ties, one, two, three)
    assert places(one, two, three) == 1
    two[0].data = two[0].data.clone()
    follow(ties, one, two, three)
    assert places(one, three) == 1
    assert places(one, two) == 2
    two[1].data.add_(1)
    assert torch.equal(one[1], torch.full((2, 3), 1 + 2.0**-20))


def test_what_only_begins_at_one_place_is_not_tied() -> None:
    """A part of a weight, and its transpose."""
    ties, one, row, turned = Ties(), pair(1), pair(2), pair(3)
    row[0].data, row[1].data = one[0].data[:1], torch.ones(1, 3)
    turned[0].data, turned[1].data = one[0].data.t(), torch.ones(3, 2)
    follow(ties, one, row, turned)
    assert places(one, row, turned) == 3
