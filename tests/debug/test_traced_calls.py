"""Which calls of models are traced: those after a forward that raised, and those of their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plants import WIDTH, Scores, around, prepared, square, train
from torch import Tensor, nn

from amp_patch.debug.cause import Cause


def the_cause(amp: Any) -> Cause:
    ((cause, _),) = amp.overflow_report().causes
    return cause


class Failing(nn.Module):
    """Raises once."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.errors = [error]

    def forward(self, x: Tensor) -> Tensor:
        if self.errors:
            raise self.errors.pop()
        return x


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_forward_that_raised_ends_no_tracing(amp, level: str) -> None:
    model = nn.Sequential(around(Scores()), Failing(RuntimeError("out of memory")))
    model, optimizer = prepared(amp, model, level)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.ones(2, WIDTH))
    train(amp, model, optimizer)
    assert (the_cause(amp).module, the_cause(amp).operator) == ("0.1.1", "matmul")


def test_a_forward_that_was_interrupted_ends_no_tracing_of_later_steps(amp) -> None:
    # Ctrl-C in a notebook: no hook hears of it
    model, optimizer = prepared(
        amp, nn.Sequential(around(Scores()), Failing(KeyboardInterrupt())), "O1"
    )
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, WIDTH))
    optimizer.step()
    train(amp, model, optimizer)
    assert the_cause(amp).module == "0.1.1"
