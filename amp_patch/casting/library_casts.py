"""Wraps a function of another library, or of torch, so that its arguments are cast by a rule.

Knows what the words of `library_rules` mean. It must not know what the functions compute, nor where
they stand.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import fused_loss
from .argument_casts import is_on_cast_device, tensors_in, to_dtype, to_float
from .cached_casts import is_large
from .foreign_objects import cast_frame, has_more_neighbours, promote_column
from .half_saving import HalfSaving
from .half_sums import add_rows, can_add
from .lookups import looking_up
from .many_uses import used
from .meeting_dtypes import MEETINGS, casting_where_they_meet
from .mode import FLOATS, HALVES, OFF, mode, process
from .nested import map_tensors
from .regions import FloatRegion
from .shared_casts import is_recorded

Function = Callable[..., Any]

CASTS = ("half", "promote", "stored", "float", "result")
#: How functions of `rules` without a half kernel run where a model is stored in half: half
#: arguments in float32, wherever; of some those on a CPU.
WITHOUT_HALF = ("no_half", "float_on_cpu")
#: Of which only `library_rules` knows: the first two for methods of DGL's objects.
OWN_CASTS = (
    *("frames", "rows", "sums", "told", "loss", "widened", "wide", "rounded", "lengths"),
    *("logits", "uncast", "lookup", "counted", "registered", *MEETINGS),
)
IN_FLOAT = ("never", "cpu", "mixed", "always")
OWN_IN_FLOAT = ("hubs",)


class Rule(NamedTuple):
    """How a function's floating arguments are cast, and where half ones are computed in float32.

    Attributes:
        casts: one of `CASTS` or `OWN_CASTS`, or `WITHOUT_HALF`.
        in_float: one of `IN_FLOAT` or `OWN_IN_FLOAT`.
    """

    casts: str
    in_float: str = "never"


def wrap(function: Function, rule: Rule) -> Function:
    """Return ``function`` with its floating arguments, also those in containers, cast by a rule."""
    if rule.casts in MEETINGS:
        return casting_where_they_meet(function, rule.casts)
    if rule.casts == "widened":
        return _widening(function)
    if rule.casts == "lookup":
        return looking_up(function)
    if rule.casts == "counted":
        return _counting(function)
    has_kernel = rule.casts != "logits" or fused_loss.has_kernel(function)
    run = functools.partial(_RUN.get(rule.casts if has_kernel else "wide", _run), rule)
    if rule.in_float == "hubs":
        run = functools.partial(_run_unless_hub, run)
    out_at = _position_of_out(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        out = args[out_at] if len(args) > out_at else kwargs.get("out")
        if out is not None:  # it must be written to, and a cast of it is a copy
            return function(*args, **kwargs)
        return run(function, args, kwargs)

    return _standing_for(function, wrapper)


def _standing_for(function: Function, wrapper: Any) -> Function:
    # TorchScript compiles the original: it cannot read a closure.
    wrapper.__prepare_scriptable__ = lambda: function
    wrapper.stands_for = function  # for `installation`
    return wrapper  # type: ignore[no-any-return]  # a function, with attributes of our own


def _counting(function: Function) -> Function:
    """Return a function that is called with parts of a weight that is used very often."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            args, kwargs = used(args, kwargs)
        return function(*args, **kwargs)

    return _standing_for(function, wrapper)


def _widening(method: Function) -> Function:
    """Return a method that takes half arguments in float32; torch.compile reads all of it."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _widened(method, args, kwargs)

    return wrapper


def _position_of_out(function: Function) -> int:
    """Return where a positional ``out`` stands; beyond all arguments where there is none."""
    if type(function) is types.FunctionType and not hasattr(function, "__wrapped__"):
        # of whose signature nothing else is asked: to make it takes twenty times as long
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        return names.index("out") if "out" in names else sys.maxsize
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # it is not Python's
        return sys.maxsize
    places = [
        place
        for place, parameter in enumerate(parameters)
        if parameter.name == "out" and parameter.kind is not parameter.KEYWORD_ONLY
    ]
    return places[0] if places else sys.maxsize


def _run_stored(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it in a model that is stored in half with arguments in its dtype, results as well."""
    dtype = mode.stored
    if dtype is None or mode.region is not None:
        return function(*args, **kwargs)
    never = rule.in_float in ("never", "hubs")
    if never or not _in_float(rule, _floats_in(args, kwargs)):
        args, kwargs = _map_call(functools.partial(_cast, dtype=dtype), args, kwargs)
        return _cast(function(*args, **kwargs), dtype)
    return _cast(_in_float_region(function, args, kwargs), dtype)


