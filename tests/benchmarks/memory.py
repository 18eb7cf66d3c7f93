"""Measures the memory of a step at each level against torch's own: bytes of tensors alive at once.

    python tests/benchmarks/memory.py
    python tests/benchmarks/memory.py --out FILE
    python tests/benchmarks/memory.py --micro-batches 4

The peak over one step, weights, optimizer state, gradients and activations together. The counts are
exact, and those of a GPU would be the same; what an operator takes for itself is not among them.
O1 and O4 run norms in fp32, as autocast does on a GPU; "by the CPU's list" they leave them in half,
as autocast does on a CPU. Its casts "by CUDA's list" are those it makes on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import host_steps, report
from benchmarks.host_models import Block, HostModel, regression
from benchmarks.host_rows import step_of

from amp_patch.tools.sweep.memory import LivingTensors

#: What is measured, against what.
RATIOS = (
    ("O1", "autocast fp16"),
    ("O1", "autocast fp16 by CUDA's list"),
    ("O1 by the CPU's list", "autocast fp16"),
    ("O2", "autocast fp16"),
    ("O2 fused_step", "autocast fp16"),
    ("O4", "autocast bf16"),
    ("O5", "autocast bf16"),
    ("O5 fused_step", "autocast bf16"),
)


def linears() -> HostModel:
    layers = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return regression(nn.Sequential(*layers), torch.randn(64, 1024), torch.randn(64, 1024))


def transformer() -> HostModel:
    blocks = nn.Sequential(*[Block(256, 4) for _ in range(4)])
    return regression(blocks, torch.randn(8, 64, 256), torch.randn(8, 64, 256))


def convolutions() -> HostModel:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return regression(nn.Sequential(*layers), torch.randn(8, 3, 32, 32), torch.randn(8, 32, 32, 32))


class Attention(nn.Module):
    """Four layers of self-attention and their sum with what they get."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        layers = [nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(4)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def attention() -> HostModel:
    return regression(Attention(), torch.randn(4, 64, 256), torch.randn(4, 64, 256))


def group_norms() -> HostModel:
    def half_size(inside: int, outside: int) -> list[nn.Module]:
        conv = nn.Conv2d(inside, outside, 3, stride=2, padding=1)
        return [conv, nn.GroupNorm(8, outside), nn.SiLU()]

    up = [nn.ConvTranspose2d(128, 64, 2, stride=2), nn.SiLU(), nn.ConvTranspose2d(64, 16, 2, 2)]
    model = nn.Sequential(*half_size(16, 64), *half_size(64, 128), *up)
    return regression(model, torch.randn(4, 16, 32, 32), torch.randn(4, 16, 32, 32))


MODELS: dict[str, Callable[[], HostModel]] = {
    "12 linear layers, 1,024 wide, batch 64": linears,
    "4 transformer blocks, 256 wide, batch 8 x 64": transformer,
    "7 convolutions, 32 channels, batch 8 x 32 x 32": convolutions,
    "4 layers of attention, 256 wide, batch 4 x 64": attention,
    "4 convolutions with group norm, to 128 channels, batch 4 x 32 x 32": group_norms,
}


def peak(
    name: str,
    make: Callable[[], HostModel],
    batches: host_steps.Batches = host_steps.ONE_BATCH,
) -> int:
    """Return the most bytes alive at once in a step, after some others."""
    name, is_cudas, _ = name.partition(" by CUDA's list")
    by_list = host_steps.list_of_cuda() if is_cudas else contextlib.nullcontext()
    with by_list, step_of(name, make, lambda model: model, batches=batches) as step:
        for _ in range(3):
            step()
        with LivingTensors() as living:
            step()
    return living.peak


def measure(batches: host_steps.Batches) -> dict[str, dict[str, int]]:
    """Return model -> what is measured -> bytes."""
    names = dict.fromkeys(name for pair in RATIOS for name in pair)
    return {
        model: {name: peak(name, make, batches) for name in names} for model, make in MODELS.items()
    }


def as_table(measured: dict[str, dict[str, int]]) -> Table:
    table = Table("peak", "autocast fp16", *(f"{ours} / {theirs}" for ours, theirs in RATIOS))
    for model, found in measured.items():
        cells = [f"{found[ours] / found[theirs]:.2f}" for ours, theirs in RATIOS]
        table.add_row(model, f"{found['autocast fp16'] / 2**20:.1f} MiB", *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    host_steps.add_batches(parser)
    args = parser.parse_args()
    measured = measure(host_steps.Batches(args.micro_batches, args.unscale_each))
    Console(width=160).print(as_table(measured))
    if args.out is not None:
        result = {"machine": report.machine(), "bytes": measured}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
