"""What models and optimizers held before `amp.initialize`, to be put back after an error.

Knows no level and no rule of precision. Tensors are kept and not copied: nothing that
`amp.initialize` does writes to the storage that came in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.distributed.fully_sharded import follow_parameters
from amp_patch.distributed.shards import set_data


class Snapshot:
    """The tensors of models and optimizers at one moment.

    Args:
        models: whose parameters, their gradients, and buffers are noted.
        optimizers: whose parameters and state are noted.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models = models
        self._params: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
        self._buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        for module in (module for model in models for module in model.modules()):
            self._buffers.append((module._buffers, dict(module._buffers)))
            for param in module._parameters.values():
                if param is not None:
                    self._params.append((param, param.data, param.grad))
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = [
            (group["params"], list(group["params"]))
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._states = [(optimizer, _copy_state(optimizer)) for optimizer in optimizers]

    def restore(self) -> None:
        """Put the very tensors back."""
        for param, data, grad in self._params:
            param.grad = None  # it must go before a parameter may change its dtype
            set_data(param, data)
            param.grad = grad
        for model in self._models:
            follow_parameters(model)
        for buffers, before in self._buffers:
            for name, buffer in before.items():  # torch.jit's buffers know no update()
                buffers[name] = buffer
        for params, before_params in self._groups:
            params[:] = before_params
        for optimizer, state in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)


def _copy_state(optimizer: Optimizer) -> dict[Tensor, Any]:
    return {
        param: dict(state) if isinstance(state, dict) else state
        for param, state in optimizer.state.items()
    }
