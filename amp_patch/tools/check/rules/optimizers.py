"""Optimizers that initialize or scale_loss should have got, and which parameters are clipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.guards import contradict
from amp_patch.tools.check.trace import (
    Call,
    Initialization,
    Trace,
    is_optimizer,
    is_part_of,
    owners_of,
)
from amp_patch.tools.check.values import Value, flat, root

from .registry import line_of, rule
from .steps import blocks_of, plain_backwards, steps_of


@rule(
    "optimizer-not-initialized",
    "an optimizer that initialize did not get steps gradients of scaled losses",
    "make all optimizers before amp.initialize, and give it all: models, [first, second] = "
    "amp.initialize(models, [first, second])",
)
def optimizer_not_initialized(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """An optimizer of the script that is stepped, or given to scale_loss."""
    seen: set[Value] = set()
    uses = [(step.optimizer, step.call) for step in steps_of(trace)]
    uses += [(one, block.call) for block in trace.blocks for one in block.optimizers()]
    for optimizer, call in uses:
        if optimizer in seen or not is_optimizer(optimizer):
            continue
        if trace.initializations_of(optimizer, call):
            continue
        inits = trace.initializations(call)
        is_out = bool(inits) and not any(_may_hold(one, optimizer) for one in inits)
        if is_out and _meets_amp(trace, optimizer, call, inits):
            seen.add(optimizer)
            yield call.node, f"an optimizer{_where(optimizer, inits)} that is not initialized"


def _where(optimizer: Value, inits: list[Initialization]) -> str:
    made = root(optimizer).source
    if made is None:
        return ""
    is_late = all(one.call.order < made.order for one in inits)
    return f" (made in line {line_of(made.node)}{', after amp.initialize' if is_late else ''})"


def _may_hold(one: Initialization, optimizer: Value) -> bool:
    """Return whether an optimizer was given to a call, or wraps such a one, or is wrapped by it."""
    return one.call.arguments.is_open or any(
        is_part_of(optimizer, other) or is_part_of(other, optimizer) for other in one.optimizers
    )


def _meets_amp(trace: Trace, optimizer: Value, call: Call, inits: list[Initialization]) -> bool:
    """Return whether gradients of scaled losses reach what an optimizer steps."""
    models = [model for one in inits for model in one.models]
    if any(is_part_of(owner, model) for owner in owners_of(optimizer) for model in models):
        return True
    if own := blocks_of(trace, optimizer):
        return any(_can_meet(one.call, call) for one in own)
    return bool(trace.blocks) and not plain_backwards(trace).with_call(call)


@rule(
    "optimizer-not-scaled",
    "an optimizer is stepped that no scale_loss has got",
    "give scale_loss all optimizers whose gradients the backward writes: "
    "amp.scale_loss(loss, [first, second])",
)
def optimizer_not_scaled(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """An initialized optimizer, where there are blocks for others only."""
    for step in steps_of(trace):
        optimizer, call = step.optimizer, step.call
        own = [one.call for one in step.blocks(trace)]
        inits = trace.initializations_of(optimizer, call)
        if not any(one.scales for one in inits) or any(_can_meet(one, call) for one in own):
            continue
        blocks = trace.scaled().with_call(call)
        if not blocks or plain_backwards(trace).with_call(call):
            continue
        given = [root(one) for it in blocks for one in flat(it.arguments.get("optimizers", 1))]
        if not given or not all(_is_known(trace, one, call) for one in (*given, optimizer)):
            continue
        if not any(optimizer is other or optimizer in other.deps for other in given):
            yield call.node, "the step of an optimizer that scale_loss never gets"


def _can_meet(block: Call, step: Call) -> bool:
    return not contradict(block.guards, step.guards)


def _is_known(trace: Trace, optimizer: Value, call: Call) -> bool:
    """Return whether a value is one optimizer for sure: the script makes it or initializes it."""
    return is_optimizer(optimizer) or bool(trace.initializations_of(optimizer, call))


@rule(
    "scale-loss-without-initialize",
    "scale_loss is called in a script that never calls initialize",
    "call model, optimizer = amp.initialize(model, optimizer, opt_level='O1') before the loop",
)
def scale_loss_without_initialize(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """Where the optimizer is made in the script, and nobody else gets it."""
    for block in trace.blocks:
        call = block.call
        found = trace.with_call(call, "amp.initialize", "amp.init")
        if any(one.order < call.order for one in found) or call.run != 0:
            continue
        optimizers = block.optimizers()
        if optimizers and all(
            is_optimizer(one) and not _is_handed_on(trace, one, call) for one in optimizers
        ):
            yield call.node, "scale_loss without amp.initialize before it"


def _is_handed_on(trace: Trace, optimizer: Value, call: Call) -> bool:
    """Return whether a function that is not seen gets an optimizer, and may initialize it."""
    return any(
        optimizer in map(root, one.arguments.values())
        for one in trace.calls[: call.order]
        if one.name == "()" or not one.name.startswith((".", "=", "torch.", "amp.", "apex."))
    )
