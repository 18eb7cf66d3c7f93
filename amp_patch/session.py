"""What one run has prepared, and the order in which it is set up and undone.

What is done to models, optimizers and functions is in `prepared_models`, `prepared_optimizers`
and `patched_functions`. Beside the session, of which there is one, a process has more that changes;
`tests/test_architecture.py` has each such variable of a module in this list:

- `casting.mode.process`, `common.warn_once.warn_once`, and what `kernels.reset` gives up, of
  `kernels.cuda_module.modules` among others: emptied with the session.
- `casting.mode.mode`, of each thread: forwards that an interrupt left are left by the next
  `initialize` or `deactivate`.
- `casting.many_uses`, `_counts`, `_further`, `_loops`, `_parts` and `_ends`: by each backward and
  step, and by `WeightCache.clear`.
- `casting.shared_casts._last`, of each thread, and `_of_threads`, which finds it: by its next cast,
  and by a collective.
- `casting.libraries.library_functions._kept`: wrappers serve the next session, but for those that
  something else holds.
- `casting.libraries.library_casts._in_float`: by nobody; it holds them weakly.
- `weights.written_inputs.written_inputs`, of each thread: by the next outermost call of a model.
- `weights.frozen_masters._freezing`: by the end of each step.
- `weights.versions._clock`: by nobody, for it only counts.
- `step.scaled_loss._open`: by the end of each block.
- `step.shown_masters._reading`, of each thread: by who reads.
- `distributed.pending_sums.pending_sums`: by who waits for a sum, or drops its handle.
- `mistakes.late_modules._waiting`: by nobody; who waits is held weakly.
- `kernels.graph_capture.captures`: by the end of each capture; memory of graphs that others
  capture stays.
- `debug.logs.logs`, `debug.trace.tracer`: by `deactivate`, which tells them that the session ends.
- `patching._split_before` and `common.imported_modules`, `_without_torch`, `_imported_last` and
  `_behind`: what was found stays until a module is imported, or assigned to; `_looked`, of each
  thread: by the end of each `one_look`.
- `apex.real_apex._lent`: by nobody, a real apex stays imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import arguments, kernels
from .backward_passes import BackwardPasses
from .casting import data_reads, torch_compile, torch_sites
from .casting.libraries.library_functions import LibraryFunctions
from .casting.mode import ALL_DEVICES, mode, process
from .casting.patched_functions import PatchedFunctions
from .casting.weight_cache import WeightCache
from .casting.wrappers import Casts
from .common.imported_modules import one_look
from .common.living_objects import instances
from .common.warn_once import warn_once
from .distributed.engines import local_optimizer, ranks_given, refuse_bucket_views
from .levels import OptLevel
from .mistakes.guard import Guard
from .optimizers.groups import params_of
from .optimizers.half_eps import warn_of_eps
from .patching import Patches
from .scaling.loss_scaler import LossScaler
from .scaling.scale_rule import ScaleRule
from .step.history import History, Prepared
from .step.lookup import Lookup
from .step.observers import Observers
from .step.prepared_optimizers import PreparedOptimizers
from .weights import module_rules as rules_of_modules
from .weights.forward_methods import ForwardMethods
from .weights.fp32_values import FP32Values
from .weights.prepared_models import ModelHooks, ModelRules, PreparedModels
from .weights.rollback import Snapshot
from .weights.state_dicts import StateDicts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: Held by the thread that patches or restores: of another's half-done work it would make originals.
_patching = threading.RLock()


def _one_at_a_time(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a second thread wait until the first one has patched, or restored, everything.

    What is made there must be no inference tensors: training goes on with it.
    """

    @functools.wraps(method)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _patching, one_look():
            if not torch.is_inference_mode_enabled():
                return method(*args, **kwargs)
            # Only here, for at its end torch forgets the dispatch modes that were entered inside.
            with torch.inference_mode(False):
                return method(*args, **kwargs)

    return alone


