"""Models whose weights are all in float64, of which no level casts anything.

Knows models as the script passes them; nothing that was prepared.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from amp_patch.common.warn_once import warn_once
from amp_patch.levels import OptLevel


def warn_of_float64(models: Iterable[nn.Module], level: OptLevel) -> None:
    """Warn of models that stay in float64, at a level that computes or stores in half.

    A part in float64, as a solver beside layers in float32, is meant so.
    """
    if not (level.casts_functions or level.stores_half):
        return
    for model in models:
        floats = [one.dtype for one in model.parameters() if one.dtype.is_floating_point]
        if set(floats) == {torch.float64}:
            warn_once(
                "amp.initialize() casts models in float32, and leaves float64 as it is; got a "
                f"model of type {type(model).__name__} whose floating parameters ({len(floats)}) "
                f"are all in float64: opt_level {level.name!r} casts none of them, nor what is "
                "computed with them. Call model.float() before amp.initialize(), and give the "
                "model float32 inputs."
            )
