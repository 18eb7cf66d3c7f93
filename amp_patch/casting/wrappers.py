"""Wraps torch's functions so that they cast their arguments (O1, O4).

Knows the rules (`rules`), the mode of the thread (`mode`) and where casts of weights
are kept (`weight_cache`); knows nothing of optimizers, scales or levels.

A wrapper is a plain closure: torch.compile traces into one, and passes over a proxy object.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from amp_patch.patching import Patches, as_if_defined_at, resolve, resolve_in

from . import rules as cast_rules
from .held_functions import HeldFunctions
from .mode import HALVES, OFF, mode, process
from .nested import map_tensors
from .weight_cache import WeightCache

Function = Callable[..., Any]
_FLOATS = (torch.float32, *HALVES)
_CONTAINERS = (list, tuple, dict)


def to_half(value: Any, dtype: torch.dtype, weight: Function | None = None) -> Any:
    """Return ``value`` with floating tensors, also in containers, cast to ``dtype``.

    float64, complex and integer tensors, and tensors on other devices than the models', stay.

    Args:
        value: any argument of a patched function.
        dtype: a half dtype.
        weight: casts parameters in its place, given one and the dtype.
    """
    if isinstance(value, Tensor):
        if weight is not None and type(value) is Parameter:
            return weight(value, dtype)
        found = value.dtype
        if found is dtype or found not in _FLOATS or value.device.type not in process.devices:
            return value
        return value.to(dtype)
    if isinstance(value, _CONTAINERS):
        return map_tensors(lambda tensor: to_half(tensor, dtype, weight), value)
    return value


def to_float(value: Any) -> Any:
    """Return ``value`` with half tensors, also in containers, cast to fp32."""
    if isinstance(value, Tensor):
        if value.dtype in HALVES and value.device.type in process.devices:
            return value.float()
        return value
    if isinstance(value, _CONTAINERS):
        return map_tensors(to_float, value)
    return value


def float_on_cpu(value: Any) -> Any:
    """Return ``value`` with half tensors on the CPU cast to fp32."""
    if isinstance(value, Tensor):
        return to_float(value) if value.device.type == "cpu" else value
    if isinstance(value, _CONTAINERS):
        return map_tensors(float_on_cpu, value)
    return value


class Casts:
    """Makes the wrappers; holds the cache that their casts of weights go through.

    Attributes:
        observer: called in the wrappers made from now on for every tensor that comes in the other
            dtype, with "Float->Half (name)" or "Half->Float (name)"; None calls nobody.
    """

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache
        self.observer: Callable[[str], None] | None = None
        self._rules: dict[str, Callable[[Function], Function]] = {
            "half": functools.partial(self._casting, None),
            "bfloat16": functools.partial(self._casting, torch.bfloat16),
            "float": functools.partial(_mapping, to_float),
            "float_on_cpu": functools.partial(_mapping, float_on_cpu),
            "float_dtype": _setting_dtype,
            "promote": _promoting,
            "banned": _banned,
            "refuse": _refusing,
            "off": lambda function: function,
        }

    def install(
        self,
        patches: Patches,
        rules: Mapping[str, str],
        registered: Iterable[tuple[Any, str, str]],
        held: HeldFunctions,
    ) -> None:
        """Patch every function of `rules.targets`, changed by what the user asked for.

        What the user asked for of a function of torch holds for all that it does: the rules of
        the functions that it calls do not. A function of the user's has its arguments cast only.

        Args:
            patches: records what is replaced.
            rules: dotted path -> rule; ``"off"`` casts nothing.
            registered: ``(module, name, rule)`` of functions anywhere; win over ``rules``.
            held: puts the wrappers where the functions are held.
        """
        installation = _Installation(patches, self.wrap)
        registered_rules = {}
        for module, name, rule in registered:
            target = resolve_in(module, name)
            registered_rules[id(target[2])] = rule
            installation.replace(target, rule, alone=_is_torchs(target[2]))
        # First the user's: of a function found in several places (`torch.conv2d` and
        # `torch.nn.functional.conv2d`) a global that is bound to it follows the user's rule.
        for path, rule in {**rules, **cast_rules.targets(), **rules}.items():
            target = resolve(path)
            asked = registered_rules.get(id(target[2]))
            alone = asked is not None or path in rules
            installation.replace(target, asked or rule, path, alone)
        bindings = installation.bindings()
        held.install(bindings, patches.replace_bindings(bindings))

    def wrap(self, function: Function, rule: str, alone: bool = False) -> Function:
        """Return ``function`` with its arguments cast by ``rule`` while casts are on.

        Args:
            function: any.
            rule: one of `rules.targets`, ``"bfloat16"`` or ``"off"``.
            alone: let no other rule act inside of it.
        """
        wrapper = self._rules[rule](_alone(function) if alone else function)
        if self.observer is not None and rule in _SAID:
            wrapper = _observed(wrapper, function, _SAID[rule], self.observer)
        # TorchScript compiles the original: it cannot read a closure.
        wrapper.__prepare_scriptable__ = lambda: function  # type: ignore[attr-defined]  # our own
        return wrapper

    def _casting(self, fixed: torch.dtype | None, original: Function) -> Function:
        cast_weight = self._cache.cast

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            dtype = mode.dtype or process.dtype
            if dtype is OFF or _untouched(kwargs, compiling := is_compiling()):
                return original(*args, **kwargs)
            dtype = fixed or dtype
            # What torch.compile traces must not depend on casts that outlive an iteration.
            weight = to_half if compiling else cast_weight
            if kwargs:
                kwargs = {key: to_half(value, dtype, weight) for key, value in kwargs.items()}
            cast = [
                weight(value, dtype) if type(value) is Parameter else to_half(value, dtype, weight)
                for value in args
            ]
            return original(*cast, **kwargs)

        return wrapper


#: Of rules by which arguments are cast: the dtypes that are, and apex's words for it.
_SAID = {
    "half": ((torch.float32,), "Float->Half"),
    "bfloat16": ((torch.float32,), "Float->BFloat16"),
    "float": (HALVES, "Half->Float"),
    "float_dtype": (HALVES, "Half->Float"),
}


def _observed(
    wrapper: Function,
    function: Function,
    said: tuple[tuple[torch.dtype, ...], str],
    observer: Callable[[str], None],
) -> Function:
    """Return a wrapper that tells of the tensors it gets in a dtype that its rule casts."""
    dtypes, words = said

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        on = (mode.dtype or process.dtype) is not OFF and not is_compiling()
        # softmax() calls the method of the same name, and gives it the dtype
        asked = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        if on and not asked and not _untouched(kwargs, False):
            for tensor in _tensors((args, kwargs)):
                if tensor.dtype in dtypes and tensor.device.type in process.devices:
                    observer(f"{words} ({function.__name__})")
        return wrapper(*args, **kwargs)

    return observed


class _Installation:
    """One run of `Casts.install`: each function gets one wrapper for each rule.

    Attributes:
        wrappers: ``(id(original), rule, alone) -> (original, wrapper)``, in which the original
            may stand for its wrapper.
    """

    def __init__(self, patches: Patches, wrap: Callable[[Function, str, bool], Function]) -> None:
        self.wrappers: dict[tuple[int, str, bool], tuple[Any, Any]] = {}
        self._patches = patches
        self._wrap = wrap
        self._made: set[int] = set()

    def replace(
        self, target: tuple[Any, str, Any], rule: str, path: str | None = None, alone: bool = False
    ) -> None:
        """Patch one attribute, unless it holds one of these wrappers already.

        Args:
            target: owner, name and original.
            rule: of `Casts.wrap`, or ``"off"``.
            path: where users find the function, if it is torch's.
            alone: let no rule but this act in the function.
        """
        owner, name, original = target
        if id(original) in self._made:
            return
        # What is not Python's calls no patched function.
        alone = alone and isinstance(original, types.FunctionType)
        key = id(original), rule, alone
        if key not in self.wrappers:
            self.wrappers[key] = original, self._make(target, rule, path, alone)
        if self.wrappers[key][1] is not original:
            self._patches.replace(owner, name, self.wrappers[key][1])

    def bindings(self) -> dict[int, tuple[Any, Any]]:
        """Return ``id(original) -> (original, wrapper)``; the first wrapper made counts."""
        found: dict[int, tuple[Any, Any]] = {}
        for (key, _, _), pair in self.wrappers.items():
            found.setdefault(key, pair)
        return {key: pair for key, pair in found.items() if pair[0] is not pair[1]}

    def _make(self, target: tuple[Any, str, Any], rule: str, path: str | None, alone: bool) -> Any:
        owner, name, original = target
        if rule == "off" and not alone:
            return original
        wrapper: Any = self._wrap(original, rule, alone)
        if isinstance(owner, type):
            # What torch.compile traces for a method: it reaches the original by name only.
            wrapper.traced = self._wrap(_method(name), rule, alone)
        if path is not None:
            as_if_defined_at(wrapper, path)
        self._made.add(id(wrapper))
        return wrapper


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _alone(original: Function) -> Function:
    """Return the function without the casts of the functions that it calls."""

    @functools.wraps(original)
    def alone(*args: Any, **kwargs: Any) -> Any:
        saved = mode.switch_off(mode.region)
        try:
            return original(*args, **kwargs)
        finally:
            mode.restore(saved)

    return alone


def _method(name: str) -> Function:
    """Return a function that calls its first argument's method ``name``."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _mapping(cast: Callable[[Any], Any], original: Function) -> Function:
    """Wrap a function of which every argument goes through ``cast``."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (mode.dtype or process.dtype) is OFF or _untouched(kwargs, is_compiling()):
            return original(*args, **kwargs)
        if kwargs:
            kwargs = {key: cast(value) for key, value in kwargs.items()}
        return original(*[cast(value) for value in args], **kwargs)

    return wrapper


def _setting_dtype(original: Function) -> Function:
    """Wrap a function that takes ``dtype=``: fp32 unless the caller says otherwise.

    Saves the separate cast where torch fuses it (softmax on CUDA reads half and writes fp32).
    """
    is_norm = "norm" in original.__name__

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (mode.dtype or process.dtype) is OFF or _untouched(kwargs, is_compiling()):
            return original(*args, **kwargs)
        asked = kwargs.get("dtype") or any(isinstance(value, torch.dtype) for value in args)
        if asked or not _holds_half((*args, *kwargs.values())):
            return original(*args, **kwargs)
        if is_norm or not args or any(arg is None for arg in args):
            # A nuclear norm takes no dtype above its input's. A positional None may stand for
            # the dtype: setting it again would be refused.
            kwargs = {key: to_float(value) for key, value in kwargs.items()}
            return original(*[to_float(value) for value in args], **kwargs)
        return original(*args, **{**kwargs, "dtype": torch.float32})

    return wrapper


def _promoting(original: Function) -> Function:
    """Wrap a function that takes one dtype only: mixed arguments become fp32."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (mode.dtype or process.dtype) is OFF or _untouched(kwargs, is_compiling()):
            return original(*args, **kwargs)
        if len(set(_dtypes((args, kwargs)))) > 1:
            args = tuple(to_float(value) for value in args)
            kwargs = {key: to_float(value) for key, value in kwargs.items()}
        return original(*args, **kwargs)

    return wrapper


