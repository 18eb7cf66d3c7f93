"""What torch's complaint about two dtypes leaves out: which module, which operand, what mends it.

The exception stays the same, with a note. Knows models in half precision and tracebacks.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from amp_patch.casting.mode import FLOATS, HALVES
from amp_patch.casting.running_modules import running_modules
from amp_patch.imported_modules import is_left_alone
from amp_patch.levels import OptLevel
from amp_patch.weights.half_storage import kept_by_name, kept_in_fp32

# A tensor that is printed, as what torch.jit cannot trace, ends with its type and shape in braces.
_COMPLAINT = re.compile(
    r"dtype|scalar type|\bHalf\b|\bBFloat16\b|HalfTensor(?!\{)|BFloat16T(ensor|ype)"
    r"|desired output type"
    r"|must have the type|autocast::prioritize"
    # An LSTM or GRU on a CPU, whose states are in another dtype than its weights.
    r"|could not create a primitive descriptor"
)
# Of autocast alone, which may be over by the time that the note is written.
_AUTOCAST = re.compile("autocast::prioritize")
# What half numbers cannot be computed in, or cannot hold: nothing but them needs to be at fault.
_NO_KERNEL = re.compile(
    r"not implemented for '(Half|BFloat16|ComplexHalf)'|Low precision dtypes not supported"
    r"|unsupported (dtype|ScalarType) (Half|BFloat16)|support.* type: (Half|BFloat16)"
    r"|\b(either|than) float (and|or) double|or Double tensors but got BFloat16"
    r"|computing in half precision|underflow in dt",
    re.IGNORECASE,
)
_NO_NUMPY = re.compile("^Got unsupported ScalarType BFloat16")
_OVERFLOW = re.compile("without overflow")
# What torch.distributions says of half probabilities; of NaN among them the dtype is no cause.
_PROBABILITIES = re.compile(
    r"satisfy the constraint Simplex\(\)(?!.*\bnan\b).*dtype=torch\.b?float16", re.DOTALL
)
# A tensor that a message shows has a dtype of which it does not complain.
_SHOWN = re.compile(r"\btensor\(.*?\bdtype=torch\.\w+", re.DOTALL)
# What the code of a script raises where functions cast, beside any module of a model.
_HOOK = re.compile(r"^hook .* has changed the type of value .*(Half|BFloat16)Tensor")
_WRITES = re.compile(
    r"source and destination dtypes match.*\b(Half|BFloat16)\b"
    r"|self \((Half|BFloat16|Float)\) and source \(\w+\) must have the same scalar type"
    r"|Expected self\.dtype to be equal to src\.dtype"
)
# Of two dtypes of which one is half, or those of a scatter, which torch does not name.
_HALF_AND_ANOTHER = re.compile(r"\b(c10::)?(B?Float16|Half)\b|self\.dtype", re.IGNORECASE)
_BEGIN = "amp_patch: "
#: Operands that a note lists.
_MOST_OPERANDS = 6


class _Place(NamedTuple):
    """Where an exception comes from: the module that ran, its path, its model and the level.

    Attributes:
        stranger: the innermost module that this one called, and that is no part of the model.
    """

    module: nn.Module
    path: str
    model: nn.Module
    level: OptLevel
    frame: types.FrameType
    stranger: nn.Module | None = None


def explain(error: BaseException, levels: Mapping[nn.Module, OptLevel]) -> None:
    """Add a note to an exception about dtypes that a module of a model raises; once.

    Where functions cast (O1, O4) only what names a half dtype gets one, and a hook or a write in
    place of the script gets one, too.

    Args:
        error: as it is on its way to the user.
        levels: the prepared models, with what they were prepared at.
    """
    message = str(error)
    is_of_half = any(one.search(message) for one in (_NO_KERNEL, _OVERFLOW, _PROBABILITIES))
    is_of_two = isinstance(error, (RuntimeError, ValueError)) and _COMPLAINT.search(
        _SHOWN.sub("", message)
    )
    if not (is_of_half or is_of_two) or _is_noted(error):
        return
    where_functions_cast = is_of_half or _HALF_AND_ANOTHER.search(message)
    place = _innermost(
        error,
        {
            model: level
            for model, level in levels.items()
            if level.stores_half or (where_functions_cast and level.casts_functions)
        },
    )
    if place is not None:
        _add_note(error, _BEGIN + _describe(place, error))
    elif beside := _beside_models(message, levels):
        _add_note(error, _BEGIN + beside)
    elif _NO_NUMPY.search(message) and (names := _names_of_bfloat16(levels)):
        _add_note(
            error,
            f"{_BEGIN}at opt_level {names} a model returns torch.bfloat16, which NumPy does not "
            "have: write y.float().numpy(), or amp.initialize(..., "
            "cast_model_outputs=torch.float32).",
        )


def _beside_models(message: str, levels: Mapping[nn.Module, OptLevel]) -> str | None:
    """Return what is said of a hook, or of a write in place, that no module of a model makes."""
    mends = ((_HOOK, _MEND_OF_A_HOOK), (_WRITES, _MEND_WHERE_FUNCTIONS_CAST))
    mend = next((mend for complaint, mend in mends if complaint.search(message)), None)
    names = " and ".join(sorted({one.name for one in levels.values() if one.casts_functions}))
    if mend is None or not names:
        return None
    return f"at opt_level {names} functions cast to half precision, outside of models too. {mend}"


def _names_of_bfloat16(levels: Mapping[nn.Module, OptLevel]) -> str:
    """Return the levels at which models compute in bfloat16."""
    found = {level.name for level in levels.values() if level.half_dtype is torch.bfloat16}
    return " and ".join(sorted(found))


def _is_noted(error: BaseException) -> bool:
    notes = getattr(error, "__notes__", ())
    return any(note.startswith(_BEGIN) for note in notes) or f"\n{_BEGIN}" in str(error)


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}", *error.args[1:])


def _innermost(error: BaseException, levels: Mapping[nn.Module, OptLevel]) -> _Place | None:
    """Return the innermost module of these models whose code the exception went through.

    One that is no part of a model, and has its parameters, stands for the part that has them.
    """
    names: dict[int, tuple[str, nn.Module, OptLevel]] = {}
    for model, level in levels.items():
        for name, module in model.named_modules():
            names.setdefault(id(module), (name, model, level))
            for param in _own_parameters(module):
                names.setdefault(id(param), (name, model, level))
    found = None
    for frame in _frames(error):
        module = _owner_of(frame)
        if not isinstance(module, nn.Module) or _is_calling(frame):
            continue
        keys = map(id, (module, *_own_parameters(module)))
        known = next((names[key] for key in keys if key in names), None)
        if known is not None:
            found = _Place(module, *known, frame)
        elif found is not None:
            found = found._replace(stranger=module)
    return found


def _own_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module itself; a layer without a bias has None in its place."""
    return [param for param in module._parameters.values() if param is not None]


