"""Whether a call is for amp at all, and what was prepared for the optimizers that it names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch.optim import Optimizer

from amp_patch import arguments
from amp_patch.arguments.kinds import as_list
from amp_patch.optimizers.groups import params_of
from amp_patch.weights.fp32_values import FP32Values

from .optimizer_step import OptimizerStep
from .prepared_optimizers import PreparedOptimizers

_NO_STATE = (
    "internal Amp state has not been initialized, or amp.deactivate() has ended it for all models"
)
_MEND = "call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first"
_MEND_ANEW = (
    "call amp.deactivate(), make the optimizer of model.parameters(), and call model, optimizer = "
    "amp.initialize(model, optimizer, opt_level=...) anew, with every optimizer of the model"
)


class Lookup:
    """Answers for the functions that users call; refuses optimizers that were not prepared.

    Args:
        optimizers: those that were.
        in_half: returns the ids of parameters that are stored in half.
        values: has the masters of these, also those of optimizers that are gone.
        is_initialized: returns whether anything was prepared.

    Attributes:
        disabled: True where the last `amp.initialize` was called with ``enabled=False``.
    """

    def __init__(
        self,
        optimizers: PreparedOptimizers,
        in_half: Callable[[], Collection[int]],
        values: FP32Values,
        is_initialized: Callable[[], bool],
    ) -> None:
        self._optimizers, self._in_half, self._values = optimizers, in_half, values
        self._is_initialized = is_initialized
        self.disabled = False
        self._untouched: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def enable(self) -> None:
        """`amp.initialize` has prepared something; optimizers named to `disable` stay plain."""
        self.disabled = False

    def disable(self, optimizers: Any) -> None:
        """``enabled=False``: later calls with these optimizers, of any type, do nothing."""
        self.disabled = True
        self._untouched.update(one for one in as_list(optimizers) if isinstance(one, Optimizer))

    def is_off(self, caller: str) -> bool:
        """Return whether amp is disabled in this process.

        Raises:
            RuntimeError: `amp.initialize` was not called at all.
        """
        is_on = self._is_initialized()
        if not is_on and not self.disabled:
            raise RuntimeError(f"Invoked '{caller}', but {_NO_STATE}; {_MEND}.")
        return not is_on

    def steps_of(self, optimizers: Any, caller: str) -> list[OptimizerStep] | None:
        """Return what was set up for optimizers; None where amp was initialized as disabled.

        Args:
            optimizers: one, or a list or tuple of them; also what wraps or copies them.
            caller: how the function is called that takes them; 'with ' may stand before it.

        Raises:
            TypeError: not an optimizer or a list or tuple of them.
            RuntimeError: `amp.initialize` was not called, or not with this optimizer.
        """
        found = self._optimizers.steps_of(optimizers)
        if found:  # most often, and every iteration comes here
            return found
        if self._are_disabled(optimizers):
            return None
        call = caller.removeprefix("with ")
        given = arguments.optimizers_for(call, self._optimizers.originals_of(optimizers))
        steps = self._optimizers.steps
        for optimizer in given:
            if optimizer not in steps:
                raise RuntimeError(
                    f"{call} got an optimizer that amp.initialize() did not return "
                    f"({type(optimizer).__name__}); {self._mend_for(optimizer)}."
                    if self._is_initialized()
                    else f"Invoked '{caller}', but {_NO_STATE}; "
                    f"got an optimizer ({type(optimizer).__name__}); {_MEND}."
                )
        return [steps[optimizer] for optimizer in given]

    def _mend_for(self, optimizer: Any) -> str:
        """Return what to call for an optimizer that comes later; a model in half takes none."""
        late = {*self._in_half(), *self._values.params_by_master()}
        return _MEND_ANEW if any(id(param) in late for param in params_of(optimizer)) else _MEND

    def hold_masters(self, optimizers: Any) -> bool:
        """Return whether any that was not prepared holds masters, as one of another's groups."""
        masters = self._values.params_by_master()
        others = [
            one
            for one in as_list(self._optimizers.originals_of(optimizers))
            if masters and isinstance(one, Optimizer) and one not in self._optimizers.steps
        ]
        return any(id(param) in masters for param in params_of(*others))

    def _are_disabled(self, optimizers: Any) -> bool:
        if not self._is_initialized():
            return self.disabled
        given = as_list(optimizers)
        return bool(self._untouched and given) and all(
            isinstance(item, Optimizer)
            and item in self._untouched
            and item not in self._optimizers.steps
            for item in given
        )
