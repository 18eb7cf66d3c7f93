"""What torch's complaint about two dtypes leaves out: which module, which operand, what mends it.

The exception stays the same, with a note. Tells complaints about dtypes from others; where one
comes from is `error_places`' subject, what mends it is `dtype_mends`'.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from amp_patch.levels import OptLevel

from .dtype_mends import (
    GRADIENT,
    MEND_OF_A_GRADIENT,
    MEND_OF_A_HALF_HOOK,
    MEND_OF_A_HOOK,
    MEND_WHERE_FUNCTIONS_CAST,
    NO_KERNEL,
    OVERFLOW,
    PROBABILITIES,
    SHOWN,
    mend_of,
    refuses_half,
)
from .error_places import Place, innermost, operands

# A tensor that is printed, as what torch.jit cannot trace, ends with its type and shape in braces.
_COMPLAINT = re.compile(
    r"dtype|scalar type|\bHalf\b|\bBFloat16\b|HalfTensor(?!\{)|BFloat16T(ensor|ype)"
    r"|desired output type"
    r"|must have the type|autocast::prioritize"
    rf"|{GRADIENT.pattern}"
    # An LSTM or GRU on a CPU, whose states are in another dtype than its weights.
    r"|could not create a primitive descriptor"
)
_NO_NUMPY = re.compile("^Got unsupported ScalarType BFloat16")
# What the code of a script raises where functions cast, beside any module of a model.
_HOOK = re.compile(r"^hook .* has changed the type of value .*(Half|BFloat16)T(ensor|ype)")
# One that was given half gradients.
_HALF_HOOK = re.compile(r"^hook .* has changed the type of value \(was \S*(Half|BFloat16)T\S* got ")
_OF_ONE_DTYPE = re.compile(
    r"source and destination dtypes match.*\b(Half|BFloat16)\b"
    r"|self \((Half|BFloat16|Float)\) and source \(\w+\) must have the same scalar type"
    r"|expected dtype (float|c10::\w+) for `(end|weight)`"
)
# Of two dtypes of which one is half.
_HALF_AND_ANOTHER = re.compile(r"\b(c10::)?(B?Float16|Half)\b", re.IGNORECASE)
_BEGIN = "amp_patch: "


def explain(error: BaseException, levels: Mapping[nn.Module, OptLevel]) -> None:
    """Add a note to an exception about dtypes that a module of a model raises; once.

    Where functions cast (O1, O4) only what names a half dtype gets one, and a write in place of the
    script gets one, too; a hook does at any level.

    Args:
        error: as it is on its way to the user.
        levels: the prepared models, with what they were prepared at.
    """
    message = str(error)
    is_of_half = any(one.search(message) for one in (NO_KERNEL, OVERFLOW, PROBABILITIES))
    is_of_two = isinstance(error, (RuntimeError, ValueError)) and _COMPLAINT.search(
        SHOWN.sub("", message)
    )
    is_refused = refuses_half(error)
    if not (is_of_half or is_of_two or is_refused) or _is_noted(error):
        return
    where_functions_cast = is_of_half or is_refused or _HALF_AND_ANOTHER.search(message)
    place = innermost(
        error,
        {
            model: level
            for model, level in levels.items()
            if level.stores_half or (where_functions_cast and level.casts_functions)
        },
    )
    if place is not None:
        _add_note(error, _BEGIN + _describe(place, error))
    elif beside := _beside_models(message, levels):
        _add_note(error, _BEGIN + beside)
    elif _NO_NUMPY.search(message) and (names := _names_of_bfloat16(levels)):
        _add_note(
            error,
            f"{_BEGIN}at opt_level {names} a model returns torch.bfloat16, which NumPy does not "
            "have: write y.float().numpy(), or amp.initialize(..., "
            "cast_model_outputs=torch.float32).",
        )


def _beside_models(message: str, levels: Mapping[nn.Module, OptLevel]) -> str | None:
    """Return what is said of a hook, a gradient or a function of one dtype outside of modules."""
    is_of_hook, is_of_half_hook = _HOOK.search(message), _HALF_HOOK.search(message)
    storing = _names_of(level for level in levels.values() if level.stores_half)
    if storing and GRADIENT.search(message):
        return f"at opt_level {storing} the model is stored in half. {MEND_OF_A_GRADIENT}"
    if not (is_of_hook or _OF_ONE_DTYPE.search(message)):
        return None
    casting = _names_of(level for level in levels.values() if level.casts_functions)
    if casting:
        mend = MEND_OF_A_HOOK if is_of_hook else MEND_WHERE_FUNCTIONS_CAST
        return (
            f"at opt_level {casting} functions cast to half precision, outside of models too. "
            f"{mend}"
        )
    if is_of_half_hook and storing:
        return f"at opt_level {storing} the model is stored in half. {MEND_OF_A_HALF_HOOK}"
    return None


def _names_of(levels: Iterable[OptLevel]) -> str:
    return " and ".join(sorted({level.name for level in levels}))


def _names_of_bfloat16(levels: Mapping[nn.Module, OptLevel]) -> str:
    """Return the levels at which models compute in bfloat16."""
    return _names_of(level for level in levels.values() if level.half_dtype is torch.bfloat16)


def _is_noted(error: BaseException) -> bool:
    notes = getattr(error, "__notes__", ())
    return any(note.startswith(_BEGIN) for note in notes) or f"\n{_BEGIN}" in str(error)


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}", *error.args[1:])


def _describe(place: Place, error: BaseException) -> str:
    where = f"module {place.path!r}" if place.path else "the model itself"
    kind = type(place.module).__name__
    does = "the model is stored in" if place.level.stores_half else "functions cast to"
    at_hand = ", ".join(f"{name} {value.dtype}" for name, value in operands(place))
    return (
        f"at opt_level {place.level.name} {does} {place.level.half_dtype}; this came from {where} "
        f"({kind}), with {at_hand or 'no tensor in a variable'}. {mend_of(place, error)}"
    )


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
