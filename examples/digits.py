"""Train a small convolutional network on scikit-learn's 1,797 handwritten digits.

The script is an ordinary training script with three lines of amp_patch in it; they are marked.
It runs on the GPU when there is one:

    python examples/digits.py --opt-level O1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from amp_patch import amp  # <- 1

TEST_IMAGES = 597
BATCH = 60


@dataclass(frozen=True)
class Result:
    """What a training run ends with; the losses are means over all training images."""

    model: nn.Module
    optimizer: Optimizer
    first_loss: float
    final_loss: float
    accuracy: float
    """Share of the test images whose digit is recognised, in percent."""


class DigitNet(nn.Module):
    """Two convolutions with batch norm, then a linear layer: (N, 1, 8, 8) to (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        hidden = F.max_pool2d(F.relu(self.norm2(self.conv2(hidden))), 2)
        return self.head(hidden.flatten(1))


def load_images(device: str) -> tuple[Tensor, Tensor]:
    """Return the images, (1797, 1, 8, 8) in [0, 1], and their digits, in an order mixed once."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order].to(device), torch.tensor(data.target)[order].to(device)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, digits: Tensor) -> tuple[float, float]:
    """Return the mean loss and the accuracy in percent."""
    model.eval()
    logits = model(images)
    model.train()
    correct = (logits.argmax(1) == digits).float().mean()
    return F.cross_entropy(logits, digits).item(), 100 * correct.item()


def train(
    opt_level: str,
    *,
    epochs: int = 12,
    seed: int = 0,
    device: str | None = None,
    on_progress: Callable[[float], object] = lambda share_done: None,
) -> Result:
    """Train from scratch at ``opt_level`` and measure the model at the start and at the end.

    ``on_progress`` is called after each epoch with the share of the work that is done, 0 to 1.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    images, digits = load_images(device)
    test_images, test_digits = images[:TEST_IMAGES], digits[:TEST_IMAGES]
    images, digits = images[TEST_IMAGES:], digits[TEST_IMAGES:]

    model = DigitNet().to(device)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-2)
    model, optimizer = amp.initialize(  # <- 2
        model, optimizer, opt_level=opt_level, verbosity=0
    )
    schedule = CosineAnnealingLR(optimizer, epochs)

    first_loss, _ = evaluate(model, images, digits)
    for epoch in range(epochs):
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(model(images[batch]), digits[batch])
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:  # <- 3
                scaled_loss.backward()
            optimizer.step()
        schedule.step()
        on_progress((epoch + 1) / epochs)
    final_loss, _ = evaluate(model, images, digits)
    _, accuracy = evaluate(model, test_images, test_digits)
    return Result(model, optimizer, first_loss, final_loss, accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is one, else cpu")
    args = parser.parse_args()
    # The model is so small that a second thread costs more time than it saves.
    torch.set_num_threads(1)
    result = train(args.opt_level, epochs=args.epochs, seed=args.seed, device=args.device)
    print(f"{args.opt_level}: training loss {result.first_loss:.4f} -> {result.final_loss:.4f}")
    print(f"{args.opt_level}: test accuracy {result.accuracy:.2f} %")


if __name__ == "__main__":
    main()
