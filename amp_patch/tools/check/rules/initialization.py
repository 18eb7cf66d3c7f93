"""Calls of ``amp.initialize``: what they are given, when, and how often."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from amp_patch.tools.check import names
from amp_patch.tools.check.trace import (
    Call,
    Initialization,
    Trace,
    cast_by,
    is_module,
    is_optimizer,
    is_part_of,
    owners_of,
)
from amp_patch.tools.check.values import Cast, Const, Instance, Items, Made, Value, Wrapper, root
from amp_patch.tools.options import LEVELS

from .registry import line_of, rule

#: Levels that store the model in half.
_HALF = ("O2", "O3", "O5")
#: Half of the smallest number above 0 of float16: less is rounded to 0.
_ZERO_IN_HALF = 2.0**-25
#: What initialize returns again, in this order.
_GIVEN = ("models", "optimizers")
#: They make state for their parameters at once; others do in the first step.
_WITH_STATE = {"torch.optim.Adagrad"}
#: The optimizers of torch that divide by a root plus eps: where eps stands, and what it is else.
_DIVIDING = {
    **{
        f"torch.optim.{name}": (3, 1e-8)
        for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "SparseAdam")
    },
    "torch.optim.Adagrad": (5, 1e-10),
}


def _all(trace: Trace) -> Iterator[Initialization]:
    found = map(Initialization, trace.named("amp.initialize"))
    return (one for one in found if one.is_enabled)


@rule(
    "amp-import",
    "initialize is looked for in amp_patch or apex itself, or in torch's amp, where it is not",
    "write from amp_patch import amp, and amp.initialize(model, optimizer)",
)
def amp_import(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``import amp_patch as amp``, the package's name, or an import of torch's amp after ours."""
    wrong = ("amp_patch", "apex", "torch.amp", "torch.cuda.amp")
    for call in trace.named(*(f"{one}.initialize" for one in wrong)):
        yield call.node, f"{call.name}()"


