"""What amp_patch asks of modules that FSDP2 has sharded (`fully_shard`), and tells them.

Knows modules of torch; no optimizer, no scale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.levels import HALVES
from amp_patch.patching import remove

from . import flat_parameters


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that `fully_shard` was called with."""
    return flat_parameters.modules_of(model, "FSDPModule")


def unshared(module: Any) -> list[Tensor]:
    """Return the parameters of a sharded module whose gradients a backward leaves on this rank.

    ``set_requires_gradient_sync(False)`` has it do so, and of replicas
    ``set_requires_all_reduce(False)``. The parameters are those that an optimizer has, also where
    the module holds gathered ones.
    """
    return [
        param.sharded_param
        for group in _groups_of(module)
        if not (group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp))
        for param in group.fsdp_params
    ]


def reshard(model: nn.Module) -> None:
    """Have the sharded parameters of FSDP of either kind, where whole ones may stand."""
    flat_parameters.reshard(model)
    for group in _groups(model):
        group.wait_for_unshard()  # which a backward that failed has begun ahead of its need
        # For torch a forward that failed goes on: in one, reshard_after_forward decides.
        with group.use_training_state(type(group._training_state).IDLE):
            group.reshard()


def follow_parameters(model: nn.Module) -> None:
    """Let FSDP of either kind gather what the parameters hold now, and in which dtype."""
    flat_parameters.follow_parameters(model)
    for group in _groups(model):
        has_run = [param for param in group.fsdp_params if hasattr(param, "orig_dtype")]
        for param in group.fsdp_params:
            param.reset_sharded_param()
        for param in has_run:
            if param.sharded_param.dtype is not param.orig_dtype:
                # Where it gathers to is made anew by the next forward.
                param.all_gather_outputs.clear()
                remove(param, "_unsharded_param", getattr(param, "_unsharded_param", None))
        if has_run:
            group._init_mp_dtypes()


def refuse_other_dtypes(
    models: Iterable[nn.Module], half: torch.dtype, level: str, other_level: str
) -> None:
    """Raise where FSDP of either kind computes in another half dtype than a level.

    Args:
        models: about to be initialized.
        half: what the level computes in.
        level: its name.
        other_level: the name of the one that computes in the other half dtype.

    Raises:
        RuntimeError: as said.
    """
    for model in models:
        states = [module._get_fsdp_state() for module in sharded_modules(model)]
        asked = [state._mp_policy.param_dtype for state in states]
        asked += [one.mixed_precision.param_dtype for one in flat_parameters.flat_modules(model)]
        for dtype in asked:
            if dtype in HALVES and dtype is not half:
                raise RuntimeError(
                    f"the mixed precision of FSDP must leave the dtype to the level, or name the "
                    f"same; got param_dtype={dtype} for opt_level {level}, which computes in "
                    f"{half}. Leave out the mp_policy of fully_shard(), or the mixed_precision of "
                    f"FullyShardedDataParallel(), or call amp.initialize(..., "
                    f"opt_level={other_level!r})."
                )


def refuse_mixed_groups(models: Iterable[nn.Module], kept: Collection[int]) -> None:
    """Raise where one call of `fully_shard` holds parameters of two dtypes, which it cannot gather.

    Args:
        models: about to be stored in half.
        kept: ids of the parameters that stay in float32.

    Raises:
        RuntimeError: as said.
    """
    for model in models:
        for group in _groups(model):
            stays = [id(param.sharded_param) in kept for param in group.fsdp_params]
            if any(stays) and not all(stays):
                raise RuntimeError(
                    "all parameters that one call of fully_shard() gathers must have one dtype; "
                    f"got {sum(stays)} of batch norms or parametrizations, which stay in float32, "
                    f"among {len(stays)}. Call fully_shard(batch_norm) for each batch norm, and "
                    "fully_shard(module.parametrizations.weight) for each parametrization, before "
                    "fully_shard(model); or for batch norms amp.initialize(..., "
                    "keep_batchnorm_fp32=False)."
                )


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in sharded_modules(model):
        yield from _groups_of(module)


def _groups_of(module: Any) -> list[Any]:
    """Return what a module gathers together: one for each mesh that its parameters are on."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    # torch before 2.13 has one at most.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
