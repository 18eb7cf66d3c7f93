"""What is said of a skipped step, and how much of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from training import LEVELS

LINE = (
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0; not finite: "
)
KINDS = {"inf": float("inf"), "NaN": float("nan")}


def skip_a_step(amp: ModuleType, level: str, bad: dict[int, float], **options: Any) -> None:
    """Make one step in which some of five parameters have a gradient that is not finite."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_scale": "dynamic", **options}
    amp.initialize(model, optimizer, opt_level=level, **options)
    sums = [(param.float() * bad.get(index, 2.0**-4)).sum() for index, param in enumerate(model)]
    with amp.scale_loss(sum(sums), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("bad", "names"),
    [
        ({1: "inf"}, "1 (inf)"),
        ({0: "inf", 3: "NaN", 4: "inf"}, "0 (inf), 3 (NaN), 4 (inf)"),
        (dict.fromkeys(range(5), "NaN"), "0 (NaN), 1 (NaN), 2 (NaN) and 2 more"),
    ],
)
def test_up_to_three_parameters_are_named(
    amp: ModuleType,
    capsys: pytest.CaptureFixture[str],
    level: str,
    bad: dict[int, str],
    names: str,
) -> None:
    skip_a_step(amp, level, {index: KINDS[kind] for index, kind in bad.items()})
    assert capsys.readouterr().out.splitlines()[-1] == LINE + names


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("verbosity", "first", "last"),
    [(0, None, None), ("skips", "Gradient", "Gradient"), (1, "Selected", "Gradient")],
)
def test_verbosity_has_a_level_between_all_and_nothing(
    amp: ModuleType,
    capsys: pytest.CaptureFixture[str],
    level: str,
    verbosity: int | str,
    first: str | None,
    last: str | None,
) -> None:
    skip_a_step(amp, level, {0: float("inf")}, verbosity=verbosity)
    lines = capsys.readouterr().out.splitlines()
    words = [line.partition(" ")[0] for line in lines]
    assert (words[0], words[-1]) == (first, last) if words else (first, last) == (None, None)
