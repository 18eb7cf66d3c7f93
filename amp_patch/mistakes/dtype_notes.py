"""What torch's complaint about two dtypes leaves out: which module, which operand, what mends it.

The exception stays the same, with a note. Knows models in half precision and tracebacks.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casting.mode import FLOATS, HALVES
from amp_patch.casting.running_modules import running_modules
from amp_patch.levels import OptLevel
from amp_patch.weights.half_model import kept_in_fp32

_COMPLAINT = re.compile(
    r"dtype|scalar type|\bHalf\b|\bBFloat16\b|HalfTensor|BFloat16Tensor|desired output type"
    r"|must have the type"
)
_BEGIN = "amp_patch: "
#: Operands that a note lists.
_MOST_OPERANDS = 6


class _Place(NamedTuple):
    """Where an exception comes from: the module that ran, its path, its model and the level."""

    module: nn.Module
    path: str
    model: nn.Module
    level: OptLevel
    frame: types.FrameType


def explain(error: BaseException, levels: Mapping[nn.Module, OptLevel]) -> None:
    """Add a note to an exception about dtypes that a module of a model in half raises; once.

    Args:
        error: as it is on its way to the user.
        levels: the prepared models, with what they were prepared at.
    """
    is_complaint = isinstance(error, (RuntimeError, ValueError)) and _COMPLAINT.search(str(error))
    if not is_complaint or _is_noted(error):
        return
    place = _innermost(error, levels)
    if place is not None:
        _add_note(error, _BEGIN + _describe(place, str(error)))


def _is_noted(error: BaseException) -> bool:
    notes = getattr(error, "__notes__", ())
    return any(note.startswith(_BEGIN) for note in notes) or f"\n{_BEGIN}" in str(error)


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}", *error.args[1:])


def _innermost(error: BaseException, levels: Mapping[nn.Module, OptLevel]) -> _Place | None:
    """Return the innermost module of a model in half whose code the exception went through."""
    names: dict[int, tuple[str, nn.Module, OptLevel]] = {}
    for model, level in levels.items():
        if level.cast_model_type in HALVES:
            for name, module in model.named_modules():
                names.setdefault(id(module), (name, model, level))
    found = None
    for frame in _frames(error):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names and not _is_calling(frame):
            found = _Place(module, *names[id(module)], frame)
    return found


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_calling(frame: types.FrameType) -> bool:
    """Tell whether a frame is of what calls a module, and not of its forward."""
    return frame.f_code.co_filename in (nn.modules.module.__file__, __file__)


def _describe(place: _Place, message: str) -> str:
    where = f"module {place.path!r}" if place.path else "the model itself"
    kind = type(place.module).__name__
    dtype = _short(place.level.cast_model_type)
    operands = ", ".join(f"{name} {_short(value.dtype)}" for name, value in _operands(place))
    return (
        f"at opt_level {place.level.name} the model is stored in {dtype}; this came from {where} "
        f"({kind}), with {operands or 'no tensor in a variable'}. {_mend(place, message)}"
    )


def _operands(place: _Place) -> list[tuple[str, Tensor]]:
    """Return the floating tensors at hand: the module's own, and the variables of its forward."""
    found: dict[str, Tensor] = {}
    own = {**place.module._parameters, **place.module._buffers}
    for name, value in place.frame.f_locals.items():
        if isinstance(value, Tensor) and value.dtype in FLOATS:
            found[name] = value
    for name, value in own.items():
        if isinstance(value, Tensor) and value.dtype in FLOATS:
            found[f"self.{name}"] = value
    return list(found.items())[:_MOST_OPERANDS]


