"""Training steps that launch every kernel, for tests on a GPU; as a script, for the sanitizer.

compute-sanitizer --tool memcheck python tests/kernel_steps.py
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_patch import amp, kernels
from amp_patch.kernels import ScalerState, caster, comparison, cuda_cross_entropy, unscaler
from amp_patch.optimizers import FusedLAMB
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

# level, optimizer, and whether it steps in one pass
FLAGGED: dict[str, tuple[str, Callable[..., torch.optim.Optimizer], bool]] = {
    "AdamW, one pass": ("O2", torch.optim.AdamW, True),
    "SGD, one pass": ("O2", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), True),
    "RMSprop, one pass": ("O2", functools.partial(torch.optim.RMSprop, centered=True), True),
    "Adagrad, one pass": ("O2", torch.optim.Adagrad, True),
    "LAMB, one pass": ("O2", FusedLAMB, True),
    "fused AdamW, O1": ("O1", functools.partial(torch.optim.AdamW, fused=True), False),
    "fused AdamW, O2": ("O2", functools.partial(torch.optim.AdamW, fused=True), False),
}
# no element, one, a few, and more than a chunk of 16,384
AWKWARD = (1, 16_385, 7, 0)


class Step:
    """Every operation of a training step at O2 on some parameters, with a scale on the device."""

    def __init__(
        self,
        device: torch.device,
        sizes: tuple[int, ...] = (5, 70_000, 1),
        dtype: torch.dtype = torch.float16,
    ) -> None:
        self.halves = [torch.ones(n, device=device, dtype=dtype) for n in sizes]
        self.masters = [half.float() for half in self.halves]
        self.grads = [torch.ones_like(half) for half in self.halves]
        self.received = [torch.zeros_like(master) for master in self.masters]
        self.sums = [torch.zeros_like(master) for master in self.masters]
        self.rule = ScaleRule(init_scale=4.0)
        self.state = ScalerState(LossScaler(self.rule), device)
        self.unscale = unscaler(self.grads, self.received)
        self.cast = caster(self.masters, self.halves)
        self.comparison = comparison(self.masters, self.halves)

    def run(self) -> kernels.GradCheck:
        self.comparison.reconcile(lambda: [True] * len(self.masters))
        check = self.unscale.run(self.grads, self.received, self.state.scale)
        kernels.update_scale(self.state, check.found_inf[0], self.rule)
        kernels.accumulate(self.sums, self.received)
        kernels.clip_by_norm(self.received, 1e9, 2.0)
        for master, grad in zip(self.masters, self.received, strict=True):
            master.sub_(grad)
        self.cast.run()
        return check


def step_in_one_pass(amp: ModuleType, kind: str, device: torch.device) -> None:
    """Step tensors of several sizes twice, from half gradient to half weight, and skip a third."""
    level, make, one_pass = FLAGGED[kind]
    model = nn.ParameterList(torch.ones(n, device=device) for n in AWKWARD)
    model, optimizer = amp.initialize(
        model, make(model.parameters()), opt_level=level, verbosity=0, fused_step=one_pass
    )
    for factor in (1.0, 0.5, torch.inf):
        loss = sum(param.float().square().sum() for param in model) * factor
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert amp.step_was_skipped(optimizer)
    amp.deactivate()


def compute_cross_entropy(device: torch.device, dtype: torch.dtype) -> None:
    """Compute it of rows that are aligned differently, of which one is ignored."""
    logits = torch.ones(3, 1025, device=device, dtype=dtype, requires_grad=True)
    targets = torch.tensor([0, -100, 1024], device=device)
    cuda_cross_entropy.cross_entropy(logits, targets, -100, "mean").backward()


def launch_every_kernel(amp: ModuleType, device: torch.device) -> None:
    """Run every source of csrc/, on sizes and an address at which a kernel could go wrong."""
    for dtype in (torch.float16, torch.bfloat16):
        step = Step(device, AWKWARD, dtype)
        # not aligned for the loads of several elements at once
        step.grads[1] = torch.ones(16_386, device=device, dtype=dtype)[1:]
        step.run()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        compute_cross_entropy(device, dtype)
    for kind, (_, _, one_pass) in FLAGGED.items():
        if one_pass:
            step_in_one_pass(amp, kind, device)


if __name__ == "__main__":
    os.environ["AMP_PATCH_KERNELS"] = "cupy"
    launch_every_kernel(amp, torch.device("cuda", 0))
    torch.cuda.synchronize()
