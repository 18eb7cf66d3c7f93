"""Which word, or which of several, a misspelled one was meant to be; for messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

#: Other names of what a rule may say -> the words that are meant, the likeliest first.
_ALSO: Final = {
    "bf16": ("bfloat16", "half"),
    "bfloat16": ("bfloat16", "half"),
    "false": ("off",),
    "float16": ("half",),
    "float32": ("float",),
    "fp16": ("half",),
    "fp32": ("float",),
    "none": ("off",),
}


def meant(given: object, words: Collection[str], likeness: float = 0.7) -> str | None:
    """Return the one of ``words`` that was likely meant; None where none is like what was given.

    Args:
        given: a word, or a dtype.
        words: all that there are.
        likeness: from 0 to 1, the least that counts.
    """
    text = str(given).removeprefix("torch.").lower()
    if text in _ALSO:
        return next((word for word in _ALSO[text] if word in words), None)
    return next(iter(near(text, words, likeness)), None)


def near(given: str, words: Collection[str], likeness: float = 0.7) -> list[str]:
    """Return up to three of ``words`` that are like what was given, the likeliest first.

    Args:
        given: in letters of either case.
        words: all that there are.
        likeness: from 0 to 1, the least that counts.
    """
    by_text = {word.lower(): word for word in words}
    return [by_text[one] for one in difflib.get_close_matches(given.lower(), by_text, 3, likeness)]


def did_you_mean(given: object, words: Collection[str]) -> str:
    """Return the end of a sentence, ``"; did you mean 'half'?"`` or a full stop; see `meant`."""
    word = meant(given, words)
    return "." if word is None else f"; did you mean {word!r}?"
