"""Casts for functions of the user's own under O1 and O4: decorators, and functions by name.

Users call these as members of `amp`; how arguments are cast is known to `casting` alone.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

from .casting.libraries.library_casts import CASTS, IN_FLOAT, Rule
from .common.imported_modules import is_left_alone
from .patching import when_imported
from .session import session

F = TypeVar("F", bound=Callable[..., Any])
D = TypeVar("D", bound=Callable[[Any], Any])


def _of_a_function(decorator: D) -> D:
    """Let a decorator refuse, with a TypeError, what is no function, and a call without one."""

    @functools.wraps(decorator)
    def decorate(fn: Any = None) -> Any:
        if isinstance(fn, (type, nn.Module)) or not callable(fn):
            name = f"amp.{decorator.__name__}"
            got = "nothing" if fn is None else f"an object of type {type(fn).__name__}"
            raise TypeError(
                f"{name} takes a function, no class and no layer; got {got}; write "
                f"@{name} above a function, without parentheses, or call {name}(function); for a "
                f"layer, {name}(layer.forward)."
            )
        return decorator(fn)

    return cast(D, decorate)


@_of_a_function
def half_function(fn: F) -> F:
    """Decorate a function: under O1/O4 its floating arguments come in the level's half dtype."""
    return cast(F, session.casts.wrap(fn, "half"))


@_of_a_function
def float_function(fn: F) -> F:
    """Decorate a function: under O1/O4 its half arguments come in fp32."""
    return cast(F, session.casts.wrap(fn, "float"))


@_of_a_function
def promote_function(fn: F) -> F:
    """Decorate a function: under O1/O4 arguments of mixed floating dtypes come in fp32."""
    return cast(F, session.casts.wrap(fn, "promote"))


@_of_a_function
def bfloat16_function(fn: F) -> F:
    """Decorate a function: under O1/O4 its floating arguments come in bfloat16."""
    return cast(F, session.casts.wrap(fn, "bfloat16"))


def register_half_function(module: Any, name: str) -> None:
    """Cast the arguments of ``module.name`` to the level's half dtype under O1/O4.

    Args:
        module: the module or class that holds the function, or a module's name; one that is not
            imported yet is patched when it is.
        name: the function's name there.

    Raises:
        ValueError: it has no such attribute.
        TypeError: ``name`` is no string; the attribute is a class, or cannot be called.
    """
    _register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Cast the half arguments of ``module.name`` to fp32; see `register_half_function`."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Cast mixed arguments of ``module.name`` to fp32; see `register_half_function`."""
    _register(module, name, "promote")


def register_bfloat16_function(module: Any, name: str) -> None:
    """Cast the arguments of ``module.name`` to bfloat16; see `register_half_function`."""
    _register(module, name, "bfloat16")


def register_library_function(
    module: str, name: str, *, casts: str = "promote", in_float: str = "never"
) -> None:
    """Cast the floating arguments of a library's function, at every level.

    Args:
        module: dotted name of the module that the function stands in, imported or not.
        name: the function's name there; ``Class.method`` for a method, ``*.method`` for that of
            every class that the module, or one inside of it, defines. A name that the module has
            not is passed over.
        casts: "promote" to the widest dtype where they are mixed; "half" to the level's half dtype
            at O1 and O4, and "promote" elsewhere; "stored" to the model's dtype in a model that is
            stored in half precision (O2, O3, O5), results as well; "float" to float32 at O1, at O4
            and in such a model, which gets results in its dtype, with all that the function
            computes; "result" not at all, and results to half at O1 and O4.
        in_float: where half arguments are computed in float32, "never", on the "cpu", there and
            where they are "mixed" with float32 ones, or "always". The result comes in the dtype
            that it would have had. "float" goes without it.

    Raises:
        TypeError: module or name is no string.
        ValueError: another word for ``casts`` or ``in_float``.
    """
    call = "amp.register_library_function('my_library.ops', 'spmm', casts='half', in_float='cpu')"
    for what, given in (("module", module), ("name", name)):
        if not isinstance(given, str):
            raise TypeError(
                f"a library's function is given by two strings, its module's name and its own; "
                f"got {given!r} for the {what}; call {call}."
            )
    for what, given, words in (("casts", casts, CASTS), ("in_float", in_float, IN_FLOAT)):
        if given not in words:
            raise ValueError(
                f"{what} must be one of {', '.join(map(repr, words))}; got {given!r}; call {call}."
            )
    session.libraries.register(module, name, Rule(casts, in_float))


