"""One script: read, looked at by every rule, silenced where its comments say so."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from .project import Project
from .rules import RULES
from .rules.registry import line_of
from .source import Source, Unreadable
from .statements import Statements


@dataclass(frozen=True, order=True)
class Finding:
    """What a rule found.

    Attributes:
        path: of the script, or of a file that it imports.
        line: counted from 1; of a notebook, as if its cells were one file.
        rule: its name.
        place: path and line, as they are told.
        text: what was found, and the mend.
    """

    path: str
    line: int
    rule: str
    place: str
    text: str


def findings(script: Source, project: Project | None) -> list[Finding]:
    """Return what the rules find in a script, and in what it uses of its project, by line.

    Args:
        script: is looked at.
        project: whose files its imports read; None: they read none.

    Raises:
        Unreadable: it nests deeper than Python can follow.
    """
    if not (script.names_amp if project is None else project.uses_amp(script)):
        return []
    try:
        found = _found(script, project)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"{script.path}: {error}") from error
    # what stands in the script itself comes first
    return sorted(found, key=lambda one: (one.path != str(script.path), one))


def _found(script: Source, project: Project | None) -> Iterable[Finding]:
    tree = script.tree if project is None else project.tree_of(script)
    trace = Statements(project).read(tree)
    found: dict[tuple[str, int, str], Finding] = {}
    for rule in RULES.values():
        for node, what in rule.look(trace):
            source = (project and project.source_of(node)) or script
            lines = range(line_of(node), _last_line(node) + 1)
            if not any(rule.name in source.silenced.get(line, ()) for line in lines):
                key = (str(source.path), line_of(node), rule.name)
                place = source.place(line_of(node))
                found.setdefault(key, Finding(*key, place, f"{what}; {rule.mend}"))
    return found.values()


def _last_line(node: ast.AST) -> int:
    """Return the last line of a call; of a definition, its first."""
    is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    last = None if is_definition else getattr(node, "end_lineno", None)
    return int(last or line_of(node))
