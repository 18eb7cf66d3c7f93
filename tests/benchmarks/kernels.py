"""Measures the kernels on a GPU against torch's own operations and a plain copy of the memory.

    python tests/benchmarks/kernels.py --out FOLDER
    python tests/benchmarks/kernels.py --quick --device cpu

Every operation is timed in one process, on the parameters of three models and on one large tensor:
the bytes it reads and writes, its time, the host's time, the share of a device-to-device copy's
bandwidth and the number of launches. So is the whole phase between backward and the next forward:
unscale, clip, step; and the cross-entropy, on the logits of a language model. What is measured is
written after each list of tensors. The exit code is 1 where a target was missed. On a CPU the
reference runs.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_timing import count_launches, time_calls
from benchmarks.kernel_report import Measured, as_table, below_share, machine, not_faster, save
from benchmarks.model_shapes import MODELS, Shape

from amp_patch import amp, cuda_graph, kernels
from amp_patch.kernels.cuda_optimizers import Factors, KernelStep
from amp_patch.optimizers import FusedLAMB
from amp_patch.optimizers.cached_groups import CachedGroups
from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.optimizers.registry import update_of
from amp_patch.weights.lazy_gradients import LazyGradients

RESULTS = Path(__file__).with_name("results")
LARGE = "one tensor of 2**28 elements"
#: What a loss is computed of that reads a text: 128 sequences of 128 tokens, BERT's vocabulary.
LOGITS = "logits of 16,384 rows and 30,522 classes"
COPY = "copy of fp32"
#: What must be reached on the large tensor, as a share of the copy's bandwidth.
AT_LEAST = {"unscale fp16 to fp32": 0.85, "adamw": 0.85}
# unscale, clip, step: ours in one pass, and torch.amp with GradScaler
PHASE = "phase: ours, one-pass AdamW"
REPLAYED_PHASE = "phase, replayed from a CUDA graph"
FUSED_PHASE = "phase: AdamW(fused=True)"
FOREACH_PHASE = "phase: AdamW(foreach=True)"
#: How many times faster than these the phase must be, with the shapes of this model.
RIVALS = {FUSED_PHASE: 1.8, FOREACH_PHASE: 3.0}
RIVALS_MODEL = "BERT-large"


@dataclass(frozen=True)
class Operation:
    """What is timed, and the bytes per parameter that it reads and writes.

    ``make`` returns what is timed; its tensors go before the next operation is made.
    """

    name: str
    bytes_per_parameter: int
    make: Callable[[], Callable[[], object]]


Lister = Callable[[list[Shape], torch.device], list[Operation]]


def operations(shapes: list[Shape], device: torch.device) -> list[Operation]:
    """List what is measured: ours, and torch's for the same end."""
    simple = [
        Operation(name, count, functools.partial(simple_run, name, shapes, device))
        for name, count in SIMPLE.items()
    ]
    sgd = functools.partial(torch.optim.SGD, lr=1e-9, momentum=0.9)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-9)
    makers: list[tuple[str, int, Callable[[], Callable[[], object]]]] = [
        ("adamw", 28, lambda: one_pass(adamw, shapes, device)),
        ("torch's AdamW(fused=True)", 28, lambda: torch_step(adamw, shapes, device)),
        ("sgd with momentum", 20, lambda: one_pass(sgd, shapes, device)),
        ("torch's SGD(fused=True)", 20, lambda: torch_step(sgd, shapes, device)),
        ("lamb", 40, lambda: one_pass(FusedLAMB, shapes, device)),
        # 2 to check, 28 to step, 2 to see whether somebody wrote to the half weight
        (PHASE, 32, lambda: our_phase(shapes, device)),
        (FUSED_PHASE, 48, lambda: torch_phase(shapes, device, fused=True)),
        (FOREACH_PHASE, 48, lambda: torch_phase(shapes, device, foreach=True)),
    ]
    if device.type == "cuda":
        makers.append((REPLAYED_PHASE, 32, lambda: replayed_phase(shapes, device)))
    return simple + [Operation(*maker) for maker in makers]


