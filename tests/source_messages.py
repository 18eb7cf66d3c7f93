"""Reads the errors and warnings of the package out of its source, without running it.

Knows no documentation. Where a message takes a value in, it has "..." here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "amp_patch"
VALUE = "..."
# calls that show their argument to the user
TELLING = {"warn": "warning", "warn_once": "warning", "warning": "logged", "announce": "printed"}


@dataclass(frozen=True, order=True)
class Message:
    """One error or warning: the file that has it, what it is raised as, and its text."""

    file: str
    kind: str
    text: str


@dataclass
class Source:
    """One module: its constants and functions by name."""

    path: Path
    tree: ast.Module
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Source:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        return cls(path, tree, functions)


class Reader:
    """Reads the text of expressions in one scope, a module or a function of it."""

    def __init__(self, sources: list[Source]) -> None:
        self._functions = {name: one for source in sources for name, one in source.functions.items()}

    def texts(self, node: ast.expr, scopes: list[ast.AST]) -> list[str]:
        """Return the texts that an expression can have; one for each branch of a condition."""
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, scopes), *self.texts(node.orelse, scopes)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function = self._functions.get(node.func.id)
            if function is not None:
                returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
                return [
                    text for one in returned if one for text in self.texts(one, [*scopes, function])
                ]
        return [self._text(node, scopes)]

    def _text(self, node: ast.expr, scopes: list[ast.AST]) -> str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else VALUE
        if isinstance(node, ast.JoinedStr):
            return "".join(self._text(part, scopes) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value, scopes)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left, scopes) + self._text(node.right, scopes)
        if isinstance(node, ast.Name):
            return self._named(node.id, scopes)
        return VALUE

    def _named(self, name: str, scopes: list[ast.AST]) -> str:
        for scope in reversed(scopes):
            values = [
                one.value
                for one in ast.walk(scope)
                if isinstance(one, ast.Assign)
                and any(isinstance(target, ast.Name) and target.id == name for target in one.targets)
            ]
            if len(values) == 1 and isinstance(values[0], (ast.Constant, ast.JoinedStr, ast.BinOp)):
                return self._text(values[0], scopes)
            if values:
                return VALUE
        return VALUE
