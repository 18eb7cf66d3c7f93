"""What `amp.initialize` and the drop-in's do: check everything that is given, then set it up.

Nothing is changed before all checks are passed; what is set up is the session's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import arguments
from .casting.patched_functions import expand
from .casting.rules import PROFILES
from .common.rules_file import Rules
from .common.warn_once import warn
from .levels import OPT_LEVELS, OptLevel, print_level
from .requested_level import Resolved, is_forced
from .scaling.scale_rule import ScaleRule
from .session import session

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


def initialize_at(
    resolved: Resolved,
    models: Any,
    optimizers: Any,
    *,
    num_losses: int,
    verbosity: int | str,
    rules: Rules | None = None,
    lists: Mapping[str, str] | None = None,
    fused_step: bool = False,
    process_group: ProcessGroup | None = None,
    allow_half: bool = False,
    given_scale: Any = None,
    tells_casts: bool | None = None,
    **scale_options: Any,
) -> None:
    """Prepare models and optimizers at a level, and print it; nothing changes before all checks.

    Args:
        resolved: the level, and what is to be said of it.
        models, optimizers, num_losses, verbosity, fused_step, process_group: as `amp.initialize`
            takes them.
        rules: of functions, modules and inputs.
        lists: dotted path -> rule of a function, below these, at levels that cast functions.
        allow_half: take models whose half parameters are trained, too.
        given_scale: the loss scale that the script names; None where the level decides.
        tells_casts: print apex's line for every tensor that is cast; None: at verbosity 2.
        scale_options: of `ScaleRule.resolve`.

    Raises:
        TypeError, RuntimeError, ValueError: as `amp.initialize`.
    """
    level, message = resolved
    scale_rule = ScaleRule.resolve(level.loss_scale, **scale_options)
    verbosity = arguments.verbosity_of(verbosity)
    checked = arguments.models_of(
        models,
        allow_half,
        session.models.stored_in_half(),
        session.lookup.hold_masters(optimizers),
    )
    stepping = arguments.optimizers_of(optimizers)
    if level.casts_functions and not allow_half:
        arguments.refuse_half_steps(stepping)
    rules = rules or Rules()
    with rules.told():
        functions = _rules_of_functions(rules)
        idle = _without_effect(rules, level)
        of_each = session.models.rules_of(checked, rules.modules, rules.inputs)
    if message is not None:  # what a level that the script did not ask for has no use for
        fused_step = fused_step and bool(level.master_weights)
    says_all = verbosity != "skips"
    session.initialize(
        checked,
        stepping,
        level,
        scale_rule,
        arguments.count_of(num_losses),
        {**(lists or {}), **functions} if level.casts_functions else {},
        of_each,
        arguments.fused_step_of(fused_step, level.name, bool(level.master_weights)),
        arguments.process_group_of(process_group),
        says_all and int(verbosity) > 1 if tells_casts is None else tells_casts,
    )
    session.verbosity = verbosity
    if given_scale not in (None, "dynamic"):
        _tell_of_idle(given_scale, scale_options)
    if says_all and int(verbosity) > 0:
        print_level(level, "\n".join(filter(None, [message, idle])) or None)


def _tell_of_idle(given_scale: Any, scale_options: Mapping[str, Any]) -> None:
    """Warn of options that say how a scale moves, beside one that does not move.

    apex's two bounds are not told: its scripts hand both on, whatever the scale is.
    """
    of_apex = ("min_loss_scale", "max_loss_scale")
    idle = [key for key, value in scale_options.items() if value is not None and key not in of_apex]
    if idle:
        warn(
            "options of a dynamic loss scale have no effect beside a static one; got "
            f"loss_scale={given_scale!r} and {', '.join(idle)}. Leave these out, or call "
            "amp.initialize(..., loss_scale='dynamic')."
        )


def _rules_of_functions(given: Rules) -> dict[str, str]:
    """Return dotted path -> rule."""
    own = arguments.function_rules_of(given.functions)
    below = PROFILES[given.profile] if given.profile else {}
    return {**expand(below), **expand(own)}


def _without_effect(rules: Rules, level: OptLevel) -> str | None:
    """Return what is to be said of rules of functions at a level that casts none.

    Raises:
        RuntimeError: there are some, and it is not the environment that says the level.
    """
    given = {"profile": rules.profile, "functions": rules.functions}
    told = " and ".join(f"{key} {value!r}" for key, value in given.items() if value)
    if not told or level.casts_functions:
        return None
    if is_forced():
        return f"amp-patch: {told} of the rules has no effect at {level.name}: dropped."
    switched_off = OPT_LEVELS[level.name].casts_functions
    at = f"{level.name!r}{' with patch_torch_functions=False' if switched_off else ''}"
    mend = (
        "without patch_torch_functions=False"
        if switched_off
        else "with 'O1' or 'O4' for their opt_level"
        if rules.opt_level
        else "at opt_level='O1' or 'O4'"
    )
    raise RuntimeError(
        f"rules say how functions are cast, which opt_level {at} does not do; got {told}, without "
        f"effect there; call amp.initialize(..., rules=...) {mend}."
    )