def _banned(original: Function) -> Function:
    """Wrap a function that is unsafe in half: refused as torch.amp refuses it, but on the CPU."""
    in_float = _mapping(float_on_cpu, original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        on = (mode.dtype or process.dtype) is not OFF and not _untouched(kwargs, is_compiling())
        kinds = {tensor.device.type for tensor in _tensors((args, kwargs))}
        if on and kinds & process.devices - {"cpu"}:
            raise RuntimeError(
                f"{original.__name__} must not run where casts may feed it half tensors, for "
                f"their gradients overflow; got a call on {', '.join(sorted(kinds))} while the "
                "casts of amp.initialize() are on. Use binary_cross_entropy_with_logits without "
                "the sigmoid before it, or call it with .float() tensors in amp.disable_casts()."
            )
        return in_float(*args, **kwargs)

    return wrapper


def _refusing(original: Function) -> Function:
    """Wrap a function that is not to run on half tensors at all, such as ``exp_``."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        on = (mode.dtype or process.dtype) is not OFF and not _untouched(kwargs, is_compiling())
        if on and _holds_half((*args, *kwargs.values())):
            raise NotImplementedError(
                f"{original.__name__} must not run on half tensors, whose range its result "
                f"leaves; got one while the casts of amp.initialize() are on. Call it on "
                f"tensor.float(), or in amp.disable_casts()."
            )
        return original(*args, **kwargs)

    return wrapper


def _untouched(kwargs: dict[str, Any], compiling: bool) -> bool:
    """True for a call that casts must leave alone.

    Writing to ``out=`` cannot be redirected. And torch's own decompositions (of torch.compile
    and export) call the patched functions from inside the dispatcher, below autograd, where
    each dtype is what the operator's definition says.
    """
    if kwargs and kwargs.get("out") is not None:
        return True
    if compiling:
        return False
    return _below_autograd(_AUTOGRAD) and not torch.is_inference_mode_enabled()


_below_autograd = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def _is_half(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.dtype in HALVES and value.device.type in process.devices
    )


def _holds_half(values: tuple[Any, ...]) -> bool:
    return any(_is_half(value) for value in values)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def _dtypes(value: Any) -> list[torch.dtype]:
    return [
        tensor.dtype
        for tensor in _tensors(value)
        if tensor.dtype in _FLOATS and tensor.device.type in process.devices
    ]
