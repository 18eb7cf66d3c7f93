"""What rules ask of the order of training: backwards, zeroed gradients, steps."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from amp_patch.tools.check.guards import Guards, contradict
from amp_patch.tools.check.trace import (
    Block,
    Call,
    Group,
    Trace,
    is_module,
    is_optimizer,
    once,
    owners_of,
)
from amp_patch.tools.check.values import Const, Instance, Member, Params, Value, flat, root

#: What writes in place.
WRITES = (
    *(f".{name}_" for name in ("add", "clamp", "clip", "copy", "div", "mul", "nan_to_num", "sub")),
    *("Add=", "Div=", "Mult=", "Sub="),
)


def gradient_of(value: Value | None) -> Value | None:
    """Return the parameter whose gradient a value is: ``.grad``, ``.grad.data`` or detached."""
    found = None if value is None else root(value)
    if isinstance(found, Member) and found.name == "data":
        found = found.owner
    elif found is not None and found.source is not None and found.source.name == ".detach":
        return gradient_of(found.source.receiver)
    return found.owner if isinstance(found, Member) and found.name == "grad" else None


def is_loss_scale(value: Value) -> bool:
    """Return whether a value is what ``amp.loss_scale()``, or a scaler's, returned."""
    return value.source is not None and value.source.name in ("amp.loss_scale", ".loss_scale")


def order_of(one: Call | Block) -> int:
    """Return when something is done, by which lists are sorted and searched."""
    return one.order if isinstance(one, Call) else one.call.order


@once
def backwards(trace: Trace) -> list[tuple[Call, Value]]:
    """Return each backward, with the tensor that it is of."""
    found: list[tuple[Call, Value]] = []
    for call in trace.named(".backward", "torch.autograd.backward"):
        if call.receiver is None:
            first = call.arguments.get("tensors", 0)
            found += [(call, root(one)) for one in flat(first, call.guards)]
            continue
        receiver = root(call.receiver)
        given = map(root, call.arguments.positional)
        is_engine = any(isinstance(one, Instance) or is_optimizer(one) for one in given)
        is_tensor = not is_engine and not is_optimizer(receiver) and not is_module(receiver)
        if is_tensor and not isinstance(receiver, Instance):
            found.append((call, receiver))
    return found


@once
def _inside(trace: Trace) -> dict[Block, list[tuple[Call, Value]]]:
    found: dict[Block, list[tuple[Call, Value]]] = {}
    for call, value in backwards(trace):
        for block in call.blocks:
            found.setdefault(block, []).append((call, value))
    return found


def backwards_in(trace: Trace, block: Block) -> list[tuple[Call, Value]]:
    """Return the backwards in a block, with the tensors that they are of."""
    return _inside(trace).get(block, [])


@once
def plain_backwards(trace: Trace) -> Group:
    """Return the backwards that are in no block, nor in the branch for runs without any."""
    plain = (call for call, _ in backwards(trace) if not call.blocks)
    return Group(call for call in plain if not is_without_amp(trace, call))


def is_without_amp(trace: Trace, call: Call) -> bool:
    """Return whether a call is in a branch that another one with a block excludes."""
    return any(contradict(guards, call.guards) for guards in _guards_of_blocks(trace))


@once
def _guards_of_blocks(trace: Trace) -> list[Guards]:
    return list(dict.fromkeys(block.call.guards for block in trace.blocks))


@once
def _blocks(trace: Trace) -> dict[Value, list[Block]]:
    found: dict[Value, list[Block]] = {}
    for block in trace.blocks:
        for optimizer in dict.fromkeys(block.optimizers()):
            found.setdefault(optimizer, []).append(block)
    for blocks in found.values():
        blocks.sort(key=order_of)
    return found


def blocks_of(trace: Trace, optimizer: Value) -> list[Block]:
    """Return the blocks for an optimizer, in order."""
    return _blocks(trace).get(root(optimizer), [])


class Step(NamedTuple):
    """A step of an optimizer.

    Attributes:
        begin: the `Call.order` after its last step.
        call: the step's.
    """

    optimizer: Value
    begin: int
    call: Call

    def ends(self, call: Call) -> bool:
        """Return whether this is the first step of its optimizer after a call."""
        return self.begin <= call.order < self.call.order

    def blocks(self, trace: Trace) -> list[Block]:
        """Return the blocks for its optimizer since the last step."""
        found = blocks_of(trace, self.optimizer)
        first = bisect.bisect_left(found, self.begin, key=order_of)
        return found[first : bisect.bisect_left(found, self.call.order, key=order_of)]


@once
def _steps(trace: Trace) -> dict[Value, list[Call]]:
    """Return the steps of each optimizer that is initialized, in a block, or made by the script."""
    found: dict[Value, list[Call]] = {}
    for call in trace.named("amp.initialize"):
        found |= {root(one): [] for one in flat(call.arguments.get("optimizers", 1))}
    found |= {optimizer: [] for optimizer in _blocks(trace)}
    for call in trace.named(".step"):
        if call.receiver is not None and is_optimizer(call.receiver):
            found.setdefault(root(call.receiver), [])
    for call in trace.named(".step"):
        if call.receiver is not None and root(call.receiver) in found:
            found[root(call.receiver)].append(call)
    return found


@once
def steps_of(trace: Trace) -> list[Step]:
    """Return each step of an optimizer."""
    found: list[Step] = []
    for optimizer, calls in _steps(trace).items():
        for number, call in enumerate(calls):
            earlier = (calls[place] for place in reversed(range(number)))
            last = next((one for one in earlier if not contradict(one.guards, call.guards)), None)
            found.append(Step(optimizer, 0 if last is None else last.order + 1, call))
    return found


@once
def _turns(trace: Trace, optimizer: Value) -> list[Call]:
    blocks = [one.call for one in blocks_of(trace, optimizer)]
    return sorted([*blocks, *_steps(trace).get(optimizer, [])], key=order_of)


def turns_after(trace: Trace, optimizer: Value, call: Call) -> Iterator[Call]:
    """Yield the blocks and steps of an optimizer that come after a call."""
    turns = _turns(trace, root(optimizer))
    first = bisect.bisect_right(turns, call.order, key=order_of)
    return (turns[place] for place in range(first, len(turns)))


@once
def zeroed(trace: Trace, optimizer: Value) -> list[Call]:
    """Return the calls of zero_grad, or ``p.grad = None``, that reach what an optimizer steps."""
    reached = [root(optimizer), *owners_of(optimizer)]
    calls = (call for one in reached for call in _zeroed(trace).get(one, ()))
    return sorted(dict.fromkeys(calls), key=order_of)


@once
def _zeroed(trace: Trace) -> dict[Value, list[Call]]:
    """Return the calls that clear gradients of each optimizer or model."""
    found: dict[Value, list[Call]] = {}
    for call in trace.named(".zero_grad"):
        if call.receiver is not None:
            found.setdefault(root(call.receiver), []).append(call)
    for call in trace.named("=grad"):
        given, param = call.arguments.positional[0], call.receiver
        if param is not None and isinstance(given, Const) and given.value is None:
            for one in _cleared(root(param)):
                found.setdefault(one, []).append(call)
    return found


def _cleared(param: Value) -> Iterable[Value]:
    """Return that of whose groups, or of whose ``parameters()``, a parameter is one of all.

    Who clears the gradients of one layer freezes it so.
    """
    return {root(one.owner) for one in param.deps if isinstance(one, Params)} or param.deps
