"""Torch's cross_entropy goes to the CUDA kernel, as it comes, where nobody would miss anything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cuda_on_cpu
import pytest
import torch
import wrapt
from casting_support import activate
from cuda_on_cpu.fake_gpu import Gpu, made_anew
from support import nightly_but
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from amp_patch.casting import fused_loss
from amp_patch.casting.kept_wrappers import KeptWrappers
from amp_patch.casting.mode import casts_are_on
from amp_patch.kernels import cuda_cross_entropy

TARGETS = torch.tensor([2, -100, 0, 39])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Gpu:
    """Make tensors pass for a GPU's, and few logits for many."""
    cuda_on_cpu.require_compiler()
    monkeypatch.setattr(cuda_cross_entropy, "MIN_LOGITS", 0)
    monkeypatch.setattr(cuda_cross_entropy, "MIN_CLASSES", 0)
    return Gpu(monkeypatch, pytestconfig)


def logits_of(dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.linspace(-3, 3, 160).view(4, 40).to(dtype)


class WithLoss(nn.Module):
    """As models of Hugging Face do it."""

    def __init__(self, widen: bool = False) -> None:
        super().__init__()
        self.head, self.widen = nn.Linear(8, 40), widen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return nn.CrossEntropyLoss()(logits.float() if self.widen else logits, TARGETS), logits


HALF = {"O1": "float16", "O2": "float16", "O3": "float16", "O4": "bfloat16", "O5": "bfloat16"}


@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize("level", nightly_but(("O1", "O5"), HALF))
def test_a_model_that_computes_its_loss_has_it_from_the_logits_as_they_are(
    amp: ModuleType, gpu: Gpu, level: str, widen: bool
) -> None:
    model = WithLoss(widen)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    loss, logits = model(torch.randn(4, 8))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    dtype = "float32" if widen else HALF[level]
    launched = [name for name in gpu.modules.launched if name.startswith("cross")]
    assert launched == [f"cross_entropy_{dtype}", f"cross_entropy_backward_{dtype}"]
    wanted = torch.nn.functional.cross_entropy(logits.detach().double(), TARGETS)
    # what is returned at O3 and O5 was rounded once more
    torch.testing.assert_close(loss.double(), wanted, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("level", nightly_but(("O1", "O2"), ("O1", "O2", "O3", "O4", "O5")))
def test_float32_logits_of_a_loss_beside_the_model_go_to_the_kernel(
    amp: ModuleType, gpu: Gpu, level: str
) -> None:
    activate(amp, level)
    loss = functional.cross_entropy(logits_of(torch.float32), TARGETS)
    assert gpu.modules.launched == ["cross_entropy_float32"]
    assert loss.dtype is torch.float32


def test_half_logits_beside_a_model_in_half_are_torchs(amp: ModuleType, gpu: Gpu) -> None:
    activate(amp, "O2")
    assert functional.cross_entropy(logits_of(), TARGETS).dtype is torch.float16
    assert gpu.modules.launched == []


def test_at_o0_all_is_torchs(amp: ModuleType, gpu: Gpu) -> None:
    activate(amp, "O0")
    functional.cross_entropy(logits_of(torch.float32), TARGETS)
    assert gpu.modules.launched == []


def test_deactivate_puts_back_the_very_function(amp: ModuleType, gpu: Gpu) -> None:
    original = functional.cross_entropy
    activate(amp)
    assert functional.cross_entropy is not original
    amp.deactivate()
    assert functional.cross_entropy is original
    functional.cross_entropy(logits_of(), TARGETS)
    assert gpu.modules.launched == []


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by position": ((TARGETS, None, None, 2, None, "sum"), {}),
    "by name": ((), {"target": TARGETS, "ignore_index": 0, "reduction": "none"}),
    "the logits by name": ((), {"input": None, "target": TARGETS}),
    "no smoothing": ((TARGETS,), {"label_smoothing": 0.0}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_mean_what_they_mean_to_torch(
    amp: ModuleType, gpu: Gpu, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    args, kwargs = call
    logits = logits_of()
    targets = TARGETS.clamp(min=0)
    args = tuple(targets if one is TARGETS else one for one in args)
    kwargs = {name: targets if one is TARGETS else one for name, one in kwargs.items()}

    def loss(logits: Tensor) -> Tensor:
        if "input" in kwargs:
            return functional.cross_entropy(**{**kwargs, "input": logits})
        return functional.cross_entropy(logits, *args, **kwargs)

    wanted = loss(logits.float())
    activate(amp)
    torch.testing.assert_close(loss(logits), wanted)
    assert gpu.modules.launched == ["cross_entropy_float16"]


class Marked(Tensor):
    """A subclass of somebody's."""


LEFT_TO_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": lambda logits: functional.cross_entropy(logits, TARGETS, torch.ones(40)),
    "smoothing": lambda logits: functional.cross_entropy(logits, TARGETS, label_smoothing=0.1),
    "probabilities": lambda logits: functional.cross_entropy(logits, logits.softmax(1)),
    "one row": lambda logits: functional.cross_entropy(logits[0], TARGETS[0]),
    "pixels": lambda logits: functional.cross_entropy(logits.view(2, 40, 2), TARGETS.view(2, 2)),
    "float64": lambda logits: functional.cross_entropy(logits.double(), TARGETS),
    "a subclass": lambda logits: functional.cross_entropy(logits.as_subclass(Marked), TARGETS),
}


@pytest.mark.parametrize("call", LEFT_TO_TORCH.values(), ids=LEFT_TO_TORCH)
def test_what_the_kernel_does_not_compute_is_torchs(
    amp: ModuleType, gpu: Gpu, call: Callable[[Tensor], Tensor]
) -> None:
    wanted = call(logits_of().float())
    activate(amp)
    torch.testing.assert_close(call(logits_of()), wanted, check_dtype=False)
    assert gpu.modules.launched == []


WITHOUT_COPY = ("weights", "one row", "pixels")


@pytest.mark.parametrize("name", [*WITHOUT_COPY, "few"])
def test_what_no_kernel_takes_is_computed_without_a_float32_copy_of_the_logits(
    amp: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cuda_cross_entropy, "MIN_LOGITS", 1 << 20)
    call = LEFT_TO_TORCH.get(name, loss_of)
    wide = logits_of().float().requires_grad_()
    wanted = call(wide)
    wanted.backward()
    activate(amp)
    logits = logits_of().requires_grad_()
    read = []
    log_softmax = Tensor.log_softmax

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        read.append((self.dtype, kwargs.get("dtype")))
        return log_softmax(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "log_softmax", noted)
    found = call(logits)
    found.backward()
    # on a GPU this function reads half and writes float32
    assert read == [(torch.float16, torch.float32)]
    assert wide.grad is not None
    assert logits.grad is not None
    assert found.dtype is torch.float32
    assert torch.equal(found, wanted)
    assert torch.equal(logits.grad, wide.grad.half())


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_model_in_half_has_such_a_loss_in_float32(
    amp: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setattr(cuda_cross_entropy, "MIN_LOGITS", 1 << 20)
    model = amp.initialize(WithLoss(), opt_level=level, verbosity=0)
    seen = []
    nll_loss = functional.nll_loss
    monkeypatch.setattr(
        fused_loss,
        "_nll_loss",
        lambda logs, *args, **kw: (seen.append(logs.dtype), nll_loss(logs, *args, **kw))[1],
    )
    loss, logits = model(torch.randn(4, 8))
    loss.backward()
    assert seen == [torch.float32]
    wanted = functional.cross_entropy(logits.detach().double(), TARGETS)
    torch.testing.assert_close(loss.double(), wanted, rtol=2.0**-8, atol=0)


def test_a_replaced_nll_loss_is_no_part_of_cross_entropy(
    amp: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_cross_entropy, "MIN_LOGITS", 1 << 20)
    wanted = loss_of(logits_of(torch.float32))
    activate(amp)
    monkeypatch.setattr(functional, "nll_loss", lambda *args, **kwargs: torch.full((), 9.0))
    torch.testing.assert_close(loss_of(logits_of()), wanted, rtol=1e-3, atol=0)


@pytest.mark.gpu
def test_what_no_kernel_takes_peaks_at_ten_bytes_for_a_logit(amp: ModuleType) -> None:
    activate(amp)
    logits = torch.randn(1 << 14, 512, device="cuda", dtype=torch.float16, requires_grad=True)
    targets = torch.randint(512, (1 << 14,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    functional.cross_entropy(logits, targets).backward()
    # beside the logits: float32 logarithms, their gradient, and that of the logits, which is half
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 10.1 * logits.numel()


def test_wrong_arguments_are_refused_by_torch(amp: ModuleType, gpu: Gpu) -> None:
    activate(amp)
    with pytest.raises(TypeError, match="cross_entropy"):
        functional.cross_entropy(logits_of(), TARGETS, made_up=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="cross_entropy"):
        functional.cross_entropy(logits_of())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        functional.cross_entropy(logits_of(), TARGETS, reduction="made up")


def loss_of(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits, TARGETS)


def with_tangent(logits: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits, torch.ones_like(logits))
        tangent = forward_ad.unpack_dual(loss_of(dual)).tangent
        assert tangent is not None
        return loss_of(logits)


def inside(context: Callable[[], Any], logits: Tensor) -> Tensor:
    with context():
        return loss_of(logits)


WATCHED: dict[str, Callable[[Tensor], Tensor]] = {
    "a mode of operators": functools.partial(inside, lambda: FlopCounterMode(display=False)),
    "vmap": lambda logits: torch.vmap(loss_of)(logits[None])[0],
    "a gradient of a function": lambda logits: torch.func.grad_and_value(loss_of)(logits)[1],
    "a tangent": with_tangent,
    "a trace": lambda logits: torch.jit.trace(loss_of, logits, check_trace=False)(logits),
    "a graph": lambda logits: make_fx(loss_of)(logits)(logits),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("call", WATCHED.values(), ids=WATCHED)
def test_what_would_miss_the_kernel_gets_torchs_operators(
    amp: ModuleType, gpu: Gpu, call: Callable[[Tensor], Tensor]
) -> None:
    activate(amp)
    found = call(logits_of())
    assert gpu.modules.launched == []
    torch.testing.assert_close(found, loss_of(logits_of()))
    assert gpu.modules.launched == ["cross_entropy_float16"]


class Watching(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_of_functions_sees_the_call(amp: ModuleType, gpu: Gpu) -> None:
    activate(amp)
    with Watching() as watching:
        loss_of(logits_of())
    assert "cross_entropy" in watching.seen


def test_torch_compile_traces_torchs_function(
    amp: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(amp)
    wanted = loss_of(logits_of())
    # which torch.compile would use
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = torch.compile(loss_of, backend="eager", fullgraph=True)(logits_of())
    torch.testing.assert_close(found, wanted)
    assert gpu.modules.launched == ["cross_entropy_float16"]


def test_a_default_device_is_no_mode_that_misses_anything(amp: ModuleType, gpu: Gpu) -> None:
    activate(amp)
    with torch.device("cpu"), torch.inference_mode():
        loss_of(logits_of())
    assert gpu.modules.launched == ["cross_entropy_float16"]


OFF: dict[str, Callable[[ModuleType], Any]] = {
    "disable_casts": lambda amp: amp.disable_casts(),
    "float_region": lambda amp: amp.float_region(),
    "autocast": lambda amp: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("block", OFF.values(), ids=OFF)
def test_where_casts_are_off_it_is_off(
    amp: ModuleType, gpu: Gpu, block: Callable[[ModuleType], Any]
) -> None:
    activate(amp)
    with block(amp):
        loss_of(logits_of(torch.float32))
    assert gpu.modules.launched == []


@pytest.mark.parametrize("rule", ["off", "half", "float"])
def test_a_rule_switches_it_off(amp: ModuleType, gpu: Gpu, rule: str) -> None:
    activate(amp, rules={"cross_entropy": rule})
    loss_of(logits_of(torch.float32))
    assert gpu.modules.launched == []


def test_the_environment_switches_it_off(
    amp: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", "torch")
    activate(amp)
    loss_of(logits_of())
    assert gpu.modules.launched == []


def test_a_cast_that_is_not_made_is_not_told_of(
    amp: ModuleType, gpu: Gpu, capsys: pytest.CaptureFixture[str]
) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=2)
    loss_of(logits_of())
    assert "cross_entropy" not in capsys.readouterr().out
    gpu.on_cpu.append(logits := logits_of())
    loss_of(logits)
    assert "Half->Float (cross_entropy)" in capsys.readouterr().out


def test_a_users_function_that_is_described_as_torchs_is_called(
    amp: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """functools.wraps gives it all attributes of the wrapper that it found."""
    monkeypatch.setattr(
        functional, "cross_entropy", functional.cross_entropy
    )  # put back at the end
    activate(amp, "O2")

    @functools.wraps(functional.cross_entropy)
    def mine(*args: Any, **kwargs: Any) -> Tensor:
        return torch.full((), 7.0)

    functional.cross_entropy = mine
    activate(amp, "O1")
    assert loss_of(logits_of()) == 7
    amp.deactivate()
    assert functional.cross_entropy is mine


@pytest.mark.parametrize("rule", ["sum", "div"])
def test_no_rule_acts_on_what_the_loss_is_computed_by(amp: ModuleType, gpu: Gpu, rule: str) -> None:
    activate(amp, rules={rule: "half", "__truediv__": "half"})
    loss = loss_of(logits_of())
    torch.testing.assert_close(
        loss, functional.nll_loss(logits_of().float().log_softmax(1), TARGETS)
    )
    assert gpu.modules.launched == ["cross_entropy_float16"]
    assert casts_are_on()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_build_for_cuda_compiles_a_models_loss_in_one_graph(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(KeptWrappers, "get", made_anew)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(4, 8)
    expected = model(x)[0]
    torch._dynamo.reset()
    loss = torch.compile(model, backend="eager", fullgraph=True)(x)[0]
    torch._dynamo.reset()
    torch.testing.assert_close(loss, expected)


def test_only_for_torchs_own_function_is_there_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(functional.cross_entropy)
    def better(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert fused_loss.has_kernel(functional.cross_entropy)
    assert not fused_loss.has_kernel(better)
    proxy = wrapt.FunctionWrapper(functional.cross_entropy, lambda *_: torch.zeros(()))
    assert not fused_loss.has_kernel(proxy)
    assert not fused_loss.has_kernel(functional.nll_loss)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not fused_loss.has_kernel(functional.cross_entropy)