def _owner_of(frame: types.FrameType) -> Any:
    """Return the object whose method runs in a frame; None where it is no method."""
    code = frame.f_code
    if "self" in frame.f_locals or not code.co_argcount:
        return frame.f_locals.get("self")
    first = frame.f_locals.get(code.co_varnames[0])  # a method's own name for it, or an argument
    method = getattr(type(first), code.co_name, None)
    return first if getattr(method, "__code__", None) is code else None


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_calling(frame: types.FrameType) -> bool:
    """Tell whether a frame is of what calls a module, and not of its forward."""
    return frame.f_code.co_filename in (nn.modules.module.__file__, __file__)


def _describe(place: _Place, error: BaseException) -> str:
    where = f"module {place.path!r}" if place.path else "the model itself"
    kind = type(place.module).__name__
    does = "the model is stored in" if place.level.stores_half else "functions cast to"
    operands = ", ".join(f"{name} {value.dtype}" for name, value in _operands(place))
    return (
        f"at opt_level {place.level.name} {does} {place.level.half_dtype}; this came from {where} "
        f"({kind}), with {operands or 'no tensor in a variable'}. {_mend(place, error)}"
    )


def _operands(place: _Place) -> list[tuple[str, Tensor]]:
    """Return the floating tensors at hand: the module's own, and the variables of its forward."""
    found: dict[str, Tensor] = {}
    own = {**place.module._parameters, **place.module._buffers}
    for name, value in place.frame.f_locals.items():
        if isinstance(value, Tensor) and value.dtype in FLOATS:
            found[name] = value
    for name, value in own.items():
        if isinstance(value, Tensor) and value.dtype in FLOATS:
            found[f"self.{name}"] = value
    return list(found.items())[:_MOST_OPERANDS]


