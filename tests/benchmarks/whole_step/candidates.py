"""What is compared: a training step in fp32, by torch's autocast, and by amp_patch at each level.

All step AdamW and clip to the same norm. Here is also how a step is captured in a CUDA graph, by
torch and by amp_patch. Knows no model, and measures nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from benchmarks.whole_step.models import Workload
from torch import Tensor, nn

from amp_patch import amp, cuda_graph

Step = Callable[[], Tensor]
"""Makes a training step; returns its loss, without the graph that leads to it."""

MODES = ("eager", "graphed", "compiled")
MAX_NORM = 1.0
#: Ordinary steps on the stream that is captured afterwards: the least that `cuda_graph` takes.
WARM_UP = 2


class Candidate(NamedTuple):
    """A way of training.

    Attributes:
        half: the dtype of `torch.autocast`; None without.
        opt_level: of amp_patch; None without.
        fused: whether the optimizer is torch's fused one.
        fused_step: amp_patch's option.
        tf32: whether fp32 products are made in TF32, which they are nowhere else.
    """

    half: torch.dtype | None = None
    opt_level: str | None = None
    fused: bool = False
    fused_step: bool = False
    tf32: bool = False


BASELINE, FUSED_BASELINE = "autocast + GradScaler", "autocast + GradScaler fused"
#: What tells most first.
CANDIDATES: dict[str, Candidate] = {
    BASELINE: Candidate(half=torch.float16),
    "O2": Candidate(opt_level="O2"),
    "O2 fused_step": Candidate(opt_level="O2", fused_step=True),
    "O5": Candidate(opt_level="O5"),
    "O5 fused_step": Candidate(opt_level="O5", fused_step=True),
    FUSED_BASELINE: Candidate(half=torch.float16, fused=True),
    "O1": Candidate(opt_level="O1"),
    "autocast bf16": Candidate(half=torch.bfloat16),
    "O4": Candidate(opt_level="O4"),
    "O2, AdamW fused": Candidate(opt_level="O2", fused=True),
    "O1, AdamW fused": Candidate(opt_level="O1", fused=True),
    "TF32": Candidate(tf32=True),
    "fp32": Candidate(),
    "O3": Candidate(opt_level="O3"),
    "O0": Candidate(opt_level="O0"),
}
#: (mode, candidate) -> why it is not tried.
IMPOSSIBLE = {
    ("graphed", BASELINE): "cannot be captured: GradScaler.step() waits for the gradients' flags "
    f"where the optimizer is not fused; see {FUSED_BASELINE}",
}


def optimizer_options(candidate: Candidate, mode: str) -> dict[str, bool | float]:
    """Return the options of AdamW: torch's defaults, unless another is named or needed."""
    # 1e-8 is 0 in the float16 of O3's weights, of which a gradient of 0 makes NaN
    options: dict[str, bool | float] = {"eps": 1e-4} if candidate.opt_level == "O3" else {}
    if mode == "graphed" and not candidate.fused_step:
        return {**options, "fused": True, "capturable": True}
    return {**options, "fused": True} if candidate.fused else options


@contextlib.contextmanager
def stepping(
    candidate: Candidate, workload: Workload, mode: str, backend: str = "inductor"
) -> Iterator[Step]:
    """Give what makes a step of a workload, whose model is trained by it.

    Args:
        candidate: what trains.
        workload: on the device.
        mode: of `MODES`; who wants "graphed" captures the step himself.
        backend: what compiles where the mode is "compiled".
    """
    model = workload.model
    options: dict[str, Any] = optimizer_options(candidate, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, **options)
    with tf32(candidate.tf32):
        if candidate.opt_level is None:
            called = torch.compile(model, backend=backend) if mode == "compiled" else model
            yield torch_step(candidate.half, workload, called, optimizer)
            return
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=candidate.opt_level,
            fused_step=candidate.fused_step,
            verbosity=0,
        )
        try:
            called = torch.compile(model, backend=backend) if mode == "compiled" else model
            yield amp_step(workload, called, optimizer)
        finally:
            amp.deactivate()


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Have products and convolutions in fp32 made in TF32, or really in fp32."""
    before, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn
    # as a block, for torch's own test tools let nobody set cuDNN's flags otherwise
    flags = cudnn.flags(
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.benchmark_limit,
        cudnn.deterministic,
        allow_tf32=allowed,
    )
    try:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        with flags:
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def torch_step(
    half: torch.dtype | None, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Step:
    """Return torch's own step: with autocast, if there is a dtype, and a scaler for float16."""
    params = list(workload.model.parameters())
    device = params[0].device.type
    scaler = torch.amp.GradScaler(device, enabled=half is torch.float16)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, half or torch.float16, enabled=half is not None):
            loss = workload.loss(model, workload.batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def amp_step(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the same with amp_patch, at whatever level."""

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = workload.loss(model, workload.batch)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        return loss.detach()

    return step


def captured(candidate: Candidate, step: Step) -> Step:
    """Capture a step in a CUDA graph, after `WARM_UP` ordinary ones; return what replays it."""
    if candidate.opt_level is not None:
        return cuda_graph.capture(step, warm_up=WARM_UP).replay
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=None, stream=stream):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay
