"""Local precision: everything in one dtype inside a ``with``, at every level; or no casts there.

Knows which functions compute (`targets.region_targets`) and the mode of the thread; knows
nothing of patches, for a region acts through torch's own function modes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from amp_patch.common.imported_modules import is_left_alone
from amp_patch.levels import HALVES
from amp_patch.patching import resolve

from . import targets
from .argument_casts import tensors_in, to_dtype
from .half_numbers import in_half, in_its_dtype
from .mode import mode, process

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound="CastContext")


class Region(TorchFunctionMode):
    """Casts the floating arguments of every computing function to one dtype.

    Acts only while it is the innermost region of its thread: an outer region sees the calls of
    an inner one, and ``disable_casts`` inside a region turns it off.

    It is no second set of rules: there is one dtype for all functions, at every level, also where
    nothing is patched, so that a region cannot be made of the wrappers of O1 and O4.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if mode.region is not self or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        name = _name(func) if is_compiling() else func.__name__
        if name not in _COMPUTING or _is_users(func):
            args, kwargs = in_its_dtype(name, args, kwargs)
            return func(*args, **kwargs)
        dtype = self.dtype
        if dtype in HALVES and name in _FOR_NUMPY:
            return func(*args, **kwargs)
        if name in _NO_HALF or (name in _FLOAT_ON_CPU and _on_cpu((args, kwargs))):
            dtype = torch.float32
        if name in _FIRST_ARGUMENT:
            return _normalize(func, dtype, args, dict(kwargs))
        # argument by argument: to look into the tuple and the dict takes twenty calls of Python
        kwargs = {key: to_dtype(value, dtype) for key, value in kwargs.items()}
        args = tuple([to_dtype(value, dtype) for value in args])
        if dtype in HALVES:
            args, kwargs = in_half(name, args, kwargs, dtype)
        return func(*args, **kwargs)


class CastContext:
    """A context manager, and a decorator: casts are set for a ``with`` block or a function's calls.

    Its state is in the thread's mode: one object may be entered again, and in several threads.
    A class and no generator: torch 2.6 does not compile those.
    """

    def __call__(self, function: F) -> F:
        """Return ``function`` with each of its calls run in such a context.

        Raises:
            TypeError: what computes after its call returned (a generator function, a coroutine),
                or is no function, as a layer is none.
        """
        _refuse_no_function(function)

        @functools.wraps(function)
        def in_context(*args: Any, **kwargs: Any) -> Any:
            # A new one for each call: torch.compile enters only what it has seen being made.
            with type(self)():
                return function(*args, **kwargs)

        return cast(F, in_context)

    def __enter__(self) -> None:
        mode.around.append(mode.save())
        self._begin()

    def __exit__(self, *error: object) -> None:
        # Modules inside that are regions by a rule, and that an interrupt has ended without their
        # hooks.
        while mode.modules and mode.modules[-1][1] == len(mode.around):
            mode.modules.pop()
            end_block(*error)
        end_block(*error)

    def _begin(self) -> None:
        raise NotImplementedError


class CastsOff(CastContext):
    """The casts of O1 and O4 are off inside, and no region around acts."""

    def _begin(self) -> None:
        mode.switch_off()


class HalfRegion(CastContext):
    """Everything is in the level's half dtype inside; nothing happens before initialize."""

    def _begin(self) -> None:
        _begin_region(half=True)


class FloatRegion(CastContext):
    """Everything is in fp32 inside; nothing happens before initialize."""

    def _begin(self) -> None:
        _begin_region(half=False)


def end_block(*error: Any) -> None:
    """End the innermost open block of this thread, with what it raised if it did.

    Raises:
        RuntimeError: none is open.
    """
    if not mode.around:
        raise RuntimeError(
            "a region ends where it began, in the same thread; got an end without a beginning; "
            "call 'with amp.half_region():' (or the like), which does both."
        )
    if mode.is_autocast_off_in_block():  # and left so: a region that began is to end
        mode.switch_autocast_on()
    saved = mode.around.pop()
    if mode.region is not None and mode.region is not saved.region:
        mode.region.__exit__(*(error or (None, None, None)))
    mode.restore(saved)


