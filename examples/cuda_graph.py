"""Train on digits with the whole training step in one CUDA graph.

A small model keeps a GPU busy for less time than Python takes to launch its kernels. Captured
once, the step is replayed without Python; its batch is copied to where it was captured. Without a
GPU the same function is called instead:

    python examples/cuda_graph.py --opt-level O2
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from digits import TEST_IMAGES, DigitNet, evaluate, load_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from amp_patch import amp, cuda_graph

BATCH = 60


@dataclass(frozen=True)
class Result:
    """What a training run ends with; the losses are means over all training images."""

    model: nn.Module
    first_loss: float
    final_loss: float
    milliseconds_per_step: float


def prepare(opt_level: str, device: str) -> tuple[nn.Module, Optimizer]:
    """Return a model and an optimizer whose steps the GPU can skip without asking the host."""
    model = DigitNet().to(device)
    one_pass = opt_level in ("O2", "O5")
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, fused=not one_pass)
    return amp.initialize(model, optimizer, opt_level=opt_level, fused_step=one_pass, verbosity=0)


def train(opt_level: str, *, epochs: int = 12, seed: int = 0, device: str | None = None) -> Result:
    """Train from scratch at ``opt_level``, replaying the step on a GPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    images, digits = (part[TEST_IMAGES:] for part in load_images(device))
    model, optimizer = prepare(opt_level, device)
    first_loss, _ = evaluate(model, images, digits)
    batch_images, batch_digits = images[:BATCH].clone(), digits[:BATCH].clone()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch_images), batch_digits)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, 5.0)
        optimizer.step()
        return loss.detach()

    make_step = cuda_graph.capture(step).replay if device == "cuda" else step
    begin = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), device=device).split(BATCH):
            torch.index_select(images, 0, batch, out=batch_images)
            torch.index_select(digits, 0, batch, out=batch_digits)
            make_step()
    final_loss, _ = evaluate(model, images, digits)  # waits for the last step
    steps = epochs * (len(images) // BATCH)
    taken = (time.perf_counter() - begin) * 1e3 / steps
    return Result(model, first_loss, final_loss, taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O2", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is one, else cpu")
    args = parser.parse_args()
    result = train(args.opt_level, epochs=args.epochs, seed=args.seed, device=args.device)
    print(f"{args.opt_level}: loss {result.first_loss:.4f} -> {result.final_loss:.4f}", end=", ")
    print(f"{result.milliseconds_per_step:.2f} ms per step")


if __name__ == "__main__":
    main()
