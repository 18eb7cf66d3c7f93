"""The rules of ``amp-patch check``; a module for each subject, which enters its rules by import."""

from . import blocks, checkpoints, dtypes, initialization, leftovers, optimizers, registry

#: Where the table is filled.
SUBJECTS = (initialization, leftovers, blocks, optimizers, dtypes, checkpoints)
RULES = registry.RULES
