"""Reads calls: into functions and classes of the script, and what known functions return."""

from __future__ import annotations

import ast

from . import names
from .expressions import Expressions
from .functions import RESULTS, of_container, of_parser
from .guards import NO_GUARDS, Guards
from .truth import equality
from .values import (
    Arguments,
    Cast,
    Choice,
    Class,
    Const,
    Function,
    Imported,
    Instance,
    Items,
    Made,
    Member,
    Params,
    Partial,
    Scope,
    Super,
    Table,
    Value,
    Wrapper,
    flat,
    option,
)

#: Calls inside of calls that are followed.
DEEPEST = 12
#: Calls in all, after which functions are not followed any more: from the top of the script, and
#: from each function that it does not reach.
MOST_CALLS = 10_000
MOST_CALLS_ELSEWHERE = 500
#: Functions of the script that are followed, from each of these. Such a call does not count above,
#: and where each function calls the next one twice, the last of `DEEPEST` is called thousands of
#: times.
MOST_FUNCTIONS = 10_000
#: Methods that return the object itself.
_CHAINED = {"cuda", "cpu", "to", "train", "eval", "requires_grad_", "xpu", "share_memory", "apply"}
_PARAMETERS = {"parameters", "named_parameters"}
_SAME = {
    "apex.parallel.convert_syncbn_model",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "torch.nn.utils.weight_norm",
    "torch.nn.utils.spectral_norm",
    "builtins.list",
    "builtins.tuple",
    "builtins.iter",
    "builtins.reversed",
    "itertools.chain",
    "copy.copy",
}
_WRAPPERS = {
    "parallel",
    "torch.compile",
    "apex.parallel.LARC",
    "apex.parallel.LARC.LARC",
    "apex.fp16_utils.network_to_half",
}


