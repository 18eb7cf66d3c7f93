"""Float32 masters in the place of an optimizer's half parameters; knows nothing of scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch.levels import HALVES


class MasterGroup(NamedTuple):
    """The parameters of one group that want gradients.

    Attributes:
        half: the model's, in float16 or bfloat16.
        masters: their float32 copies, in the same order.
        full: the model's that are float32 themselves.
    """

    half: list[Tensor]
    masters: list[Tensor]
    full: list[Tensor]


def put_masters(
    optimizer: Any, group: dict[str, Any], announce: Callable[[str], None]
) -> MasterGroup:
    """Put masters in the places of a group's half parameters, and move their state to them.

    Args:
        optimizer: the one that has the group.
        group: changed in place.
        announce: gets a line for each parameter.
    """
    made = MasterGroup([], [], [])
    for index, param in enumerate(group["params"]):
        if not param.requires_grad:
            continue
        announce(f"FP16_Optimizer received {param.type()} with {param.size()}")
        if param.dtype not in HALVES:
            made.full.append(param)
            continue
        master = param.detach().clone().float().requires_grad_()
        group["params"][index] = master
        made.half.append(param)
        made.masters.append(master)
        if param in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(param)
    return made


def refuse_other_dtypes(params: Iterable[Tensor]) -> None:
    """Raise TypeError for a parameter that wants gradients and is neither half nor float32."""
    for param in params:
        if param.requires_grad and param.dtype not in (*HALVES, torch.float32):
            raise TypeError(
                "FP16_Optimizer takes parameters in float16, bfloat16 and float32; got one in "
                f"{param.dtype}. Call model.half() or model.float() before making the optimizer."
            )


def gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that there are."""
    return [param.grad for param in params if param.grad is not None]


def gradient_of(master: Tensor) -> Tensor:
    """Return a master's gradient, made where there is none; its values may be anything."""
    if master.grad is None:
        master.grad = torch.empty_like(master)
    return master.grad


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors in place."""
    if tensors and factor != 1.0:
        torch._foreach_mul_(tensors, factor)
