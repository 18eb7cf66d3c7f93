"""``torch.autocast(device_type, enabled=False)`` switches our casts off as well, as torch's.

Knows the mode of the thread and how torch and torch.compile enter such a block; knows nothing of
what casts do. A block that switches torch's own autocast on gets their dtype, if it is given none.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, cast

from amp_patch.patching import Patches, put

from .autocast_questions import NOTED, dtype_of_casts
from .mode import casts_are_on, mode, process
from .torch_compile import leave_out

# Where torch enters a block to hand on the state of its own autocast, which is off: to the threads
# of DataParallel, to a backward or a repetition in it, to a graph. That says nothing of our casts.
_HANDED_ON = {
    ("torch.utils.checkpoint", "backward"),
    ("torch.utils.checkpoint", "recompute_fn"),
    ("torch.nn.parallel.parallel_apply", "_worker"),
    ("torch.amp.autocast_mode", "decorate_bwd"),
    ("torch.amp.autocast_mode", "_enter_autocast"),
}


def _is_asked_for(caller: Any) -> bool:
    """Tell whether a block that this frame enters was written there to be obeyed."""
    return (caller.f_globals.get("__name__"), caller.f_code.co_name) not in _HANDED_ON


def _enter(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Switch casts off with the block, where it is for a device whose tensors are cast."""

    @leave_out
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        entered = original(self)
        is_off = not self._enabled and self.device in process.devices
        if is_off and (self.fast_dtype is NOTED or _is_asked_for(_caller())):
            mode.enter_autocast(id(self))
        return entered

    return enter


def _caller() -> types.FrameType:
    """Return the frame that entered the block, which calls `leave_out`'s own, which calls ours."""
    frame: Any = sys._getframe(2)
    return cast(types.FrameType, frame.f_back if frame.f_code.co_name == "left_out" else frame)


def _exit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Switch them on again, if `_enter` switched them off."""

    @leave_out
    @functools.wraps(original)
    def leave(self: Any, *error: Any) -> Any:
        mode.leave_autocast(id(self))
        return original(self, *error)

    return leave


def _enter_traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same where torch.compile traces a block, which nothing enters then."""

    @functools.wraps(original)
    def enter(self: Any, tx: Any) -> Any:
        device, dtype, enabled, *rest = self.target_values
        # In eager mode the block asks for it.
        if dtype is None and _is_asked_for(tx):
            dtype = _trace(tx, dtype_of_casts, device).as_python_constant()
            self.target_values = [device, dtype, enabled, *rest]
        entered = original(self, tx)
        if not enabled and (dtype is NOTED or _is_asked_for(tx)):
            _trace(tx, _begin_traced, id(self), device)
        return entered

    return enter


def _exit_traced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(self: Any, tx: Any, *error: Any) -> Any:
        _trace(tx, _end_traced, id(self))
        return original(self, tx, *error)

    return leave


def _begin_traced(block: int, device_type: str) -> None:
    if device_type in process.devices and casts_are_on():
        mode.enter_autocast(block)


def _end_traced(block: int) -> None:
    mode.leave_autocast(block)


def _trace(tx: Any, function: Callable[..., Any], *constants: Any) -> Any:
    """Go on tracing in a function of this package; return its result as torch.compile sees it."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker

    source = AttrSource(tx.import_source(function.__module__), function.__name__)
    traced = VariableTracker.build(tx, function, source)
    tracer, allowed = tx.output.current_tracer, Patches()
    noted = getattr(tracer, "side_effect_stack", None)
    # At a graph break torch ends the blocks around it, and traces nothing any more.
    allowed.replace(tx.output, "should_exit", False)
    # What a checkpointed function writes outside of it is refused; the end takes all of it back.
    allowed.replace(tracer, "allow_side_effects_in_hop", True)
    try:
        arguments = [VariableTracker.build(tx, value) for value in constants]
        return traced.call_function(tx, arguments, {})
    finally:
        allowed.undo()
        # A function that writes elsewhere returns all tensors that it has made, for others to read.
        # Torch refuses those that alias arguments; and what is written here are no tensors.
        put(tracer, "side_effect_stack", noted)


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "torch.amp.autocast_mode.autocast.__enter__": _enter,
    "torch.amp.autocast_mode.autocast.__exit__": _exit,
    "torch._dynamo.variables.ctx_manager.AutocastModeVariable.enter": _enter_traced,
    "torch._dynamo.variables.ctx_manager.AutocastModeVariable.exit": _exit_traced,
}
