"""The loggers that a run can write to: TensorBoard, Weights & Biases, Python's ``logging``.

Knows what is written and by which calls; not where it comes from.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Record(NamedTuple):
    """What is known of one ``optimizer.step()``.

    Attributes:
        number: of the step, of its optimizer, from 1.
        scales: number of the loss scaler -> the factor of the loss in this step.
        was_skipped: whether the step was skipped after an overflow.
        skipped_steps: how many were until now, of all optimizers.
        sources: the parameters that were not finite; None where nobody can tell (yet).
    """

    number: int
    scales: Mapping[int, float]
    was_skipped: bool
    skipped_steps: int
    sources: str | None


class Sink(Protocol):
    """A logger. What its methods raise ends the logging, not the training."""

    def write(self, record: Record) -> None:
        """Write one step."""

    def write_sources(self, number: int, sources: str) -> None:
        """Write where the overflow of a step came from, that was written already."""

    def close(self) -> None:
        """Write out all that waits; nothing comes after."""


class TensorBoard:
    """Scalars ``amp/loss_scale`` and ``amp/skipped_steps``, texts ``amp/overflow``.

    Args:
        target: a folder, for which a writer is made at the first step and closed at the end; or a
            ``SummaryWriter``, which stays open.
    """

    def __init__(self, target: Any) -> None:
        self._folder: str | None = None
        self._writer: Any = None
        if isinstance(target, (str, os.PathLike)):
            self._folder = os.fspath(target)
            if os.path.exists(self._folder) and not os.path.isdir(self._folder):
                raise ValueError(
                    f"tensorboard must be a folder or a SummaryWriter; got a file, {self._folder}. "
                    "Call amp.initialize(..., tensorboard='runs/amp')."
                )
            _import("torch.utils.tensorboard", "tensorboard=", "tensorboard")
        elif hasattr(target, "add_scalar") and hasattr(target, "add_text"):
            self._writer = target
        else:
            raise TypeError(
                "tensorboard must be a folder or a SummaryWriter; got "
                f"{target!r} of type {type(target).__name__}. "
                "Call amp.initialize(..., tensorboard='runs/amp')."
            )

    def write(self, record: Record) -> None:
        """See `Sink`."""
        writer = self._open()
        for tag, value in _scalars(record).items():
            writer.add_scalar(tag, value, record.number)
        if record.was_skipped and record.sources is not None:
            self.write_sources(record.number, record.sources)

    def write_sources(self, number: int, sources: str) -> None:
        """See `Sink`."""
        self._open().add_text("amp/overflow", sources, number)

    def close(self) -> None:
        """See `Sink`."""
        if self._writer is not None:
            self._writer.flush()
            if self._folder is not None:
                self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            board = importlib.import_module("torch.utils.tensorboard")
            self._writer = board.SummaryWriter(self._folder)
        return self._writer


class WandB:
    """The same names in a run of Weights & Biases, over ``amp/step``.

    They are logged with ``commit=False``: they go along with the script's next ``wandb.log``, whose
    steps stay as they are.

    Args:
        target: a run; or True for the one that ``wandb.init`` has started by the first step.
    """

    def __init__(self, target: Any) -> None:
        self._run: Any = None
        if target is True:
            self._wandb = _import("wandb", "wandb=True", "wandb")
        elif callable(getattr(target, "log", None)):
            self._run = target
        else:
            raise TypeError(
                "wandb must be True or a run of Weights & Biases; got "
                f"{target!r} of type {type(target).__name__}. "
                "Call amp.initialize(..., wandb=True), and wandb.init() before the first step."
            )
        self._has_axis = False

    def write(self, record: Record) -> None:
        """See `Sink`."""
        values: dict[str, Any] = {**_scalars(record), "amp/step": record.number}
        if record.was_skipped and record.sources is not None:
            values["amp/overflow"] = record.sources
        self._log(values)

    def write_sources(self, number: int, sources: str) -> None:
        """See `Sink`."""
        self._log({"amp/overflow": sources})

    def close(self) -> None:
        """See `Sink`; the run stays open, for it is the script's."""

    def _log(self, values: dict[str, Any]) -> None:
        run = self._run or self._wandb.run
        if run is None:
            raise RuntimeError("wandb=True needs a run; got none; call wandb.init() before a step")
        if not self._has_axis and hasattr(run, "define_metric"):
            run.define_metric("amp/*", step_metric="amp/step")
        self._run, self._has_axis = run, True
        run.log(values, commit=False)


class Logger:
    """A warning for a skipped step, a line of level INFO where a scale has moved, DEBUG for others.

    Args:
        target: a ``logging.Logger``, the name of one, or True for ``"amp_patch"``.
    """

    def __init__(self, target: Any) -> None:
        if target is True:
            target = "amp_patch"
        if isinstance(target, str):
            target = logging.getLogger(target)
        if not isinstance(target, (logging.Logger, logging.LoggerAdapter)):
            raise TypeError(
                "logger must be a logging.Logger, the name of one, or True; got "
                f"{target!r} of type {type(target).__name__}. "
                "Call amp.initialize(..., logger=logging.getLogger('train'))."
            )
        self._logger = target
        self._scales: dict[int, float] = {}

    def write(self, record: Record) -> None:
        """See `Sink`."""
        if record.was_skipped:
            sources = "" if record.sources is None else f": {record.sources}"
            self._logger.warning(
                "step %d skipped after an overflow at loss scale %s%s",
                *(record.number, _listed(record.scales), sources),
            )
        moved = {one: new for one, new in record.scales.items() if self._scales.get(one) != new}
        for scaler_id, scale in moved.items():
            self._logger.info("step %d: loss scale %d is %s", record.number, scaler_id, scale)
        if not record.was_skipped and not moved:
            self._logger.debug("step %d: loss scale %s", record.number, _listed(record.scales))
        self._scales.update(moved)

    def write_sources(self, number: int, sources: str) -> None:
        """See `Sink`."""
        self._logger.warning("the overflow of step %d came from %s", number, sources)

    def close(self) -> None:
        """See `Sink`; nothing waits."""


def _scalars(record: Record) -> dict[str, float]:
    scales = {
        f"amp/loss_scale{f'_{one}' if one else ''}": scale for one, scale in record.scales.items()
    }
    return {**scales, "amp/skipped_steps": record.skipped_steps}


def _listed(scales: Mapping[int, float]) -> str:
    return ", ".join(map(str, scales.values())) or "1.0"


def _import(name: str, argument: str, package: str) -> Any:
    """Import what a logger needs.

    Raises:
        ImportError: it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"amp.initialize(..., {argument}) needs the package {package}, which cannot be "
            f"imported ({error}); call pip install {package}, or leave the argument out."
        ) from error
