"""``amp-patch diagnose -- script.py``: the module and operator that overflow, and what mends it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from amp_patch.debug import spoiled_buffers

from . import options
from .observed import observe


@options.script_command()
@options.steps("End the script when every optimizer has made N steps.", default=50)
@options.opt_level()
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write diagnose.json there.",
)
def command(
    steps: int, opt_level: str | None, folder: Path | None, script: tuple[str, ...]
) -> None:
    """Find the module and operator of a script that overflow.

    Every step that is skipped is run again, and each different cause is told once. Ctrl-C ends the
    script, and shows what was found until then.

        amp-patch diagnose --steps 20 -- train.py --epochs 1
    """
    if folder is not None:
        options.writable_folder(folder)
    tool = "amp_patch.tools.diagnose_child:start"
    observed = observe(tool, script, {"steps": steps}, opt_level).with_words(_ADVISED, _DONE)
    found = observed.first()
    if len(observed.found) > 1:
        found = max(observed.found, key=_what_it_explains)
        count = len(observed.found)
        click.echo(
            f"{count} processes; told is the one that shows most of what overflowed.", err=True
        )
    click.echo(report(found, script))
    if folder is not None:
        path = folder / "diagnose.json"
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    observed.end()


#: What an error of amp_patch advises, and what is in its place here.
_ADVISED = "Run amp-patch diagnose -- SCRIPT, which"
_DONE = "See the report of amp-patch diagnose, which"
#: Modules near the limits that are told.
_MOST_LINES = 10
_HIDDEN = (
    "In the last step inf or NaN came up in a forward, and no gradient shows it: what follows made "
    "it finite, and wrong (1 / inf is 0). amp-patch compare tells how far off it is."
)
_ENDED = " The script was ended there; --steps N looks at more."
_UNCLEARED = (
    "{} more {} skipped, for the gradients of a skipped step were not cleared, and every backward "
    "adds to them. Call optimizer.zero_grad() between steps."
)
_PARTLY = "in the steps that are said to be mended so, "
_ALSO_IN_FP32 = (
    "The inf or NaN in a forward is hidden by what follows, and comes up in float32, too: "
    "precision is not to blame."
)
_FLUSHED = (
    "At a loss scale of {scale:g} most gradients of a module or loss above are 0 in float16, and "
    "what has them does not train. Call amp.initialize(..., loss_scale='dynamic'), whose scale "
    "doubles after each 2000 finite steps, from init_scale on; or take O4 or O5, whose bfloat16 "
    "holds them."
)


def _what_it_explains(found: dict[str, Any]) -> tuple[int, int]:
    """Return how many overflows a process can explain, and how many it had.

    A step is skipped on all ranks where one overflows, but only that one has the cause.
    """
    known = (one["count"] for one in found["causes"] if one["where"] != "unknown")
    return sum(known), int(found["overflows"])


def report(found: dict[str, Any], script: Sequence[str]) -> str:
    """Return what was found in words.

    Args:
        found: as `diagnose_child` writes it.
        script: the words that start it.
    """
    told = {_title(cause) for cause in found["causes"]}
    hidden = [cause for cause in found["hidden"] if _title(cause) not in told]
    overflows = found["overflows"]
    lines = _head(found, hidden)
    for cause in found["causes"]:
        step = f"{'first ' if cause['count'] > 1 else ''}in step {cause['first_step']}"
        lines += ["", f"{cause['count']} of {overflows}, {step}: {cause['text']}"]
    if found["buffers"]:
        lines += ["", *spoiled_buffers.lines(found["buffers"])]
    if hidden:
        lines += ["", _HIDDEN, *(cause["text"] for cause in hidden)]
    lines += _rules([*found["causes"], *hidden, *found["buffers"]], script)
    lines += _infinite_state(found["infinite_state"])
    lines += _near_limits(found["near_limits"], found["near_limits_of_loss"])
    if found["flushed_at"] is not None and not any(map(_lowers_the_scale, found["causes"])):
        lines += ["", _FLUSHED.format(scale=found["flushed_at"])]
    if any(one["beyond"] for one in found["near_limits"].values()) and not overflows + len(hidden):
        lines += ["", _ALSO_IN_FP32]
    return "\n".join(lines)


def _head(found: dict[str, Any], hidden: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many steps overflowed, and were skipped beside."""
    steps, overflows, overflowed = found["steps"], found["overflows"], found["overflowed_steps"]
    if overflows:
        passes = f", in {overflows} backward passes" if overflows != overflowed else ""
        lines = [f"{overflowed} of {steps} steps overflowed{passes}."]
    else:
        many = "1 step" if steps == 1 else f"{steps} steps"
        lines = [f"{'No gradient' if hidden else 'Nothing'} overflowed in {many}."]
    if found["was_ended"] and all(map(_is_loss_scale, found["causes"])) and not hidden:
        lines[0] += _ENDED
    if uncleared := found["uncleared_steps"]:
        lines.append(_UNCLEARED.format(uncleared, "was" if uncleared == 1 else "were"))
    return lines


