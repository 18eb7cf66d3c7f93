"""What models and optimizers held before `amp.initialize`, to be put back after an error.

Whoever changes them undoes it, once they are changed; here is what an error leaves in between.
Knows no level and no rule of precision. Tensors are kept and not copied: nothing that
`amp.initialize` does writes to the storage that came in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.distributed.fully_sharded import follow_parameters
from amp_patch.distributed.shards import set_data


class Snapshot:
    """The tensors of models and optimizers at one moment.

    Args:
        models: whose parameters, their gradients, and buffers are noted.
        optimizers: whose groups and state are noted.
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
        self._groups: list[tuple[dict[str, Any], dict[str, Any], list[Tensor]]] = [
            (group, dict(group), list(group["params"]))
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
        for group, before_group, params in self._groups:
            group.clear()
            group.update(before_group)
            group["params"][:] = params
        for optimizer, state in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)


class Attributes:
    """The attributes of optimizers at one moment, and the hooks that each had.

    Args:
        optimizers: those that step in another's place as well.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._own = [(one, dict(vars(one))) for one in optimizers]
        self._hooks = [
            (value, value.copy())
            for _, before in self._own
            for value in before.values()
            if isinstance(value, OrderedDict)
        ]

    def restore(self) -> None:
        """Put the very objects back."""
        for optimizer, before in self._own:
            own = vars(optimizer)
            for name in own.keys() - before.keys():
                del own[name]
            own.update(before)
        for hooks, those_before in self._hooks:
            hooks.clear()
            hooks.update(those_before)


def _copy_state(optimizer: Optimizer) -> dict[Tensor, Any]:
    return {
        param: dict(state) if isinstance(state, dict) else state
        for param, state in optimizer.state.items()
    }
