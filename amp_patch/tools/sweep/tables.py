"""The table of a sweep in a terminal or a file, with its recommendation; figures are never cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_patch.tools.rich_parts import Console, Table, Text, box

from . import wording
from .comparison import Comparison, Row
from .recommendation import Recommendation
from .verdicts import DEVIATES, OK, REFERENCE

Cell = Callable[[Row], str]
#: A share of skipped steps that may be why the loss of a level is another: a dynamic scale falls in
#: the first steps.
MANY_SKIPS = 0.05


def columns(comparison: Comparison) -> list[list[tuple[str, Cell]]]:
    """Return the columns in groups: each group is a table by itself where all are too wide."""
    has_reference = comparison.reference is not None
    versus = f"vs {REFERENCE}"
    speed: list[tuple[str, Cell]] = [
        ("steps/s", lambda row: wording.rate(row.seconds.middle if row.seconds else None))
    ]
    memory: list[tuple[str, Cell]] = [("memory", lambda row: wording.size(row.memory))]
    if comparison.rounds > 1:
        memory.append(("spread", lambda row: wording.range_of_sizes(row.memory_spread)))
    training: list[tuple[str, Cell]] = [("final loss", lambda row: wording.loss(row.final_loss))]
    if has_reference:
        speed += [
            ("speed-up", lambda row: wording.times(row.speed_up.middle if row.speed_up else None)),
            ("spread", lambda row: wording.range_of(row.speed_up)),
        ]
        memory.append((versus, lambda row: wording.times(row.memory_ratio)))
        away: Cell = lambda row: wording.share(row.deviation.middle if row.deviation else None)  # noqa: E731
        training.append((versus, away))
    training += [("skipped", wording.skips), ("verdict", lambda row: row.verdict.short)]
    if not comparison.on_cuda:
        memory.append(("RAM", lambda row: wording.size(row.rss)))
    return [speed, memory, training]


def show(console: Console, comparison: Comparison, recommendation: Recommendation) -> None:
    """Print the table, what is to be said of levels, and the recommendation."""
    for table in fitting(console, comparison):
        console.print(table)
    for line in remarks(comparison):
        console.print(line, highlight=False, soft_wrap=False, markup=False, emoji=False)
    level = recommendation.level or "none"
    console.print(Text.assemble((f"Recommended: {level}. ", "bold"), recommendation.reason))


def fitting(console: Console, comparison: Comparison) -> list[Table]:
    """Return the table, in as many parts as the console's width asks for.

    Parts begin where a group of columns does, if its columns fit beside each other.
    """
    groups = columns(comparison)
    for parts in (groups, [[column] for group in groups for column in group]):
        packed: list[list[tuple[str, Cell]]] = []
        for part in parts:
            joined = [*packed[-1], *part] if packed else part
            if packed and width_of(console, _table(comparison.rows, joined)) <= console.width:
                packed[-1] = joined
            else:
                packed.append(list(part))
        tables = [_table(comparison.rows, shown) for shown in packed]
        if all(width_of(console, table) <= console.width for table in tables):
            return tables
    return tables


def width_of(console: Console, table: Table) -> int:
    """Return how wide a table is, however wide the console."""
    return console.measure(table, options=console.options.update(width=1000)).maximum


def as_markdown(comparison: Comparison) -> str:
    """Return the table as Markdown, to be shown elsewhere."""
    shown = [column for group in columns(comparison) for column in group]
    lines = [["level", *(name for name, _ in shown)], ["---", *["---:"] * (len(shown) - 1), "---"]]
    lines += [[row.level, *(cell(row) for _, cell in shown)] for row in comparison.rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def remarks(comparison: Comparison) -> list[str]:
    """Return what is to be said of levels, and of the figures."""
    alike: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.verdict.reason:
            words = f"{row.verdict.short}: {row.verdict.reason.rstrip('.')}."
            alike.setdefault(words, []).append(row.level)
    for row in comparison.rows:
        for words in _skips(row):
            alike.setdefault(words, []).append(row.level)
        words = _fewer_steps(row, comparison.reference)
        if words and row.level not in comparison.continued:
            alike.setdefault(words, []).append(row.level)
    lines = [f"{', '.join(levels)}: {words}" for words, levels in alike.items()]
    lines += _beginnings(comparison)
    if comparison.reference is None:
        lines.append(f"{REFERENCE} was not swept: there is nothing to compare speed or loss with.")
    if comparison.warm_up:
        first = "step" if comparison.warm_up == 1 else f"{comparison.warm_up} steps"
        lines.append(f"Times leave out the first {first} of each run (warm-up).")
    return lines


def _beginnings(comparison: Comparison) -> list[str]:
    """Return what is to be said of levels that did not begin as the first run did."""
    lines = []
    if comparison.continued:
        lines.append(
            f"{', '.join(comparison.continued)}: not from scratch, as it seems, but from what an "
            "earlier run has saved; figures then do not compare. Give each run a folder of its own "
            "by {run} in the script's arguments."
        )
    deviating = {row.level for row in comparison.rows if row.verdict.kind == DEVIATES}
    otherwise = deviating & set(comparison.begun_otherwise) - set(comparison.continued)
    if otherwise:
        lines.append(
            f"{', '.join(sorted(otherwise))}: the first loss, before any step, is not "
            f"{REFERENCE}'s. Either half precision computes another (amp-patch compare tells), or "
            "the runs draw other random numbers: seed all of them in the script."
        )
    return lines


def _fewer_steps(row: Row, reference: Row | None) -> str:
    """Return what is to be said of a level whose script has ended earlier, or later, by itself."""
    if reference is None or row.verdict.kind != DEVIATES or row.steps == reference.steps:
        return ""
    return (
        f"it made {row.steps} steps, and {REFERENCE} {reference.steps}: the script ends by itself, "
        "as early stopping does, and the losses that are compared are of different steps."
    )


def _skips(row: Row) -> list[str]:
    """Return what is to be said of the steps that a level skipped."""
    lines = []
    if row.culprits:
        lines.append(f"inf or NaN was in the gradients of {wording.culprits(row)}.")
    if row.verdict.kind == DEVIATES and row.skipped >= MANY_SKIPS * row.steps:
        lines.append(
            f"{row.skipped} of {row.steps} steps were skipped, so it has learned from fewer than "
            f"{REFERENCE}. More --steps tell whether that is all."
        )
    if row.unlike_skips:
        steps = ", ".join(map(str, row.unlike_skips[:5]))
        more = ", ..." if len(row.unlike_skips) > 5 else ""
        lines.append(
            f"some ranks skipped steps that others made: {steps}{more}. Their weights "
            "are not the same any more; the loss scale must be moved on all alike."
        )
    return lines


def _table(rows: Sequence[Row], shown: Sequence[tuple[str, Cell]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("level", no_wrap=True)
    for name, _ in shown:
        is_text = name == "verdict"
        # a verdict may go on in the next line; a figure may not
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        cells = [
            Text(cell(row), style=_style(row) if name == "verdict" else "") for name, cell in shown
        ]
        table.add_row(row.level, *cells)
    return table


def _style(row: Row) -> str:
    return {OK: "green", DEVIATES: "yellow"}.get(row.verdict.kind, "red")