def _mend(place: _Place, error: BaseException) -> str:
    message = str(error)
    mend = _MEND_OF_AUTOCAST if _AUTOCAST.search(message) else _mend_of_half(message, place)
    if mend is None and re.search(r"\bdouble\b", message, re.IGNORECASE):
        mend = _mend_of_float64(place)
    if mend is None and place.level.casts_functions:
        mend = _MEND_WHERE_FUNCTIONS_CAST
    if mend is None:
        strays = _strays(place)
        mend = _mend_of_weights(place, strays)
    if mend is None:
        mend = _other_strays(strays) + _mend_of_inputs(place, error)
    return mend


def _mend_of_half(message: str, place: _Place) -> str | None:
    """Return what mends an error for which half numbers alone are at fault."""
    dtype = place.level.half_dtype
    if _OVERFLOW.search(message):
        return f"{dtype} cannot hold that number: {_mend_of_a_number(place)}."
    if _PROBABILITIES.search(message):
        return (
            f"Probabilities of {dtype} do not add up to 1 within 1e-6: give torch.distributions "
            "logits=x in the place of probs=softmax(x), or probs=softmax(x.float())."
        )
    if _NO_KERNEL.search(message):
        return (
            f"This is not computed in {dtype}: put `with amp.float_region():` around it, give it "
            "x.float() in the place of x, and hand on y.to(x.dtype) behind it."
        )
    return None


_MEND_OF_AUTOCAST = (
    "torch.autocast is on, and casts by a list of its own: remove it, the level casts by itself."
)
_MEND_WHERE_FUNCTIONS_CAST = (
    "Some functions return half numbers and others float32, and what writes in place (out[mask] = "
    "y, index_add_, scatter_add_) takes one dtype: write y.to(out.dtype), or compute this part in "
    "`with amp.float_region():`."
)

_MEND_OF_A_HOOK = (
    "What a hook computes by products of matrices and convolutions is in half precision, too, and "
    "it must return its gradient's own dtype: decorate the hook by `@amp.disable_casts()`."
)


def _mend_of_a_number(place: _Place) -> str:
    if place.level.half_dtype is torch.float16:
        return "write torch.finfo(x.dtype).min in the place of -1e9, or take opt_level 'O4' or 'O5'"
    # -1e9 is no trouble here: it is the minimum of another dtype
    in_float = _float_rule(place) if place.path else "`with amp.float_region():` around it"
    return (
        "write torch.finfo(x.dtype).min with the x that is filled, for the minimum of float32 is "
        f"beyond it; or compute this in float32 by {in_float}"
    )


def _float_rule(place: _Place) -> str:
    return f"amp.initialize(..., rules={{'modules': {{{place.path!r}: 'float'}}}})"


