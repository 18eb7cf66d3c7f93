"""Train on digits in graph mode: model and loss compiled, the whole step captured on a GPU.

The loop is that of a framework of static graphs, in which mixed precision is one line of the graph
and the loss scale has four numbers; docs/graph-mode.md has the two side by side:

    python examples/graph_mode.py --opt-level O1
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from digits import TEST_IMAGES, DigitNet, evaluate, load_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from amp_patch import amp, cuda_graph

BATCH = 60
SCALER = {
    "init_scale": 3000.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
}


@dataclass(frozen=True)
class Result:
    """What a training run ends with; the losses are means over all training images."""

    model: nn.Module
    optimizer: Optimizer
    first_loss: float
    final_loss: float
    accuracy: float
    """Share of the test images whose digit is recognised, in percent."""


def train(
    opt_level: str,
    *,
    epochs: int = 12,
    seed: int = 0,
    device: str | None = None,
    backend: str = "inductor",
) -> Result:
    """Train from scratch at ``opt_level``; ``backend`` is torch.compile's."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device != "cpu"
    torch.manual_seed(seed)
    images, digits = load_images(device)
    test_images, test_digits = images[:TEST_IMAGES], digits[:TEST_IMAGES]
    images, digits = images[TEST_IMAGES:], digits[TEST_IMAGES:]

    model = DigitNet().to(device)
    one_pass = opt_level in ("O2", "O5")
    # a step that a CUDA graph holds must be one that the GPU can skip by itself
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, fused=on_gpu and not one_pass)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=opt_level, fused_step=one_pass, verbosity=0, **SCALER
    )
    forward = torch.compile(model, backend=backend, fullgraph=True)
    loss_of = torch.compile(F.cross_entropy, backend=backend, fullgraph=True)

    batch_images, batch_digits = images[:BATCH].clone(), digits[:BATCH].clone()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(forward(batch_images), batch_digits)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss.detach()

    first_loss, _ = evaluate(model, images, digits)
    make_step = cuda_graph.capture(step).replay if on_gpu else step
    for _ in range(epochs):
        for batch in torch.randperm(len(images), device=device).split(BATCH):
            torch.index_select(images, 0, batch, out=batch_images)
            torch.index_select(digits, 0, batch, out=batch_digits)
            make_step()
    final_loss, _ = evaluate(model, images, digits)
    _, accuracy = evaluate(model, test_images, test_digits)
    return Result(model, optimizer, first_loss, final_loss, accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is one, else cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    result = train(
        args.opt_level,
        epochs=args.epochs,
        seed=args.seed,
        device=args.device,
        backend=args.backend,
    )
    print(f"{args.opt_level}: training loss {result.first_loss:.4f} -> {result.final_loss:.4f}")
    print(f"{args.opt_level}: test accuracy {result.accuracy:.2f} %, scale {amp.loss_scale():g}")


if __name__ == "__main__":
    main()
