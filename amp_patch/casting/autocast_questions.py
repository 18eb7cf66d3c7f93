"""The functions by which code asks whether autocast is on, and to which dtype it casts (O1, O4).

Libraries protect what is to be in float32, and cast for kernels of their own, only where autocast
is said to be on. Where functions cast to half the answers are those of a ``torch.autocast`` to that
dtype. In a model that is stored in half (O2, O3, O5) `custom_fwd` alone is told that it is on,
where it casts to float32. Knows the mode of the thread, and how torch.compile meets a question;
knows nothing of casts.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from amp_patch.common.imported_modules import is_left_alone
from amp_patch.patching import Patches

from . import Function
from .mode import OFF, cast_dtype, mode, process
from .torch_compile import traced

# Nothing is replaced in the namespace of torch's C code: its answer is torch's own.
_autocast_is_on = torch._C.is_autocast_enabled
# The code that asks where a block is given no dtype: it takes on that of the block around it.
_BLOCK = torch.amp.autocast_mode.autocast.__init__.__code__
# The code that asks in a forward which `custom_fwd` has decorated, and the dtype that it is to note
# where our casts are on: its backward enters a block of autocast in that dtype, which is off.
_CUSTOM_FORWARD = torch.amp.custom_fwd(id, device_type="cpu").__code__
NOTED = torch.float32
#: Libraries that ask in order to cast what our own rules for their functions have cast.
CAST_BY_RULES = frozenset({"dgl"})


def dtype_of_casts(device: str) -> torch.dtype | None:
    """Return the half dtype that our casts, and not torch's, bring to tensors of a device.

    Args:
        device: "cuda", "cuda:0" and the like; "" means any device whose tensors are cast.

    Returns:
        The dtype; None where tensors of that device are not cast, or autocast itself is on.
    """
    dtype = cast_dtype()
    is_cast = not device or device.partition(":")[0] in process.devices
    return None if dtype is OFF or not is_cast or _autocast_is_on(device or "cuda") else dtype


def replacements() -> dict[str, Callable[[Function], Function]]:
    """Return, for each question by its path, what makes its replacement."""
    return {f"torch.{name}": make for name, make in _QUESTIONS.items() if hasattr(torch, name)}


def replacements_for_half() -> dict[str, Callable[[Function], Function]]:
    """Return the same for what is replaced while a model is stored in half."""
    return {"torch.is_autocast_enabled": _whether_in_half}


def _whether(device: str, original: Function) -> Function:
    """Say that autocast is on, where functions cast, and as `_whether_in_half` does.

    Args:
        device: that is asked about where the call names none.
        original: the question.
    """
    if hasattr(original, "widening"):  # of `_whether_in_half`, for which this answers as well
        original = vars(original)["__wrapped__"]

    def is_enabled(*args: Any, **kwargs: Any) -> bool:
        is_cast = _asked(original, device, args, kwargs) is not None
        return is_cast or original(*args, **kwargs)

    def is_widening(*args: Any, **kwargs: Any) -> bool:
        return _runs_in_half(*args, **kwargs) or is_enabled(*args, **kwargs)

    return for_all_but_torch(original, is_enabled, is_enabled, is_widening)


def _whether_in_half(original: Function) -> Function:
    """Say to a `custom_fwd` that casts to float32 that autocast is on, in a model in half.

    Half layers take what it returns. They would not take the other half dtype.
    """

    def is_widening(*args: Any, **kwargs: Any) -> bool:
        return _runs_in_half(*args, **kwargs) or original(*args, **kwargs)

    return for_all_but_torch(original, original, original, is_widening)


def _runs_in_half(device: str) -> bool:
    """Tell whether a model runs that is stored in half, with no block that says how to compute."""
    return mode.stored is not None and not mode.off and device in process.devices


def _which(device: str | None, original: Function) -> Function:
    """Name the dtype that functions cast to; as `_whether`, None where a call must name one."""

    def get_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
        return _asked(original, device, args, kwargs) or original(*args, **kwargs)

    def get_noted(*args: Any, **kwargs: Any) -> torch.dtype:
        is_cast = _asked(original, device, args, kwargs) is not None
        return NOTED if is_cast else original(*args, **kwargs)

    return for_all_but_torch(original, get_dtype, get_noted, get_noted)


def _asked(original: Function, default: str | None, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return `dtype_of_casts` for the device that a call asks about."""
    if args or kwargs or default is None:
        original(*args, **kwargs)  # refuses what it does not take
    return dtype_of_casts([*args, *kwargs.values(), default][0])


