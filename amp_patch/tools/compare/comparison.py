"""What two records of a script say about each other: errors, and which module made them.

Pure functions over records, as `recorder` writes them; starts and prints nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .samples import magnitude, relative_error

Record = Mapping[str, Any]
#: What one rounding to a half dtype changes at most, as a share of the value.
ROUNDING = {"O0": 2.0**-24, "O4": 2.0**-8, "O5": 2.0**-8}
HALF_ROUNDING = 2.0**-11


#: The share of the usual gradient of a step below which a gradient counts as 0.
_NOTHING = 1e-3


@dataclass(frozen=True)
class ModuleError:
    """How far the output of one call of a module is from the reference's.

    Attributes:
        module: its path, with the number of its model where there are several.
        at_step, call: which call of it; steps count from 1, calls within a step too.
        error: of its outputs, relative; inf where only the level's are not finite.
        came_with: the largest error among its inputs and the outputs of the modules inside of it.
        amplification: the first over the second, which is taken to be a rounding at least.
        noise: how far the reference is from itself, in another run.
    """

    module: str
    at_step: int
    call: int
    error: float
    came_with: float
    amplification: float
    noise: float = 0.0

    @property
    def made_here(self) -> float:
        """How much of the error is this module's own, to compare modules by.

        After a large error a norm that doubles it adds more than the module that made it of a
        rounding: what tells them apart is how often it was multiplied.
        """
        if math.isinf(self.error):
            return 0.0 if math.isinf(self.came_with) else math.inf
        return self.error * math.log(max(1.0, self.amplification))


@dataclass(frozen=True)
class GradientError:
    """How far the true gradient of a parameter is from the reference's, at one step."""

    parameter: str
    at_step: int
    error: float
    noise: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """A level against the reference.

    Attributes:
        level: its name.
        modules: every call, those that make an error themselves before those that hand one on.
        gradients: every gradient, the worst first.
        notes: what could not be compared, in words.
        nonfinite: ``[module, function]`` that made inf or NaN at the level only, the first first.
        functions: module -> function -> ``[calls, elements]`` at the level.
        overflows: the different causes of its overflows, as `recorder` notes them.
        buffers: that are inf or NaN at the level only, as `SpoiledBuffer.to_json` has them.
    """

    level: str
    modules: Sequence[ModuleError]
    gradients: Sequence[GradientError]
    notes: Sequence[str]
    nonfinite: Sequence[Sequence[str]]
    functions: Mapping[str, Mapping[str, Sequence[int]]]
    overflows: Sequence[Mapping[str, Any]] = ()
    buffers: Sequence[dict[str, Any]] = ()

    def worst(self) -> list[ModuleError]:
        """Return one call of each module, its worst, in the same order."""
        seen: dict[str, ModuleError] = {}
        for one in self.modules:
            seen.setdefault(one.module, one)
        return list(seen.values())


def compare(level: str, record: Record, reference: Record, again: Record | None) -> Comparison:
    """Compare the record of a level with that of the reference.

    Args:
        level: its name.
        record, reference: of `recorder`.
        again: of a second run of the reference; None leaves the noise 0.
    """
    notes: list[str] = []
    modules = _modules(level, record, reference, notes)
    gradients = _gradients(record, reference, notes)
    if again is not None:
        own = {(e.module, e.at_step, e.call): e.error for e in _modules("O0", again, reference, [])}
        modules = [replace(e, noise=own.get((e.module, e.at_step, e.call), 0.0)) for e in modules]
        noise = {(e.parameter, e.at_step): e.error for e in _gradients(again, reference, [])}
        gradients = [replace(e, noise=noise.get((e.parameter, e.at_step), 0.0)) for e in gradients]
    known = {tuple(one) for one in reference["nonfinite"]}
    spoiled = {(one["module"], one["name"]) for one in reference["buffers"]}
    return Comparison(
        level,
        sorted(modules, key=_badness, reverse=True),
        sorted(gradients, key=lambda e: e.error, reverse=True),
        [*_ranks(record), *_skips(record), *notes],
        [list(one) for one in record["nonfinite"] if tuple(one) not in known],
        record["functions"],
        record["overflows"],
        [one for one in record["buffers"] if (one["module"], one["name"]) not in spoiled],
    )


