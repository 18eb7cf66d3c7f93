"""Optimizers of `amp.initialize` that step no parameters of its models.

Knows both as the script passes them; nothing that was prepared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.common.warn_once import warn_once
from amp_patch.optimizers.groups import params_of


def refuse_flat(optimizers: Iterable[Optimizer], models: Collection[nn.Module]) -> None:
    """Raise where an optimizer steps a vector that the models' parameters are views of.

    The backward writes the gradients of these, which then belong to no optimizer.

    Raises:
        RuntimeError: as said.
    """
    own = {id(param): _memory_of(param) for model in models for param in model.parameters()}
    for param in params_of(*optimizers):
        memory = range(0) if id(param) in own else _memory_of(param)
        count = sum(_overlap(memory, one) for one in own.values()) if memory else 0
        if count:
            raise RuntimeError(
                "the optimizers of amp.initialize() must step the models' own parameters; got a "
                f"tensor of {param.numel()} elements in whose memory {count} of these lie. Make "
                "the optimizer of model.parameters()."
            )


def _memory_of(param: Tensor) -> range:
    """Return the addresses of a tensor of torch's own classes; none of one without data."""
    is_plain = type(param) in (Tensor, nn.Parameter) and param.layout is torch.strided
    start = param.data_ptr() if is_plain else 0
    return range(start, start + param.numel() * param.element_size()) if start else range(0)


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def warn_of_strangers(optimizers: Sequence[Optimizer], models: Collection[nn.Module]) -> None:
    """Warn of optimizers that hold no parameter of any of the models, if there are models.

    Not where others train all of these, or all are frozen: then such a one trains something else,
    as the centers of a loss, or an image.
    """
    own = {id(param) for model in models for param in model.parameters()}
    trained = {id(one) for model in models for one in model.parameters() if one.requires_grad}
    if trained.issubset(map(id, params_of(*optimizers))):
        return
    for optimizer in optimizers:
        params = params_of(optimizer)
        is_strange = own and params and own.isdisjoint(map(id, params))
        if is_strange and not _stand_alone(params):
            warn_once(
                "the optimizers of amp.initialize() step its models' parameters; got an "
                f"optimizer of type {type(optimizer).__name__} that holds {len(params)} "
                "parameters, of which none is of these models, so that it trains none of them. "
                "Make the optimizer of model.parameters(), after the last copy of the model, or "
                "pass the model that it belongs to: amp.initialize([model, other_model], "
                "[optimizer, other_optimizer])."
            )


def _stand_alone(params: list[Tensor]) -> bool:
    """Tell what a script trains beside its models: no layer's weights.

    So SAC does its temperature, and others the weights of several losses. ``model.parameters()``
    yields parameters, of which hardly one is a single number, and hardly ever one vector alone.
    """
    if len(params) == 1 and params[0].dim() < 2:
        return True
    return all(not isinstance(param, nn.Parameter) or param.numel() == 1 for param in params)