class Session:
    """What `amp.initialize` set up, until `amp.deactivate`.

    Models and optimizers are held weakly: what the user drops takes its state along.

    Attributes:
        cache: has the casts of weights.
        casts: makes the wrappers that functions are patched with.
        values: has the fp32 values of half weights.
        state_dicts: writes and reads those of models in half.
        models, optimizers, functions: what was done to each.
        libraries: the functions of other libraries; their rules outlive the session.
        methods: registered to cast as the model's call does; the registration outlives the session.
        lookup: finds what a call of the user's is for.
        scalers: one list per process; a loss_id of an optimizer points into it.
        verbosity: above 0, apex's messages are printed; "skips": those of skipped steps only.
        passes: makes what stands around each backward.
        history: what was initialized, and how many steps came of it.
        guard: looks out for mistakes.
        observers: told of each training step; they stay when the session ends.
        initialized: True between the first `initialize` and `deactivate`.
        was_used: True once anything was initialized, or amp disabled, in this process.
    """

    def __init__(self) -> None:
        self.cache = WeightCache()
        self.casts = Casts(self.cache)
        self.values = FP32Values()
        self.observers = Observers()
        self.was_used = False
        self._registered: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self.libraries = LibraryFunctions(lambda *args: self.functions.beneath(*args))
        self.methods = ForwardMethods(lambda: list(self.models.levels))
        self._reset()

    def _reset(self) -> None:
        self.casts.observer = None
        self.scalers: list[LossScaler] = []
        self.history = History()
        self.state_dicts = StateDicts(self.values)
        self.verbosity: int | str = 1
        self.initialized = False
        self.functions = PatchedFunctions(self.casts, self._registered)
        self.models = PreparedModels(self.values, self.cache, _HOOKS)
        self.optimizers = PreparedOptimizers(self.scalers, self.announce, self.observers)
        self.lookup = Lookup(
            self.optimizers, self.models.stored_in_half, self.values, lambda: self.initialized
        )
        self.guard = Guard(self.models, self.optimizers, self.values, self.cache.mark_stale)
        self.passes = BackwardPasses(
            self.scalers,
            self.models,
            self.optimizers,
            self.cache,
            self.guard,
            self.observers,
            lambda: self._prints,
        )
        self._without_model: set[torch.dtype] = set()
        self._torch_patches = Patches()
        self._step_hooks: list[Any] = []
        self._at_deactivate: list[tuple[Callable[[], object], Callable[[], object]]] = []
        process.reset()
        warn_once.reset()
        kernels.reset()

    @_one_at_a_time
    def initialize(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        level: OptLevel,
        scale_rule: ScaleRule,
        num_losses: int,
        rules: Mapping[str, str],
        rules_of_each: Sequence[ModelRules],
        fused_step: bool,
        process_group: ProcessGroup | None = None,
        tells_casts: bool = False,
    ) -> None:
        """Set models and optimizers up at ``level``; on an error everything is as before.

        Args:
            models, optimizers: checked.
            level, scale_rule: resolved.
            num_losses: how many loss_ids the optimizers get.
            rules: dotted path -> rule of a function, at levels that cast functions.
            rules_of_each: for each model, of its modules and of what it is called with.
            fused_step: at levels with masters only.
            process_group: of the ranks that step together; None: found by itself.
            tells_casts: print apex's line for every tensor that a patched function casts.
        """
        stepping = _stepping(optimizers, level)
        self._refuse(models, optimizers, stepping, level)
        stepped = set(map(id, params_of(*optimizers)))
        rules_of_modules.leave_all()
        mode.leave_models_but(())
        with contextlib.ExitStack() as on_error:
            self._start(level, on_error)
            on_error.callback(Snapshot(models, stepping).restore)
            self._patch_functions(models, level, rules, tells_casts, on_error)
            on_error.callback(self.values.end_conversion)
            self.models.set_up(models, level, stepped, rules_of_each, on_error)
            self.optimizers.set_up(
                optimizers,
                level,
                self.values,
                scale_rule,
                num_losses,
                fused_step,
                functools.partial(ranks_given, process_group, models),
                on_error,
            )
            self.values.end_conversion()
            self.functions.follow_models(self._casting_dtypes())
            self.libraries.reach(self.models.in_half())  # it may have put functions back there
            self.methods.follow(models)
            for optimizer in stepping:
                warn_of_eps(optimizer)
            self.guard.follow(models, self._torch_patches)  # may warn, which may be an error
            on_error.pop_all()
        if level.stores_half:
            self.optimizers.look_again(level)
        self.lookup.enable()
        self.history.add(level.name, [self._prepared(one, level) for one in stepping])
        if self.observers:
            self.observers.prepared(models)

    def _refuse(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        stepping: Sequence[Optimizer],
        level: OptLevel,
    ) -> None:
        """Raise where models and optimizers do not go together, or with those that are prepared.

        Args:
            models, optimizers, level: of `initialize`.
            stepping: those of the optimizers that step by themselves.
        """
        arguments.refuse_twice(stepping, self.optimizers.steps)
        if level.master_weights:
            arguments.refuse_shared_state(stepping)
            arguments.refuse_meta(stepping)
        arguments.refuse_fake(stepping, level)
        arguments.refuse_compiled(models, level.stores_half)
        if level.stores_half:
            arguments.refuse_unstorable(models)
            refuse_bucket_views(optimizers)
        self.models.refuse_sharded(models, level)
        self.guard.look_at(models, optimizers, level)

    def _patch_functions(
        self,
        models: Sequence[nn.Module],
        level: OptLevel,
        rules: Mapping[str, str],
        tells_casts: bool,
        on_error: contextlib.ExitStack,
    ) -> None:
        """Patch for these models; where there is none, for tensors that no model has."""
        if level.casts_functions and not models and not self.models.levels:
            self._patch_for_all(level, rules, tells_casts, on_error)
        else:
            casting, told = self._casting_dtypes(), _announce if tells_casts else None
            self.functions.set_up(models, level, rules, casting, on_error, told)

    def _patch_for_all(
        self,
        level: OptLevel,
        rules: Mapping[str, str],
        tells_casts: bool,
        on_error: contextlib.ExitStack,
    ) -> None:
        """Functions cast for any caller, on every device, until `deactivate`."""
        on_error.callback(setattr, self, "_without_model", self._without_model)
        self._without_model = {level.half_dtype}
        reached = instances(nn.Module)
        casting, told = self._casting_dtypes(), _announce if tells_casts else None
        self.functions.set_up(reached, level, rules, casting, on_error, told)
        process.devices = ALL_DEVICES

    @_one_at_a_time
    def cast_without_model(
        self, level: OptLevel, rules: Mapping[str, str], tells_casts: bool = False
    ) -> None:
        """Cast in every function from now on, whatever model calls it, on every device.

        A model at O0 goes on in fp32.

        Args:
            level: O1 or O4.
            rules: dotted path -> rule of a function.
            tells_casts: see `initialize`.
        """
        with contextlib.ExitStack() as on_error:
            self._start(level, on_error)
            self._patch_for_all(level, rules, tells_casts, on_error)
            on_error.pop_all()
        self.models.cast_functions()
        self.history.add(level.name)
        self.lookup.enable()

    def _prepared(self, optimizer: Optimizer, level: OptLevel) -> Prepared:
        step = self.optimizers.steps[optimizer]
        return Prepared(type(optimizer).__name__, level.name, step.scalers, step.skip.count)

    def _casting_dtypes(self) -> set[torch.dtype]:
        """Return the half dtypes that functions are patched for."""
        return self.models.casting_dtypes() | self._without_model

    def _start(self, level: OptLevel, on_error: contextlib.ExitStack) -> None:
        """Patch what every level needs, at the first call; what half models need, at theirs."""
        self.was_used = True
        if level.stores_half:
            self.libraries.serve_half(on_error)
        if self.initialized:
            return
        on_error.callback(self.deactivate)
        torch_compile.make_tables()
        torch_sites.install(self._torch_patches, self.guard.replacements(self.passes, self.scalers))
        data_reads.install(
            self._torch_patches,
            self._note_data_read,
            self._note_data_set,
            self.values.note_alias,
        )
        self.guard.follow_imports(self._torch_patches)
        torch_compile.compile_nothing_of_ours_alone(self._torch_patches)
        torch_compile.trace_into_regions(self._torch_patches)
        torch_compile.call_before(self._torch_patches, self.publish_writes)
        self.libraries.install()
        self.methods.install()
        self._step_hooks = [
            register_optimizer_step_pre_hook(_before_any_step),
            register_optimizer_step_post_hook(_after_any_step),
        ]
        self.initialized = True

    @_one_at_a_time
    def deactivate(self) -> None:
        """Restore everything patched; parameters hold their fp32 values again.

        What an observer raises, or an undo of `call_at_deactivate`, is raised when all is restored.
        """
        self.settle()
        rules_of_modules.leave_all()
        mode.switch_autocast_on()
        mode.leave_models_but(())
        try:
            self.observers.leaving()
        finally:
            self._restore()

    def _restore(self) -> None:
        self.models.reshard()
        with self.guard.unprepared.unscaling():
            self.optimizers.release()
            self.models.release()
        self.optimizers.match_state()
        self.functions.undo()
        self.libraries.undo()
        self.methods.undo()
        self._torch_patches.undo()
        for hook in self._step_hooks:
            hook.remove()
        self._undo_the_rest(list(self._at_deactivate))

    def _undo_the_rest(self, left: list[tuple[Callable[[], object], Callable[[], object]]]) -> None:
        try:
            while left:
                undo, _ = left.pop()
                undo()
        finally:
            if left:
                self._undo_the_rest(left)
            else:
                self.cache.clear()
                self.values.clear()
                self._reset()

    def call_at_deactivate(self, undo: Callable[[], object], of: object = None) -> None:
        """Have something of the caller's undone with the rest; once, however often it is said.

        Args:
            of: whose it is, where it need not be undone when that is gone.
        """
        self._at_deactivate = [one for one in self._at_deactivate if one[1]() is not None]
        if undo not in (one for one, _ in self._at_deactivate):
            self._at_deactivate.append((undo, weakref.ref(self if of is None else of)))

    def _note_data_read(self, param: nn.Parameter) -> None:
        self.cache.doubt(param)
        if param.dtype is torch.float32:  # as masters are: no half weight asks all optimizers
            self.optimizers.note_data_read(param)
        else:
            self.values.doubt(param)

    def _note_data_set(self, param: nn.Parameter, new: Tensor) -> None:
        self.values.note_set(param, new)
        if param.dtype is torch.float32:
            self.optimizers.note_data_set(param)

    def publish_writes(self, model: nn.Module | None = None) -> None:
        """Have what was written to masters and to the last state dicts in the parameters.

        Args:
            model: whose forward comes next; None: any may.
        """
        if self.values.handed_out.are_held:
            self.values.handed_out.take_over(None if model is None else model.modules())
        self.optimizers.publish_writes()

    def settle(self) -> None:
        """Wait for every outcome on its way from a device, and say what is to be said of it."""
        for scaler in self.scalers:
            scaler.settle()

    def disable(self, optimizers: Any) -> None:
        """``enabled=False``: see `Lookup.disable`."""
        self.was_used = True
        self.lookup.disable(optimizers)

    def announce(self, message: str) -> None:
        """Print a message of apex's, unless ``verbosity`` is 0."""
        if self._prints:
            print(message)

    @property
    def _prints(self) -> bool:
        return self.verbosity == "skips" or int(self.verbosity) > 0