def _modules(level: str, record: Record, reference: Record, notes: list[str]) -> list[ModuleError]:
    rounding = ROUNDING.get(level, HALF_ROUNDING)
    twins = {_key(line): line for line in reference["calls"]}
    keys = [_key(line) for line in record["calls"]]
    _note_missing_calls(level, keys, twins, notes)
    found = []
    inside: dict[int, float] = {}
    # A call is written down when it ends, after all that it contains.
    for line in record["calls"]:
        depth = line["within"]
        children = inside.pop(depth + 1, 0.0)
        twin = twins.get(_key(line))
        if twin is None:
            continue
        error = _largest(line["outputs"], twin["outputs"], f"output of {_words(line)}", notes)
        came_with = max(children, _largest(line["inputs"], twin["inputs"], "", []))
        inside[depth] = max(inside.get(depth, 0.0), error)
        amplification = 0.0 if error == 0 else error / max(came_with, rounding)
        if math.isinf(error) and math.isinf(came_with):
            amplification = 1.0
        found.append(
            ModuleError(*_key(line), error, came_with=came_with, amplification=amplification)
        )
    return [replace(one, at_step=one.at_step + 1) for one in found]


def _badness(one: ModuleError) -> tuple[bool, float, float]:
    return math.isinf(one.error), one.made_here, one.error


def _gradients(record: Record, reference: Record, notes: list[str]) -> list[GradientError]:
    found = []
    twins = {_gradient_key(line): line for line in reference["gradients"]}
    least = _least_magnitudes(reference)
    # An overflow while the loss scale still finds its place says little where a later step is made.
    compared = {line["parameter"] for line in record["gradients"] if "gradient" in line}
    for line in record["gradients"]:
        twin = twins.get(_gradient_key(line), {})
        step, name = line["step"] + 1, line["parameter"]
        if "overflow" in line:
            if name not in compared:
                found.append(GradientError(name, step, math.inf))
        elif "gradient" in line and "gradient" in twin:
            gradients = [line["gradient"]], [twin["gradient"]]
            what = f"gradient of {name}, step {step}"
            error = _largest(*gradients, what, notes, least[line["step"]])
            found.append(GradientError(name, step, error))
        elif ("gradient" in line) != ("gradient" in twin):
            where = "the level" if "gradient" in line else "the reference"
            notes.append(f"{name}: a gradient at {where} only, step {step}")
    return found


def _least_magnitudes(reference: Record) -> dict[int, float]:
    """Return, for each step, the magnitude below which a gradient counts as 0.

    Some gradients are 0 but for rounding, as that of the bias of an attention's keys: an error
    relative to that would stand above all others, and mean nothing.
    """
    found: dict[int, list[float]] = {}
    for line in reference["gradients"]:
        if "gradient" in line:
            found.setdefault(line["step"], []).append(magnitude(line["gradient"]["values"]))
    return {step: _NOTHING * statistics.median(each) for step, each in found.items()}


def _largest(
    ones: Sequence[Any],
    others: Sequence[Any],
    what: str,
    notes: list[str],
    least: float = 0.0,
) -> float:
    """Return the largest error of the tensors of a call; 0 where there is none to compare."""
    if len(ones) != len(others):
        notes.append(f"{what}: {len(ones)} tensors, and {len(others)} in the reference")
        return 0.0
    errors = [0.0]
    for one, other in zip(ones, others, strict=True):
        if one["shape"] != other["shape"]:
            notes.append(f"{what}: shape {one['shape']}, and {other['shape']} in the reference")
        elif one["nonfinite"] > other["nonfinite"]:
            errors.append(math.inf)
        else:
            errors.append(relative_error(one["values"], other["values"], least))
    return max(errors)


def _note_missing_calls(
    level: str, keys: Iterable[Any], twins: Iterable[Any], notes: list[str]
) -> None:
    keys, twins = set(keys), set(twins)
    for where, only in ((level, keys - twins), ("the reference", twins - keys)):
        if only:
            first = min(only)[0] or "(model)"
            notes.append(f"{len(only)} calls of modules at {where} only, the first {first}")


def _ranks(record: Record) -> list[str]:
    """Return what is to be said of several processes."""
    if record["ranks"] == 1:
        return []
    notes = [f"of {record['ranks']} processes the first is compared, and overflows are of all"]
    if not record["alike"]:
        notes.append("some skipped steps that others made: their weights are not the same any more")
    return notes


def _skips(record: Record) -> list[str]:
    count = len(record["skipped"])
    if not count:
        return []
    steps = "1 step was" if count == 1 else f"{count} steps were"
    return [f"{steps} skipped after an overflow, and then at O0 as well"]


def _key(line: Mapping[str, Any]) -> tuple[str, int, int]:
    return line["module"], line["step"], line["call"]


def _gradient_key(line: Mapping[str, Any]) -> tuple[str, int]:
    return line["parameter"], line["step"]


def _words(line: Mapping[str, Any]) -> str:
    return f"{line['module'] or '(model)'}, step {line['step'] + 1}, call {line['call']}"