@rule(
    "opt-level",
    "opt_level is none of the levels, or stands in the place of enabled",
    "write opt_level='O0', 'O1', 'O2', 'O3', 'O4' or 'O5', with the capital letter O",
)
def opt_level(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A level that is a literal, or the default of an option, and one in another's place."""
    for one in _all(trace):
        enabled = one.call.arguments.get("enabled", 2)
        if isinstance(enabled, Const) and isinstance(enabled.value, str):
            yield one.call.node, f"{enabled.value!r} in the place of enabled, the third argument"
        for level in one.levels:
            if level.value is not None and level.value not in LEVELS:
                yield level.node or one.call.node, f"opt_level={level.value!r}"


@rule(
    "initialize-after-wrapping",
    "initialize gets a model that is wrapped for several GPUs, and stores its parameters in half",
    "call amp.initialize first, then wrap the model that it returns",
)
def initialize_after_wrapping(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A model in DistributedDataParallel or DataParallel, at O2, O3 or O5."""
    for one in _all(trace):
        if one.is_at(*_HALF) and any(_is_parallel(model) for model in one.models):
            yield one.call.node, "amp.initialize of a model in a parallel wrapper"


def _is_parallel(model: Value) -> bool:
    while isinstance(model, Wrapper | Cast):
        if isinstance(model, Wrapper) and model.by == "parallel":
            return True
        model = model.base
    return False


@rule(
    "initialize-twice",
    "initialize gets the same optimizer or model again, in a loop or in a second call",
    "call amp.initialize once, before the loop, with all; amp.deactivate() before another",
)
def initialize_twice(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """The same optimizer, or a model that is in half then, in runs that make both calls."""
    ends = [call.order for call in trace.named("amp.deactivate")]
    for first, second in _again(trace):
        if not (first.call.guards <= second.call.guards or second.call.guards <= first.call.guards):
            continue
        if any(first.call.order < end < second.call.order for end in ends):
            continue
        is_loop = first.call.node is second.call.node
        where = "in a loop" if is_loop else f"after that in line {line_of(first.call.node)}"
        if {*map(root, first.optimizers)} & {*map(root, second.optimizers)}:
            yield second.call.node, f"amp.initialize of the same optimizer {where}"
        elif first.is_at(*_HALF) and {*map(root, first.models)} & {*map(root, second.models)}:
            yield second.call.node, f"amp.initialize of a model in half {where}"


def _again(trace: Trace) -> list[tuple[Initialization, Initialization]]:
    """Return the pairs of calls that get the same optimizer or model, in order."""
    calls: dict[Value, list[Initialization]] = {}
    for one in _all(trace):
        for value in {*map(root, one.optimizers), *map(root, one.models)}:
            calls.setdefault(value, []).append(one)
    pairs = (pair for each in calls.values() for pair in itertools.combinations(each, 2))
    return sorted(dict.fromkeys(pairs), key=lambda pair: [one.call.order for one in pair])


@rule(
    "unpacking",
    "what initialize returns is unpacked as something else",
    "write model, optimizer = amp.initialize(model, optimizer), or "
    "model = amp.initialize(model) where no optimizer is given",
)
def unpacking(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A pair that is used as a model, more than two or swapped; a model that is unpacked."""
    for call in trace.named("=initialize"):
        one = Initialization(call)
        parts = call.arguments.keywords["="]
        count = parts.value if isinstance(parts, Const) and not call.arguments.is_open else 1
        is_list = isinstance(call.arguments.get("models", 0), Items)
        if count > 1 and not one.optimizers and not is_list:
            yield call.node, "amp.initialize without an optimizer, which returns the model only"
        elif count > 2 and one.optimizers:
            yield call.node, "amp.initialize with an optimizer, which returns a pair"
        elif _is_permuted(trace, call) and not any(map(is_optimizer, one.models)):
            yield call.node, "the result of amp.initialize in another order than what it gets"
    pairs = {one.call.result: one for one in _all(trace) if one.optimizers}
    for call in trace.calls:
        if isinstance(call.receiver, Items) and call.receiver in pairs:
            node = pairs[call.receiver].call.node
            yield node, "amp.initialize with an optimizer, which returns a pair"


def _is_permuted(trace: Trace, unpacking: Call) -> bool:
    """Return whether the very names that a call is given stand left of it in another order."""
    call = trace.calls[unpacking.order - 1].node
    if not isinstance(call, ast.Call):
        return False
    keywords = {one.arg: one.value for one in call.keywords}
    given = [*call.args[:2], *(keywords[name] for name in _GIVEN if name in keywords)]
    before, after = list(_names(ast.Tuple(given))), list(_names(unpacking.node))
    return before != after and sorted(before) == sorted(after)


def _names(node: ast.AST) -> Iterator[str]:
    """Yield what stands in a tuple or list, in order."""
    if isinstance(node, ast.Tuple | ast.List):
        for one in node.elts:
            yield from _names(one)
    else:
        yield ast.unparse(node)


@rule(
    "other-model",
    "the optimizer steps none of the models that initialize gets",
    "give initialize the models whose parameters the optimizer was made with",
)
def other_model(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """An optimizer that was made with the parameters of another known model."""
    for one in _all(trace):
        for optimizer in one.optimizers:
            owners = owners_of(optimizer)
            known = [*owners, *map(root, one.models)]
            if not owners or not one.models or not all(map(_is_seen, known)):
                continue
            others = [other for other in one.optimizers if other is not optimizer]
            if not _steps_any(optimizer, one.models) and not all(
                any(_steps_any(other, [model]) for other in others) for model in one.models
            ):
                yield one.call.node, "amp.initialize of a model and the optimizer of another one"


def _steps_any(optimizer: Value, models: list[Value]) -> bool:
    """Return whether an optimizer was made with parameters of one of some models."""
    return any(is_part_of(owner, model) for owner in owners_of(optimizer) for model in models)


def _is_seen(model: Value) -> bool:
    """Return whether an object is one that nothing else returns."""
    if isinstance(model, Made):
        is_new = names.is_class(model.dotted.removesuffix(".from_pretrained"))
        return is_new or is_module(model) or model.dotted == "copy.deepcopy"
    return isinstance(model, Instance)


@rule(
    "moved-late",
    "the model is moved to its device after its optimizer has got state, which stays behind",
    "move the model first, then make the optimizer and load its state",
)
def moved_late(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """The first move of a model whose optimizer holds tensors for its parameters already.

    Without state a late move is right: torch moves the very parameters that the optimizer holds.
    """
    moved: set[Value] = set()
    for call in trace.named(".cuda", ".to"):
        if call.receiver is None or not _is_move(call):
            continue
        model = root(call.receiver)
        inits = [] if model in moved else trace.of_models(model, call)
        moved.add(model)
        for one in inits:
            for optimizer in one.optimizers:
                state = _state_before(trace, root(optimizer), call)
                if state and model in owners_of(optimizer) and not _follows(one, call):
                    yield call.node, f"the move of a model whose optimizer has state (line {state})"


def _state_before(trace: Trace, optimizer: Value, move: Call) -> int | None:
    """Return the line in which an optimizer has got state before a move; None if it has none.

    Where it has stepped since, the model was on its device: after training, before a search.
    """
    made = optimizer.source
    calls = trace.with_call(move, ".load_state_dict")
    gave = [call for call in calls if call.receiver and root(call.receiver) is optimizer]
    gave += [made] if isinstance(optimizer, Made) and optimizer.dotted in _WITH_STATE else []
    steps = trace.with_call(move, ".step")
    own = [one.order for one in steps if one.receiver and root(one.receiver) is optimizer]
    last = max((order for order in own if order < move.order), default=-1)
    return next((line_of(one.node) for one in gave if one and last < one.order < move.order), None)


def _follows(one: Initialization, move: Call) -> bool:
    """Return whether the masters are there already: they and their state follow a model."""
    return one.call.order < move.order and (not one.levels or one.is_at("O2", "O5"))


def _is_move(call: Call) -> bool:
    given = call.arguments
    if cast_by(call) is not None or call.name == ".to" and "memory_format" in given.keywords:
        return False
    devices = [one for one in given.values() if isinstance(one, Const)]
    return not any(one.value == "cpu" for one in devices)


@rule(
    "adam-eps",
    "at O3 the eps of Adam, RMSprop, Adagrad and the like is 0 in float16, and 0 / 0 is NaN",
    "train at O2, or give the optimizer eps=1e-4, which keeps NaN out and no more",
)
def adam_eps(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """Optimizers of torch that divide by a root plus eps."""
    for one in _all(trace):
        for optimizer in map(root, one.optimizers if one.is_at("O3") else ()):
            made = optimizer.source
            if made is None or made.arguments.is_open or not isinstance(optimizer, Made):
                continue
            if optimizer.dotted not in _DIVIDING:
                continue
            name = optimizer.dotted.rpartition(".")[2]
            place, default = _DIVIDING[optimizer.dotted]
            eps = made.arguments.get("eps", place) or Const(default)
            if isinstance(eps, Const) and _is_zero(eps.value) and not _is_fused_adam(name, made):
                yield made.node, f"{name} with eps={eps.value} at O3"


def _is_fused_adam(name: str, made: Call) -> bool:
    """Return whether eps is added in float32, by torch's fused kernels."""
    fused = made.arguments.keywords.get("fused")
    return name in ("Adam", "AdamW") and isinstance(fused, Const) and fused.value is True


def _is_zero(eps: object) -> bool:
    return isinstance(eps, float) and eps < _ZERO_IN_HALF