def without_arguments(make: Callable[[], C]) -> Callable[[], C]:
    """Decorate what makes a context: ``@amp.half_region`` for ``@amp.half_region()`` is told so."""

    @functools.wraps(make)
    def made(*given: Any) -> C:
        if given:
            raise TypeError(
                f"amp.{make.__name__}() takes no argument; got {given[0]!r}; call it with empty "
                f"parentheses: @amp.{make.__name__}() to decorate a function."
            )
        return make()

    return made


def _refuse_no_function(function: Any) -> None:
    computes_later = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    is_late = any(check(function) for check in computes_later)
    if is_late or isinstance(function, type) or not callable(function):
        raise TypeError(
            "a region decorates a function that computes before it returns, no generator, "
            f"coroutine or class; got {function!r}; write 'with amp.half_region():' (or the like) "
            "inside of it, around what computes there."
        )
    if isinstance(function, nn.Module):
        raise TypeError(
            "a region decorates functions, and a module would lose its parameters by it; got an "
            f"object of type {type(function).__name__}; decorate its forward, or call "
            "amp.initialize(..., rules={'modules': {'path.in.the.model': 'float'}})."
        )


def _begin_region(half: bool) -> None:
    half_dtype = mode.region_dtype or process.region_dtype
    if half_dtype is not None:
        region = Region(half_dtype if half else torch.float32)
        mode.switch_off(region)
        region.__enter__()


def _name(function: Any) -> str:
    """Return a function's name where torch.compile traces.

    Torch 2.15 takes that of a function in Python from its code, whatever `functools.wraps` said.
    """
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return str(getattr(function, "calls", None) or function.__name__)


def _is_users(function: Any) -> bool:
    """Tell a user's function from torch's: it may ask torch's modes too, under any name.

    Where torch.compile traces, such a function goes by its name.
    """
    if is_compiling() or not isinstance(function, FunctionType):
        return False
    return not is_left_alone(function.__globals__.get("__name__", ""))


def _normalize(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a norm that writes to running statistics: a cast copy of them is copied back.

    A half region leaves them and the weights in fp32, which norms take with a half input.
    """
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    written = []
    for key, value in values.items():
        is_input = key in (0, "input")
        if not isinstance(value, Tensor) or not (is_input or dtype is torch.float32):
            continue
        values[key] = to_dtype(value, dtype)
        if values[key] is not value and not is_input and not _is_weight(value):
            written.append((value, values[key]))
    result = func(*[values[i] for i in range(len(args))], **{k: values[k] for k in kwargs})
    for statistic, copied in written:
        statistic.copy_(copied)
    return result


def _is_weight(value: Tensor) -> bool:
    return value.requires_grad or isinstance(value, nn.Parameter)


def _on_cpu(value: Any) -> bool:
    return any(tensor.device.type == "cpu" for tensor in tensors_in(value))


def _names(paths: Iterable[str]) -> frozenset[str]:
    return frozenset(name for path in paths for name in (path.rpartition(".")[2], _own_name(path)))


def _own_name(path: str) -> str:
    return str(getattr(resolve(path)[2], "__name__", path))


# What NumPy is given counts as computed: it has no bfloat16.
_FOR_NUMPY = frozenset({"numpy", "__array__"})
# By name, for torch.compile cannot look functions up in a set, and what a patched function calls
# is not always the object that stands in torch. Made at import, for a first use may be while it
# traces.
_COMPUTING = _names(targets.region_targets()) | _FOR_NUMPY
# The running statistics of a norm are written to, so a cast copy of them will not do.
_FIRST_ARGUMENT = _names(targets.first_argument_targets())
# No half kernel, on no device or not on the CPU: a half region runs these in fp32 there.
_WITHOUT_HALF = targets.region_float_targets()
_NO_HALF = _names(path for path, rule in _WITHOUT_HALF.items() if rule == "no_half")
_FLOAT_ON_CPU = _names(path for path, rule in _WITHOUT_HALF.items() if rule == "float_on_cpu")
