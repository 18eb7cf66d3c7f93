"""The search: levels by speed, the regions that mend one, the rules that speed one up.

Knows settings and what trials of them say; starts no process and writes no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from amp_patch.casting.rules import FLOAT, FLOAT_DTYPE
from amp_patch.tools.compare.comparison import Comparison

from .mending import smallest_set
from .outcome import Outcome
from .setting import LEVEL, Setting
from .speed import Race, race

FP32 = Setting("O0")
#: Levels that cast functions, so that rules of functions mean something.
CASTING = ("O1", "O4")
#: A level that single runs show so much slower than what is found already is not looked at further.
CLEARLY_SLOWER = 1.1
#: A script that is as far from itself may have gone on from what its first run has saved.
MOST_NOISE = 0.1
OWN_FILES = (
    "if the script goes on from what an earlier run has saved, give each run a folder of its own "
    "by {run} in its arguments"
)
#: Steps that are compared to find the modules that make an error.
COMPARED = 3
#: Functions of which a rule is tried: those with the most elements.
FUNCTIONS = 6
#: What is tried of such a function, until one keeps the metric: it computes and hands on half, or
#: computes in fp32 and hands on half.
RULES = ("half", "half_out")


class Trials(Protocol):
    """Runs of the script; see `trials.ScriptTrials`."""

    def metric(self, setting: Setting) -> Outcome:
        """Return the metric of a run."""

    def seconds(self, setting: Setting) -> float | None:
        """Return the seconds of a step in a run; None where it failed."""

    def errors(self, setting: Setting, steps: int) -> Comparison | None:
        """Return the errors of modules; None where nothing was recorded."""

    def progress(self) -> float | None:
        """Return by which share the loss changed in the last run; None for another metric."""


@dataclass
class Found:
    """A setting that keeps the metric, and what was measured of it.

    Attributes:
        setting: as said.
        outcome: its metric.
        seconds: of a step, by one run; 0 where it was not timed.
        reasons: "opt_level", a function or a module -> lines about it.
        functions: function of torch -> elements of what it returned, where that was recorded.
    """

    setting: Setting
    outcome: Outcome
    seconds: float
    reasons: dict[str, list[str]] = field(default_factory=dict)
    functions: Mapping[str, int] = field(default_factory=dict)


class TooFar(Exception):
    """fp32 itself cannot be measured; the message says why."""


class Search:
    """Looks for the fastest setting whose metric is within tolerance of fp32's.

    Args:
        trials: runs the script.
        levels: those that compete; "O0" among them if fp32 may win.
        tolerance: the largest relative difference allowed.
        say: gets a line about each thing that was found out.

    Attributes:
        best: what is found so far; None while nothing is.
        reference: fp32's metric; the empty outcome before it is known.
        seconds: of a step, by level, the shorter of two runs; fp32's for one that fails.
        progress: by which share fp32's own loss changed; None where that is not the metric.
        rejected: level or setting -> why it was not taken, in words.
    """

    def __init__(
        self,
        trials: Trials,
        levels: Sequence[str],
        tolerance: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._trials, self._levels = trials, levels
        self.tolerance, self._say = tolerance, say
        self.best: Found | None = None
        self.reference = Outcome(failure="fp32 was not run")
        self.seconds: dict[str, float] = {}
        self.rejected: dict[str, str] = {}
        self.progress: float | None = None
        self._tentative: Found | None = None
        self._failing: set[str] = set()  # levels that have no time of their own

    def run(self) -> None:
        """Search; what is found so far is in `best`, also where a trial raises.

        Raises:
            TooFar: fp32 fails.
        """
        self._measure_reference()
        self._time_levels()
        half = [level for level in self.seconds if level != "O0"]
        for level in sorted(half, key=self.seconds.__getitem__):
            self._try_level(level)
        if self.best is not None and not self._loses_to_fp32_clearly(self.best.seconds):
            self._add_rules(self.best)
        if "O0" in self._levels:
            self._let_fp32_compete()

    def result(self) -> Found | None:
        """Return the best so far, for a search that has ended or was ended.

        None where nothing is known to keep the metric, and fp32 does not compete.
        """
        found = self.best or self._tentative
        if found is None and "O0" not in self._levels:
            return None
        if found is None:
            found = Found(FP32, self.reference, self.seconds.get("O0", 0.0))
            found.reasons[LEVEL] = [
                "No other setting was found that keeps the metric and is faster."
            ]
        fp32 = self.seconds.get("O0")
        is_open = LEVEL not in found.reasons and "O0" in self._levels
        if is_open and fp32 is not None and not 0.0 < found.seconds <= fp32:
            found = Found(FP32, self.reference, fp32)
            found.reasons[LEVEL] = ["Nothing that was timed is faster than fp32."]
        return found

    def within(self, outcome: Outcome) -> bool:
        """Return whether a metric is within tolerance of fp32's."""
        return outcome.deviation(self.reference) <= self.tolerance

    def deviation_words(self, outcome: Outcome) -> str:
        """Return a metric and its deviation in words."""
        if outcome.failure:
            return outcome.words()
        skipped = max(outcome.skipped, default=0)
        lag = f", {skipped} steps skipped" if skipped else ""
        return f"{outcome.words()} ({outcome.deviation(self.reference):.2%} from fp32{lag})"

    def _measure_reference(self) -> None:
        self.reference = self._trials.metric(FP32)
        if self.reference.failure:
            raise TooFar(f"fp32 cannot be measured: {self.reference.failure}")
        self.progress = self._trials.progress()
        again = self._trials.metric(FP32)
        if again.failure:
            raise TooFar(f"fp32 cannot be measured twice: {again.failure}; {OWN_FILES}")
        noise = again.deviation(self.reference)
        self._say(f"fp32: {self.reference.words()}, repeats to {noise:.2%}")
        if 2 * noise > self.tolerance:
            self.tolerance = 2 * noise
            self._say(f"so tolerance is {self.tolerance:.2%}: the script repeats no better")
        if noise > MOST_NOISE:
            self._say(OWN_FILES)

    def _time_levels(self) -> None:
        """Take the shorter of two times of each level: what else the machine does only adds."""
        levels = dict.fromkeys(["O0", *self._levels])
        times: dict[str, list[float]] = {level: [] for level in levels}
        for _ in range(2):
            for level in levels:
                seconds = self._trials.seconds(Setting(level))
                if seconds is None and level == "O0":
                    raise TooFar(
                        "fp32 makes too few optimizer steps to be timed; 5 are the least: let the "
                        "script train longer"
                    )
                times[level] += [] if seconds is None else [seconds]
        for level, known in times.items():
            # A level that fails may be mended, and then has a time of its own.
            self.seconds[level] = min(known, default=min(times["O0"]))
            self._failing |= set() if known else {level}
            words = f"{1e3 * self.seconds[level]:.3g} ms a step" if known else "fails as it is"
            self._say(f"{level}: {words}")

    def _try_level(self, level: str) -> None:
        seconds = self.seconds[level]
        if self._loses_to_fp32_clearly(seconds):
            return self._reject(level, f"{seconds / self.seconds['O0']:.2f} x fp32's time a step")
        if self.best is not None and seconds > CLEARLY_SLOWER * self.best.seconds:
            return self._reject(
                level, f"{seconds / self.best.seconds:.2f} x the best's time a step"
            )
        found = self._keep(Setting(level)) or self._mended(level)
        if found is None:
            return None
        if self.best is None:
            self.best = found
            return None
        between = self._race(self.best.setting, found.setting)
        if between.is_gain:
            self._reject(self.best.setting.level, f"{found.setting} is {between.words()}")
            self.best = found
        else:
            self._reject(level, f"no faster than {self.best.setting}")
        return None

    def _keep(self, setting: Setting) -> Found | None:
        """Return what is known of a setting, if its metric is within tolerance."""
        outcome = self._trials.metric(setting)
        is_within = self.within(outcome)
        self._say(f"{'ok ' if is_within else 'no '} {setting}: {self.deviation_words(outcome)}")
        if not is_within:
            self.rejected[setting.level] = self.deviation_words(outcome)
            return None
        is_timed = setting == Setting(setting.level) and setting.level not in self._failing
        return Found(setting, outcome, self.seconds[setting.level] if is_timed else 0.0)

    def _mended(self, level: str) -> Found | None:
        """Return the level with modules, or functions, in fp32 that keep the metric."""
        before = self.rejected[level]
        errors = self._trials.errors(Setting(level), COMPARED)
        suspects = [] if errors is None else suspicious(errors)
        if errors is None or not suspects:
            return None
        if any(one["zero_eps"] is not None for one in errors.overflows):
            self._reject(level, f"{before}{_stored(errors)}")
            return None  # the optimizer writes what is not finite, whatever modules compute in
        kept: dict[tuple[str, ...], Found] = {}

        def works(modules: Sequence[str]) -> bool:
            key = tuple(sorted(modules))
            found = self._keep(Setting(level, floats=key))
            if found is not None:
                kept[key] = self._tentative = found
            return found is not None

        mending = smallest_set(suspects, works)
        if mending is None:
            last = self.rejected[level]
            found = self._mended_by_functions(level, errors)
            also = f"also {_MENDED}" if last == before else f"{_MENDED}: {last}"
            self._reject(level, f"{before}, {also}{_stored(errors)}")
            return found
        found = self._timed(kept[tuple(sorted(mending))])
        return None if found is None else _explained(found, errors, before)

    def _mended_by_functions(self, level: str, errors: Comparison) -> Found | None:
        for _, function in errors.nonfinite if level in CASTING else ():
            found = self._keep(Setting(level, functions=((function, "float"),)))
            if found is not None:
                reason = f"makes inf or NaN at {level}; without this line: {self.rejected[level]}"
                found.reasons[function] = [reason]
                self._tentative = found
                return self._timed(found)
        return None

    def _timed(self, found: Found) -> Found | None:
        """Return it with its own time; None where that cannot be measured."""
        seconds = self._trials.seconds(found.setting)
        if seconds is None:
            return None
        self._say(f"{found.setting}: {1e3 * seconds:.3g} ms a step")
        return replace(found, seconds=seconds)

    def _add_rules(self, found: Found) -> None:
        """Try rules that have functions hand on half which the level has in fp32, for speed."""
        if found.setting.level not in CASTING:
            return
        functions = found.functions
        if not functions:
            errors = self._trials.errors(found.setting, 1)
            functions = {} if errors is None else _elements(errors)
        listed = [name for name in functions if name in (*FLOAT, *FLOAT_DTYPE)]
        for name in sorted(listed, key=functions.__getitem__, reverse=True)[:FUNCTIONS]:
            self._add_rule(self.best or found, name)

    def _add_rule(self, best: Found, name: str) -> None:
        """Give a function the first of `RULES` that keeps the metric, if that gains time."""
        for rule in RULES:
            setting = replace(best.setting, functions=(*best.setting.functions, (name, rule)))
            kept = self._keep(setting)
            if kept is None:
                continue
            between = self._race(best.setting, setting)
            if between.is_gain:
                reason = f"{between.words()}; metric {self.deviation_words(kept.outcome)}"
                reasons = {**best.reasons, name: [reason]}
                seconds = median(between.second)
                self.best = replace(best, setting=setting, outcome=kept.outcome, seconds=seconds)
                self.best.reasons = reasons
            return

    def _let_fp32_compete(self) -> None:
        """Keep what is found only where it is faster than fp32 beyond noise."""
        if self.best is None:
            return
        between = self._race(FP32, self.best.setting)
        if between.is_gain:
            self.best.reasons[LEVEL] = [f"Against fp32 {between.words()}."]
            return
        self._reject(str(self.best.setting), f"not faster than fp32: {between.words()}")
        self.best = Found(FP32, self.reference, median(between.first))
        self.best.reasons[LEVEL] = ["No setting that keeps the metric is faster than fp32 here."]

    def _race(self, first: Setting, second: Setting) -> Race:
        def run(setting: Setting) -> float:
            seconds = self._trials.seconds(setting)
            return float("inf") if seconds is None else seconds

        between = race(lambda: run(first), lambda: run(second))
        self._say(f"{second} against {first}: {between.words()}")
        return between

    def _loses_to_fp32_clearly(self, seconds: float) -> bool:
        fp32 = self.seconds.get("O0")
        return "O0" in self._levels and fp32 is not None and seconds > CLEARLY_SLOWER * fp32

    def _reject(self, what: str, why: str) -> None:
        self.rejected[what] = why
        self._say(f"{what} is out: {why}")


