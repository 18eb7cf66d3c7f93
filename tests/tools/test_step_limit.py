"""A script ends when each of its networks has made its steps, whoever counts them."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import scaled_backward
from torch import nn

from amp_patch.session import session
from amp_patch.tools.compare.recorder import Recorder
from amp_patch.tools.step_limit import StepCounts, StepLimit

LIMITS = {
    "observe": lambda: StepLimit(2, lambda: None),
    "compare": lambda: Recorder(session, 2, []),
}


def steps_until_the_end(amp, limit: str, cycle: list[int]) -> list[int]:
    """Train two networks in turns, and return how many steps each made."""
    networks = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in networks]
    amp.initialize(networks, optimizers, opt_level="O1", verbosity=0)
    made = [0, 0]
    detach = session.observers.attach(LIMITS[limit]())
    try:
        for one in itertools.islice(itertools.cycle(cycle), 100):
            loss = networks[one](torch.randn(2, 2)).float().mean()
            scaled_backward(amp, loss, optimizers[one])
            made[one] += 1
            optimizers[one].step()
    except SystemExit:
        return made
    finally:
        detach()
    pytest.fail("the script was not ended")


def test_an_optimizer_has_not_made_the_steps_of_one_that_is_gone(amp) -> None:
    """It may have its address."""
    network, counts = nn.Linear(2, 2), StepCounts()
    gone = torch.optim.SGD(network.parameters(), lr=0.1)
    counts.add(gone)
    address = id(gone)
    del gone
    tries = (torch.optim.SGD(network.parameters(), lr=0.1) for _ in range(1000))
    optimizer = next(one for one in tries if id(one) == address)
    amp.initialize(network, optimizer, opt_level="O1", verbosity=0)
    assert (counts.most, counts.are_enough(1)) == (1, False)
    counts.add(optimizer)
    assert counts.are_enough(1)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    ("cycle", "made"),
    [([0, 1], [2, 2]), ([0, 0, 0, 0, 0, 1], [10, 2]), ([0], [13, 0])],
    ids=["in turns", "critic", "one rests"],
)
def test_each_network_makes_its_steps(amp, limit: str, cycle: list[int], made: list[int]) -> None:
    assert steps_until_the_end(amp, limit, cycle) == made
