"""The level that a script asks for: with its overrides, checked, or the one that is forced.

The environment forces one, or a rules file. Knows no model, optimizer or scaler.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import torch

from .levels import OPT_LEVELS, OptLevel

#: Set by ``amp-patch run --opt-level``.
FORCED_BY: Final = "AMP_PATCH_OPT_LEVEL"


def resolve(
    opt_level: str,
    *,
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
) -> OptLevel:
    """Return the level named, with every keyword that is not None in place of its own setting.

    Args:
        opt_level: 'O0' to 'O5', with the capital letter O.
        cast_model_type: torch.float16, torch.bfloat16 or torch.float32; False stores and feeds
            the model as it is. O1 and O4 take False and torch.float32 only.
        patch_torch_functions: True only at O1 and O4; False there leaves the loss scaling alone.
        keep_batchnorm_fp32: a bool, 'True' or 'False'; refused at O1 and O4.
        master_weights: a bool; refused at O1 and O4.
        loss_scale: 'dynamic', or a finite number above 0, which may be a string ('128.0').
        cast_model_outputs: a floating point dtype.

    Raises:
        TypeError: opt_level is not a str.
        ValueError: loss_scale is neither 'dynamic' nor a finite number above 0.
        RuntimeError: opt_level is unknown, or the level refuses an override.
    """
    level = _level_named(opt_level)
    requested = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
    }
    overrides: dict[str, Any] = {
        option: _checked(option, level, value)
        for option, value in requested.items()
        if value is not None
    }
    return replace(level, **overrides)


class Resolved(NamedTuple):
    """The level to train at.

    Attributes:
        level: with the script's overrides, as far as it takes them.
        message: what was changed in what the script asked for; None where nothing was.
    """

    level: OptLevel
    message: str | None


def is_forced() -> bool:
    """Return whether the environment says the level."""
    return bool(os.environ.get(FORCED_BY))


def resolve_forced(opt_level: str, by_rules: str | None = None, **overrides: Any) -> Resolved:
    """Return the level that the environment forces, else that of the rules, else the one named.

    Args:
        opt_level: what the script asks for, see `resolve`.
        by_rules: what a rules file says; None where it says nothing.
        overrides: of the script. Those that its own level takes and the forced one refuses are
            dropped.

    Raises:
        TypeError, ValueError, RuntimeError: as `resolve`, of the script's own level
            and overrides, and of a forced level that there is not.
    """
    asked = resolve(opt_level, **overrides)
    forced = os.environ.get(FORCED_BY) or by_rules
    if not forced:
        return Resolved(asked, None)
    if forced not in OPT_LEVELS:
        raise RuntimeError(
            f"{FORCED_BY} must be one of {', '.join(OPT_LEVELS)}; got {forced!r}; call "
            f"os.environ.pop({FORCED_BY!r}), or amp-patch run --opt-level O1 script.py."
        )
    given = {option: value for option, value in overrides.items() if value is not None}
    dropped = {option: value for option, value in given.items() if _refuses(forced, option, value)}
    level = resolve(forced, **{k: v for k, v in given.items() if k not in dropped})
    has_none = OPT_LEVELS[forced].loss_scale == 1.0
    kept = level.loss_scale if has_none and level.loss_scale != 1.0 else None
    return Resolved(level, _message(asked.name, forced, dropped, kept))


def _level_named(opt_level: object) -> OptLevel:
    names = f"opt_level must be one of the strings {', '.join(map(repr, OPT_LEVELS))}"
    if not isinstance(opt_level, str):
        guess = f"O{opt_level}" if f"O{opt_level}" in OPT_LEVELS else "O1"
        raise TypeError(
            f"{names}; got {opt_level!r} of type {type(opt_level).__name__}. "
            f"Call amp.initialize(..., opt_level='{guess}')."
        )
    if opt_level in OPT_LEVELS:
        return OPT_LEVELS[opt_level]
    guess, slip = _mend_name(opt_level)
    raise RuntimeError(
        f"{names}; got {opt_level!r}{slip}. Call amp.initialize(..., opt_level='{guess}')."
    )


def _mend_name(opt_level: str) -> tuple[str, str]:
    """Return the name that was likely meant ('O1' when unclear) and the slip, in words."""
    slips = {
        "0": ", which starts with the digit zero, not the capital letter O",
        "o": ", which starts with a lower-case letter o, not the capital letter O",
    }
    guess = "O" + opt_level[1:]
    if guess in OPT_LEVELS and opt_level[0] in slips:
        return guess, slips[opt_level[0]]
    return "O1", ""


def _checked(option: str, level: OptLevel, value: Any) -> Any:
    """Return the value of an override as `OptLevel` holds it."""
    if level.casts_functions and option in _WITH_CAST_MODEL:
        raise RuntimeError(
            f"{option} must be None at opt_level='{level.name}', where {_WITH_CAST_MODEL[option]}; "
            f"got {value!r}. Call amp.initialize(..., opt_level='{level.name}') without it."
        )
    return _CHECKS[option](level, value)


def _check_cast_model_type(level: OptLevel, value: object) -> torch.dtype | None:
    if value is False:
        return None
    if level.casts_functions and value is not torch.float32:
        stored = "O2" if level.half_dtype is torch.float16 else "O5"
        raise RuntimeError(
            f"cast_model_type at opt_level='{level.name}' must be None, False or torch.float32, "
            f"because the weights stay float32 there; got {value!r}. Leave it out, or call "
            f"amp.initialize(..., opt_level='{stored}') to store the model in half precision."
        )
    if isinstance(value, torch.dtype) and value in (torch.float16, torch.bfloat16, torch.float32):
        return value
    raise RuntimeError(
        "cast_model_type must be torch.float16, torch.bfloat16 or torch.float32, or False for a "
        f"model that is not cast; got {value!r}. "
        f"Call amp.initialize(..., cast_model_type={level.half_dtype})."
    )


def _check_patch_torch_functions(level: OptLevel, value: object) -> bool:
    wanted = _flag("patch_torch_functions", value)
    if wanted and not level.casts_functions:
        casting = "O4" if level.half_dtype is torch.bfloat16 else "O1"
        raise RuntimeError(
            "patch_torch_functions is True only at opt_level='O1' and 'O4'; "
            f"got True at opt_level='{level.name}'. "
            f"Call amp.initialize(..., opt_level='{casting}')."
        )
    return wanted


def _check_keep_batchnorm_fp32(level: OptLevel, value: object) -> bool:
    spelled = {"True": True, "False": False}
    return _flag(
        "keep_batchnorm_fp32", spelled.get(value, value) if isinstance(value, str) else value
    )


def _check_loss_scale(level: OptLevel, value: Any) -> float | Literal["dynamic"]:
    if isinstance(value, str) and value == "dynamic":
        return "dynamic"
    try:
        # A bool is a slip for 'dynamic', although float() would read it as 1.0 or 0.0.
        scale = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        scale = math.nan
    if math.isfinite(scale) and scale > 0:
        return scale
    raise ValueError(
        f"loss_scale must be 'dynamic' or a finite number above 0; got {value!r}. Call "
        "amp.initialize(..., loss_scale='dynamic') or amp.initialize(..., loss_scale=128.0)."
    )


def _check_cast_model_outputs(level: OptLevel, value: object) -> torch.dtype:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    raise RuntimeError(
        f"cast_model_outputs must be a floating point torch.dtype or None; got {value!r}. "
        "Call amp.initialize(..., cast_model_outputs=torch.float32)."
    )


def _flag(option: str, value: object) -> bool:
    """Return `value` as a bool; 0 and 1 count, as they did for apex, other objects do not."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise RuntimeError(
        f"{option} must be True, False or None; got {value!r}. "
        f"Call amp.initialize(..., {option}=True), or leave {option} out."
    )


