"""Blocks of ``scale_loss``: what is done in them, and what between them and the step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.guards import contradict
from amp_patch.tools.check.trace import Block, Call, Trace, is_optimizer, owners_of
from amp_patch.tools.check.truth import truth_of
from amp_patch.tools.check.values import Const, Value, alternatives, flat, root

from .registry import rule
from .steps import WRITES, backwards, gradient_of, steps_of, zeroed

_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "amp.clip_grad_norm_")


@rule(
    "clip-in-block",
    "gradients are clipped in the block of scale_loss, where they are still scaled",
    "clip after the block, before optimizer.step(): amp.clip_grad_norm_(optimizer, max_norm)",
)
def clip_in_block(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """By torch's functions, amp's, or by hand."""
    for call in trace.named(*_CLIPPING):
        if call.blocks:
            yield call.node, f"{call.name.removeprefix('amp.')} inside of scale_loss"
    for call in trace.named(*WRITES):
        if call.blocks and gradient_of(call.receiver) is not None:
            yield call.node, "a write to .grad inside of scale_loss"


@rule(
    "step-in-block",
    "the optimizer steps in the block of scale_loss, where gradients are still scaled",
    "call optimizer.step() after the block",
)
def step_in_block(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A step of an optimizer that the block is for, or of another."""
    for call in trace.named(".step"):
        receiver = root(call.receiver) if call.receiver else None
        if receiver is None or not call.blocks:
            continue
        if is_optimizer(receiver) or any(block.steps(receiver) for block in call.blocks):
            yield call.node, "optimizer.step() inside of scale_loss"


