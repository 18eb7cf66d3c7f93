"""Records, in the script's process, the outputs of modules and the gradients of parameters.

Knows the script's training and the file that is written; nothing of what it is compared with.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_patch.casting.argument_casts import tensors_in
from amp_patch.common.running_backward import is_in_backward
from amp_patch.common.weak_modules import ModuleTable
from amp_patch.debug.trace import tracer
from amp_patch.distributed.process_groups import rank
from amp_patch.optimizers.groups import params_of
from amp_patch.step.loss_scaling import Found, nonfinite
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip
from amp_patch.tools import child
from amp_patch.tools.at_end import at_end
from amp_patch.tools.optimizer_numbers import OptimizerNumbers
from amp_patch.tools.same_random import SameRandomNumbers
from amp_patch.tools.script_end import ScriptEnd
from amp_patch.tools.step_limit import StepCounts

from .functions import FunctionWatch, Place, name_of
from .samples import sample

#: Of a module that is called more often in one step (a cell of an RNN), the first calls count.
CALLS = 8
#: How many steps may be skipped, while the loss scale finds its place, beside those asked for.
SKIPS = 20


def start(module: ModuleType) -> None:
    """Record this process; called with ``amp_patch.session``."""
    options = child.begin(module)
    folder = Path(options["out"])
    recorder = Recorder(module.session, options["steps"], options["skipped"], folder)
    recorder.begin()


class Recorder(StepObserver):
    """Notes what happens in the forward of each module, and each step's gradients.

    Args:
        session: of this process.
        steps: ends the script when each optimizer has made so many; None lets it end by itself.
        skipped: ``[optimizer, step]``, counted from 0, of the steps to skip: a level whose loss
            scale was too high at first has not made them, and the reference is to follow it.
        folder: for what was noted; None for no file.
    """

    def __init__(
        self,
        session: Any,
        steps: int | None,
        skipped: list[list[int]],
        folder: Path | None = None,
    ) -> None:
        self._session, self._steps, self._folder = session, steps, folder
        self._has_saved = False
        self._skip = {(optimizer, step) for optimizer, step in skipped}
        self._names: ModuleTable[Place | None] = ModuleTable()
        self._named = -1
        self._optimizer_numbers, self._made = OptimizerNumbers(), StepCounts()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, list[int]]
        self._optimizers = weakref.WeakKeyDictionary()
        self._open: list[tuple[nn.Module, dict[str, Any]]] = []
        self._counts: dict[Place, int] = {}
        self._numbers: set[int] = set()
        self._step = 0
        self._calls: list[dict[str, Any]] = []
        self._gradients: list[dict[str, Any]] = []
        self._skipped: list[list[int]] = []
        self._overflows: list[dict[str, Any]] = []
        self._buffers: dict[Hashable, dict[str, Any]] = {}
        self._models: Sequence[nn.Module] = ()  # a script's function ends before the process
        self._functions = FunctionWatch(self._place)
        self._end = ScriptEnd()

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """Have the cause of each overflow found, for functions are not heard of in backward."""
        self._numbers.update(self._session.models.numbers.values())
        tracer.start(models, tells=False)
        self._models = models or self._models
        self._session.call_at_deactivate(self._note_causes)
        at_end(self.save)  # of the process that trains, which may be a fork

    def leaving(self) -> None:
        """Note buffers while they are as the level has them."""
        self._buffers |= {one[:3]: one.to_json() for one in tracer.buffers.found()}

    def begin(self) -> None:
        """Listen, until the process ends."""
        SameRandomNumbers().__enter__()
        self._functions.__enter__()
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(self._note_gradients)
        self._session.observers.attach(self)

    def scaled(
        self, loss: Tensor, scale: float | Tensor, scaler_id: int, optimizers: Sequence[Optimizer]
    ) -> None:
        """Skip the step that comes, where the level has skipped it."""
        for optimizer in optimizers:
            if tuple(self._count_of(optimizer)) in self._skip:
                reason = "amp-patch compare: this step is skipped, as at the level."
                self._session.optimizers.steps[optimizer].skip.ask(reason)

    def overflowed(self, scaler_id: int, found: Sequence[Found]) -> None:
        """Note which gradients made the loss scale back off."""
        names = self._parameter_names()
        for param, kind in nonfinite(found):
            name = names.get(id(param), "(a parameter of no model)")
            line = {"step": self._step, "parameter": name, "overflow": kind}
            self._gradients.append(line)

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """Count, and end the script when it has made enough steps."""
        count = self._count_of(optimizer)
        if skip.was_skipped:
            self._skipped.append(list(count))
        else:
            self._made.add(optimizer)
        count[1] += 1
        self._step += 1
        self._counts.clear()
        if self._steps is not None and (
            self._made.are_enough(self._steps) or count[1] >= self._steps + SKIPS
        ):
            self._end()

    def save(self) -> None:
        """Write what was noted, if there was anything, to a file of this rank's, once."""
        if not self._calls or self._folder is None or self._has_saved:
            return
        self._has_saved = True
        self.leaving()
        self._note_causes()
        several = self._are_several()
        for line in self._calls:
            line["module"] = name_of(line.pop("place"), several)
        torch.save(
            {
                "calls": self._calls,
                "gradients": self._gradients,
                "skipped": self._skipped,
                "overflows": self._overflows,
                "functions": self._functions.table(several),
                "nonfinite": self._functions.left_the_range(several),
                "steps": self._step,
                "buffers": list(self._buffers.values()),
            },
            self._folder / f"record-rank{rank()}.pt",
        )

    def _note_causes(self) -> None:
        """Take what the tracer has found, which forgets it when the session ends."""
        self._overflows += [
            {
                "where": cause.where,
                "module": cause.path,
                "operator": cause.operator,
                "title": cause.title(),
                "scale": cause.scale,
                "fits": cause.fits if cause.is_loss_scale else None,
                "zero_eps": cause.zero_eps,
                "advice": cause.advice(),
            }
            for cause, _ in tracer.causes.values()
        ]
        tracer.causes.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        # A checkpoint's second run, in the backward, is no further call.
        is_heard = not (tracer.is_looking or is_in_backward())
        place = self._place_of(module) if is_heard else None
        if place is None:
            return
        number = self._counts.get(place, 0) + 1
        self._counts[place] = number
        line = {
            "place": place,
            "step": self._step,
            "call": number,
            "inputs": _samples(args) if number <= CALLS else [],
            "within": len(self._open),
        }
        self._open.append((module, line))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if tracer.is_looking:
            return
        # One that raised in a pre-hook has no entry, one that an interrupt ended no end.
        while self._open and any(one is module for one, _ in self._open):
            one, line = self._open.pop()
            if one is not module:
                continue
            if line["call"] <= CALLS:
                line["outputs"] = _samples(output)
                self._calls.append(line)
            return

    def _note_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self._session.optimizers.steps.get(optimizer)
        if step is not None and step.masters is not None:
            step.backward.shown.show()
        names = self._parameter_names()
        for param in params_of(optimizer):
            name = names.get(id(param), f"(of no model, {tuple(param.shape)})")
            line = {"step": self._step, "parameter": name}
            if param.grad is not None:
                grad = param.grad
                line["gradient"] = sample(grad.to_dense() if grad.is_sparse else grad)
            self._gradients.append(line)

    def _parameter_names(self) -> dict[int, str]:
        """Return the names of parameters, and of the masters of these, by their ids."""
        names = {
            id(param): name_of((number, name), self._are_several())
            for model, number in self._session.models.numbers.items()
            for name, param in model.named_parameters()
        }
        for step in self._session.optimizers.steps.values():
            for param, master in zip(*step.backward.pairs(), strict=True):
                if id(param) in names:
                    names[id(master)] = names[id(param)]
        return names

    def _are_several(self) -> bool:
        # The session forgets models that the script has left, as at the end of its main().
        return len(self._numbers) > 1

    def _count_of(self, optimizer: Optimizer) -> list[int]:
        """Return ``[number of the optimizer, number of its next step]``, the latter to be moved."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = [self._optimizer_numbers.of(optimizer), 0]
        return self._optimizers[optimizer]

    def _place(self) -> Place | None:
        """Return the model and the path of the innermost module that runs."""
        return self._open[-1][1]["place"] if self._open and not tracer.is_looking else None

    def _place_of(self, module: nn.Module) -> Place | None:
        numbers = self._session.models.numbers
        if module not in self._names and self._named != len(numbers):
            self._named = len(numbers)
            for model, number in numbers.items():
                for path, one in model.named_modules():
                    self._names[one] = (number, path)
        place: Place | None = self._names.get(module)
        return place


def _samples(value: Any) -> list[dict[str, object]]:
    return [sample(one) for one in tensors_in(value) if one.is_floating_point() or one.is_complex()]
