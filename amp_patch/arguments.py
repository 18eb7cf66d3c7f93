"""Checks what users pass to the functions of `amp`, before anything is changed."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from .levels import HALVES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it

_MEND = "call model, optimizer = amp.initialize(model, optimizer, opt_level=...)"


def models_of(
    models: Any, allow_half: bool = False, stored: Collection[int] = ()
) -> list[nn.Module]:
    """Return one model, or a list or tuple of models, as a list.

    Args:
        models: as given to `initialize`.
        allow_half: take models whose half parameters are trained, too.
        stored: ids of the parameters and buffers that `initialize` has cast to half.

    Raises:
        TypeError: anything else, a model that ``==`` does not find, or one with parameters that
            hand their gradients on to other tensors.
        RuntimeError: a model that `initialize` has stored in half, or that trains half parameters.
    """
    found = _as_list(models, nn.Module, "models must be a torch.nn.Module or a list or tuple of")
    for model in found:
        _refuse_unequal(model)
        _refuse_shells(model)
        if not allow_half:
            _refuse_half(model, stored)
    return found


def optimizers_of(optimizers: Any) -> list[Optimizer]:
    """Return None, one optimizer, or a list or tuple of optimizers, as a list.

    Raises:
        TypeError: anything else, or LBFGS.
    """
    if optimizers is None:
        return []
    found = _as_list(
        optimizers, Optimizer, "optimizers must be a torch.optim.Optimizer or a list or tuple of"
    )
    for optimizer in found:
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                "optimizers must evaluate the loss before they change anything; got LBFGS, whose "
                "line search evaluates it between changes, where a step that is not finite "
                "cannot be skipped. Train with LBFGS in float32, without amp.initialize()."
            )
    return found


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


def _as_list(given: Any, kind: type, rule: str) -> list[Any]:
    items: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"{rule} them; got {_described(item, kind)}; {_MEND}.")
    return list(items)


def _described(item: Any, kind: type) -> str:
    """Return the type of what is not of a kind, and where it holds one, as wrappers do."""
    got = type(item)
    # fastai has an Optimizer of its own
    name = f"{got.__module__}.{got.__name__}" if got.__name__ == kind.__name__ else got.__name__
    held = (key for key, value in getattr(item, "__dict__", {}).items() if isinstance(value, kind))
    attribute = next(held, None)
    return name if attribute is None else f"{name}, which holds one to pass: its .{attribute}"


def _refuse_unequal(model: nn.Module) -> None:
    """Raise for a model that no dictionary finds again, as a tensordict, which compares numbers."""
    with contextlib.suppress(Exception):
        if type(model).__eq__ is object.__eq__ or model == model:
            return
    raise TypeError(
        "models must be equal to themselves, for amp.initialize() looks them up by ==; got a "
        f"{type(model).__name__}, whose == says something else. Make it an attribute of a "
        "torch.nn.Module of your own, and pass that."
    )


def _refuse_shells(model: nn.Module) -> None:
    """Raise for parameters that stand for other tensors, as those of hypll.

    Their class answers for the other tensor, which also gets the gradients: nobody would unscale
    or clear these. Torch itself is asked for the gradients of parameters, without their class.
    """
    for name, param in model.named_parameters():
        asks_class = type(param).__torch_function__ is not nn.Parameter.__torch_function__
        if not asks_class or isinstance(param, UninitializedParameter) or not param.requires_grad:
            continue
        with torch._C.DisableTorchFunctionSubclass():
            own = tuple(torch.Tensor.size(param))
        if tuple(param.shape) != own:
            raise TypeError(
                "models must have parameters that get their gradients themselves, for "
                f"amp.initialize() has these unscaled and cleared; got {name!r}, a "
                f"{type(param).__name__} which stands for another tensor. Train this model "
                "without amp.initialize()."
            )


def _refuse_half(model: nn.Module, stored: Collection[int]) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype not in HALVES:
            continue
        found = f"models must come in float32, amp.initialize() casts them; got {name!r} in "
        if id(tensor) in stored:
            raise RuntimeError(
                f"{found}{tensor.dtype}, which amp.initialize() has cast. Use what the first call "
                "returned, or call amp.deactivate() before you initialize the model anew. Models "
                "that share a layer go into one call, amp.initialize([one, other], optimizers)."
            )
        if tensor.requires_grad:
            raise RuntimeError(
                f"{found}{tensor.dtype}, which requires a gradient. Leave out your own .half() or "
                ".bfloat16(), call .float() on its module, or freeze it by requires_grad_(False). "
                "Of a model that amp.initialize() cast, call amp.deactivate() first; of one from "
                "a file, call model.float() first."
            )


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


def refuse_unstorable(models: Iterable[nn.Module]) -> None:
    """Raise for weights that cannot be stored in half.

    Raises:
        RuntimeError: a lazy module (`nn.LazyLinear`), which has none yet; inference tensors, which
            do not tell of writes.
    """
    for model in models:
        for name, param in model.named_parameters():
            if isinstance(param, UninitializedParameter):
                raise RuntimeError(
                    "models must have weights before amp.initialize() stores them in half "
                    f"precision; got the lazy parameter {name!r}, which has none yet. Call the "
                    "model once on a batch, then amp.initialize(model, ...)."
                )
            if param.is_inference():
                raise RuntimeError(
                    "models must be made outside of torch.inference_mode() for amp.initialize() to "
                    f"store them in half precision; got {name!r}, an inference tensor. Call "
                    "amp.initialize(copy.deepcopy(model), ...) outside of it."
                )


def refuse_compiled(models: Iterable[nn.Module], stores_half: bool) -> None:
    """Raise for what torch.jit compiled: a model, of which no function is Python's, or a part.

    Args:
        models: of one call of `amp.initialize`.
        stores_half: refuse parts as well, for these get hooks, and buffers in another dtype.

    Raises:
        TypeError: as said.
    """
    for model in models:
        for name, module in model.named_modules() if stores_half else [("", model)]:
            if isinstance(module, torch.jit.ScriptModule):
                place = f"at {name!r}" if name else "as the model"
                of_a_part = ", or take opt_level 'O1' or 'O4', where a part stays in float32"
                raise TypeError(
                    "models must be in Python for amp.initialize() to cast what they compute; got "
                    f"a {type(module).__name__} of torch.jit {place}. Call amp.initialize() with "
                    "the model that it was compiled from, and compile after amp.deactivate()"
                    f"{of_a_part if name else ''}."
                )


def optimizers_for(call: str, optimizers: Any) -> list[Optimizer]:
    """Return one optimizer, or a list or tuple of them, as a list without repetition.

    Args:
        call: how the function is called that takes them, for the message.
        optimizers: what it was given.

    Raises:
        TypeError: anything else, or none.
    """
    given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    wrong = [_described(item, Optimizer) for item in given if not isinstance(item, Optimizer)]
    if wrong or not given:
        raise TypeError(
            f"{call} takes what amp.initialize() returned for its optimizers; got "
            f"{wrong[0] if wrong else f'an empty {type(given).__name__}'} in their place; "
            f"call {call}."
        )
    return list(dict.fromkeys(given))


def process_group_of(process_group: Any, call: str = "amp.initialize(...") -> ProcessGroup | None:
    """Return a ``process_group``.

    Args:
        process_group: as the user gave it.
        call: which takes it, as far as its last argument before.

    Raises:
        TypeError: neither a process group nor None.
    """
    kind = getattr(torch.distributed, "ProcessGroup", None)
    if process_group is None or (kind is not None and isinstance(process_group, kind)):
        given: ProcessGroup | None = process_group
        return given
    raise TypeError(
        "process_group must be a torch.distributed.ProcessGroup that this process is in, or None; "
        f"got {type(process_group).__name__}; call {call}, "
        "process_group=torch.distributed.group.WORLD)."
    )


def loss_of(loss: Any) -> torch.Tensor:
    """Return ``loss``.

    Raises:
        TypeError: not a floating tensor.
    """
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        got = loss.dtype if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(
            f"scale_loss() scales a floating tensor; got {got}; call it with the loss itself, "
            "not with loss.item(), once per loss or with the sum of the losses."
        )
    return loss


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
            f"{_described(optimizer, Optimizer)}; call {call}, once for each optimizer."
        )
    return optimizer


def norms_of(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Return the arguments of ``amp.clip_grad_norm_`` as floats.

    Raises:
        TypeError: not a number.
        ValueError: max_norm below 0, norm_type not above 0, or one of them NaN.
    """
    largest = _number("max_norm", max_norm, "max_norm=1.0")
    if not largest >= 0:
        raise ValueError(
            f"max_norm must be a number of at least 0; got {max_norm!r}; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0)."
        )
    power = _number(
        "norm_type", math.inf if norm_type == "inf" else norm_type, "1.0, norm_type=2.0"
    )
    if not power > 0:
        raise ValueError(
            f"norm_type must be a number above 0, or inf; got {norm_type!r}; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0)."
        )
    return largest, power


