"""Steps of a model's half parameters by optimizers that `amp.initialize` never got."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

from amp_patch.casting.mode import HALVES
from amp_patch.optimizers.groups import params_of
from amp_patch.step.prepared_optimizers import PreparedOptimizers
from amp_patch.warn_once import warn
from amp_patch.weights.fp32_values import FP32Values


class HalfSteps:
    """Steps of half parameters by optimizers that are not prepared."""

    def __init__(self) -> None:
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def refuse(
        self, optimizer: Optimizer, store: FP32Values, optimizers: PreparedOptimizers
    ) -> None:
        """Raise before such a step if it would go wrong.

        Where no optimizer of these parameters is set up, a warning tells once of what it loses.

        Raises:
            RuntimeError: it holds parameters of which another optimizer steps masters.
        """
        halves = [one for one in params_of(optimizer) if one.dtype in HALVES and store.holds(one)]
        if not halves or optimizer in self._told:
            return
        kind = type(optimizer).__name__
        mend = "call amp.initialize(model, [optimizer, ...]) with every optimizer of the model"
        masters = [step.masters for step in list(optimizers.steps.values())]
        stepped = {id(param) for one in masters if one is not None for param, _ in one.pairs()}
        count = sum(id(param) in stepped for param in halves)
        if count:
            raise RuntimeError(
                "parameters that were cast to half are stepped through their fp32 masters; got a "
                f"step of a {kind} that amp.initialize() did not return, and holds {count} of "
                f"them; {mend}."
            )
        self._told.add(optimizer)
        warn(
            f"This {kind} steps {len(halves)} parameters that amp.initialize() cast to half, "
            "where small updates are rounded away: it was not given to amp.initialize(), so there "
            f"are no fp32 masters; {mend}."
        )