def _refuses(forced: str, option: str, value: Any) -> bool:
    try:
        resolve(forced, **{option: value})
    except RuntimeError:
        return True
    return False


def _message(
    asked: str, forced: str, dropped: dict[str, Any], loss_scale: float | str | None
) -> str | None:
    """Return what the script asked for and gets, in words.

    Args:
        asked, forced: the levels.
        dropped: the options that the forced level refuses.
        loss_scale: of the script, where the forced level has none by itself.
    """
    if asked == forced and not dropped:
        return None
    words = ", ".join(f"{option}={value!r}" for option, value in dropped.items())
    refused = f", which refuses {words}: dropped" if dropped else ""
    own = "" if loss_scale is None else f", with the script's loss_scale={loss_scale!r}"
    return f"amp-patch: opt_level {asked} of the script is run as {forced}{refused}{own}."


#: Overrides that say how a cast model is stored, and why O1 and O4, which cast none, refuse them.
_WITH_CAST_MODEL: Final = {
    "keep_batchnorm_fp32": "batch norms keep their float32 weights by themselves",
    "master_weights": "the model's own weights are float32",
}
_CHECKS: Final[Mapping[str, Callable[[OptLevel, Any], Any]]] = {
    "cast_model_type": _check_cast_model_type,
    "patch_torch_functions": _check_patch_torch_functions,
    "keep_batchnorm_fp32": _check_keep_batchnorm_fp32,
    "master_weights": lambda level, value: _flag("master_weights", value),
    "loss_scale": _check_loss_scale,
    "cast_model_outputs": _check_cast_model_outputs,
}
