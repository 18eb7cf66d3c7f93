"""What a script does with gradients by hand: reads them scaled, divides them again, writes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.trace import Block, Call, Trace, is_constant, is_optimizer
from amp_patch.tools.check.values import Cast, Const, Params, Value, root

from .registry import rule
from .steps import WRITES, backwards_in, gradient_of, is_loss_scale, steps_of

_READS = {
    *(f".{name}" for name in ("norm", "abs", "mean", "std", "sum", "pow", "square", "max", "item")),
    *("torch.norm", "torch.linalg.norm", "torch.linalg.vector_norm"),
}
_DIVIDES = {"Div", ".div", ".true_divide", "torch.div", "torch.true_divide"}
_DIVIDES |= {"torch._foreach_div", "torch._foreach_div_"}
_MULTIPLIES = {"Mult", ".mul", "torch.mul", "torch._foreach_mul", "torch._foreach_mul_"}


@rule(
    "grad-in-block",
    "gradients are read in the block of scale_loss, where they are still scaled",
    "read them after the block",
)
def grad_in_block(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A norm or the like after the backward, in a script that never asks for the scale."""
    if any(trace.named("amp.loss_scale", ".loss_scale")):
        return
    for call in trace.calls:
        if call.blocks and call.name in _READS and _scales(trace, call.blocks[-1]):
            read = call.receiver or call.arguments.get("input", 0)
            done = backwards_in(trace, call.blocks[-1])
            if gradient_of(read) is not None and done and done[0][0].order < call.order:
                yield call.node, "a gradient that is read inside of scale_loss"


def _scales(trace: Trace, block: Block) -> bool:
    return any(
        one.scales
        for optimizer in block.optimizers()
        for one in trace.initializations_of(optimizer, block.call)
    )


@rule(
    "unscaled-twice",
    "gradients are divided by the loss scale after the block, which has unscaled them",
    "leave the division out",
)
def unscaled_twice(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A division of gradients of an initialized model, or of its masters."""
    if any(_is_delayed(block) for block in trace.blocks):
        return
    for call in trace.named(*WRITES, *_DIVIDES, *_MULTIPLIES):
        given = [one for one in (call.receiver, *call.arguments.values()) if one is not None]
        owner = None if call.blocks or not given else _gradients_of(given[0])
        is_divided = any(_is_of_scale(one, call.name not in _MULTIPLIES) for one in given[1:])
        if owner is not None and is_divided and _is_unscaled(trace, call, owner):
            yield call.node, "a division of gradients by the loss scale"


def _gradients_of(value: Value) -> Value | None:
    """Return as `gradient_of`, also of a list or a norm of gradients."""
    found = map(gradient_of, (value, *value.deps))
    return next((owner for owner in found if owner is not None), None)


def _is_of_scale(value: Value, itself: bool) -> bool:
    """Return whether a value is computed from the loss scale alone, or is it itself.

    A factor by which gradients are clipped has divided what it was read from, in the block.
    """
    if is_loss_scale(value):
        return itself
    scale = next(filter(is_loss_scale, value.deps), None)
    return scale is not None and value.deps - {scale} <= scale.deps | {
        one for one in value.deps if isinstance(one, Const)
    }


def _is_delayed(block: Block) -> bool:
    given = block.call.arguments.get("delay_unscale", 4)
    return given is not None and not is_constant(given, False)


def _is_unscaled(trace: Trace, call: Call, owner: Value) -> bool:
    """Return whether a block for an optimizer has unscaled the gradients of a parameter."""
    inits = [one for one in trace.initializations(call) if one.scales]
    known = {root(one) for init in inits for one in (*init.models, *init.optimizers)}
    before = [block for block in trace.blocks if block.end is not None and block.end <= call.order]
    return bool(before) and not known.isdisjoint(owner.deps)


@rule(
    "grad-write",
    "gradients of half parameters are written to after the block, and the masters are stepped",
    "write to those of the masters: for p in amp.master_params(optimizer): p.grad.mul_(0.5)",
)
def grad_write(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A write to ``.grad`` of ``model.parameters()`` at O2 and O5, between block and step."""
    for step in steps_of(trace):
        inits = trace.initializations_of(step.optimizer, step.call)
        inits = [one for one in inits if one.is_at("O2", "O5")]
        models = {root(model) for one in inits for model in one.models}
        for block in step.blocks(trace)[:1] if models else ():
            for call in trace.calls[block.call.order : step.call.order]:
                owner = None if call.blocks else _written(call)
                if owner is not None and _is_of(owner, models):
                    yield call.node, "a write to .grad of model.parameters()"


def _written(call: Call) -> Value | None:
    """Return the parameter whose gradient a call writes; None for another call, or ``= None``."""
    if call.name in WRITES:
        return gradient_of(call.receiver)
    if call.name != "=grad" or call.receiver is None:
        return None
    given = call.arguments.positional[0]
    return None if isinstance(given, Const) else root(call.receiver)


def _is_of(param: Value, models: set[Value]) -> bool:
    """Return whether a parameter is of a model's ``parameters()``, and not of an optimizer."""
    if any(is_optimizer(one) for one in param.deps):  # of its groups, or of amp.master_params
        return False
    return any(isinstance(one, Params) and one.owner in models for one in param.deps)


def _copied(value: Value | None) -> Value | None:
    """Return what is cloned, where that is what a value is."""
    source = None if value is None else value.source
    return source.receiver if source is not None and source.name == ".clone" else value


@rule(
    "half-square",
    "gradients of half parameters are squared in float16, where that of one below 2e-4 is 0",
    "square them in float32: p.grad.float() ** 2",
)
def half_square(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``p.grad ** 2`` of ``model.parameters()`` at O2 and O3, as of Fisher information."""
    for call in trace.named("Pow", ".pow", ".square", "torch.pow", "torch.square"):
        squared = _copied(call.receiver or call.arguments.get("input", 0))
        numbers = [one.value for one in call.arguments.values() if isinstance(one, Const)]
        is_other = isinstance(squared, Cast) or any(one != 2 for one in numbers)  # or a root
        param = None if is_other else gradient_of(squared)
        inits = [one for one in trace.initializations(call) if one.is_at("O2", "O3")]
        models = {root(model) for one in inits for model in one.models}
        if param is not None and _is_of(param, models):
            yield call.node, "a square of .grad of model.parameters()"
