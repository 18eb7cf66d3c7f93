"""Writes what was found: lines of at most 60 characters, or JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from amp_patch import __version__

from .advice import Advice
from .compilation import Compiled
from .finding import Finding
from .self_test import Outcome
from .speed import Speed

WIDTH = 60
_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes:
        device: what was measured on.
    """

    device: str
    findings: Sequence[Finding]
    kernels: Sequence[Compiled]
    speeds: Sequence[Speed]
    tested: Sequence[Outcome]
    advice: Advice

    @property
    def is_well(self) -> bool:
        """Whether nothing is broken."""
        return all(one.state != "broken" for one in self.findings)

    def to_json(self) -> str:
        """Return it for machines."""
        content = {
            "amp_patch": __version__,
            "ok": self.is_well,
            "device": self.device,
            "findings": _plain(self.findings),
            "kernels": _plain(self.kernels),
            "speed": _plain(self.speeds),
            "levels": [{**dataclasses.asdict(one), "passed": one.passed} for one in self.tested],
            "start_with": self.advice._asdict(),
        }
        # JSON knows no infinity, which is the error of a step that raised.
        return json.dumps(_finite(content), indent=2)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield each line with its style, "" for none."""
        for one in self.findings:
            yield from _wrapped(one)
        yield "", ""
        yield f"Speed on {self.device}, against float32 in turns", "bold"
        yield from ((line, "") for line in self._table())
        yield "", ""
        yield from _paragraph(f"Start with {self.advice.level}: {self.advice.reason}", "bold")
        broken = sum(one.state == "broken" for one in self.findings)
        yield "", ""
        if broken:
            yield f"{broken} broken; what mends it stands after ->", "bold red"
        else:
            yield "All is well.", "bold green"

    def _table(self) -> Iterator[str]:
        operation = ""
        for one in self.speeds:
            if one.operation != operation:
                operation = one.operation
                yield f"  {operation}, {one.rounds} rounds: float32 {one.float32_ms:.3f} ms"
            low, high = one.spread
            spread = f"{one.ratio:7.2f} x ({low:.2f} to {high:.2f})"
            yield f"    {one.dtype:<8} {one.half_ms:10.3f} ms {spread}"


def show(report: Report) -> None:
    """Print the lines, in colour where rich is installed and the output is a terminal."""
    try:
        parts = importlib.import_module("amp_patch.tools.rich_parts")
    except ImportError:
        for line, _ in report.lines():
            click.echo(line)
        return
    console = parts.Console(soft_wrap=True, highlight=False)
    for line, style in report.lines():
        console.print(parts.Text(line, style=style))
    sys.stdout.flush()


def _wrapped(finding: Finding) -> Iterator[tuple[str, str]]:
    first = f"{finding.state:<7} "
    yield from _paragraph(finding.text, _STYLES[finding.state], first)
    if finding.mend:
        yield from _paragraph(f"-> {finding.mend}", "", " " * len(first), breaks=False)


def _paragraph(
    text: str, style: str, first: str = "", breaks: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield lines of at most `WIDTH`; a command that may not be broken keeps its words whole."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=breaks,
        break_on_hyphens=False,
    )
    for line in lines:
        yield line, style


def _plain(items: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in items]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
