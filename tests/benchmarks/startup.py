"""Times ``amp.initialize`` on a model of BERT-base's size, beside a plain ``model.half()``."""

from __future__ import annotations

import ctypes
import sys
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


def allocate_as_a_fresh_process() -> None:
    """Give every large tensor pages of its own, as a process does that has freed nothing yet.

    Later glibc serves large tensors from memory that was freed: ``half()`` then runs in the pages
    that it frees as it goes, at a fifth of the time it takes a user, and the order of the
    measurements decides what they find. Setting the threshold (``M_MMAP_THRESHOLD``) stops that.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 1 << 17)


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
    allocate_as_a_fresh_process()
    candidates: dict[str, Candidate] = {
        PATCHING: lambda: initialize("O1", nn.Linear(1, 1, bias=False)),
        HALF: partial(half, width),
    }
    for level in LEVELS:
        candidates[level] = lambda level=level: initialize(level, bert_base(width))
    return interleave(candidates, rounds, on_round)
