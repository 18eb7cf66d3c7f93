"""Masters and half weights that users write to between steps, with kernels that reconcile them.

What a step makes of them is compared, bit for bit, with what it makes where a kernel of its own
reconciles them before the step.
"""

import contextlib
import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_on_cpu.fake_gpu import Gpu
from hypothesis import given
from hypothesis import strategies as st
from support import numbers_like, scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from amp_patch.optimizers import FusedLAMB

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.05, weight_decay=0.1),
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "lamb": lambda params: FusedLAMB(params, lr=0.05),
}
SCALE = 64.0


class Model(nn.Module):
    """Half weights, and a norm that stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in [(3, 5), (1,), (17,)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, grads: list[Tensor | None]) -> Tensor:
        pairs = zip(self.parameters(), grads, strict=True)
        return sum((p.float() * g).sum() for p, g in pairs if g is not None)


class Training:
    """A training whose gradients are drawn from seeds.

    Args:
        reconciles: whether the kernels that step may reconcile.
    """

    def __init__(self, amp: ModuleType, optimizer: str, level: str, reconciles: bool) -> None:
        torch.manual_seed(0)
        self.amp = amp
        model = Model()
        self.model, self.optimizer = amp.initialize(
            model, OPTIMIZERS[optimizer](model.parameters()), opt_level=level, loss_scale=SCALE,
            verbosity=0, fused_step=True,
        )  # fmt: skip
        self.step_of = amp.session.optimizers.steps[self.optimizer]
        if not reconciles:
            self.step_of._fused.reconciles = lambda optimizer: False

    @property
    def halves(self) -> list[Tensor]:
        return list(self.model.weights)

    @property
    def masters(self) -> list[Tensor]:
        """The masters, without amp_patch being told that somebody has them."""
        params = self.optimizer.param_groups[0]["params"]
        return [one for one in params if self.step_of.masters.pairs.param_of(one) is not one]

    def backward(self, seed: int, missing: int = 9, factor: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        params = list(self.model.parameters())
        grads: list[Tensor | None] = [torch.randn(p.shape, generator=generator) for p in params]
        if missing < len(grads):
            grads[missing] = None
        self.model.zero_grad()
        scaled_backward(self.amp, self.model(grads) * factor, self.optimizer)

    def bits(self) -> list[list[int]]:
        states = self.optimizer.state.values()
        held = [one for state in states for one in state.values() if isinstance(one, Tensor)]
        everything = [*self.model.parameters(), *self.optimizer.param_groups[0]["params"], *held]
        return [one.detach().flatten().view(torch.uint8).tolist() for one in everything]


# --- what users do between steps; each changes the training by a seed ---


@torch.no_grad()
def write_half(training: Training, seed: int) -> None:
    half = training.halves[seed % 3]
    half.copy_(numbers_like(half, seed))


def write_half_data(training: Training, seed: int) -> None:
    half = training.halves[seed % 3]
    half.data.copy_(numbers_like(half, seed))


def clamp_halves(training: Training, seed: int) -> None:
    for half in training.halves:
        half.data.clamp_(-0.5, 0.5)


def replace_half(training: Training, seed: int) -> None:
    half = training.halves[seed % 3]
    half.data = numbers_like(half, seed)


def load_model(training: Training, seed: int) -> None:
    state = copy.deepcopy(training.model.state_dict())
    training.model.load_state_dict({k: v + 2.0**-14 * (seed % 3) for k, v in state.items()})


@torch.no_grad()
def write_master(training: Training, seed: int) -> None:
    master = training.masters[seed % 3]
    master.copy_(numbers_like(master, seed))


def write_shown_master(training: Training, seed: int) -> None:
    master = list(training.amp.master_params(training.optimizer))[seed % 3]
    master.data.copy_(numbers_like(master, seed))


def show_masters(training: Training, seed: int) -> None:
    list(training.amp.master_params(training.optimizer))


def freeze(training: Training, seed: int) -> None:
    half = training.halves[seed % 3]
    half.requires_grad_(not half.requires_grad)


WRITES = [
    write_half, write_half_data, clamp_halves, replace_half, load_model, write_master,
    write_shown_master, show_masters, freeze,
]  # fmt: skip


# --- the steps themselves ---


def step(training: Training, seed: int) -> None:
    training.backward(seed)
    training.optimizer.step()


def step_without_one(training: Training, seed: int) -> None:
    training.backward(seed, missing=seed % 4)
    training.optimizer.step()


def clipped_step(training: Training, seed: int) -> None:
    training.backward(seed)
    training.amp.clip_grad_norm_(training.optimizer, 0.5)
    training.optimizer.step()


def overflow(training: Training, seed: int) -> None:
    training.backward(seed, factor=float("inf"))
    training.optimizer.step()


def flagged_step(training: Training, seed: int) -> None:
    """Step where the device, and not the host, knows whether the step is skipped."""
    training.backward(seed)
    training.step_of.skip.ask_where(torch.tensor([float(seed % 2)]))
    training.optimizer.step()


def refused_step(training: Training, seed: int) -> None:
    """Step with half gradients that were written to, which are refused unless they do not wait."""
    training.backward(seed)
    for half in training.halves:
        if half.grad is not None:
            half.grad.mul_(0.5)
    with contextlib.suppress(RuntimeError):
        training.optimizer.step()
    training.step_of._fused.lazy.drop()  # FusedLAMB.zero_grad() would read them first
    training.optimizer.zero_grad()


STEPS = [
    step, step, flagged_step, flagged_step, step_without_one, clipped_step, overflow, refused_step,
]  # fmt: skip
EVENTS = st.tuples(st.sampled_from([*WRITES, *STEPS]), st.integers(0, 11))


@pytest.mark.filterwarnings("ignore:amp_patch")
@pytest.mark.filterwarnings("ignore:between two forward passes")  # a program may write to both
def test_any_program_leaves_the_bits_of_reconciling_before_the_step(
    amp: ModuleType, gpu: Gpu
) -> None:
    kept = Training(amp, "sgd", "O2", True)  # torch stays patched while it lives

    @given(
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        level=st.sampled_from(["O2", "O5"]),
        events=st.lists(EVENTS, max_size=8),
    )
    def run(optimizer: str, level: str, events: list[tuple[Any, int]]) -> None:
        both = [Training(amp, optimizer, level, reconciles) for reconciles in (True, False)]
        for event, seed in [*events, (step, 0)]:
            for training in both:
                event(training, seed)
            if event not in WRITES:
                assert both[0].bits() == both[1].bits(), event

    run()
    del kept


def reconciled(gpu: Gpu, training: Training, event: Callable[[Training, int], None]) -> int:
    """Return in how many launches masters were reconciled outside of the step's own."""
    gpu.modules.launched.clear()
    event(training, 0)
    return len([one for one in gpu.modules.launched if one.startswith("reconcile")])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_reconciles_without_a_launch_for_it(
    amp: ModuleType, gpu: Gpu, optimizer: str
) -> None:
    training = Training(amp, optimizer, "O2", True)
    counts = []
    writes = (write_half, write_half, write_master, write_half_data, write_half)
    for write in writes:
        write(training, 1)
        counts.append(reconciled(gpu, training, step))
    # the forward is to read what was written to a master: it does not wait for the step
    assert counts == [int(write is write_master) for write in writes]


