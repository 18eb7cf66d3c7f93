"""Reads the errors and warnings of the package out of its source, without running it.

Knows no documentation. Where a message takes in a value, its text has "…" here.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "amp_patch"
VALUE = "…"
#: functions that show their first argument to the user -> how
TELLING = {
    "add_note": "note",
    "announce": "printed",
    "ask": "printed",
    "maybe_print": "printed",
    "print": "printed",
    "warn": "warning",
    "warn_once": "warning",
    "warning": "logged warning",
}
Scopes = list[ast.Module | ast.FunctionDef]


@dataclass(frozen=True, order=True)
class Message:
    """One error or warning: the file that has it, what it is raised as, and its text."""

    file: str
    kind: str
    text: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """Return each error and warning of a package once, by file and text."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))}
    functions = {path: _functions(tree) for path, tree in trees.items()}
    named = Counter(name for own in functions.values() for name in own)
    only = {
        name: function
        for own in functions.values()
        for name, function in own.items()
        if named[name] == 1
    }
    found = set()
    for path, tree in trees.items():
        reader = _Reader({**only, **functions[path]})
        file = path.relative_to(package.parent).as_posix()
        for kind, told, within in _told(tree):
            for node, scopes in _passed(told, within):
                for given in _given(scopes):
                    texts = reader.texts(node, scopes, given)
                    found |= {Message(file, kind, text) for text in texts if is_message(text)}
    return sorted(found)


def is_message(text: str) -> bool:
    """Whether a text has words of its own, and is none that Python itself would say."""
    words = re.findall(r"[A-Za-z_]{2,}", text)
    return len(words) >= 3 and not re.search(f"has no attribute '?{VALUE}'?$", text)


def _walk(node: ast.AST, scopes: Scopes) -> Iterator[tuple[ast.AST, Scopes]]:
    """Yield each node, and the module and the functions around it."""
    if isinstance(node, (ast.Module, ast.FunctionDef)):
        scopes = [*scopes, node]
    yield node, scopes
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, scopes)


def _told(tree: ast.Module) -> Iterator[tuple[str, ast.expr, Scopes]]:
    """Yield how each message of a module is told, its expression, and the scopes around it."""
    for node, scopes in _walk(tree, []):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = _called(node.exc)
            if name[:1].isupper() and node.exc.args:
                yield name, node.exc.args[0], scopes
            elif not name[:1].isupper():
                yield "error", node.exc, scopes
        elif isinstance(node, ast.Call) and node.args:
            name = _called(node)
            is_report = name == "print" and not isinstance(node.func, ast.Name)  # of a console
            if name in TELLING and not is_report:
                yield TELLING[name], node.args[0], scopes


def _passed(node: ast.expr, scopes: Scopes) -> list[tuple[ast.expr, Scopes]]:
    """Return what the calls in a module pass where a message is its function's argument."""
    passed = [
        (arguments[node.id], around)
        for arguments, around in _calls(scopes)
        if isinstance(node, ast.Name) and node.id in arguments
    ]
    return passed or [(node, scopes)]


def _given(scopes: Scopes) -> list[dict[str, str]]:
    """Return the texts that the calls in a module give to the arguments of its function."""
    given = [
        {
            name: argument.value
            for name, argument in arguments.items()
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        }
        for arguments, _ in _calls(scopes)
    ]
    return given or [{}]


def _calls(scopes: Scopes) -> list[tuple[dict[str, ast.expr], Scopes]]:
    """Return the calls in a module of its function: the arguments by name, the scopes around."""
    module, function = scopes[0], scopes[-1]
    if not isinstance(function, ast.FunctionDef):
        return []
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    found = _calls_by_name(module).get(function.name, [])
    return [(dict(zip(names, node.args, strict=False)), around) for node, around in found]


@functools.cache
def _calls_by_name(module: ast.AST) -> dict[str, list[tuple[ast.Call, Scopes]]]:
    """Return the calls in a module by what they call: to walk through it takes the longest."""
    found: dict[str, list[tuple[ast.Call, Scopes]]] = {}
    for node, around in _walk(module, []):
        if isinstance(node, ast.Call):
            found.setdefault(_called(node), []).append((node, around))
    return found


def _called(node: ast.Call) -> str:
    """Return the last part of the name that a call calls."""
    return ast.unparse(node.func).rpartition(".")[2]


class _Reader:
    """Reads the texts that the expressions of one module can have."""

    def __init__(self, functions: dict[str, ast.FunctionDef]) -> None:
        self._functions = functions

    def texts(self, node: ast.expr, scopes: Scopes, given: Mapping[str, str]) -> list[str]:
        """Return the texts of an expression, one for each branch and each return after it."""
        return [
            " ".join(re.sub(f"(%[a-z]|{VALUE})+", VALUE, text).split())
            for text in self._texts(node, scopes, given)
        ]

    def _texts(self, node: ast.expr, scopes: Scopes, given: Mapping[str, str]) -> list[str]:
        if isinstance(node, ast.IfExp):
            return [
                text for one in (node.body, node.orelse) for text in self._texts(one, scopes, given)
            ]
        if isinstance(node, ast.Call):
            function = self._functions.get(_called(node))
            if function is not None and function not in scopes:
                returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
                inside = [*scopes[:1], function]
                texts = [text for one in returned if one for text in self._texts(one, inside, {})]
                return texts or [VALUE]
            if _called(node)[:1].isupper() and node.args:  # an exception that a function makes
                return self._texts(node.args[0], scopes, given)
        if isinstance(node, ast.Name) and node.id not in given:
            value, around = _value_of(node.id, scopes)
            return [VALUE] if value is None else self._texts(value, around, {})
        if isinstance(node, ast.JoinedStr):
            parts = [self._parts(part, scopes, given) for part in node.values]
            return ["".join(chosen) for chosen in itertools.product(*parts)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = (self._texts(node.left, scopes, given), self._texts(node.right, scopes, given))
            return ["".join(chosen) for chosen in itertools.product(*sides)]
        return self._parts(node, scopes, given)

    def _parts(self, node: ast.expr, scopes: Scopes, given: Mapping[str, str]) -> list[str]:
        """Return the texts of a part of a string: its own where they are fixed, else a value."""
        if isinstance(node, ast.FormattedValue):
            return self._parts(node.value, scopes, given)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.Name) and node.id in given:
            return [given[node.id]]
        if isinstance(node, (ast.Name, ast.IfExp)):
            texts = self._texts(node, scopes, given)
            is_choice = len(texts) > 1
            return [VALUE] if is_choice and VALUE in "".join(texts) else texts
        return [VALUE]


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _value_of(name: str, scopes: Scopes) -> tuple[ast.expr | None, Scopes]:
    """Return what a name is given, where that is one value and no other, and the scopes there."""
    for depth, scope in reversed(list(enumerate(scopes))):
        values = _bindings(scope, name)
        if values:
            return values[0] if len(values) == 1 else None, scopes[: depth + 1]
    return None, scopes


def _bindings(scope: ast.Module | ast.FunctionDef, name: str) -> list[ast.expr | None]:
    """Return what a scope assigns to a name; None for what is no assignment, as an argument."""
    found: list[ast.expr | None] = []
    inside = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    for node in inside:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [node.value for target in targets if ast.unparse(target) == name]
        elif isinstance(node, ast.arg):
            found += [None] * (node.arg == name)
        elif isinstance(node, (ast.For, ast.comprehension)):
            found += [None] * (name in re.findall(r"\w+", ast.unparse(node.target)))
    return found
