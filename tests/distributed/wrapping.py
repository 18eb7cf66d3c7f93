"""Models that a parallel wrapper holds before `amp.initialize` gets them."""

from __future__ import annotations

import rank_training as training
import torch
from torch.nn.parallel import DistributedDataParallel

from amp_patch import amp


def said_of(level: str, gives_wrapper: bool) -> str:
    """Return what is said of a model, or of the wrapper around it, that comes wrapped.

    Nothing is changed then.
    """
    model = training.make_model()
    wrapper = DistributedDataParallel(model)
    optimizer = training.adamw(model.parameters())
    try:
        amp.initialize(wrapper if gives_wrapper else model, optimizer, opt_level=level, verbosity=0)
    except RuntimeError as error:
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        return str(error)
    return "nothing"


def of_a_part(level: str) -> str:
    """Return what is said of a model of which a wrapper holds one layer."""
    model = training.make_model()
    model[0] = DistributedDataParallel(model[0])
    optimizer = training.adamw(model.parameters())
    try:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def all_that_is_said(levels: tuple[str, ...]) -> list[str]:
    """Return what is said of each way at each level."""
    said = []
    for level in levels:
        said += [said_of(level, True), said_of(level, False), of_a_part(level)]
    return said
