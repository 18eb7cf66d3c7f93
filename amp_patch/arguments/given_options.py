"""Checks all other arguments: options of `initialize`, a loss, norms, a state of loss scalers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


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
        if not isinstance(loss, torch.Tensor) and hasattr(loss, "backward"):  # Opacus's, say
            raise TypeError(
                f"scale_loss() scales a floating tensor; got {got}, an object with a backward() of "
                "its own; call that outside of scale_loss(), at a level without a scale: "
                "amp.initialize(..., opt_level='O4'), or loss_scale=1.0."
            )
        raise TypeError(
            f"scale_loss() scales a floating tensor; got {got}; call it with the loss itself, "
            "not with loss.item(), once per loss or with the sum of the losses."
        )
    return loss


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
