"""What a plain fp32 loop of one process makes of a drawn training, see `programs`."""

from __future__ import annotations

import copy

import torch
from programs import (
    COLUMNS,
    LAYERS,
    LR,
    ROWS,
    SCALES,
    Program,
    Ran,
    SideBySide,
    Step,
    batch,
    has_scale,
    momentum_of,
)
from torch import Tensor


class _Plain:
    """The weights, momenta and scale of a loop that knows no ranks."""

    def __init__(self, program: Program, seed: int) -> None:
        self.program = program
        self.params = {name: p.detach() for name, p in SideBySide(seed).named_parameters()}
        self.momenta = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self.scale = SCALES["max_loss_scale"] if has_scale(program) else 1.0
        self.unskipped = 0

    def step(self, index: int, step: Step) -> tuple[list[float], bool]:
        """Return the norms, and whether the step was skipped."""
        is_one_block = step.kept != "unscaled"
        checked = [step.micro_batches - 1] if is_one_block else range(step.micro_batches)
        for last in checked:
            self._move(any(inf.micro_batch == last or is_one_block for inf in step.infs))
        if step.infs:
            return [], True
        grads = {name: torch.zeros_like(value) for name, value in self.params.items()}
        for micro_batch in range(step.micro_batches):
            inputs, factors = batch(index, micro_batch)
            for layer, columns in zip(LAYERS, (slice(0, 5), slice(5, 8)), strict=True):
                grads[f"{layer}.weight"] += factors[:, columns].T @ inputs / ROWS
                grads[f"{layer}.bias"] += factors[:, columns].sum(0) / ROWS
        norms = self._clip(grads, step.max_norm)
        for name, grad in grads.items():
            self.momenta[name] = momentum_of(self.program) * self.momenta[name] + grad
            self.params[name] = self.params[name] - LR * self.momenta[name]
        return norms, False

    def _move(self, overflows: bool) -> None:
        """Move the scale as apex does."""
        if not has_scale(self.program):
            return
        self.unskipped = 0 if overflows else self.unskipped + 1
        if overflows:
            self.scale /= 2
        elif self.unskipped == SCALES["growth_interval"]:
            self.scale = min(self.scale * 2, SCALES["max_loss_scale"])
            self.unskipped = 0

    def _clip(self, grads: dict[str, Tensor], max_norm: float | None) -> list[float]:
        if max_norm is None:
            return []
        layers = LAYERS if self.program.optimizers == 2 else ("",)
        norms = []
        for layer in layers:
            own = [name for name in grads if name.startswith(layer)]
            norm = torch.cat([grads[name].flatten() for name in own]).double().norm().item()
            for name in own:
                grads[name] = grads[name] * min(1.0, max_norm / (norm + 1e-6))
            norms.append(norm)
        return norms


def run(program: Program) -> Ran:
    """Return what a program comes to."""
    one, saved = _Plain(program, seed=0), None
    norms, skipped, scales = [], [], []
    for index, action in enumerate(program.actions):
        if action == "save":
            saved = copy.deepcopy(one)
        elif action == "load":
            one = copy.deepcopy(saved) if saved is not None else one
        else:
            assert isinstance(action, Step)
            found, was_skipped = one.step(index, action)
            norms.append(found)
            skipped.append(was_skipped)
            scales.append(one.scale)
    parts = [
        COLUMNS @ one.params[f"{layer}.weight"].T + one.params[f"{layer}.bias"] for layer in LAYERS
    ]
    return Ran(one.params, torch.cat(parts, 1), norms, skipped, scales)