def losses(shapes: list[Shape], device: torch.device) -> list[Operation]:
    """List what is measured of logits: forward and backward, ours and torch's.

    Ours reads them twice and writes their gradient. Torch's log_softmax, and the backward of it and
    of nll_loss, read or write an element six times; the casts of half logits are beside that.
    """
    rows: list[tuple[str, int, torch.dtype, LossOf]] = [
        ("cross entropy fp16", 6, torch.float16, our_loss),
        ("torch's cross entropy of fp16.float()", 36, torch.float16, torch_loss),
        ("cross entropy fp32", 12, torch.float32, our_loss),
        ("torch's cross entropy fp32", 24, torch.float32, torch_loss),
    ]
    return [
        Operation(name, count, functools.partial(loss_and_gradient, shapes, device, dtype, loss_of))
        for name, count, dtype, loss_of in rows
    ]


LossOf = Callable[[Tensor, Tensor], Tensor]


def our_loss(logits: Tensor, targets: Tensor) -> Tensor:
    loss = kernels.cross_entropy(logits, targets, -100, "mean")
    return torch_loss(logits, targets) if loss is None else loss


def torch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), targets)


def loss_and_gradient(
    shapes: list[Shape], device: torch.device, dtype: torch.dtype, loss_of: LossOf
) -> Callable[[], object]:
    """Return what computes the loss of logits and their gradient."""
    (shape,) = shapes
    logits = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(shape[1], shape[:1], device=device)
    return lambda: torch.autograd.grad(loss_of(logits, targets), logits)


#: Bytes per parameter.
SIMPLE = {
    COPY: 8,
    "unscale fp16 to fp32": 6,
    "unscale fp32 in place": 8,
    "torch's unscale fp32 in place": 8,
    "accumulate fp32": 12,
    "torch's _foreach_add_": 12,
    "cast fp32 to fp16": 6,
    "torch's _foreach_copy_": 6,
    "reconcile": 6,
    "clip by norm": 12,
    "torch's clip_grad_norm_": 12,
}


def simple_run(name: str, shapes: list[Shape], device: torch.device) -> Callable[[], object]:
    """Build the lists of tensors, and return what does an operation of `SIMPLE` on them."""
    masters = [torch.randn(shape, device=device) for shape in shapes]
    halves = [master.half() for master in masters]
    grads = [torch.full_like(half, 1e-4) for half in halves]
    received = [torch.zeros_like(master) for master in masters]
    scale, inverse = torch.ones(1, device=device), torch.ones(1, device=device)
    comparison = kernels.comparison(masters, halves)
    runs: list[Callable[[], object]] = [
        lambda: copy_each(received, masters),
        functools.partial(kernels.unscaler(grads, received).run, grads, received, scale),
        functools.partial(kernels.unscaler(received, received).run, received, received, scale),
        lambda: torch_unscale(received, inverse),
        lambda: kernels.accumulate(received, masters),
        lambda: torch._foreach_add_(received, masters),
        kernels.caster(masters, halves).run,
        lambda: torch._foreach_copy_(halves, masters),
        lambda: comparison.reconcile(lambda: [True] * len(masters)),
        lambda: kernels.clip_by_norm(received, 1.0, 2.0),
        torch_clip(masters, received),
    ]
    return dict(zip(SIMPLE, runs, strict=True))[name]


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def torch_unscale(grads: list[Tensor], inverse: Tensor) -> None:
    found_inf = torch.zeros_like(inverse)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)


def torch_clip(masters: list[Tensor], grads: list[Tensor]) -> Callable[[], Tensor]:
    params = parameters(masters, grads)
    return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)


def torch_step(
    make: Callable[..., torch.optim.Optimizer], shapes: list[Shape], device: torch.device
) -> Callable[[], object]:
    return make(new_parameters(shapes, device), fused=True).step


def one_pass(
    make: Callable[..., torch.optim.Optimizer], shapes: list[Shape], device: torch.device
) -> Callable[[], object]:
    """Return a step from half gradients to half weights; on a CPU the reference's, in fp32."""
    params = new_parameters(shapes, device)
    optimizer = make(params)
    update_type = update_of(optimizer)
    if not kernels.are_used((update_type.kernels.source,), params):
        return functools.partial(FusedStep(optimizer, LazyGradients(), None).run, optimizer, None)
    cached = CachedGroups(update_type)
    cached.look_up(optimizer)
    weights = [param.detach().half() for param in params]
    grads = [torch.full_like(weight, 1e-4) for weight in weights]
    inputs = cached.groups[0].inputs(optimizer, optimizer.param_groups[0], grads)
    rows = cached.groups[0].update.kernel_rows(inputs, weights)
    step, scale = KernelStep(update_type.kernels), torch.ones(1, device=device)
    step.take([rows])
    # what holds the state and its counters must live as long as the step
    return lambda: (step.step(Factors(scale, None), None), cached)


