"""A short training run that can be stopped, saved and resumed; as a script, resumes it.

    python resumed_training.py FOLDER ORDER...

resumes each checkpoint in FOLDER, once per order of the load calls ("initialize-model-amp"), and
writes what each run ended with next to it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from small_models import cross_entropy, mlp
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from amp_patch import amp

STEPS, SAVED_AT = 7, 3
OVERFLOWS = (2, 4)  # just before the checkpoint, and after it
OPTIMIZERS = {
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: Adam(params, lr=1e-2, eps=1e-4),
}
# Two overflows lower a scale that tolerates one, so the count of these must be resumed.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "dynamic": {"loss_scale": "dynamic", "hysteresis": 2, "growth_interval": 2},
}
LOADS = ("model", "optimizer", "amp")
# Loading a model or an optimizer before initialize is as good as after it.
ORDERS = [
    *("-".join(("initialize", *order)) for order in itertools.permutations(LOADS)),
    "model-initialize-amp-optimizer",
    "optimizer-initialize-model-amp",
    "model-optimizer-initialize-amp",
]
ORDINARY_ORDERS = ("initialize-model-optimizer-amp", "model-optimizer-initialize-amp")

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
VARIANTS = list(itertools.product(LEVELS, OPTIMIZERS, OPTIONS))

Run = tuple[nn.Module, Optimizer]


def build(optimizer_name: str, seed: int) -> Run:
    torch.manual_seed(seed)
    model = mlp()
    return model, OPTIMIZERS[optimizer_name](model.parameters())


def initialize(run: Run, level: str, options: str) -> Run:
    return amp.initialize(*run, opt_level=level, verbosity=0, **OPTIONS[options])


def train(run: Run, steps: Sequence[int], options: str) -> list[float]:
    """Train on the batch of each step; with dynamic scales some of them overflow."""
    model, optimizer = run
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), inputs.argmax(1) % 4)
        losses.append(loss.item())
        if options == "dynamic" and step in OVERFLOWS:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return losses


def state(run: Run) -> dict[str, Any]:
    return {
        "model": run[0].state_dict(),
        "optimizer": run[1].state_dict(),
        "amp": amp.state_dict(),
    }


def ending(run: Run, losses: list[float]) -> dict[str, Any]:
    """Return all that must be equal between a resumed run and one never stopped."""
    weights = [param.detach() for param in run[0].parameters()]
    masters = [param.detach() for param in amp.master_params(run[1])]
    return {"losses": losses, "weights": weights, "masters": masters, **state(run)}


def resume(path: Path, order: str) -> dict[str, Any]:
    """Resume in the given order of calls, from other weights than the saved ones."""
    saved = torch.load(path, weights_only=True)
    level, optimizer_name, options = path.stem.split("-")
    run = build(optimizer_name, seed=99)
    calls = {
        "initialize": lambda: initialize(run, level, options),
        "model": lambda: run[0].load_state_dict(saved["model"]),
        "optimizer": lambda: run[1].load_state_dict(saved["optimizer"]),
        "amp": lambda: amp.load_state_dict(saved["amp"]),
    }
    for call in order.split("-"):
        calls[call]()
    return ending(run, train(run, range(SAVED_AT, STEPS), options))


def main(folder: Path, orders: Sequence[str]) -> None:
    for path in sorted(folder.glob("*.pt")):
        for order in orders:
            torch.save(resume(path, order), folder / f"{path.stem}-{order}.resumed")
            amp.deactivate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
