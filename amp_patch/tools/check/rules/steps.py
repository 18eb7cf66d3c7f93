"""What rules ask of the order of training: backwards, zeroed gradients, steps."""

from __future__ import annotations

from collections.abc import Iterator

from amp_patch.tools.check.guards import contradict
from amp_patch.tools.check.trace import Call, Trace, is_module, is_optimizer, owners_of
from amp_patch.tools.check.values import Instance, Value, flat, root


def backwards(trace: Trace) -> Iterator[tuple[Call, Value]]:
    """Yield each backward, with the tensor that it is of."""
    for call in trace.named(".backward", "torch.autograd.backward"):
        if call.receiver is None:
            first = call.arguments.get("tensors", 0)
            yield from ((call, root(one)) for one in flat(first, call.guards))
            continue
        receiver = root(call.receiver)
        is_tensor = not is_optimizer(receiver) and not is_module(receiver)
        if is_tensor and not isinstance(receiver, Instance):
            yield call, receiver


def known_optimizers(trace: Trace) -> list[Value]:
    """Return what the script makes, initializes, or scales losses for."""
    found: dict[Value, None] = {}
    for call in trace.named("amp.initialize"):
        found |= {root(one): None for one in flat(call.arguments.get("optimizers", 1))}
    for block in trace.blocks:
        found |= dict.fromkeys(block.optimizers())
    for call in trace.named(".step"):
        if call.receiver is not None and is_optimizer(call.receiver):
            found[root(call.receiver)] = None
    return list(found)


def steps_of(trace: Trace) -> Iterator[tuple[Value, list[Call], Call]]:
    """Yield each step of an optimizer: the optimizer, all calls since its last step, the step."""
    for optimizer in known_optimizers(trace):
        steps = [
            call
            for call in trace.named(".step")
            if call.receiver is not None and root(call.receiver) is optimizer
        ]
        for number, step in enumerate(steps):
            earlier = [one for one in steps[:number] if not contradict(one.guards, step.guards)]
            begin = earlier[-1].order + 1 if earlier else 0
            yield optimizer, trace.calls[begin : step.order], step


def zeroed(trace: Trace, optimizer: Value) -> list[Call]:
    """Return the calls of zero_grad that reach what an optimizer steps."""
    reached = [root(optimizer), *owners_of(optimizer)]
    calls = trace.named(".zero_grad")
    return [call for call in calls if call.receiver is not None and root(call.receiver) in reached]
