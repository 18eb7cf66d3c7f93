"""Checkpoints that earlier versions wrote are loaded, and training goes on from them.

Those of a version were written by ``python tests/test_older_checkpoints.py FOLDER`` with that
version installed.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_patch import amp

pytestmark = pytest.mark.usefixtures("amp")  # deactivates it

FOLDERS = sorted(Path(__file__).with_name("checkpoints").glob("*"))
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
CASES = [
    pytest.param(folder, level, id=f"{folder.name}-{level}")
    for folder in FOLDERS
    for level in LEVELS
]


def new_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def initialized(model: nn.Module, level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def losses_of_steps(model: Any, optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        # numbers that no generator of random ones has to agree on
        inputs = torch.sin(torch.arange(48.0).reshape(8, 6) * (step + 1))
        loss = nn.functional.cross_entropy(model(inputs), torch.arange(8) % 3)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def write(folder: Path, level: str) -> None:
    model, optimizer = initialized(new_model(), level)
    losses_of_steps(model, optimizer, range(3))
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
    }
    torch.save(state, folder / f"state_{level}.pt")
    torch.save(model, folder / f"model_{level}.pt")
    outputs = model.eval()(torch.linspace(-1, 1, 12).reshape(2, 6)).detach().clone()
    losses = losses_of_steps(model.train(), optimizer, range(3, 7))
    torch.save({"losses": losses, "outputs": outputs}, folder / f"afterwards_{level}.pt")
    amp.deactivate()


@pytest.mark.parametrize(("folder", "level"), CASES)
def test_training_goes_on_from_a_checkpoint(folder: Path, level: str) -> None:
    model, optimizer = initialized(new_model(), level)
    saved = torch.load(folder / f"state_{level}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    expected = torch.load(folder / f"afterwards_{level}.pt", weights_only=True)["losses"]
    losses = losses_of_steps(model, optimizer, range(3, 7))
    # other processors round otherwise; without its momentum or weights it is further away
    assert losses == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("folder", "level"), CASES)
def test_a_pickled_model_is_loaded_and_casts(folder: Path, level: str) -> None:
    initialized(new_model(), level)  # patches the functions that a model calls at O1 and O4
    model = torch.load(folder / f"model_{level}.pt", weights_only=False).eval()
    expected = torch.load(folder / f"afterwards_{level}.pt", weights_only=True)["outputs"]
    outputs = model(torch.linspace(-1, 1, 12).reshape(2, 6))
    assert outputs.dtype is expected.dtype
    torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-2)
    amp.deactivate()
    outputs = model.float()(torch.linspace(-1, 1, 12).reshape(2, 6))
    torch.testing.assert_close(outputs, expected.float(), rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    for name in LEVELS:
        write(Path(sys.argv[1]), name)
