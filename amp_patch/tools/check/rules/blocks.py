"""Blocks of ``scale_loss``: what is done in them, and what between them and the step."""

from __future__ import annotations

import ast
import bisect
import math
from collections.abc import Iterator

from amp_patch.tools.check.guards import contradict, is_of_try
from amp_patch.tools.check.trace import Block, Call, Trace, is_optimizer, once, owners_of
from amp_patch.tools.check.truth import truth_of
from amp_patch.tools.check.values import Const, Sum, Value, alternatives, flat, root

from .registry import rule
from .steps import (
    WRITES,
    Step,
    backwards,
    backwards_in,
    gradient_of,
    is_without_amp,
    order_of,
    steps_of,
    turns_after,
    zeroed,
)

_BY_A_FACTOR = (".div_", ".mul_", "Div=", "Mult=")
_OF_NUMBERS = tuple(
    f"{owner}{name}"
    for owner in ("", ".", "torch.", "math.", "numpy.")
    for name in ("isnan", "isinf", "isfinite")
)
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
        if call.blocks and gradient_of(call.receiver) is not None and not _is_linear(call):
            yield call.node, "a write to .grad inside of scale_loss"


def _is_linear(write: Call) -> bool:
    """Return whether a write hands on the scale: by a factor of its own, as the number of ranks.

    A factor that clips is computed from gradients.
    """
    given = write.arguments.values()
    factors = {one for value in given for one in (value, *value.deps)}
    return write.name in _BY_A_FACTOR and all(gradient_of(one) is None for one in factors)


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
        is_loss = block.loss is not None and root(block.loss) is value
        is_alone = not any(_is_scaled(one, block) for _, one in backwards_in(trace, block))
        if _goes_on(call) and not is_alone:
            continue
        if is_loss or is_alone or _is_beside(trace, call, value, block):
            yield call.node, "a backward inside of scale_loss that is not of its scaled loss"
    for call in trace.named(".backward"):
        source = call.receiver and root(call.receiver).source
        if source and source.name == "amp.scale_loss":
            yield call.node, "scale_loss(...).backward() without a with statement"


