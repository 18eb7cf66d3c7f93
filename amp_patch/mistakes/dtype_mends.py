"""What mends an error about dtypes, by what torch says of it and by the module that raised it.

Knows models in half precision, and where functions cast.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
import types
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.nn.utils import stateless

from amp_patch.casting.mode import FLOATS
from amp_patch.casting.nested import map_tensors
from amp_patch.casting.running_modules import running_modules
from amp_patch.common.imported_modules import is_left_alone
from amp_patch.levels import HALVES, OptLevel
from amp_patch.weights.half_storage import kept_by_name, kept_in_fp32

from .error_places import Place, frames, is_within, operands, owner_of
from .loose_parameters import loose_parameter

# Of autocast alone, which may be over by the time that the note is written.
_AUTOCAST = re.compile("autocast::prioritize")
# What half numbers cannot be computed in, or cannot hold: nothing but them needs to be at fault.
NO_KERNEL = re.compile(
    r"not implemented for '(Half|BFloat16|ComplexHalf)'|Low precision dtypes not supported"
    r"|unsupported (dtype|ScalarType) (Half|BFloat16)|support.* type: (Half|BFloat16)"
    r"|\b(either|than) float (and|or) double|or Double tensors but got BFloat16"
    r"|computing in half precision|underflow in dt",
    re.IGNORECASE,
)
OVERFLOW = re.compile("without overflow")
# What torch.distributions says of half probabilities, given or drawn; of NaN among them the dtype
# is no cause.
PROBABILITIES = re.compile(
    r"(constraint |within the support \()Simplex\(\)(?!.*\bnan\b).*dtype=torch\.b?float16",
    re.DOTALL,
)
# Of `p.grad = g`; the other words are those of torch 2.9 and before.
GRADIENT = re.compile(r"assign a gradient with dtype|assigned grad has data of a different type")
# Integers or truth values met weights; plain PyTorch refuses them with the same words.
_INTEGER = (
    r"(bool|(un)?signed char|char|short|int|long( int)?|Bool|Byte|Char|Short|Int|Long|UInt\d+)"
)
_INTEGERS = re.compile(
    rf"\bgot:? (\w+, )?{_INTEGER}( and |, | !=)(?!.*for the source)|!= {_INTEGER}\b"
    rf"|Input type \({_INTEGER}\)|found \w+ and {_INTEGER}\b|\bweight: {_INTEGER}\b"
    r"|(input dtype \(|got type )torch\.(bool|u?int)"
)
# The same words are used of half numbers in the place of indices.
_MAYBE_INTEGERS = re.compile(
    rf"expected scalar type ({_INTEGER} but|\w+ but found {_INTEGER})|mixed dtype \(CPU\)"
)
# Floating numbers came in the place of indices, classes or truth values.
_INDICES = re.compile(
    r"int64 for index|'indices' to have one of|boolean masks|target.* to be Long"
    r"|expected scalar type Long but found|IndexTensors|tensors used as ind"
)
_INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# A tensor that a message shows has a dtype of which it does not complain.
SHOWN = re.compile(r"\btensor\(.*?\bdtype=torch\.\w+", re.DOTALL)
# What code asks for that takes float32 alone, and the half dtype that it tells of.
_TELLS_OF_HALF = re.compile(r"\b(torch\.b?float16|BFloat16|Half)\b")
_ASKS_FOR_FLOAT = re.compile(r"\bdtype\b.*\bfloat(32)?\b|\bis_floating_point\b")


def refuses_half(error: BaseException) -> bool:
    """Tell whether code of a model, or of a library, has asked for a dtype, and got a half one."""
    if not isinstance(error, (TypeError, AssertionError)):
        return False
    places = traceback.extract_tb(error.__traceback__)[-1:]
    lines = [place.line or "" for place in places if isinstance(error, AssertionError)]
    message = SHOWN.sub("", str(error))
    return bool(_TELLS_OF_HALF.search(message) or any(map(_ASKS_FOR_FLOAT.search, lines)))


def mend_of(place: Place, error: BaseException) -> str:
    """Return what mends an error about dtypes that came from a place, in sentences."""
    message = str(error)
    mend = _mend_by_words(message, place)
    if mend is None and refuses_half(error):
        mend = _mend_of_a_refusal(place, error)
    if mend is None and re.search(r"\bdouble\b", message, re.IGNORECASE):
        mend = _mend_of_float64(place)
    if mend is None and place.level.casts_functions:
        mend = MEND_WHERE_FUNCTIONS_CAST
    if mend is None:
        strays = _strays(place)
        mend = _mend_of_weights(place, strays)
    if mend is None:
        mend = _other_strays(strays) + _mend_of_inputs(place, error)
    return mend


def _mend_by_words(message: str, place: Place) -> str | None:
    """Return what mends an error of which torch's own words tell enough."""
    if GRADIENT.search(message):
        return MEND_OF_A_GRADIENT
    if _is_of_integers(message, place):
        return _MEND_OF_INTEGERS
    if _INDICES.search(message):
        return _MEND_OF_INDICES
    return _MEND_OF_AUTOCAST if _AUTOCAST.search(message) else _mend_of_half(message, place)