def test_what_is_not_stepped_is_reconciled_apart(amp: ModuleType, gpu: Gpu) -> None:
    training = Training(amp, "sgd", "O2", True)
    step(training, 0)
    for number, missing in enumerate([0, 0, 1, 1]):
        half = training.halves[missing]
        half.data = torch.full_like(half, number)
        training.backward(number, missing=missing)
        assert reconciled(gpu, training, lambda training, _: training.optimizer.step()) == 1
        assert (training.masters[missing] == number).all()
        assert (training.halves[missing] == number).all()


def test_what_has_other_memory_is_stepped_there(amp: ModuleType, gpu: Gpu) -> None:
    training = Training(amp, "sgd", "O2", True)
    step(training, 0)
    half, before = training.halves[0], training.halves[0].detach().clone()
    old = half.data
    half.data = torch.full_like(half, 3.0)
    training.optimizer.param_groups[0]["lr"] = 0.0
    step(training, 1)
    assert (training.masters[0] == 3.0).all()
    assert torch.equal(old, before)


def test_a_step_that_is_refused_takes_nothing_back(amp: ModuleType, gpu: Gpu) -> None:
    training = Training(amp, "sgd", "O2", True)
    write_half(training, 6)
    written = training.halves[0].detach().clone()
    refused_step(training, 1)
    assert torch.equal(training.halves[0], written)
    assert torch.equal(training.masters[0], written.float())


