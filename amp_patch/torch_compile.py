"""How torch.compile sees patched functions; knows nothing of rules or models.

torch.compile traces into a patched function, for that is a plain closure, but it reads operators
(``a @ b``) and methods (``a.matmul(b)``) off its own tables, and the graph that it captures calls
torch's functions by name. The replacements here make the traced line decide, as in eager mode.
All are of torch's internals: what a version of torch does not have is left out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from .cast_mode import mode
from .patching import Patches, resolve


def install(patches: Patches) -> None:
    """Replace them, before any function of torch is patched."""
    # Imported late, for that changes torch (it replaces torch.manual_seed). Building any torch
    # optimizer has imported it already.
    import torch._dynamo.output_graph
    import torch._dynamo.variables.torch as variables

    # A table made on first use; it must hold the originals, for these are what a graph calls.
    variables.get_overridable_functions()
    for path, make in _REPLACEMENTS.items():
        try:
            owner, name, original = resolve(path)
        except AttributeError:
            continue
        patches.replace(owner, name, make(original))
    handlers = torch._dynamo.variables.builtin.BuiltinVariable
    getattr(handlers, "call_function_handler_cache", {}).clear()


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
    def handle(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        on_tensors = [_is_tensor(arg) for arg in args]
        if self.fn in _OPERATORS and any(on_tensors):
            function = _traced(tx, _OPERATORS[self.fn])
            return function.call_function(tx, list(args), kwargs)
        if self.fn is operator.truediv and on_tensors == [False, True]:
            function = _traced(tx, "Tensor.__rtruediv__.traced")
            return function.call_function(tx, [args[1], args[0]], kwargs)
        return original(self, tx, args, kwargs)

    return handle


def _call_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace a method of a tensor through the patched method."""
    being_traced: list[str] = []

    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method = getattr(torch.Tensor, name, None)
        # The patched method calls the original, which comes here again.
        if not hasattr(method, "traced") or name in being_traced:
            return original(self, tx, name, args, kwargs)
        being_traced.append(name)
        try:
            function = _traced(tx, f"Tensor.{name}.traced")
            return function.call_function(tx, [self, *args], kwargs)
        finally:
            being_traced.pop()

    return call_method


def _traced(tx: Any, path: str) -> Any:
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


_OPERATORS: dict[Callable[..., Any], str] = {operator.matmul: "matmul", operator.pow: "pow"}
_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "torch._dynamo.output_graph.OutputGraph.call_user_compiler": _call_user_compiler,
    "torch._dynamo.utils.run_node": _without_casts,
    "torch._dynamo.variables.builtin.BuiltinVariable._handle_insert_op_in_graph": _handle_operator,
    "torch._dynamo.variables.tensor.TensorVariable.call_method": _call_method,
}
