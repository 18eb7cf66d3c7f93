"""Launches kernels on CPU tensors as `cuda_module` does on a GPU's; knows only their names."""

from collections.abc import Iterable

import pytest
import torch

import cuda_on_cpu
from amp_patch.kernels.cuda_module import Argument, Failure, Kernel


class EmulatedModules:
    """Stands in for `cuda_module.modules`.

    Attributes:
        launched: the names of the kernels, in order.
        failed: None, as long as no test sets it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._sources: dict[str, cuda_on_cpu.Kernels] = {}
        self.launched: list[str] = []
        self.failed: Failure | None = None

    def failure(self, sources: Iterable[str], device: torch.device) -> Failure | None:
        assert device.type == "cpu"
        assert all((cuda_on_cpu.CSRC / source).is_file() for source in sources)
        if self.failed is None or self.failed.source in (None, *sources):
            return self.failed
        return None

    def forget_failures(self) -> None:
        self.failed = None

    def launch(self, kernel: Kernel, grid: int, device: torch.device, *arguments: Argument) -> None:
        assert device.type == "cpu"
        if kernel.source not in self._sources:
            self._sources[kernel.source] = cuda_on_cpu.compiled(kernel.source, self._config)
        kernels = self._sources[kernel.source]
        assert kernel.parameters == kernels._function("parameters", kernel.name)().decode()
        kernels.launch(
            kernel.name, grid, *arguments, seed=len(self.launched), threads=kernel.threads
        )
        self.launched.append(kernel.name)