@rule(
    "unscaled-term",
    "a penalty, or another loss, is added to the scaled loss, and is not scaled itself",
    "add it to the loss: with amp.scale_loss(loss + penalty, optimizer) as scaled_loss",
)
def unscaled_term(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``scaled_loss += penalty``, at a level with a loss scale."""
    for call, value in backwards(trace):
        for block in call.blocks[-1:]:
            if any(_is_beside(trace, call, one, block) for one in _added(value, block)):
                yield call.node, "a backward of the scaled loss plus what is not scaled"


def _added(value: Value, block: Block) -> Iterator[Value]:
    """Yield what is added to the scaled loss, or to what is made of it, on the way to a value."""
    for one in (value, *value.deps):
        if isinstance(one, Sum) and any(_is_scaled(root(term), block) for term in one.terms):
            yield from map(root, one.terms)


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
        for block in _scaled_into(trace, value):
            is_over = block.end is not None and block.end <= call.order
            if is_over and not contradict(block.call.guards, call.guards):
                yield call.node, "the backward of a scaled loss outside of its block"


def _scaled_into(trace: Trace, value: Value) -> list[Block]:
    """Return the blocks from whose scaled losses a value comes."""
    blocks = _blocks_by_scaled_loss(trace)
    return [blocks[one] for one in (value.deps | {value}) & blocks.keys()]


@once
def _blocks_by_scaled_loss(trace: Trace) -> dict[Value, Block]:
    return {block.scaled: block for block in trace.blocks}


@rule(
    "unscaled-backward",
    "the optimizer steps with gradients of a loss that was not scaled",
    "write with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
)
def unscaled_backward(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A backward outside of any block, at a level with a loss scale."""
    plain = [
        (call, value)
        for call, value in backwards(trace)
        if not call.blocks and _is_meant_for_amp(trace, call, value)
    ]
    for step in steps_of(trace) if plain else ():
        inits = trace.initializations_of(step.optimizer, step.call)
        if not any(one.scales and one.call.order < step.call.order for one in inits):
            continue
        blocks = step.blocks(trace)
        for call, value in plain:
            if not step.ends(call) or contradict(call.guards, step.call.guards):
                continue
            if not blocks or _adds_to(trace, call, value, step):
                yield call.node, "a backward outside of scale_loss"


def _adds_to(trace: Trace, call: Call, value: Value, step: Step) -> bool:
    """Return whether a backward certainly adds to gradients that came through a block."""
    inits = trace.initializations_of(step.optimizer, step.call)
    zeros = zeroed(trace, step.optimizer)
    is_zeroed = any(call.order < zero.order < step.call.order for zero in zeros)
    return not is_zeroed and any(root(m) in value.deps for one in inits for m in one.models)


def _is_meant_for_amp(trace: Trace, call: Call, value: Value) -> bool:
    """Return False in the branch for runs without amp, and for what others scale."""
    if is_without_amp(trace, call):
        return False
    if any(
        one.source and one.source.name in (".scale", ".scale_loss") for one in (value, *value.deps)
    ):
        return False
    return not _scaled_into(trace, value)


@rule(
    "zero-grad",
    "gradients are set to zero between backward and step",
    "call zero_grad() before the block of scale_loss, or after optimizer.step()",
)
def zero_grad(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A zero_grad after which the step comes, with no other backward."""
    for block in trace.blocks:
        for call, _ in backwards_in(trace, block)[:1]:
            for optimizer in block.optimizers():
                for zero in _zeroed_after(trace, block, call, optimizer):
                    if _comes_between(trace, block, call, zero, optimizer):
                        yield zero.node, "zero_grad() between the backward and the step"


def _zeroed_after(trace: Trace, block: Block, call: Call, optimizer: Value) -> Iterator[Call]:
    """Yield what clears gradients after a backward, up to what certainly is the next turn."""
    turns = turns_after(trace, optimizer, call)
    last = next((one.order for one in turns if one.guards <= block.call.guards), math.inf)
    zeros = zeroed(trace, root(optimizer))
    for place in range(bisect.bisect_right(zeros, call.order, key=order_of), len(zeros)):
        if zeros[place].order > last:
            return
        yield zeros[place]


def _comes_between(trace: Trace, block: Block, call: Call, zero: Call, optimizer: Value) -> bool:
    """Return whether the next turn after a backward is a step, and a zero_grad comes first."""
    if contradict(zero.guards, block.call.guards):
        return False
    guards = zero.guards | block.call.guards
    turns = turns_after(trace, optimizer, call)
    turn = next((one for one in turns if not contradict(one.guards, guards)), None)
    if turn is None or turn.order < zero.order or turn.name != ".step":
        return False
    asked = zero.guards - turn.guards - block.call.guards
    # an error in the block, out of memory say
    if any(one.answer and is_of_try(one) for one in asked):
        return False
    # the script skips a step whose gradients it has found not to be finite
    if asked and any(call.order < one.order < zero.order for one in trace.named(*_OF_NUMBERS)):
        return False
    # `if "last" in name: p.grad = None` freezes a layer
    return zero.name != "=grad" or all("grad" in str(one.subject) for one in asked)


@rule(
    "delay-unscale",
    "the last block before the step leaves the gradients scaled",
    "leave delay_unscale=True out in the last block before optimizer.step()",
)
def delay_unscale(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``delay_unscale=True`` in the nearest block before a step."""
    for step in steps_of(trace):
        blocks = [
            one for one in step.blocks(trace) if not contradict(one.call.guards, step.call.guards)
        ]
        if not blocks or not _is_delayed(blocks[-1], step.call):
            continue
        last = blocks[-1].call
        others = [one for one in blocks if contradict(one.call.guards, last.guards)]
        if all(_is_delayed(one, step.call) for one in others):
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
        blocks = trace.scaled().of_run(0) if count > 1 else []
        ids = [_loss_id(one) for one in blocks if not contradict(one.guards, call.guards)]
        used = {one for one in ids if one is not None}
        if ids and None not in ids and used < set(range(count)):
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
