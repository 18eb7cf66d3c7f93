"""Train the digits example, or the language model, at every level from O0 to O5 and compare.

python examples/sweep.py
python examples/sweep.py --task digits language_model --write-readme
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import digits
import language_model
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from amp_patch import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
COLUMNS = (
    "level",
    "final loss",
    "vs O0 %",
    "right %",
    "vs O0",
    "weights",
    "layer output",
    "steps on",
    "loss scale",
    "time s",
)
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
README = Path(__file__).parents[1] / "README.md"


@dataclass(frozen=True)
class Task:
    """An example to train, and where to look at its activations."""

    title: str
    train: Callable[..., digits.Result | language_model.Result]
    layer: str
    inputs: Callable[[str], Tensor]


@dataclass(frozen=True)
class Row:
    """What was measured at one level."""

    level: str
    first_loss: float
    final_loss: float
    accuracy: float
    weights: torch.dtype
    activations: torch.dtype
    stepped: torch.dtype
    loss_scale: float
    seconds: float


TASKS = {
    "digits": Task(
        "CNN on scikit-learn's digits: training loss, accuracy on unseen images",
        digits.train,
        "conv1",
        lambda device: digits.load_images(device)[0][:8],
    ),
    "language_model": Task(
        "Transformer on Python's sources: loss and accuracy per unseen character",
        language_model.train,
        "blocks.0.qkv",
        lambda device: language_model.load_text(device)[None, : language_model.CONTEXT],
    ),
}


def activation_dtype(model: nn.Module, layer: str, inputs: Tensor) -> torch.dtype:
    """Return the dtype in which the submodule ``layer`` returns its output."""
    seen: list[torch.dtype] = []
    hook = model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    with torch.no_grad():
        model(inputs)
    hook.remove()
    return seen[0]


def measure(
    task: Task, level: str, seed: int, device: str, on_progress: Callable[[float], object]
) -> Row:
    """Train ``task`` at ``level``, look at what it left, and undo the patching."""
    start = time.perf_counter()
    result = task.train(level, seed=seed, device=device, on_progress=on_progress)
    seconds = time.perf_counter() - start
    row = Row(
        level,
        result.first_loss,
        result.final_loss,
        result.accuracy,
        weights=result.model.get_submodule(task.layer).weight.dtype,
        activations=activation_dtype(result.model, task.layer, task.inputs(device)),
        stepped=next(amp.master_params(result.optimizer)).dtype,
        loss_scale=amp.loss_scale(),
        seconds=seconds,
    )
    amp.deactivate()
    return row


def sweep(task: Task, levels: Iterable[str], seed: int, device: str) -> list[Row]:
    """Measure every level, with a progress bar."""
    rows = []
    levels = list(levels)
    with Progress() as progress:
        bar = progress.add_task("", total=len(levels))
        for done, level in enumerate(levels):
            progress.update(bar, description=f"training at {level}")
            rows.append(
                measure(
                    task,
                    level,
                    seed,
                    device,
                    lambda share, done=done: progress.update(bar, completed=done + share),
                )
            )
        progress.update(bar, description="done")
    return rows


def cells(row: Row, reference: Row) -> tuple[str, ...]:
    """Return the row as COLUMNS names it, compared with ``reference``."""
    dtypes = (row.weights, row.activations, row.stepped)
    return (
        row.level,
        f"{row.final_loss:.4f}",
        f"{100 * (row.final_loss / reference.final_loss - 1):+.2f}",
        f"{row.accuracy:.2f}",
        f"{row.accuracy - reference.accuracy:+.2f}",
        *(SHORT[dtype] for dtype in dtypes),
        f"{row.loss_scale:g}",
        f"{row.seconds:.1f}",
    )


def as_table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "level" else "right")
    for row in rows:
        table.add_row(*cells(row, rows[0]))
    return table


def as_markdown(title: str, rows: list[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(cells(row, rows[0]) for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{title}; it starts at {rows[0].first_loss:.2f}.\n\n{table}\n"


def write_readme(text: str) -> None:
    """Replace what stands between the README's result markers by ``text``."""
    begin, end = "<!-- results:begin -->", "<!-- results:end -->"
    new, found = re.subn(
        f"{begin}.*{end}",
        lambda match: f"{begin}\n{text}{end}",
        README.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if not found:
        raise SystemExit(f"{README.name} must hold the lines {begin} and {end}; add them.")
    README.write_text(new, encoding="utf-8")


def describe(seed: int, device: str) -> str:
    where = torch.cuda.get_device_name() if device.startswith("cuda") else "the CPU, one thread"
    return f"Measured on {where}, torch {torch.__version__}, seed {seed}.\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["digits"])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write-readme", action="store_true", help="write the tables there too")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # the models are so small that a second thread costs more time than it saves
    torch.set_num_threads(1)
    sections = [describe(args.seed, args.device)]
    for name in args.task:
        rows = sweep(TASKS[name], args.levels, args.seed, args.device)
        Console().print(as_table(TASKS[name].title, rows))
        sections.append(as_markdown(TASKS[name].title, rows))
    if args.write_readme:
        write_readme("\n".join(sections))


if __name__ == "__main__":
    main()
