"""Makes CPU tensors pass for a GPU's, so that the host side of the CUDA path runs without one."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_patch.casting.kept_wrappers import KeptWrappers
from amp_patch.common.warn_once import warn_once
from amp_patch.kernels import choice, cuda_module
from cuda_on_cpu.launcher import EmulatedModules


def made_anew(_: KeptWrappers, function: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """Stand for `KeptWrappers.get`."""
    return make()


class Gpu:
    """Makes tensors of the CPU, other than those in `on_cpu`, look like a GPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: pytest.Config) -> None:
        self.modules = EmulatedModules(config)
        self.on_cpu: list[Tensor] = []
        monkeypatch.setattr(cuda_module, "modules", self.modules)
        monkeypatch.setattr(choice, "IS_CUDA", self.is_cuda)
        warn_once.reset()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(KeptWrappers, "get", made_anew)  # by what a build has
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        # where torch is built for CUDA its optimizers would ask the driver for the stream
        for kind in ("cuda", "accelerator"):
            check = f"_{kind}_graph_capture_health_check"
            monkeypatch.setattr(torch.optim.Optimizer, check, lambda self: None, raising=False)
        monkeypatch.delenv("AMP_PATCH_KERNELS", raising=False)

    def is_cuda(self, tensor: Tensor) -> bool:
        return not any(tensor is one for one in self.on_cpu)
