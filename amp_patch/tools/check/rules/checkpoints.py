"""What a checkpoint holds: the state of amp belongs beside that of the optimizer."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.trace import Call, Trace
from amp_patch.tools.check.values import Items, Table, Value, alternatives, flat, root

from .registry import rule


@rule(
    "amp-not-saved",
    "the state of the optimizer is saved, and that of amp is not",
    "save 'amp': amp.state_dict() beside it",
)
def amp_not_saved(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A torch.save of an optimizer's state in a script that never asks for amp's."""
    if any(trace.named("amp.state_dict")):
        return
    for call in trace.named("torch.save"):
        for value in (one for given in call.arguments.values() for one in _inside(given)):
            source = value.source
            if source is not None and source.name == ".state_dict" and _is_scaled(trace, source):
                yield call.node, "torch.save of the optimizer's state without amp's"
                break


@rule(
    "amp-not-loaded",
    "the state of the optimizer is loaded, and that of amp is not",
    "call amp.load_state_dict(checkpoint['amp']) after amp.initialize",
)
def amp_not_loaded(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A load of an optimizer's state in a script that never loads amp's."""
    if any(trace.named("amp.load_state_dict")):
        return
    loads = trace.named(".load_state_dict")
    again = {call.node for call in loads if _is_of_this_run(call)}  # not in a loop's first round
    for call in loads:
        if _is_scaled(trace, call) and call.node not in again:
            yield call.node, "the optimizer's load_state_dict without amp's"


@rule(
    "amp-loaded-early",
    "the state of amp is loaded before initialize, which makes what holds it",
    "call amp.load_state_dict(checkpoint['amp']) after amp.initialize",
)
def amp_loaded_early(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """An ``amp.load_state_dict`` before each initialize of its run."""
    for call in trace.named("amp.load_state_dict"):
        inits = trace.with_call(call, "amp.initialize", "amp.init")
        inits = [one for one in inits if one.run == call.run]
        if inits and all(call.order < one.order for one in inits):
            yield call.node, "amp.load_state_dict before amp.initialize"


@rule(
    "model-pickled",
    "the model is saved as a whole, with its weights in half, and not its state",
    "save model.state_dict(), which has the float32 values, or a copy.deepcopy(model)",
)
def model_pickled(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A torch.save or pickle of a model that initialize has stored in half."""
    for call in trace.named("torch.save", "pickle.dump", "pickle.dumps"):
        for value in _inside(call.arguments.get("obj", 0) or Value()):
            inits = trace.of_models(value, call)
            if any(one.is_at("O2", "O3", "O5") and one.call.order < call.order for one in inits):
                yield call.node, f"{call.name} of the model itself"
                break


def _is_of_this_run(load: Call) -> bool:
    """Return whether a state was taken in the run that loads it, for a search of rates say."""
    given = load.arguments.get("state_dict", 0)
    return any(_is_state(one) for value in flat(given, load.guards) for one in (value, *value.deps))


def _is_state(value: Value) -> bool:
    """Return whether a value is what ``state_dict()`` returned, or a copy of that."""
    source = value.source
    if source is not None and source.name == "copy.deepcopy":
        return any(map(_is_state, source.arguments.values()))
    return source is not None and source.name == ".state_dict"


def _is_scaled(trace: Trace, call: Call) -> bool:
    """Return whether a call is a method of an optimizer whose losses have a scale that moves."""
    if call.receiver is None:
        return False
    inits = trace.initializations_of(call.receiver, call)
    optimizers = [root(one) for init in inits for one in init.optimizers if init.scales]
    return root(call.receiver) in optimizers


def _inside(value: Value, depth: int = 4) -> Iterator[Value]:
    """Yield what a value may be, and what is in it, in lists and dicts."""
    for _, one in alternatives(value):
        yield one
        held: list[Value] = one.items if isinstance(one, Items) else []
        held = [*one.entries.values()] if isinstance(one, Table) else held
        for inner in held if depth else ():
            yield from _inside(inner, depth - 1)
