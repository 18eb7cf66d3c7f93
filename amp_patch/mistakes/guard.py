"""All that is looked out for in one session: what is replaced, and what comes before a step.

Knows the families of mistakes, and what was prepared; a session makes one and calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.casting import gradient_hooks, torch_sites
from amp_patch.distributed import unsynced
from amp_patch.distributed.unsynced import Unsynced
from amp_patch.levels import HALVES, OptLevel
from amp_patch.patching import Patches
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.step.autograd_graph import leaves_of
from amp_patch.step.prepared_optimizers import PreparedOptimizers
from amp_patch.weights import collective_writes, sent_values
from amp_patch.weights.exact_copies import ExactCopies
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.prepared_models import PreparedModels

from . import (
    averages,
    bypasses,
    checkpoints,
    clearing,
    clipping,
    conversions,
    early_wrapping,
    grad_scaler,
    hooks,
    late_sharding,
    lost_scales,
    master_hooks,
    master_inputs,
    running_statistics,
    split_backward,
)
from .backwards import Backwards
from .dtype_notes import explain, explaining, explaining_cells, notebook
from .grad_scaler import Passes, ServedScalers
from .half_steps import HalfSteps
from .late_modules import LateModules
from .lone_overflows import ScaleUsers
from .plain_averages import PlainAverages
from .rounded_targets import RoundedTargets
from .running_statistics import RunningStatistics
from .split_averages import SplitAverages
from .strange_optimizers import refuse_flat, warn_of_strangers
from .unprepared import UnpreparedParams
from .wide_models import warn_of_float64


class Guard:
    """Looks out for mistakes.

    Args:
        models, optimizers, values: of the session.
        after_lone: see `Backwards`.

    Attributes:
        unprepared: parameters that a scaled loss reaches, and nobody unscales; false without any.
        plain_averages: kept by a script in tensors of its own; false where none is looked for.
        unsynced: models that may leave gradients on one rank; false without any.
        targets: that models in half are called with.
        scale_users: the optimizers that use each loss scaler, where there are several ranks.
        backwards: calls of ``backward`` around blocks.
    """

    def __init__(
        self,
        models: PreparedModels,
        optimizers: PreparedOptimizers,
        values: FP32Values,
        after_lone: Callable[[], None],
    ) -> None:
        self._models, self._optimizers, self._values = models, optimizers, values
        self.unprepared = UnpreparedParams(lambda: self.backwards.plain, optimizers.steps)
        self.backwards = Backwards(
            optimizers.scaled_params,
            optimizers.running,
            after_lone,
            optimizers.give_back_gradients,
            optimizers.offer_gradients,
            optimizers.steps,
            self.unprepared,
            optimizers.param_of,
        )
        self._half_steps = HalfSteps()
        self._copies = ExactCopies(values, models.in_half, optimizers.note_writes)
        self.plain_averages = PlainAverages(optimizers.params)
        self.unsynced = Unsynced(lambda: self.backwards.begun)
        self.targets = RoundedTargets()
        self.scale_users = ScaleUsers(self.unsynced.averaged_among)
        self._split_averages = SplitAverages(
            lambda: [step.backward for step in optimizers.steps.values()],
            self.unsynced.averaged_among,
        )
        self._late_modules = LateModules()
        self._statistics = RunningStatistics()
        self._follows_halves = self._follows_statistics = self._explains = False
        self._wrappers: list[nn.Module] = []

    def replacements(
        self, passes: Passes, scalers: Sequence[LossScaler]
    ) -> dict[str, Callable[[Any], Any]]:
        """Return, for each function of torch by its path, what makes its replacement.

        Args:
            passes, scalers: for the objects of ``GradScaler`` that are served.
        """
        served = ServedScalers(self._optimizers, scalers, passes, self.unprepared.forget)
        return {
            **grad_scaler.replacements(served),
            **bypasses.replacements(self._optimizers),
            **clearing.replacements(self._optimizers),
            **lost_scales.replacements(self._optimizers),
            **clipping.replacements(self._optimizers, self._refuse_clip),
            **averages.replacements(self._values, self._models.in_half),
            **self._of_late_modules(served),
            **conversions.replacements(lambda: self._models.levels, self._copies.exact_values),
            **hooks.replacements(self._scaled_models, self._optimizers.param_of),
            **split_backward.replacements(),
            **self.backwards.replacements(),
            **self._copies.replacements(),
            **collective_writes.replacements(self._values, self._split_averages.look),
            **sent_values.replacements(self._values, lambda: self._optimizers.have_shares),
            f"{unsynced.DDP}.__init__": self._noting_init,
            f"{unsynced.DDP}._register_fused_optim": self._refusing_fused,
            f"{unsynced.DDP}._pre_forward": self.unsynced.noting_forward,
        }

    def open_block(
        self, scaled_loss: Tensor, params: Callable[[], Iterable[Tensor]]
    ) -> Callable[[], None]:
        """See `Backwards.open`."""
        if self.unprepared.looks_at_losses:
            self.unprepared.look_at(leaves_of(scaled_loss), self._optimizers)
        return self.backwards.open(scaled_loss, params)

    def follow_imports(self, patches: Patches) -> None:
        """Replace in modules of torch that the script imports later, too.

        Args:
            patches: have made the replacements.
        """
        self._late_modules.follow(patches)

    def _of_late_modules(self, served: ServedScalers) -> dict[str, Callable[[Any], Any]]:
        made = checkpoints.replacements(self._optimizers)
        made[late_sharding.FSDP] |= late_sharding.replacements(self._optimizers, self._values)
        made[grad_scaler.SHARDED] = grad_scaler.sharded_replacements(served)
        backward = f"{unsynced.STAGES}._PipelineStageBase.backward_maybe_with_nosync"
        made[unsynced.STAGES] = {backward: self.unsynced.noting_backward}
        return self._late_modules.imported(made)

    def _noting_init(self, original: Callable[..., None]) -> Callable[..., None]:
        return self.unsynced.noting(early_wrapping.refusing_delay(original, self._sets_aside))

    def _sets_aside(self, params: Sequence[Tensor]) -> bool:
        """Return whether a block of `scale_loss` sets aside gradients of some parameters."""
        own, halves = set(map(id, params)), any(param.dtype in HALVES for param in params)
        stepped = map(id, self._optimizers.params())
        return (halves or self._optimizers.scalers.scale_losses) and not own.isdisjoint(stepped)

    def _refusing_fused(self, original: Callable[..., None]) -> Callable[..., None]:
        return early_wrapping.refusing_fused(original, self._are_stepped_after_blocks)

    def _are_stepped_after_blocks(self, params: Sequence[Tensor]) -> bool:
        """Return whether some that learn have masters at their level, or scaled gradients."""
        own = {id(param) for param in params if param.requires_grad}
        levels = list(self._models.levels.items())
        with_masters = [model for model, level in levels if level.master_weights]
        models = [*with_masters, *(self._scaled_models() if self._optimizers.steps else ())]
        return any(id(param) in own for model in models for param in model.parameters())

    def _scaled_models(self) -> list[nn.Module]:
        return list(self._models.levels) if self._optimizers.scalers.scale_losses else []

    def look_at(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], level: OptLevel
    ) -> None:
        """Look at what is to be prepared, before anything is changed.

        Raises:
            RuntimeError: a model in a parallel wrapper, at a level that changes its parameters; or
                parameters whose memory an optimizer steps as another tensor.
        """
        self._wrappers = []  # of a call that failed: they are kept alive no longer
        wrappers = early_wrapping.wrappers_of(models)
        early_wrapping.refuse(wrappers, models, level)
        self._wrappers = wrappers
        warn_of_float64(models, level)
        if models:
            if level.cast_model_type in HALVES or level.loss_scale != 1.0:
                refuse_flat(optimizers, models)
            warn_of_strangers(optimizers, [*models, *self._models.levels])

    def follow(self, models: Sequence[nn.Module], patches: Patches) -> None:
        """Models and optimizers were prepared.

        Args:
            models: those of this call.
            patches: undoes what is replaced where one is in half.
        """
        self.unsynced.follow([*models, *self._wrappers])
        self._wrappers = []
        self.plain_averages.follow(models)
        hooks.tell_of_earlier(models if self._optimizers.scalers.scale_losses else ())
        self.unprepared.find(list(self._models.levels), self._optimizers)
        for step in self._optimizers.steps.values():
            step.backward.follow_strays(self.unprepared)
        casting = [model for model in models if self._models.levels[model].casts_functions]
        gradient_hooks.follow(casting, patches)
        halves = [model for model in models if self._models.levels[model].stores_half]
        for model in halves:
            level, kept = self._models.levels[model], self._models.kept_inputs(model)
            self.targets.follow(model, level.name, level.half_dtype, kept)
        self._copies.follow(halves, patches)
        if halves and not self._follows_halves:
            self._follows_halves = True
            param_of = self._optimizers.param_of
            of_masters = {
                **master_inputs.replacements(param_of),
                **master_hooks.replacements(param_of),
            }
            torch_sites.replace(patches, {**averages.OF_HALVES, **of_masters})
        if not self._follows_statistics and any(map(running_statistics.holds_any, halves)):
            self._follows_statistics = True
            torch_sites.replace(patches, self._statistics.replacements())
        if (halves or casting) and not self._explains:
            self._explains = True
            hook = explaining(sys.excepthook, self._models.levels)
            patches.replace(sys, "excepthook", hook)
            shell = notebook()
            if shell is not None:
                show = explaining_cells(shell.showtraceback, self._models.levels)
                patches.replace(shell, "showtraceback", show)

    def before_step(self, optimizer: Optimizer) -> None:
        """Look before the step of any optimizer of torch.

        Raises:
            RuntimeError: one that is not prepared is about to step what it must not.
        """
        steps = self._optimizers.steps
        if optimizer not in steps and self._optimizers.originals_of(optimizer) not in steps:
            models, is_plain = list(self._models.levels), self.backwards.last_was_plain
            self.unprepared.refuse(optimizer, models, self._optimizers, is_plain)
            self._half_steps.refuse(optimizer, self._values, self._optimizers)
        elif self.plain_averages:
            self.plain_averages.look()

    def _refuse_clip(self, params: Sequence[Tensor], call: str) -> None:
        """See `UnpreparedParams.refuse_clip`."""
        is_plain = self.backwards.last_was_plain
        self.unprepared.refuse_clip(params, call, self._optimizers, is_plain)

    def explain(self, error: BaseException) -> None:
        """Add to what a model raised, see `dtype_notes`."""
        explain(error, self._models.levels)
