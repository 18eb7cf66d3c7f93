"""What ``amp-patch run --report`` hears of the training in a process; see `run_report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed
from torch import nn
from torch.optim import Optimizer

from amp_patch.debug.summary import summary
from amp_patch.distributed.process_groups import is_on, rank
from amp_patch.kernels.graph_capture import captures
from amp_patch.session import session
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip


class Recorder(StepObserver):
    """Keeps the summaries of the sessions of this process.

    Args:
        tell_of_step: called after each step, where no CUDA graph is captured.

    Attributes:
        rank, world_size: when the process last initialized or stepped.
    """

    def __init__(self, tell_of_step: Callable[[], None]) -> None:
        self._tell_of_step = tell_of_step
        self._over: list[dict[str, Any]] = []
        self.rank, self.world_size = rank(), 1

    def sessions(self) -> list[dict[str, Any]]:
        """Return the summary of each session, from `amp.initialize` to `amp.deactivate`."""
        running = [summary().to_json()] if session.initialized and session.history.levels else []
        return self._over + running

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """See `StepObserver`."""
        self._note_ranks()
        session.call_at_deactivate(self._keep)

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver`."""
        params = optimizer.param_groups[0]["params"]
        if not params or not captures.are_made(params[0].device):
            self._tell_of_step()

    def _keep(self) -> None:
        self._over = self.sessions()

    def _note_ranks(self) -> None:
        if is_on():
            self.world_size = torch.distributed.get_world_size()
        self.rank = rank()


def follow(tell_of_step: Callable[[], None]) -> Recorder:
    """Begin; called when the script has imported amp_patch."""
    recorder = Recorder(tell_of_step)
    session.observers.attach(recorder)
    return recorder
