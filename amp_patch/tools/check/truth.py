"""When a value of a script is true, and when it equals a constant."""

from __future__ import annotations

from . import names
from .guards import NO_GUARDS, Guards, Truth, opaque
from .values import (
    Choice,
    Class,
    Const,
    Function,
    Imported,
    Instance,
    Items,
    Made,
    Params,
    Table,
    Value,
    Wrapper,
    alternatives,
)


def truth_of(value: Value, guards: Guards) -> Truth:
    """Return when a value is true and when it is false, beyond guards that hold."""
    if isinstance(value, Choice):
        return _truth_of_choice(value, guards)
    if value.truth is not None:
        return value.truth
    if isinstance(value, Const):
        return (NO_GUARDS, None) if value.value else (None, NO_GUARDS)
    if isinstance(value, Items):
        return (NO_GUARDS, None) if value.items else opaque(value.key)
    if _is_object(value):
        return NO_GUARDS, None
    return opaque(value.key)


def _truth_of_choice(value: Choice, guards: Guards) -> Truth:
    true: list[Guards] = []
    false: list[Guards] = []
    for condition, one in alternatives(value, guards):
        when_true, when_false = truth_of(one, guards)
        true += [condition | when_true] if when_true is not None else []
        false += [condition | when_false] if when_false is not None else []
    unclear = opaque(value.key)
    return one_of(true, unclear[0]), one_of(false, unclear[1])


def _is_object(value: Value) -> bool:
    """Return whether a value certainly is an object that is true and equals no literal.

    What a function returns may be a number, a text or None: `os.environ.get`, `numpy.isnan`.
    """
    if isinstance(value, Made):
        return names.makes_object(value.dotted)
    return isinstance(value, Function | Class | Instance | Params | Wrapper)


def is_constant(value: Value) -> bool:
    """Return whether a value is a literal, or by its name the member of an enumeration."""
    return isinstance(value, Const) or (
        isinstance(value, Imported) and value.dotted.rpartition(".")[2].isupper()
    )


def equality(value: Value, constant: Value) -> Truth:
    """Return when a value equals a constant (`is_constant`) and when not."""
    if isinstance(value, Const) and isinstance(constant, Const):
        return (NO_GUARDS, None) if value.value == constant.value else (None, NO_GUARDS)
    if _is_object(value) or isinstance(value, Items | Table):
        return None, NO_GUARDS
    return opaque(value.key, constant.key)


def one_of(found: list[Guards], otherwise: Guards | None) -> Guards | None:
    """Return the only set of guards; None for none; of several what all have and ``otherwise``."""
    if len(found) < 2 or otherwise is None:
        return found[0] if len(found) == 1 else None
    return frozenset.intersection(*found) | otherwise
