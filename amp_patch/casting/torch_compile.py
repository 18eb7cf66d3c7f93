"""How torch.compile sees patched functions; knows nothing of rules or models.

torch.compile traces into a patched function, for that is a plain closure, but it reads operators
(``a @ b``) and methods (``a.matmul(b)``) off its own tables, and the graph that it captures calls
torch's functions by name. The replacements here make the traced line decide, as in eager mode.
All are of torch's internals: what a version of torch does not have is left out.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch._guards import TracingContext
from torch.nn import functional

from amp_patch.patching import Patches, resolve

from .mode import mode

F = TypeVar("F", bound=Callable[..., Any])


def make_tables() -> None:
    """Let torch.compile make its tables of functions, before anything of torch is replaced.

    It makes them on first use and keeps them: a table made later would hold what stood there
    then, and not the originals, also when nothing is patched any more.
    """
    # Imported late, for that changes torch (it replaces torch.manual_seed). Building any torch
    # optimizer has imported it already.
    import torch._dynamo.output_graph

    # It tries functions on tensors, which must have numbers, wherever the script makes its own.
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        # torch 2.6 makes no table in a block of `torch.device`
        has_numbers = not torch.empty(0, dtype=torch.float32).is_meta
        with contextlib.nullcontext() if has_numbers else torch.device("cpu"):
            for path in _TABLES:
                with contextlib.suppress(AttributeError):
                    resolve(path)[2]()


def install(patches: Patches) -> None:
    """Replace them, before any function of torch is patched and after `make_tables`."""
    import torch._dynamo.output_graph
    import torch.nn.attention.flex_attention  # it has a rule, and imports the compiler

    _replace(patches, _REPLACEMENTS)
    handlers = torch._dynamo.variables.builtin.BuiltinVariable
    getattr(handlers, "call_function_handler_cache", {}).clear()


def trace_into_regions(patches: Patches) -> None:
    """Have torch.compile trace in a region what a region sees where nothing is compiled."""
    _replace(patches, _IN_REGIONS)


def call_before(patches: Patches, notice: Callable[[], None]) -> None:
    """Call ``notice`` before each call of a compiled function, which calls no hook of a model."""
    path = "torch._dynamo.eval_frame._callback_from_stance"
    with contextlib.suppress(AttributeError):
        owner, name, original = resolve(path)

        @functools.wraps(original)
        def callback_from_stance(callback: Any) -> Any:
            if callback is not None:  # else it calls what is not compiled, as torch.manual_seed
                notice()
            return original(callback)

        patches.replace(owner, name, callback_from_stance)


def compile_nothing_of_ours_alone(patches: Patches) -> None:
    """Have torch.compile look at files of amp_patch as it does at those of torch's functions.

    It traces into them, but compiles none by itself. Else each layer, and each function of torch,
    would be compiled for itself where torch leaves the function around as it is: one with an
    ``nn.LSTM`` in it, or an ``nn.Sequential`` in which a graph ends. And torch 2.13 compiles
    the ``__torch_function__`` of a mode, as regions have, to what takes ``x`` for ``x.t()``.
    """
    with contextlib.suppress(AttributeError):
        owner, name, original = resolve("torch._dynamo.trace_rules.check_file")

        @functools.wraps(original)
        def check_file(filename: str | None, *args: Any, **kwargs: Any) -> Any:
            path = filename or ""
            if path.startswith(_OURS) and not path.startswith(_LAYERS_OF_APEX):
                filename = functional.__file__
            return original(filename, *args, **kwargs)

        patches.replace(owner, name, check_file)


def call_as_traced(function: F) -> F:
    """Call it whenever a call of it is traced, and compile nothing of it.

    A decorator, as `torch.compiler.assume_constant_result`, which imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile's mark
    return function


def _is_exporting() -> bool:
    return torch.compiler._is_exporting_flag


