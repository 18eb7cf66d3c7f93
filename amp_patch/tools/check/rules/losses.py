"""What a script does with the loss and the scaled loss beside the backward."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.names import canonical
from amp_patch.tools.check.trace import Call, Trace, is_module, is_optimizer, once
from amp_patch.tools.check.values import Imported, Member, Value, flat, root

from .registry import rule
from .steps import is_loss_scale

_READS = (".item", ".tolist", ".detach", ".cpu", ".numpy")
#: Get what they read as an argument; ``Add=`` is ``total += scaled_loss``, and ``.step`` that of
#: ``ReduceLROnPlateau``.
_GIVEN = (
    *("builtins.float", "builtins.format", "builtins.print", "wandb.log", "Add="),
    *(".add_scalar", ".format", ".log", ".step", ".update"),
)


@rule(
    "scaled-loss-read",
    "the scaled loss is logged or added up in the place of the loss",
    "read the loss itself: loss.item()",
)
def scaled_loss_read(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A script that reads a scaled loss, never the loss, and never divides by the scale."""
    if any(trace.named("amp.loss_scale", ".loss_scale")):
        return
    for block in trace.blocks:
        inits = [one for o in block.optimizers() for one in trace.initializations_of(o, block.call)]
        if not any(one.scales for one in inits):
            continue
        reads = _reads(trace)
        if block.loss is None or root(block.loss) in reads:
            continue
        for call in reads.get(block.scaled, ()):
            if not _is_asked(trace, call):
                yield call.node, "the value of a scaled loss"


@once
def _reads(trace: Trace) -> dict[Value, list[Call]]:
    """Return the calls that read the number of each value."""
    found: dict[Value, list[Call]] = {}
    for call in trace.named(*_READS, *_GIVEN):
        own = [] if call.receiver is None else [call.receiver]
        given = own if call.name in _READS else call.arguments.values()
        for one in {_tensor(one) for value in given for one in flat(value, call.guards)}:
            found.setdefault(one, []).append(call)
    return found


def _tensor(value: Value) -> Value:
    """Return the tensor whose ``.data`` a value is, or itself."""
    value = root(value)
    return root(value.owner) if isinstance(value, Member) and value.name == "data" else value


def _is_asked(trace: Trace, read: Call) -> bool:
    """Return whether what was read is divided, or whether it is finite is asked."""
    key = "" if read.result is None else read.result.key
    if not key:
        return False
    for call in trace.calls[read.order + 1 :]:
        given = [one for value in call.arguments.values() for one in flat(value)]
        if any(one is read.result for one in given) and "is" in call.name.rpartition(".")[2][:2]:
            return True
        if any(f"({key} Div " in one.key for one in given):
            return True
        if any(key in str(guard.subject) for guard in call.guards):
            return True
    return False


@rule(
    "scaled-twice",
    "a loss that was multiplied by the loss scale is given to scale_loss, which multiplies it",
    "give scale_loss the loss itself",
)
def scaled_twice(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``amp.scale_loss(loss * amp.loss_scale(), optimizer)``, or of what another block yields."""
    yielded = {block.scaled for block in trace.blocks}
    for block in trace.blocks:
        losses = list(flat(block.loss, block.call.guards))
        if losses and yielded.issuperset(map(root, losses)):
            yield block.call.node, "scale_loss of what another scale_loss has scaled"
        for loss in losses:
            if any(_is_times(loss, one) for one in loss.deps if is_loss_scale(one)):
                yield block.call.node, "scale_loss of a loss times the loss scale"


def _is_times(loss: Value, scale: Value) -> bool:
    return loss.key.endswith(f" Mult {scale.key})") or loss.key.startswith(f"({scale.key} Mult ")


@rule(
    "not-called",
    "a method or function is named, and not called",
    "write the parentheses: scaled_loss.backward(), amp.step_was_skipped(optimizer)",
)
def not_called(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``scaled_loss.backward`` as a statement, and ``if amp.step_was_skipped:``."""
    for call in trace.named("not called"):
        method = call.arguments.positional[0]
        if isinstance(method, Imported) and canonical(method.dotted) == "amp.step_was_skipped":
            yield call.node, "amp.step_was_skipped without parentheses"
        if isinstance(method, Member) and trace.uses_amp(call) and _is_meant(method):
            yield call.node, f"{method.name} without parentheses"


def _is_meant(method: Member) -> bool:
    """Return whether it certainly is a method: an object elsewhere may have a property ``step``."""
    if method.name == "zero_grad":
        return is_optimizer(method.owner) or is_module(method.owner)
    return method.name == "backward" or (method.name == "step" and is_optimizer(method.owner))
