"""Who does an operation: the kernels for lists on CUDA devices, torch for all others."""

import re
import sys
import warnings
from types import ModuleType, SimpleNamespace

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu.fake_gpu import Gpu
from torch import Tensor

from amp_patch import kernels
from amp_patch.kernels import ScalerState, choice, cuda_kernels, dense_rows, torch_kernels
from amp_patch.kernels.cuda_module import Failure
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

NO_CUPY = Failure(None, ImportError("No module named 'cupy'"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Gpu:
    cuda_on_cpu.require_compiler()
    return Gpu(monkeypatch, pytestconfig)


def chosen(*tensors: Tensor) -> ModuleType:
    """Return the module whose operation is chosen for these tensors."""
    return sys.modules[type(kernels.caster(tensors, tensors)).__module__]


def test_each_operation_goes_to_the_kernels_on_a_gpu(gpu: Gpu) -> None:
    full, half = [torch.ones(3)], [torch.ones(3).half()]
    launched = gpu.modules.launched
    check = kernels.unscaler(half, full).run(half, full, torch.tensor(2.0))
    assert isinstance(check, cuda_kernels.GradCheck)
    assert launched.pop(0) == "unscale_float16_to_float32"
    kernels.caster(full, half).run()
    assert half[0].tolist() == [0.5] * 3
    kernels.accumulate(full, half)
    assert full[0].tolist() == [1.0] * 3
    comparison = kernels.comparison(full, half)
    comparison.note_equal()
    assert comparison.differs()
    comparison.reconcile(lambda: [True])
    assert not comparison.differs()
    found = kernels.checker(half, full).look(half, full, [False], 2.0)
    assert isinstance(found, kernels.CudaGradCheck)
    assert kernels.clip_by_norm(full, 9.0, 2.0).item() == pytest.approx(3**0.5)
    state = ScalerState(LossScaler(ScaleRule()), torch.device("cpu"))
    kernels.update_scale(state, torch.ones(1), ScaleRule())
    assert state.scale.item() == 2.0**15
    assert [name.partition("_")[0] for name in launched] == [
        *("summarize", "cast", "accumulate", "reconcile", "unscale", "summarize"),
        *("unscale", "summarize", "clip", "update"),
    ]


def test_on_a_cpu_each_operation_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cuda_kernels", SimpleNamespace(SOURCES=cuda_kernels.SOURCES))
    full, half = [torch.ones(3)], [torch.ones(3).half()]
    check = kernels.unscaler(half, full).run(half, full, 2.0)
    assert type(check) is kernels.GradCheck
    kernels.caster(full, half).run()
    kernels.accumulate(full, half)
    kernels.clip_by_norm(full, 9.0, 2.0)
    kernels.comparison(full, half).reconcile(lambda: [True])
    assert kernels.checker(half, full).look(half, full, [True], 2.0) is None
    assert half[0].tolist() == [1.0] * 3
    state = ScalerState(LossScaler(ScaleRule()), torch.device("cpu"))
    kernels.update_scale(state, torch.ones(1), ScaleRule())
    assert state.scale.item() == 2.0**15


def test_a_list_that_is_not_all_on_a_gpu_is_torchs(gpu: Gpu) -> None:
    one, other = torch.ones(3), torch.ones(3)
    assert chosen(one, other) is cuda_kernels
    gpu.on_cpu.append(other)
    assert chosen(one, other) is torch_kernels
    assert chosen() is torch_kernels


def test_kernels_must_work_on_each_device_of_any_column(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones, others = [torch.ones(1), torch.ones(2)], [torch.ones(1), torch.ones(3)]
    asked: list[int] = []
    monkeypatch.setattr(choice, "_NUMBER", Tensor.numel)  # as if a size were a GPU's number

    def failure(sources: object, device: torch.device) -> Failure | None:
        asked.append(len(asked))
        return None if len(asked) < 3 else Failure(None, RuntimeError("no compiler"))

    monkeypatch.setattr(gpu.modules, "failure", failure)
    with pytest.warns(UserWarning, match="no compiler"):
        assert not choice.are_used(("cast.cu",), ones, others)
    assert len(asked) == 3


@pytest.mark.parametrize("build", ["ROCm", "no device"])
def test_other_builds_are_torchs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    if build == "ROCm":
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen(torch.ones(3)) is torch_kernels


def test_torch_can_be_forced(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", "torch")
    assert chosen(torch.ones(3)) is torch_kernels


def test_cupy_can_be_forced_where_it_works(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", "cupy")
    tensor = torch.ones(3)
    assert chosen(tensor) is cuda_kernels
    gpu.on_cpu.append(tensor)
    assert chosen(tensor) is torch_kernels


@pytest.mark.parametrize("value", ["cuda", "Torch", " torch"])
def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", value)
    message = re.escape(
        "AMP_PATCH_KERNELS must be 'cupy' or 'torch', or not set, which takes cupy where it "
        f"works; got {value!r}; call os.environ.pop('AMP_PATCH_KERNELS') or unset it in the shell."
    )
    with pytest.raises(ValueError, match=message):
        kernels.unscaler([], [])


@pytest.mark.parametrize("build", ["CPU", "ROCm"])
def test_cupy_is_refused_where_no_cuda_is(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, build: str
) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", "cupy")
    if build == "ROCm":
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = (
        "AMP_PATCH_KERNELS=cupy needs a build of torch for CUDA and a CUDA device; got torch .* "
        r"and \d+ devices; call os.environ.pop\('AMP_PATCH_KERNELS'\) or unset it in the shell."
    )
    with pytest.raises(RuntimeError, match=message):
        kernels.unscaler([], [])


@pytest.fixture
def broken(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu.modules.failed = NO_CUPY
    return gpu


@pytest.mark.parametrize(
    ("version", "package"),
    [("13.0", "'amp_patch[cuda13]'"), ("12.6", "'amp_patch[cuda12]'"), ("11.8", "cupy-cuda11x")],
)
def test_without_cupy_one_warning_says_what_to_install(
    broken: Gpu, monkeypatch: pytest.MonkeyPatch, version: str, package: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    message = re.escape(
        "The CUDA kernels of amp_patch cannot be used, slower operations of torch take their "
        "place: ImportError: No module named 'cupy'. To use them, call pip install "
        f"{package}; to go on without this warning, set AMP_PATCH_KERNELS=torch."
    )
    with pytest.warns(UserWarning, match=message):
        assert chosen(torch.ones(3)) is torch_kernels
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(torch.ones(3)) is torch_kernels


def test_without_cupy_torch_can_be_forced_without_a_warning(
    broken: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", "torch")
    assert chosen(torch.ones(3)) is torch_kernels


def test_without_cupy_it_cannot_be_forced(broken: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", "cupy")
    message = re.escape(
        "AMP_PATCH_KERNELS=cupy needs cupy, and CUDA's compiler and headers; got ImportError: "
        "No module named 'cupy'; call pip install 'amp_patch[cuda13]', or unset AMP_PATCH_KERNELS."
    )
    with pytest.raises(RuntimeError, match=message) as caught:
        chosen(torch.ones(3))
    assert isinstance(caught.value.__cause__, ImportError)


OPERATIONS = {
    "unscale.cu": lambda full, half: kernels.unscaler(half, full).run(half, full, 2.0),
    "cast.cu": lambda full, half: kernels.caster(full, half).run(),
    "reconcile.cu": lambda full, half: kernels.comparison(full, half).reconcile(lambda: [True]),
    "accumulate.cu": lambda full, half: kernels.accumulate(full, half),
    "summarize.cu": lambda full, half: kernels.clip_by_norm(full, 1.0, 2.0),
}


@pytest.mark.parametrize("failing", OPERATIONS)
def test_a_source_that_fails_leaves_its_own_operations_to_torch(gpu: Gpu, failing: str) -> None:
    def outcome(source: str) -> tuple[list[float], list[float], bool]:
        full, half = [torch.tensor([3.0, 4.0])], [torch.tensor([8.0, 2.0]).half()]
        before = len(gpu.modules.launched)
        OPERATIONS[source](full, half)
        return full[0].tolist(), half[0].tolist(), len(gpu.modules.launched) > before

    expected = {source: outcome(source) for source in OPERATIONS}
    assert all(launches for *_, launches in expected.values())
    gpu.modules.failed = Failure(failing, RuntimeError("NVRTC: no"))
    with pytest.warns(UserWarning, match="cannot be used") as told:
        found = {source: outcome(source) for source in OPERATIONS}
    (warning,) = told
    assert str(warning.message).startswith(
        f"The CUDA kernels of {failing} cannot be used, slower operations of torch take their "
        "place: RuntimeError: NVRTC: no. Those of other sources are used. "
    )
    both = {"unscale.cu", "summarize.cu"}  # what launches one launches the other
    for source, (full, half, launches) in expected.items():
        fails = source == failing or {source, failing} == both
        assert found[source] == (full, half, launches and not fails)


def test_kernels_that_fail_cannot_be_forced(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", "cupy")
    gpu.modules.failed = Failure("cast.cu", RuntimeError("NVRTC: no"))
    kernels.accumulate([torch.ones(3)], [torch.ones(3)])
    assert gpu.modules.launched
    message = "needs all kernels to compile and load; got of cast.cu RuntimeError: NVRTC: no"
    with pytest.raises(RuntimeError, match=message):
        chosen(torch.ones(3))


def test_a_new_session_warns_again_and_tries_again(gpu: Gpu, amp: ModuleType) -> None:
    for _ in range(2):
        gpu.modules.failed = NO_CUPY
        with pytest.warns(UserWarning, match="The CUDA kernels of amp_patch cannot be used"):
            assert chosen(torch.ones(3)) is torch_kernels
        assert chosen(torch.ones(3)) is torch_kernels  # warns no more
        amp.deactivate()
    assert chosen(torch.ones(3)) is cuda_kernels


def test_a_new_session_has_no_tables_of_the_last_one() -> None:
    tensors = [torch.ones(3)]
    before = dense_rows.split("a test", tensors)
    assert dense_rows.split("a test", tensors) is before
    kernels.reset()
    assert dense_rows.split("a test", tensors) is not before