class Calls(Expressions):
    """What calls return, and the calls that they make in turn.

    Attributes:
        returned: of each function that is being read: what it returns, and where.
        read_functions: that were called, by their nodes.
        budget: calls in the trace from which on functions are not followed.
        followed: functions, so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[list[tuple[Guards, Value]]] = []
        self.read_functions: set[ast.AST] = set()
        self.budget = MOST_CALLS
        self.followed = 0
        self._active: list[ast.AST] = []

    def read_body(self, body: list[ast.stmt]) -> bool:
        """Read statements; return whether none can follow them. See `Statements`."""
        raise NotImplementedError

    def call(self, callee: Value, arguments: Arguments, node: ast.AST) -> Value:
        """Return what a call returns."""
        return self.for_each(callee, lambda one: self._call(one, arguments, node))

    def _call(self, callee: Value, arguments: Arguments, node: ast.AST) -> Value:
        if isinstance(callee, Imported):
            return self._call_imported(callee.dotted, arguments, node)
        if isinstance(callee, Function):
            if callee.owner is not None and not isinstance(callee.node, ast.Lambda):
                self.note(f".{callee.node.name}", node, arguments, callee.owner)
            return self.call_function(callee, arguments)
        if isinstance(callee, Class):
            return self.make_instance(callee, arguments)
        if isinstance(callee, Member):
            return self.for_each(
                callee.owner, lambda one: self._call_method(one, callee.name, arguments, node)
            )
        if isinstance(callee, Partial):
            return self._call(callee.callee, callee.arguments.and_more(arguments), node)
        return self._call_object(callee, arguments, node)

    # --- what the script defines ---

    def call_function(self, function: Function, arguments: Arguments) -> Value:
        """Read a function's body with these arguments; return what it returns."""
        node = function.node
        self.read_functions.add(node)
        if node in self._active or len(self._active) > DEEPEST or self._is_spent():
            return Value(parts=arguments.values())
        self.followed += 1
        scope, guards = self.scope, self.guards
        self.scope = Scope(function.scope)
        for decorator in filter(_is_autocast, function.decorators):
            self.note("with autocast", node, Arguments(), decorator)
        self._active.append(node)
        self.returned.append([])
        try:
            self._bind(function, arguments)
            if isinstance(node, ast.Lambda):
                return self.evaluate(node.body)
            self.read_body(node.body)
            return self._result(self.returned[-1], guards)
        finally:
            self.returned.pop()
            self._active.pop()
            self.scope, self.guards = scope, guards

    def _is_spent(self) -> bool:
        return len(self.trace.calls) > self.budget or self.followed > MOST_FUNCTIONS

    def _result(self, returned: list[tuple[Guards, Value]], guards: Guards) -> Value:
        if not returned:
            return Const(None)
        if len(returned) == 1:
            return returned[0][1]
        return Choice([(condition - guards, value) for condition, value in reversed(returned)])

    def _bind(self, function: Function, arguments: Arguments) -> None:
        spec = function.node.args
        names_ = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
        given = list(arguments.positional)
        if function.owner is not None:
            given.insert(0, function.owner)
            self.scope.write("(self)", NO_GUARDS, function.owner)
        defaults = function.defaults
        if arguments.is_open:
            defaults = {name: option(default) for name, default in defaults.items()}
        values: dict[str, Value] = {**defaults, **dict(zip(names_, given, strict=False))}
        known = {*names_, *(argument.arg for argument in spec.kwonlyargs)}
        values |= {name: one for name, one in arguments.keywords.items() if name in known}
        for name in known:
            self.scope.write(name, NO_GUARDS, values.get(name) or Value())
        if spec.vararg:
            more = Value() if arguments.is_open else Items(given[len(names_) :])
            self.scope.write(spec.vararg.arg, NO_GUARDS, more)
        if spec.kwarg:
            rest = {repr(k): v for k, v in arguments.keywords.items() if k not in known}
            named = Value() if arguments.is_open else Table(rest)
            self.scope.write(spec.kwarg.arg, NO_GUARDS, named)

    def make_instance(self, cls: Class, arguments: Arguments) -> Value:
        """Return an object of a class of the script; its ``__init__`` is read."""
        instance = Instance(cls, arguments.values(), len(self.trace.calls))
        init = self._of_class(instance, "__init__")
        if isinstance(init, Function):
            self.call_function(init, arguments)
        else:
            given = dict(zip(cls.fields, arguments.positional, strict=False))
            for name, value in (given | arguments.keywords).items():
                instance.attrs.write(name, self.guards, value)
        return instance

    def _call_object(self, callee: Value, arguments: Arguments, node: ast.AST) -> Value:
        call = self.note("()", node, arguments, callee)
        if isinstance(callee, Instance):
            method = self._of_class(callee, "__call__")
            if isinstance(method, Function):
                return self.call_function(method, arguments)
        self._call_back(arguments)
        key = f"{callee.key}({', '.join(one.key for one in arguments.values())})"
        call.result = Value(key, [callee, *arguments.values()])
        call.result.source = call
        return call.result

    def _call_back(self, arguments: Arguments) -> None:
        """Read the functions of the script that an unknown one was given, and may call."""
        for one in arguments.values():
            for value in flat(one, self.guards):
                if isinstance(value, Function) and value.node not in self.read_functions:
                    self.call_function(value, Arguments(is_open=True))

    # --- what it imports ---

    def _call_imported(self, dotted: str, arguments: Arguments, node: ast.AST) -> Value:
        if dotted == "builtins.super":
            return self._super(arguments)
        name = names.canonical(dotted)
        simple = RESULTS.get(name)
        if simple is not None:
            result = simple(self, arguments)
            if result is not None:
                return result
        call = self.note(name, node, arguments)
        self._call_back(arguments)
        call.result = self._returned_by(name, dotted, arguments)
        if name in ("os.environ.get", "os.getenv"):
            call.result.default = arguments.get("default", 1)
        if not isinstance(call.result, Items) and call.result.source is None:
            call.result.source = call
        return call.result

    def _super(self, arguments: Arguments) -> Value:
        """Return what ``super()`` gives in a method, or ``super(Class, self)``."""
        cls, owner = (self.scope.read(name, self.guards) for name in ("__class__", "(self)"))
        cls = arguments.get("type", 0) or cls
        if isinstance(cls, Class) and isinstance(owner, Instance):
            return Super(owner, cls.bases)
        return Value(parts=[owner])

    def _returned_by(self, name: str, dotted: str, arguments: Arguments) -> Value:
        first = arguments.positional[0] if arguments.positional else Const(None)
        if name == "amp.initialize":
            models = arguments.get("models", 0) or Const(None)
            optimizers = arguments.get("optimizers", 1)
            return models if optimizers is None else self._pair(models, optimizers)
        if name in _SAME and arguments.positional:
            return first
        if name in _WRAPPERS:
            inner = arguments.values()[0] if arguments.values() else first
            return self.for_each(inner, lambda one: Wrapper(one, name))
        key = f"{dotted}({', '.join(one.key for one in arguments.values())})"
        if names.is_optimizer(dotted) or names.is_module(dotted) or name == "GradScaler":
            key = ""  # two of these are two objects
        if name == "copy.deepcopy":  # no gradient of its own goes to what it was copied from
            return Made(dotted)
        return Made(dotted, key, arguments.values())

    def _pair(self, models: Value, optimizers: Value) -> Value:
        """Return what ``initialize`` returns; of an optimizer that may be None, either of both."""
        pair = Items([models, optimizers])
        is_none, is_given = equality(optimizers, Const(None))
        either = ((is_given, pair), (is_none, models))
        found = [(guards, one) for guards, one in either if guards is not None]
        return found[0][1] if len(found) == 1 else Choice(found)

    # --- methods of what is not the script's own ---

    def _call_method(self, owner: Value, name: str, arguments: Arguments, node: ast.AST) -> Value:
        known = of_container(self, owner, name, arguments)
        if known is not None:
            return known
        if name == "step":  # with a closure, which it calls
            self._call_back(arguments)
        call = self.note(f".{name}", node, arguments, owner)
        if name != "step":
            self._call_back(arguments)
        call.result = self._returned_by_method(owner, name, arguments)
        if call.result.source is None and call.result is not owner:
            call.result.source = call
        return call.result

    def _returned_by_method(self, owner: Value, name: str, arguments: Arguments) -> Value:
        if isinstance(owner, Made) and owner.dotted == "argparse.ArgumentParser":
            return of_parser(self, owner, name, arguments)
        dtype = names.CASTING_METHODS.get(name) or self._dtype_of(name, arguments)
        if dtype is not None:
            return Cast(owner, dtype)
        if name in _CHAINED:
            return owner
        if name in _PARAMETERS:
            return Params(owner)
        key = f"{owner.key}.{name}({', '.join(one.key for one in arguments.values())})"
        # no gradient goes back from what is detached to what it was made from
        result = Value(key, [owner, *arguments.values()] if name != "detach" else [])
        result.default = arguments.get("default", 1) if name == "get" else None
        return result

    def _dtype_of(self, name: str, arguments: Arguments) -> str | None:
        """Return the dtype of ``.to(torch.float16)``, ``.to(dtype=...)``, ``.type(...)``."""
        if name not in ("to", "type"):
            return None
        for one in arguments.values():
            for value in flat(one, self.guards):
                if isinstance(value, Imported) and value.dotted in names.DTYPES:
                    return names.DTYPES[value.dotted]
        return None


def _is_autocast(decorator: Value) -> bool:
    """Return whether a decorator is ``autocast`` or ``autocast(...)``."""
    dotted = decorator.dotted if isinstance(decorator, Imported | Made) else ""
    return names.canonical(dotted) == "autocast"