def our_phase(shapes: list[Shape], device: torch.device) -> Callable[[], object]:
    """Return all that is done after a backward pass at O2, whose half gradients are there."""
    model = torch.nn.ParameterList(torch.randn(shape, device=device) for shape in shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", fused_step=True, verbosity=0
    )
    params = list(model.parameters())
    grads = [torch.full_like(param, 1e-4) for param in params]
    loss = torch.ones((), device=device)

    def run() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    return run


def replayed_phase(shapes: list[Shape], device: torch.device) -> Callable[[], object]:
    """Return our phase without Python in it."""
    phase = our_phase(shapes, device)
    captured = cuda_graph.capture(phase)
    return lambda: (captured.replay(), phase)  # the model must live as long as its graph


def torch_phase(shapes: list[Shape], device: torch.device, **options: bool) -> Callable[[], object]:
    """Return the same of torch.amp: the gradients are of fp32."""
    params = new_parameters(shapes, device)
    optimizer = torch.optim.AdamW(params, lr=1e-9, **options)
    scaler, loss = torch.amp.GradScaler(device.type), torch.ones((), device=device)

    def run() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return run


def new_parameters(shapes: list[Shape], device: torch.device) -> list[torch.nn.Parameter]:
    masters = [torch.randn(shape, device=device) for shape in shapes]
    return parameters(masters, [torch.full_like(master, 1e-4) for master in masters])


def parameters(masters: list[Tensor], grads: list[Tensor]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(master) for master in masters]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def measure(
    shapes: list[Shape], device: torch.device, repeats: int, listed: Lister = operations
) -> list[Measured]:
    """Time every listed operation on tensors of these shapes."""
    count = sum(map(math.prod, shapes))
    copy_time = copy_milliseconds(count, device, repeats)
    rows = []
    for operation in listed(shapes, device):
        run = operation.make()
        times = time_calls(run, device, repeats)
        megabytes = operation.bytes_per_parameter * count / 1e6
        share = copy_time * operation.bytes_per_parameter / 8 / times.device
        number = count_launches(run, device)
        rows.append(Measured(operation.name, megabytes, times.device, times.host, share, number))
        del run
        if operation.name in (PHASE, REPLAYED_PHASE):
            amp.deactivate()
    return rows


def copy_milliseconds(count: int, device: torch.device, repeats: int) -> float:
    """Time the copy that all are compared with: as many elements, in one tensor."""
    one, other = (torch.empty(count, device=device) for _ in range(2))
    return time_calls(lambda: other.copy_(one), device, repeats).device


def lists_of_shapes(quick: bool) -> dict[str, list[Shape]]:
    """Return what is measured, first what has targets."""
    names = sorted(MODELS, key=lambda name: name != RIVALS_MODEL)
    shapes = {LARGE: [(2**28,)]} | {name: MODELS[name]() for name in names}
    shapes |= {LOGITS: [(16_384, 30_522)]}
    if quick:
        return {name: [(2,) * len(one) for one in some[:20]] for name, some in shapes.items()}
    return shapes


def missed_targets(measured: Mapping[str, list[Measured]]) -> list[str]:
    """Name the targets that were missed, as far as their lists were measured."""
    slow = below_share(measured.get(LARGE, []), AT_LEAST)
    if RIVALS_MODEL in measured:
        slow += not_faster(measured[RIVALS_MODEL], PHASE, RIVALS)
    return slow


def main() -> int:
    """Measure, show and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--out", default=RESULTS, type=Path, help="the folder to write to")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, nothing is written")
    args = parser.parse_args()
    if args.device.type == "cuda":
        os.environ["AMP_PATCH_KERNELS"] = "cupy"  # else a failure would have torch measured
    about = machine(args.device)
    print(", ".join(about.values()), flush=True)
    measured: dict[str, list[Measured]] = {}
    missed: list[str] = []
    for name, shapes in lists_of_shapes(args.quick).items():
        listed = losses if name == LOGITS else operations
        measured[name] = measure(shapes, args.device, 2 if args.quick else 30, listed)
        print(f"\n{name}: {len(shapes)} tensors\n{as_table(measured[name])}", flush=True)
        if not args.quick:
            missed = missed_targets(measured)
            print(f"written: {save(args.out, about, measured, missed).name}", flush=True)
    for line in missed:
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