@rule(
    "unscaled-loss",
    "the backward in the block is of the loss, not of the scaled one",
    "write with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
)
def unscaled_loss(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A backward of something that does not come from the scaled loss."""
    for call, value in backwards(trace):
        if not call.blocks:
            continue
        block = call.blocks[-1]
        inside = [one for other, one in backwards(trace) if block in other.blocks]
        is_loss = block.loss is not None and root(block.loss) is value
        is_alone = not any(_is_scaled(one, block) for one in inside)
        if _goes_on(call) and not is_alone:
            continue
        if is_loss or is_alone or _is_beside(trace, call, value, block):
            yield call.node, "a backward inside of scale_loss that is not of its scaled loss"
    for call in trace.named(".backward"):
        source = call.receiver and root(call.receiver).source
        if source and source.name == "amp.scale_loss":
            yield call.node, "scale_loss(...).backward() without a with statement"


def _goes_on(call: Call) -> bool:
    """Return whether a backward is given gradients of tensors that another one has come to."""
    at = ("gradient", 0) if call.receiver is not None else ("grad_tensors", 1)
    given = call.arguments.get(*at)
    grads = [] if given is None else [root(one) for one in flat(given, call.guards)]
    copied = [one.source.receiver if one.source else one for one in grads]  # grad.clone()
    return bool(grads) and all(gradient_of(one) is not None for one in copied)


def _is_beside(trace: Trace, call: Call, value: Value, block: Block) -> bool:
    """Return whether another loss adds to the gradients of the scaled one, where that is scaled."""
    return not _is_scaled(value, block) and any(
        owner in value.deps and any(one.scales for one in trace.initializations_of(optimizer, call))
        for optimizer in block.optimizers()
        for owner in owners_of(optimizer)
    )


def _is_scaled(value: Value, block: Block) -> bool:
    return value is block.scaled or block.scaled in value.deps


@rule(
    "backward-after-block",
    "the scaled loss goes backward after its block, which has unscaled nothing then",
    "call scaled_loss.backward() inside of the block",
)
def backward_after_block(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A scaled loss whose block is over.

    The loss of a later block may come of one, by what `torch.autograd.grad` made of it.
    """
    for call, value in backwards(trace):
        if any(_is_scaled(value, block) for block in call.blocks):
            continue
        for block in trace.blocks:
            is_over = block.end is not None and block.end <= call.order
            is_met = not contradict(block.call.guards, call.guards)
            if is_over and is_met and _is_scaled(value, block):
                yield call.node, "the backward of a scaled loss outside of its block"


@rule(
    "unscaled-backward",
    "the optimizer steps with gradients of a loss that was not scaled",
    "write with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
)
def unscaled_backward(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A backward outside of any block, at a level with a loss scale."""
    plain = [(call, value) for call, value in backwards(trace) if not call.blocks]
    for optimizer, window, step in steps_of(trace):
        inits = trace.initializations_of(optimizer, step)
        if not any(one.scales and one.call.order < step.order for one in inits):
            continue
        blocks = [one for one in trace.blocks if one.call in window and one.steps(optimizer)]
        for call, value in plain:
            if call not in window or contradict(call.guards, step.guards):
                continue
            counts = not blocks or _adds_to(trace, call, value, optimizer, step)
            if counts and _is_meant_for_amp(trace, call, value):
                yield call.node, "a backward outside of scale_loss"


def _adds_to(trace: Trace, call: Call, value: Value, optimizer: Value, step: Call) -> bool:
    """Return whether a backward certainly adds to gradients that came through a block."""
    models = [root(m) for one in trace.initializations_of(optimizer, step) for m in one.models]
    zeros = [z for z in zeroed(trace, optimizer) if call.order < z.order < step.order]
    return not zeros and any(model in value.deps for model in models)


def _is_meant_for_amp(trace: Trace, call: Call, value: Value) -> bool:
    """Return False in the branch for runs without amp, and for what others scale."""
    if any(contradict(block.call.guards, call.guards) for block in trace.blocks):
        return False
    if any(
        one.source and one.source.name in (".scale", ".scale_loss") for one in (value, *value.deps)
    ):
        return False
    return not any(block.scaled in value.deps or value is block.scaled for block in trace.blocks)


@rule(
    "zero-grad",
    "gradients are set to zero between backward and step",
    "call zero_grad() before the block of scale_loss, or after optimizer.step()",
)
def zero_grad(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A zero_grad after which the step comes, with no other backward."""
    for block in trace.blocks:
        for optimizer in block.optimizers():
            for call in zeroed(trace, optimizer):
                if _comes_between(trace, block, call, optimizer):
                    yield call.node, "zero_grad() between the backward and the step"


def _comes_between(trace: Trace, block: Block, zero: Call, optimizer: Value) -> bool:
    done = [one for one, _ in backwards(trace) if block in one.blocks]
    if not done or zero.order < done[0].order or contradict(zero.guards, block.call.guards):
        return False
    others = [one.call for one in trace.blocks if one is not block and one.steps(optimizer)]
    steps = [call for one, _, call in steps_of(trace) if one is root(optimizer)]
    turns = sorted([*others, *steps], key=lambda call: call.order)
    turns = [one for one in turns if not contradict(one.guards, zero.guards | block.call.guards)]
    between = [one for one in turns if done[0].order < one.order < zero.order]
    after = [one for one in turns if one.order > zero.order]
    if between or not after or after[0] not in steps:
        return False
    # `if "last" in name: p.grad = None` freezes a layer
    asked = zero.guards - after[0].guards - block.call.guards
    return zero.name != "=grad" or all("grad" in str(one.subject) for one in asked)


@rule(
    "delay-unscale",
    "the last block before the step leaves the gradients scaled",
    "leave delay_unscale=True out in the last block before optimizer.step()",
)
def delay_unscale(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``delay_unscale=True`` in the nearest block before a step."""
    for optimizer, window, step in steps_of(trace):
        blocks = [
            one
            for one in trace.blocks
            if one.call in window
            and one.steps(optimizer)
            and not contradict(one.call.guards, step.guards)
        ]
        if not blocks or not _is_delayed(blocks[-1], step):
            continue
        last = blocks[-1].call
        others = [one for one in blocks if contradict(one.call.guards, last.guards)]
        if all(_is_delayed(one, step) for one in others):
            yield last.node, "delay_unscale=True in the last block before the step"


def _is_delayed(block: Block, step: Call) -> bool:
    """Return whether a block's gradients are certainly left scaled, in runs that come to a step."""
    given = block.call.arguments.get("delay_unscale", 4)
    found = [one for _, one in alternatives(given, step.guards)]
    return bool(found) and all(_is_true(one, step) for one in found)


def _is_true(value: Value, step: Call) -> bool:
    when_false = truth_of(value, step.guards)[1]
    return when_false is None or contradict(when_false, step.guards)


@rule(
    "loss-id",
    "loss_id is not below num_losses",
    "give amp.initialize num_losses, and count loss_id from 0",
)
def loss_id(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A loss_id that is a literal."""
    for block in trace.blocks:
        given = block.call.arguments.get("loss_id", 2)
        counts = [
            count
            for optimizer in block.optimizers()[:1]
            for one in trace.initializations_of(optimizer, block.call)
            if (count := _num_losses(one.call)) is not None
        ]
        for value in flat(given, block.call.guards) if counts else ():
            number = value.value if isinstance(value, Const) else None
            if isinstance(number, int) and not 0 <= number < max(counts):
                yield block.call.node, f"loss_id={number} with num_losses={max(counts)}"


@rule(
    "num-losses",
    "losses share a scale although num_losses gives each its own",
    "give each loss's scale_loss its loss_id, or initialize fewer num_losses",
)
def num_losses(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """loss_ids that nobody uses, where all are literals."""
    for call in trace.named("amp.initialize"):
        count = _num_losses(call) or 1
        blocks = trace.with_call(call, (one.call for one in trace.blocks))
        ids = [_loss_id(one) for one in blocks if one.run == 0]
        used = {one for one in ids if one is not None}
        if ids and None not in ids and count > 1 and used < set(range(count)):
            named = ", ".join(map(str, sorted(used)))
            yield call.node, f"num_losses={count}, of which only loss_id {named} is used"


def _loss_id(call: Call) -> int | None:
    given = call.arguments.get("loss_id", 2) or Const(0)
    is_known = isinstance(given, Const) and isinstance(given.value, int)
    return given.value if is_known and isinstance(given, Const) else None


def _num_losses(call: Call) -> int | None:
    given = call.arguments.get("num_losses", 10)
    if given is None:
        return None if call.arguments.is_open else 1
    return given.value if isinstance(given, Const) and isinstance(given.value, int) else None
