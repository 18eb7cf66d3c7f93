"""Small tensors copied from a device to the host without waiting; knows not what they mean."""

from __future__ import annotations

import torch
from torch import Tensor

from .cuda_module import stream_object_on


class HostCopy:
    """A copy of a device's tensor, on its way to the host through pinned memory.

    Args:
        source: any tensor; its values are those after what the device's current stream has been
            given so far. A CPU tensor is copied at once.
    """

    def __init__(self, source: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type != "cuda":
            self._copy = source.detach().to("cpu", copy=True)
            return
        self._copy = torch.empty_like(source, device="cpu", pin_memory=True)
        self._copy.copy_(source.detach(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(stream_object_on(source.device))

    def ready(self) -> bool:
        """Return whether the copy has arrived, without waiting."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Return the copy, a CPU tensor; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
