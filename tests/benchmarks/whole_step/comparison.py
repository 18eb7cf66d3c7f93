"""Compares candidates with the baseline, which takes turns with each of them, round by round."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.rounds import Seconds, interleave, ratio
from benchmarks.whole_step.candidates import BASELINE, IMPOSSIBLE
from benchmarks.whole_step.processes import Caller, Failed
from benchmarks.whole_step.row import Key, Measured, Row
from benchmarks.whole_step.timing import Prepared


class Comparison:
    """Measures rows, each candidate in one process and the baseline in another.

    The baseline stays from one row of a model to the next; in whatever mode the candidate is, it is
    the eager one. Who has failed is ended, and started anew for the next row.

    Args:
        start: starts a process.
        rounds: of one block of steps of each.
    """

    def __init__(self, start: Callable[[], Caller], rounds: int) -> None:
        self._start, self._rounds = start, rounds
        self._own: Caller | None = None
        self._baseline: Caller | None = None
        self._model, self._prepared = "", Prepared("", 0, 0, 0.0, None)
        self._launches: int | None = None
        self._broken: dict[str, str] = {}
        self._uncounted: set[str] = set()

    def row(self, key: Key) -> Row:
        """Measure a row; one that cannot be measured says why."""
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        if reason := IMPOSSIBLE.get((key.mode, key.candidate)) or self._broken.get(key.model):
            return Row(key, date, error=reason)
        try:
            return self._measure(key, date)
        except Failed as failed:
            by_baseline = failed.caller is self._baseline
            self._end(failed.caller)
            return Row(key, date, error=f"the baseline: {failed}" if by_baseline else str(failed))

    def end(self) -> None:
        """End the processes."""
        for caller in (self._own, self._baseline):
            if caller is not None:
                self._end(caller)

    def _measure(self, key: Key, date: str) -> Row:
        baseline = self._baseline
        if baseline is None or self._model != key.model:
            self._free_memory()
            self._own = self._own or self._start()  # it imports while the baseline is prepared
            baseline = self._prepare_baseline(key.model)
        own = self._own = self._own or self._start()
        prepared: Prepared = own.call("prepare", key.model, key.candidate, key.mode)
        timed = {"ours": partial(own.call, "block"), "theirs": partial(baseline.call, "block")}
        # The first round finds the caches and the clocks of the device as they were left.
        seconds = {
            name: values[1:]
            for name, values in interleave(timed, self._rounds + 1, lambda: None).items()
        }
        launches = self._count(own, key.mode)
        if self._launches is None:
            self._launches = self._count(baseline, "eager")
        return Row(
            key,
            date,
            optimizer=prepared.optimizer,
            steps=prepared.steps,
            own=_measured(prepared, seconds["ours"], launches),
            baseline=_measured(self._prepared, seconds["theirs"], self._launches),
            speed=ratio(seconds, "theirs", "ours"),
        )

    def _prepare_baseline(self, model: str) -> Caller:
        """Have a process train a model by the baseline; return it."""
        baseline = self._baseline = self._baseline or self._start()
        self._model, self._launches = model, None
        try:
            self._prepared = baseline.call("prepare", model, BASELINE, "eager")
        except Failed as failed:
            self._broken[model] = f"the baseline: {failed}"
            raise
        return baseline

    def _free_memory(self) -> None:
        """Have the candidate before drop what it holds."""
        if self._own is not None:
            try:
                self._own.call("drop")
            except Failed as failed:
                self._end(failed.caller)

    def _count(self, caller: Caller, mode: str) -> int | None:
        """Return the launches of a step, which are not asked for again in a mode where that fails.

        They come last: what is timed is there by then.
        """
        if mode in self._uncounted:
            return None
        try:
            launches: int | None = caller.call("launches")
        except Failed as failed:
            self._uncounted.add(mode)
            print(f"launches are counted no more, {mode}: {failed}", flush=True)
            self._end(caller)
            return None
        return launches

    def _end(self, caller: Caller) -> None:
        caller.end()
        if caller is self._own:
            self._own = None
        if caller is self._baseline:
            self._baseline = None


def _measured(prepared: Prepared, seconds: list[Seconds], launches: int | None) -> Measured:
    median = statistics.median(seconds)
    return Measured(
        samples_per_second=prepared.samples / median,
        peak_bytes=prepared.peak_bytes,
        launches=launches,
        final_loss=prepared.final_loss,
    )
