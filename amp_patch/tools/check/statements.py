"""Reads a script from the top, as it would run: every branch, every loop twice."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator

from . import names
from .calls import MOST_CALLS_ELSEWHERE
from .guards import NO_GUARDS, Guards, Truth, contradict, of_try, opaque, together
from .imports import Imports
from .project import Project
from .reader import MOST_ELEMENTS
from .source import Source
from .trace import Trace
from .truth import truth_of
from .values import (
    Arguments,
    Class,
    Const,
    Function,
    Imported,
    Member,
    Scope,
    Value,
)

_ENDINGS = {"sys.exit", "builtins.exit", "builtins.quit", "os._exit"}
#: Functions whose backward a script writes itself.
_AUTOGRAD = {"torch.autograd.Function", "torch.autograd.function.Function"}
_NUMBERS = itertools.count()


class Statements(Imports):
    """A reading of one script, and of what it uses of its project.

    Args:
        project: whose other files the script may import; None for none.
    """

    def __init__(self, project: Project | None = None) -> None:
        super().__init__(project)
        self._defined: list[Function] = []
        self._methods: list[tuple[Class, Function]] = []
        self._objects: dict[Class, Value] = {}

    def read(self, tree: ast.Module) -> Trace:
        """Read a script as it runs, then the functions in it that nothing has called."""
        self.scope.write("__name__", NO_GUARDS, Const("__main__"))
        self.read_body(tree.body)
        self.guards = NO_GUARDS
        # What others may call comes last, and only where they have not.
        main, named = self.source_of(tree), _names_in(tree)
        classes: dict[Class, int] = {}
        for cls, method in sorted(self._methods, key=lambda pair: _name_of(pair[1]) in named):
            if self.source_of(method.node) is main and method.node not in self.read_functions:
                self._start(classes.setdefault(cls, len(classes) + 1))
                self._read_method(cls, method)
        for cls, number in classes.items():  # with what they inherit from other files
            self._start(number)
            for method in self._inherited(cls, main):
                self._read_method(cls, method)
        functions = sorted(self._defined, key=lambda function: _name_of(function) in named)
        for number, function in enumerate(functions, start=len(classes) + 1):
            node = function.node
            if self.source_of(node) is main and node not in self.read_functions:
                self._start(number)
                self.call_function(function, Arguments(is_open=True))
        return self.trace

    def _inherited(self, cls: Class, main: Source | None) -> Iterator[Function]:
        """Yield the methods that a class has from bases in other files, and that nobody calls."""
        bases = [one for one in cls.ancestry() if isinstance(one, Class)]
        for base, method in self._methods:
            name = _name_of(method)
            first = next((one for one in bases if name in one.attrs), None)
            is_of_others = self.source_of(method.node) is not main
            if base is first and is_of_others and method.node not in self.read_functions:
                yield method

    def _start(self, run: int) -> None:
        self.run = run
        self.budget = len(self.trace.calls) + MOST_CALLS_ELSEWHERE
        self.followed = 0

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

    # --- definitions ---

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
        around = Scope(outer)
        around.write("__class__", NO_GUARDS, cls)  # as Python has it, for super()
        for method in own:
            method.scope = around
            self._methods.append((cls, method))
            if _name_of(method) == "backward" and any(map(_is_autograd, cls.ancestry())):
                self.note("def backward", method.node, Arguments())

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
        before, value = self.evaluate(_loaded(node.target)), self.evaluate(node.value)
        self.note(f"{type(node.op).__name__}=", node, Arguments([value]), before)
        self.assign(node.target, self.binary(before, node.op, value, node))

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
        value = self.evaluate(node.value)
        if isinstance(node.value, ast.Attribute) and isinstance(value, Member):
            self.note("not called", node.value, Arguments([value]))
        last = self.trace.calls[-1] if self.trace.calls else None
        return last is not None and last.node is node.value and last.name in _ENDINGS

    # --- branches ---

    def _do_If(self, node: ast.If) -> bool:
        truth = truth_of(self.asked(node.test), self.guards)
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
        """Read each case as the branch of an if that comes after those before it."""
        subject = self.evaluate(node.subject)
        branches: list[tuple[Guards | None, list[ast.stmt]]] = []
        rest: Guards | None = NO_GUARDS  # of the cases before none was taken
        for case in node.cases:
            matches, fails = self._truth_of_case(subject, case)
            branches.append((together(rest, matches), case.body))
            rest = together(rest, fails)
        return self._branches([*branches, (rest, [])])

    def _truth_of_case(self, subject: Value, case: ast.match_case) -> Truth:
        pattern = case.pattern
        if case.guard is not None:
            return opaque(subject.key, f"match {ast.unparse(pattern)} if {ast.unparse(case.guard)}")
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:  # _, or a name
            return NO_GUARDS, None
        if isinstance(pattern, ast.MatchSingleton):
            return self.truth_of_equality(subject, Const(pattern.value))
        value = self.evaluate(pattern.value) if isinstance(pattern, ast.MatchValue) else None
        if isinstance(value, Const):
            return self.truth_of_equality(subject, value)
        return opaque(subject.key, f"match {ast.unparse(pattern)}")

    def _do_Try(self, node: ast.Try) -> bool:
        """Read a try statement; what follows it goes on as if nothing had been raised."""
        raised = of_try(next(_NUMBERS))
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
        if not elements:  # others may fill a list that is empty here
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
            when_true, _never = truth_of(self.asked(test), self.guards)
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


def _names_in(tree: ast.Module) -> set[str]:
    """Return the functions and methods that a script may call itself, and much else."""
    nodes = list(ast.walk(tree))
    methods = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    return methods | {node.id for node in nodes if isinstance(node, ast.Name)}


def _is_autograd(base: Value) -> bool:
    """Return whether a class is that of functions with a backward of their own."""
    return isinstance(base, Imported) and base.dotted in _AUTOGRAD


def _name_of(function: Function) -> str:
    return getattr(function.node, "name", "")


def _loaded(target: ast.expr) -> ast.expr:
    """Return a target as an expression that is read."""
    read = copy.copy(target)
    vars(read)["ctx"] = ast.Load()
    return read
