"""The comments of a rules file: what was run and measured, and why each line is there."""

from __future__ import annotations

import torch

from amp_patch import __version__

from .search import Found, Search
from .setting import LEVEL
from .speed import CHANCE

STANDSTILL = (
    "fp32's own loss changes by {:.2%} in these steps only: what is within tolerance of it may not "
    "train at all. Give more --steps."
)


def text(call: str, search: Search, found: Found, ended: str | None) -> str:
    """Return the text of the file.

    Args:
        call: the command line.
        search: that has ended.
        found: what it found.
        ended: what ended it early, in words; None where nothing did.
    """
    head = [
        f"Written by {call}",
        f"with amp_patch {__version__}, torch {torch.__version__}, on {_device()}.",
        "Faster means: runs in turns say so by the exact test of Mann and Whitney, "
        f"p <= {CHANCE:g}.",
        f"fp32: {search.reference.words()}{_speed(search.seconds.get('O0'))}.",
        f"This file: {search.deviation_words(found.outcome)}{_speed(found.seconds)}.",
    ]
    if ended:
        head.append(f"The search was not finished: {ended}.")
    level = [
        *found.reasons.get(LEVEL, []),
        *(
            f"{name} is out: {reason}."
            for name, reason in search.rejected.items()
            if name != found.setting.level
        ),
    ]
    return found.setting.toml(head, {**found.reasons, LEVEL: level})


def _speed(seconds: float | None) -> str:
    return f", {1e3 * seconds:.3g} ms a step" if seconds else ", not timed"


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
