"""Train a generator and a discriminator of digits: two optimizers and three losses.

Each loss has a loss scale of its own, told by ``loss_id``:

    python examples/gan.py --opt-level O1

At O3 it does not train: Adam's epsilon of 1e-8 is 0 in float16, so that 0 / 0 gives NaN.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from digits import load_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from amp_patch import amp

REAL_LOSS, FAKE_LOSS, GENERATOR_LOSS = range(3)
LATENT = 16
BATCH = 64


@dataclass(frozen=True)
class Result:
    """What a training run ends with; the losses are means over the last epoch."""

    generator: nn.Module
    discriminator: nn.Module
    discriminator_loss: float
    generator_loss: float
    first_distance: float
    final_distance: float
    """Root mean square distance of the mean generated image from the mean real one."""


def build_generator() -> nn.Module:
    """Noise (N, 16) to images (N, 1, 8, 8)."""
    return nn.Sequential(
        nn.Linear(LATENT, 16 * 4 * 4),
        nn.Unflatten(1, (16, 4, 4)),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 1, 3, padding=1),
        nn.Sigmoid(),
    )


def build_discriminator() -> nn.Module:
    """Images (N, 1, 8, 8) to one logit each (N, 1): positive means real."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(16 * 2 * 2, 1),
    )


def judge(logits: Tensor, *, real: bool) -> Tensor:
    """Return the loss of calling all images real or all of them generated."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


@torch.no_grad()
def distance(generator: nn.Module, images: Tensor) -> float:
    noise = torch.randn(512, LATENT, device=images.device)
    return (generator(noise).float().mean(0) - images.mean(0)).square().mean().sqrt().item()


def discriminator_step(
    discriminator: nn.Module, optimizer: Optimizer, real_images: Tensor, fake_images: Tensor
) -> Tensor:
    """Step the discriminator by two backward passes and return the sum of their losses."""
    optimizer.zero_grad()
    real_loss = judge(discriminator(real_images), real=True)
    with amp.scale_loss(real_loss, optimizer, loss_id=REAL_LOSS) as scaled_loss:
        scaled_loss.backward()
    fake_loss = judge(discriminator(fake_images.detach()), real=False)
    with amp.scale_loss(fake_loss, optimizer, loss_id=FAKE_LOSS) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return (real_loss + fake_loss).detach()


def generator_step(discriminator: nn.Module, optimizer: Optimizer, fake_images: Tensor) -> Tensor:
    """Step the generator, through the discriminator, and return its loss."""
    optimizer.zero_grad()
    loss = judge(discriminator(fake_images), real=True)
    with amp.scale_loss(loss, optimizer, loss_id=GENERATOR_LOSS) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.detach()


def train(opt_level: str, *, epochs: int = 10, seed: int = 0, device: str | None = None) -> Result:
    """Train both from scratch at ``opt_level``."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    images, _ = load_images(device)
    models = [build_generator().to(device), build_discriminator().to(device)]
    optimizers = [Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)) for model in models]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level=opt_level, num_losses=3, verbosity=0
    )
    generator, discriminator = models
    generator_optimizer, discriminator_optimizer = optimizers

    first_distance = distance(generator, images)
    for _ in range(epochs):
        losses = []
        for real_images in images[torch.randperm(len(images))].split(BATCH):
            fake_images = generator(torch.randn(len(real_images), LATENT, device=device))
            losses += [
                discriminator_step(
                    discriminator, discriminator_optimizer, real_images, fake_images
                ),
                generator_step(discriminator, generator_optimizer, fake_images),
            ]
    mean_losses = torch.stack(losses).view(-1, 2).mean(0).tolist()
    return Result(
        generator, discriminator, *mean_losses, first_distance, distance(generator, images)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is one, else cpu")
    args = parser.parse_args()
    result = train(args.opt_level, epochs=args.epochs, seed=args.seed, device=args.device)
    print(f"{args.opt_level}: discriminator loss {result.discriminator_loss:.4f}", end=", ")
    print(f"generator loss {result.generator_loss:.4f}", end=", ")
    print(f"distance {result.first_distance:.4f} -> {result.final_distance:.4f}")


if __name__ == "__main__":
    main()
