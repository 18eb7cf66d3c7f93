"""What rules ask of the order of training: backwards, zeroed gradients, steps."""

from __future__ import annotations

from collections.abc import Iterator

from amp_patch.tools.check.guards import contradict
from amp_patch.tools.check.trace import Call, Trace, is_module, is_optimizer, owners_of
from amp_patch.tools.check.values import Const, Instance, Member, Params, Value, flat, root

#: What writes in place.
WRITES = (
    *(f".{name}_" for name in ("add", "clamp", "clip", "copy", "div", "mul", "nan_to_num", "sub")),
    *("Add=", "Div=", "Mult=", "Sub="),
)


def gradient_of(value: Value | None) -> Value | None:
    """Return the parameter whose ``.grad`` or ``.grad.data`` a value is; None for another."""
    found = None if value is None else root(value)
    if isinstance(found, Member) and found.name == "data":
        found = found.owner
    return found.owner if isinstance(found, Member) and found.name == "grad" else None


def is_loss_scale(value: Value) -> bool:
    """Return whether a value is what ``amp.loss_scale()``, or a scaler's, returned."""
    return value.source is not None and value.source.name in ("amp.loss_scale", ".loss_scale")


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
    """Return the calls of zero_grad, or ``p.grad = None``, that reach what an optimizer steps."""
    reached = [root(optimizer), *owners_of(optimizer)]
    calls = trace.named(".zero_grad")
    found = [call for call in calls if call.receiver is not None and root(call.receiver) in reached]
    for call in trace.named("=grad"):
        given, param = call.arguments.positional[0], call.receiver
        is_none = isinstance(given, Const) and given.value is None
        if is_none and param is not None and _is_of_all(root(param), reached):
            found.append(call)
    return found


def _is_of_all(param: Value, reached: list[Value]) -> bool:
    """Return whether a parameter is of the groups of an optimizer, or of ``parameters()`` of all.

    Who clears the gradients of one layer freezes it so.
    """
    lists = {root(one.owner) for one in param.deps if isinstance(one, Params)}
    return not (lists or param.deps).isdisjoint(reached)
