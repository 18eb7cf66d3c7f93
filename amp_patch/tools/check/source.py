"""A file as it is read: a script, or a notebook's code, and the rules that its comments silence."""

from __future__ import annotations

import ast
import bisect
import functools
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from .rules import RULES

_IGNORE = re.compile(r"#\s*amp-patch:\s*ignore(?:\[([\w\s,-]*)\])?")
#: Cell magics that run the rest of the cell as Python, and add to it.
_AROUND = ("time", "timeit", "capture", "prun", "memit")
_CELL_MAGIC = re.compile(r"%%(\w+)")
#: What only IPython reads: `%magic`, `!command`, `?name`, `name?`, `x = !command`, `x = %magic`.
_MAGIC = re.compile(r"(?P<indent>\s*)((?P<target>[\w\s,.]+=\s*)?[%!]|\?|%?[\w.]+\?{1,2}\s*$)")
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
            tree = self._parsed()
        except SyntaxError as error:
            raise Unreadable(f"{self.place(error.lineno or 1)}: {error.msg}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise Unreadable(f"{path}: {error}") from error
        self.names_amp = "apex" in text or "amp_patch" in text
        self.imports = set(_imports(tree))
        self.asks_name = any(
            isinstance(one, ast.If) and _is_about_name(one.test) for one in tree.body
        )

    def _parsed(self) -> ast.Module:
        return ast.parse(self._text, filename=str(self.path))

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Its statements.

        They are parsed again here: of most files of a project only the imports are asked for, and
        a tree takes many times the memory of its text.
        """
        return self._parsed()

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
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise Unreadable(f"{path}: no notebook of format 4 ({error!r})") from error
    lines: list[str] = []
    starts: list[int] = []
    for text in texts:
        starts.append(len(lines) + 1)
        lines += _without_magics(text.splitlines()) or [""]
    return Source("\n".join(lines), path, starts)


def _without_magics(lines: list[str]) -> list[str]:
    """Return the lines of a cell, without what only IPython reads."""
    if _is_python(lines):  # a line may begin with the % that formats a text
        return lines
    cell = _CELL_MAGIC.match(lines[0])
    if cell is not None:
        rest = lines[1:] if cell[1] in _AROUND else [""] * (len(lines) - 1)
        return ["", *_without_magics(rest)]
    found: list[str] = []
    goes_on = False
    for line in lines:
        if not goes_on:
            line = _TIMED.sub(r"\1", line)
        magic = _MAGIC.match(line)
        if goes_on:
            found.append("")
        elif magic is None:
            found.append(line)
            continue
        else:
            found.append(f"{magic['indent']}{magic['target'] or ''}None")
        goes_on = line.endswith("\\")
    return found


def _is_python(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


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
