"""The backward of a ``torch.autograd.Function``, which is to hand on the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.trace import Initialization, Trace

from .registry import rule

#: Functions of gradients that are no multiples of a factor which these have.
_CURVED = ("clamp", "clip", "hardtanh", "normalize")
#: What makes a gradient that nothing has scaled.
_CONSTANTS = ("full", "full_like", "ones", "ones_like")


@rule(
    "custom-backward",
    "the backward of a torch.autograd.Function does not hand on the loss scale in its gradients",
    "multiply a gradient of its own by amp.loss_scale(); divide one by it that is clamped, and "
    "multiply what is returned",
)
def custom_backward(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A clamp of gradients, or a gradient of its own, by which an auxiliary loss is added."""
    if not any(Initialization(call).scales for call in trace.named("amp.initialize")):
        return
    for call in trace.named("def backward"):
        function = call.node
        if isinstance(function, ast.FunctionDef) and "scale" not in ast.dump(function):
            nodes = list(ast.walk(function))
            grads = _gradients(function, nodes)
            yield from _curved(nodes, grads)
            yield from _constant(nodes, grads)


def _gradients(function: ast.FunctionDef, nodes: list[ast.AST]) -> set[str]:
    """Return the names of what the backward gets, and of what it computes from that."""
    given = function.args
    grads = {one.arg for one in (*given.args[1:], given.vararg) if one is not None}
    for node in nodes:
        if isinstance(node, ast.Assign) and _has(node.value, grads):
            grads |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return grads


def _curved(nodes: list[ast.AST], grads: set[str]) -> Iterator[tuple[ast.AST, str]]:
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node) in _CURVED:
            given = [one for one in (_owner(node), *node.args) if one is not None]
            given += [one.value for one in node.keywords]
            bounds = [one.value for one in given if isinstance(one, ast.Constant)]
            is_relu = bool(bounds) and not any(bounds)  # which hands the factor on
            if any(_has(one, grads) for one in given[:2]) and not is_relu:
                yield node, f"{_name(node)}() of gradients that are multiplied by the loss scale"


def _constant(nodes: list[ast.AST], grads: set[str]) -> Iterator[tuple[ast.AST, str]]:
    made = _made(nodes) - _multiplied(nodes, grads) - grads
    for node in nodes:
        if isinstance(node, ast.Return):
            results = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if any(_name(one) in _CONSTANTS or _is_in(one, made) for one in results):
                yield node, "a gradient that is not multiplied by the loss scale"


def _made(nodes: list[ast.AST]) -> set[str]:
    """Return the names of constants."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _name(node.value) in _CONSTANTS:
            found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return found


def _multiplied(nodes: list[ast.AST], grads: set[str]) -> set[str]:
    """Return the names of what gradients are written to in place."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.AugAssign) and _has(node.value, grads):
            found |= _names(node.target)
        if isinstance(node, ast.Call) and any(_has(one, grads) for one in node.args):
            found |= _names(_owner(node))
    return found


def _is_in(node: ast.AST | None, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _name(node: ast.AST | None) -> str:
    """Return the bare name of the function or method that a call is of; "" of anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    name = getattr(function, "attr", None) or getattr(function, "id", "")
    return str(name).removesuffix("_")


def _owner(call: ast.Call) -> ast.expr | None:
    """Return what a method is called of, a module too."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _names(node: ast.AST | None) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} if node else set()


def _has(node: ast.AST, names: set[str]) -> bool:
    return not names.isdisjoint(_names(node))
