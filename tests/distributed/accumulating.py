"""Accumulation over micro-batches, of which each rank shares its gradients in the last alone."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import rank_training as training
import torch
from torch import Tensor, distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from amp_patch import amp


def train(
    engine: str,
    level: str,
    *,
    delayed: bool,
    synced: bool,
    infs: bool,
    wrapper: dict[str, Any] | None = None,
) -> tuple[list[Tensor], list[float], list[bool]]:
    """Return the parameters, scales and skipped steps of a training by two micro-batches a step.

    Args:
        engine: "ddp", "ddp-first" (before `amp.initialize`) or "fsdp2"; "none": this process alone;
            "replicate": the function of ``torch.distributed._composable``, which has no wrapper;
            "fsdp2-whole": FSDP2 keeps the gathered parameters from one micro-batch to the next;
            "fsdp2-replicas": FSDP2 without ``all_reduce`` until the last micro-batch.
        level: "O1" ...
        delayed: whether the first block of a step has ``delay_unscale``.
        synced: whether its gradients are shared by all ranks, too.
        infs: whether rank 1 overflows in the first micro-batch of step 2, rank 0 in the second one
            of step 4.
        wrapper: options of `DistributedDataParallel`; "compressed": with a communication hook.
    """
    is_alone = engine == "none"
    rank = 0 if is_alone else distributed.get_rank()
    size = 1 if is_alone else distributed.get_world_size()
    model = training.make_model()
    if "fsdp2" in engine:
        names = ("replica", "shard")
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=names) if "rep" in engine else None
        training.sharded(model, mesh)
    optimizer = training.adamw(model.parameters())
    if engine == "ddp-first":
        model = DistributedDataParallel(model)
    scales = training.SCALES if level in training.SCALED else {}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **scales)
    if engine == "ddp":
        options = dict(wrapper or {})
        is_compressed = options.pop("compressed", False)
        model = DistributedDataParallel(model, **options)
        if is_compressed:
            model.register_comm_hook(None, fp16_compress_hook)
    if engine == "replicate":
        replicate(model)
    held, skipped = [], []
    for step in range(7):
        optimizer.zero_grad()
        for part in (0, 1):
            inputs, targets = training.rows(2 * step + part, rank, size)
            planted = infs and {2: (0, 1), 4: (1, 0)}.get(step) in ((part, rank), (part, 1 - rank))
            is_here = planted and (is_alone or {2: 1, 4: 0}[step] == rank)
            with without_sync(engine, model, not synced and part == 0):
                loss = (model(inputs).float() - targets).square().mean() / 2
                with amp.scale_loss(
                    loss, optimizer, delay_unscale=delayed and part == 0
                ) as scaled_loss:
                    (scaled_loss * float("inf") if is_here else scaled_loss).backward()
        optimizer.step()
        held.append(amp.loss_scale())
        skipped.append(amp.step_was_skipped(optimizer))
    params = list(training.whole_params(model).values())
    amp.deactivate()
    return params, held, skipped


def without_sync(engine: str, model: Any, is_local: bool) -> AbstractContextManager[None]:
    """Return a block that leaves gradients on this rank, if ``is_local``, as the engine does."""
    if engine == "fsdp2-whole":
        model.set_reshard_after_backward(not is_local)
    if engine == "fsdp2-replicas":
        model.set_requires_all_reduce(not is_local)
        return nullcontext()
    if engine == "replicate":
        model.set_requires_gradient_sync(not is_local)
    return training.without_sync(model, is_local)


def train_all(engine: str, levels: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Return for each level what the engine trains, and on rank 0 what one process trains.

    With one scale for each step.
    """
    found = {}
    for level in levels:
        infs = level in training.SCALED
        is_first = distributed.get_rank() == 0
        alone = train("none", level, delayed=True, synced=True, infs=infs) if is_first else None
        found[level] = train(engine, level, infs=infs, **options), alone
    return found


