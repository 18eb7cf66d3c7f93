"""Measures what the profile "fast-norms" costs in accuracy and saves in casts and memory.

    python tests/benchmarks/norms.py
    python tests/benchmarks/norms.py --quick
    python tests/benchmarks/norms.py --out FILE

On the CPU. What CUDA's kernels do is computed by their arithmetic: in float32, from weights that
are rounded to half, with one rounding of the result and of each gradient.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, variance
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import casts, report
from bert_shape import MaskedLanguageModel
from casting_support import HALVES, half_kernels_as_on_cuda

from amp_patch import amp
from amp_patch.casting import rules
from amp_patch.session import session
from examples import language_model

PROFILE = "fast-norms"
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
CHANNELS = 16
#: Functions of an input (rows, columns), and a weight and a bias for each of its columns.
FUNCTIONS: dict[str, Function] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, x.shape[1:], w, 1e-6),
    "group_norm": lambda x, w, b: F.group_norm(
        x.unflatten(1, (CHANNELS, -1)), 4, w[:CHANNELS], b[:CHANNELS]
    ).flatten(1),
    "softmax": lambda x, w, b: F.softmax(x, -1),
}
#: Rows, columns, mean and deviation of an input.
INPUTS = (
    (256, 64, 0.0, 1.0),
    (16, 4096, 0.0, 1.0),
    (64, 768, 0.0, 1e-3),
    (64, 768, 0.0, 10.0),
    (64, 768, 10.0, 1.0),
    (64, 768, 100.0, 1.0),
    (4096, 64, 0.0, 1.0),
)
QUANTITIES = ("result", "gradient of the input", "gradient of the weight")
WAYS = ("without", PROFILE, "as on CUDA")
HALF = [str(dtype).removeprefix("torch.") for dtype in HALVES.values()]
SEEDS = tuple(range(8))


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@contextlib.contextmanager
def initialized(level: str, given: Any = None) -> Iterator[None]:
    model = amp.initialize(nn.Linear(1, 1), opt_level=level, rules=given, verbosity=0)
    yield
    amp.deactivate()
    del model


def in_half(function: Function, dtype: torch.dtype) -> Function:
    """Return a function whose result is rounded to half, as the next layer does it if need be."""
    return lambda x, w, b: function(x, w, b).to(dtype)


def as_on_cuda(name: str, dtype: torch.dtype) -> Function:
    """Return a function that rounds where CUDA's kernel for what the profile gives it does."""
    function = FUNCTIONS[name]
    if "cpu" in rules.ROUNDED_ONCE.get(name, ()):
        return function  # the CPU's kernel does the same
    if name not in rules.ROUNDED_ONCE:
        return lambda x, w, b: function(x.float(), w, b).to(dtype)
    return lambda x, w, b: function(x.float(), w.to(dtype).float(), b.to(dtype).float()).to(dtype)


def with_gradients(function: Function, gradient: Tensor, *arguments: Tensor) -> list[Tensor]:
    """Return a result, and the gradients of the input and of what it depends on of the rest."""
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    result = function(*leaves)
    result.backward(gradient)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def errors_of(name: str, level: str) -> dict[str, list[float]]:
    """Return way -> the largest distance from float64 over all inputs, of each quantity."""
    dtype, function = HALVES[level], FUNCTIONS[name]
    worst = {way: [0.0] * len(QUANTITIES) for way in WAYS}
    for number, (rows, columns, center, deviation) in enumerate(INPUTS):
        torch.manual_seed(number)
        x = (center + deviation * torch.randn(rows, columns)).to(dtype)
        weight, bias = 1 + torch.randn(columns) / 4, torch.randn(columns) / 4
        gradient = torch.randn(rows, columns).to(dtype)
        exact = with_gradients(function, *(one.double() for one in (gradient, x, weight, bias)))
        found = {WAYS[2]: with_gradients(as_on_cuda(name, dtype), gradient, x, weight, bias)}
        for way, given in ((WAYS[0], None), (WAYS[1], PROFILE)):
            with initialized(level, given):
                call = in_half(function, dtype)
                found[way] = with_gradients(call, gradient, x, weight, bias)
        for way, quantities in found.items():
            new = list(map(distance, quantities, exact))[: len(QUANTITIES)]
            worst[way] = [max(pair) for pair in zip(worst[way], new, strict=False)]
    return worst


