"""An optimizer for each parameter, stepped by a hook of the backward, to keep no gradients."""

from __future__ import annotations

import re
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
#: How far losses may be off from those in fp32, at the levels where the scale is 1.
OFF = {"O0": 0.0, "O3": 0.05, "O4": 5e-3, "O5": 5e-3}


def make(kind: type[torch.optim.Optimizer]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    model[2].weight = model[0].weight  # its gradient is there when both layers gave theirs
    optimizers = {
        param: kind([param], lr=0.05 if kind is torch.optim.AdamW else 0.5)
        for param in model.parameters()
    }

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return model, list(optimizers.values())


def trained_plainly(kind: type[torch.optim.Optimizer]) -> list[float]:
    model, _ = make(kind)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        losses.append(loss.item())
    return losses


def trained(
    amp: ModuleType, level: str, kind: type[torch.optim.Optimizer], **options: Any
) -> list[float]:
    model, optimizers = make(kind)
    amp.initialize(model, optimizers, opt_level=level, verbosity=0, **options)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(X).float(), Y)
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
        assert all(param.grad is None for param in model.parameters())
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("level", "kind"),
    # AdamW's eps is 0 in float16
    [*product(OFF, [torch.optim.SGD]), *product(("O0", "O4", "O5"), [torch.optim.AdamW])],
)
def test_it_trains_where_the_scale_is_1(
    amp: ModuleType, level: str, kind: type[torch.optim.Optimizer]
) -> None:
    expected = trained_plainly(kind)
    assert expected[-1] < expected[0] - 0.05
    got = trained(amp, level, kind)
    torch.testing.assert_close(got, expected, rtol=0, atol=OFF[level])


def test_it_trains_by_the_fused_step(amp: ModuleType) -> None:
    kind = torch.optim.AdamW
    got = trained(amp, "O5", kind, fused_step=True)
    torch.testing.assert_close(got, trained_plainly(kind), rtol=0, atol=OFF["O5"])


class _EverySecond:
    """Steps a parameter's own optimizer after every second backward that writes to it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def __call__(self, param: Tensor) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize(
    ("level", "fused_step"),
    [*product(("O0", "O1", "O2", "O4", "O5"), [False]), *product(("O2", "O5"), [True])],
)
def test_it_adds_up_what_earlier_blocks_have_left(
    amp: ModuleType, level: str, fused_step: bool, delays: bool
) -> None:
    values = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        before = model[0].weight.detach().clone()
        optimizers = [torch.optim.SGD([p], lr=0.5, momentum=0.9) for p in model.parameters()]
        for param, optimizer in zip(model.parameters(), optimizers, strict=True):
            param.register_post_accumulate_grad_hook(_EverySecond(optimizer))
        if not is_plain:
            options = {"opt_level": level, "loss_scale": 1.0, "fused_step": fused_step}
            amp.initialize(model, optimizers, verbosity=0, **options)
        for number in range(8):
            rows = X * (0.3 if number % 2 else 1.0)
            loss = F.cross_entropy(model(rows).float(), Y)
            if is_plain:
                loss.backward()
                continue
            is_left = delays and number % 2 == 0
            with amp.scale_loss(loss, optimizers, delay_unscale=is_left) as scaled_loss:
                scaled_loss.backward()
        values.append([value.clone() for value in model.state_dict().values()])
    expected, got = values
    torch.testing.assert_close(got, expected, rtol=0.0, atol={"O0": 1e-6}.get(level, 0.01))
    assert not torch.allclose(got[0], before, atol=0.1)


@pytest.mark.parametrize(
    ("level", "options"),
    [("O1", {}), ("O2", {}), ("O5", {"loss_scale": "dynamic"}), ("O2", {"loss_scale": 128.0})],
)
def test_it_is_refused_where_there_is_a_scale(
    amp: ModuleType, level: str, options: dict[str, Any]
) -> None:
    mend = re.escape("at a scale of 1 (O4, O5) hooks may step")
    with pytest.raises(RuntimeError, match=mend):
        trained(amp, level, torch.optim.SGD, **options)


def test_clipping_there_is_refused(amp: ModuleType) -> None:
    """The block would give the masters what was not clipped."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        )
    loss = F.cross_entropy(model(X), Y)
    with pytest.raises(RuntimeError, match="not after its backward"):  # noqa: SIM117
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