def _is_of_integers(message: str, place: Place) -> bool:
    """Tell whether integers came where floating numbers are due."""
    if _INTEGERS.search(message):
        return True
    at_hand = place.frame.f_locals.values()
    return bool(_MAYBE_INTEGERS.search(message)) and any(
        _has(_INTEGER_DTYPES, value) for value in at_hand if isinstance(value, torch.Tensor)
    )


def _mend_of_half(message: str, place: Place) -> str | None:
    """Return what mends an error for which half numbers alone are at fault."""
    dtype = place.level.half_dtype
    if OVERFLOW.search(message):
        return f"{dtype} cannot hold that number: {_mend_of_a_number(place)}."
    if PROBABILITIES.search(message):
        return (
            f"Probabilities of {dtype} do not add up to 1 within 1e-6: give torch.distributions "
            "softmax(x.float())."
        )
    if NO_KERNEL.search(message):
        return (
            f"This is not computed in {dtype}: put `with amp.float_region():` around it, give it "
            "x.float() in the place of x, and hand on y.to(x.dtype) after it"
            f"{_or_by_a_rule(place)}."
        )
    return None


def _mend_of_a_refusal(place: Place, error: BaseException) -> str:
    """Return what mends code that takes no half numbers, in which tensors may have come."""
    mend = "This takes no half numbers: give it x.float()"
    name = _cast_argument(place, error) if place.level.stores_half else None
    if name is None:
        return f"{mend}, or compute this part in `with amp.float_region():`."
    return (
        f"{mend}; or leave an argument of the model's call as it is, by "
        f"amp.initialize(..., rules={{'inputs': {{{name!r}: 'off'}}}})."
    )


def _cast_argument(place: Place, error: BaseException) -> str | None:
    """Return the last argument of the model's forward with tensors that its call has cast."""
    for frame in frames(error):
        if frame.f_code.co_name == "forward" and owner_of(frame) is place.model:
            for name in reversed(inspect.getargs(frame.f_code).args[1:]):
                if _has(HALVES, frame.f_locals.get(name)):
                    return name
    return None


_MEND_OF_INTEGERS = (
    "Integers are never cast, for they may be indices, and plain PyTorch takes none here either: "
    "give it x.float()."
)
_MEND_OF_INDICES = (
    "Indices and classes are integers, and masks truth values; plain PyTorch takes no others, and "
    "floating ones are cast with the model's inputs: write index.long(), or mask.bool()."
)
_MEND_OF_AUTOCAST = (
    "torch.autocast is on, and casts by a list of its own: remove it, the level casts by itself."
)
MEND_WHERE_FUNCTIONS_CAST = (
    "Some functions return half numbers and others float32, and this one takes one dtype, as "
    "out.lerp_(y, weight) does: write y.to(out.dtype), or compute this part in "
    "`with amp.float_region():`."
)

