"""What is said of names that apex has and that are not supplied, and to whom; imports no torch.

An import gets an error with advice::

    import apex.transformer
    from apex import transformer

Whoever only looks (``hasattr``, ``importlib.util.find_spec``, the fromlist of ``__import__``) gets
Python's own answer: that there is no such thing.
"""

from __future__ import annotations

import opcode
import types

from .replacements import COMPILED, REPLACEMENTS

_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


def is_import(frame: types.FrameType) -> bool:
    """Return whether a finder is asked by an import, not by `importlib.util.find_spec`.

    Args:
        frame: of what called ``find_spec`` of the finder, which importlib does in one place.
    """
    caller = frame.f_back
    return caller is not None and caller.f_code.co_name == "_find_and_load_unlocked"


def is_from_import(frame: types.FrameType) -> bool:
    """Return whether a module is asked for an attribute by ``from module import attribute``.

    That asks the module last, and puts words of Python's in the place of an AttributeError.

    Args:
        frame: of what asked.
    """
    code, place = frame.f_code.co_code, frame.f_lasti
    while code[place] == opcode.EXTENDED_ARG:  # where Python 3.10 points to
        place += 2
    return code[place] == _IMPORT_FROM


def advice(name: str, others: str) -> str:
    """Return what to say of a name of apex's.

    Args:
        name: of a module, or of what is in one.
        others: what is supplied beside it.
    """
    instead = "look for its counterpart in torch"
    known = name
    while known:
        if known in REPLACEMENTS:
            instead = f"use {REPLACEMENTS[known]}"
            break
        known = known.rpartition(".")[0]
    return (
        f"amp_patch supplies no {name!r} in the place of apex; {others}. "
        f"Instead of {name.rpartition('.')[2]}, {instead}."
    )


def advice_on_compiled(name: str) -> str:
    """Return what to say of a module that apex compiled, by its name."""
    return (
        f"amp_patch supplies no {name!r}, which is a module that apex compiled. Instead of {name}, "
        f"use {COMPILED[name]}."
    )
