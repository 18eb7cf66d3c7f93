"""fp32 masters that are saved with an optimizer's state, and loaded; knows no loss scale.

They are where no state dict of the model has them. By a `ZeroRedundancyOptimizer` each rank steps
masters of its share of the parameters by a local optimizer, ``zero.optim``, whose state
``zero.consolidate_state_dict()`` collects from all ranks; the model has half values of the other
shares. `FullyShardedDataParallel` (FSDP1) makes the model's state dict of half values of all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: The name of a master in the state that is saved for its parameter.
MASTER = "fp32_master"


class SavedMasters:
    """The hooks by which an optimizer saves and loads masters.

    Args:
        local: steps masters; held weakly.
        loading: whose ``load_state_dict`` the user calls: a `ZeroRedundancyOptimizer`, or it.
        param_of: returns the half parameter of a master, and any other tensor itself.
    """

    def __init__(
        self, local: Optimizer, loading: Optimizer, param_of: Callable[[Tensor], Tensor]
    ) -> None:
        self._local: weakref.ref[Optimizer] = weakref.ref(local)
        self._param_of = param_of
        self._handles = [
            local.register_state_dict_post_hook(self._save),
            loading.register_load_state_dict_post_hook(self._load),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _save(self, local: Optimizer, state_dict: dict[str, Any]) -> None:
        saved = state_dict["state"]
        for index, (master, param) in enumerate(self._pairs(local)):
            if param is not master:
                saved[index] = {**saved.get(index, {}), MASTER: master.detach()}

    @torch.no_grad()
    def _load(self, loading: Optimizer) -> None:
        """Give masters what torch has entered for them, or for their parameters."""
        local = self._local()
        for master, param in () if local is None else self._pairs(local):
            assert local is not None
            if param is not master and param in local.state:
                local.state[master] = local.state.pop(param)
            value = local.state[master].pop(MASTER, None) if master in local.state else None
            if value is not None:
                master.copy_(value)

    def _pairs(self, local: Optimizer) -> list[tuple[Tensor, Tensor]]:
        masters = [master for group in local.param_groups for master in group["params"]]
        return list(zip(masters, map(self._param_of, masters), strict=True))