# Hooks on models must be picklable, so they are functions that find the session below.


def _observe_model(model: nn.Module, args: Any, kwargs: Any) -> None:
    session.models.follow_device(model)
    session.publish_writes(model)
    if session.guard.targets.are_awaited:
        session.guard.targets.look(model, args, kwargs)


def _observe_cast_model(model: nn.Module, args: Any, kwargs: Any) -> None:
    session.models.follow_device(model)
    # A replica of nn.DataParallel lives for one forward and owns no parameters. Looked up as it is
    # set, for a module takes 2 us to say that it has no such attribute.
    if session.initialized and "_is_replica" not in vars(model):
        session.cache.observe(model)


def _write_state(
    module: nn.Module, state: OrderedDict[str, Any], prefix: str, metadata: Any
) -> None:
    session.state_dicts.write_state(module, state, prefix)


def _read_state(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    # A copy has this hook, too, and may be assigned to.
    if metadata.get("assign_to_params_buffers") and session.models.holds(module):
        raise RuntimeError(
            "load_state_dict() must copy into the parameters that amp.initialize() cast, for the "
            "optimizer steps these, or masters of these; got assign=True. Leave it out, or call "
            "amp.deactivate() first."
        )
    session.state_dicts.read_state(module, state, prefix)


def _before_state(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    session.models.follow_late_modules(model)
    session.optimizers.note_writes()
    session.state_dicts.begin_state(model)


def _before_load(model: nn.Module, *_: Any) -> None:
    session.models.follow_late_modules(model)


def _explain(error: BaseException) -> None:
    session.guard.explain(error)


def _announce(message: str) -> None:
    session.announce(message)


def _stepping(optimizers: Sequence[Optimizer], level: OptLevel) -> list[Optimizer]:
    """Return what steps the parameters at a level: with masters the local optimizer of ZeRO.

    Raises:
        TypeError: one that steps in the backward, at every level.
    """
    local = list(map(local_optimizer, optimizers))
    return local if level.master_weights else list(optimizers)


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if session.values.handed_out.are_held:
        session.values.handed_out.take_over()
    session.guard.before_step(optimizer)
    step = session.optimizers.of_stepped(optimizer)
    if step is not None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        step.begin_past_own(closure)


def _after_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    session.cache.mark_stale()
    step = session.optimizers.of_stepped(optimizer)
    if step is not None:
        step.end_past_own()


_HOOKS = ModelHooks(
    _observe_model,
    _observe_cast_model,
    _explain,
    _write_state,
    _read_state,
    _before_state,
    _before_load,
)
#: The session of this process.
session = Session()
atexit.register(session.settle)
