"""The line of the user that called a function of ours: whose errors end there.

Knows frames and tracebacks; no level, and of models only what one is.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import opcode
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from torch import nn

from .did_you_mean import meant
from .warn_once import users_frame

_P = ParamSpec("_P")
_R = TypeVar("_R")
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_CACHE = opcode.opmap.get("CACHE", 0)
_RAISE = opcode.opmap["RAISE_VARARGS"]
_UNPACK = (opcode.opmap["UNPACK_SEQUENCE"], opcode.opmap["UNPACK_EX"])


def errors_at_the_call(
    function: Callable[_P, _R], larger: Callable[..., Any] | None = None
) -> Callable[_P, _R]:
    """Return a function whose errors show the user's line, and one of ours.

    What users pass is checked some frames deep, and those frames say nothing that the message does
    not. An error that no ``raise`` of ours made, torch's or a defect of ours, keeps its traceback.
    An argument of a name that the function does not have raises `TypeError`.

    Args:
        function: any of ours.
        larger: one of the same name in `amp_patch.amp` that takes more arguments.
    """
    signature = inspect.signature(function)
    names = signature.parameters
    more = inspect.signature(larger).parameters if larger else ()

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            _refuse_unknown(function.__name__, kwargs, names, more)
            return function(*args, **kwargs)
        except Exception as error:
            if not _is_raised_by_us(error.__traceback__):
                raise
            # a notebook keeps the last traceback, and with it this frame: it may not hold models
            del args, kwargs
            raise error.with_traceback(None)  # noqa: B904  # it is the very same error

    # inspect.getfullargspec, by which Catalyst asks for defaults, follows no __wrapped__
    call.__signature__ = signature  # type: ignore[attr-defined]  # what inspect looks for
    return call


def _refuse_unknown(
    function: str, given: Iterable[str], names: Collection[str], more: Collection[str]
) -> None:
    """Raise for a keyword that no argument is called by; Python does not say which is meant."""
    for name in given:
        if name not in names:
            word = meant(name, names)
            mend = f"amp.{function}({word}=...)" if word else f"help(amp.{function})"
            if name in more:
                mend = f"amp_patch.amp.{function}({name}=...)"
            raise TypeError(
                f"amp.{function}() takes the arguments that its signature names; got {name!r}, "
                f"which is none of them; call {mend}."
            )


def _is_raised_by_us(traceback: TracebackType | None) -> bool:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    code = traceback.tb_frame.f_code
    return _is_ours(traceback.tb_frame) and code.co_code[traceback.tb_lasti] == _RAISE


def returned(models: Any, optimizers: Any) -> Any:
    """Return what ``initialize`` returns for its first two arguments: the pair, or models alone.

    Raises:
        TypeError: the user's line unpacks one model, as in ``model, optimizer =
            initialize(model)``. Of an `nn.Sequential` of two layers Python would make two models,
            without a word.
    """
    if optimizers is not None:
        return models, optimizers
    if isinstance(models, nn.Module):
        _refuse_unpacking()
    return models


def _refuse_unpacking() -> None:
    frame = users_frame()
    if _unpacks(frame) and _calls(frame, "initialize"):
        raise TypeError(
            "amp.initialize() returns the model alone where it gets no optimizer; got one model, "
            "and a line that unpacks it into several names; call model, optimizer = "
            "amp.initialize(model, optimizer), or model = amp.initialize(model)."
        )


def _unpacks(frame: FrameType) -> bool:
    """Return whether a caller unpacks what the call that it is in returns."""
    code, place = frame.f_code.co_code, frame.f_lasti + 2
    while place < len(code) and code[place] == _CACHE:
        place += 2
    return place < len(code) and code[place] in _UNPACK


def _calls(frame: FrameType, name: str) -> bool:
    """Return whether a caller's line calls a function by its name.

    Not so in ``a, b = list(map(amp.initialize, models))``, where it is ``list`` that is unpacked.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    return re.search(rf"\b{name}\s*\(", line) is not None


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)
