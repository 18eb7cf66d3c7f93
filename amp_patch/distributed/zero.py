"""What a `ZeroRedundancyOptimizer` saves of fp32 masters, and loads; knows no loss scale.

Each rank steps masters of its share of the parameters by a local optimizer, ``zero.optim``. A state
dict of the model has the half values of all other shares. So the masters are saved with the state
of the local optimizer, which ``zero.consolidate_state_dict()`` collects from all ranks.
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


class ZeroState:
    """The hooks by which one of them saves and loads masters.

    Args:
        zero: a `ZeroRedundancyOptimizer`, whose local optimizer steps masters; held weakly.
        param_of: returns the half parameter of a master, and any other tensor itself.
    """

    def __init__(self, zero: Any, param_of: Callable[[Tensor], Tensor]) -> None:
        self._local: weakref.ref[Optimizer] = weakref.ref(zero.optim)
        self._param_of = param_of
        self._handles = [
            zero.optim.register_state_dict_post_hook(self._save),
            zero.register_load_state_dict_post_hook(self._load),
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
    def _load(self, zero: Optimizer) -> None:
        """Give masters what torch has entered for their parameters."""
        local = self._local()
        for master, param in () if local is None else self._pairs(local):
            if local is not None and param is not master and param in local.state:
                state = local.state.pop(param)
                value = state.pop(MASTER, None)
                local.state[master] = state
                if value is not None:
                    master.copy_(value)

    def _pairs(self, local: Optimizer) -> list[tuple[Tensor, Tensor]]:
        masters = [master for group in local.param_groups for master in group["params"]]
        return list(zip(masters, map(self._param_of, masters), strict=True))