def _explained(found: Found, errors: Comparison, before: str) -> Found:
    """Return a setting of modules in fp32 with its reasons; `before` says how it is without."""
    reasons = {one: [_reason(one, errors)] for one in found.setting.floats}
    first = found.setting.floats[0]
    reasons[first].append(f"Without {_these(found.setting.floats)}: {before}.")
    return replace(found, reasons=reasons, functions=_elements(errors))


#: Modules without an error are not tried.
_MENDED = "with every suspected module in fp32"


def suspicious(errors: Comparison) -> list[str]:
    """Return the modules whose calls have an error, those that make it themselves first.

    The model itself is not among them: with it in fp32 everything is.
    """
    names = dict.fromkeys([module for module, _ in errors.nonfinite])
    names.update((one["module"], None) for one in errors.overflows if one["fits"] is None)
    names.update(dict.fromkeys(one.module for one in errors.worst()))
    return [name for name in names if name and not name.endswith(":")]


def _reason(module: str, errors: Comparison) -> str:
    for name, function in errors.nonfinite:
        if name == module or name.startswith(f"{module}."):
            inside = "" if name == module else f" in {name}"
            return f"{function}{inside} makes inf or NaN here at {errors.level}."
    for overflow in errors.overflows:
        if overflow["module"] == module and overflow["where"] == "backward":
            return (
                f"The backward of {overflow['operator']} makes inf or NaN here at {errors.level}."
            )
    one = next(one for one in errors.worst() if one.module == module)
    return f"Error {one.error:.2g} at {errors.level}; {one.came_with:.2g} came with its inputs."


def _stored(errors: Comparison) -> str:
    """Return what is wrong with the weights themselves, which no module's precision mends."""
    found = [one for one in errors.overflows if one["where"] == "weight"]
    return f"; {found[0]['title']}. {found[0]['advice']}" if found else ""


def _these(modules: Sequence[str]) -> str:
    return "this line" if len(modules) == 1 else f"these {len(modules)} lines"


def _elements(errors: Comparison) -> dict[str, int]:
    """Return how many elements each function returned, over all modules."""
    found: dict[str, int] = {}
    for functions in errors.functions.values():
        for name, (_, elements) in functions.items():
            found[name] = found.get(name, 0) + elements
    return found
