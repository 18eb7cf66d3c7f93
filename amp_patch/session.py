"""All state of one run, and the order of a training step."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import arguments, cast_rules, half_model, torch_compile, torch_hooks
from .cast_mode import OFF, mode, process
from .casting import Casts
from .half_model import ForwardCasts
from .loss_scaler import LossScaler, ScaleRule
from .master_weights import HALVES, FP32Store
from .opt_levels import OptLevel, describe
from .optimizer_step import OptimizerStep
from .patching import Patches
from .snapshot import Snapshot
from .weight_cache import WeightCache

USER_RULES = ("half", "float", "promote", "bfloat16", "off")
_MEND = "call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first"


class Session:
    """What `amp.initialize` set up, until `amp.deactivate`.

    Models and optimizers are held weakly: what the user drops takes its state along.

    Attributes:
        scalers: one list per process; a loss_id of an optimizer points into it.
        verbosity: above 0, apex's messages are printed.
    """

    def __init__(self) -> None:
        self.cache = WeightCache()
        self.casts = Casts(self.cache)
        self.store = FP32Store()
        self._user_rules: dict[str, str] = {}
        self._registered: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self._reset()

    def _reset(self) -> None:
        self.scalers: list[LossScaler] = []
        self.verbosity = 1
        self.initialized = False
        self.disabled = False
        self._levels: weakref.WeakKeyDictionary[nn.Module, OptLevel] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Optimizer, OptimizerStep] = (
            weakref.WeakKeyDictionary()
        )
        self._probes: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self._untouched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._state_hooks: weakref.WeakKeyDictionary[nn.Module, list[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._torch_patches = Patches()
        self._cast_patches = Patches()
        self._step_hook: Any = None
        process.reset()

    # -- setting up --------------------------------------------------------------------------

    def initialize(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        level: OptLevel,
        scale_rule: ScaleRule,
        num_losses: int,
        rules: Mapping[str, str],
    ) -> None:
        """Set models and optimizers up at ``level``; on an error everything is as before."""
        arguments.refuse_twice(optimizers, self._steps)
        if level.cast_model_type in HALVES:
            arguments.refuse_uninitialized(models)
        rules = _expand(rules)
        mode.leave_all_models()
        with contextlib.ExitStack() as on_error:
            self._start(on_error)
            on_error.callback(Snapshot(models, optimizers).restore)
            self._set_up_functions(level, rules, on_error)
            on_error.callback(self.store.end_conversion)
            self._set_up_models(models, optimizers, level, on_error)
            self._set_up_optimizers(optimizers, level, scale_rule, num_losses, on_error)
            self.store.end_conversion()
            self._unpatch_if_unused()
            on_error.pop_all()
        self.disabled = False

    def disable(self, optimizers: Any) -> None:
        """``enabled=False``: later calls with these optimizers, of any type, do nothing."""
        self.disabled = True
        given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self._untouched.update(item for item in given if isinstance(item, Optimizer))

    def deactivate(self) -> None:
        """Restore everything patched; parameters hold their fp32 values again."""
        mode.leave_all_models()
        steps = list(self._steps.values())
        levels = list(self._levels.items())
        for step in steps:
            step.release()
        for model, level in levels:
            if level.cast_model_type in HALVES:
                half_model.restore(model, level.cast_model_type, self.store.exact)
            self._detach(model)
        if any(level.cast_model_type in HALVES for _, level in levels):
            for step in steps:
                step.match_state()
        self._cast_patches.undo()
        self._torch_patches.undo()
        if self._step_hook is not None:
            self._step_hook.remove()
        self.cache.clear()
        self.store.clear()
        self._user_rules.clear()
        self._reset()

    def register(self, module: Any, name: str, rule: str) -> None:
        """Cast the arguments of ``module.name`` by ``rule`` from the next O1/O4 on, or from now."""
        before = dict(self._registered)
        self._registered[id(module), name] = (module, name, rule)
        if not self._cast_patches:
            return
        try:
            self._reinstall()
        except BaseException:
            self._registered = before
            self._reinstall()
            raise

    def _start(self, on_error: contextlib.ExitStack) -> None:
        """Patch what every level needs, at the first call."""
        if self.initialized:
            return
        on_error.callback(self.deactivate)
        torch_hooks.install(self._torch_patches)
        self._step_hook = register_optimizer_step_post_hook(_after_any_step)
        self.initialized = True

    def _set_up_models(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        level: OptLevel,
        on_error: contextlib.ExitStack,
    ) -> None:
        stepped = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for model in models:
            on_error.callback(self._put_back, model, self._levels.get(model))
            if level.cast_model_type in HALVES:
                originals = self._store_in_half(model, level, stepped)
                on_error.callback(self.store.forget, originals)
            self._attach(model, level)
            self.follow_device(model)
            if level.casts_functions:
                self.cache.add_model(model)

    def _attach(self, model: nn.Module, level: OptLevel) -> None:
        """Put the hooks of ``level`` on a model, in place of those of an earlier level."""
        self._detach(model)
        outputs = level.cast_model_outputs or (torch.float32 if level.cast_model_type else None)
        ForwardCasts(
            level=level.half_dtype if level.casts_functions else OFF,
            region_dtype=level.half_dtype,
            inputs=level.cast_model_type,
            outputs=outputs,
            observe=_observe_cast_model if level.casts_functions else _observe_model,
        ).attach(model)
        self._levels[model] = level
        if level.cast_model_type in HALVES:
            self._state_hooks[model] = [
                handle
                for module in model.modules()
                for handle in (
                    module.register_state_dict_post_hook(_write_state),
                    module.register_load_state_dict_pre_hook(_read_state),
                )
            ]

    def _detach(self, model: nn.Module) -> None:
        half_model.detach(model)
        for handle in self._state_hooks.pop(model, ()):
            handle.remove()
        self._levels.pop(model, None)

    def _put_back(self, model: nn.Module, level: OptLevel | None) -> None:
        """Undo `_attach`: the hooks are again those of ``level``, or none."""
        self._detach(model)
        if level is not None:
            self._attach(model, level)

    def _store_in_half(
        self, model: nn.Module, level: OptLevel, stepped: set[int]
    ) -> Iterable[nn.Parameter]:
        dtype = level.cast_model_type
        assert dtype is not None
        originals = half_model.convert(model, dtype, bool(level.keep_batchnorm_fp32))
        for param, original in originals.items():
            # A parameter that nothing trains needs no second copy in fp32.
            if level.master_weights and (param.requires_grad or id(param) in stepped):
                self.store.set_converted(param, original)
            elif original.grad is not None:
                param.grad = original.grad.to(dtype)
        return originals

    def _set_up_optimizers(
        self,
        optimizers: Sequence[Optimizer],
        level: OptLevel,
        scale_rule: ScaleRule,
        num_losses: int,
        on_error: contextlib.ExitStack,
    ) -> None:
        on_error.callback(self._set_scalers, list(self.scalers))
        scaler_ids = self._assign_scalers(scale_rule, num_losses)
        for optimizer in optimizers:
            store = self.store if level.master_weights else None
            step = OptimizerStep(optimizer, store, scaler_ids, self._announce)
            on_error.callback(step.release)
            self._steps[optimizer] = step
            on_error.callback(self._steps.pop, optimizer, None)
            if level.cast_model_type in HALVES:
                step.match_state()

    def _set_scalers(self, scalers: Sequence[LossScaler]) -> None:
        self.scalers[:] = scalers

    def _assign_scalers(self, rule: ScaleRule, num_losses: int) -> dict[int, int]:
        """Return loss_id -> index in `scalers` for the optimizers of one call.

        A scaler in use by a living optimizer is shared where its rule is the same and never
        reset; where the rule differs the call gets one of its own at the end of the list.
        """
        in_use = {index for step in self._steps.values() for index in step.scalers.values()}
        del self.scalers[max(in_use, default=-1) + 1 :]
        assigned: dict[int, int] = {}
        for loss_id in range(num_losses):
            index = loss_id
            shared = index in in_use and self.scalers[index].rule == rule
            taken = index in in_use or index in assigned.values()
            if index >= len(self.scalers) or (taken and not shared):
                index = len(self.scalers)
                self.scalers.append(LossScaler(rule))
            elif not shared:
                self.scalers[index] = LossScaler(rule)
            assigned[loss_id] = index
        return assigned

    def _set_up_functions(
        self, level: OptLevel, rules: Mapping[str, str], on_error: contextlib.ExitStack
    ) -> None:
        """Patch torch's functions for O1 and O4; rules hold while a model at O1 or O4 lives."""
        on_error.callback(process.restore, process.save())
        process.region_dtype = level.half_dtype
        if not level.casts_functions:
            return
        process.dtype = level.half_dtype
        rules = {**(self._user_rules if self._casting_levels() else {}), **rules}
        if rules == self._user_rules and self._cast_patches:
            return
        on_error.callback(self._set_user_rules, self._user_rules, bool(self._cast_patches))
        self._set_user_rules(rules, True)

    def _set_user_rules(self, rules: dict[str, str], patched: bool) -> None:
        self._user_rules = rules
        if patched:
            self._reinstall()
        else:
            self._cast_patches.undo()

    def _unpatch_if_unused(self) -> None:
        """Torch's functions stay patched while a model at O1 or O4 lives, and only then."""
        dtypes = {level.half_dtype for level in self._casting_levels()}
        if not dtypes:
            process.dtype = OFF
            self._set_user_rules({}, False)
        elif process.dtype not in dtypes:
            process.dtype = dtypes.pop()

    def _casting_levels(self) -> list[OptLevel]:
        return [level for level in self._levels.values() if level.casts_functions]

    def _reinstall(self) -> None:
        self._cast_patches.undo()
        try:
            torch_compile.install(self._cast_patches)
            self.casts.install(self._cast_patches, self._user_rules, self._registered.values())
        except BaseException:
            self._cast_patches.undo()
            raise

    # -- a training step ---------------------------------------------------------------------

    def steps_of(self, optimizers: Any, caller: str) -> list[OptimizerStep] | None:
        """Return what was set up for optimizers; None where amp was initialized as disabled.

        Raises:
            TypeError: not an optimizer or a list or tuple of them.
            RuntimeError: `amp.initialize` was not called, or not with this optimizer.
        """
        if self._is_disabled(optimizers):
            return None
        given = list(dict.fromkeys(arguments.optimizers_of(optimizers)))
        if not given:
            raise TypeError(
                f"{caller} needs the optimizer whose gradients it handles; got {optimizers!r}; "
                f"{_MEND}."
            )
        for optimizer in given:
            if optimizer not in self._steps:
                raise RuntimeError(
                    f"{caller} got an optimizer that amp.initialize() did not return "
                    f"({type(optimizer).__name__}); {_MEND}."
                    if self.initialized
                    else f"Invoked {caller}, but internal Amp state has not been initialized; got "
                    f"a {type(optimizer).__name__}; {_MEND}."
                )
        return [self._steps[optimizer] for optimizer in given]

    def is_off(self, caller: str) -> bool:
        """Return whether amp is disabled in this process.

        Raises:
            RuntimeError: `amp.initialize` was not called at all.
        """
        if not self.initialized and not self.disabled:
            raise RuntimeError(
                f"Invoked {caller}, but internal Amp state has not been initialized; {_MEND}."
            )
        return not self.initialized

    def settle(self) -> None:
        """Finish every check that ``delay_overflow_check`` left open."""
        for step in list(self._steps.values()):
            step.settle()

    def find_step(self, optimizer: Optimizer) -> OptimizerStep | None:
        """Return what was set up for an optimizer, or None."""
        return self._steps.get(optimizer)

    def scaler_of(self, step: OptimizerStep, loss_id: Any) -> int:
        """Return the index of the scaler of an optimizer's loss.

        Raises:
            IndexError: no such loss.
        """
        known = loss_id in step.scalers if isinstance(loss_id, int) else False
        return step.scalers[loss_id] if known else self.check_scaler(loss_id)

    def check_scaler(self, index: Any) -> int:
        """Return ``index`` if the list of scalers has it.

        Raises:
            IndexError: it has not.
        """
        if not isinstance(index, int) or not 0 <= index < len(self.scalers):
            raise IndexError(
                f"loss_id must be an int below the number of losses ({len(self.scalers)}); got "
                f"{index!r}; call amp.initialize(..., num_losses=...) with as many as there are."
            )
        return index

    def _is_disabled(self, optimizers: Any) -> bool:
        if not self.initialized:
            return self.disabled
        given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        return bool(self._untouched and given) and all(
            isinstance(item, Optimizer) and item in self._untouched and item not in self._steps
            for item in given
        )

    def _announce(self, message: str) -> None:
        if self.verbosity > 0:
            print(message)

    def name_of(self, param: Tensor) -> str:
        """Return a parameter's name in the initialized models, or its shape."""
        for model in self._levels:
            for name, candidate in model.named_parameters():
                if candidate is param:
                    return name
        return f"a parameter of shape {tuple(param.shape)}"

    def follow_device(self, model: nn.Module) -> None:
        """Casts act on the device types of the models' parameters, moved ones included."""
        # One parameter speaks for all: looking through a model takes longer than its hooks.
        param = self._probes.get(model, _nothing)()
        if param is None:
            param = next(model.parameters(), None)
            if param is None:
                return
            self._probes[model] = weakref.ref(param)
        elif param.device.type in process.devices:
            return
        process.devices |= {p.device.type for p in model.parameters()}


