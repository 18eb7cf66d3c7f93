"""Hears of training steps and hands them to loggers, late where a device runs ahead of the host.

Knows the events of a step; what a logger does with them is in `sinks`.
"""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.common.warn_once import warn_once
from amp_patch.distributed.process_groups import rank
from amp_patch.kernels import HostCopy
from amp_patch.kernels.graph_capture import captures
from amp_patch.session import session
from amp_patch.step.loss_scaling import Found, names_of
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip

from .sinks import Logger, Record, Sink, TensorBoard, WandB

_KINDS: dict[str, Callable[[Any], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "logger": Logger,
}
#: Parameters that are named of those that overflowed.
_MOST_NAMES = 3


class _Step(NamedTuple):
    """A step whose outcome may still be on its way from its device.

    Attributes:
        sources: of its overflow; "" where they are unknown, None where nobody has told of one yet.
    """

    number: int
    scales: Mapping[int, float | HostCopy]
    outcome: bool | HostCopy
    sources: str | None

    def is_known(self) -> bool:
        """Return whether nothing of it must be waited for."""
        return all(
            one.ready()
            for one in (self.outcome, *self.scales.values())
            if isinstance(one, HostCopy)
        )


class StepLog(StepObserver):
    """Writes each step to a logger, in order, as soon as no waiting is needed for it.

    Only the first process of torch.distributed writes. Steps that a CUDA graph replays are not
    heard of. Where the logger fails one warning says so, and nothing more is written.

    Args:
        name: the argument of `amp.initialize` that asked for it.
        sink: the logger.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink: Sink | None = sink
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._scales: weakref.WeakKeyDictionary[Optimizer, dict[int, float | HostCopy]] = (
            weakref.WeakKeyDictionary()
        )
        self._waiting: deque[_Step] = deque()
        self._sources: str | None = None
        self._skipped_steps = 0
        self._last_skipped: int | None = None

    def scaled(
        self,
        loss: Tensor,
        scale: float | Tensor,
        scaler_id: int,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """See `StepObserver.scaled`."""
        if isinstance(scale, Tensor):
            if captures.are_made(scale.device):
                return
            kept: float | HostCopy = HostCopy(scale)
        else:
            kept = float(scale)
        for optimizer in optimizers:
            self._scales.setdefault(optimizer, {})[scaler_id] = kept

    def overflowed(self, scaler_id: int, found: Sequence[Found]) -> None:
        """See `StepObserver.overflowed`."""
        sources = sources_of(found) or ""
        self._write(wait=False)
        if self._last_skipped is not None:  # it was written before anybody told why
            if sources:
                self._guarded("write_sources", self._last_skipped, sources)
            self._last_skipped = None
        elif self._waiting and self._waiting[0].sources is None:
            # A device tells of its steps in order: those before it are written.
            self._waiting[0] = self._waiting[0]._replace(sources=sources)
        else:
            self._sources = sources

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver.stepped`."""
        scales = self._scales.pop(optimizer, None)
        if scales is None:
            return  # no block of scale_loss came before, or it was captured
        number = self._numbers.get(optimizer, 0) + 1
        self._numbers[optimizer] = number
        self._waiting.append(_Step(number, scales, skip.outcome.value, self._sources))
        self._sources = None
        self._write(wait=False)

    def finish(self) -> None:
        """Wait for the steps whose outcome is on its way, write them, and close the logger."""
        self._write(wait=True)
        self._guarded("close")
        self._sink = None

    def _write(self, wait: bool) -> None:
        while self._waiting and (wait or self._waiting[0].is_known()):
            step = self._waiting.popleft()
            was_skipped = bool(_value(step.outcome))
            self._skipped_steps += was_skipped
            if was_skipped:
                self._last_skipped = step.number if step.sources is None else None
            scales = {number: _value(scale) for number, scale in step.scales.items()}
            sources = step.sources or None
            record = Record(step.number, scales, was_skipped, self._skipped_steps, sources)
            self._guarded("write", record)

    def _guarded(self, method: str, *arguments: Any) -> None:
        """Call the logger in the first process; a logger that fails is left alone from then on."""
        if self._sink is None or rank() != 0:
            return
        try:
            getattr(self._sink, method)(*arguments)
        except Exception as error:  # a full disk, a server that is gone: training goes on
            self._sink = None
            warn_once(
                f"the logger of amp.initialize(..., {self._name}=...) must not fail; got "
                f"{type(error).__name__}: {error}; nothing more is logged there."
            )


def sources_of(found: Sequence[Found]) -> str | None:
    """Return the first parameters that were not finite, ``"fc.weight (inf)"``; None if unknown."""
    return names_of(found, session.models.names(), _MOST_NAMES) or None


def _value(given: float | HostCopy) -> float:
    return float(given.wait().item()) if isinstance(given, HostCopy) else given


class Logs:
    """The loggers of this process, one of each kind, until `amp.deactivate` or its end."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[StepLog, Any]] = {}

    def prepare(self, **targets: Any) -> dict[str, Sink]:
        """Check what `amp.initialize` got, and change nothing.

        Args:
            targets: by the names of its arguments; None or False is no logger.

        Raises:
            TypeError, ValueError: none that this argument takes.
            ImportError: the package that it needs is missing.
        """
        return {
            name: _KINDS[name](target)
            for name, target in targets.items()
            if target is not None and target is not False
        }

    def attach(self, sinks: Mapping[str, Sink]) -> None:
        """Log to these from now on; each takes the place of an earlier one of its kind."""
        for name, sink in sinks.items():
            self._finish(name)
            log = StepLog(name, sink)
            self._open[name] = log, session.observers.attach(log)
        if sinks:
            session.call_at_deactivate(self.finish)
            atexit.unregister(self.finish)
            atexit.register(self.finish)

    def finish(self) -> None:
        """Write out and close all of them."""
        for name in list(self._open):
            self._finish(name)

    def _finish(self, name: str) -> None:
        if name in self._open:
            log, detach = self._open.pop(name)
            detach()
            log.finish()


#: Of this process, as the session is.
logs = Logs()
