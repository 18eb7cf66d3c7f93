"""What `amp.initialize` does to models, and its undoing; knows no optimizer and no loss scale."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casting import many_uses
from amp_patch.casting.argument_casts import is_on_cast_device
from amp_patch.casting.mode import ALL_DEVICES, OFF, process
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.common.weak_modules import ModuleTable
from amp_patch.distributed.flat_parameters import refuse_original_params
from amp_patch.distributed.fully_sharded import (
    follow_parameters,
    refuse_mixed_groups,
    refuse_other_dtypes,
    reshard,
)
from amp_patch.distributed.shards import set_data
from amp_patch.levels import HALVES, OptLevel

from . import half_model, half_storage, kept_inputs, module_rules, parametrizations
from .fp32_values import FP32Values
from .half_model import ForwardCasts, WeightCasts
from .out_of_range import warn_of_infinite


class ModelHooks(NamedTuple):
    """What the hooks on models call: functions of a module, for a model must be picklable.

    Attributes:
        observe: gets the model, and what it is called with, at the start of its forward, where it
            casts no functions.
        observe_casting: the same, at O1 and O4.
        explain: gets what the forward of a model raised.
        write_state: a state-dict post-hook of each submodule of a model in half.
        read_state: a load-state-dict pre-hook of these.
        before_state: a state-dict pre-hook of the model itself, see `follow_late_modules`.
        before_load: a load-state-dict pre-hook of the model itself, likewise.
    """

    observe: Callable[[nn.Module, Any, Any], None]
    observe_casting: Callable[[nn.Module, Any, Any], None]
    explain: Callable[[BaseException], None]
    write_state: Callable[..., None]
    read_state: Callable[..., None]
    before_state: Callable[..., None]
    before_load: Callable[..., None]


class ModelRules(NamedTuple):
    """What rules say of one model.

    Attributes:
        precisions: path of a module -> "float" or "half".
        kept_inputs: names of arguments that its call leaves as they are.
    """

    precisions: Mapping[str, str] = {}
    kept_inputs: tuple[str, ...] = ()


class _StateHooks(NamedTuple):
    """The hooks of one model in half by which state dicts have fp32 values.

    Attributes:
        handles: take them off.
        modules: those that have them.
    """

    handles: list[Any]
    modules: MutableMapping[nn.Module, None]


class PreparedModels:
    """The initialized models, held weakly, each at the level of its last call.

    Args:
        values: gets the fp32 values of what is stored in half and will be stepped.
        cache: gets the models whose weights are cast (O1, O4).
        hooks: what the hooks on models call.

    Attributes:
        levels: what each model was initialized at.
        numbers: of each model, in the order in which they came.
    """

    def __init__(self, values: FP32Values, cache: WeightCache, hooks: ModelHooks) -> None:
        self._values = values
        self._cache = cache
        self._hooks = hooks
        self.levels: ModuleTable[OptLevel] = ModuleTable()
        self.numbers: ModuleTable[int] = ModuleTable()
        self._count = 0
        self._rules: ModuleTable[ModelRules] = ModuleTable()
        self._probes: ModuleTable[weakref.ref[Tensor]] = ModuleTable()
        self._state_hooks: ModuleTable[_StateHooks] = ModuleTable()
        # of each model that was converted the buffers that came in half, by their paths
        self._converted: ModuleTable[Mapping[str, Tensor]] = ModuleTable()

    def rules_of(
        self, models: Sequence[nn.Module], modules: Mapping[str, str], inputs: Mapping[str, str]
    ) -> list[ModelRules]:
        """Return what rules say of each model that comes.

        Args:
            models: changed by nothing here.
            modules: see `module_rules.find`.
            inputs: see `kept_inputs.find`.

        Raises:
            ValueError: a rule that names no module of them, or no argument of their forward.
        """
        new = itertools.count(self._count)
        numbers = [self.numbers[one] if one in self.numbers else next(new) for one in models]
        precisions = module_rules.find(models, numbers, modules)
        return list(map(ModelRules, precisions, kept_inputs.find(models, inputs)))

    def set_up(
        self,
        models: Sequence[nn.Module],
        level: OptLevel,
        stepped: set[int],
        rules: Sequence[ModelRules],
        on_error: contextlib.ExitStack,
    ) -> None:
        """Set models up at ``level``, in place of an earlier one.

        Args:
            models: in fp32, but for what is frozen.
            level: says whether they are stored in half, and what their forward casts.
            stepped: ids of the parameters that an optimizer of the same call steps.
            rules: for each model, see `rules_of`.
            on_error: gets what undoes it; the models' tensors are somebody else's to restore.
        """
        on_error.callback(self._forget_numbers, self._count)
        for model, own in zip(models, rules, strict=True):
            if model not in self.numbers:
                self.numbers[model] = self._count
                self._count += 1
            earlier = self.levels.get(model), self._rules.get(model, ModelRules())
            on_error.callback(self._put_back, model, *earlier)
            if level.cast_model_type is not None:
                in_float = module_rules.in_float(model, own.precisions)
                norms = bool(level.keep_batchnorm_fp32)
                in_float |= module_rules.keeps_buffers(model, own.precisions, norms)
                in_float |= module_rules.in_float_by_library(model)
                originals = self._store_as(level.cast_model_type, model, level, stepped, in_float)
                on_error.callback(self._values.forget, originals)
                on_error.callback(self._converted.pop, model, None)
                if model in self._converted:
                    follow_parameters(model)
            self._attach(model, level, own)
            self.follow_device(model)
            if level.casts_functions:
                self._cache.add_model(model)
        if not process.devices:  # no parameter says which: weights are tensors beside the model
            process.devices = ALL_DEVICES

    def cast_functions(self) -> None:
        """Cast in the functions that models in half call, too (O2, O3, O5)."""
        for model, level in list(self.levels.items()):
            if level.stores_half:
                casting = replace(level, patch_torch_functions=True)
                self._attach(model, casting, self._rules[model])

    def reshard(self) -> None:
        """Have sharded models hold what their optimizers step; call it before these let go."""
        for model in list(self._converted):
            reshard(model)

    def release(self) -> None:
        """Take every hook off; parameters in half hold their fp32 values again."""
        self._values.handed_out.take_over()
        for model, level in list(self.levels.items()):
            if model in self._converted and level.cast_model_type is not None:
                came_in_half, stored = self._converted[model], list(model.buffers())
                half_storage.restore(model, level.cast_model_type, self._values.exact, came_in_half)
                self._values.forget(stored)
                del self._converted[model]
                follow_parameters(model)
            self._detach(model)
        for tensor in self._values.stored_halves():  # of dropped models, as a shared layer is
            tensor.grad = None
            set_data(tensor, self._values.exact(tensor))

    def refuse_sharded(self, models: Sequence[nn.Module], level: OptLevel) -> None:
        """Raise for models that are sharded in a way that does not go with a level.

        Raises:
            RuntimeError: another half dtype, or two dtypes that are gathered together; flat
                parameters that others are views of.
        """
        if level.stores_half:
            refuse_original_params(models, level.name)
        if level.stores_half or level.casts_functions:
            other = _OTHER_HALF.get(level.name, level.name)
            refuse_other_dtypes(models, level.half_dtype, level.name, other)
        if level.stores_half:
            norms = bool(level.keep_batchnorm_fp32)
            kept = [one for model in models for one in half_storage.kept_in_fp32(model, norms)]
            params = {id(p) for module in kept for p in module.parameters(recurse=False)}
            dtype = level.cast_model_type
            params.update(id(p) for one in models for p in half_storage.kept_by_name(one, dtype))
            refuse_mixed_groups(models, params)

    def holds(self, module: nn.Module) -> bool:
        """Return whether a module is part of a model that is stored in half."""
        return any(module is one for model in self.in_half() for one in model.modules())

    def kept_inputs(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of arguments that the call of a model leaves as they are."""
        return self._rules[model].kept_inputs

    def in_half(self) -> list[nn.Module]:
        """Return the models that are stored in half (O2, O3, O5)."""
        return [one for one, level in self.levels.items() if level.stores_half]

    def stored_in_half(self) -> set[int]:
        """Return the ids of the parameters and buffers of these models."""
        found = (chain(model.parameters(), model.buffers()) for model in self.in_half())
        return set(map(id, chain.from_iterable(found)))

    def casting_dtypes(self) -> set[torch.dtype]:
        """Return the half dtypes of the models that live at O1 or O4."""
        return {level.half_dtype for level in self.levels.values() if level.casts_functions}

    def label_of(self, model: nn.Module) -> str:
        """Return what tells a model from the others: nothing of the only one, else its class.

        ``"Generator"``; ``"Linear 2"`` for the second of two models of a class.
        """
        models = list(self.levels)
        if len(models) < 2:
            return ""
        alike = [other for other in models if type(other) is type(model)]
        name = type(model).__name__
        if len(alike) < 2:
            return name
        return f"{name} {next((n for n, other in enumerate(alike, 1) if other is model), 0)}"

    def names(self) -> Callable[[Tensor], str]:
        """Return what names parameters now, by one look through the models.

        ``"0.weight"``; of several models ``"Generator: 0.weight"``; of none its shape.
        """
        names: dict[int, str] = {}
        for model in list(self.levels):
            label = self.label_of(model)
            for name, param in model.named_parameters():
                names.setdefault(id(param), f"{label}: {name}" if label else name)
        return lambda param: names.get(id(param), f"a parameter of shape {tuple(param.shape)}")

    def follow_device(self, model: nn.Module) -> None:
        """Casts act on the device types of the models' parameters, moved ones included."""
        # One parameter speaks for all: looking through a model takes longer than its hooks.
        param = self._probes.get(model, _nothing)()
        if param is None:
            param = next(model.parameters(), None)
            if param is None:
                return
            self._probes[model] = weakref.ref(param)
        elif is_on_cast_device(param):
            return
        process.devices |= {p.device.type for p in model.parameters()}

    def _store_as(
        self,
        dtype: torch.dtype,
        model: nn.Module,
        level: OptLevel,
        stepped: set[int],
        in_float: Collection[nn.Module],
    ) -> Collection[Tensor]:
        params, came_in_half, rounded = half_storage.convert(
            model, dtype, bool(level.keep_batchnorm_fp32), self.stored_in_half(), in_float
        )
        warn_of_infinite(model, rounded)  # first: a script may make an error of a warning
        if dtype in HALVES or params or came_in_half:
            self._converted[model] = came_in_half
        if dtype in HALVES:
            self._values.add_stored([*params, *rounded])
            many_uses.forget_with(model, params)
        for buffer, original in rounded.items():
            self._values.set_buffer(buffer, original)
        for param, original in params.items():
            if original.dtype in HALVES:
                self._values.set_frozen(param, original)
            # A parameter that nothing trains needs no second copy in fp32.
            elif level.master_weights and (param.requires_grad or id(param) in stepped):
                self._values.set_converted(param, original)
                continue
            if original.grad is not None:
                param.grad = original.grad.to(param.dtype)
        return [*params, *rounded]

    def _attach(self, model: nn.Module, level: OptLevel, rules: ModelRules) -> None:
        """Put the hooks of ``level`` on a model, in place of those of an earlier level."""
        self._detach(model)
        self._rules[model] = rules
        hooks = self._hooks
        ForwardCasts(
            level=level.half_dtype if level.casts_functions else OFF,
            region_dtype=level.half_dtype,
            inputs=level.cast_model_type,
            outputs=level.cast_model_outputs or (torch.float32 if level.cast_model_type else None),
            observe=hooks.observe_casting if level.casts_functions else hooks.observe,
            explain=hooks.explain if level.stores_half or level.casts_functions else None,
            kept=rules.kept_inputs,
            kept_at=kept_inputs.places(kept_inputs.forward_of(model), rules.kept_inputs),
        ).attach(model)
        norms = bool(level.keep_batchnorm_fp32)
        module_rules.attach(model, rules.precisions, level.cast_model_type, norms)
        # most models cast to what they keep by name, and in some a layer is given half all the same
        for layer in half_storage.layers_kept_by_name(model, level.cast_model_type):
            module_rules.TakesDtype(torch.float32).attach(layer)
        self.levels[model] = level
        if level.stores_half:
            self._compute_weights_in_fp32(model, level)
            self._state_hooks[model] = _StateHooks(
                [
                    model.register_state_dict_pre_hook(hooks.before_state),
                    model.register_load_state_dict_pre_hook(hooks.before_load),
                ],
                ModuleTable(),
            )
            self.follow_late_modules(model)

    def follow_late_modules(self, model: nn.Module) -> None:
        """Have modules write and read fp32 values in state dicts, those that came late as well.

        Args:
            model: one in half; another, a copy say, is left as it is.
        """
        known = self._state_hooks.get(model)
        if known is None:
            return
        for module in model.modules():
            if module not in known.modules:
                known.modules[module] = None
                known.handles.append(module.register_state_dict_post_hook(self._hooks.write_state))
                known.handles.append(
                    module.register_load_state_dict_pre_hook(self._hooks.read_state)
                )

    def _compute_weights_in_fp32(self, model: nn.Module, level: OptLevel) -> None:
        """Let parametrizations run as models in fp32 do; layers get their weights as stored."""
        kept = half_storage.kept_in_fp32(model, bool(level.keep_batchnorm_fp32))
        for layer, weight in parametrizations.weights_of(model):
            outputs = None if layer in kept else level.cast_model_type
            WeightCasts(OFF, level.half_dtype, outputs=outputs).attach(weight)

    def _detach(self, model: nn.Module) -> None:
        half_model.detach(model)
        module_rules.detach(model)
        for _, weight in parametrizations.weights_of(model):
            half_model.detach(weight)
        self._rules.pop(model, None)
        known = self._state_hooks.get(model)
        for handle in () if known is None else known.handles:
            handle.remove()
        self._state_hooks.pop(model, None)  # after an interrupt the handles are needed once more
        self.levels.pop(model, None)

    def _put_back(self, model: nn.Module, level: OptLevel | None, rules: ModelRules) -> None:
        """Undo `_attach`: the hooks are again those of ``level``, or none."""
        self._detach(model)
        if level is not None:
            self._attach(model, level, rules)

    def _forget_numbers(self, count: int) -> None:
        """The models that got a number from ``count`` on never came."""
        for model, number in list(self.numbers.items()):
            if number >= count:
                del self.numbers[model]
        self._count = count


def _nothing() -> None:
    return None


#: Of each level the nearest in the other half dtype: O3 has no twin, and O5 keeps float32 masters.
_OTHER_HALF = {"O1": "O4", "O4": "O1", "O2": "O5", "O5": "O2", "O3": "O5"}
