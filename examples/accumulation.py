"""Train on digits with gradient accumulation, gradient clipping and a gradient penalty.

The penalty is the squared norm of the loss's gradient by the images, so each backward pass
runs through a gradient:

    python examples/accumulation.py --opt-level O2
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from digits import load_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from amp_patch import amp

BATCH = 100
MICRO_BATCHES = 4
PENALTY = 0.1
MAX_NORM = 1.0


@dataclass(frozen=True)
class Result:
    """What a training run ends with; the losses are means over the first and the last epoch."""

    model: nn.Module
    first_loss: float
    final_loss: float
    clipped_steps: int
    skipped_steps: int


class Net(nn.Module):
    """A smooth network, so that the penalty has a gradient: (N, 1, 8, 8) to (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.hidden(images.flatten(1)))))


def penalised_loss(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    """Return the cross entropy plus PENALTY times its mean squared gradient by an image."""
    images = images.detach().requires_grad_()
    loss = F.cross_entropy(model(images), digits)
    # these gradients pass through half precision as well, so they too are taken scaled
    scale = amp.loss_scale()
    (gradients,) = torch.autograd.grad(loss * scale, images, create_graph=True)
    slopes = gradients.float() * (len(images) / scale)
    return loss + PENALTY * slopes.square().flatten(1).sum(1).mean()


def accumulate(model: nn.Module, optimizer: Optimizer, images: Tensor, digits: Tensor) -> Tensor:
    """Add up the gradients of four micro-batches, unscaled at the last; return the mean loss."""
    losses = []
    pairs = list(zip(images.chunk(MICRO_BATCHES), digits.chunk(MICRO_BATCHES), strict=True))
    for number, (some_images, some_digits) in enumerate(pairs, start=1):
        loss = penalised_loss(model, some_images, some_digits) / len(pairs)
        more_follow = number < len(pairs)
        with amp.scale_loss(loss, optimizer, delay_unscale=more_follow) as scaled_loss:
            scaled_loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def train(opt_level: str, *, epochs: int = 20, seed: int = 0, device: str | None = None) -> Result:
    """Train from scratch at ``opt_level``."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    images, digits = load_images(device)
    model = Net().to(device)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    epoch_losses = []
    clipped_steps = skipped_steps = 0
    for _ in range(epochs):
        losses = []
        for batch in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            losses.append(accumulate(model, optimizer, images[batch], digits[batch]))
            norm = amp.clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()
            skipped_steps += amp.step_was_skipped(optimizer)
            clipped_steps += bool(norm > MAX_NORM)
        epoch_losses.append(torch.stack(losses).mean().item())
    return Result(model, epoch_losses[0], epoch_losses[-1], clipped_steps, skipped_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is one, else cpu")
    args = parser.parse_args()
    result = train(args.opt_level, epochs=args.epochs, seed=args.seed, device=args.device)
    print(f"{args.opt_level}: loss {result.first_loss:.4f} -> {result.final_loss:.4f}", end=", ")
    print(f"{result.clipped_steps} steps clipped, {result.skipped_steps} skipped")


if __name__ == "__main__":
    main()
