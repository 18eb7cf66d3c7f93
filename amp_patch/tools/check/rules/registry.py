"""The table of rules: a rule is one function, with its name, what it looks for and the mend."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import NamedTuple

from amp_patch.tools.check.trace import Trace

#: Yields where something was found, and what: the subject of the sentence.
Look = Callable[[Trace], Iterable[tuple[ast.AST, str]]]


class Rule(NamedTuple):
    """What `check` looks for.

    Attributes:
        name: as in ``# amp-patch: ignore[name]``.
        line: what is wrong, in one line.
        mend: what to do instead.
    """

    name: str
    line: str
    mend: str
    look: Look


def line_of(node: ast.AST) -> int:
    """Return the line in which something stands."""
    line: int = getattr(node, "lineno", 1)
    return line


#: All rules, by their names.
RULES: dict[str, Rule] = {}


def rule(name: str, line: str, mend: str) -> Callable[[Look], Look]:
    """Enter a function in the table; see `Rule`."""

    def enter(look: Look) -> Look:
        RULES[name] = Rule(name, line, mend, look)
        return look

    return enter
