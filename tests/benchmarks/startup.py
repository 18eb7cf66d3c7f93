"""Times ``amp.initialize`` on a model of BERT-base's size, beside a plain ``model.half()``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from benchmarks.rounds import Candidate, Seconds, interleave, time_once
from bert_shape import MaskedLanguageModel
from torch import nn

from amp_patch import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = "model.half()"
PATCHING = "O1, one weight"


def bert_base(width: int) -> nn.Module:
    """Return 12 layers, the embedding of 30,522 tokens and a pooler: 109 M weights at width 768.

    The weights are written but not drawn: their values do not matter, their pages must be there.
    """
    with torch.device("meta"):
        model = MaskedLanguageModel(layers=12, width=width, heads=12, vocabulary=30522)
        model.head = nn.Linear(width, width)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


def half(width: int) -> Seconds:
    return time_once(bert_base(width).half)


def initialize(opt_level: str, model: nn.Module) -> Seconds:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seconds = time_once(partial(amp.initialize, model, optimizer, opt_level=opt_level, verbosity=0))
    amp.deactivate()
    return seconds


def measure(rounds: int, width: int, on_round: Callable[[], object]) -> dict[str, list[Seconds]]:
    """Return the seconds per round of each level, of ``half()`` and of the patching alone.

    The patching is that of a model of one weight at O1, where there is nothing else to do.
    """
    candidates: dict[str, Candidate] = {
        PATCHING: lambda: initialize("O1", nn.Linear(1, 1, bias=False)),
        HALF: partial(half, width),
    }
    for level in LEVELS:
        candidates[level] = lambda level=level: initialize(level, bert_base(width))
    return interleave(candidates, rounds, on_round)
