"""The cross-entropy by kernels is torch's, with its gradients, of whatever the kernels take."""

from collections.abc import Iterator
from typing import Any

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu.launcher import EmulatedModules
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch.kernels import cuda_cross_entropy, cuda_module
from amp_patch.kernels.cuda_cross_entropy import MIN_CLASSES, cross_entropy, takes

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
IGNORED = -100
ROWS, CLASSES = 5, 2053


@pytest.fixture(params=["cuda on cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Iterator[torch.device]:
    """Give where kernels run, by which the tests' tensors are made."""
    if request.param == "cuda":
        pytest.importorskip("cupy")
        device = torch.device("cuda", 0)
        sources = cuda_cross_entropy.SOURCES
        assert cuda_module.modules.failure(sources, device) is None
    else:
        cuda_on_cpu.require_compiler()
        monkeypatch.setattr(cuda_module, "modules", EmulatedModules(pytestconfig))
        device = torch.device("cpu")
    with device:
        yield device


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cpu").manual_seed(0)
    logits = (torch.randn(ROWS, CLASSES, generator=draw, device="cpu") * 3).to(dtype)
    targets = torch.randint(CLASSES, (ROWS,), generator=draw, device="cpu")
    targets[1] = IGNORED
    device = torch.empty(0).device
    return logits.to(device).requires_grad_(), targets.to(device)


def exact(logits: Tensor, targets: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """Return torch's loss in float64, and its gradient."""
    logits = logits.detach().double().requires_grad_()
    loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)
    return loss, torch.autograd.grad(weighted(loss), logits)[0]


def weighted(loss: Tensor) -> Tensor:
    """Return a number, to which the losses of rows add with factors that differ."""
    return loss * 8 if loss.dim() == 0 else (loss * torch.arange(1, len(loss) + 1)).sum()


@pytest.mark.parametrize("reduction", cuda_cross_entropy.REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient_are_torchs(
    device: torch.device, dtype: torch.dtype, reduction: str
) -> None:
    logits, targets = drawn(dtype)
    loss = cross_entropy(logits, targets, IGNORED, reduction)
    weighted(loss).backward()
    wanted, gradient = exact(logits, targets, reduction)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    assert logits.grad is not None
    assert logits.grad.dtype is dtype
    # to float16's smallest number, and a rounding
    rtol = torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=rtol, atol=6e-8)


@pytest.mark.parametrize("reduction", cuda_cross_entropy.REDUCTIONS)
def test_where_all_rows_are_ignored_it_is_as_with_torch(
    device: torch.device, reduction: str
) -> None:
    logits, targets = drawn()
    targets.fill_(IGNORED)
    loss = cross_entropy(logits, targets, IGNORED, reduction)
    weighted(loss).backward()
    wanted, gradient = exact(logits, targets, reduction)
    torch.testing.assert_close(loss.double(), wanted, equal_nan=True)
    assert logits.grad is not None
    assert not logits.grad.any()
    assert not gradient.any()


def test_without_a_gradient_no_graph_is_made(device: torch.device) -> None:
    logits, targets = drawn()
    with torch.no_grad():
        assert cross_entropy(logits, targets, IGNORED, "mean").grad_fn is None
    assert not cross_entropy(logits.detach(), targets, IGNORED, "none").requires_grad


@pytest.mark.parametrize("change", [Tensor.t, lambda tensor: tensor[:, 1:]])
def test_strides_are_those_of_a_copy(device: torch.device, change: Any) -> None:
    logits, targets = drawn()
    memory = change(logits.detach()).contiguous()
    logits = (memory.t() if change is Tensor.t else memory[:, :-3]).requires_grad_()
    targets = targets.clamp(max=logits.shape[1] - 1).repeat_interleave(2)[::2]
    loss = cross_entropy(logits, targets, IGNORED, "mean")
    wanted, gradient = exact(logits, targets, "mean")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0.0)
    found = torch.autograd.grad(weighted(loss), logits)[0]
    torch.testing.assert_close(found.double(), gradient, rtol=1e-5, atol=6e-8)


def test_a_gradient_can_be_differentiated(device: torch.device) -> None:
    logits, targets = drawn()
    weights = torch.arange(float(ROWS), requires_grad=True)

    def second(compute: Any, given: Tensor, factors: Tensor) -> tuple[Tensor, ...]:
        losses = compute(given)
        (gradient,) = torch.autograd.grad(losses, given, factors, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (given, factors))

    found = second(lambda given: cross_entropy(given, targets, IGNORED, "none"), logits, weights)
    wanted = second(
        lambda given: functional.cross_entropy(given, targets, reduction="none"),
        logits.detach().double().requires_grad_(),
        weights.detach().double().requires_grad_(),
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-7)


def test_a_gradient_of_many_losses_at_once_is_torchs(device: torch.device) -> None:
    logits, targets = drawn()
    losses = cross_entropy(logits, targets, IGNORED, "none")
    (found,) = torch.autograd.grad(losses, logits, torch.eye(ROWS), is_grads_batched=True)
    _, gradient = exact(logits, targets, "sum")
    torch.testing.assert_close(found.sum(0).double() * 8, gradient, rtol=1e-5, atol=6e-8)


def test_a_gradient_whose_sign_waits_in_a_bit_is_turned(device: torch.device) -> None:
    logits, targets = drawn()
    losses = cross_entropy(logits, targets, IGNORED, "none")
    factors = torch.arange(1.0, ROWS + 1)
    waiting = torch._neg_view(-factors)  # as torch makes it of a conjugate's imaginary part
    (found,) = torch.autograd.grad(losses, logits, waiting)
    _, gradient = exact(logits, targets, "none")
    torch.testing.assert_close(found.double(), gradient, rtol=1e-5, atol=6e-8)


def test_logits_that_were_written_to_since_are_refused(device: torch.device) -> None:
    logits, targets = drawn()
    logits = logits * 1
    loss = cross_entropy(logits, targets, IGNORED, "mean")
    logits.zero_()
    with pytest.raises(
        RuntimeError, match=r"got some that were written to.*\(logits.clone\(\), targets\)"
    ):
        loss.backward()


def test_a_clone_may_lie_in_memory_that_is_filled_step_by_step(device: torch.device) -> None:
    logits, targets = drawn()
    steps = torch.zeros(2, ROWS, CLASSES)
    steps[0] = logits
    loss = cross_entropy(steps[0].clone(), targets, IGNORED, "mean")
    steps[1] = 1.0
    loss.backward()
    assert logits.grad is not None
    _, gradient = exact(logits, targets, "mean")
    torch.testing.assert_close(logits.grad.double() * 8, gradient, rtol=1e-5, atol=6e-8)


def test_the_backward_may_come_twice(device: torch.device) -> None:
    logits, targets = drawn(torch.float16)
    loss = cross_entropy(logits, targets, IGNORED, "mean")
    once, again = (
        torch.autograd.grad(loss, logits, retain_graph=more)[0] for more in (True, False)
    )
    assert torch.equal(once, again)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_hooks_for_saved_tensors_may_give_other_strides(device: torch.device) -> None:
    logits, targets = drawn()
    (wanted,) = torch.autograd.grad(cross_entropy(logits, targets, IGNORED, "mean"), logits)

    def pack(tensor: Tensor) -> Tensor:
        return tensor.detach().t().contiguous() if tensor.dim() == 2 else tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.t()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = cross_entropy(logits, targets, IGNORED, "mean")
    assert torch.equal(torch.autograd.grad(loss, logits)[0], wanted)


class LargeTensors(TorchDispatchMode):
    """Notes which operators return a tensor with as many elements as the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.made_by: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.numel() >= ROWS * CLASSES:
            self.made_by.append(func.overloadpacket.__name__)
        return found


def test_nothing_is_as_large_as_the_logits_but_their_gradient(modules: EmulatedModules) -> None:
    logits, targets = drawn(torch.float16)
    with LargeTensors() as large:
        torch.autograd.grad(cross_entropy(logits, targets, IGNORED, "mean"), logits)
    assert large.made_by == ["empty_like"]


@pytest.mark.gpu
def test_the_peak_is_the_logits_and_their_gradient() -> None:
    pytest.importorskip("cupy")
    logits = torch.randn(512, 30_522, device="cuda", dtype=torch.float16, requires_grad=True)
    targets = torch.randint(30_522, (512,), device="cuda")
    for _ in range(2):  # the first one loads the kernels
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(cross_entropy(logits, targets, IGNORED, "mean"), logits)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * 2 * logits.numel()


def test_only_what_the_kernels_are_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = -(-cuda_cross_entropy.MIN_LOGITS // MIN_CLASSES)
    logits, targets = torch.zeros(rows, MIN_CLASSES), torch.zeros(rows, dtype=torch.int64)
    assert takes(logits, targets)
    assert takes(logits.half(), targets)
    assert not takes(logits[:-1], targets[:-1])
    assert not takes(logits.view(-1, MIN_CLASSES // 2), targets.repeat(2))
    assert not takes(logits.double(), targets)
    assert not takes(logits.to_sparse(), targets)
    assert not takes(torch._neg_view(logits), targets)
    assert not takes(logits[:, None], targets)
    assert not takes(logits, targets[:-1])
    assert not takes(logits, targets.int())
    assert not takes(logits, logits)
    assert not takes(logits, targets.to("meta"))
    monkeypatch.setattr(cuda_cross_entropy, "MAX_CLASSES", MIN_CLASSES - 1)
    assert not takes(logits, targets)


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed() -> None:
    pytest.importorskip("cupy")
    with torch.device("cuda", 0):
        logits, targets = drawn(torch.float16)
        held = logits.detach().clone()

        def run() -> tuple[Tensor, Tensor]:
            given = held.detach().requires_grad_()
            loss = cross_entropy(given, targets, IGNORED, "mean")
            return loss.detach(), torch.autograd.grad(loss, given)[0]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss, gradient = run()
        held.mul_(0.5)
        graph.replay()
        wanted, wanted_gradient = run()
    assert torch.equal(loss, wanted)
    assert torch.equal(gradient, wanted_gradient)
