"""Steps of a model's half parameters by optimizers that `amp.initialize` never got."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.common.warn_once import warn
from amp_patch.levels import HALVES
from amp_patch.optimizers.groups import params_of
from amp_patch.step.prepared_optimizers import PreparedOptimizers
from amp_patch.weights.fp32_values import FP32Values


class HalfSteps:
    """Steps of half parameters, or of their masters, by optimizers that are not prepared."""

    def __init__(self) -> None:
        # By optimizer, what was set up for others when its masters were looked for.
        self._looked: weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]] = (
            weakref.WeakKeyDictionary()
        )
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def refuse(
        self, optimizer: Optimizer, values: FP32Values, optimizers: PreparedOptimizers
    ) -> None:
        """Raise before such a step if it would go wrong.

        Where no optimizer of these parameters is set up, a warning tells once of what it loses;
        so it does of masters that are nobody's any more.

        Raises:
            RuntimeError: it holds parameters of which another optimizer steps masters.
        """
        halves = [one for one in params_of(optimizer) if one.dtype in HALVES and values.holds(one)]
        prepared = tuple(map(id, optimizers.steps.values()))
        if self._looked.get(optimizer) != prepared:
            self._looked[optimizer] = prepared
            self._warn_of_masters(optimizer, values, optimizers)
        if not halves or optimizer in self._told:
            return
        kind = type(optimizer).__name__
        mend = "call amp.initialize(model, [optimizer, ...]) with every optimizer of the model"
        masters = [step.masters for step in list(optimizers.steps.values())]
        stepped = {id(param) for one in masters if one is not None for param in one.pairs.params}
        count = sum(id(param) in stepped for param in halves)
        if count:
            raise RuntimeError(
                "parameters that were cast to half are stepped through their fp32 masters; got a "
                f"step of an optimizer of type {kind} that holds {count} of them, and that "
                f"amp.initialize() did not return; {mend}."
            )
        self._told.add(optimizer)
        warn(
            f"This {kind} steps {len(halves)} parameters that amp.initialize() cast to half, "
            "where small updates are rounded away: it was not given to amp.initialize(), so there "
            f"are no fp32 masters; {mend}."
        )

    def _warn_of_masters(
        self, optimizer: Optimizer, values: FP32Values, optimizers: PreparedOptimizers
    ) -> None:
        """Warn where an optimizer steps masters that their own, which is gone, had in its groups.

        While that one lives, the model gets what is written to its masters.
        """
        masters = values.params_by_master()

        def is_left(one: Tensor) -> bool:
            return id(one) in masters and optimizers.param_of(one) is one

        count = sum(map(is_left, params_of(optimizer)))
        if count:
            warn(
                f"This {type(optimizer).__name__} steps {count} fp32 masters of an optimizer that "
                "amp.initialize() returned and that is gone: nothing brings them to the model, "
                "which is not trained; call amp.deactivate(), make the optimizer of "
                "model.parameters(), and call model, optimizer = amp.initialize(model, optimizer, "
                "opt_level=...) anew, with every optimizer of the model."
            )
