"""What torch's own scalers do wrong on several ranks, and what amp_patch does there."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from amp_patch import amp

INF = float("inf")


def _weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((3,), value))


def _set_grad(weight: Tensor, ranks_with_inf: tuple[int, ...], scale: float) -> None:
    is_here = distributed.get_rank() in ranks_with_inf
    weight.grad = torch.full((3,), INF if is_here else scale)


def sharded_scaler(kind: str, unscales: bool, with_inf: tuple[int, ...]) -> tuple[Tensor, float]:
    """Return the weight after a step of a fused optimizer by torch's scaler, and the scale."""
    weight = _weight()
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, fused=True)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    _set_grad(weight, with_inf, 4.0)
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return weight.detach(), scaler.get_scale()


def ours(kind: str, with_inf: tuple[int, ...]) -> tuple[Tensor, float]:
    """Return the same by amp_patch, for parameters that are parts of what all ranks step."""
    weight = _weight()
    module = nn.Module()
    module.weight = weight
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, fused=True)
    module, optimizer = amp.initialize(
        module,
        optimizer,
        loss_scale="dynamic",
        verbosity=0,
        process_group=distributed.group.WORLD,
    )
    before = amp.loss_scale()
    with amp.scale_loss(weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        _set_grad(weight, with_inf, before)
    optimizer.step()
    scale = amp.loss_scale() / before * 4.0
    amp.deactivate()
    return weight.detach().clone(), scale


def half_loss() -> tuple[float, float]:
    """Return a scaled float16 loss of 1.5, by torch and by amp_patch."""
    loss = torch.tensor(1.5, dtype=torch.float16)
    torchs = ShardedGradScaler(device="cpu", init_scale=2.0**16).scale(loss).item()
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    amp.initialize(module, optimizer, loss_scale=2.0**16, verbosity=0)
    weight = module.weight
    with amp.scale_loss((weight * 0).sum() + loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        found = scaled_loss.item()
    amp.deactivate()
    return torchs, found


def exact_flag() -> tuple[Tensor, Tensor]:
    """Return weights after a step of a fused kernel that was told of two overflows, not of one.

    torch's adds the flags of ranks, so that its fused kernel gets a 2. Ours gets the largest.
    """
    weights = []
    from amp_patch.distributed.agreement import agree

    flag = torch.ones(())
    summed = flag.clone()
    distributed.all_reduce(summed)
    world = distributed.group.WORLD
    assert world is not None
    largest = agree([flag], [world], torch.device("cpu"), 1.0, 0).reshape(())
    for given in (summed, largest):
        weight = _weight()
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        weight.grad = torch.full((3,), INF)
        optimizer.grad_scale, optimizer.found_inf = None, given
        optimizer.step()
        weights.append(weight.detach())
    return weights[0], weights[1]
