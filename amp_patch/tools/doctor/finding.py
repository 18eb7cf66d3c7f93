"""One thing that `doctor` has looked at; knows nothing of how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: "note": something optional is missing, or set in a way that its owner may have forgotten.
State = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it.

    Attributes:
        topic: ``"torch"``, ``"kernels"``.
        state: whether all is well with it.
        text: what was found, in one sentence.
        mend: the command that helps; "" where nothing is to be done.
    """

    topic: str
    state: State
    text: str
    mend: str = ""