def one_parameter(level: str, is_scaled: bool) -> tuple[Tensor, Tensor]:
    """Return the weight that ZeRO trains, which rank 0 alone steps, and that of a plain loop.

    Args:
        level: of `amp.initialize`.
        is_scaled: whether amp scales, and clips in turn with torch; else all is torch's.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(1)
    plain = nn.Linear(7, 3, bias=False)
    model = copy.deepcopy(plain)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.02, eps=1e-3)
    optimizer = training.zero_adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    wrapper = DistributedDataParallel(model)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for part in (0, 1):
            inputs, targets = training.rows(2 * step + part, rank, size)
            with training.without_sync(wrapper, part == 0):
                loss = (wrapper(inputs).float() - targets).square().mean() / 2
                block = amp.scale_loss(loss, optimizer) if is_scaled else nullcontext(loss)
                with block as scaled_loss:
                    scaled_loss.backward()
            inputs, targets = training.rows(2 * step + part, 0, 1)
            ((plain(inputs) - targets).square().mean() / 2).backward()
        if is_scaled and step % 2:
            amp.clip_grad_norm_(optimizer, 0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        reference.step()
    found = model.weight.detach().float().clone(), plain.weight.detach()
    amp.deactivate()
    return found


def two_models(level: str) -> list[tuple[Tensor, Tensor]]:
    """Return weights of two models that FSDP2 shards and one scale multiplies, and of plain ones.

    The scale moves with the gradients of the first, when those of the second wait for the others.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(1)
    plain = [nn.Linear(7, 3), nn.Linear(7, 3)]
    models = [fully_shard(copy.deepcopy(model)) for model in plain]
    references = [torch.optim.SGD(model.parameters(), lr=0.02) for model in plain]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in models]
    scales = {"loss_scale": "dynamic", "init_scale": 8.0, "growth_interval": 1}
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, **scales)
    for step in range(3):
        for part in (0, 1):
            inputs, targets = training.rows(2 * step + part, rank, size)
            for model, optimizer in zip(models, optimizers, strict=True):
                model.set_requires_gradient_sync(part == 1)
                loss = (model(inputs).float() - targets).square().mean() / 2
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            inputs, targets = training.rows(2 * step + part, 0, 1)
            for model in plain:
                ((model(inputs) - targets).square().mean() / 2).backward()
        for optimizer in (*optimizers, *references):
            optimizer.step()
            optimizer.zero_grad()
    sharded = [model.state_dict()["weight"].full_tensor() for model in models]
    found = [(one, other.weight.detach()) for one, other in zip(sharded, plain, strict=True)]
    amp.deactivate()
    return found


def several_forwards(case: str, levels: tuple[str | None, ...]) -> list[list[Tensor]]:
    """Return the parameters that each level trains, by several forwards before a backward.

    Args:
        case: "labels": a forward without gradients, which would share, comes between forward and
            backward of a micro-batch that is local; "labels of rank 0": on that rank alone;
            "reference": one under ``no_sync()`` comes after the one whose backward shares.
        levels: None trains without amp.
    """
    return [_trained_by_several_forwards(case, level) for level in levels]


def _trained_by_several_forwards(case: str, level: str | None) -> list[Tensor]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = training.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if level is not None:
        scales = {"loss_scale": 64.0} if level in training.SCALED else {}
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **scales)
    wrapped = DistributedDataParallel(model)
    for step in range(4):
        optimizer.zero_grad()
        for part in (0, 1):
            inputs, targets = training.rows(2 * step + part, rank, size)
            is_local = part == 0 and case != "reference"
            with training.without_sync(wrapped, is_local):
                loss = (wrapped(inputs).float() - targets).square().mean()
            if case == "labels" or (case == "labels of rank 0" and rank == 0):
                with torch.no_grad():
                    label = wrapped(inputs.flip(0)).float().mean()
                loss = loss + label
            if case == "reference":
                with wrapped.no_sync():
                    loss = loss + wrapped(inputs.flip(0)).float().square().mean()
            block = nullcontext(loss) if level is None else amp.scale_loss(loss, optimizer)
            with training.without_sync(wrapped, is_local), block as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    params = [param.detach().float().clone() for param in model.parameters()]
    amp.deactivate()
    return params