def _mend_of_weights(place: _Place, strays: Mapping[str, str]) -> str | None:
    """Return what mends weights that are not as `initialize` leaves them."""
    if strays and _is_functional_call():
        return (
            "torch.func.functional_call() was given values that are not in the dtype of the "
            "model's weights: those of model.state_dict() are float32. Give it "
            "dict(model.named_parameters()), or cast each value with value.to(param.dtype)."
        )
    if strays and _share_memory(place.model):
        return (
            "Its weights are parts of one vector, as vector_to_parameters() leaves them: give it "
            f"vector.to({place.level.half_dtype})."
        )
    if strays and len(strays) == sum(1 for _ in _castable(place.model)):
        return _mend_of_a_cast(set(strays.values()))
    other = _float_weights(place.stranger, place.level)
    if other is not None:
        return (
            f"It called a {type(place.stranger).__name__} with {other} weights that is no part of "
            "the model, as a layer in a plain list or dict is: put it into an nn.ModuleList or "
            "nn.ModuleDict before amp.initialize(), or give it x.float()."
        )
    if place.path in strays or any(path.startswith(f"{place.path}.") for path in strays):
        path, stored = next(iter(strays.items()))
        return (
            f"{path!r} holds {stored} weights, as `weight.data = tensor` or a layer that was put "
            "there after amp.initialize() leaves them: write weight.data.copy_(tensor); put layers "
            "into the model before, or call amp.deactivate(), then amp.initialize() anew."
        )
    return None


def _other_strays(strays: Mapping[str, str]) -> str:
    """Return what is said of another module's weights, of which an operand may come; or nothing."""
    if not strays:
        return ""
    path, stored = next(iter(strays.items()))
    return (
        f"{path!r} holds {stored} weights, as `weight.data = tensor` or a new layer leaves them, "
        "and returns that dtype: write weight.data.copy_(tensor), and put layers into the model "
        "before amp.initialize(). If that is as it should be: "
    )


def _mend_of_inputs(place: _Place, error: BaseException) -> str:
    """Return what mends tensors that are not cast, or are cast by others."""
    dtype = place.level.half_dtype
    if any(torch.is_autocast_enabled(value.device.type) for _, value in _operands(place)):
        return _MEND_OF_AUTOCAST
    if id(place.model) not in running_modules():
        return _mend_of_a_call(place, error)
    others = {v.dtype for _, v in _operands(place)} & set(HALVES) - {dtype}
    if others or _is_in_a_decorated_forward(error):
        return (
            "torch.autocast inside of forward casts by a list of its own, also where a library "
            "puts it around forward (mixed_precision of accelerate, bf16=True of a Trainer): "
            "switch it off, the level casts by itself. A cast in forward does the same: write "
            "x.to(y.dtype) there."
        )
    by_a_rule = f", or all of the module by {_float_rule(place)}" if place.path else ""
    return (
        f"Inputs of the model are cast to {dtype}, a tensor made inside of forward is not: write "
        "mask.to(x.dtype), or torch.ones(..., dtype=x.dtype), or register_buffer() it before "
        f"amp.initialize(); or compute this part in `with amp.float_region():`{by_a_rule}; or take "
        "opt_level 'O1', which casts in each function."
    )


def _mend_of_a_call(place: _Place, error: BaseException) -> str:
    """Return what mends a call past the model's own: of another method of it, or of a part."""
    within = (frame for frame in _frames(error) if _is_within(place.model, frame))
    frame = next(within, place.frame)
    module, name = _owner_of(frame), frame.f_code.co_name
    if module is place.model and name == "forward":
        return (
            "model.forward(x) was called, which passes by the casts of the inputs: call model(x)."
        )
    kind = type(module)
    what, to = f"{kind.__name__}.{name}()", "it"
    if name == "forward":
        what, to = "This module", "the module"
    register = ""  # else each layer of torch's of this class would cast, in any model
    if not is_left_alone(kind.__module__):
        register = f"once amp.register_forward_method({kind.__name__}, {name!r}), or "
    return (
        f"{what} was called by itself, and only the model casts its inputs: call model(x), or "
        f"{register}pass x.to({place.level.half_dtype}) to {to}; with opt_level 'O1' every module "
        "takes float32."
    )


def _is_within(model: nn.Module, frame: types.FrameType) -> bool:
    """Tell whether a frame is of a method of the model, or of a part of it."""
    owner = None if _is_calling(frame) else _owner_of(frame)
    return isinstance(owner, nn.Module) and any(owner is module for module in model.modules())


