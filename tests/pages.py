"""The pages of the documentation, README.md and docs/*.md, and the Python snippets on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("**/*.md"))]
START = "start"  # what stands above the first heading
_FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)
_PRELUDE = "<!-- prelude -->\n"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def snippets(page: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the heading, the line number and the source of each Python block."""
    text = text_of(page)
    for match in _FENCED.finditer(text):
        before = text[: match.start(1)]
        headings = _HEADING.findall(before)
        yield headings[-1] if headings else START, before.count("\n"), match.group(1)


def headings(page: Path) -> list[str]:
    """Return the headings that have snippets below them."""
    return list(dict.fromkeys(heading for heading, *_ in snippets(page)))


def execute(page: Path, source: str, line: int, namespace: dict[str, Any]) -> None:
    """Run a block so that a traceback points to its line on the page."""
    exec(compile("\n" * line + source, str(page), "exec"), namespace)


def run(page: Path, heading: str) -> dict[str, Any]:
    """Run the snippets below a heading, after the page's prelude; return their names."""
    # pickling and torch.compile look the functions of a snippet up by their module's name
    namespace: dict[str, Any] = {"__name__": "__main__"}
    text = text_of(page)
    if _PRELUDE in text and heading != START:
        execute(page, _FENCED.search(text, text.index(_PRELUDE)).group(1), 0, namespace)
    for found, line, source in snippets(page):
        if found == heading:
            execute(page, source, line, namespace)
    return namespace


def between_markers(page: Path, name: str) -> str:
    """Return what stands between the marks ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    return text_of(page).partition(_begin(name))[2].partition(_end(name))[0]


def write_between_markers(page: Path, name: str, content: str) -> None:
    """Replace what stands between the marks."""
    before, _, rest = text_of(page).partition(_begin(name))
    after = rest.partition(_end(name))[2]
    page.write_text(before + _begin(name) + content + _end(name) + after, encoding="utf-8")


def _begin(name: str) -> str:
    return f"<!-- {name}:begin -->\n"


def _end(name: str) -> str:
    return f"<!-- {name}:end -->"