MEND_OF_A_HALF_HOOK = (
    "So are the gradients of its parameters and activations, and a hook must return its gradient's "
    "own dtype: write g * mask.to(g.dtype)."
)
MEND_OF_A_GRADIENT = (
    "A gradient has its parameter's dtype: write p.grad = g.to(p.dtype), or give float32 ones to "
    "`for p in amp.master_params(optimizer)`."
)
MEND_OF_A_HOOK = (
    "A hook must return its gradient's own dtype, which is half for what such a function has "
    "returned: write g * mask.to(g.dtype)."
)


def _mend_of_a_number(place: Place) -> str:
    if place.level.half_dtype is torch.float16:
        return "write torch.finfo(x.dtype).min in the place of -1e9, or take opt_level 'O4' or 'O5'"
    # -1e9 is no trouble here: it is the minimum of another dtype
    in_float = _float_rule(place) if place.path else "`with amp.float_region():` around it"
    return (
        "write torch.finfo(x.dtype).min with the x that is filled, for the minimum of float32 is "
        f"beyond it; or compute this in float32 by {in_float}"
    )


def _or_by_a_rule(place: Place) -> str:
    """Return what is added for a part of a model: the mend for code of a library."""
    if not place.path:
        return ""
    return f"; or leave the code as it is, and compute the part in float32 by {_float_rule(place)}"


def _float_rule(place: Place) -> str:
    return f"amp.initialize(..., rules={{'modules': {{{place.path!r}: 'float'}}}})"


def _mend_of_weights(place: Place, strays: Mapping[str, str]) -> str | None:
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
            f"It called a module of type {type(place.stranger).__name__} with {other} weights that "
            "is no part of the model, as a layer in a plain list or dict is: put it into an "
            "nn.ModuleList or nn.ModuleDict before amp.initialize(), or give it x.float()."
        )
    if place.path in strays or any(path.startswith(f"{place.path}.") for path in strays):
        path, stored = next(iter(strays.items()))
        return (
            f"{path!r} holds {stored} weights, as `weight.data = tensor` or a layer that was put "
            "there after amp.initialize() leaves them: write tensor.to(weight.dtype); put layers "
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
        "and returns that dtype: write tensor.to(weight.dtype), and put layers into the model "
        "before amp.initialize(). If that is as it should be: "
    )


def _mend_of_inputs(place: Place, error: BaseException) -> str:
    """Return what mends tensors that are not cast, or are cast by others."""
    dtype = place.level.half_dtype
    if any(torch.is_autocast_enabled(value.device.type) for _, value in operands(place)):
        return _MEND_OF_AUTOCAST
    if id(place.model) not in running_modules():
        return _mend_of_a_call(place, error)
    others = {v.dtype for _, v in operands(place)} & set(HALVES) - {dtype}
    if others or _is_in_a_decorated_forward(error):
        return (
            "torch.autocast inside of forward casts by a list of its own, also where a library "
            "puts it around forward (mixed_precision of accelerate, bf16=True of a Trainer): "
            "switch it off, the level casts by itself. A cast in forward does the same: write "
            "x.to(y.dtype) there."
        )
    loose = _mend_of_a_loose_parameter(place, error)
    if loose is not None and not _is_at_hand_in_float(place):
        return loose
    before = "" if loose is None else f"{loose} If that is as it should be: "
    by_a_rule = f", or all of the module by {_float_rule(place)}" if place.path else ""
    return (
        f"{before}Inputs of the model are cast to {dtype}, a tensor made inside of forward is not: "
        "write mask.to(x.dtype), or torch.ones(..., dtype=x.dtype), or register_buffer() it before "
        f"amp.initialize(); or compute this part in `with amp.float_region():`{by_a_rule}; or take "
        "opt_level 'O1', which casts in each function."
    )


