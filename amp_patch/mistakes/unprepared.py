"""Optimizers that `amp.initialize` never got, and the parameters that only they can step.

Knows parameters of the prepared models, and which of them a scaled loss has reached; nothing of how
gradients are unscaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from amp_patch.casting.mode import HALVES
from amp_patch.kernels import values
from amp_patch.step.foreign_gradients import Watch
from amp_patch.step.optimizer_backward import OptimizerBackward
from amp_patch.step.prepared_optimizers import PreparedOptimizers
from amp_patch.warn_once import warn, warn_once
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.lazy_gradients import stored_grad

_MEND = (
    "call amp.initialize(model, [optimizer, other_optimizer]) with every optimizer of the model, "
    "and amp.scale_loss(loss, [optimizer, other_optimizer])"
)


class UnpreparedParams:
    """The parameters of prepared models that no prepared optimizer steps; false without any.

    What a scaled backward writes to them stays multiplied by the loss scale.
    """

    def __init__(self) -> None:
        self._params: list[TensorWeakRef] = []
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # id of a parameter -> it and its scaled gradient
        self._scaled: dict[int, tuple[TensorWeakRef, TensorWeakRef]] = {}

    def __bool__(self) -> bool:
        return bool(self._params)

    def find(self, models: Iterable[nn.Module], optimizers: PreparedOptimizers) -> None:
        """Look for them anew: models or optimizers were prepared."""
        stepped = _stepped_by(optimizers)
        found = {
            id(param): param
            for model in models
            for param in model.parameters()
            if param.requires_grad and id(param) not in stepped
        }
        self._params = [TensorWeakRef(param) for param in found.values()]
        self._known.clear()

    def watch_foreign(self, is_scaled: bool) -> Watch:
        """See `OptimizerBackward.watch_foreign`."""
        if not is_scaled:
            return Watch([], 0)
        self._scaled = {
            key: (param, grad)
            for key, (param, grad) in self._scaled.items()
            if (there := _still_there(param, grad)) is not None and values(there).any()
        }
        params = [param for reference in self._params if (param := reference()) is not None]
        grads = [(param, stored_grad(param)) for param in params]
        return Watch([(p, grad, 0 if grad is None else grad._version) for p, grad in grads], 0)

    def note_foreign(self, watch: Watch, optimizers: Sequence[OptimizerBackward]) -> None:
        """See `OptimizerBackward.note_foreign`."""
        for param, grad, version in watch.rows:
            now = stored_grad(param)
            if now is not None and (now is not grad or now._version != version):
                self._scaled[id(param)] = TensorWeakRef(param), TensorWeakRef(now)

    def refuse(
        self,
        optimizer: Optimizer,
        models: Iterable[nn.Module],
        optimizers: PreparedOptimizers,
        is_plain: bool,
    ) -> None:
        """Raise where the next step of an optimizer that is not prepared uses scaled gradients.

        Args:
            optimizer: about to step.
            models, optimizers: those that are prepared.
            is_plain: whether the last backward was of no scaled loss.

        Raises:
            RuntimeError: as said.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if optimizer not in self._known:
            self._known.add(optimizer)
            count = self._count_unwatched(params, models, optimizers)
            has_scaled = optimizers.scale_losses and any(
                step.backward.zeroing.passes for step in optimizers.steps.values()
            )
            if count and has_scaled and not is_plain:
                raise RuntimeError(_refusal(optimizer, count))
        count = sum(
            _still_there(*self._scaled[id(param)]) is not None
            for param in params
            if id(param) in self._scaled
        )
        if count:
            raise RuntimeError(_refusal(optimizer, count))

    def _count_unwatched(
        self, params: Sequence[Tensor], models: Iterable[nn.Module], optimizers: PreparedOptimizers
    ) -> int:
        """Watch parameters that were frozen, or not there, when `find` looked.

        Returns:
            How many of them have a gradient, of which nobody knows whether it is scaled.
        """
        own = {id(param) for model in models for param in model.parameters()}
        own -= _stepped_by(optimizers)
        own -= {id(param) for reference in self._params if (param := reference()) is not None}
        new = [param for param in params if id(param) in own]
        self._params += map(TensorWeakRef, new)
        return sum(stored_grad(param) is not None for param in new)


def _refusal(optimizer: Optimizer, count: int) -> str:
    return (
        "gradients that scale_loss() has scaled must be unscaled before they are stepped; got a "
        f"step of a {type(optimizer).__name__} that amp.initialize() never got, with {count} "
        f"gradients that are multiplied by the loss scale; {_MEND}."
    )


def _stepped_by(optimizers: PreparedOptimizers) -> set[int]:
    steps = list(optimizers.steps.values())
    return {id(param) for step in steps for param in step.backward.pairs().model}


def _still_there(param: TensorWeakRef, grad: TensorWeakRef) -> Tensor | None:
    """Return the gradient if the parameter still has it."""
    alive, noted = param(), grad()
    is_same = alive is not None and noted is not None and stored_grad(alive) is noted
    return noted if is_same else None


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
        halves = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if param.dtype in HALVES and store.holds(param)
        ]
        if not halves or optimizer in self._told:
            return
        kind = type(optimizer).__name__
        mend = "call amp.initialize(model, [optimizer, ...]) with every optimizer of the model"
        steps = list(optimizers.steps.values())
        if any(step.backward.has_master_of(halves[0]) for step in steps):
            raise RuntimeError(
                "parameters that were cast to half are stepped through their fp32 masters; got a "
                f"step of a {kind} that amp.initialize() did not return, and holds "
                f"{len(halves)} of them; {mend}."
            )
        self._told.add(optimizer)
        warn(
            f"This {kind} steps {len(halves)} parameters that amp.initialize() cast to half, "
            "where small updates are rounded away: it was not given to amp.initialize(), so there "
            f"are no fp32 masters; {mend}."
        )


def warn_of_strangers(optimizers: Iterable[Optimizer], models: Collection[nn.Module]) -> None:
    """Warn of optimizers that hold no parameter of any of the models, if there are models."""
    own = {id(param) for model in models for param in model.parameters()}
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        is_strange = own and params and own.isdisjoint(map(id, params))
        if is_strange and not _stand_alone(params):
            warn_once(
                "the optimizers of amp.initialize() step its models' parameters; got a "
                f"{type(optimizer).__name__} that holds {len(params)} parameters, of which none is "
                "of these models, so that it trains none of them. Make the optimizer of "
                "model.parameters(), after the last copy of the model, or pass the model that it "
                "belongs to: amp.initialize([model, other_model], [optimizer, other_optimizer])."
            )


def _stand_alone(params: list[Tensor]) -> bool:
    """Tell what a script trains beside its models: no layer's weights.

    So SAC does its temperature, and others the weights of several losses. ``model.parameters()``
    yields parameters, of which hardly one is a single number, and hardly ever one vector alone.
    """
    if len(params) == 1 and params[0].dim() < 2:
        return True
    return all(not isinstance(param, nn.Parameter) or param.numel() == 1 for param in params)
