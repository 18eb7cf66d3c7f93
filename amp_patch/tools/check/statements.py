"""Reads a script from the top, as it would run: every branch, every loop twice."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterator

from . import names
from .calls import MOST_CALLS_ELSEWHERE, Calls
from .expressions import MOST_ELEMENTS
from .guards import NO_GUARDS, Guard, Guards, contradict
from .trace import Block, Trace
from .values import (
    Arguments,
    Choice,
    Class,
    Const,
    Function,
    Imported,
    Made,
    Scope,
    Value,
    truth_of,
)

_ENDINGS = {"sys.exit", "builtins.exit", "builtins.quit", "os._exit"}
_NUMBERS = itertools.count()


class Statements(Calls):
    """A reading of one script."""

    def __init__(self) -> None:
        super().__init__()
        self._defined: list[Function] = []
        self._methods: list[tuple[Class, Function]] = []
        self._objects: dict[Class, Value] = {}
        self._stacks: dict[Value, list[Block]] = {}
        self._on_yield: list[Callable[[Value], None]] = []

    def read(self, tree: ast.Module) -> Trace:
        """Read a script as it runs, then the functions that nothing in it has called."""
        self.scope.write("__name__", NO_GUARDS, Const("__main__"))
        self.read_body(tree.body)
        self.guards = NO_GUARDS
        # What others may call comes last, and only where they have not.
        named = _names_in(tree)
        classes: dict[Class, int] = {}
        for cls, method in sorted(self._methods, key=lambda pair: _name_of(pair[1]) in named):
            if method.node not in self.read_functions:
                self._start(classes.setdefault(cls, len(classes) + 1))
                self._read_method(cls, method)
        functions = sorted(self._defined, key=lambda function: _name_of(function) in named)
        for number, function in enumerate(functions, start=len(classes) + 1):
            if function.node not in self.read_functions:
                self._start(number)
                self.call_function(function, Arguments(is_open=True))
        return self.trace

    def _start(self, run: int) -> None:
        self.run = run
        self.budget = len(self.trace.calls) + MOST_CALLS_ELSEWHERE

    def _read_method(self, cls: Class, method: Function) -> None:
        owner = self._objects.get(cls)
        if owner is None:
            owner = self._objects[cls] = self.make_instance(cls, Arguments(is_open=True))
        if method.node not in self.read_functions:
            self.call_function(method.bound_to(owner), Arguments(is_open=True))

    def read_body(self, body: list[ast.stmt]) -> bool:
        """Read statements; return whether none can follow them."""
        for statement in body:
            read = getattr(self, f"_do_{type(statement).__name__}", None)
            if read is not None:
                if read(statement):
                    return True
                continue
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.expr):
                    self.evaluate(child)
        return False

    # --- definitions and imports ---

    def _do_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        decorators = [self.evaluate(one) for one in node.decorator_list]
        for one in decorators:
            if isinstance(one, Imported) and names.canonical(one.dotted) == "autocast":
                self.note("autocast", node, Arguments())
        function = Function(node, self.scope, self.defaults(node.args), decorators)
        self._defined.append(function)
        self.scope.write(node.name, self.guards, function)

    _do_AsyncFunctionDef = _do_FunctionDef

    def _do_ClassDef(self, node: ast.ClassDef) -> None:
        fields = [
            one.target.id
            for one in node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        cls = Class(node.name, [self.evaluate(base) for base in node.bases], fields)
        for decorator in node.decorator_list:
            self.evaluate(decorator)
        outer, defined = self.scope, len(self._defined)
        outer.write(node.name, self.guards, cls)
        self.scope = Scope(outer)
        self.read_body(node.body)
        inner, self.scope = self.scope, outer
        for name in inner.names.names():
            value = inner.names.read(name, self.guards)
            if value is not None:
                cls.attrs.write(name, NO_GUARDS, value)
        own = [one for one in self._defined[defined:] if one.scope is inner]
        self._defined[defined:] = []
        for method in own:
            method.scope = outer
            self._methods.append((cls, method))

    def _do_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            dotted = alias.name if alias.asname else name
            self.scope.write(name, self.guards, Imported(dotted))

    def _do_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name == "*":
                for name in _STARS.get(module, ()):
                    self.scope.write(name, self.guards, Imported(f"{module}.{name}"))
            else:
                value = Imported(f"{module}.{alias.name}")
                self.scope.write(alias.asname or alias.name, self.guards, value)

    def _do_Global(self, node: ast.Global) -> None:
        for name in node.names:
            self.scope.declare_global(name)

    def _do_Nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            self.scope.declare_nonlocal(name)

    # --- assignments and ends ---

    def _do_Assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self._note_unpacking(target, node.value)
            self.assign(target, value)

    def _note_unpacking(self, target: ast.expr, value: ast.expr) -> None:
        """Leave in the trace what the result of ``initialize`` is assigned to."""
        last = self.trace.calls[-1] if self.trace.calls else None
        if last is not None and last.node is value and last.name == "amp.initialize":
            count = len(target.elts) if isinstance(target, ast.Tuple | ast.List) else 1
            call = self.note("=initialize", target, last.arguments)
            call.arguments = last.arguments.and_more(Arguments(keywords={"=": Const(count)}))

    def _do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value))

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        operation = ast.BinOp(_loaded(node.target), node.op, node.value)
        self.assign(node.target, self.evaluate(ast.copy_location(operation, node)))

    def _do_Return(self, node: ast.Return) -> bool:
        value = self.evaluate(node.value)
        if self.returned:
            self.returned[-1].append((self.guards, value))
        return True

    def _do_Raise(self, node: ast.Raise) -> bool:
        self.evaluate(node.exc)
        return True

    def _do_Continue(self, node: ast.Continue | ast.Break) -> bool:
        return True

    _do_Break = _do_Continue

    def _do_Expr(self, node: ast.Expr) -> bool:
        self.evaluate(node.value)
        last = self.trace.calls[-1] if self.trace.calls else None
        return last is not None and last.node is node.value and last.name in _ENDINGS

    # --- branches ---

    def _do_If(self, node: ast.If) -> bool:
        truth = truth_of(self.evaluate(node.test), self.guards)
        return self._branches([(truth[0], node.body), (truth[1], node.orelse)])

    def _branches(self, branches: list[tuple[Guards | None, list[ast.stmt]]]) -> bool:
        """Read each branch under its guards; go on under those of the one that does not end."""
        before = self.guards
        goes_on: list[Guards] = []
        for condition, body in branches:
            if condition is None or contradict(condition, before):
                continue
            self.guards = before | condition
            if not self.read_body(body):
                goes_on.append(self.guards if len(branches) > 1 else before)
        self.guards = goes_on[0] if len(goes_on) == 1 else before
        return not goes_on

    def _do_Match(self, node: ast.Match) -> bool:
        subject = self.evaluate(node.subject)
        branches: list[tuple[Guards | None, list[ast.stmt]]] = []
        for case in node.cases:
            text = f"match {ast.unparse(case.pattern)}"
            branches.append((frozenset({Guard(subject.key, text, True)}), case.body))
        before = self.guards
        self._branches(branches)
        self.guards = before
        return False

    def _do_Try(self, node: ast.Try) -> bool:
        """Read a try statement; what follows it goes on as if nothing had been raised."""
        raised = Guard(f"?try{next(_NUMBERS)}", None, True)
        before = self.guards
        ended = self.read_body(node.body) or self.read_body(node.orelse)
        after = self.guards
        for handler in node.handlers:
            self.guards = before | {raised}
            if handler.name:
                self.scope.write(handler.name, self.guards, Value())
            self.read_body(handler.body)
        self.guards = after | {raised._replace(answer=False)}
        return self.read_body(node.finalbody) or ended

    _do_TryStar = _do_Try

    # --- loops ---

    def _do_For(self, node: ast.For | ast.AsyncFor) -> bool:
        value = self.evaluate(node.iter)
        elements = self.elements(value)
        if elements is None:
            rounds = iter([Value(parts=[value]), Value(parts=[value])])
        else:
            rounds = iter(elements[:MOST_ELEMENTS])
        self._loop(node, self._assigned(node.target, rounds))
        return self.read_body(node.orelse)

    _do_AsyncFor = _do_For

    def _assigned(self, target: ast.expr, values: Iterator[Value]) -> Iterator[Guards]:
        for value in values:
            self.assign(target, value)
            yield NO_GUARDS

    def _do_While(self, node: ast.While) -> bool:
        self._loop(node, self._while(node.test))
        return False

    def _while(self, test: ast.expr) -> Iterator[Guards]:
        for _ in range(2):
            when_true, _never = truth_of(self.evaluate(test), self.guards)
            if when_true is None:
                return
            yield when_true

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, rounds: Iterator[Guards]) -> None:
        before, outer = self.guards, self.loops
        for number, condition in enumerate(rounds):
            if contradict(condition, before):
                break
            self.guards, self.loops = before | condition, (*outer, (node, number))
            self.read_body(node.body)
            self.guards, self.loops = before, outer

    # --- context managers ---

    def _do_With(self, node: ast.With | ast.AsyncWith) -> bool:
        return self._enter(node.items, node.body)

    _do_AsyncWith = _do_With

    def _enter(self, items: list[ast.withitem], body: list[ast.stmt]) -> bool:
        if not items:
            return self.read_body(body)
        first, *others = items
        if isinstance(first.context_expr, ast.Call):
            function = self.evaluate(first.context_expr.func)
            if isinstance(function, Function) and _is_manager(function):
                arguments = self.arguments(first.context_expr)
                return self._enter_function(function, arguments, first, others, body)
        value = self.evaluate(first.context_expr)
        blocks, regions = self.blocks, self.regions
        given = self.open(value)
        if first.optional_vars is not None:
            self.assign(first.optional_vars, given)
        ended = self._enter(others, body)
        for block in (*self.blocks[len(blocks) :], *self._stacks.pop(value, ())):
            block.end = len(self.trace.calls)
        self.blocks, self.regions = blocks, regions
        return ended

    def open(self, value: Value) -> Value:
        """Enter a context manager; return what it gives."""
        if isinstance(value, Choice):
            return self.for_each(value, self.open)
        dotted = value.dotted if isinstance(value, Made) else ""
        name = names.canonical(dotted)
        if name == "amp.scale_loss" and isinstance(value, Made) and value.source is not None:
            scaled = Value(parts=value.source.arguments.values())
            block = Block(value.source, scaled)
            self.trace.blocks.append(block)
            self.blocks = (*self.blocks, block)
            return scaled
        if name == "contextlib.nullcontext" and value.source is not None:
            return value.source.arguments.get("enter_result", 0) or Const(None)
        if name == "contextlib.ExitStack":
            self._stacks[value] = []
            return value
        self.regions = (*self.regions, _region(name, value))
        return value

    def _call_method(self, owner: Value, name: str, arguments: Arguments, node: ast.AST) -> Value:
        if name == "enter_context" and owner in self._stacks and arguments.positional:
            opened = len(self.blocks)
            given = self.open(arguments.positional[0])
            self._stacks[owner] += self.blocks[opened:]
            return given
        return super()._call_method(owner, name, arguments, node)

    def _enter_function(
        self,
        function: Function,
        arguments: Arguments,
        item: ast.withitem,
        others: list[ast.withitem],
        body: list[ast.stmt],
    ) -> bool:
        """Read a function made a context manager, and the block where it yields."""
        outer = self.scope

        def on_yield(value: Value) -> None:
            inner, self.scope = self.scope, outer
            self._on_yield.append(_nothing)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
            self._enter(others, body)
            self._on_yield.pop()
            self.scope = inner

        self._on_yield.append(on_yield)
        try:
            self.call_function(function, arguments)
        finally:
            self._on_yield.pop()
        return False

    def yielded(self, value: Value) -> None:
        """Read the block of a ``with`` statement, where a function made for that yields."""
        if self._on_yield:
            self._on_yield[-1](value)


def _names_in(tree: ast.Module) -> set[str]:
    """Return the functions and methods that a script may call itself, and much else."""
    nodes = list(ast.walk(tree))
    methods = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    return methods | {node.id for node in nodes if isinstance(node, ast.Name)}


def _name_of(function: Function) -> str:
    return getattr(function.node, "name", "")


def _nothing(value: Value) -> None:
    """A generator inside of a block yields to nobody that matters."""


def _is_manager(function: Function) -> bool:
    return function.is_decorated_by("contextlib.contextmanager")


def _region(name: str, value: Value) -> str:
    """Return the name of what a context manager does; casts may be off in it."""
    call = value.source
    enabled = call.arguments.keywords.get("enabled") if call is not None else None
    if name == "autocast" and isinstance(enabled, Const) and enabled.value is False:
        return "amp.disable_casts"
    return name


def _loaded(target: ast.expr) -> ast.expr:
    """Return a target as an expression that is read."""
    read = copy.copy(target)
    vars(read)["ctx"] = ast.Load()
    return read


#: What ``from MODULE import *`` gives, of the modules that rules know.
_STARS = {
    "apex": ("amp", "optimizers", "parallel", "fp16_utils"),
    "apex.amp": ("initialize", "scale_loss", "state_dict", "load_state_dict", "master_params"),
    "amp_patch": ("amp",),
    "amp_patch.amp": ("initialize", "scale_loss", "state_dict", "load_state_dict"),
    "torch.cuda.amp": ("GradScaler", "autocast"),
    "torch.amp": ("GradScaler", "autocast"),
    "torch.optim": ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad"),
    "torch.nn.utils": ("clip_grad_norm_", "clip_grad_value_"),
}