def register_forward_method(cls: type[nn.Module], name: str) -> None:
    """Have a method of a model cast what goes in and comes out as the call of the model does.

    At O0, O2, O3 and O5 a call of the model casts its inputs to the dtype that it is stored in, and
    outputs to float32. ``model.encode(x)`` does so as well with ``(Autoencoder, "encode")``; and so
    does a part that is called by itself, ``model.backbone(x)``, with ``(Backbone, "forward")``.
    Within a call of the model nothing is different. It lasts as long as the process, and may come
    before or after `initialize`.

    Args:
        cls: class of the model, or of a part of it.
        name: of a method that it has or inherits.

    Raises:
        TypeError: ``cls`` is no class of modules, ``name`` no string, or no method, or one that
            yields or awaits.
        ValueError: the class has no such attribute.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and isinstance(name, str)):
        kind = cls if isinstance(cls, type) else type(cls)
        method = name if isinstance(name, str) else getattr(name, "__name__", "encode")
        raise TypeError(
            "a forward method is given by a class of modules and the method's name; got "
            f"({cls if isinstance(cls, type) else kind.__name__ + ' object'!r}, {name!r}); call "
            f"amp.register_forward_method({kind.__name__}, {method!r})."
        )
    found = inspect.getattr_static(cls, name, None)
    if found is None:
        raise ValueError(
            f"a forward method must exist; got {name!r}, which {cls.__name__} does not have; call "
            f"amp.register_forward_method({cls.__name__}, name) with the name it has."
        )
    if not isinstance(found, types.FunctionType):
        raise TypeError(
            f"a forward method takes the module as self; got {name!r} of "
            f"{cls.__name__}, which is of type {type(found).__name__}; call "
            "amp.register_forward_method(cls, name) with a method of the class."
        )
    if inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found):
        raise TypeError(
            f"a forward method has computed its outputs when it returns; got {name!r} of "
            f"{cls.__name__}, which yields or awaits; call amp.register_forward_method(cls, name) "
            "with a method that it calls."
        )
    session.methods.register(cls, name)


def _register(module: Any, name: str, rule: str) -> None:
    if not isinstance(name, str):
        owner = repr(module) if isinstance(module, str) else "module"
        function = getattr(name, "__name__", "name")
        if isinstance(module, str) and isinstance(name, types.ModuleType):  # the other way round
            owner, function = function, module
        raise TypeError(
            f"a registered function is given by its name, a string; got {name!r}; call "
            f"amp.register_{rule}_function({owner}, {function!r})."
        )
    if isinstance(module, str):
        when_imported(module, functools.partial(_register, name=name, rule=rule))
        return
    if not hasattr(module, name):
        raise ValueError(
            f"a registered function must exist; got {name!r}, which {module!r} does not have; "
            f"call amp.register_{rule}_function(module, name) with the name it has."
        )
    found = getattr(module, name)
    if isinstance(found, type) or not callable(found):
        raise TypeError(
            f"a registered function is called, and is no class; got {name!r}, which is {found!r}; "
            f"call amp.register_{rule}_function(owner, name) with a function, or a method of a "
            "class: 'forward' of that class."
        )
    # A rule for results would have torch write to a cast, of which nobody hears.
    is_in_place = (
        name.endswith("_") and not name.endswith("__") and _belongs_to_torch(module, found)
    )
    session.functions.register(module, name, "in_place" if is_in_place else rule)


def _belongs_to_torch(owner: Any, function: Any) -> bool:
    """Return whether a function is torch's: methods of tensors do not say so themselves."""
    named = (function, "__module__"), (owner, "__module__"), (owner, "__name__")
    return any(is_left_alone(getattr(one, name, None) or "") for one, name in named)
