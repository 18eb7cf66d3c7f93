"""Finds the cause of each overflow: runs the calls of the step again, and looks at every operator.

Knows when to look; where is in `search`, and what a call is, how it is run and what is seen there
are in `recorded_calls`, `rerun` and `watch`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_patch.casting.torch_compile import order_hooks
from amp_patch.common.weak_modules import ModuleTable, WeakModules
from amp_patch.distributed.flat_parameters import flat_modules
from amp_patch.distributed.fully_sharded import sharded_modules
from amp_patch.distributed.process_groups import has_others, is_on
from amp_patch.distributed.shards import any_spread
from amp_patch.optimizers.groups import params_of
from amp_patch.session import session
from amp_patch.step.loss_scaling import Found
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip

from .cause import Cause, with_one_limit
from .facts import Mend
from .loss_lines import LossLines
from .loss_watch import LossWatch, are_finite
from .paths import joined, root_of
from .ranges import largest_of
from .recorded_calls import Call, RecordedCalls
from .rerun import Rerun, from_outside, leaving_no_trace
from .search import UNSEEN, Search, hidden
from .spoiled_buffers import SpoiledBuffers
from .watch import Counts, near_limits

logger = logging.getLogger(__name__)

#: Different causes that are remembered.
MOST_CAUSES = 100


class LastPass(NamedTuple):
    """A backward pass that can be run again while this is kept, for it keeps the models.

    Attributes:
        number: of the pass.
        scale: of its loss.
        calls: that it reached, each with its model.
        of_loss: its gradients outside of the models.
    """

    number: int
    scale: float
    calls: Sequence[tuple[Call, nn.Module]]
    of_loss: Counts


@dataclass
class Survey:
    """What a pass shows that overflowed nothing.

    Attributes:
        of_loss: counts of the gradients outside of the models.
        counts: of the modules near the limits of float16, by path.
        hidden: what in a forward left the finite range, and no gradient shows.
    """

    of_loss: Counts
    counts: dict[str, Counts] = field(default_factory=dict)
    hidden: list[Cause] = field(default_factory=list)


class Tracer(StepObserver):
    """Traces the overflows of the models that are initialized from `start` on.

    Attributes:
        causes: each different one, with how often it was found.
        overflows: how many there were.
        buffers: of the models that are traced.
        lines: of what is outside of models; known while it is entered, which a tool does.
        is_looking: True while calls are run again.
        recorded: the models' calls since the last step, which can be run again.
        passes: of each scaled loss since then its number, its scale and what looks at its graph.
    """

    waits_for_overflows = True

    def __init__(self) -> None:
        self.recorded = RecordedCalls()
        self.is_looking = False
        self._tells = True
        self.lines = LossLines(lambda: self.recorded.is_off or self.recorded.in_call)
        self._detach: Callable[[], None] | None = None
        self._clear()

    def _clear(self) -> None:
        self.causes: dict[Hashable, tuple[Cause, int]] = {}
        self.overflows = 0
        self.buffers = SpoiledBuffers()
        self.passes: list[tuple[int, float, LossWatch]] = []
        self._looked_at = 0  # the number of the last pass whose cause was searched
        self._handles: list[Any] = []
        self._models = WeakModules()
        # the largest weight of each model at its first loss
        self._first_largest: ModuleTable[float] = ModuleTable()

    @property
    def is_on(self) -> bool:
        """Whether it has started, and not stopped since."""
        return self._detach is not None

    def start(self, models: Sequence[nn.Module] = (), tells: bool = True) -> None:
        """Trace these and all models initialized from now on, until the session ends.

        Args:
            models: initialized before.
            tells: whether it logs each cause at once; else who has started it tells them.
        """
        self._tells = tells
        if self._detach is None:
            self._clear()
            self._detach = session.observers.attach(self)
            self.recorded.is_off = False
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self.prepared(models)

    def stop(self) -> None:
        """Trace no more; forget what was found."""
        if self._detach is not None:
            self._detach()
            self._detach = None
        self.recorded.is_off = True
        self.recorded.forget()
        for handle in self._handles:
            handle.remove()
        self._clear()

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """See `StepObserver`."""
        session.call_at_deactivate(self.stop)
        self.buffers.follow(models)
        for model in self._models.new(models):
            self._models.add(model)
            for module in model.modules():  # a script may call `model.encoder(x)` by itself
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                self._handles += [
                    module.register_forward_pre_hook(_before, with_kwargs=True, prepend=True),
                    module.register_forward_hook(_after, always_call=True),
                ]
            order_hooks(model._forward_pre_hooks)

    def scaled(
        self,
        loss: Tensor,
        scale: float | Tensor,
        scaler_id: int,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """See `StepObserver`."""
        self.recorded.passes += 1
        for model in self._models:
            if model not in self._first_largest:
                self._first_largest[model] = _largest_weight(model)
        watch = LossWatch(loss, float(scale), self.recorded.made, self.lines.line_of)
        self.passes.append((self.recorded.passes, float(scale), watch))

    def overflowed(self, scaler_id: int, found: Sequence[Found]) -> None:
        """See `StepObserver`."""
        self._overflowed(scaler_id, self._find)

    def _overflowed(self, scaler_id: int, find: Callable[[], Cause]) -> None:
        self.overflows += 1
        self._looked_at = self.recorded.passes
        try:
            scaling = session.scalers[scaler_id].rule
            cause = replace(find(), scaling=scaling, growth=self._growth())
        except Exception as error:
            # To trace must not end a training that goes on without.
            cause = Cause("unknown", 1.0, note=f"The second run raised {error!r}.")
        before = self.causes.get(cause.key)
        if before is None and self._tells and len(self.causes) < MOST_CAUSES:
            logger.warning("Gradient overflow: %s", cause)
        if before is not None or len(self.causes) < MOST_CAUSES:
            known, count = before or (None, 0)
            told = cause if known is None else _together(cause, known)
            self.causes[cause.key] = (told, count + 1)

    def told(self) -> list[tuple[Cause, int]]:
        """Return each different cause with how often it was found, as they are told together."""
        causes = with_one_limit([cause for cause, _ in self.causes.values()])
        return list(zip(causes, (count for _, count in self.causes.values()), strict=True))

    def _growth(self) -> float:
        """Return how many times as large as at the first loss a model's largest weight is."""
        pairs = [(_largest_weight(one), first) for one, first in self._first_largest.items()]
        grown = [now / first for now, first in pairs if first and math.isfinite(now)]
        return max(grown, default=1.0)

    def last_pass(self) -> LastPass:
        """Return the calls whose outputs the last backward pass of this step has reached."""
        number, scale, watch = self.passes[-1] if self.passes else (0, 1.0, None)
        calls = [(call, call.model()) for call in self.recorded.of_pass(number)]
        kept = [(call, model) for call, model in calls if model is not None]
        return LastPass(number, scale, kept, Counts() if watch is None else watch.counts)

    def survey(self, last: LastPass) -> Survey:
        """Run calls again, with the weights of now; return which modules are near limits."""
        found = Survey(last.of_loss)
        with self._looking([call for call, model in last.calls if not _sends(model)]) as calls:
            for call in calls:
                one = Rerun(call)
                one.forward()
                if last.number > self._looked_at:  # else gradients show it, and its cause is told
                    found.hidden += [
                        replace(cause, growth=self._growth()) for cause in hidden(call, one)
                    ]
                one.backward(from_outside(call, call.grads[last.number]))
                root, path = root_of(one.model)
                label = session.models.label_of(root)
                for name, counts in near_limits(one.watched.counts).items():
                    found.counts[": ".join(filter(None, (label, joined(path, name))))] = counts
        return found

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver`."""
        self.recorded.forget()
        self.passes.clear()

    def _find(self) -> Cause:
        models = [model for call in self.recorded.kept() if (model := call.model()) is not None]
        if any(map(_sends, models)):
            return Cause(
                "unknown",
                self.passes[-1][1] if self.passes else 1.0,
                note="The model sends tensors to other ranks while it runs: it is sharded (FSDP, "
                "tensor parallel), has a SyncBatchNorm, or came in DistributedDataParallel. A "
                "second run would leave them waiting. Wrap it after amp.initialize(), or trace on "
                "one process.",
            )
        with self._looking(self.recorded.kept()) as kept:
            for number, scale, watch in reversed(self.passes):
                calls = self.recorded.of_pass(number)
                cause = Search(calls, number, scale, watch, kept).find()
                if cause is not None:
                    return cause
        scale = self.passes[-1][1] if self.passes else 1.0
        if not self.recorded.reached:
            return Cause(
                "unknown",
                scale,
                note="No call of an initialized model was seen that made these gradients. "
                + UNSEEN,
            )
        if has_others():
            note = "This rank made no inf and no NaN: they came from another one, or from the sum."
            return Cause("unknown", scale, note=note)
        if scale == 1.0 and not any(one.dtype == torch.float16 for one in self._parameters()):
            return Cause("written", scale)
        return Cause("sum", scale)

    def _parameters(self) -> Iterator[Tensor]:
        return (param for model in self._models for param in model.parameters())

    @contextlib.contextmanager
    def _looking(self, calls: Sequence[Call]) -> Iterator[list[Call]]:
        """Yield those calls whose models still live; what is run inside is not recorded."""
        calls = [call for call in calls if call.model() is not None]
        models = [model for call in calls if (model := call.model()) is not None]
        was_off, self.recorded.is_off, self.is_looking = self.recorded.is_off, True, True
        try:
            with leaving_no_trace(WeakModules().new(models)):
                yield calls
        finally:
            self.recorded.is_off, self.is_looking = was_off, False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look at losses, of which one of NaN may have finite gradients, and at what is stepped.

        Gradients without a scale nobody has checked, and others the script may have written to.
        """
        if optimizer not in session.optimizers.steps:
            return  # one that nobody initialized steps gradients of another loss
        new = [(scale, watch) for number, scale, watch in self.passes if number > self._looked_at]
        unscaled = [watch for scale, watch in new if scale == 1.0]
        if (
            any(one.kinds for _, watch in new for one in watch.loss)
            or any(watch.found is not None for watch in unscaled)
            or (unscaled and not are_finite(_gradients_of(optimizer)))
        ):
            self.overflowed(0, [])
        elif new and not are_finite(_gradients_of(optimizer)):
            self._overflowed(0, lambda: Cause("written", new[-1][0]))


#: What makes a step finite, from the least that is to be done to the most.
_MENDS: Sequence[Mend | None] = (None, "module", "model", "level", "script", "nothing")


def _together(cause: Cause, before: Cause) -> Cause:
    """Return one cause of a step and of those before: what mends it must mend all of them."""
    (enough, is_mended), (known, count) = _enough(cause), _enough(before)
    return replace(
        _with_more_to_do(cause, before),
        steps=cause.steps + before.steps,
        enough=tuple(dict.fromkeys((*known, *enough))),
        enough_in=is_mended + count,
    )


def _enough(cause: Cause) -> tuple[tuple[str, ...], int]:
    """Return the modules that mend a cause in fp32, and in how many of its steps they do."""
    if cause.steps > 1:
        return cause.enough, cause.enough_in
    return tuple(cause.rule), int(bool(cause.rule))


def _with_more_to_do(cause: Cause, before: Cause) -> Cause:
    """Return the one of two causes that takes more, with what the other takes beside."""
    also, later = (
        tuple(dict.fromkeys((*one, *other)))
        for one, other in ((before.also, cause.also), (before.also_later, cause.also_later))
    )
    # what came up before any weight had grown is no matter of the learning rate
    growth = min(cause.growth, before.growth)
    most = replace(max(cause, before, key=_to_do), growth=growth)
    if most.is_loss_scale:  # the steps are told from the highest scale on: a dynamic one falls
        return replace(most, scale=max(cause.scale, before.scale))
    if most.mended_by not in ("module", "model"):
        return most
    also = also if most.mended_by == "module" else most.also
    return replace(most, also=also, also_later=later, by_rule=most.by_rule and not later)


def _to_do(cause: Cause) -> tuple[Any, ...]:
    """Return how much is to be done against a cause, to be compared."""
    around = cause.stays, bool(cause.around), -len(cause.around)  # the wider, the more
    return _MENDS.index(cause.mended_by), around, not cause.by_rule, -(cause.fits or 0.0)


def _largest_weight(model: nn.Module) -> float:
    return largest_of(one for one in model.parameters() if not is_lazy(one))


def _gradients_of(optimizer: Optimizer) -> tuple[Any, ...]:
    return tuple(param.grad for param in params_of(optimizer))


def _sends(model: nn.Module) -> bool:
    """Return whether a model sends tensors to other ranks in its forward or backward."""
    if not is_on():
        return False
    if sharded_modules(model) or flat_modules(model) or any_spread(model.parameters()):
        return True
    return any(
        isinstance(one, DistributedDataParallel) or type(one).__name__ == "SyncBatchNorm"
        for one in model.modules()
    )


# Hooks on models must be picklable, so they are functions that find the tracer below.


def _before(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        tracer.recorded.before(model, args, kwargs)


def _after(model: nn.Module, args: Any, outputs: Any) -> None:
    if not torch.compiler.is_compiling():
        tracer.recorded.after(model, outputs)


#: The tracer of this process.
tracer = Tracer()
