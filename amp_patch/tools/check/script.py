"""One script: read, looked at by every rule, silenced where its comments say so."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .rules import RULES
from .rules.registry import line_of
from .statements import Statements

_IGNORE = re.compile(r"#\s*amp-patch:\s*ignore(?:\[([\w\s,-]*)\])?")


@dataclass(frozen=True, order=True)
class Finding:
    """What a rule found.

    Attributes:
        line: counted from 1.
        rule: its name.
        text: what was found, and the mend.
    """

    line: int
    rule: str
    text: str


class Unreadable(Exception):
    """A file that is no Python; says why."""


def findings(path: Path) -> list[Finding]:
    """Return what the rules find in a script, by line.

    Raises:
        Unreadable: the file is not there, not text, or not Python.
    """
    try:
        with tokenize.open(path) as file:
            text = file.read()
        return findings_in(text, str(path))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise Unreadable(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def findings_in(text: str, name: str = "script.py") -> list[Finding]:
    """Return what the rules find in the text of a script.

    Raises:
        Unreadable: it is not Python.
    """
    try:
        tree = ast.parse(text, filename=name)
        return _look(tree, text)
    except SyntaxError as error:
        raise Unreadable(f"{name}:{error.lineno or 1}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"{name}: {error}") from error


def _look(tree: ast.Module, text: str) -> list[Finding]:
    if "apex" not in text and "amp_patch" not in text:  # by whichever name, it is imported
        return []
    silenced = _silenced(text)
    trace = Statements().read(tree)
    found: dict[tuple[int, str], Finding] = {}
    for rule in RULES.values():
        for node, what in rule.look(trace):
            lines = range(line_of(node), _last_line(node) + 1)
            if not any(rule.name in silenced.get(line, ()) for line in lines):
                place = (line_of(node), rule.name)
                found.setdefault(place, Finding(*place, f"{what}; {rule.mend}"))
    return sorted(found.values())


def _last_line(node: ast.AST) -> int:
    """Return the last line of a call; of a definition, its first."""
    is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    last = None if is_definition else getattr(node, "end_lineno", None)
    return int(last or line_of(node))


def _silenced(text: str) -> dict[int, set[str]]:
    """Return for each line the rules that its comment silences."""
    return {
        line: set(RULES) if names is None else {name.strip() for name in names.split(",")}
        for line, names in _comments(text)
    }


def _comments(text: str) -> Iterator[tuple[int, str | None]]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                yield token.start[0], match.group(1)
    except (tokenize.TokenError, IndentationError):
        return