def _expand(rules: Mapping[str, str]) -> dict[str, str]:
    """Return dotted path -> rule for a user's ``rules``.

    Raises:
        ValueError: no such rule, or no such function.
    """
    expanded = {}
    for name, rule in rules.items():
        if rule not in USER_RULES:
            raise ValueError(
                f"a rule must be one of {', '.join(map(repr, USER_RULES))}; got {rule!r} for "
                f"{name!r}; call amp.initialize(..., rules={{{name!r}: 'float'}})."
            )
        for path in cast_rules.user_rule_targets(name):
            expanded[path] = rule
    return expanded


def print_level(level: OptLevel) -> None:
    """Print the options in apex's words, on the first rank only."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        print(describe(level))


#: The session of this process. Hooks on models must be picklable, so they find it here.
session = Session()
torch_compile.leave_out(ForwardCasts.enter, ForwardCasts.leave)


def _nothing() -> None:
    return None


def _observe_model(model: nn.Module) -> None:
    session.follow_device(model)


def _observe_cast_model(model: nn.Module) -> None:
    session.follow_device(model)
    # A replica of nn.DataParallel lives for one forward and owns no parameters.
    if session.initialized and not getattr(model, "_is_replica", False):
        session.cache.observe(model)


def _after_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    session.cache.mark_stale()


def _write_state(
    module: nn.Module, state: OrderedDict[str, Any], prefix: str, metadata: Any
) -> None:
    session.store.write_state(module, state, prefix)


def _read_state(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "load_state_dict() must copy into the parameters that amp.initialize() cast, for the "
            "optimizer steps masters of these; got assign=True. Leave it out, or call "
            "amp.deactivate() first."
        )
    session.store.read_state(module, dict(state), prefix)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what the optimizer steps, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]
