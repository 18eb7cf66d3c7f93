"""One candidate of the search: a level, rules of functions, precisions of modules; and its file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: The reason of the line ``opt_level``, among those of functions and modules.
LEVEL = "opt_level"


@dataclass(frozen=True)
class Setting:
    """What `amp.initialize` may be told by a rules file.

    Attributes:
        level: "O0" to "O5".
        functions: names and rules.
        floats: paths of modules that run in fp32.
    """

    level: str
    functions: tuple[tuple[str, str], ...] = ()
    floats: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.level]
        parts += [f"{name} = {rule}" for name, rule in self.functions]
        if self.floats:
            more = f" and {len(self.floats) - 1} more" if len(self.floats) > 1 else ""
            parts.append(f"{self.floats[0] or '(model)'}{more} in fp32")
        return ", ".join(parts)

    def toml(self, head: Iterable[str] = (), reasons: Mapping[str, Sequence[str]] = {}) -> str:
        """Return the text of a rules file.

        Args:
            head: lines about the whole, for the top.
            reasons: "opt_level", function or module -> lines about it, for above it.
        """
        lines = [*_comments(head), ""] if head else []
        lines += [*_comments(reasons.get(LEVEL, ())), f'opt_level = "{self.level}"']
        for title, table in (
            ("functions", dict(self.functions)),
            ("modules", dict.fromkeys(self.floats, "float")),
        ):
            lines += ["", f"[{title}]"] if table else []
            for name, rule in table.items():
                lines += [*_comments(reasons.get(name, ())), f"{_key(name)} = {_string(rule)}"]
        return "\n".join(lines) + "\n"


def _comments(texts: Iterable[str]) -> list[str]:
    """Return comment lines; what a script printed may hold characters that TOML does not allow."""
    lines = [line for text in texts for line in (text.splitlines() or [""])]
    printable = ["".join(c if c.isprintable() else " " for c in line) for line in lines]
    return [f"# {line}".rstrip() for line in printable]


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else _string(name)


def _string(text: str) -> str:
    """Return a TOML string: JSON's, but for characters beyond 16 bits and DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
