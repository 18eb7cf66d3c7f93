"""Casts for scripts that call ``model.forward(x)``, which passes by the hooks of ``model(x)``.

Knows models as `initialize` left them; what is cast is the core's.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amp_patch.patching import Patches
from amp_patch.session import session

__all__ = ["cast_direct_calls"]


class _Calls(threading.local):
    """The models of this thread whose hooks have run, and whose forward comes next.

    It does not come where another hook raised, or a script has replaced it.
    """

    def __init__(self) -> None:
        self.begun: list[weakref.ref[nn.Module]] = []

    def __reduce__(self) -> str:
        return "_calls"  # cloudpickle takes along what a forward refers to


_calls = _Calls()


def cast_direct_calls(model: nn.Module) -> None:
    """Have ``model.forward(x)`` do what ``model(x)`` does, until `amp.deactivate`."""
    own = vars(model).get("forward")
    # A copy of a model has that of its original, and one from a file a function of its own.
    if getattr(getattr(own, "__func__", None), "__module__", None) == __name__:
        return
    forward = _casting(type(model), own)
    patches = Patches()
    # What is kept for the undoing must not keep the model, as its own methods would.
    patches.replace(model, "forward", types.MethodType(forward, model), weakly=True)
    hook = model.register_forward_pre_hook(_begin)
    session.call_at_deactivate(functools.partial(_undo, patches, hook), of=model)


def _undo(patches: Patches, hook: RemovableHandle) -> None:
    hook.remove()
    patches.undo()


def _begin(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    begun = _calls.begun
    if begun:
        begun[:] = [one for one in begun if one() not in (None, model)]
    begun.append(weakref.ref(model))


_begin.is_not_scripted = True  # type: ignore[attr-defined]  # our own


def _runs(owner: nn.Module, model: nn.Module) -> bool:
    """Tell whether a model whose hooks have run is the one whose forward this is.

    A replica of nn.DataParallel has the bound method of the model that it was made from, and so has
    a copy that a script gave all attributes of its original, as averages of weights get them.
    """
    if owner is model or hasattr(model, "_is_replica"):
        return True
    return type(owner) is type(model) and getattr(model.forward, "__self__", None) is owner


def _casting(kind: type[nn.Module], own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a forward for models of a class, or for the one that has a forward of its own."""

    @functools.wraps(own or kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        begun = _calls.begun
        model = begun[-1]() if begun else None
        if model is not None and _runs(self, model):
            begun.pop()
        elif torch.compiler.is_compiling():
            model = self
        else:
            # Not the class's own call, as gpytorch's, which may be what calls forward.
            return nn.Module.__call__(self, *args, **kwargs)
        return own(*args, **kwargs) if own else kind.forward(model, *args, **kwargs)

    # Methods are pickled by the name of their function; a copy from a file has the class's own.
    # For dill and cloudpickle, which save the function, its globals are those of this module.
    forward.__name__, forward.__module__ = "forward", __name__
    return forward
