"""torch's fused kernel on a GPU, for an AdamW or Adam that was given neither fused nor foreach.

torch would take its functions for many tensors. These move more memory, and know no flag by which
a device skips a step: the host would wait in each. Knows one optimizer; no loss scales or masters.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.gradients.gradient_offer import class_of
from amp_patch.kernels.strips import lie_alike
from amp_patch.patching import Patches

#: Returns whether a tensor is on a GPU for which torch has fused kernels.
ON_GPU: Callable[[Tensor], bool] = operator.attrgetter("is_cuda")


class FusedByDefault:
    """Enters ``fused=True`` in the groups of an optimizer, until it is removed.

    What ``state_dict()`` returns is as torch's without it: ``fused`` is None there, and the
    counters of steps are on the CPU, unless the group is capturable.

    Args:
        optimizer: of these very types, held weakly.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._entered: list[dict[str, Any]] = []
        self._patches = Patches()
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._as_without),
            optimizer.register_load_state_dict_post_hook(lambda _: self.enter()),
        ]
        self.enter()

    def enter(self) -> None:
        """Follow groups that were loaded or added; do nothing where one of them cannot be fused."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        groups = optimizer.param_groups
        self._entered = [group for group in groups if self._is_entered(group)]
        if not all(
            group["fused"] or (_is_left_to_torch(group) and _lie_as_fused_takes(optimizer, group))
            for group in groups
        ):
            return
        for group in groups:
            if not group["fused"]:
                self._entered.append(group)
                group["fused"] = True
                for param, state in _states(optimizer, group):
                    state["step"] = state["step"].to(param.device, torch.float32)
        if not self._patches:  # as torch has it where it was told at once
            self._patches.replace(optimizer, "_step_supports_amp_scaling", True)

    def remove(self) -> None:
        """Give the groups back as torch would have them."""
        self._patches.undo()
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for group in filter(self._is_entered, optimizer.param_groups):
            for _, state in _states(optimizer, group):
                state["step"] = _as_torch_has_it(state["step"], group)
            group["fused"] = None

    def _is_entered(self, group: Mapping[str, Any]) -> bool:
        return bool(group["fused"]) and any(group is one for one in self._entered)

    def _as_without(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what is to be saved."""
        states = dict(state_dict["state"])
        saved = [dict(group) for group in state_dict["param_groups"]]
        for group, kept in zip(optimizer.param_groups, saved, strict=True):
            if not self._is_entered(group):
                continue
            kept["fused"] = None
            for place in kept["params"]:
                if "step" in states.get(place, ()):
                    counter = _as_torch_has_it(states[place]["step"], group)
                    states[place] = {**states[place], "step": counter}
        return {**state_dict, "state": states, "param_groups": saved}


def _is_left_to_torch(group: Mapping[str, Any]) -> bool:
    """Return whether a group says nothing, and torch's fused kernel can step it."""
    if group["foreach"] is not None or group["fused"] is not None or group["differentiable"]:
        return False
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        return False
    if len(set(map(id, group["params"]))) < len(group["params"]):  # one kernel would step it twice
        return False
    return all(
        class_of(param) in (Tensor, nn.Parameter) and param.dtype is torch.float32 and ON_GPU(param)
        for param in group["params"]
    )


def _lie_as_fused_takes(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether parameters and averages fill their memory in one order.

    torch's fused kernel refuses others, its functions for many tensors do not: a parameter that is
    columns of a matrix, or averages from before a model became ``channels_last``.
    """
    for param in group["params"]:
        state = optimizer.state.get(param, {})
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        averages = [
            one for one in tensors if one.shape == param.shape and one is not state.get("step")
        ]
        if not lie_alike([param, *averages]):
            return False
    return True


def _as_torch_has_it(counter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return a counter of steps where torch has it, in a group that is not fused."""
    return counter if group["capturable"] else counter.cpu()


def _states(
    optimizer: Optimizer, group: Mapping[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield each parameter of a group that has a counter of steps, with its state."""
    for param in group["params"]:
        state = optimizer.state.get(param)
        if state and "step" in state:
            yield param, state
