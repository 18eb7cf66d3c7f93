"""Steps beside ``torch.set_default_device``: the same numbers, and few calls pass through it."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.utils._device import DeviceContext

WAYS = [
    *((level, False) for level in ("O0", "O1", "O2", "O3", "O4", "O5")),
    ("O2", True),
    ("O5", True),
]


@pytest.fixture
def default_device() -> Iterator[Callable[[str], None]]:
    yield torch.set_default_device
    torch.set_default_device(None)


def train(amp: ModuleType, level: str, fused_step: bool, steps: int) -> Iterator[nn.Module]:
    torch.manual_seed(0)
    pairs = [(nn.Linear(4, 4, device="cpu"), nn.Tanh()) for _ in range(12)]
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused_step, eps=1e-4)
    options = {"opt_level": level, "fused_step": fused_step, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    inputs = torch.linspace(-1, 1, 12, device="cpu").reshape(3, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        scaled_backward(amp, model(inputs).float().square().sum(), optimizer)
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        yield model
    amp.deactivate()


@pytest.mark.parametrize(("level", "fused_step"), WAYS)
def test_another_default_device_changes_no_bit(
    amp: ModuleType, default_device: Callable[[str], None], level: str, fused_step: bool
) -> None:
    outcomes = []
    for device in ("cpu", "meta"):
        for model in train(amp, level, fused_step, 3):
            outcomes.append([param.detach().clone() for param in model.parameters()])
            default_device(device)  # once there is an optimizer's state
        default_device("cpu")
    torch.testing.assert_close(outcomes[:3], outcomes[3:], rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_step_makes_few_calls_that_pass_through_it(
    amp: ModuleType,
    default_device: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    level: str,
) -> None:
    calls = 0
    original: Any = DeviceContext.__torch_function__

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(DeviceContext, "__torch_function__", count)
    default_device("cpu")
    passed = []
    for _ in train(amp, level, False, 40):
        passed.append(calls)
        calls = 0
    # of 24 parameters; what is left is of the forward and the update
    assert passed[-1] < 24 * (9 if level in ("O2", "O5") else 12)