def for_all_but_torch(
    original: Function, answer: Function, custom: Function, widening: Function
) -> Function:
    """Answer torch's own code as it did: it would hand on that autocast is on, and cast by it.

    Args:
        original: the question, or what sets the answer.
        answer: to all others.
        custom: to `custom_fwd`, where that casts to half.
        widening: to `custom_fwd`, where that casts to float32.
    """

    # not read from the replacement: one that held itself would look as if somebody held it
    answers = {
        "traced": answer,
        "custom": custom,
        "widening": widening,
        "__wrapped__": original,
    }

    @functools.wraps(original)
    def question(*args: Any, **kwargs: Any) -> Any:
        return answers[_who_answers(sys._getframe(1))](*args, **kwargs)

    replacement: Any = question
    replacement.traced = answer
    replacement.custom = custom
    replacement.widening = widening
    # TorchScript knows the original, and what it compiles casts nothing.
    replacement.__prepare_scriptable__ = lambda: original
    return question


def _who_answers(caller: Any) -> str:
    """Return the attribute of a replacement that answers what this frame asks."""
    if _is_about_casts(caller):
        return "traced"
    dtype = _casts_inputs_to(caller)
    if dtype is None:
        return "__wrapped__"
    return "widening" if dtype is torch.float32 else "custom"


def _is_about_casts(caller: Any) -> bool:
    """Tell whether what this frame asks is to be answered by our casts."""
    name = caller.f_globals.get("__name__", "")
    is_own = is_left_alone(name) or name.partition(".")[0] in CAST_BY_RULES
    return caller.f_code is _BLOCK or not is_own


def _casts_inputs_to(caller: Any) -> Any:
    """Return the ``cast_inputs`` of `torch.amp.custom_fwd` where that is what asks, else None.

    Where it is told that autocast is on it casts what it is called with, and enters a block in
    which nothing casts. Without ``cast_inputs`` it would switch autocast on in its backward.
    """
    if caller.f_code is not _CUSTOM_FORWARD:
        return None
    if isinstance(caller, types.FrameType):
        return caller.f_locals["cast_inputs"]
    cell = caller.symbolic_locals["cast_inputs"]
    return caller.output.side_effects.load_cell(cell).as_python_constant()


def trace(patches: Patches, questions: Mapping[str, Function]) -> None:
    """Let torch.compile answer as eager mode does: it shows what it traces no frames.

    Args:
        patches: undoes it.
        questions: path -> the replacement that stands there.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import TorchInGraphFunctionVariable

    lookup, get_handlers = trace_rules.lookup_inner, TorchInGraphFunctionVariable._get_handlers
    ids = set(map(id, questions.values()))

    @functools.wraps(lookup)
    def lookup_inner(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return TorchInGraphFunctionVariable if id(obj) in ids else lookup(obj, *args, **kwargs)

    handlers = {**get_handlers(), **{new: _handler(path) for path, new in questions.items()}}
    patches.replace(trace_rules, "lookup_inner", lookup_inner)
    patches.replace(TorchInGraphFunctionVariable, "_get_handlers", staticmethod(lambda: handlers))


def _handler(path: str) -> Function:
    """Return what torch.compile calls for a question that stands at ``path``."""

    def handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        name = path.removeprefix("torch.")
        function = traced(tx, f"{name}.{_who_answers(tx)}")
        return function.call_function(tx, list(args), kwargs)

    return handle


_QUESTIONS: dict[str, Callable[[Function], Function]] = {
    "is_autocast_enabled": functools.partial(_whether, ""),
    "is_autocast_cpu_enabled": functools.partial(_whether, "cpu"),
    "get_autocast_dtype": functools.partial(_which, None),
    "get_autocast_gpu_dtype": functools.partial(_which, ""),
    "get_autocast_cpu_dtype": functools.partial(_which, "cpu"),
}
