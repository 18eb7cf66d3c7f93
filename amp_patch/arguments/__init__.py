"""Checks what users pass to the functions of `amp`, before anything is changed.

The other rooms import from here.
"""

from .given_models import (
    models_of,
    refuse_compiled,
    refuse_unstorable,
)
from .given_optimizers import (
    optimizer_of,
    optimizers_for,
    optimizers_of,
    refuse_fake,
    refuse_half_params,
    refuse_half_steps,
    refuse_meta,
    refuse_shared_state,
    refuse_twice,
)
from .given_options import (
    count_of,
    enabled_of,
    function_rules_of,
    fused_step_of,
    loss_of,
    norms_of,
    process_group_of,
    refuse_no_state,
    trace_overflow_of,
    verbosity_of,
)

__all__ = [
    "count_of",
    "enabled_of",
    "function_rules_of",
    "fused_step_of",
    "loss_of",
    "models_of",
    "norms_of",
    "optimizer_of",
    "optimizers_for",
    "optimizers_of",
    "process_group_of",
    "refuse_compiled",
    "refuse_fake",
    "refuse_half_params",
    "refuse_half_steps",
    "refuse_meta",
    "refuse_no_state",
    "refuse_shared_state",
    "refuse_twice",
    "refuse_unstorable",
    "trace_overflow_of",
    "verbosity_of",
]
