"""Reads ``with`` statements: the blocks of ``scale_loss``, and what else is entered."""

from __future__ import annotations

import ast
from collections.abc import Callable

from . import names
from .calls import Calls
from .trace import Block, enabled_of, is_constant
from .values import Arguments, Choice, Const, Function, Instance, Made, Value


class Contexts(Calls):
    """What context managers do while they are open."""

    def __init__(self) -> None:
        super().__init__()
        self._stacks: dict[Value, list[Block]] = {}
        self._on_yield: list[Callable[[Value], None]] = []

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
        if isinstance(value, Instance):
            nothing_raised = Arguments([Const(None), Const(None), Const(None)])
            self.call(self.attribute(value, "__exit__"), nothing_raised, first.context_expr)
        self._end(*self.blocks[len(blocks) :], *self._stacks.pop(value, ()))
        self.blocks, self.regions = blocks, regions
        return ended

    def _end(self, *blocks: Block) -> None:
        for block in blocks:
            block.end = len(self.trace.calls)

    def open(self, value: Value) -> Value:
        """Enter a context manager; return what it gives."""
        if isinstance(value, Choice):
            return self.for_each(value, self.open)
        if isinstance(value, Instance):
            enter = self.attribute(value, "__enter__")
            return (
                self.call(enter, Arguments(), enter.node) if isinstance(enter, Function) else value
            )
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
        if name == "autocast" and value.source is not None:
            self.note("with autocast", value.source.node, Arguments(), value)
        self.regions = (*self.regions, _region(name, value))
        return value

    def _call_method(self, owner: Value, name: str, arguments: Arguments, node: ast.AST) -> Value:
        if name == "enter_context" and owner in self._stacks and arguments.positional:
            opened = len(self.blocks)
            given = self.open(arguments.positional[0])
            self._stacks[owner] += self.blocks[opened:]
            return given
        if name == "__enter__" and isinstance(owner, Made):  # by the manager of the script's own
            opened = len(self.blocks)
            given = self.open(owner)
            self._stacks[owner] = [*self.blocks[opened:]]
            return given
        if name == "__exit__" and owner in self._stacks:
            closed = self._stacks.pop(owner)
            self._end(*closed)
            self.blocks = tuple(one for one in self.blocks if one not in closed)
            return Const(None)
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


def _nothing(value: Value) -> None:
    """A generator inside of a block yields to nobody that matters."""


def _is_manager(function: Function) -> bool:
    return function.is_decorated_by("contextlib.contextmanager")


def _region(name: str, value: Value) -> str:
    """Return the name of what a context manager does; casts may be off in it."""
    call = value.source
    if name == "autocast" and call is not None and is_constant(enabled_of(call), False):
        return "amp.disable_casts"
    return name
