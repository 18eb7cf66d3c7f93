"""Puts the wrappers where functions are found: in torch, and in the globals of users' modules.

Knows where functions are found (`targets`) and when a user's rule wins; knows nothing of what a
wrapper does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from amp_patch.common.imported_modules import Replacements
from amp_patch.patching import (
    Patches,
    as_function,
    as_if_defined_at,
    is_no_method,
    resolve,
    resolve_in,
    stood_for,
)

from . import Function, targets
from .kept_wrappers import KeptWrappers
from .rules import IN_OTHER_MODULES

# Takes a function, its rule, and whether no other rule acts inside of it.
Wrap = Callable[[Function, str, bool], Function]


def install(
    wrap: Wrap,
    patches: Patches,
    rules: Mapping[str, str],
    registered: Iterable[tuple[Any, str, str]],
    others: Mapping[str, Callable[[Function], Function]],
    kept: KeptWrappers | None = None,
) -> tuple[Replacements, list[types.ModuleType]]:
    """Patch every function of `targets.rule_targets`, changed by what the user asked for.

    What the user asked for of a function of torch holds for all that it does: the rules of
    the functions that it calls do not. A function of the user's has its arguments cast only.

    Args:
        wrap: makes a wrapper, as `Casts.wrap`.
        patches: records what is replaced.
        rules: dotted path -> rule; ``"off"`` casts nothing.
        registered: ``(module, name, rule)`` of functions anywhere; win over ``rules``.
        others: path -> what makes the replacement of a function of torch that has no rule.
        kept: has the wrappers of torch's functions that ``wrap`` has made before, and gets others.

    Returns:
        ``id(original) -> (original, wrapper)``, and the modules that use torch.
    """
    installation = _Installation(patches, wrap, kept)
    registered_rules, only_torchs = {}, True
    for module, name, rule in registered:
        found = resolve_in(module, name)
        registered_rules[id(found[2])] = rule
        torchs = _names_torch_as_its_module(found[2])
        only_torchs = only_torchs and torchs
        installation.replace(found, rule, alone=torchs)
    # First the user's: of a function found in several places (`torch.conv2d` and
    # `torch.nn.functional.conv2d`) a global that is bound to it follows the user's rule.
    ruled: dict[int, str] = {}
    torchs_rules = {**targets.rule_targets(), **IN_OTHER_MODULES}
    for path, rule in {**rules, **torchs_rules, **rules}.items():
        found = resolve(path)
        asked = registered_rules.get(id(found[2]))
        if path in rules:
            ruled[id(found[2])] = rule
        elif path.startswith(_NAMED_BY_TORCH):
            asked = asked or ruled.get(id(found[2]))
        alone = asked is not None or path in rules
        installation.replace(found, asked or rule, path, alone)
    for path, make in others.items():
        installation.replace_by(make, path)
    bindings = installation.bindings()
    return bindings, patches.replace_bindings(bindings, users_only=only_torchs)


#: What torch tells a class with a `__torch_function__` that was called; `CausalBias` compares it
#: with what `torch.nn.functional` has.
_NAMED_BY_TORCH = "torch._C._nn."


def replace_by(
    patches: Patches,
    make: Callable[[Function], Function],
    path: str,
    kept: KeptWrappers | None = None,
) -> tuple[Any, Any]:
    """Patch a function of torch by what ``make`` makes of it, and return both.

    What is no method any more, where one was, is returned twice.

    Args:
        patches: records it.
        make: is kept with what it has made.
        path: of the function.
        kept: as `install` takes them.
    """
    owner, name, original = resolve(path)
    if is_no_method(owner, original):
        return original, original

    def replacement_of_it() -> Any:
        made: Any = make(as_function(original, name))
        if isinstance(owner, type):
            made.traced = make(calling(name))  # see `_Installation._wrapped`
        as_if_defined_at(made, path)
        return made

    replacement = _kept_or_made(kept, original, (make, path), replacement_of_it)
    patches.replace(owner, name, replacement)
    return original, replacement


class _Installation:
    """One run of `install`: each function gets one wrapper for each rule.

    Attributes:
        wrappers: ``(id(original), rule, alone) -> (original, wrapper)``, in which the original
            may stand for its wrapper, and the path for a rule that there is none of.
    """

    def __init__(self, patches: Patches, wrap: Wrap, kept: KeptWrappers | None) -> None:
        self.wrappers: dict[tuple[int, str, bool], tuple[Any, Any]] = {}
        self._patches = patches
        self._wrap = wrap
        self._kept = kept
        self._made: set[int] = set()

    def replace(
        self, target: tuple[Any, str, Any], rule: str, path: str | None = None, alone: bool = False
    ) -> None:
        """Patch one attribute, unless it holds one of these wrappers already, or no method.

        Args:
            target: owner, name and original.
            rule: of `Casts.wrap`, or ``"off"``.
            path: where users find the function, if it is torch's.
            alone: let no rule but this act in the function.
        """
        owner, name, original = target
        if id(original) in self._made or is_no_method(owner, original):
            return
        # A function in C calls no patched one: it is alone in any case.
        alone = alone and isinstance(original, types.FunctionType)
        key = id(original), rule, alone
        if key not in self.wrappers:
            self.wrappers[key] = original, self._make(target, rule, path, alone)
        if self.wrappers[key][1] is not original:
            self._patches.replace(owner, name, self.wrappers[key][1])

    def replace_by(self, make: Callable[[Function], Function], path: str) -> None:
        """Patch a function of torch by what ``make`` makes of it."""
        original, replacement = replace_by(self._patches, make, path, self._kept)
        self.wrappers[id(original), path, False] = original, replacement

    def bindings(self) -> Replacements:
        """Return ``id(original) -> (original, wrapper)``; the first wrapper made counts.

        Where the original is a wrapper of `library_casts`, users may have bound either.
        """
        found: dict[int, tuple[Any, Any]] = {}
        for (key, _, _), pair in self.wrappers.items():
            found.setdefault(key, pair)
        found = {key: pair for key, pair in found.items() if pair[0] is not pair[1]}
        # Last, for what is undone goes back to what came last.
        for original, wrapper in list(found.values()):
            beneath = stood_for(original)
            if beneath is not None:
                found[id(beneath)] = beneath, wrapper
        return found

    def _make(self, target: tuple[Any, str, Any], rule: str, path: str | None, alone: bool) -> Any:
        owner, name, original = target
        if rule == "off" and not alone:
            return original
        if isinstance(original, types.ClassMethodDescriptorType):
            original = classmethod(_of_class(original))
        if isinstance(original, (classmethod, staticmethod)):
            # The object in the class is no function: the one inside of it is wrapped.
            inside = self._wrap(original.__func__, rule, alone)
            wrapper: Any = type(original)(inside)
            self._made.add(id(wrapper))
            return wrapper
        original = as_function(original, name)
        method = name if isinstance(owner, type) else None
        make = functools.partial(self._wrapped, original, rule, alone, method)
        wrapper = _kept_or_made(self._kept, original, (rule, alone, method), make)
        if path is not None:
            as_if_defined_at(wrapper, path)
        self._made.add(id(wrapper))
        return wrapper

    def _wrapped(self, original: Any, rule: str, alone: bool, method: str | None) -> Any:
        wrapper: Any = self._wrap(original, rule, alone)
        if method is not None:
            # torch.compile traces this one for a method, of which it reaches the original by name
            # only.
            wrapper.traced = self._wrap(calling(method), rule, alone)
        return wrapper


def _names_torch_as_its_module(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _kept_or_made(
    kept: KeptWrappers | None, original: Any, key: Hashable, make: Callable[[], Any]
) -> Any:
    """Return the wrapper of a function that was kept, else a new one, see `KeptWrappers.get`."""
    if kept is None or not _lives_on(original):
        return make()
    return kept.get(original, key, make)


def _lives_on(function: Any) -> bool:
    """Tell whether it is torch's own, and no replacement that somebody has put there."""
    if type(function) is types.FunctionType:  # a proxy of one says that it is an instance
        return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"
    return type(function) in (types.BuiltinFunctionType, types.MethodDescriptorType)


def _of_class(descriptor: types.ClassMethodDescriptorType) -> Function:
    """Return a function that calls a class method in C, as `apply` of autograd functions may be."""

    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        return descriptor.__get__(None, cls)(*args, **kwargs)

    call.__name__ = descriptor.__name__
    return call


def calling(name: str) -> Function:
    """Return a function that calls its first argument's method ``name``."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    call.__name__ = name
    call.calls = name  # type: ignore[attr-defined]  # torch 2.15 compiles `__name__` as "call"
    return call
