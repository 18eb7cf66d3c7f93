"""Model parallel by hand: layers on two devices, one optimizer, trained as on one device.

The second device is a stand-in that computes on the CPU, see `second_device`.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import pytest
import rank_training as training
import torch
from second_device import SECOND, SecondDevice
from support import nightly_but
from torch import Tensor, nn

from amp_patch.step import loss_scaling

#: step -> the layer of whose gradient an element is inf.
PLANTS = {2: 0, 5: 3}


class Split(nn.Module):
    """The small model, with its last layer on a device of its own.

    That has one parameter: the stand-in cannot let several share a memory as `small_tensors` does.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers, self.device = training.make_model(), device
        weight = self.layers[3].weight.detach().to(device)
        self.layers[3].weight, self.layers[3].bias = nn.Parameter(weight), None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[:3](inputs)
        return self.layers[3](hidden.to(self.device))


def train(amp: ModuleType, level: str, device: torch.device, target_on: torch.device) -> list[Any]:
    """Return loss, norm, decision and scale of each step.

    Args:
        amp: not initialized.
        level: "O0" ...
        device: of the last layer.
        target_on: where the loss is computed.
    """
    model = Split(device)
    optimizer = training.adamw(model.parameters())
    is_scaled = level in training.SCALED
    scales = training.SCALES if is_scaled else {}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **scales)
    found = []
    for step in range(8):
        optimizer.zero_grad()
        inputs, targets = training.rows(step, 0, 1)
        outputs = model(inputs).to(target_on)
        loss = (outputs.float() - targets.to(target_on)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            if is_scaled and step in PLANTS:
                model.layers[PLANTS[step]].weight.grad[0, 0] = float("inf")
        norm = amp.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        skipped = amp.step_was_skipped(optimizer)
        found.append((loss.item(), norm.item(), skipped, amp.loss_scale()))
    amp.deactivate()
    return found


#: Device types that work behind the host, so that a step is skipped by a flag on its device.
AHEAD: list[set[str]] = [set(), {"cpu"}, {"cpu", "meta"}]


@pytest.mark.parametrize("ahead", nightly_but(AHEAD[1:], AHEAD), ids=["host", "cpu", "both"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_layers_on_two_devices_train_as_on_one(
    amp: ModuleType, level: str, ahead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    alone = train(amp, level, cpu, cpu)
    assert [step for step, row in enumerate(alone) if row[2]] == (
        sorted(PLANTS) if level in training.SCALED else []
    )
    monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", ahead)
    for target_on in (cpu, SECOND):
        with SecondDevice():
            found = train(amp, level, SECOND, target_on)
        assert str(found) == str(alone)  # to the bit; a norm may be NaN


def test_the_stand_in_refuses_what_a_second_device_does() -> None:
    with SecondDevice(), contextlib.ExitStack() as raises:
        there = torch.ones(2).to(SECOND)
        assert (there + there).to("cpu").tolist() == [2.0, 2.0]
        raises.enter_context(pytest.raises(RuntimeError, match="tensors on two devices"))
        there + torch.ones(2)