def test_the_reference_steps_what_was_written(amp: ModuleType, gpu: Gpu) -> None:
    training = Training(amp, "sgd", "O2", True)
    training.optimizer.param_groups[0]["lr"] = 0.0
    write_half(training, 6)
    written = training.halves[0].detach().clone()
    training.backward(1)
    master = training.masters[0]
    master.grad = master.grad.t().contiguous().t()  # no kernel takes these strides
    training.optimizer.step()
    assert "sgd_prepare" not in gpu.modules.launched
    assert torch.equal(training.halves[0], written)
    assert torch.equal(master, written.float())


def test_a_hook_before_the_step_finds_masters_and_weights_equal(amp: ModuleType, gpu: Gpu) -> None:
    training = Training(amp, "sgd", "O2", True)
    group = training.optimizer.param_groups[0]
    group["lr"] = 0.0
    seen = []

    def decay(*_: Any) -> None:
        seen.append(training.masters[0].detach().clone())
        training.masters[0].data.mul_(0.5)  # leaves no trace in a version

    training.optimizer.register_step_pre_hook(decay)
    with torch.no_grad():
        training.halves[0].fill_(3.0)
    step(training, 0)
    assert (seen[0] == 3.0).all()
    assert (training.masters[0] == 1.5).all()
    assert (training.halves[0] == 1.5).all()


@pytest.mark.parametrize("masters", [False, True])
def test_what_was_written_before_a_step_that_a_flag_skips_is_there_for_the_next(
    amp: ModuleType, gpu: Gpu, masters: bool
) -> None:
    training = Training(amp, "adamw", "O2", True)
    step(training, 0)
    for column in [training.masters] if masters else [training.halves]:
        with torch.no_grad():
            column[0].fill_(3.0)
    training.backward(1)
    training.step_of.skip.ask_where(torch.ones(1))
    training.optimizer.step()
    assert (training.masters[0] == 3.0).all()
    assert (training.halves[0] == 3.0).all()


def test_what_was_reconciled_is_not_due_any_more(amp: ModuleType, gpu: Gpu) -> None:
    masters = Training(amp, "sgd", "O2", True).step_of.masters
    stepped = [master for _, master in masters.pairs]
    masters.reconcile_later()
    assert masters.reconcile_all_but(stepped) == [False] * 3
    assert masters.reconcile_all_but(stepped) == [True] * 3
    masters.reconcile_later()
    masters.reconcile()
    assert masters.reconcile_all_but(stepped) == [True] * 3


def test_weights_whose_addresses_the_kernels_tell_are_written_to_where_they_are(
    amp: ModuleType, gpu: Gpu
) -> None:
    training = Training(amp, "sgd", "O2", True)
    masters, halves = training.step_of.masters, training.halves
    masters.reconcile()
    for param in halves:
        param.data = param.data.clone()
    masters.reconcile_later()
    places = [param.data_ptr() for param in halves]
    masters.reconcile_all_but([master for _, master in masters.pairs], places)
    with torch.no_grad():
        halves[0].fill_(3.0)
    masters.reconcile()
    assert (training.masters[0] == 3.0).all()
