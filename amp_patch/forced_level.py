"""The opt_level that the environment puts in the place of a script's; knows no model."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from . import opt_levels
from .opt_levels import OptLevel

#: Set by ``amp-patch run --opt-level``.
VARIABLE = "AMP_PATCH_OPT_LEVEL"


class Resolved(NamedTuple):
    """The level to train at.

    Attributes:
        level: with the script's overrides, as far as it takes them.
        message: what was changed in what the script asked for; None where nothing was.
    """

    level: OptLevel
    message: str | None


def resolve(opt_level: str, **overrides: Any) -> Resolved:
    """Return the level that the environment forces, else the one named; see `opt_levels.resolve`.

    Args:
        opt_level: what the script asks for.
        overrides: of the script. Those that its own level takes and the forced one refuses are
            dropped.

    Raises:
        TypeError, ValueError, RuntimeError: as `opt_levels.resolve`, of the script's own level
            and overrides, and of a forced level that there is not.
    """
    asked = opt_levels.resolve(opt_level, **overrides)
    forced = os.environ.get(VARIABLE)
    if not forced:
        return Resolved(asked, None)
    if forced not in opt_levels.OPT_LEVELS:
        raise RuntimeError(
            f"{VARIABLE} must be one of {', '.join(opt_levels.OPT_LEVELS)}; got {forced!r}; call "
            f"os.environ.pop({VARIABLE!r}), or amp-patch run --opt-level O1 script.py."
        )
    given = {option: value for option, value in overrides.items() if value is not None}
    dropped = {option: value for option, value in given.items() if _refuses(forced, option, value)}
    level = opt_levels.resolve(forced, **{k: v for k, v in given.items() if k not in dropped})
    return Resolved(level, _message(asked.name, forced, dropped))


def _refuses(forced: str, option: str, value: Any) -> bool:
    try:
        opt_levels.resolve(forced, **{option: value})
    except RuntimeError:
        return True
    return False


def _message(asked: str, forced: str, dropped: dict[str, Any]) -> str | None:
    if asked == forced and not dropped:
        return None
    words = ", ".join(f"{option}={value!r}" for option, value in dropped.items())
    refused = f", which refuses {words}: dropped" if dropped else ""
    return f"amp-patch: opt_level {asked} of the script is run as {forced}{refused}."