def _mend_of_a_loose_parameter(place: Place, error: BaseException) -> str | None:
    """Return what mends a parameter that no module has, where one is at hand."""
    found = loose_parameter(place, error)
    if found is None:
        return None
    name, param = found
    return (
        f"The parameter in {param.dtype} in {name} is of no module of the model, as one in a plain "
        "list or dict is: put it into an nn.ParameterList or nn.ParameterDict of the module "
        "before amp.initialize(), or write weight.to(x.dtype)."
    )


def _is_at_hand_in_float(place: Place) -> bool:
    """Tell whether forward has another tensor that is not in the dtype which a level stores."""
    return any(
        value.dtype is torch.float32 and not isinstance(value, nn.Parameter)
        for _, value in operands(place)
    )


def _mend_of_a_call(place: Place, error: BaseException) -> str:
    """Return what mends a call past the model's own: of another method of it, or of a part."""
    within = [frame for frame in frames(error) if is_within(place.model, frame)]
    # A trainer's own methods come first, as Lightning's optimizer_step(epoch, optimizer, closure),
    # which have nothing to cast.
    given = (frame for frame in within if _has_float_arguments(frame))
    frame = next(given, within[0] if within else place.frame)
    module, name = owner_of(frame), frame.f_code.co_name
    if module is place.model and name == "forward":
        return (
            "model.forward(x) was called, which passes by the casts of the inputs: call model(x)."
        )
    kind = type(module)
    what, to = f"{kind.__name__}.{name}()", "it"
    if name == "forward":
        what, to = "This module", "the module"
    if name == "__call__":  # as gpytorch's, which calls forward without torch's hooks
        return (
            f"{what} is not torch's, so what it is given and computes is not cast: call once "
            f"amp.register_forward_method({kind.__name__}, 'forward'), which casts what forward "
            f"is given; write x.to({place.level.half_dtype}) in {what}; or take opt_level 'O1', "
            "where every module takes float32."
        )
    register = ""  # else each layer of torch's of this class would cast, in any model
    if not is_left_alone(kind.__module__):
        register = f"once amp.register_forward_method({kind.__name__}, {name!r}), or "
    return (
        f"{what} was called by itself, and only the model casts its inputs: call model(x), or "
        f"{register}pass x.to({place.level.half_dtype}) to {to}; with opt_level 'O1' every module "
        "takes float32."
    )


def _has_float_arguments(frame: types.FrameType) -> bool:
    """Tell whether a float32 tensor is among a function's arguments, also in containers."""
    names = inspect.getargs(frame.f_code)
    names_of_all = filter(None, (*names.args, names.varargs, names.varkw))
    return any(_has([torch.float32], frame.f_locals.get(name)) for name in names_of_all)


def _has(dtypes: Collection[torch.dtype], value: object) -> bool:
    """Tell whether a tensor of one of these dtypes is in a value, also in containers."""
    found = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.add(tensor.dtype)
        return tensor

    map_tensors(note, value)
    return not found.isdisjoint(dtypes)


def _is_in_a_decorated_forward(error: BaseException) -> bool:
    """Tell whether autocast was on as a decorator, which is over by the time of the note."""
    blocks = [frame.f_locals.get("autocast_instance") for frame in frames(error)]
    return any(getattr(block, "_enabled", False) for block in blocks)


def _castable(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules whose floating parameters are stored in half."""
    kept = kept_in_fp32(model, batch_norms=True)
    for name, module in model.named_modules():
        if module not in kept and any(
            param is not None and param.dtype in FLOATS for param in module._parameters.values()
        ):
            yield name


def _strays(place: Place) -> dict[str, str]:
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


def _mend_of_float64(place: Place) -> str:
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
        f"{mend if min(stored) == 'float32' else ''}. So does `param.data = tensor`, of an average "
        "of weights say: write `param.data = tensor.to(param.dtype)`."
    )
