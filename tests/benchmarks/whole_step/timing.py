"""Trains one candidate after the other in this process, and times blocks of the steps."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.gpu_timing import count_launches
from benchmarks.rounds import Seconds
from benchmarks.whole_step.candidates import (
    CANDIDATES,
    WARM_UP,
    Candidate,
    Step,
    captured,
    optimizer_options,
    stepping,
)
from benchmarks.whole_step.models import Workload, made
from torch import Tensor

#: The loss is that of so many steps, more than those in which amp_patch looks for mistakes of the
#: script (`early_looks.WATCHED`).
STEPS, TINY_STEPS = 40, 4
BLOCK: Seconds = 0.12
#: On so many processors, the same ones, run the processes that are compared: two processes that the
#: system puts on different ones were seen to differ by a quarter where the host is what takes time.
PROCESSORS = 4


class Prepared(NamedTuple):
    """What is known of a candidate before it is timed.

    Attributes:
        optimizer: with its options.
        samples: of a step.
        steps: how many were made.
        final_loss: of the last of them.
        peak_bytes: the most that a step had from CUDA's allocator; None on a CPU.
    """

    optimizer: str
    samples: int
    steps: int
    final_loss: float
    peak_bytes: int | None


class Stepping:
    """Trains a candidate at a time.

    Args:
        device: where.
        tiny: models, and the number of steps, as for a test.
    """

    def __init__(self, device: str, tiny: bool) -> None:
        self._device, self._tiny = torch.device(device), tiny
        self._is_cuda = self._device.type == "cuda"
        self._workload: tuple[str, Workload] | None = None
        self._open = contextlib.ExitStack()
        self._processors = _processors()
        self._run: Step = _nothing_prepared
        self._block = TINY_STEPS
        if self._is_cuda:
            # The profiler may leave its hooks in the process, which make launches take longer. So
            # they are there from the start on, in each of the processes that are compared.
            count_launches(lambda: torch.ones(1, device=self._device).add_(1), self._device)

    def prepare(self, model: str, name: str, mode: str) -> Prepared:
        """Train a model from its first weights, by a candidate, for a fixed number of steps.

        Args:
            model: a name of `step_models.MODELS`.
            name: of `step_candidates.CANDIDATES`.
            mode: of `step_candidates.MODES`.
        """
        self.drop()
        _run_on(self._processors)
        if self._workload is None or self._workload[0] != model:
            self._workload = model, made(model, self._tiny)
        workload, candidate = self._workload[1].on(self._device), CANDIDATES[name]
        if mode == "compiled":
            self._open.callback(torch.compiler.reset)
        backend = "eager" if self._tiny else "inductor"
        step = self._open.enter_context(stepping(candidate, workload, mode, backend))
        train = self._train_captured if mode == "graphed" else self._train
        steps, loss = train(step, candidate)
        peak = self._peak()
        if not self._tiny:
            self._block = max(2, round(BLOCK / self._time(3)))
            _run_on(self._processors[:PROCESSORS])  # not in a test, after which others follow
        self._make_room()
        options = [f"{key}={value}" for key, value in optimizer_options(candidate, mode).items()]
        optimizer = f"AdamW({', '.join(options)})"
        return Prepared(optimizer, workload.samples, steps, float(loss), peak)

    def block(self) -> Seconds:
        """Return the seconds of a step, the mean of a block of them."""
        seconds = self._time(self._block)
        self._make_room()
        return seconds

    def launches(self) -> int | None:
        """Return how many kernels the device runs in a step; None on a CPU."""
        return count_launches(self._run, self._device) if self._is_cuda else None

    def drop(self) -> None:
        """Give up what was prepared, and its memory."""
        self._run = _nothing_prepared
        self._open.close()
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()

    def _make_room(self) -> None:
        """Where memory is short, leave what is only cached to the other process.

        The next step, which is not timed, gets it back.
        """
        if self._is_cuda:
            total = torch.cuda.get_device_properties(self._device).total_memory
            if torch.cuda.memory_reserved(self._device) > total / 3:
                torch.cuda.empty_cache()

    @property
    def _steps(self) -> int:
        return TINY_STEPS if self._tiny else STEPS

    def _train(self, step: Step, _: Candidate) -> tuple[int, Tensor]:
        """Make the first steps; return how many, and the loss of the last one."""
        self._run = step
        for _ in range(self._steps):
            loss = step()
        self._reset_peak()
        return self._steps, loss.clone()

    def _train_captured(self, step: Step, candidate: Candidate) -> tuple[int, Tensor]:
        """Do the same with a step that is captured before the last of them."""
        calls = 0

        def counted() -> Tensor:
            nonlocal calls
            calls += 1
            return step()

        for _ in range(self._steps - WARM_UP - 1):
            counted()
        self._reset_peak()  # here, for what a graph uses is handed out when it is captured
        try:
            self._run = captured(candidate, counted)
        except Exception as error:
            raise RuntimeError(f"cannot be captured: {first_line(error)}") from error
        made_before = calls - 1  # the capture itself makes no step
        replays = max(1, self._steps - made_before)
        for _ in range(replays):
            loss = self._run()
        return made_before + replays, loss.clone()  # the next replay writes to the same memory

    def _reset_peak(self) -> None:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _peak(self) -> int | None:
        if not self._is_cuda:
            return None
        for _ in range(2):
            self._run()
        return torch.cuda.max_memory_allocated(self._device)

    def _time(self, steps: int) -> Seconds:
        """Return the mean time of steps, after one that is not timed."""
        gc.disable()
        try:
            self._run()
            return self._seconds_on_device(steps) if self._is_cuda else self._seconds(steps)
        finally:
            gc.enable()

    def _seconds(self, steps: int) -> Seconds:
        start = time.perf_counter()
        for _ in range(steps):
            self._run()
        return (time.perf_counter() - start) / steps

    def _seconds_on_device(self, steps: int) -> Seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        begin.record()
        for _ in range(steps):
            self._run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / steps


def _processors() -> list[int]:
    """Return the numbers of the processors that this process may run on; none where unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _run_on(processors: list[int]) -> None:
    """Have all threads of this process run there, such as that of the backward pass."""
    if processors:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), processors)


def _nothing_prepared() -> Tensor:
    raise RuntimeError("a step must be prepared before it is made; got none. Call prepare().")


def first_line(error: Exception) -> str:
    """Return what a row says of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__
