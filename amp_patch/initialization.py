"""What `amp.initialize` does once the level is resolved; the drop-in comes with levels of its own.

Knows the order of checks; what is set up is the session's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import arguments, opt_levels
from .forced_level import Resolved
from .scale_rule import ScaleRule
from .session import session


def initialize_at(
    resolved: Resolved,
    models: Any,
    optimizers: Any,
    *,
    rules: Mapping[str, str],
    num_losses: int,
    verbosity: int,
    fused_step: bool = False,
    allow_half: bool = False,
    **scale_options: Any,
) -> None:
    """Prepare models and optimizers at a level, and print it; nothing changes before all checks.

    Args:
        resolved: the level, and what is to be said of it.
        models, optimizers, num_losses, verbosity, fused_step: as `amp.initialize` takes them.
        rules: dotted path -> rule of a function, at levels that cast functions.
        allow_half: take models with half parameters, too.
        scale_options: of `ScaleRule.resolve`.

    Raises:
        TypeError, RuntimeError, ValueError: as `amp.initialize`.
    """
    level, message = resolved
    scale_rule = ScaleRule.resolve(level.loss_scale, **scale_options)
    verbosity = arguments.verbosity_of(verbosity)
    session.tell_of_casts(verbosity > 1)
    session.initialize(
        arguments.models_of(models, allow_half),
        arguments.optimizers_of(optimizers),
        level,
        scale_rule,
        arguments.count_of(num_losses),
        rules,
        arguments.fused_step_of(fused_step, level.name, bool(level.master_weights)),
    )
    session.verbosity = verbosity
    if verbosity > 0:
        opt_levels.print_level(level, message)
