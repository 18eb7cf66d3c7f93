"""Reads expressions: what they stand for, and the calls in them, in Python's order."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from .guards import NO_GUARDS, Guards, Truth, contradict, negated, opaque
from .reader import MOST_ELEMENTS, Reader
from .truth import equality, is_constant, one_of, truth_of
from .values import (
    Arguments,
    Choice,
    Const,
    Function,
    Imported,
    Items,
    Sum,
    Table,
    Value,
    alternatives,
)

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_LARGEST = 10**6


class Expressions(Reader):
    """What expressions stand for."""

    def evaluate(self, node: ast.expr | None) -> Value:
        """Return what an expression stands for."""
        if node is None:
            return Const(None)
        read = getattr(self, f"_read_{type(node).__name__}", None)
        if read is not None:
            value: Value = read(node)
            return value
        children = ast.iter_child_nodes(node)
        return Value(
            parts=[self.evaluate(child) for child in children if isinstance(child, ast.expr)]
        )

    def asked(self, node: ast.expr) -> Value:
        """Return what is asked whether it is true, and note a function, which always is."""
        value = self.evaluate(node)
        if isinstance(value, Imported) and isinstance(node, ast.Attribute | ast.Name):
            self.note("not called", node, Arguments([value]))
        return value

    # --- one method for each kind of expression that is understood ---

    def _read_Constant(self, node: ast.Constant) -> Value:
        return Const(node.value, node)

    def _read_Name(self, node: ast.Name) -> Value:
        return self.scope.read(node.id, self.guards)

    def _read_Attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.evaluate(node.value), node.attr)

    def _read_Call(self, node: ast.Call) -> Value:
        callee = self.evaluate(node.func)
        return self.call(callee, self.arguments(node), node)

    def arguments(self, node: ast.Call) -> Arguments:
        """Return the arguments of a call, ``*`` and ``**`` taken apart where possible."""
        found = Arguments()
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                items = self.elements(self.evaluate(argument.value))
                found.positional += items or []
                found.is_open |= items is None
            else:
                found.positional.append(self.evaluate(argument))
        for keyword in node.keywords:
            value = self.evaluate(keyword.value)
            if keyword.arg is not None:
                found.keywords[keyword.arg] = value
            elif isinstance(value, Table):
                found.keywords |= {key.strip("'\""): one for key, one in value.entries.items()}
            else:
                found.is_open = True
        return found

    def _read_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        items: list[Value] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                value = self.evaluate(element.value)
                items += self.elements(value) or [value]
            else:
                items.append(self.evaluate(element))
        return Items(items)

    _read_List = _read_Set = _read_Tuple

    def _read_Dict(self, node: ast.Dict) -> Value:
        entries: dict[str, Value] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            held = self.evaluate(value)
            if key is not None:
                entries[self.evaluate(key).key] = held
            elif isinstance(held, Table):
                entries |= held.entries
            else:
                entries[held.key] = held
        return Table(entries)

    def _read_Subscript(self, node: ast.Subscript) -> Value:
        owner, index = self.evaluate(node.value), self.evaluate(node.slice)
        return self.for_each(owner, lambda one: self.item(one, index))

    def _read_Slice(self, node: ast.Slice) -> Value:
        parts = [self.evaluate(part) for part in (node.lower, node.upper, node.step) if part]
        return Value(":".join(part.key for part in parts), parts)

    def _read_IfExp(self, node: ast.IfExp) -> Value:
        when_true, when_false = truth_of(self.asked(node.test), self.guards)
        found = [
            (condition, self.under(condition, functools.partial(self.evaluate, one)))
            for condition, one in ((when_true, node.body), (when_false, node.orelse))
            if condition is not None and not contradict(condition, self.guards)
        ]
        return found[0][1] if len(found) == 1 else Choice(found)

    def _read_BoolOp(self, node: ast.BoolOp) -> Value:
        is_and = isinstance(node.op, ast.And)
        values: list[Value] = []
        together: Guards | None = NO_GUARDS  # all true, or for "or" all false
        for operand in node.values:
            if together is None:
                break
            value = self.under(together, functools.partial(self.asked, operand))
            values.append(value)
            goes_on = truth_of(value, self.guards | together)[0 if is_and else 1]
            together = None if goes_on is None else together | goes_on
        return self._joined(node, values, together, is_and)

    def _joined(
        self, node: ast.BoolOp, values: list[Value], together: Guards | None, is_and: bool
    ) -> Value:
        result = Value(f"({type(node.op).__name__} {' '.join(v.key for v in values)})", values)
        stops: Guards | None = NO_GUARDS
        if together is not None:
            stops = negated(together) if together else None
        result.truth = (together, stops) if is_and else (stops, together)
        return result

    def _read_UnaryOp(self, node: ast.UnaryOp) -> Value:
        is_not = isinstance(node.op, ast.Not)
        value = self.asked(node.operand) if is_not else self.evaluate(node.operand)
        if is_not:
            when_true, when_false = truth_of(value, self.guards)
            result = Value(f"(not {value.key})", [value])
            result.truth = when_false, when_true
            return result
        number = value.value if isinstance(value, Const) else None
        if isinstance(node.op, ast.USub) and isinstance(number, int | float):
            return Const(-number, node)
        return Value(f"({type(node.op).__name__} {value.key})", [value])

    def _read_Compare(self, node: ast.Compare) -> Value:
        values = [self.evaluate(one) for one in (node.left, *node.comparators)]
        words = " ".join(type(one).__name__ for one in node.ops)
        result = Value(f"({words} {' '.join(value.key for value in values)})", values)
        if len(values) == 2:
            result.truth = self._truth_of_comparison(node.ops[0], *values)
        return result

    def _truth_of_comparison(self, op: ast.cmpop, left: Value, right: Value) -> Truth | None:
        if is_constant(left) and not is_constant(right):
            left, right = right, left
        if not is_constant(right) or not isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
            return None
        truth = self.truth_of_equality(left, right)
        return truth if isinstance(op, ast.Is | ast.Eq) else (truth[1], truth[0])

    def truth_of_equality(self, value: Value, constant: Value) -> Truth:
        """Return when a value that may be one of several equals a constant, and when not."""
        true: list[Guards] = []
        false: list[Guards] = []
        for condition, one in alternatives(value, self.guards):
            equal, different = equality(one, constant)
            true += [condition | equal] if equal is not None else []
            false += [condition | different] if different is not None else []
        unclear = opaque(value.key, constant.key)
        return one_of(true, unclear[0]), one_of(false, unclear[1])

    def _read_BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        if isinstance(node.op, ast.Pow | ast.Div | ast.Mult):
            self.note(type(node.op).__name__, node, Arguments([right]), left)
        return self.binary(left, node.op, right, node)

    def binary(self, left: Value, op: ast.operator, right: Value, node: ast.AST) -> Value:
        """Return what ``left op right`` stands for."""
        if isinstance(left, Items) and isinstance(right, Items):
            return Items(left.items + right.items)
        if isinstance(left, Const) and isinstance(right, Const) and _can_compute(op, left, right):
            try:
                value = _ARITHMETIC[type(op)](left.value, right.value)
            except (TypeError, ZeroDivisionError, OverflowError, ValueError):
                return Value(parts=[left, right])
            if not isinstance(value, int) or abs(value) < _LARGEST:
                return Const(value, node)
        made = Sum if isinstance(op, ast.Add | ast.Sub) else Value
        return made(f"({left.key} {type(op).__name__} {right.key})", [left, right])

    def _read_FormattedValue(self, node: ast.FormattedValue) -> Value:
        value = self.evaluate(node.value)
        self.note("builtins.format", node, Arguments([value]))
        return Value(parts=[value])

    def _read_Lambda(self, node: ast.Lambda) -> Value:
        return Function(node, self.scope, self.defaults(node.args))

    def defaults(self, node: ast.arguments) -> dict[str, Value]:
        """Return the default values of a function's parameters."""
        names = [argument.arg for argument in (*node.posonlyargs, *node.args)]
        found = dict(
            zip(
                names[len(names) - len(node.defaults) :],
                map(self.evaluate, node.defaults),
                strict=True,
            )
        )
        for argument, default in zip(node.kwonlyargs, node.kw_defaults, strict=True):
            if default is not None:
                found[argument.arg] = self.evaluate(default)
        return found

    def _read_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.assign(node.target, value)
        return value

    def _read_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
        return Items([self.evaluate(node.elt) for _ in self._comprehended(node.generators)])

    _read_GeneratorExp = _read_SetComp = _read_ListComp

    def _read_DictComp(self, node: ast.DictComp) -> Value:
        entries = {}
        for _ in self._comprehended(node.generators):
            entries[self.evaluate(node.key).key] = self.evaluate(node.value)
        return Table(entries)

    def _comprehended(self, generators: list[ast.comprehension]) -> Iterator[None]:
        """Bind the names of a comprehension, once for each element as far as these are known."""
        if not generators:
            yield
            return
        first, *others = generators
        value = self.evaluate(first.iter)
        elements = self.elements(value)
        for element in [Value(parts=[value])] if elements is None else elements[:MOST_ELEMENTS]:
            self.assign(first.target, element)
            for condition in first.ifs:
                self.evaluate(condition)
            yield from self._comprehended(others)

    def _read_Await(self, node: ast.Await) -> Value:
        return self.evaluate(node.value)

    def _read_Yield(self, node: ast.Yield | ast.YieldFrom) -> Value:
        value = self.evaluate(node.value)
        self.yielded(value)
        return Value(parts=[value])

    _read_YieldFrom = _read_Yield


def _can_compute(op: ast.operator, left: Const, right: Const) -> bool:
    """Return whether a result is known and small: a number times a text may be neither."""
    are_numbers = all(isinstance(one.value, int | float) for one in (left, right))
    return type(op) in _ARITHMETIC and (are_numbers or isinstance(op, ast.Add))
