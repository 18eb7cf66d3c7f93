"""Hooks that multiply a gradient by what does not depend on it: they do the same at any loss scale.

A mask does, a factor, a reversed sign and an average over ranks. It is read off the bytecode, for a
trial call might have effects of its own. What is not understood is taken to depend on the
gradient's size.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

#: Instructions that do nothing that a reader of the function would name.
_SILENT = frozenset({"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "KW_NAMES", "MAKE_CELL", "NOP"})
_SILENT |= {"NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME"}
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_GLOBAL", "LOAD_DEREF"})
_PRODUCTS = frozenset({"UNARY_NEGATIVE", "BINARY_MULTIPLY", "INPLACE_MULTIPLY"})
_INDEXING = frozenset({"BINARY_SUBSCR", "BINARY_SLICE", "BUILD_SLICE", "BUILD_TUPLE"})
_DIVISIONS = frozenset({"BINARY_TRUE_DIVIDE", "INPLACE_TRUE_DIVIDE"})
_CALLS = frozenset({"CALL", "CALL_METHOD", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_KW"})
_STORES = ("STORE_SUBSCR", "STORE_SLICE")
_ENDS = ("STORE_FAST", *_STORES, "POP_TOP", "RETURN_VALUE", "RETURN_CONST")
#: Methods that multiply a gradient, copy it, or make a factor fit it.
_METHODS = frozenset({"mul", "mul_", "multiply", "multiply_", "neg", "neg_", "div_", "zero_"})
_METHODS |= {"clone", "contiguous", "detach", "to", "type_as", "float", "half", "cpu", "cuda"}
_METHODS |= {"view", "view_as", "reshape", "expand_as", "unsqueeze", "squeeze"}
#: Those that sum it over ranks, and how they are reached and asked to.
_METHODS |= {"all_reduce", "wait"}
_REACHING = frozenset({"distributed", "ReduceOp", "SUM", "AVG"})
#: Attributes of a gradient that do not depend on its numbers.
_ATTRIBUTES = frozenset({"device", "dtype", "shape"})
#: What a hook may call on ``param.grad``, and what it may name on the way.
_OF_GRAD = _METHODS | _ATTRIBUTES | _REACHING | {"copy_", "dist", "grad", "get_world_size", "torch"}
_OPERATORS = ("*", "*=", "/", "/=", "[]")
#: Of older versions of Python, which have an instruction for each operator, and of comparisons.
_COMPUTING = ("BINARY_", "INPLACE_", "COMPARE_OP", "STORE_SUBSCR")
_FACTORS = {"BINARY_OP", "BINARY_SUBSCR", *_PRODUCTS, *_DIVISIONS}


def only_multiplies(hook: Callable[..., Any]) -> bool:
    """Return whether a hook of a tensor is seen to do no more than multiply its gradient.

    Args:
        hook: takes one gradient, and returns one or writes to it in place.
    """
    if not isinstance(hook, FunctionType) or hook.__code__.co_argcount != 1:
        return False
    return all(map(_is_multiplication, _statements(hook.__code__)))


def is_linear_in_grad(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is seen to multiply, copy or sum over ranks the gradient of its tensor.

    Args:
        hook: of ``register_post_accumulate_grad_hook``, which reads ``param.grad``.
    """
    if not isinstance(hook, FunctionType) or not _OF_GRAD.issuperset(hook.__code__.co_names):
        return False
    for one in dis.get_instructions(hook.__code__):
        is_product = one.argrepr in _OPERATORS if one.opname == "BINARY_OP" else True
        if not is_product or one.opname.startswith(_COMPUTING) and one.opname not in _FACTORS:
            return False
    return True


def _statements(code: CodeType) -> Iterator[list[dis.Instruction]]:
    """Yield the instructions up to each assignment, and to the end."""
    statement: list[dis.Instruction] = []
    counts_ranks = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _SILENT:
            continue
        if counts_ranks and instruction.opname in _CALLS and not instruction.arg:
            counts_ranks = False  # the global that it was reached by stands for the number
            continue
        counts_ranks = instruction.argval == "get_world_size"
        if counts_ranks and _is_attribute(instruction):
            continue
        statement.append(instruction)
        if instruction.opname.startswith(_ENDS):
            yield statement
            # Python 3.13 has one that ends a statement and loads what the next one begins with
            statement = [instruction] if "LOAD_FAST" in instruction.opname else []


def _is_multiplication(statement: list[dis.Instruction]) -> bool:
    """Return whether a statement has the gradient once at most, as a factor."""
    first, last = statement[0], statement[-1]
    pairs = list(zip([first, *statement], statement, strict=False))
    # the gradient, where it is more than asked for its device
    loads = sum(one.opname.count("LOAD_FAST") for one in statement[:-1])
    loads -= sum("LOAD_FAST" in one.opname and now.argval in _ATTRIBUTES for one, now in pairs)
    if last.opname.startswith(_STORES) and (first.opname not in _CONSTANTS or first.argval != 0):
        return False  # elements that become another number than 0
    returns_none = len(statement) <= 2 and first.argval is None
    if last.opname.startswith(("RETURN", "STORE_FAST")) and not loads and not returns_none:
        return False  # a gradient of its own, returned now or later
    calls = sum(one.opname in _CALLS for one in statement)
    methods = sum(one.argval in _METHODS for one in statement if _is_attribute(one))
    return loads <= 1 and calls == methods and all(itertools.starmap(_is_known, pairs))


def _is_known(before: dis.Instruction, now: dis.Instruction) -> bool:
    name = now.opname
    if name in _DIVISIONS or now.argrepr in ("/", "/="):
        is_reached = _is_attribute(before) and before.argval in _REACHING
        return is_reached or before.opname in _CONSTANTS  # the divisor
    if name == "BINARY_OP":
        return now.argrepr in ("*", "*=", "[]")
    if _is_attribute(now):
        return now.argval in _METHODS | _ATTRIBUTES | _REACHING
    return name in _CONSTANTS | _PRODUCTS | _INDEXING | _CALLS or name.startswith(
        ("LOAD_FAST", *_ENDS)
    )


def _is_attribute(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
