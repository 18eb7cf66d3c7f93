"""Methods of models that a script calls in the place of the model, with casts as of its call.

``model.encode(x)`` of an autoencoder, ``policy.act(state)``: torch's hooks stand around the call of
a model alone. Knows no optimizer, and not how a model came to be in half.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from amp_patch.casting.mode import mode
from amp_patch.casting.running_modules import called
from amp_patch.casting.torch_compile import never_trace
from amp_patch.common.weak_modules import ModuleTable
from amp_patch.patching import Patches

from .half_model import ForwardCasts
from .kept_inputs import places


class ForwardMethods:
    """The methods that cast between `install` and `undo`.

    Args:
        models: returns the prepared models.
    """

    def __init__(self, models: Callable[[], Iterable[nn.Module]]) -> None:
        self._models = models
        self._registered: dict[tuple[type[nn.Module], str], None] = {}
        self._patches = Patches()
        self._active = False
        self._owners: ModuleTable[weakref.ref[nn.Module]] = ModuleTable()
        self._made: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # for one object each

    def register(self, kind: type[nn.Module], name: str) -> None:
        """Have a method of a class cast, for as long as this process runs."""
        if (kind, name) not in self._registered:
            self._registered[kind, name] = None
            if self._active:
                self._patch(kind, name)

    def install(self) -> None:
        """Patch the methods."""
        self._active = True
        for kind, name in self._registered:
            self._patch(kind, name)

    def undo(self) -> None:
        """Restore them; what is registered stays so."""
        self._active = False
        self._patches.undo()
        self._owners.clear()

    def follow(self, models: Iterable[nn.Module]) -> None:
        """Models were prepared: their modules' own methods cast, too, see `_patch_own`."""
        every = list(models) if self._registered else ()
        for kind, name in self._registered:
            self._patch_own(kind, name, every)

    def _patch(self, kind: type[nn.Module], name: str) -> None:
        self._patches.replace(kind, name, self._casting(getattr(kind, name)))
        self._patch_own(kind, name, self._models())

    def _patch_own(self, kind: type[nn.Module], name: str, models: Iterable[nn.Module]) -> None:
        """Have a bound method that a module has in the place of its class's cast.

        Torch's `register_fsdp_forward_method` sets one. That calls the method which the class had
        then, and so never the one that casts, unless this was there before. A plain function is
        left as it is: bound, it would be pickled as the class's method.
        """
        for module in {id(one): one for model in models for one in model.modules()}.values():
            method = vars(module).get(name)
            if not (isinstance(module, kind) and isinstance(method, types.MethodType)):
                continue
            if method.__self__ is module and method.__func__ not in self._made:
                casting = self._casting(method.__func__)
                self._made.add(casting)
                bound = types.MethodType(casting, module)  # a copy of the module gets its own
                self._patches.replace(module, name, bound, weakly=True)

    def _casting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method, which takes the module first, that casts."""

        @functools.wraps(method)
        def casting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            owner = self._owner_of(module)
            casts = None if owner is None else _casts_of(owner)
            if owner is None or casts is None or _is_running(owner):
                return method(module, *args, **kwargs)
            return called(owner, lambda: _run(casts, owner, method, module, args, kwargs))

        return casting if _SEES_HOOKS else never_trace(casting)

    def _owner_of(self, module: nn.Module) -> nn.Module | None:
        """Return the model, or copy of one, that a module is, or is a part of."""
        if _casts_of(module) is not None:
            return module
        known = self._owners.get(module)
        owner = None if known is None else known()
        if owner is None:
            owner = next((one for one in self._models() if _has(one, module)), None)
            if owner is not None:
                self._owners[module] = weakref.ref(owner)
        return owner


#: Before torch 2.7, which brought this, torch.compile does not trace how hooks are found.
_SEES_HOOKS = hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")


def _has(model: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in model.modules())


def _casts_of(model: nn.Module) -> ForwardCasts | None:
    for hook in model._forward_pre_hooks.values():
        casts = getattr(hook, "__self__", None)
        if isinstance(casts, ForwardCasts):
            return casts
    return None


def _is_running(model: nn.Module) -> bool:
    """Tell whether a call of the model, or one of these methods, has called this one."""
    key = id(model)
    return any(running[0] == key for running in mode.models)


def _run(
    casts: ForwardCasts,
    model: nn.Module,
    method: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if casts.kept:  # the places are those of forward
        casts = dataclasses.replace(casts, kept_at=places(method, casts.kept, has_self=True))
    try:
        args, kwargs = casts.enter(model, args, kwargs, is_forward=False) or (args, kwargs)
        outputs = method(module, *args, **kwargs)
    except BaseException:
        casts.leave(model, args, kwargs, None)
        raise
    return casts.leave(model, args, kwargs, outputs)
