"""A file as it is read: a script, or a notebook's code, and the rules that its comments silence."""

from __future__ import annotations

import ast
import bisect
import functools
import io
import json
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from .rules import RULES

_IGNORE = re.compile(r"#\s*amp-patch:\s*ignore(?:\[([\w\s,-]*)\])?")
#: Cell magics that run the rest of the cell as Python, and add to it.
_AROUND = ("time", "timeit", "capture", "prun", "memit")
_CELL_MAGIC = re.compile(r"%%(\w+)")
#: What only IPython reads: `%magic`, `!command`, `?name`, `name?`, `x = !command`, `x = %magic`.
_MAGIC = re.compile(r"(?P<indent>\s*)((?P<target>[^=%!#]+=\s*)?[%!]|\?|[^#'\"]+\?\s*$)")
#: Where Python's lines end; str.splitlines knows more ends, a form feed say.
_LINE_END = re.compile(r"\r\n|\r|\n")
_TIMED = re.compile(r"(\s*)%time\s+(?=\S)")


class Unreadable(Exception):
    """A file that is no Python; says why."""


class Source:
    """The text of a file, as Python.

    Args:
        text: of the script, or of all cells of code of a notebook.
        path: of the file.
        cells: of a notebook: the line in which each cell of code begins, counted from 1.

    Attributes:
        names_amp: whether apex or amp_patch is named in it: by whichever name, it is imported.
        imports: what its import statements may read, each the number of dots and the name.
        asks_name: whether it asks for its ``__name__``, as what is run does.

    Raises:
        Unreadable: it is not Python.
    """

    def __init__(self, text: str, path: Path, cells: list[int] | None = None) -> None:
        self.path = path
        self._text, self._cells = text, cells
        try:
            tree = _parsed(text)
        except SyntaxError as error:
            raise Unreadable(f"{self.place(error.lineno or 1)}: {error.msg}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise Unreadable(f"{path}: {error}") from error
        self.names_amp = "apex" in text or "amp_patch" in text
        self.imports = set(_imports(tree))
        self.asks_name = any(
            isinstance(one, ast.If) and _is_about_name(one.test) for one in tree.body
        )

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Its statements.

        They are parsed again here: of most files of a project only the imports are asked for, and
        a tree takes many times the memory of its text.
        """
        return _parsed(self._text)

    @functools.cached_property
    def silenced(self) -> dict[int, set[str]]:
        """For each line the rules that its comment silences."""
        return {
            line: set(RULES) if names is None else {name.strip() for name in names.split(",")}
            for line, names in _comments(self._text)
        }

    def place(self, line: int) -> str:
        """Return ``file:line``; of a notebook ``file:cell number:line in the cell``."""
        if self._cells is None:
            return f"{self.path}:{line}"
        cell = bisect.bisect(self._cells, line)
        return f"{self.path}:cell {cell}:{line - self._cells[cell - 1] + 1}"


def _parsed(text: str) -> ast.Module:
    """Return the tree of a text; what Python would warn of in it is for who runs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def read(path: Path) -> Source:
    """Read a script or a notebook.

    Raises:
        Unreadable: the file is not there, not text, or not Python.
    """
    try:
        if path.suffix == ".ipynb":
            return _read_notebook(path)
        with tokenize.open(path) as file:
            return Source(file.read(), path)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise Unreadable(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _read_notebook(path: Path) -> Source:
    try:
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
        texts = ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]
        language = _language(notebook.get("metadata") or {})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{path}: no notebook of format 4 ({error!r})") from error
    lines: list[str] = []
    starts: list[int] = []
    for text in texts if language == "python" else ():
        starts.append(len(lines) + 1)
        lines += _without_magics(_LINE_END.split(text.rstrip("\r\n")))
    return Source("\n".join(lines), path, starts)


def _language(metadata: dict[str, dict[str, str]]) -> str:
    """Return the language of a notebook's kernel; a notebook that says nothing is Python's."""
    kernel, language = (metadata.get(one) or {} for one in ("kernelspec", "language_info"))
    return (kernel.get("language") or language.get("name") or "python").lower()


def _without_magics(lines: list[str]) -> list[str]:
    """Return the lines of a cell, without what only IPython reads.

    Python itself tells which line it cannot read: one may also begin with the % of an expression.
    """
    found = list(lines)
    cell = next((n for n, line in enumerate(found) if line.strip()), 0)
    magic = _CELL_MAGIC.match(found[cell])
    if magic is not None:
        begin, rest = [""] * (cell + 1), found[cell + 1 :]
        if magic[1] not in _AROUND:
            return begin + [""] * len(rest)
        return begin + (rest and _without_magics(rest))
    while (number := _first_wrong(found)) is not None:
        line = _TIMED.sub(r"\1", found[number])
        magic = _MAGIC.match(line)
        if magic is not None:
            line = f"{magic['indent']}{magic['target'] or ''}None"
            while found[number].endswith("\\") and number + 1 < len(found):
                found[number] = line
                number, line = number + 1, ""
        elif line == found[number]:
            break
        found[number] = line
    return found


def _first_wrong(lines: list[str]) -> int | None:
    """Return the index of the line that Python cannot read; None where it can read all."""
    try:
        _parsed("\n".join(lines))
    except SyntaxError as error:
        return min(max(error.lineno or 1, 1), len(lines)) - 1
    except (ValueError, RecursionError, MemoryError):
        return None
    return None


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield what import statements may read, in whichever function: number of dots and name."""
    waiting: list[ast.AST] = [tree]
    while waiting:  # only statements: most of a tree are expressions
        node = waiting.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield node.level, module
            for alias in node.names:
                yield node.level, f"{module}.{alias.name}".lstrip(".")
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


def _is_about_name(test: ast.expr) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(test))


def _comments(text: str) -> Iterator[tuple[int, str | None]]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                yield token.start[0], match.group(1)
    except (tokenize.TokenError, IndentationError):
        return