def measure_errors() -> dict[str, dict[str, dict[str, float]]]:
    """Return function and quantity -> half dtype -> way -> error."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name in FUNCTIONS:
        for level, half in zip(HALVES, HALF, strict=True):
            for way, found in errors_of(name, level).items():
                for quantity, error in zip(QUANTITIES, found, strict=False):
                    row = rows.setdefault(f"{name}, {quantity}", {})
                    row.setdefault(half, {})[way] = error
    return rows


# -- what the profile leaves out, and how far that is from float64 -------------------------------


def rounded_input(level: str) -> tuple[float, float]:
    """A float32 input that is cast before a layer norm, as the rule "half" does it."""
    torch.manual_seed(0)
    x = 100 + torch.randn(64, 768)
    exact, found = F.layer_norm(x.double(), (768,)), []
    for given in ({"layer_norm": "half"}, PROFILE):
        with initialized(level, given):
            found.append(distance(F.layer_norm(x, (768,)), exact))
    return found[0], found[1]


def half_kernel(name: str, rows: int, center: float, level: str) -> tuple[float, float]:
    """The gradients of weight and bias by the CPU's kernel for half tensors: the larger error."""
    torch.manual_seed(0)
    dtype, function = HALVES[level], FUNCTIONS[name]
    x, gradient = (
        (center + torch.randn(rows, 64)).to(dtype),
        (0.5 + torch.randn(rows, 64)).to(dtype),
    )
    arguments = gradient, x, 1 + torch.randn(64) / 4, torch.randn(64) / 4
    exact = with_gradients(function, *(one.double() for one in arguments))
    found = [with_gradients(function, *(one.to(dtype) for one in arguments))]
    with initialized(level, PROFILE):
        found.append(with_gradients(function, *arguments))
    left_out, kept = (max(map(distance, one[2:], exact[2:])) for one in found)
    return left_out, kept


def token_loss(level: str) -> tuple[float, float]:
    """The largest error of a token's loss, in nats, from a half log_softmax over 32,000 words."""
    torch.manual_seed(0)
    logits, truth = torch.randn(256, 32000).to(HALVES[level]), torch.randint(32000, (256,))
    exact = F.nll_loss(F.log_softmax(logits.double(), -1), truth, reduction="none")
    found = []
    for given in ({"log_softmax": "half"}, PROFILE):
        with initialized(level, given):
            found.append(F.nll_loss(F.log_softmax(logits, -1), truth, reduction="none"))
    left_out, kept = (float((one.double() - exact).abs().max()) for one in found)
    return left_out, kept


LEFT_OUT: dict[str, Callable[[str], tuple[float, float]]] = {
    "a float32 input of mean 100 rounded before layer_norm: result": rounded_input,
    "the CPU's half kernel of layer_norm, 16,384 rows: gradients of weight and bias": (
        lambda level: half_kernel("layer_norm", 16384, 0.0, level)
    ),
    "a half kernel of group_norm, mean 100: gradients of weight and bias": (
        lambda level: half_kernel("group_norm", 64, 100.0, level)
    ),
    "log_softmax in half, of 32,000: a token's loss, in nats": token_loss,
}


def measure_left_out() -> dict[str, dict[str, list[float]]]:
    """Return what is left out -> half dtype -> its error, and that of the profile."""
    return {
        what: {half: list(measured(level)) for level, half in zip(HALVES, HALF, strict=True)}
        for what, measured in LEFT_OUT.items()
    }


# -- training ------------------------------------------------------------------------------------


