"""Records each step of the training in the script's process; one line a step.

Attached by `start`, when the script imports amp_patch or, through the drop-in, apex.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import platform
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.patching import Patches
from amp_patch.step.given_gradients import NOT_CLEARED
from amp_patch.step.loss_scaling import Found, nonfinite
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip
from amp_patch.tools import child
from amp_patch.tools.at_end import at_end
from amp_patch.tools.buffer_looks import BufferLooks
from amp_patch.tools.optimizer_numbers import OptimizerNumbers
from amp_patch.tools.step_limit import PATIENCE

from .memory import LivingTensors, peak_on_device, peak_rss
from .steps import NAME, Step

#: Names of parameters that a line holds at most.
MOST_NAMES = 50


def start(module: types.ModuleType) -> None:
    """Record what the session of ``amp_patch.session`` does from now on.

    The options are ``out``, ``steps`` (None: all that the script makes) and ``seed``.
    """
    options = child.options()
    child.hear_sigint()
    recorder = Recorder(module.session, child.Lines(options["out"], NAME), options["steps"])
    module.session.observers.attach(recorder)
    recorder.watch_clipping(Patches())
    at_end(recorder.end)


class Recorder(StepObserver):
    """Writes a line for each round of the optimizers.

    The round is over when an optimizer that has stepped in it steps again: the networks of a GAN
    step once each. It is over as well where a training begins after another has ended: when
    `amp.initialize` is called, and when an optimizer steps that has rested for more than
    `step_limit.PATIENCE` rounds. What that one begins is over after its step, for it may be a
    network that joins others now, and is the last to step in each of their rounds. Losses belong to
    the round of the step that follows them.

    Args:
        session: asked for the names of parameters.
        lines: written to.
        most: after so many steps the script is ended by ``SystemExit(0)``; None: never.
    """

    def __init__(self, session: Any, lines: child.Lines, most: int | None) -> None:
        self._session, self._lines, self._most = session, lines, most
        self._numbers = OptimizerNumbers()
        self._buffers = BufferLooks(lines.write)
        self._heard = _Heard()
        self._round = Step()
        self._stepped: set[int] = set()
        self._written = 0
        self._last_round: dict[int, int] = {}
        self._is_alone = False
        self._has_state: bool | None = None  # of an optimizer, before its first step
        self._counting: tuple[int, LivingTensors] | None = None
        self._has_counted = self._is_over = self._has_ended = False
        self._since, self._aside_seconds = time.perf_counter(), 0.0

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """A second training begins in the same script: its steps belong to no earlier round."""
        if self._stepped:
            self._close()
            self._round.training += 1
        with self._aside():
            self._buffers.follow(models)

    def scaled(
        self,
        loss: Tensor,
        scale: float | Tensor,
        scaler_id: int,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Keep the loss until the step's end: to read it would wait for the device."""
        with self._aside():
            if self._has_state is None:
                self._has_state = any(map(_has_stepped, self._session.optimizers.steps))
            key = (scaler_id, *sorted(map(self._numbers.of, optimizers)))
            self._heard.losses.setdefault(key, []).append(_held(loss))
            self._heard.scales[scaler_id] = _held(scale) if isinstance(scale, Tensor) else scale

    def overflowed(self, scaler_id: int, found: Sequence[Found]) -> None:
        """Keep the names of the parameters."""
        with self._aside():
            name_of = self._session.models.names()
            for param, kind in nonfinite(found)[:MOST_NAMES]:
                self._heard.overflows.append([name_of(param), kind])

    def clipped(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Keep the norm."""
        self.note_norm(norm)

    def note_norm(self, norm: Any) -> None:
        """Keep the norm of gradients that the script has clipped, before that."""
        if isinstance(norm, Tensor) and norm.numel() == 1:
            with self._aside():
                self._heard.norms.append(_held(norm))

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """Add what came since the last step to the round; begin another where that is over."""
        if self._is_over:
            raise SystemExit(0)  # the script has caught the one before
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # the step is made when the graph is replayed, and Python does not hear of that
        _wait_for_device()
        seconds = time.perf_counter() - self._since - self._aside_seconds
        number = self._numbers.of(optimizer)
        counted, tensors = self._end_counting(number)
        self._session.settle()
        rests = self._written - self._last_round.get(number, 0) > PATIENCE
        if number in self._stepped or self._is_alone or (self._stepped and rests):
            self._close()
            self._is_alone = rests
        step = self._round
        self._stepped.add(number)
        self._last_round[number] = self._written
        self._heard.tell(step)
        self._heard = _Heard()
        step.seconds += seconds
        step.skipped |= skip.was_skipped
        step.uncleared |= skip.reason == NOT_CLEARED
        step.counted |= counted
        step.tensors = tensors or step.tensors
        step.memory, step.rss = peak_on_device(), peak_rss()
        self._begin_counting(number, step)
        self._since, self._aside_seconds = time.perf_counter(), 0.0

    def end(self) -> None:
        """The process ends: write what is left, and what became of amp; once."""
        if self._has_ended:
            return
        self._has_ended = True
        self._buffers.look_at_end()
        if self._counting is not None:
            self._end_counting(self._counting[0])
        if self._stepped and not self._is_over:
            self._write()
        if self._written or multiprocessing.parent_process() is None:
            state = "yes" if self._written else child.state_of(self._session)
            self._lines.write({"end": state})

    def watch_clipping(self, patches: Patches) -> None:
        """Hear of the norms that torch's ``clip_grad_norm_`` returns."""
        original = torch.nn.utils.clip_grad_norm_

        @functools.wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            if kwargs.get("norm_type", args[2] if len(args) > 2 else 2.0) == 2.0:
                self.note_norm(norm)
            return norm

        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            patches.replace(owner, "clip_grad_norm_", clip_grad_norm_)
        patches.replace_bindings({id(original): (original, clip_grad_norm_)}, users_only=True)

    def _close(self) -> None:
        """Write the round, and begin another; end the script where it was the last."""
        self._write()
        self._round, self._stepped = Step(training=self._round.training), set()
        if self._written == self._most:
            self._is_over = True
            self._buffers.look()
            self._lines.write({"done": self._written})
            raise SystemExit(0)

    def _write(self) -> None:
        if not self._written:
            self._lines.write({"about": {**about(), "resumed": self._has_state}})
            at_end(self.end)  # before the file is closed, which was registered just now
        self._written += 1
        self._lines.write(self._round.as_line())
        with self._aside():
            self._buffers.step()

    def _begin_counting(self, number: int, step: Step) -> None:
        """Count tensors until this optimizer steps again, once, after a step that was made.

        The first step that is made allocates the optimizer's state: it is not yet what later ones
        are. On CUDA the allocator counts.
        """
        if self._has_counted or step.skipped or step.memory is not None:
            return
        self._has_counted = True
        self._counting = number, LivingTensors()
        self._counting[1].__enter__()

    def _end_counting(self, number: int) -> tuple[bool, int | None]:
        """Return whether tensors were being counted, and their bytes, if that is over now."""
        if self._counting is None:
            return False, None
        counts, tensors = self._counting
        if counts != number:
            return True, None
        tensors.__exit__(None, None, None)
        self._counting = None
        return True, tensors.peak

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What is done here is no part of the step's time."""
        start = time.perf_counter()
        yield
        self._aside_seconds += time.perf_counter() - start


class _Heard:
    """What was heard since the last step, on its device still."""

    def __init__(self) -> None:
        self.losses: dict[tuple[int, ...], list[Tensor]] = {}
        self.scales: dict[int, float | Tensor] = {}
        self.overflows: list[list[str]] = []
        self.norms: list[Tensor] = []

    def tell(self, step: Step) -> None:
        """Add it to the step, as numbers. Waits for the device."""
        for passes in self.losses.values():
            step.losses.append(sum(loss.item() for loss in passes) / len(passes))
        step.scales.update((str(number), float(scale)) for number, scale in self.scales.items())
        step.overflows = (step.overflows + self.overflows)[:MOST_NAMES]
        if self.norms:
            step.norm = math.hypot(step.norm or 0.0, *(norm.item() for norm in self.norms))


def _has_stepped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has the state of steps, its own or of a checkpoint."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping) and state]
    return not all(_is_new(state.get("step")) for state in states)


def _is_new(step: Any) -> bool:
    """Return whether a state counts no step yet: some optimizers make theirs before the first."""
    if isinstance(step, Tensor):
        return step.is_meta or not bool((step > 0).any())
    return isinstance(step, (int, float)) and step <= 0


def about() -> dict[str, Any]:
    """Return what this process runs in."""
    cuda = torch.cuda.is_initialized()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "is_cuda": cuda,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _processor() -> str:
    """Return the name of the processor, as far as the system tells."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@torch.no_grad()
def _held(value: Tensor) -> Tensor:
    """Return a number (0-dim) that the script cannot write to; of several their mean."""
    value = value.detach()
    return value.clone() if value.ndim == 0 else value.double().mean()