def _is_in_a_decorated_forward(error: BaseException) -> bool:
    """Tell whether autocast was on as a decorator, which is over by the time of the note."""
    blocks = [frame.f_locals.get("autocast_instance") for frame in _frames(error)]
    return any(getattr(block, "_enabled", False) for block in blocks)


def _castable(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules whose floating parameters are stored in half."""
    kept = kept_in_fp32(model, batch_norms=True)
    for name, module in model.named_modules():
        if module not in kept and any(
            param is not None and param.dtype in FLOATS for param in module._parameters.values()
        ):
            yield name


def _strays(place: _Place) -> dict[str, str]:
    """Return where weights are not as `initialize` leaves them: paths of modules -> dtype."""
    found = {}
    kept = set(map(id, kept_by_name(place.model, place.level.cast_model_type)))
    for name in _castable(place.model):
        for param in place.model.get_submodule(name)._parameters.values():
            if (
                param is not None
                and id(param) not in kept
                and param.dtype in FLOATS
                and param.dtype is not place.level.cast_model_type
            ):
                found[name] = str(param.dtype).removeprefix("torch.")
    return found


def _float_weights(module: nn.Module | None, level: OptLevel) -> str | None:
    """Return the dtype of a module's own weights, where it is not the one that a level stores."""
    params = [] if module is None else module._parameters.values()
    dtypes = [param.dtype for param in params if param is not None and param.dtype in FLOATS]
    return next((str(one) for one in dtypes if one is not level.cast_model_type), None)


def _is_functional_call() -> bool:
    """Tell whether the model's parameters are replaced for this call."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def _share_memory(model: nn.Module) -> bool:
    params = [param for param in model.parameters() if param.dtype is torch.float32]
    return len(params) > len({param.untyped_storage().data_ptr() for param in params})


def _mend_of_float64(place: _Place) -> str:
    if all(param.dtype is torch.float64 for param in place.model.parameters()):
        return _mend_of_a_cast({"float64"})
    return "A float64 tensor is never cast: pass x.float(), also of what NumPy made."


def _mend_of_a_cast(stored: set[str]) -> str:
    """Return what mends a model of which all weights have another dtype than the level's."""
    calls = {
        "float32": "model.float()",
        "float16": "model.half()",
        "float64": "model.double() or torch.set_default_dtype(torch.float64)",
    }
    call = calls.get(min(stored), "model.bfloat16()")
    mend = ", or call amp.deactivate() in its place, which keeps the masters' values"
    return (
        f"All its weights are {min(stored)}, as {call} leaves them: leave that call out"
        f"{mend if min(stored) == 'float32' else ''}. (So does `param.data = tensor`; write "
        "param.data.copy_(tensor).)"
    )


def explaining(
    excepthook: Callable[..., Any], levels: Mapping[nn.Module, OptLevel]
) -> Callable[..., Any]:
    """Return a ``sys.excepthook`` that adds notes to what ends a script, and then does the same.

    A model explains what its own call raises. `model.forward(x)`, and a layer that is called by
    itself, pass its call by: a hook on every layer would cost each right step. A notebook shows
    errors by itself, see `explaining_cells`.

    Args:
        excepthook: the present one.
        levels: see `explain`.
    """

    @functools.wraps(excepthook)
    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        explain(error, levels)
        excepthook(kind, error, traceback)

    return hook


def explaining_cells(
    showtraceback: Callable[..., Any], levels: Mapping[nn.Module, OptLevel]
) -> Callable[..., Any]:
    """Return the same for what ends a notebook's cell.

    Args:
        showtraceback: of IPython's shell, called while the exception is handled.
        levels: see `explain`.
    """

    @functools.wraps(showtraceback)
    def show(exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if error is not None:
            explain(error, levels)
        showtraceback(exc_tuple, *args, **kwargs)

    return show


def notebook() -> Any:
    """Return IPython's shell, where this process is one's; else None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
