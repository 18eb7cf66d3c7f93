"""What amp_patch asks of modules of `FullyShardedDataParallel` (FSDP1), and tells them.

Each joins parameters to a flat one, of which a rank holds a part. Knows modules of torch; no
optimizer, no scale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from amp_patch.patching import remove


def modules_of(model: nn.Module, name: str) -> list[Any]:
    """Return the modules of a model that are of a class of ``torch.distributed.fsdp``."""
    # where nobody has imported it, there are none
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
    return [] if kind is None else [one for one in model.modules() if isinstance(one, kind)]


def flat_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that are of `FullyShardedDataParallel`."""
    return modules_of(model, "FullyShardedDataParallel")


def spread_modules(model: nn.Module) -> list[Any]:
    """Return those of which each rank has another part."""
    return [one for one in flat_modules(model) if one.sharding_strategy.name != "NO_SHARD"]


def spread_params(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of such modules: the flat ones, or the views that users see of them."""
    flat = [one._flat_param for one in spread_modules(model) if one._flat_param is not None]
    return [param for one in flat for param in (one, *(one._params or ()))]


def keeps_gradients(module: Any) -> bool:
    """Return whether the last backward of such a module was under its ``no_sync()``.

    It leaves whole gradients then, in the place of this rank's part of their sum.
    """
    params = [] if module._flat_param is None else [module._flat_param]
    is_whole = any(p.grad is not None and p.grad.shape != p.shape for p in params)
    return is_whole or not module._sync_gradients


def reshard(model: nn.Module) -> None:
    """Have this rank's part in the flat parameters, where a forward that failed left the whole."""
    for module in flat_modules(model):
        part = getattr(module._flat_param, "_local_shard", None)
        if part is not None and part.shape != module._flat_param.shape:
            module._handle.reshard(free_unsharded_flat_param=True)


def follow_parameters(model: nn.Module) -> None:
    """Let the modules that have run gather what their flat parameters hold now, in its dtype."""
    for module in flat_modules(model):
        param = module._flat_param
        has_run = param is not None and hasattr(param, "_local_shard")
        if has_run and param._local_shard.data_ptr() != param.data_ptr():
            module._handle.init_flat_param_attributes()
            # A forward without a backward leaves a hook where gradients of the old dtype came.
            hook = getattr(param, "_post_backward_hook_state", None)
            if hook is not None:
                hook[-1].remove()
                remove(param, "_post_backward_hook_state", hook)


def refuse_original_params(models: Iterable[nn.Module], level: str) -> None:
    """Raise for FSDP1 with ``use_orig_params=True``, whose parameters are views of flat ones.

    Args:
        models: about to be stored in half.
        level: its name.

    Raises:
        RuntimeError: as said.
    """
    for model in models:
        if any(one._use_orig_params for one in flat_modules(model)):
            raise RuntimeError(
                f"opt_level {level} stores parameters in half, and those of a model in "
                "FullyShardedDataParallel must be the flat ones; got use_orig_params=True, which "
                "keeps float32 ones beneath. Call FullyShardedDataParallel(model, "
                "use_orig_params=False), or fully_shard(model), or take opt_level O1 or O4."
            )