def _mend(place: _Place, message: str) -> str:
    dtype = _short(place.level.cast_model_type)
    if "without overflow" in message:
        return (
            f"{dtype} cannot hold that number: write torch.finfo(x.dtype).min in the place of "
            "-1e9, or take opt_level 'O5' or 'O1'."
        )
    if re.search(r"\bdouble\b", message, re.IGNORECASE):
        return _mend_of_float64(place)
    strays = _strays(place)
    if strays and len(strays) == sum(1 for _ in _castable(place.model)):
        return _mend_of_a_cast(set(strays.values()))
    if place.path in strays or any(path.startswith(f"{place.path}.") for path in strays):
        path, stored = next(iter(strays.items()))
        return (
            f"{path!r} holds {stored} weights, so it was put there after amp.initialize(): "
            "put it into the model before, or call amp.deactivate(), then amp.initialize() anew."
        )
    if any(torch.is_autocast_enabled(value.device.type) for _, value in _operands(place)):
        return (
            "torch.autocast is on, and casts by a list of its own: remove it, the level casts by "
            "itself."
        )
    if id(place.model) not in running_modules():
        if place.module is place.model:
            return (
                "model.forward(x) was called, which passes by the casts of the inputs: call "
                "model(x)."
            )
        return (
            f"This module was called by itself, and only the model casts its inputs: call "
            f"model(x), or pass x.to({dtype}) to the module; with opt_level 'O1' every module "
            "takes float32."
        )
    return (
        f"Inputs of the model are cast to {dtype}, a tensor made inside of forward is not: write "
        "mask.to(x.dtype), or torch.ones(..., dtype=x.dtype), or register_buffer() it before "
        "amp.initialize(); or compute this part in `with amp.float_region():`; or take opt_level "
        "'O1', which casts in each function."
    )


def _castable(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules whose floating parameters are stored in half."""
    kept = kept_in_fp32(model, batch_norms=True)
    for name, module in model.named_modules():
        if module not in kept and any(
            param is not None and param.dtype in FLOATS for param in module._parameters.values()
        ):
            yield name


def _strays(place: _Place) -> dict[str, str]:
    """Return where weights are not as `initialize` leaves them: paths of modules -> dtype."""
    found = {}
    for name in _castable(place.model):
        for param in place.model.get_submodule(name)._parameters.values():
            if (
                param is not None
                and param.dtype in FLOATS
                and param.dtype is not place.level.cast_model_type
            ):
                found[name] = _short(param.dtype).removeprefix("torch.")
    return found


def _mend_of_float64(place: _Place) -> str:
    if all(param.dtype is torch.float64 for param in place.model.parameters()):
        return _mend_of_a_cast({"float64"})
    return "A float64 tensor is never cast: pass x.float(), also of what NumPy made."


def _mend_of_a_cast(stored: set[str]) -> str:
    """Return what mends a model of which all weights have another dtype than the level's."""
    calls = {"float32": "float", "float16": "half", "float64": "double"}
    call = calls.get(min(stored), "bfloat16")
    mend = ", or call amp.deactivate() in its place, which keeps the masters' values"
    return (
        f"All its weights are {min(stored)}, as model.{call}() leaves them: leave that call out"
        f"{mend if call == 'float' else ''}."
    )


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype)


def explaining(
    excepthook: Callable[..., Any], levels: Mapping[nn.Module, OptLevel]
) -> Callable[..., Any]:
    """Return a ``sys.excepthook`` that adds notes to what ends a script, and then does the same.

    A model explains what its own call raises. `model.forward(x)`, and a layer that is called by
    itself, pass its call by: a hook on every layer would cost each right step. A notebook shows
    errors by itself, see `explaining_cells`.

    Args:
        excepthook: the present one.
        levels: see `explain`.
    """

    @functools.wraps(excepthook)
    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        explain(error, levels)
        excepthook(kind, error, traceback)

    return hook


def explaining_cells(
    showtraceback: Callable[..., Any], levels: Mapping[nn.Module, OptLevel]
) -> Callable[..., Any]:
    """Return the same for what ends a notebook's cell.

    Args:
        showtraceback: of IPython's shell, called while the exception is handled.
        levels: see `explain`.
    """

    @functools.wraps(showtraceback)
    def show(exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if error is not None:
            explain(error, levels)
        showtraceback(exc_tuple, *args, **kwargs)

    return show


def notebook() -> Any:
    """Return IPython's shell, where this process is one's; else None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