def _is_loss_scale(cause: dict[str, Any]) -> bool:
    """Return whether it was the loss scale alone, as in the first steps of many a training."""
    return cause["fits"] is not None and 1.0 <= cause["fits"] < cause["scale"]


def _lowers_the_scale(cause: dict[str, Any]) -> bool:
    """Return whether a dynamic scale falls by it in each step, down to where gradients are 0."""
    return bool(cause["scaling"]["dynamic"]) and not _is_loss_scale(cause)


def _title(cause: dict[str, Any]) -> str:
    """Return the line that says where it was; below it are magnitudes, which steps change."""
    return str(cause["text"]).partition("\n")[0]


def _rules(found: Sequence[dict[str, Any]], script: Sequence[str]) -> list[str]:
    """Return a rules file that mends what was found, and the command that uses it."""
    rules = {module: how for one in found for module, how in one["rule"].items()}
    if not rules:
        return []
    is_part = any(one.get("is_mended_in_part") for one in found)
    own = script[0] == "-m" or Path(script[0]).is_file()
    run = "amp-patch run --rules rules.toml" if own else "AMP_PATCH_RULES=rules.toml"
    return [
        "",
        f"Without a change of the script, {_PARTLY * is_part}by these lines in rules.toml:",
        "  [modules]",
        *(
            f'  {json.dumps(name, ensure_ascii=False)} = "{how}"'
            for name, how in rules.items()
            if not any(_is_inside(name, other) for other in rules)
        ),
        f"and {run} {shlex.join(script)}",
    ]


def _is_inside(module: str, other: str) -> bool:
    """Return whether a module is in another, or in a model: what that computes in holds for it."""
    is_model = not other or other.endswith(":")
    return module != other and module.startswith(other if is_model else f"{other}.")


def _infinite_state(counted: dict[str, int]) -> list[str]:
    """Return lines on states of optimizers that half numbers could not hold."""
    if not counted:
        return []
    what = ", ".join(f"{count} numbers of {name}" for name, count in counted.items())
    return [
        "",
        f"Inf in half precision: {what}. Sums of gradients, or of their squares, outgrew it.",
        "  Weights whose sum of squares is inf stand still. Take O2 or O5, which step in float32.",
    ]


def _near_limits(counted: dict[str, Any], of_loss: dict[str, Any] | None) -> list[str]:
    """Return lines on the modules, and the loss, whose values came near the limits of float16."""
    named = {f"`{name}`" if name else "the model itself": one for name, one in counted.items()}
    if of_loss is not None:
        named = {"the loss, outside of the model": of_loss, **named}
    if not named:
        return []
    near = [f"  {_near(name, one)}" for name, one in named.items()]
    more = len(near) - _MOST_LINES
    rest = [f"  and {more} module{'s' * (more > 1)} with fewer"] if more > 0 else []
    return ["", "Near the limits of float16 in the last step:", *near[:_MOST_LINES], *rest]


def _near(name: str, counts: dict[str, int]) -> str:
    words = [
        f"{counts[key]} of {counts[total]} {what}"
        for key, total, what in (
            ("beyond", "values", "values inf or NaN"),
            ("large", "values", "values above 32752"),
            ("flushed", "grads", "gradients flushed to zero"),
            ("subnormal", "grads", "gradients subnormal"),
        )
        if counts[key]
    ]
    return f"{name}: {', '.join(words)}"
