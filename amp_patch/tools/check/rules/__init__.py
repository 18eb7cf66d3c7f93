"""The rules of ``amp-patch check``; a module for each subject, which enters its rules by import."""

from . import (
    arguments,
    blocks,
    checkpoints,
    custom_functions,
    dtypes,
    gradients,
    initialization,
    late_layers,
    leftovers,
    losses,
    optimizers,
    registry,
)

#: Where the table is filled.
SUBJECTS = (
    initialization,
    arguments,
    late_layers,
    leftovers,
    blocks,
    losses,
    gradients,
    custom_functions,
    optimizers,
    dtypes,
    checkpoints,
)
RULES = registry.RULES
