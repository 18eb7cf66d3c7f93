"""What a traced run keeps of each call of a model: enough to run it a second time.

Knows models and autograd; nothing of loss scales, nor of what is looked for in the second run.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casting.argument_casts import tensors_in
from amp_patch.casting.mode import mode
from amp_patch.casting.nested import map_tensors
from amp_patch.common.weak_modules import ModuleTable
from amp_patch.kernels.graph_capture import captures

from .places import next_node
from .ranges import kinds_in
from .saved_state import CallState, Name, RandomState


class Call:
    """One call of a model.

    It belongs to its graph: the hooks of the outputs hold it, and it goes when the graph goes. Of
    each model the last call is kept until a step is made, and the first that was not finite.

    Attributes:
        model: held weakly.
        inputs: ``(args, kwargs)``, with copies of the tensors.
        random: the state of the random numbers when it began.
        state: the buffers and attributes that a forward changes, as it found them.
        region: the dtype of the region around it; None outside of regions.
        casts_off: whether ``disable_casts`` was around it.
        grads: the gradients that arrived, by the number of the pass and that of the output.
        kinds: which numbers in the outputs were not finite.
        first_pass: the number of the first backward pass that has begun after it.
        weights: what ``torch.func.functional_call`` put in the place of parameters, by name.
        takes_float: whether a second run has its inputs from modules in fp32, by a rule for them:
            layers with weights in half then cast what they take.
    """

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], names: Set[Name] | None
    ) -> None:
        self.model = weakref.ref(model)
        self.inputs: Any = copied((tuple(args), dict(kwargs)))
        self.random = RandomState()
        self.state = CallState(model, names)
        self.region = None if mode.region is None else mode.region.dtype
        self.casts_off = mode.off and mode.region is None
        self.grads: dict[int, dict[int, Tensor]] = {}
        self.kinds: set[str] = set()
        self.first_pass = 0
        self.takes_float = False
        self.weights = {
            name: param.detach().requires_grad_(param.requires_grad)  # autograd keeps it as it is
            for name, param in model.named_parameters()
            if not isinstance(param, nn.Parameter)
        }

    def given(self, inputs: Any, takes_float: bool) -> Call:
        """Return the same call with other inputs, for a second run."""
        call: Call = copy.copy(self)
        call.inputs, call.takes_float = inputs, takes_float
        return call


class RecordedCalls:
    """The calls that the graphs of this step come from.

    Attributes:
        passes: how many backward passes have begun; whoever begins one counts.
        reached: the calls whose outputs a gradient has reached since `forget`, in their order.
        is_off: True while nothing is recorded.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.reached: list[Call] = []
        self.is_off = True
        self._ranges: deque[tuple[int, int]] = deque(maxlen=1000)
        self._open = _Open()
        self._order: weakref.WeakKeyDictionary[Call, int] = weakref.WeakKeyDictionary()
        self._changing: ModuleTable[set[Name]] = ModuleTable()
        self._last: ModuleTable[Call] = ModuleTable()
        self._not_finite: ModuleTable[Call] = ModuleTable()
        self._count = 0
        self._first_pass = 1  # of this step

    def forget(self) -> None:
        """The step is over: its gradients are used up, and no forward of this thread runs."""
        self.reached.clear()
        self._open.calls.clear()  # what Ctrl-C has ended, in a notebook
        self._last.clear()
        self._not_finite.clear()
        self._first_pass = self.passes + 1

    def of_pass(self, number: int) -> list[Call]:
        """Return the calls that a pass has reached, the earliest first."""
        calls = [call for call in self.reached if number in call.grads]
        return sorted(calls, key=lambda call: self._order[call])

    def kept(self) -> list[Call]:
        """Return the calls that are kept, in the order in which they ended.

        Left out are those of a backward of an earlier step, whose graph a script holds by its loss.
        """
        calls = [
            call
            for call in self._order
            if max(call.grads, default=self._first_pass) >= self._first_pass
        ]
        return sorted(calls, key=self._order.__getitem__)

    def made(self, node: Any) -> bool:
        """Return whether a node of an autograd graph was made inside of a recorded call."""
        number = node._sequence_nr()
        return any(first <= number < end for first, end in self._ranges)

    @property
    def in_call(self) -> bool:
        """Whether a forward runs in this thread, which is or is not recorded."""
        return bool(self._open.calls)

    def before(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A model's forward begins."""
        if self.is_off or getattr(model, "_is_replica", False):
            return
        param = next(model.parameters(), None)
        is_captured = param is not None and captures.are_made(param.device)
        if self._open.calls or is_captured or _is_transformed():
            # Inside of another model's, which is run again as a whole; or no call for itself.
            self._open.calls.append((model, None))
            return
        names = self._changing.get(model)  # its first call shows what a forward changes
        self._open.first_node = next_node()
        with torch.inference_mode(False):  # copies that autograd may see in a second run
            self._open.calls.append((model, Call(model, args, kwargs, names)))

    def after(self, model: nn.Module, outputs: Any) -> None:
        """The forward has ended; without outputs where it raised."""
        calls = self._open.calls
        while calls:
            known, call = calls.pop()
            if known is model:
                break
        else:
            return
        if call is None or outputs is None:
            return
        self._keep(model, call, outputs)
        if not torch.is_grad_enabled():
            return
        self._ranges.append((self._open.first_node, next_node()))
        if model not in self._changing:
            self._changing[model] = call.state.keep_changed(model)
        for index, output in enumerate(tensors_in(outputs)):
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(_Arrival(self, call, index))

    def _keep(self, model: nn.Module, call: Call, outputs: Any) -> None:
        """Keep a call also where no graph holds it: under ``no_grad()``, or detached."""
        call.kinds = kinds_in(tensors_in(outputs))
        call.first_pass = self.passes + 1
        self._count += 1
        self._order[call] = self._count
        self._last[model] = call
        if call.kinds:
            self._not_finite.setdefault(model, call)

    def arrived(self, call: Call, index: int, grad: Tensor) -> None:
        """A gradient has reached an output."""
        if self.is_off:
            return
        grads = call.grads.setdefault(self.passes, {})
        grads[index] = grads[index] + grad if index in grads else grad.detach()
        if not any(known is call for known in self.reached):
            self.reached.append(call)


class _Open(threading.local):
    """The forwards that run in this thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Call | None]] = []
        self.first_node = 0


class _Arrival:
    """The hook of one output; its graph holds it, and by it the call."""

    def __init__(self, recorded: RecordedCalls, call: Call, index: int) -> None:
        self._recorded, self._call, self._index = recorded, call, index

    def __call__(self, grad: Tensor) -> None:
        self._recorded.arrived(self._call, self._index, grad)


def _is_transformed() -> bool:
    """Return whether tensors have no numbers that outlast the call: torch traces, or transforms it.

    By vmap() or grad() of `torch.func`, say.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    modes = torch._C._TorchDispatchModeKey
    tracing = (modes.FAKE, modes.PROXY, modes.FUNCTIONAL)
    return torch._C._is_tracing() or any(torch._C._get_dispatch_mode(one) for one in tracing)


def copied(tree: Any) -> Any:
    """Return nested containers with copies of the tensors, leaves of a graph of their own."""
    return map_tensors(_copy, tree)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy
