"""A GPU for the tests of steps by kernels, whose text runs on the CPU."""

from collections.abc import Iterator
from types import ModuleType

import cuda_on_cpu
import pytest
from cuda_on_cpu.fake_gpu import Gpu


@pytest.fixture
def on_gpu(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Iterator[Gpu]:
    """Have tensors of the CPU taken for those of a GPU."""
    cuda_on_cpu.require_compiler()
    yield Gpu(monkeypatch, pytestconfig)
    amp.deactivate()  # as long as there are kernels