def _run_float(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it in float32 where a level casts; in a stored model with results in its dtype."""
    level, dtype = mode.dtype or process.dtype, mode.stored
    if mode.region is not None or (level is OFF and dtype is None):
        return function(*args, **kwargs)
    found = _in_float_region(function, args, kwargs)
    return found if dtype is None else _cast(found, dtype)


def _in_float_region(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = _map_call(functools.partial(_cast, dtype=torch.float32), args, kwargs)
    with FloatRegion():  # layers inside may have half weights
        return function(*args, **kwargs)


def _run_unless_hub(
    run: Function, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it as ``run`` does, or in float32 on a graph whose neighbours float16 cannot count."""
    half = mode.stored or mode.dtype or process.dtype
    if half is torch.float16 and mode.region is None and not is_compiling():
        largest = int(torch.finfo(half).max)
        if any(has_more_neighbours(one, largest) for one in (*args, *kwargs.values())):
            return _cast(_in_float_region(function, args, kwargs), half)
    return run(function, args, kwargs)


def _run_told(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call what counts in float32, where it adds up half weights or is told a half dtype.

    Of a count that float16 does not hold, the result is the largest that it does.
    """
    dtypes = {tensor.dtype for tensor in _floats_in(args, kwargs)}
    if not dtypes:
        told = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)]
        dtypes.update(told[:1])
    dtype = dtypes.pop() if len(dtypes) == 1 else None  # two promote to float32 or float64
    if dtype not in HALVES:
        return function(*args, **kwargs)

    def wide(one: Any) -> Any:
        return torch.float32 if isinstance(one, torch.dtype) else _cast(one, torch.float32)

    def narrow(found: Tensor) -> Tensor:
        if not found.is_floating_point():
            return found
        # bfloat16 holds any count; the values of a sparse matrix are none
        if dtype is torch.float16 and found.layout is torch.strided:
            found = found.clamp(max=torch.finfo(dtype).max)
        return found.to(dtype)

    args, kwargs = _map_call(wide, args, kwargs)
    with _NothingElseCasts():  # what it calls would give half sums in a model that is in half
        found = function(*args, **kwargs)
    return map_tensors(narrow, found)


def _run_loss(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a model's method in float32, which scripts call beside the model, at every level."""
    if mode.region is not None or not process.is_mixed:
        return function(*args, **kwargs)
    return _in_float_region(function, args, kwargs)


def _run_wide(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it in a model that is stored in half with half arguments in float32."""
    if mode.stored is None or mode.region is not None:
        return function(*args, **kwargs)
    return _widened(function, args, kwargs)


def _run_no_half(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it with half arguments in float32, beside models as well: it would raise."""
    return _widened(function, args, kwargs)


def _run_float_on_cpu(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it so where they are on a CPU; in a model its results are cast to the model's dtype."""
    if not any(tensor.is_cpu and tensor.dtype in HALVES for tensor in _floats_in(args, kwargs)):
        return function(*args, **kwargs)
    found, dtype = _widened(function, args, kwargs), mode.stored
    return found if dtype is None or mode.region is not None else _cast(found, dtype)


def _run_rounded(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it so, and cast its results to the model's dtype."""
    dtype = mode.stored
    if dtype is None or mode.region is not None:
        return function(*args, **kwargs)
    args, kwargs = _map_call(to_float, args, kwargs)
    return _to(function(*args, **kwargs), dtype)


def _run_lengths(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it so where the first is half, unless it is told the dtype of its results."""
    dtype = mode.stored
    if dtype is None or mode.region is not None or kwargs.get("dtype") is not None:
        return function(*args, **kwargs)
    if not args or getattr(args[0], "dtype", None) not in HALVES:
        return function(*args, **kwargs)  # a script that writes x.float().norm() means it
    return _to(_widened(function, args, kwargs), dtype)


def _widened(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = _map_call(to_float, args, kwargs)
    return function(*args, **kwargs)


def _run_logits(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call torch's cross_entropy as by "wide", or a kernel that computes it in float32."""
    # Of half logits outside of such a model torch's loss is half.
    dtypes = (torch.float32,) if mode.stored is None else FLOATS
    if not mode.off and process.is_mixed:
        loss = fused_loss.loss_of(args, kwargs, dtypes)
        if loss is not None:
            return loss
    return _run_wide(rule, function, args, kwargs)


def _run_result(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it, at O1 and O4 with results in half."""
    found = function(*args, **kwargs)
    level = mode.dtype or process.dtype
    return found if level is OFF or mode.region is not None else _cast(found, level)


def _run_uncast(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it without casts, but in a model that is stored in half."""
    if mode.stored is not None:
        return function(*args, **kwargs)
    with _NothingElseCasts():
        return function(*args, **kwargs)


def _run_registered(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a custom operator, where casts are on, as `torch.autocast` does: as is registered."""
    dtypes = getattr(args[0], "_autocast_dtype", None)  # only newer torch has them
    tensors = _floats_in(args[1:], kwargs) if dtypes else []
    dtype = dtypes.get(tensors[0].device.type) if dtypes and tensors else None
    if dtype is None or (mode.dtype or process.dtype) is OFF:
        return function(*args, **kwargs)
    args, kwargs = _map_call(functools.partial(_cast, dtype=dtype), args, kwargs)
    with _NothingElseCasts():
        return function(*args, **kwargs)


def _run_frames(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it in such a model with the features in DGL's frames in the model's dtype."""
    dtype = mode.stored
    if dtype is None or mode.region is not None:
        return function(*args, **kwargs)

    def cast(value: Any) -> Any:
        return cast_frame(value, dtype, lambda inner: _cast(inner, dtype))

    args, kwargs = _map_call(cast, args, kwargs)
    return function(*args, **kwargs)


def _run_rows(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call what writes rows of a column of DGL's, which then has the dtype of both."""
    column, *given = args
    tensors = _floats_in(column.data, given, kwargs)
    if not tensors:
        return function(*args, **kwargs)
    _, dtype = _dtypes(Rule("promote"), tensors)
    promote_column(column, dtype)
    # what says the dtype of the rows is left out: DGL finds it in them
    given = [
        _cast(one, dtype) for one in given if not hasattr(one, "dtype") or isinstance(one, Tensor)
    ]
    return function(column, *given, **_cast(dict(kwargs), dtype))


def _run(rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensors = _floats_in(args, kwargs)
    if not tensors:
        return function(*args, **kwargs)
    runs_in, result = _dtypes(rule, tensors)
    if runs_in is result or not _saves_in_half(result, tensors):
        args, kwargs = _map_call(functools.partial(_cast, dtype=runs_in), args, kwargs)
        with _NothingElseCasts():
            return _cast(function(*args, **kwargs), result)
    saving = HalfSaving(result)

    def widen(tensor: Tensor) -> Tensor:
        wide: Tensor = _to(tensor, runs_in)
        saving.note(wide, tensor)
        return wide

    def narrow(tensor: Tensor) -> Tensor:
        half: Tensor = _to(tensor, result)
        saving.note(tensor, half)
        return half

    args, kwargs = _map_call(lambda one: map_tensors(widen, one), args, kwargs)
    with _NothingElseCasts(), saving.hooks():
        found = function(*args, **kwargs)
    found = map_tensors(narrow, found)
    saving.settle()
    return found


def _run_sums(
    rule: Rule, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call what reduces rows at indices: sums and means of half ones take less memory here.

    Such functions call nothing that a level casts.
    """
    rows: Any = args[0] if args else kwargs.get("src")
    is_half = isinstance(rows, Tensor) and rows.dtype in HALVES
    if mode.region is not None or mode.stored not in (None, rows.dtype if is_half else None):
        return _run(rule, function, args, kwargs)
    if not is_half:
        return function(*args, **kwargs)
    try:
        index, dim, size, reduce = _besides_rows(*args, **kwargs)
    except TypeError:
        return function(*args, **kwargs)  # which says what is wrong
    is_sum = reduce in ("sum", "add", "mean") and not is_compiling() and is_on_cast_device(rows)
    if not is_sum or not can_add(rows, index, dim, size):
        return _run(rule, function, args, kwargs)
    return add_rows(rows, index, dim, size, reduce == "mean")


def _besides_rows(
    src: Any, index: Any, dim: Any = 0, dim_size: Any = None, reduce: Any = "sum"
) -> tuple[Any, Any, Any, Any]:
    """Return the other arguments of a call of what a rule of "sums" names."""
    return index, dim, dim_size, reduce


_RUN = {
    "stored": _run_stored,
    "float": _run_float,
    "told": _run_told,
    "loss": _run_loss,
    "wide": _run_wide,
    "no_half": _run_no_half,
    "float_on_cpu": _run_float_on_cpu,
    "rounded": _run_rounded,
    "lengths": _run_lengths,
    "logits": _run_logits,
    "result": _run_result,
    "frames": _run_frames,
    "rows": _run_rows,
    "sums": _run_sums,
    "uncast": _run_uncast,
    "registered": _run_registered,
}


def _dtypes(rule: Rule, tensors: list[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype that a function runs in on such arguments, and that of its result."""
    dtypes = {tensor.dtype for tensor in tensors}
    widest = functools.reduce(torch.promote_types, dtypes)
    level = mode.dtype or process.dtype
    if widest is torch.float64:
        return widest, widest
    if mode.region is not None:
        runs_in = result = mode.region.dtype
    elif rule.casts == "half" and level is not OFF:
        runs_in = result = level
    else:
        runs_in, result = widest, mode.stored or widest
    return torch.float32 if _in_float(rule, tensors) else runs_in, result


def _in_float(rule: Rule, tensors: list[Tensor]) -> bool:
    """Tell whether half arguments are computed in float32, of a call with such tensors."""
    if rule.in_float in ("never", "always"):
        return rule.in_float == "always"
    if rule.in_float == "mixed" and len({tensor.dtype for tensor in tensors}) > 1:
        return True
    return any(tensor.device.type == "cpu" for tensor in tensors)


def _floats_in(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _note_floats(values, found)
    return found


def _note_floats(values: Iterable[Any], found: list[Tensor]) -> None:
    # what arguments are most often is found here: to map them takes the host five times as long
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if isinstance(value, Tensor):
            if _is_float(value):
                found.append(value)
        elif kind is tuple or kind is list:
            _note_floats(value, found)
        elif kind is dict:
            _note_floats(value.values(), found)
        elif not isinstance(value, nn.Module):  # whose method it is
            found.extend(filter(_is_float, tensors_in(value)))


# a tuple, for torch 2.6 compiles no look into a set
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def _is_float(tensor: Tensor) -> bool:
    known = tensor.dtype in FLOATS or tensor.dtype is torch.float64
    return known and is_on_cast_device(tensor)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value if value.dtype is dtype else _to(value, dtype)
    if isinstance(value, nn.Module):  # whose method it is
        return value
    return map_tensors(lambda tensor: _to(tensor, dtype), value)


def _map_call(
    function: Callable[[Any], Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, each as ``function`` returns it.

    To map the tuple and the dict as containers takes the host several times as long.
    """
    named = {name: function(one) for name, one in kwargs.items()} if kwargs else {}
    return (*map(function, args),), named


def _to(value: Any, dtype: torch.dtype) -> Any:
    return to_dtype(value, dtype, activation=Tensor.to)  # also to float64


class _NothingElseCasts:
    """Let no cast of a level, region or rule act inside: arguments are in the dtype to run in.

    A class and no generator: torch 2.6 does not compile those.
    """

    def __enter__(self) -> None:
        self._saved, self._stored = mode.switch_off(), mode.stored
        mode.stored = None

    def __exit__(self, *error: object) -> None:
        mode.restore(self._saved)
        mode.stored = self._stored


def _saves_in_half(dtype: torch.dtype, tensors: list[Tensor]) -> bool:
    """Tell whether hooks keep what backward needs: of much, and where they may.

    A recomputation counts on its own hooks, and transforms of torch.func allow none.
    """
    if dtype not in HALVES or is_compiling() or mode.in_checkpoint or not torch.is_grad_enabled():
        return False
    if is_recorded():  # tensors have no memory there, by which a half one is found again
        return False
    autograd: Any = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and any(map(is_large, tensors))
