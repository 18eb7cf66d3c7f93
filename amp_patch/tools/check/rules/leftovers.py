"""What is left of torch.amp in a script that uses amp."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.guards import Guards, is_of_try
from amp_patch.tools.check.trace import Call, Initialization, Trace, enabled_of, is_constant
from amp_patch.tools.check.truth import truth_of
from amp_patch.tools.check.values import Made, Value, root

from .registry import line_of, rule

_USES = (".scale", ".unscale_", ".step", ".update")


@rule(
    "grad-scaler",
    "a GradScaler is left beside amp, whose scaler does its work; its options count for nothing",
    "remove it: scale_loss scales, unscales and moves the scale; call optimizer.step()",
)
def grad_scaler(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A scaler that is used in runs that use amp, or that nothing uses."""
    for call in trace.named("GradScaler"):
        if not _is_beside_amp(trace, call):
            continue
        uses = list(_uses(trace, call))
        beside = {line_of(use.node) for use in uses if _can_meet_amp(trace, use)}
        if beside:
            lines = ", ".join(map(str, sorted(beside)))
            yield call.node, f"a GradScaler, used in line {lines}"
        elif not uses and call.run == 0 and not _is_touched(trace, call):
            yield call.node, "a GradScaler that nothing uses"
    for call in trace.named(".backward"):
        source = call.receiver and root(call.receiver).source
        is_scaled = source and source.name == ".scale" and not _is_known(source)
        if is_scaled and _is_beside_amp(trace, call):
            yield call.node, "the backward of a loss that a GradScaler scaled"


@rule(
    "autocast",
    "autocast is left beside amp, and casts by lists of its own",
    "remove it: the level of amp.initialize casts (O1 float16, O4 bfloat16)",
)
def autocast(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """An autocast that is not for switching casts off, nor on where they are on."""
    for call in trace.named("autocast"):
        enabled = enabled_of(call)
        if enabled is not None and _tells_of_casts(enabled):
            continue
        if _is_beside_amp(trace, call) and _is_entered_beside_amp(trace, call):
            yield call.node, "an enabled autocast"


@rule(
    "fp16-optimizer",
    "an FP16_Optimizer is left beside amp, and keeps masters and scales of its own",
    "give amp.initialize the optimizer inside of it",
)
def fp16_optimizer(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """One that initialize gets."""
    for one in map(Initialization, trace.named("amp.initialize")):
        for optimizer in map(root, one.optimizers):
            if isinstance(optimizer, Made) and optimizer.dotted.endswith(".FP16_Optimizer"):
                yield one.call.node, "amp.initialize of an FP16_Optimizer"


def _uses(trace: Trace, scaler: Call) -> Iterator[Call]:
    for call in trace.calls:
        if call.receiver is not None and root(call.receiver) is scaler.result:
            if call.name in _USES:
                yield call
        elif scaler.result in call.arguments.values() and not call.name.startswith(("()", "=")):
            yield call


def _is_touched(trace: Trace, scaler: Call) -> bool:
    """Return whether anything is done with a scaler, or with what holds it, that may use it."""
    made = scaler.result
    for call in trace.calls:
        if call.name.startswith("="):
            continue
        values = [*filter(None, [call.receiver]), *call.arguments.values()]
        if any(made is root(one) or made in one.deps for one in values):
            return True
    return False


def _can_meet_amp(trace: Trace, use: Call) -> bool:
    """Return whether a run that comes to this use scales by amp, which is initialized then."""
    if trace.blocks and not trace.scaled().with_call(use):
        return False
    inits = trace.with_call(use, "amp.initialize", "amp.init")
    return not inits or any(init.run != use.run or _is_on(trace, init, use) for init in inits)


def _is_on(trace: Trace, init: Call, use: Call) -> bool:
    ended = (one.order for one in trace.named("amp.deactivate"))
    return init.order < use.order and not any(init.order < end < use.order for end in ended)


def _is_entered_beside_amp(trace: Trace, autocast: Call) -> bool:
    """Return whether a run may be inside of an autocast while amp is initialized."""
    entered = (
        one
        for one in trace.named("with autocast")
        if one.node is autocast.node or one.receiver is autocast.result
    )
    return any(_can_meet_amp(trace, one) for one in (autocast, *entered))


def _tells_of_casts(enabled: Value) -> bool:
    """Return whether it is ``torch.is_autocast_enabled()``, which amp_patch answers."""
    made = root(enabled)
    return isinstance(made, Made) and made.dotted.startswith("torch.is_autocast_")


def _is_known(source: Call) -> bool:
    receiver = source.receiver and root(source.receiver)
    return isinstance(receiver, Made) and receiver.dotted.endswith(".GradScaler")


def _is_beside_amp(trace: Trace, call: Call) -> bool:
    """Return whether runs that come to a call use amp too, and not only may."""
    guards = call.guards
    enabled = enabled_of(call) if call.name in ("autocast", "GradScaler") else None
    if enabled is not None:
        when_true, _ = truth_of(enabled, guards)
        if when_true is None:
            return False
        guards |= when_true
    uses: list[Initialization | Call] = [*trace.initializations(call)]
    uses += trace.scaled().with_call(call)
    return any(_are_nested(guards, use.guards) for use in uses) and not is_constant(enabled, False)


def _are_nested(some: Guards, others: Guards) -> bool:
    """Return whether one of two sets of guards has the other in it."""
    some, others = _chosen(some), _chosen(others)
    return some <= others or others <= some


def _chosen(guards: Guards) -> Guards:
    """Return guards without those of ``try``."""
    return frozenset(one for one in guards if one.answer or not is_of_try(one))