@call_as_traced
def _dynamo_is_exporting() -> bool:
    tracers = torch._dynamo.symbolic_convert.InstructionTranslator
    try:
        return bool(tracers.current_tx().export)
    except AttributeError:  # nothing is traced but by torch.export itself
        return True


#: Tells, in what is traced, whether torch.export traces it. `torch.compiler.is_exporting` says so
#: of what torch.compile traces, too, in torch 2.11; torch 2.6 has neither it nor the flag.
is_exporting = (
    _is_exporting if hasattr(torch.compiler, "_is_exporting_flag") else _dynamo_is_exporting
)


def never_trace(function: F) -> F:
    """Call it as it is wherever torch.compile meets a call: graphs end before it, none is in it.

    A decorator, as `torch.compiler.disable`, which imports the compiler and adds a frame.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile's mark
    function._torchdynamo_disable_msg = "host side"  # type: ignore[attr-defined]  # another mark
    return leave_out(function)


def leave_out(function: F) -> F:
    """Never compile a call of this by itself; where another function is traced it still is.

    A decorator: torch.compile runs the hooks of a model around the graph of its forward, and
    would compile each, and what each calls, for each model.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
        return function

    # Before torch 2.7 a skipped function's callees are compiled.
    @functools.wraps(function)
    def left_out(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        compiler = frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(compiler)

    frames.skip_code(cast(types.FunctionType, left_out).__code__)
    return cast(F, left_out)


def order_hooks(hooks: dict[Any, Any]) -> None:
    """Give a module's hooks, an ``OrderedDict``, one order after one was put before others.

    torch moves it to the front of the OrderedDict; in the dict below it stays behind the
    others. Before torch 2.12 torch.compile numbers hooks in the one order and looks them up in the
    other: it ends with an internal error where some are methods and others are functions.
    """
    ordered = list(hooks.items())
    hooks.clear()
    hooks.update(ordered)


def _replace(patches: Patches, replacements: Mapping[str, Callable[[Any], Any]]) -> None:
    for path, make in replacements.items():
        try:
            owner, name, original = resolve(path)
        except AttributeError:
            continue
        patches.replace(owner, name, make(original))


def _without_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call the original with casts off."""

    @functools.wraps(original)
    def without_casts(*args: Any, **kwargs: Any) -> Any:
        saved = mode.switch_off()
        try:
            return original(*args, **kwargs)
        finally:
            mode.restore(saved)

    return without_casts


def _call_user_compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compile and run graphs with casts off: the casts are in them already."""
    compile_graph = _without_casts(original)

    @functools.wraps(original)
    def call_user_compiler(*args: Any, **kwargs: Any) -> Any:
        return _without_casts(compile_graph(*args, **kwargs))

    return call_user_compiler


def _handle_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace an operator on tensors through the patched function that eager mode would reach."""

    @functools.wraps(original)
    def handle(self: Any, tx: Any, given: Any, kwargs: Any) -> Any:
        args = given
        name, reflected = _OPERATORS.get(self.fn, (None, None))
        on_tensors = [_is_tensor(arg) for arg in args]
        if on_tensors == [False, True]:
            name, args = reflected, [args[1], args[0]]
        # torch.compile keeps handlers, so this one may be called when nothing is patched any more.
        if name is None or not any(on_tensors) or not is_patched(getattr(torch.Tensor, name)):
            return original(self, tx, given, kwargs)
        return traced(tx, f"Tensor.{name}.traced").call_function(tx, list(args), kwargs)

    return handle


def _call_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace a method of a tensor through the patched method."""
    being_traced: list[str] = []

    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method = getattr(torch.Tensor, name, None)
        is_traced = name in being_traced  # by the patched method, which calls the original
        if is_traced and _in_a_mode(tx):
            return _as_modes_see_it(tx, name, [self, *args], kwargs)
        if is_traced or not hasattr(method, "traced"):
            return original(self, tx, name, args, kwargs)
        being_traced.append(name)
        try:
            function = traced(tx, f"Tensor.{name}.traced")
            return function.call_function(tx, [self, *args], kwargs)
        finally:
            being_traced.pop()

    return call_method


def _set_items(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace ``x[mask] = y`` as a call of the patched method, which torch 2.14 and later do not."""

    @functools.wraps(original)
    def set_items(self: Any, tx: Any, key: Any, value: Any) -> Any:
        if value is None or not hasattr(torch.Tensor.__setitem__, "traced"):
            return original(self, tx, key, value)
        return self.call_method(tx, "__setitem__", [key, value], {})

    return set_items


def _as_modes_see_it(tx: Any, name: str, args: list[Any], kwargs: Any) -> Any:
    """Trace a call of torch's own method by way of the mode around, as a region is one.

    torch.compile would give a mode what stands at the class now, and guard the method's defaults.
    """
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.torch_function import dispatch_torch_function

    method = SourcelessBuilder.create(tx, _METHODS[name])
    return dispatch_torch_function(tx, method, args, kwargs)


def _call_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Show a function of torch that is traced into to the mode around, as a region is one.

    torch.compile shows modes what it puts into its graph alone; ``F.interpolate``, for one, asks
    them itself, and is told that there are none.
    """

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        from torch._dynamo.variables.torch import get_overridable_functions
        from torch._dynamo.variables.torch_function import dispatch_torch_function

        if _in_a_mode(tx) and self.fn in get_overridable_functions():
            return dispatch_torch_function(tx, self, args, kwargs)
        return original(self, tx, args, kwargs)

    return call_function


def _in_a_mode(tx: Any) -> bool:
    state = tx.symbolic_torch_function_state
    return bool(state.torch_function_mode_enabled and state.in_torch_function_mode())


def _get_tensor_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace ``unflatten`` inside of a mode: its Python calls a method that torch's table lacks."""

    @functools.cache
    def get_tensor_method() -> frozenset[Any]:
        return frozenset(original()) | {torch._C.TensorBase.unflatten}

    return get_tensor_method


def _call_cross_entropy_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace the call of an ``nn.CrossEntropyLoss`` made in the traced code as that of its function.

    torch.compile would put the patched function into its graph as it is, where nothing casts.
    """
    from torch._dynamo.variables import LambdaVariable

    @functools.wraps(original)
    def call_cross_entropy_loss(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not is_patched(functional.cross_entropy):
            return original(self, tx, args, kwargs)
        options = dict(zip(_LOSS_OPTIONS, args, strict=False)) | kwargs

        def call(input: Any, target: Any) -> Any:
            function = traced(tx, "nn.functional.cross_entropy")
            return function.call_function(tx, [input, target], options)

        return LambdaVariable(call)

    return call_cross_entropy_loss


def _lookup_inner(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace into the functions of torch that call a patched one.

    torch.compile would put a call of ``torch.nn.functional.normalize`` into its graph as it is,
    where nothing casts any more. While nothing is traced, the rules are torch's own: what asks then
    is `disallow_in_graph`, as in `torch.func.linearize`, which refuses what no graph would hold.
    """
    from torch._dynamo.variables import TorchInGraphFunctionVariable, UserFunctionVariable

    @functools.wraps(original)
    def lookup_inner(obj: Any, *args: Any, **kwargs: Any) -> Any:
        rule = original(obj, *args, **kwargs)
        if obj is getattr(functional, "_check_key_padding_mask", None):
            return TorchInGraphFunctionVariable  # what it says of a tensor cannot be traced
        is_put_into_graph = rule is TorchInGraphFunctionVariable and TracingContext.try_get()
        if is_put_into_graph and _calls_patched(obj, set()):
            return UserFunctionVariable
        return rule

    return lookup_inner


def _calls_patched(function: Any, seen: set[int]) -> bool:
    """Tell whether a Python function of torch, not patched itself, names one that is."""
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    if not function.__code__.co_argcount:  # as what loads tables of torch's: it gets no tensor
        return False
    own: dict[str, Any] = function.__globals__
    current = own.get(function.__name__)
    if id(function) not in (id(current), id(library_original(current))):
        return False
    attributes, names = _names_read(function.__code__)
    for attribute in attributes:
        if any(is_patched(getattr(place, attribute, None)) for place in _PLACES):
            return True
    return any(is_patched(own.get(name)) or _calls_patched(own.get(name), seen) for name in names)


@functools.cache
def _names_read(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return which attributes and which global names a function reads: ``sum`` may be either."""
    read = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    return (
        frozenset(name for opname, name in read if opname in ("LOAD_ATTR", "LOAD_METHOD")),
        frozenset(name for opname, name in read if opname == "LOAD_GLOBAL"),
    )


def library_original(value: Any) -> Any:
    """Return what a wrapper of `library_casts` stands for; None for all else."""
    made_by = "amp_patch.casting.libraries.library_casts"
    is_wrapper = is_patched(value) and value.__globals__.get("__name__") == made_by
    return value.__wrapped__ if is_wrapper else None


def is_patched(value: Any) -> bool:
    """Tell whether a value is a patched function, or one that a user has decorated."""
    return isinstance(value, types.FunctionType) and hasattr(value, "__prepare_scriptable__")


def traced(tx: Any, path: str) -> Any:
    """Return torch.compile's view of the function that stands at ``torch.<path>`` now."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker

    source: Any = tx.import_source("torch")
    for name in path.split("."):
        source = AttrSource(source, name)
    return VariableTracker.build(tx, resolve(f"torch.{path}")[2], source)


def _is_tensor(variable: Any) -> bool:
    from torch._dynamo.variables import TensorVariable

    return isinstance(variable, TensorVariable)


# The methods that eager mode calls for an operator, and for one with the tensor on its right only.
_OPERATORS: dict[Callable[..., Any], tuple[str | None, str]] = {
    operator.matmul: ("__matmul__", "__rmatmul__"),
    operator.pow: ("__pow__", "__rpow__"),
    operator.truediv: (None, "__rtruediv__"),
}
# Of an nn.CrossEntropyLoss, in order; its function calls them the same.
_LOSS_OPTIONS = (
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_LAYERS_OF_APEX = f"{_OURS}apex{os.sep}packages{os.sep}"
# Torch's own, before anything is patched.
_METHODS = {**torch._C.TensorBase.__dict__, **torch.Tensor.__dict__}
_PLACES = (torch, torch.Tensor, torch._C._nn, torch.linalg)
# They must hold the originals, for these are what a graph calls.
_TABLES = (
    "torch._dynamo.trace_rules.get_tensor_method",
    "torch._dynamo.trace_rules.get_torch_obj_rule_map",
    "torch._dynamo.variables.builtin.populate_builtin_to_tensor_fn_map",
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers",
    "torch._dynamo.variables.torch.get_overridable_functions",
)
_IN_REGIONS: dict[str, Callable[[Any], Any]] = {
    "torch._dynamo.trace_rules.get_tensor_method": _get_tensor_method,
    "torch._dynamo.variables.functions.UserFunctionVariable.call_function": _call_function,
}
_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "torch._dynamo.output_graph.OutputGraph.call_user_compiler": _call_user_compiler,
    "torch._dynamo.trace_rules.lookup_inner": _lookup_inner,
    "torch._dynamo.utils.run_node": _without_casts,
    "torch._dynamo.variables.builtin.BuiltinVariable._handle_insert_op_in_graph": _handle_operator,
    "torch._dynamo.variables.tensor.TensorVariable.call_method": _call_method,
    "torch._dynamo.variables.tensor.TensorVariable.mp_ass_subscript_impl": _set_items,
    "torch._dynamo.variables.user_defined.UserDefinedClassVariable._call_cross_entropy_loss": (
        _call_cross_entropy_loss
    ),
}
