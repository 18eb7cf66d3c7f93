"""torch's weight norm, put on and taken off many weights at once.

Source: Salimans and Kingma, arXiv:1602.07868. It is torch.nn.utils.weight_norm and not its
successor in torch.nn.utils.parametrizations, for its parameters have apex's names in checkpoints.
"""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

_Module = TypeVar("_Module", bound=nn.Module)


def apply_weight_norm(
    module: _Module, name: str = "", dim: int | None = 0, hook_child: bool = True
) -> _Module:
    """Give weights a length ``NAME_g`` and a direction ``NAME_v`` to be trained in their places.

    Embeddings, and weights with less than two dimensions, are left alone.

    Args:
        module: changed in place.
        name: of the one weight, such as 'weight' or '0.weight'; '' for all, of submodules as well.
        dim: the dimension along which lengths are kept apart; None for one length alone.
        hook_child: no effect: the hook is always the submodule's.

    Returns:
        The module.
    """
    for path in [name] if name else [path for path, _ in module.named_parameters()]:
        parent, _, own = path.rpartition(".")
        owner = module.get_submodule(parent)
        if not isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and getattr(owner, own).dim() > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                torch.nn.utils.weight_norm(owner, own, dim)  # type: ignore[arg-type]  # dim may be None
    return module


def remove_weight_norm(module: _Module, name: str = "", remove_all: bool = False) -> _Module:
    """Take weight norm off: the weights are parameters again, with the values they have.

    Args:
        module: changed in place.
        name: as `apply_weight_norm`.
        remove_all: no effect: without a name, all is removed.

    Returns:
        The module.

    Raises:
        ValueError: there is a name, and no weight norm on that weight.
    """
    if name:
        parent, _, own = name.rpartition(".")
        torch.nn.utils.remove_weight_norm(module.get_submodule(parent), own)
        return module
    for owner in module.modules():
        hooks = [one for one in owner._forward_pre_hooks.values() if isinstance(one, WeightNorm)]
        for hook in hooks:
            torch.nn.utils.remove_weight_norm(owner, hook.name)
    return module