def _number(name: str, given: Any, example: str) -> float:
    try:
        if not isinstance(given, (str, bytes)):  # float() would read '1.0'
            return float(given)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(
        f"{name} must be a number; got {type(given).__name__}; call "
        f"amp.clip_grad_norm_(optimizer, {example})."
    )


def refuse_no_state(state_dict: Any) -> None:
    """Raise for what cannot be a state of the loss scalers.

    Raises:
        TypeError: not a mapping.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "a state of the loss scalers is a dict, as amp.state_dict() returned it; got "
            f"{type(state_dict).__name__}; call amp.load_state_dict(checkpoint['amp']) with what "
            "was saved."
        )


def enabled_of(enabled: Any) -> bool:
    """Return ``enabled``.

    Raises:
        TypeError: not a bool; 0 and 1 count.
    """
    if isinstance(enabled, str) and re.fullmatch("[Oo0][0-9]", enabled):
        raise TypeError(
            f"enabled, the third argument, must be True or False; got the opt_level {enabled!r}; "
            f"call amp.initialize(models, optimizers, opt_level='O{enabled[1]}')."
        )
    if not isinstance(enabled, int) or enabled not in (0, 1):
        raise TypeError(
            f"enabled must be True or False; got {enabled!r}; call "
            "amp.initialize(..., enabled=False) to leave models and optimizers alone."
        )
    return bool(enabled)


def verbosity_of(verbosity: Any) -> int | str:
    """Return ``verbosity``.

    Raises:
        TypeError: neither an int nor "skips".
    """
    if isinstance(verbosity, int) or (isinstance(verbosity, str) and verbosity == "skips"):
        return verbosity
    raise TypeError(
        "verbosity must be an int, of which 0 prints nothing, or 'skips' for the lines of skipped "
        f"steps alone; got {verbosity!r}; call amp.initialize(..., verbosity=0)."
    )


def count_of(num_losses: Any) -> int:
    """Return ``num_losses``.

    Raises:
        ValueError: not a positive int.
    """
    if not isinstance(num_losses, int) or isinstance(num_losses, bool) or num_losses < 1:
        raise ValueError(
            f"num_losses must be an int of at least 1; got {num_losses!r}; call "
            "amp.initialize(..., num_losses=1)."
        )
    return num_losses


def trace_overflow_of(trace_overflow: Any) -> bool:
    """Return ``trace_overflow``.

    Raises:
        TypeError: not a bool.
    """
    if not isinstance(trace_overflow, bool):
        raise TypeError(
            f"trace_overflow must be a bool; got {trace_overflow!r}; call "
            "amp.initialize(..., trace_overflow=True)."
        )
    return trace_overflow


def fused_step_of(fused_step: Any, level: str, has_masters: bool) -> bool:
    """Return ``fused_step``.

    Raises:
        TypeError: not a bool.
        RuntimeError: True at a level whose optimizers step no masters.
    """
    if not isinstance(fused_step, bool):
        raise TypeError(
            f"fused_step must be a bool; got {fused_step!r}; call "
            "amp.initialize(..., fused_step=True)."
        )
    if fused_step and not has_masters:
        raise RuntimeError(
            "fused_step=True steps master weights, in one pass with the rest; got opt_level "
            f"{level!r}, which has none; call amp.initialize(..., opt_level='O2', "
            "fused_step=True) or 'O5'."
        )
    return fused_step


def function_rules_of(rules: Mapping[Any, Any]) -> dict[str, str]:
    """Return the rules of functions as a dict.

    Raises:
        TypeError: a function that is not named by a string.
    """
    for name, rule in rules.items():
        if not isinstance(name, str):
            known = getattr(name, "__name__", type(name).__name__)
            is_module = isinstance(name, (type, nn.Module))
            mended = {"modules": {"blocks.*.norm": rule}} if is_module else {"softmax": rule}
            raise TypeError(
                "rules must name functions by strings, and modules of the model by their paths in "
                f"it; got {known} in the place of one; call amp.initialize(..., rules={mended!r})."
            )
    return dict(rules)
