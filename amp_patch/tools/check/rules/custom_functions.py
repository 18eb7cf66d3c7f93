"""The backward of a ``torch.autograd.Function``, which is to hand on the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.trace import Initialization, Trace

from .registry import rule

#: Functions of gradients that are no multiples of a factor which these have.
_CURVED = ("clamp", "clip", "hardtanh", "normalize", "tanh")
#: What makes a gradient that nothing has scaled.
_CONSTANTS = ("full", "full_like", "new_full", "new_ones", "ones", "ones_like")
#: What is asked of gradients that has no factor of theirs.
_FACTS = ("device", "dim", "dtype", "ndim", "new_ones", "numel", "shape", "size")
#: A lower bound up to it keeps a divisor from 0.
_EPS = 1e-4


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
            yield from _constant(nodes, grads) if _has(function, grads) else _unread(function)


def _unread(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str]]:
    """Yield what a backward returns that reads nothing of what it gets, but for zeros and None."""
    nodes = list(_own_nodes(function))
    names = {_name(one) for one in nodes if isinstance(one, ast.Call)}
    for node in () if any("zeros" in name or name == "fill" for name in names) else nodes:
        if isinstance(node, ast.Return) and not _is_none(node.value):
            yield node, "a gradient that is not multiplied by the loss scale"


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, and not in one that it defines."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield node
            yield from _own_nodes(node)


def _is_none(value: ast.expr | None) -> bool:
    """Return whether None is returned, for one argument or for several."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return all(map(_is_none, value.elts))
    if isinstance(value, ast.BinOp):  # (None,) * 3
        return _is_none(value.left) or _is_none(value.right)
    if isinstance(value, ast.Call):  # tuple(None for ...)
        return bool(value.args) and all(map(_is_none, value.args))
    if isinstance(value, (ast.GeneratorExp, ast.ListComp)):
        return _is_none(value.elt)
    return value is None or isinstance(value, ast.Constant) and value.value is None


def _gradients(function: ast.FunctionDef, nodes: list[ast.AST]) -> set[str]:
    """Return the names of what the backward gets, and of what it computes from that."""
    given = function.args
    grads = {
        one.arg for one in (*given.args[1:], *given.kwonlyargs, given.vararg) if one is not None
    }
    for node in nodes:
        if isinstance(node, ast.Assign) and _has(node.value, grads):
            grads |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return grads


def _curved(nodes: list[ast.AST], grads: set[str]) -> Iterator[tuple[ast.AST, str]]:
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node) in _CURVED:
            given = [one for one in (_owner(node), *node.args) if one is not None]
            given += [one.value for one in node.keywords]
            if any(_has(one, grads) for one in given[:2]) and not _keeps_sign(node, given):
                yield node, f"{_name(node)}() of gradients that are multiplied by the loss scale"


def _keeps_sign(call: ast.Call, given: list[ast.expr]) -> bool:
    """Return whether a clamp is a ReLU, which hands the factor on, or keeps a divisor from 0."""
    constants = [one.value for one in given if isinstance(one, ast.Constant)]
    bounds = [one for one in constants if isinstance(one, int | float)]
    return _name(call) != "normalize" and len(bounds) == 1 and 0 <= bounds[0] <= _EPS


def _constant(nodes: list[ast.AST], grads: set[str]) -> Iterator[tuple[ast.AST, str]]:
    made = _made(nodes, grads) - _multiplied(nodes, grads) - grads
    for node in nodes:
        if isinstance(node, ast.Return):
            results = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            is_own = any(_is_constant(one, grads) or _is_in(one, made) for one in results)
            if is_own or any(_is_added(one, nodes, grads) for one in results):
                yield node, "a gradient that is not multiplied by the loss scale"


def _made(nodes: list[ast.AST], grads: set[str]) -> set[str]:
    """Return the names of constants."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_constant(node.value, grads):
            found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return found


def _multiplied(nodes: list[ast.AST], grads: set[str]) -> set[str]:
    """Return the names of what gradients are written to in place."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.AugAssign) and _has(node.value, grads):
            found |= _names(node.target)
        if isinstance(node, ast.Assign) and _has(node.value, grads):
            items = (one for one in node.targets if isinstance(one, ast.Subscript))
            found |= set().union(*(_names(one.value) for one in items))
        if isinstance(node, ast.Call):
            given = [*node.args, *(one.value for one in node.keywords)]
            if any(_has(one, grads) for one in given):
                found |= set().union(*map(_names, (_owner(node), *given)))
    return found


def _is_constant(node: ast.AST | None, grads: set[str]) -> bool:
    """Return whether a tensor is made of numbers that are none of the gradients', or their signs.

    Also one that is negated, or multiplied or divided by what has no gradients.
    """
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand, grads)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        sides = (node.left, node.right)
        is_made = any(_is_constant(one, grads) for one in sides)
        return is_made and not any(
            _has(one, grads) and not _is_constant(one, grads) for one in sides
        )
    if _name(node) == "sign":
        return True
    return isinstance(node, ast.Call) and _name(node) in _CONSTANTS and not _fills(node, grads)


def _is_added(node: ast.AST | None, nodes: list[ast.AST], grads: set[str]) -> bool:
    """Return whether to gradients something is added that nothing has made of them."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub))):
        return False
    sides = (node.left, node.right)
    own = [one for one in sides if not _has(one, grads)]
    # a call whose result nobody takes may write gradients to anything
    writes = any(isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) for one in nodes)
    if writes or len(own) != 1 or not _names(own[0]):
        return False
    return _names(own[0]) <= _saved(nodes) - _multiplied(nodes, grads)


def _saved(nodes: list[ast.AST]) -> set[str]:
    """Return the names of what was saved for the backward, and of nothing else."""
    saved: set[str] = set()
    others: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign):
            is_saved = "(" not in (value := ast.unparse(node.value)) and value.startswith("ctx.")
            (saved if is_saved else others).update(*map(_names, node.targets))
        elif isinstance(node, (ast.AugAssign, ast.For, ast.NamedExpr, ast.AnnAssign)):
            others |= _names(node.target)
    return saved - others


def _fills(call: ast.Call, grads: set[str]) -> bool:
    given = [*call.args[1:], *(one.value for one in call.keywords)]
    return any(_has(one, grads) for one in given)


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
    """Return whether an expression has the factor of some names, as far as one sees."""
    if isinstance(node, ast.Attribute) and node.attr in _FACTS:
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Call) and _name(node) in _CONSTANTS:
        return _fills(node, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _has(node.right, names):
        return False  # of gradients to gradients
    return any(_has(one, names) for one in ast.iter_child_nodes(node))
