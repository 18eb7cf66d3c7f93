"""What only a GPU shows of the kernels: streams, devices, graphs and syncs.

The operations' own table runs there, too: test_torch_kernels.py and others.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from kernel_steps import FLAGGED, Step
from torch import Tensor, nn

from amp_patch import cuda_graph, kernels
from amp_patch.common.early_looks import WATCHED
from amp_patch.kernels import ScalerState, cuda_kernels, scaler_state, unscaler
from amp_patch.kernels.host_copy import HostCopy
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

pytestmark = [
    pytest.mark.gpu,
    # set_sync_debug_mode says so of itself, once
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
# enough for the host to be far ahead of the device
CYCLES = 50_000_000


@pytest.fixture(autouse=True)
def kernels_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing go to torch because the kernels do not work, in child processes either."""
    pytest.importorskip("cupy", reason="cupy is missing: see the extra 'cuda13'")
    monkeypatch.setenv("AMP_PATCH_KERNELS", "cupy")


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def no_sync() -> Iterator[Callable[[], None]]:
    """Give what makes every wait for the device an error from then on."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_the_kernels_are_what_runs(gpu: torch.device) -> None:
    assert isinstance(Step(gpu).run(), cuda_kernels.GradCheck)


def test_a_step_waits_for_nothing(gpu: torch.device, no_sync: Callable[[], None]) -> None:
    step = Step(gpu)
    step.run()
    no_sync()
    check = step.run()
    copy = HostCopy(check.found_inf[0])
    check.norm()
    with pytest.raises(RuntimeError, match="synchroniz"):
        check.nonfinite()
    torch.cuda.set_sync_debug_mode("default")
    assert copy.wait().tolist() == [0.0]


def test_new_addresses_are_uploaded_without_waiting(
    gpu: torch.device, no_sync: Callable[[], None]
) -> None:
    step = Step(gpu)
    step.run()
    no_sync()
    for _ in range(5):
        step.grads = [grad.clone() for grad in step.grads]
        step.run()
    torch.cuda.set_sync_debug_mode("default")
    assert step.sums[1].unique().tolist() == [6 * 0.25]


def test_operations_run_on_the_current_stream(gpu: torch.device) -> None:
    grads, targets = [torch.zeros(70_000, device=gpu)], [torch.zeros(70_000, device=gpu)]
    unscale = unscaler(grads, targets)
    for value in (2.0, 4.0, 8.0):
        stream = torch.cuda.Stream(gpu)
        stream.wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            grads[0].fill_(value)
            unscale.run(grads, targets, 2.0)
            seen = targets[0].clone()
        stream.synchronize()
        assert seen.unique().tolist() == [value / 2]
        torch.cuda.current_stream(gpu).wait_stream(stream)


def test_a_thread_may_launch_before_torch_does_anything_in_it(gpu: torch.device) -> None:
    """torch makes a device's context a thread's current one when the thread first needs it."""
    step, errors = Step(gpu), []
    step.run()

    def run_again() -> None:
        try:
            step.run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run_again)
    thread.start()
    thread.join()
    assert errors == []
    torch.cuda.synchronize()
    assert step.sums[1].unique().tolist() == [2 * 0.25]


def test_a_copy_is_ready_when_the_device_has_made_it(gpu: torch.device) -> None:
    tensor = torch.zeros(3, device=gpu)
    HostCopy(tensor).wait()  # the first allocation of pinned memory may wait for the device
    torch.cuda._sleep(CYCLES)
    tensor.fill_(5.0)
    copy = HostCopy(tensor)
    assert not copy.ready()
    assert copy.wait().tolist() == [5.0] * 3
    assert copy.ready()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_lists_over_several_devices() -> None:
    devices = [torch.device("cuda", index) for index in (0, 1, 0)]
    grads = [torch.full((9,), 2.0, device=device) for device in devices]
    grads[1][4] = torch.inf
    check = unscaler(grads, grads).run(grads, grads, 2.0)
    assert check.nonfinite() == [(1, "inf")]
    assert [flag.item() for flag in check.found_inf] == [0.0, 1.0]
    assert torch.cuda.current_device() == 0
    grads[1][4] = 1.0
    assert kernels.clip_by_norm(grads, 1.0, 2.0).item() == pytest.approx(27**0.5)


def test_a_step_can_be_captured_and_replayed(gpu: torch.device) -> None:
    step = Step(gpu)
    side = torch.cuda.Stream(gpu)
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):
        step.run()
    torch.cuda.current_stream(gpu).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        check = step.run()
    scales, flags = [], []
    for value in (1.0, torch.inf, 1.0, torch.nan):
        step.grads[1][69_999] = value
        graph.replay()
        flags.append(check.found_inf[0].item())
        scales.append(step.state.scale.item())
    assert flags == [0.0, 1.0, 0.0, 1.0]
    assert scales == [4.0, 2.0, 2.0, 1.0]
    expected = step.masters[0].half()
    torch.testing.assert_close(step.halves[0], expected, rtol=0, atol=0, equal_nan=True)


def test_what_a_graph_copies_from_outlives_the_operations(gpu: torch.device) -> None:
    grads = [torch.full((9,), 4.0, device=gpu)]
    unscale = unscaler(grads, grads)
    unscale.run(grads, grads, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unscale.run(grads, grads, 2.0)
    del unscale
    pinned = [torch.zeros(64, dtype=torch.int64, pin_memory=True) for _ in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    assert grads[0].tolist() == [1.0] * 9
    assert len(pinned) == 64


def test_the_same_bits_come_out_on_every_run(gpu: torch.device) -> None:
    grads = [torch.randn(n, device=gpu) for n in (10_000_001, 3, 40_000)]
    targets = [torch.empty_like(grad) for grad in grads]
    norms = {unscaler(grads, targets).run(grads, targets, 3.0).norm().item() for _ in range(20)}
    assert len(norms) == 1


def test_more_than_2_to_the_31_elements(gpu: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info(gpu)
    if free < 6 * 2**30:
        pytest.skip(f"needs 6 GiB of free memory; {free / 2**30:.1f} GiB are")
    grads = [torch.ones(2**31 + 70_001, dtype=torch.float16, device=gpu)]
    grads[0][-1] = torch.nan
    check = unscaler(grads, grads).run(grads, grads, 2.0)
    assert check.nonfinite() == [(0, "NaN")]
    assert grads[0][-70_001:-1].unique().tolist() == [0.5]


def test_the_reference_on_a_gpu_does_not_wait_either(
    gpu: torch.device, no_sync: Callable[[], None]
) -> None:
    rule = ScaleRule(init_scale=4.0)
    state = ScalerState(LossScaler(rule), gpu)
    flag = torch.ones(1, device=gpu)
    no_sync()
    scaler_state.update(state, flag, rule)
    torch.cuda.set_sync_debug_mode("default")
    assert state.scale.item() == 2.0


def train(amp: object, level: str, monkeypatch: pytest.MonkeyPatch, who: str) -> list[Tensor]:
    monkeypatch.setenv("AMP_PATCH_KERNELS", who)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.LayerNorm(65), nn.Linear(65, 7)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(8):
        x = torch.randn(16, 33, device="cuda")
        loss = model(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = [param.detach().clone() for param in model.parameters()]
    amp.deactivate()
    return trained


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_training_by_the_kernels_is_that_by_torch(
    amp: object, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = train(amp, level, monkeypatch, "cupy")
    theirs = train(amp, level, monkeypatch, "torch")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Training:
    """A small training on a GPU, whose gradients overflow when told to."""

    def __init__(self, amp: ModuleType, kind: str) -> None:
        level, maker, one_pass = FLAGGED[kind]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 65), nn.BatchNorm1d(65), nn.Linear(65, 7)).cuda()
        self.amp = amp
        self.model, self.optimizer = amp.initialize(
            model, maker(model.parameters()), opt_level=level, verbosity=0, fused_step=one_pass
        )
        self.inputs = torch.randn(16, 33, device="cuda")
        self.factor = torch.ones((), device="cuda")

    def look_for_mistakes(self) -> None:
        """Make the steps in which amp_patch looks at gradients, and waits for the device."""
        for _ in range(WATCHED):
            self.step()

    def step(self) -> Tensor:
        """Return the loss with its graph, as a capture may get it."""
        loss = self.model(self.inputs).float().square().mean() * self.factor
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.amp.clip_grad_norm_(self.optimizer, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> list[Tensor]:
        """Return copies of all that a skipped step leaves alone."""
        stepped = [one for group in self.optimizer.param_groups for one in group["params"]]
        entries = [one for entry in self.optimizer.state.values() for one in entry.values()]
        return [one.detach().clone() for one in (*self.model.parameters(), *stepped, *entries)]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("overflows", [False, True])
def test_an_optimizer_that_takes_no_flag_waits_once(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str, overflows: bool
) -> None:
    foreach = functools.partial(torch.optim.AdamW, foreach=True)
    monkeypatch.setitem(FLAGGED, "foreach", (level, foreach, False))
    training = Training(amp, "foreach")
    training.look_for_mistakes()
    training.factor.fill_(torch.inf if overflows else 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    messages = [str(one.message) for one in caught]
    waits = [one for one in messages if "called a synchronizing CUDA operation" in one]
    assert len(waits) == 1, messages


@pytest.mark.parametrize("kind", FLAGGED)
def test_no_step_waits_where_the_device_skips(
    amp: ModuleType, no_sync: Callable[[], None], kind: str
) -> None:
    training = Training(amp, kind)
    training.look_for_mistakes()
    before = training.state()
    no_sync()
    training.factor.fill_(torch.inf)
    training.step()
    torch.cuda.set_sync_debug_mode("default")
    assert amp.step_was_skipped(training.optimizer)
    assert all(map(torch.equal, before, training.state()))
    assert amp.loss_scale() == 2.0**15
    no_sync()
    training.factor.fill_(1.0)
    training.step()
    training.step()
    torch.cuda.set_sync_debug_mode("default")
    assert not amp.step_was_skipped(training.optimizer)
    assert not torch.equal(before[0], training.state()[0])


# level, optimizer, and whether it steps in one pass
CAPTURED = {
    "AdamW, one pass": FLAGGED["AdamW, one pass"],
    "SGD, one pass": FLAGGED["SGD, one pass"],
    "LAMB, one pass": FLAGGED["LAMB, one pass"],
    **{
        f"fused AdamW, {level}": (
            level, functools.partial(torch.optim.AdamW, fused=True, capturable=True), False,
        )
        for level in ("O1", "O2", "O4", "O5")
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CAPTURED)
def test_a_captured_step_is_the_step(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(FLAGGED, kind, CAPTURED[kind])
    histories = []
    for is_captured in (False, True):
        training = Training(amp, kind)
        one = cuda_graph.capture(training.step).replay if is_captured else training.step
        for _ in range(0 if is_captured else 3):
            training.step()
        history = []
        has_scale = not kind.endswith(("O4", "O5"))
        for overflows in (False, True, False, False):
            training.factor.fill_(torch.inf if overflows and has_scale else 1.0)
            one()
            history.append([amp.step_was_skipped(training.optimizer), amp.loss_scale()])
        histories.append([history, training.state()])
        amp.deactivate()
    torch.testing.assert_close(histories[1], histories[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", CAPTURED)
def test_a_replay_waits_for_nothing(
    amp: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    no_sync: Callable[[], None],
    kind: str,
) -> None:
    monkeypatch.setitem(FLAGGED, kind, CAPTURED[kind])
    captured = cuda_graph.capture(Training(amp, kind).step)
    captured.replay()
    no_sync()
    for _ in range(5):
        captured.replay()


def test_a_graph_outlives_an_eager_step_and_two_share_memory(amp: ModuleType) -> None:
    training = Training(amp, "fused AdamW, O2")
    training.optimizer.param_groups[0]["capturable"] = True
    first = cuda_graph.capture(training.step)
    second = cuda_graph.capture(training.step, pool=first.graph.pool())
    for one in (first.replay, training.step, second.replay, training.step, first.replay):
        before = training.state()
        one()
        assert not amp.step_was_skipped(training.optimizer)
        assert not torch.equal(before[0], training.state()[0])


def test_an_eager_loss_that_is_held_is_refused_where_the_capture_would_fail(
    amp: ModuleType,
) -> None:
    training = Training(amp, "AdamW, one pass")
    loss = training.step()
    with pytest.raises(RuntimeError, match=r"Call loss = loss.detach\(\), or del loss"):
        cuda_graph.capture(training.step)
    loss = loss.detach()
    cuda_graph.capture(training.step).replay()
    assert not amp.step_was_skipped(training.optimizer)
