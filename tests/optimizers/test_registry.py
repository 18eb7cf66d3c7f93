"""A row in the table of optimizers and a file of its own are all that a new optimizer takes."""

from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_on_cpu.fake_gpu import Gpu
from hypothesis import given
from hypothesis import strategies as st
from sign_sgd import SignSGD, SignSgdUpdate
from support import exactly
from torch import Tensor, nn

from amp_patch.optimizers import registry

INF = float("inf")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> type[SignSgdUpdate]:
    """Enter the row, for one test."""
    monkeypatch.setitem(registry.UPDATES, SignSGD, SignSgdUpdate)
    monkeypatch.setattr(SignSgdUpdate, "steps", 0)
    return SignSgdUpdate


class Run:
    """A model with a norm in float32, trained on given losses' factors."""

    def __init__(self, amp: ModuleType, level: str, fused: bool) -> None:
        torch.manual_seed(0)
        self.amp = amp
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1:].parameters()}]
        self.model, self.optimizer = amp.initialize(
            model, SignSGD(groups), opt_level=level, loss_scale=64.0, verbosity=0,
            fused_step=fused,
        )  # fmt: skip
        self.masters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, seed: int, factor: float = 1.0) -> None:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        loss = self.model(inputs).float().square().mean() * factor
        self.optimizer.zero_grad()
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()

    def everything(self) -> list[Tensor]:
        averages = [self.optimizer.state[master]["average"] for master in self.masters]
        return [*self.model.parameters(), *self.masters, *averages]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_new_optimizer_steps_as_without_fused_step(
    amp: ModuleType, known: type[SignSgdUpdate], level: str
) -> None:
    runs = [Run(amp, level, fused) for fused in (True, False)]  # torch stays patched

    @given(st.lists(st.sampled_from([1.0, 1.0, 0.125, INF]), max_size=6))
    def trainings(factors: list[float]) -> None:
        both = [Run(amp, level, fused) for fused in (True, False)]
        for seed, factor in enumerate([1.0, *factors]):
            for run in both:
                run.train(seed, factor)
            assert len({amp.step_was_skipped(run.optimizer) for run in both}) == 1
            for one, other in zip(*(run.everything() for run in both), strict=True):
                assert torch.equal(one, other)

    trainings()
    del runs
    assert known.steps > 0


def test_a_new_optimizer_follows_its_rule_in_float64(
    amp: ModuleType, known: type[SignSgdUpdate]
) -> None:
    run = Run(amp, "O2", True)
    exact = [master.detach().double() for master in run.masters]
    averages = [torch.zeros_like(one) for one in exact]
    rates = [group["lr"] for group in run.optimizer.param_groups for _ in group["params"]]
    for seed in range(3):
        run.optimizer.zero_grad()
        loss = run.model(torch.full((8, 4), 1.0 + seed).requires_grad_()).float().square().sum()
        with amp.scale_loss(loss, run.optimizer) as scaled_loss:
            scaled_loss.backward()
        for i, master in enumerate(amp.master_params(run.optimizer)):
            averages[i] = 0.5 * averages[i] + 0.5 * master.grad.double()
            exact[i] = exact[i] - rates[i] * averages[i].sign()
        run.optimizer.step()
        for master, one in zip(run.masters, exact, strict=True):
            torch.testing.assert_close(master.double(), one, rtol=1e-6, atol=1e-6)
    assert known.steps == 6


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_on_a_gpu_the_reference_serves_an_optimizer_without_kernels(
    amp: ModuleType,
    known: type[SignSgdUpdate],
    level: str,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    gpu = Gpu(monkeypatch, pytestconfig)
    runs = [Run(amp, level, fused) for fused in (True, False)]
    for seed, factor in enumerate([1.0, 1.0, INF, 1.0]):
        for run in runs:
            run.train(seed, factor)
        assert amp.clip_grad_norm_(runs[0].optimizer, 1.0) is not None
    for one, other in zip(*(run.everything() for run in runs), strict=True):
        assert torch.equal(one, other)
    assert known.steps == 6
    assert gpu.modules.launched  # the gradients were unscaled by kernels
    amp.deactivate()


def test_a_new_optimizers_options_are_looked_at(
    amp: ModuleType, known: type[SignSgdUpdate]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = SignSGD(model.parameters(), beta=torch.tensor(0.5))
    message = (
        "fused_step=True knows no differentiable=True and no tensors as options but for lr; got "
        "beta=tensor(0.5000); leave that out, or call amp.initialize(..., fused_step=False)."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, fused_step=True)


def test_a_type_without_a_row_is_refused_and_its_rivals_named(amp: ModuleType) -> None:
    def initialize(optimizer: Any) -> None:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, fused_step=True)

    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="steps torch.optim.AdamW, .* got sign_sgd.SignSGD; call"):
        initialize(SignSGD(model.parameters()))
