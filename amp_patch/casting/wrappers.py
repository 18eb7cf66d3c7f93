"""Makes functions that cast their arguments, by one rule each, and call another (O1, O4).

Knows what each rule does, the mode of the thread (`mode`) and where casts of weights are cached
(`weight_cache`); knows nothing of where the functions are found, nor of optimizers or levels.

A wrapper is a plain closure: torch.compile traces into one, and passes over a proxy object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from amp_patch.common.warn_once import warn_once
from amp_patch.levels import HALVES
from amp_patch.patching import stood_for

from . import Function, fused_loss
from .added_values import adding_in_float32
from .argument_casts import (
    float_on_cpu,
    holds_half,
    is_half,
    is_sparse_on_cpu,
    tensors_in,
    to_dtype,
    to_float,
)
from .call_checks import (
    all_stay,
    are_handed_on,
    are_mixed,
    asks_for_dtype,
    is_in_torchs_c,
    is_left_alone,
    is_unreplaced,
    name_of,
)
from .cpu_convolutions import right_on_cpu
from .kept_wrappers import KeptWrappers
from .mode import FLOATS, OFF, OTHER_FLOATS, mode, process
from .rules import ROUNDED_ONCE
from .shared_casts import shared_cast
from .usual_calls import (
    CELLS,
    CONTRACTIONS,
    LAYERS,
    NORMS,
    PRODUCTS,
    SUMS,
    added_product,
    casts_by_grad,
    cell,
    contraction,
    layer,
    length,
    norm,
    product,
)
from .verbose_casts import Observer, telling, telling_cast
from .weight_cache import WeightCache


class Casts:
    """Makes the wrappers; holds the cache that their casts of weights go through.

    Attributes:
        observer: called in the wrappers made from now on for every tensor that comes in the other
            dtype, with "Float->Half (name)" or "Half->Float (name)"; None calls nobody.
        kept: has wrappers that no observer hears of.
    """

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache
        self.observer: Observer | None = None
        self.kept = KeptWrappers()
        self._rules: dict[str, Callable[[Function], Function]] = {
            "half": functools.partial(self._casting, None),
            "bfloat16": functools.partial(self._casting, torch.bfloat16),
            "half_out": self._half_out,
            "float": functools.partial(_mapping, to_float),
            "no_half": functools.partial(_mapping, to_float),
            "float_on_cpu": functools.partial(_mapping, float_on_cpu),
            "float_dtype": _setting_dtype,
            "promote": _promoting,
            "in_place": _writing,
            "banned": _banned,
            "refuse": _refusing,
            "off": lambda function: function,
        }

    def wrap(self, function: Function, rule: str, alone: bool = False) -> Function:
        """Return ``function`` with its arguments cast by ``rule`` while casts are on.

        Args:
            function: any.
            rule: one of `targets.rule_targets`, ``"bfloat16"`` or ``"off"``.
            alone: let no other rule act inside of it.
        """
        wrapper = self._rules[rule](_alone(function) if alone else function)
        if self.observer is not None:
            wrapper = telling(wrapper, function, rule, self.observer)
        # The kernel stands in for cross_entropy by its usual rule; not where a user has asked for
        # float32 by a rule of their own, which is torch's function of a cast.
        if rule == "float" and not alone and fused_loss.has_kernel(function):
            wrapper = fused_loss.wrap(wrapper)
        # TorchScript, which cannot read a closure, compiles the original; beneath a wrapper of
        # `library_casts` as well.
        original = getattr(function, "__prepare_scriptable__", lambda: function)
        wrapper.__prepare_scriptable__ = original  # type: ignore[attr-defined]  # our own
        return wrapper

    def _casting(self, fixed: torch.dtype | None, original: Function) -> Function:
        """Wrap a function of which every argument is cast to half: ``fixed``, or the level's."""
        cast_weight = self._cache.cast
        # What torch does in C writes to no argument, and keeps none but for its backward.
        torchs = _beneath(original)
        cast_activation = shared_cast if is_in_torchs_c(torchs) else None
        takes_sparse = name_of(original) in _TAKE_SPARSE
        original = right_on_cpu(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            dtype = mode.dtype or process.dtype
            if dtype is OFF:
                return original(*args, **kwargs)
            # not while torch.compile traces: there no custom backward may ask for a layout
            if takes_sparse and not is_compiling() and any(map(is_sparse_on_cpu, args)):
                return original(*map(float_on_cpu, args), **kwargs)
            dtype = fixed or dtype
            if all_stay(args, kwargs, OTHER_FLOATS[dtype]) or are_handed_on(args, kwargs):
                return original(*args, **kwargs)
            # What torch.compile traces must not depend on casts that outlive an iteration.
            casts = (to_dtype, None) if is_compiling() else (cast_weight, cast_activation)
            if kwargs:
                kwargs = {key: to_dtype(value, dtype, *casts) for key, value in kwargs.items()}
            return original(*[to_dtype(value, dtype, *casts) for value in args], **kwargs)

        usual = next((make for functions, make in _USUAL if torchs in functions), None)
        if usual is None or not is_unreplaced(torchs):
            return wrapper
        casts_now = casts_by_grad(self._cache.cast_plainly, self._cache.cast_now)
        return usual(casts_now, fixed, original, wrapper)

    def _half_out(self, original: Function) -> Function:
        """Wrap a function that computes in fp32, and of which the result is cast to half.

        A half input stays as it is where torch's kernel for it rounds once, as this does.
        """
        cast_weight = self._cache.cast
        cast = to_dtype if self.observer is None else telling_cast(self.observer, name_of(original))
        devices = ROUNDED_ONCE.get(name_of(original), ())

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            dtype = mode.dtype or process.dtype
            compiling = is_compiling()
            if dtype is OFF or is_left_alone(kwargs) or asks_for_dtype(args, kwargs):
                return original(*args, **kwargs)
            source: Any = args[0] if args else kwargs.get("input")
            inside, weight = torch.float32, None
            if is_half(source) and source.device.type in devices:
                inside, weight = source.dtype, to_dtype if compiling else cast_weight
            if kwargs:
                kwargs = {key: cast(value, inside, weight) for key, value in kwargs.items()}
            result = original(*[cast(value, inside, weight) for value in args], **kwargs)
            return cast(result, dtype)

        return wrapper


_USUAL = (
    (LAYERS, layer),
    (PRODUCTS, product),
    (SUMS, added_product),
    (CONTRACTIONS, contraction),
    (CELLS, cell),
)


def _beneath(function: Function) -> Function:
    """Return the function that one stands for, which was patched for a model in half, or itself."""
    return stood_for(function) or function


#: Products of two matrices of which one may be sparse.
_TAKE_SPARSE = frozenset({"__matmul__", "__rmatmul__", "addmm", "dsmm", "matmul", "mm", "spmm"})


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


def _mapping(cast: Callable[[Any], Any], original: Function) -> Function:
    """Wrap a function of which every argument goes through ``cast``."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (mode.dtype or process.dtype) is OFF or all_stay(args, kwargs, HALVES):
            return original(*args, **kwargs)
        if kwargs:
            kwargs = {key: cast(value) for key, value in kwargs.items()}
        return original(*[cast(value) for value in args], **kwargs)

    return norm(original, wrapper) if _beneath(original) in NORMS else wrapper


def _setting_dtype(original: Function) -> Function:
    """Wrap a function that takes ``dtype=``: fp32 unless the caller says otherwise.

    Saves the separate cast where torch fuses it (softmax on CUDA reads half and writes fp32).
    """
    is_norm = "norm" in original.__name__

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # The usual questions first: no such function takes another tensor to be cast, and torch's
        # softmax of torch.nn calls another with a dtype. Types are looked for in a list, for torch
        # 2.6 traces no "in" of a map.
        if args and type(args[0]) is Tensor and args[0].dtype is torch.float32:
            return original(*args, **kwargs)
        if (kwargs and kwargs.get("dtype")) or (mode.dtype or process.dtype) is OFF:
            return original(*args, **kwargs)
        if all_stay(args, kwargs, HALVES) or torch.dtype in list(map(type, args)):
            return original(*args, **kwargs)
        if not holds_half(args) and not holds_half(kwargs.values()):
            return original(*args, **kwargs)
        if is_norm or not args or type(None) in list(map(type, args)):
            # A nuclear norm takes no dtype above its input's. A positional None may stand for
            # the dtype: setting it again would be refused.
            kwargs = {key: to_float(value) for key, value in kwargs.items()}
            return original(*[to_float(value) for value in args], **kwargs)
        return original(*args, **{**kwargs, "dtype": torch.float32})

    return length(original, wrapper) if is_norm else wrapper


def _promoting(original: Function) -> Function:
    """Wrap a function that takes one dtype only: mixed arguments become fp32."""
    original = adding_in_float32(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (mode.dtype or process.dtype) is OFF or is_left_alone(kwargs):
            return original(*args, **kwargs)
        if are_mixed(args, kwargs):
            args = tuple(to_float(value) for value in args)
            kwargs = {key: to_float(value) for key, value in kwargs.items()}
        return original(*args, **kwargs)

    return wrapper


def _writing(original: Function) -> Function:
    """Wrap a function that writes to its first argument: the others come in the dtype of that."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        is_off = (mode.dtype or process.dtype) is OFF
        if is_off or not args or not isinstance(args[0], Tensor) or args[0].dtype not in FLOATS:
            return original(*args, **kwargs)
        target, *others = args
        kwargs = {key: to_dtype(value, target.dtype) for key, value in kwargs.items()}
        return original(target, *[to_dtype(value, target.dtype) for value in others], **kwargs)

    return wrapper


def _banned(original: Function) -> Function:
    """Wrap a function that is unsafe in half: refused as torch.amp refuses it, but on the CPU."""
    in_float = _mapping(float_on_cpu, original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        on = (mode.dtype or process.dtype) is not OFF and not is_left_alone(kwargs)
        kinds = {tensor.device.type for tensor in tensors_in((args, kwargs))}
        if on and kinds & process.devices - {"cpu"}:
            raise RuntimeError(
                f"{original.__name__} must not run where casts may feed it half tensors, for "
                f"their gradients overflow; got a call on {', '.join(sorted(kinds))} while the "
                "casts of amp.initialize() are on. Use binary_cross_entropy_with_logits without "
                "the sigmoid before it, or call it with .float() tensors in amp.disable_casts()."
            )
        if on and not is_compiling() and holds_half((*args[:1], kwargs.get("input"))):
            warn_once(
                f"{original.__name__} needs the digits of probabilities near 1, which half numbers "
                "round to 1; got half ones, which are refused on a GPU. Use "
                "binary_cross_entropy_with_logits without the sigmoid before it."
            )
        return in_float(*args, **kwargs)

    return wrapper


def _refusing(original: Function) -> Function:
    """Wrap a function that is not to run on half tensors at all, such as ``exp_``."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        on = (mode.dtype or process.dtype) is not OFF and not is_left_alone(kwargs)
        if on and holds_half((*args, *kwargs.values())):
            raise NotImplementedError(
                f"{original.__name__} must not run on half tensors, whose range its result "
                f"leaves; got one while the casts of amp.initialize() are on. Call it on "
                f"tensor.float(), or in amp.disable_casts()."
            )
        return original(*args, **kwargs)

    return wrapper
