"""The places where the fused operations are tested."""

from collections.abc import Iterator

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu.launcher import EmulatedModules
from drawn_tensors import Operations

from amp_patch.kernels import cuda_kernels, cuda_module, torch_kernels


@pytest.fixture(
    scope="module",
    params=["torch", "cuda on cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def ops(request: pytest.FixtureRequest) -> Iterator[Operations]:
    if request.param == "torch":
        yield Operations(torch_kernels, torch.device("cpu"))
    elif request.param == "cuda":
        pytest.importorskip("cupy")
        device = torch.device("cuda", 0)
        assert cuda_module.modules.failure(["unscale.cu"], device) is None
        with device:
            yield Operations(cuda_kernels, device)
    else:
        with pytest.MonkeyPatch.context() as patch:
            modules = EmulatedModules(request.config)
            patch.setattr(cuda_module, "modules", modules)
            yield Operations(cuda_kernels, torch.device("cpu"))
            assert modules.launched


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> EmulatedModules:
    """Have the kernels' text run on the CPU, and tell what was launched."""
    cuda_on_cpu.require_compiler()
    modules = EmulatedModules(pytestconfig)
    monkeypatch.setattr(cuda_module, "modules", modules)
    return modules
