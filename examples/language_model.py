"""Train a small causal transformer on the source code of Python's standard library.

The text is on every machine that can run the script; the model predicts its next character:

    python examples/language_model.py --opt-level O2

At O3 it does not train: Adam's epsilon of 1e-8 is 0 in float16, so that 0 / 0 gives NaN.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from amp_patch import amp  # <- 1

SOURCES = ("argparse", "ast", "difflib", "inspect", "optparse", "tarfile", "threading", "typing")
VOCABULARY = 128
CONTEXT = 32
BATCH = 8


@dataclass(frozen=True)
class Result:
    """What a training run ends with; the losses are in nats per character of unseen text."""

    model: nn.Module
    optimizer: Optimizer
    first_loss: float
    final_loss: float
    accuracy: float
    """Share of the next characters of unseen text that are guessed, in percent."""


class Block(nn.Module):
    """Causal self-attention, then a feed-forward net, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.out(self.attend(self.norm1(hidden)))
        return hidden + self.feed_forward(self.norm2(hidden))

    def attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class LanguageModel(nn.Module):
    """Characters (N, T) to logits of the next ones (N, T, 128)."""

    def __init__(self, width: int = 32, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.characters(text) + self.positions(places)
        return self.head(self.norm(self.blocks(hidden)))


def load_text(device: str) -> Tensor:
    """Return the sources of some modules of the standard library as one vector of ASCII codes."""
    text = "".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES)
    codes = bytearray(text.encode("ascii", errors="ignore"))
    return torch.frombuffer(codes, dtype=torch.uint8).long().to(device)


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the characters after each start, (N, CONTEXT), and for each the one that follows."""
    index = starts[:, None] + torch.arange(CONTEXT + 1)
    chosen = text[index.to(text.device)]
    return chosen[:, :-1], chosen[:, 1:]


def next_character_loss(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> tuple[float, float]:
    """Return the mean loss in nats and the accuracy in percent on 128 windows of ``text``."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 128).long()
    characters, following = windows(text, starts)
    logits = model(characters)
    correct = (logits.argmax(-1) == following).float().mean()
    return next_character_loss(logits, following).item(), 100 * correct.item()


def train(
    opt_level: str,
    *,
    steps: int = 800,
    seed: int = 0,
    device: str | None = None,
    on_progress: Callable[[float], object] = lambda share_done: None,
) -> Result:
    """Train from scratch at ``opt_level`` and measure the model at the start and at the end.

    ``on_progress`` is called after each step with the share of the work that is done, 0 to 1.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    text = load_text(device)
    text, unseen_text = text.tensor_split([int(0.9 * len(text))])

    model = LanguageModel().to(device)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(  # <- 2
        model, optimizer, opt_level=opt_level, verbosity=0
    )
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)

    first_loss, _ = evaluate(model, unseen_text)
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))
        characters, following = windows(text, starts)
        loss = next_character_loss(model(characters), following)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # <- 3
            scaled_loss.backward()
        optimizer.step()
        schedule.step()
        on_progress((step + 1) / steps)
    final_loss, accuracy = evaluate(model, unseen_text)
    return Result(model, optimizer, first_loss, final_loss, accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is one, else cpu")
    args = parser.parse_args()
    result = train(args.opt_level, steps=args.steps, seed=args.seed, device=args.device)
    print(f"{args.opt_level}: loss {result.first_loss:.4f} -> {result.final_loss:.4f}", end=", ")
    print(f"perplexity {math.exp(result.final_loss):.2f} on unseen text")


if __name__ == "__main__":
    main()
