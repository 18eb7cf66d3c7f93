"""Who is told of what happens in training steps: loggers, recorders. Most often nobody.

Knows the events, and nothing of what makes them. An event that nobody hears is never made: the
session asks whether there is an observer before it prepares one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from .loss_scaling import Found
from .skip import Skip


class StepObserver:
    """Told of the events of training steps, in the order in which they happen.

    A subclass overrides what it wants to hear of. What a method raises goes to the script, from
    ``scale_loss`` or ``optimizer.step()``: a recorder that has seen enough may end it so.

    Attributes:
        waits_for_overflows: True where it must hear of an overflow before the step that is skipped
            for it. The host then waits for each check, also where a device could go on without.
    """

    waits_for_overflows = False

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """`amp.initialize` has set up models.

        Args:
            models: those of this call.
        """

    def scaled(
        self,
        loss: Tensor,
        scale: float | Tensor,
        scaler_id: int,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """`amp.scale_loss` begins.

        Args:
            loss: as the script passed it, in fp32 where it was half.
            scale: what it is multiplied by; a tensor (0-dim fp32) where a device knows it.
            scaler_id: the number of the loss scaler in this process.
            optimizers: those whose gradients the backward will write.
        """

    def overflowed(self, scaler_id: int, found: Sequence[Found]) -> None:
        """Gradients of a pass are inf or NaN, so that the next step is skipped.

        On a device that skips by itself this comes some steps late, when the host hears of it.
        The check then is a `LateCheck`, which may not know any more what was not finite.

        Args:
            scaler_id: the number of the loss scaler, which has moved already.
            found: for each optimizer the check and its parameters.
        """

    def clipped(self, optimizer: Optimizer, norm: Tensor) -> None:
        """`amp.clip_grad_norm_` has clipped.

        Args:
            optimizer: whose gradients they are.
            norm: their total norm before, 0-dim.
        """

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """``optimizer.step()`` is over, made or skipped.

        Args:
            optimizer: whose step it was.
            skip: ``skip.was_skipped`` says which; to read it may wait for the device.
        """

    def leaving(self) -> None:
        """`amp.deactivate` is about to undo what was done to models and optimizers."""


class Observers(list[StepObserver]):
    """The observers of a session. A list, which each step asks whether it is empty."""

    def attach(self, observer: StepObserver) -> Callable[[], None]:
        """Tell ``observer`` of the events from now on; return what ends that."""
        self.append(observer)

        def detach() -> None:
            if observer in self:
                self.remove(observer)

        return detach

    @property
    def wait_for_overflows(self) -> bool:
        """Whether somebody must hear of an overflow at once."""
        for observer in self:  # noqa: SIM110  # asked in each pass: no generator
            if observer.waits_for_overflows:
                return True
        return False

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """See `StepObserver.prepared`."""
        for observer in list(self):
            observer.prepared(models)

    def scaled(
        self,
        scaler_id: int,
        optimizers: Sequence[Optimizer],
        loss: Tensor,
        scale: float | Tensor,
    ) -> None:
        """See `StepObserver.scaled`."""
        for observer in list(self):
            observer.scaled(loss, scale, scaler_id, optimizers)

    def overflowed(self, scaler_id: int, found: Sequence[Found]) -> None:
        """See `StepObserver.overflowed`."""
        for observer in list(self):
            observer.overflowed(scaler_id, found)

    def clipped(self, optimizer: Optimizer, norm: Tensor) -> None:
        """See `StepObserver.clipped`."""
        for observer in list(self):
            observer.clipped(optimizer, norm)

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver.stepped`."""
        for observer in list(self):
            observer.stepped(optimizer, skip)

    def leaving(self) -> None:
        """See `StepObserver.leaving`."""
        with contextlib.ExitStack() as each:  # also where one raises
            for observer in reversed(self):
                each.callback(observer.leaving)
