"""Checks the optimizers that users pass, and what these are to step, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.optim import Optimizer

from amp_patch.levels import HALVES, OptLevel

from .kinds import as_list, described


def optimizers_of(optimizers: Any) -> list[Optimizer]:
    """Return None, one optimizer, or a list or tuple of optimizers, as a list.

    Raises:
        TypeError: anything else.
    """
    if optimizers is None:
        return []
    found = as_list(optimizers)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizers must be a torch.optim.Optimizer or a list or tuple of them; got "
                f"{described(optimizer, Optimizer)}; call model, optimizer = "
                "amp.initialize(model, optimizer, opt_level=...)."
            )
    return found


def refuse_meta(optimizers: Iterable[Optimizer]) -> None:
    """Raise for parameters without numbers of which masters are to be made; not in a mode.

    ``model.to_empty()`` and a load put others in their place, of which the optimizer knows nothing.

    Raises:
        RuntimeError: as said.
    """
    for optimizer in () if torch._C._len_torch_dispatch_stack() else optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        count = sum(param.is_meta and param.requires_grad for param in params)
        if not count:
            continue
        raise RuntimeError(
            "fp32 masters are made of parameters that have numbers; got an "
            f"optimizer of type {type(optimizer).__name__} with {count} on the meta device. Call "
            "model.to_empty(device=...) and load its weights, then make the optimizer of "
            "model.parameters(), then call amp.initialize()."
        )


def refuse_fake(optimizers: Iterable[Optimizer], level: OptLevel) -> None:
    """Raise for parameters of a ``FakeTensorMode`` at a level that looks at numbers in a step.

    Masters are compared with their half weights, and a scale is checked by its gradients.

    Raises:
        RuntimeError: as said.
    """
    if not level.master_weights and level.loss_scale == 1.0:
        return
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if any(isinstance(param, FakeTensor) for param in params):
            raise RuntimeError(
                "masters and loss scales need parameters that have numbers; got an optimizer "
                f"of type {type(optimizer).__name__} with parameters of a FakeTensorMode at "
                f"{level.name}. Call amp.initialize(model, optimizer, opt_level='O4') there, or "
                "build the model outside of the mode and measure a step of it."
            )


def optimizers_for(call: str, optimizers: Any) -> list[Optimizer]:
    """Return one optimizer, or a list or tuple of them, as a list without repetition.

    Args:
        call: how the function is called that takes them, for the message.
        optimizers: what it was given.

    Raises:
        TypeError: anything else, or none.
    """
    given = as_list(optimizers)
    wrong = [described(item, Optimizer) for item in given if not isinstance(item, Optimizer)]
    if wrong or not given:
        raise TypeError(
            f"{call} takes what amp.initialize() returned for its optimizers; got "
            f"{wrong[0] if wrong else f'an empty {type(optimizers).__name__}'} in their place; "
            f"call {call}."
        )
    return list(dict.fromkeys(given))


def optimizer_of(optimizer: Any, caller: str, rest: str = "") -> Any:
    """Return one optimizer, of torch or anybody's who keeps ``param_groups`` as torch does.

    Args:
        optimizer: what the caller was given.
        caller: how the function is called that takes it, "amp.master_params()".
        rest: of its arguments, in the message.

    Raises:
        TypeError: anything else.
    """
    if not hasattr(optimizer, "param_groups"):
        call = caller.replace("()", f"(optimizer{rest})", 1)
        raise TypeError(
            f"{caller} takes one optimizer, as amp.initialize() returned it; got "
            f"{described(optimizer, Optimizer)}; call {call}, once for each optimizer."
        )
    return optimizer


def refuse_twice(optimizers: Iterable[Optimizer], known: Iterable[Optimizer]) -> None:
    """Raise for an optimizer that is in ``known`` or stands twice in ``optimizers``.

    Raises:
        RuntimeError: as said.
    """
    seen = {id(optimizer) for optimizer in known}
    for optimizer in optimizers:
        if id(optimizer) in seen:
            raise RuntimeError(
                "A given optimizer should only be passed through amp.initialize once; got the "
                f"same {type(optimizer).__name__} again. Use the optimizer that the first call "
                "returned, or call amp.deactivate() before you initialize it anew."
            )
        seen.add(id(optimizer))


def refuse_shared_state(optimizers: Sequence[Optimizer]) -> None:
    """Raise for optimizers of the same parameters that have one ``state`` in common.

    Raises:
        RuntimeError: as said.
    """
    for one, other in combinations(optimizers, 2):
        is_shared = getattr(one, "state", None) is getattr(other, "state", optimizers)
        if is_shared and not _ids_of_params(one).isdisjoint(_ids_of_params(other)):
            raise RuntimeError(
                "at a level with fp32 masters each optimizer steps masters of its own, and its "
                f"state goes by them; got {type(one).__name__} and {type(other).__name__} of "
                "the same parameters with one state. Give each a state of its own, or call "
                "amp.initialize(..., opt_level='O1')."
            )


def _ids_of_params(optimizer: Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def refuse_half_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raise for optimizers that are to train half parameters.

    Raises:
        RuntimeError: as said.
    """
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        refuse_half_params(optimizer, params)


def refuse_half_params(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Raise for half ones that require a gradient among those that an optimizer is to step.

    Raises:
        RuntimeError: as said.
    """
    halves = [param for param in params if param.requires_grad and param.dtype in HALVES]
    if halves:
        raise RuntimeError(
            "optimizers of amp.initialize() train float32 parameters, for small updates are "
            f"rounded away in half precision; got {len(halves)} in {halves[0].dtype} in the "
            f"{type(optimizer).__name__} that require a gradient. Call .float() on their layers "
            "before amp.initialize(), or freeze them by requires_grad_(False)."
        )