class NormBehind(language_model.Block):
    """The block with its norms after the sums, as BERT has them, and a softmax of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm1(hidden + self.out(self.attend(hidden)))
        return self.norm2(hidden + self.feed_forward(hidden))

    def attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ value
        return mixed.transpose(1, 2).flatten(2)


BLOCKS = {"norms before the layers": language_model.Block, "norms after the sums": NormBehind}


def final_loss(block: type[nn.Module], level: str, given: str, seed: int, steps: int) -> float:
    """Train the language model of the examples with these blocks; return its loss at the end."""
    with (
        mock.patch.object(language_model, "Block", block),
        mock.patch.dict(os.environ, {"AMP_PATCH_RULES": given}),
    ):
        result = language_model.train(level, steps=steps, seed=seed, device="cpu")
    amp.deactivate()
    return result.final_loss


def measure_losses(steps: int, seeds: tuple[int, ...]) -> dict[str, dict[str, list[float]]]:
    """Return model -> setting -> final losses by seed; half kernels are those of the CPU."""
    ways = (("", "", False), (f" {PROFILE}", PROFILE, False), (" half kernels", PROFILE, True))
    settings = [("O0", "O0", "", False)]
    settings += [(level + name, level, *way) for level in HALVES for name, *way in ways]
    found: dict[str, dict[str, list[float]]] = {}
    for model, block in BLOCKS.items():
        found[model] = {}
        for setting, level, given, on_cuda in settings:
            with half_kernels_as_on_cuda() if on_cuda else contextlib.nullcontext():
                losses = [final_loss(block, level, given, seed, steps) for seed in seeds]
            found[model][setting] = losses
    return found


# -- casts and memory ----------------------------------------------------------------------------


def kept_for_backward(given: str | None) -> int:
    """Return the bytes of the activations that two layers of BERT's shape keep for the backward."""
    torch.manual_seed(0)
    model = MaskedLanguageModel(layers=2, width=256, heads=4, vocabulary=512)
    amp.initialize(model, opt_level="O1", rules=given, verbosity=0)
    tokens, storages = torch.randint(512, (4, 128)), {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor.detach()  # an output that is kept as it is would hold its own graph

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, tokens)
    for tensor in (*model.parameters(), *session.cache.casts()):
        storages.pop(tensor.untyped_storage()._cdata, None)
    total = sum(storage.nbytes() for storage in storages.values())
    del loss
    amp.deactivate()
    return total


def measure_savings() -> dict[str, dict[str, int]]:
    """Return way -> casts of a step of BERT's shape at O1, and bytes kept for the backward."""
    found = {}
    for way, given, on_cuda in zip(
        WAYS, (None, PROFILE, PROFILE), (False, False, True), strict=True
    ):
        with half_kernels_as_on_cuda() if on_cuda else contextlib.nullcontext():
            (counted,) = casts.amp_casts(rules=given)
            found[way] = {"casts": counted.total, "bytes": kept_for_backward(given)}
    return found


def tables(measured: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return each part of the result as lines of cells, the heading first."""
    errors, left_out = measured["errors"], measured["left out"]
    losses, savings = measured["losses"], measured["savings"]
    return {
        "errors": [
            ["distance from float64", *(f"{half}, {way}" for half in HALF for way in WAYS)],
            *(
                [row, *(f"{found[half][way]:.1e}" for half in HALF for way in WAYS)]
                for row, found in errors.items()
            ),
        ],
        "left-out": [
            ["left out", *(f"{half}, {way}" for half in HALF for way in ("if done", PROFILE))],
            *(
                [row, *(f"{error:.1e}" for half in HALF for error in found[half])]
                for row, found in left_out.items()
            ),
        ],
        "losses": [
            ["final loss", *next(iter(losses.values()))],
            *([row, *map(_mean, found.values())] for row, found in losses.items()),
        ],
        "savings": [
            ["a step of BERT's shape at O1", "casts", "kept for the backward"],
            *(
                [row, str(found["casts"]), f"{found['bytes'] / 2**20:.1f} MiB"]
                for row, found in savings.items()
            ),
        ],
    }


def _mean(losses: list[float]) -> str:
    """Return the mean over seeds, and its standard error."""
    return f"{mean(losses):.3f} ± {(variance(losses) / len(losses)) ** 0.5:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = {
        "machine": report.machine(),
        "errors": measure_errors(),
        "left out": measure_left_out(),
        "losses": measure_losses(*((2, SEEDS[:2]) if args.quick else (800, SEEDS))),
        "savings": measure_savings(),
    }
    for heading, *lines in tables(measured).values():
        table = Table(*heading)
        for line in lines:
            table.add_row(*line)
        Console(width=200).print(table)
    if args.out is not None:
        args.out.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
