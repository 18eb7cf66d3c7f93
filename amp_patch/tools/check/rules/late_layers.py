"""Layers and parameters that come to the model after ``initialize``."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from amp_patch.tools.check import names
from amp_patch.tools.check.trace import Call, Initialization, Trace, is_module, lies_in
from amp_patch.tools.check.values import Cast, Instance, Made, Value, flat, root

from .registry import rule

#: Methods that put a module into another, and where it stands among their arguments.
_METHODS = {".add_module": 1, ".register_module": 1, ".append": 0, ".insert": 1}
_METHODS |= {".register_parameter": 1}
#: How the classes of `torch.nn` begin that have weights, or hold layers.
_WITH_WEIGHTS = (
    *("Adaptive", "BatchNorm", "Bilinear", "Conv", "Embedding", "GRU", "GroupNorm", "LSTM"),
    *("LayerNorm", "Lazy", "Linear", "Module", "Multihead", "PReLU", "RMSNorm", "RNN"),
    *("Sequential", "SyncBatchNorm", "Transformer"),
)


@rule(
    "replaced-layer",
    "a layer is put into the model after initialize, which neither casts nor steps it",
    "replace layers before amp.initialize, and before the optimizer is made",
)
def replaced_layer(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``model.fc = nn.Linear(...)``, ``model.layers.append(...)``, ``nn.Parameter(...)``, late."""
    for call in trace.calls:
        owner, new = _put(call)
        if owner is None or new is None or not _has_weights(new):
            continue
        for one in trace.initializations(call):
            is_new = _order_of(new) > one.call.order
            is_inside = any(lies_in(owner, model) for model in one.models)
            is_late = one.call.order < call.order and is_new and is_inside
            if is_late and not (_is_served(new, one) and _is_stepped(trace, new)):
                yield call.node, f"a new layer, {ast.unparse(call.node)}, after amp.initialize"


def _put(call: Call) -> tuple[Value | None, Value | None]:
    """Return a module and what a call puts into it; (None, None) for another call."""
    given = call.arguments.positional
    if call.name == "builtins.setattr" and len(given) == 3:
        return given[0], given[2]
    if call.name in _METHODS:
        place = _METHODS[call.name]
        return call.receiver, given[place] if place < len(given) else None
    if call.name.startswith("=") and call.name != "=initialize":
        return call.receiver, given[0]
    return None, None


def _order_of(new: Value) -> float:
    """Return when a module was made; where that is not known, it is taken for new."""
    made = root(new)
    if isinstance(made, Instance):
        return made.order
    return math.inf if new.source is None else new.source.order


def _has_weights(new: Value) -> bool:
    made = root(new)
    if isinstance(made, Made) and made.dotted.startswith("torch.nn."):
        name = made.dotted.rpartition(".")[2]
        return name == "Parameter" or (is_module(made) and name.startswith(_WITH_WEIGHTS))
    return is_module(made)


def _is_served(new: Value, one: Initialization) -> bool:
    """Return whether a level takes what is new as it is, or it has the dtype that it needs."""
    is_parameter = isinstance(root(new), Made) and not is_module(new)
    is_half = isinstance(new, Cast) and new.dtype in names.HALVES
    return is_parameter or is_half or not one.is_at("O2", "O3", "O5")


def _is_stepped(trace: Trace, new: Value) -> bool:
    """Return whether an optimizer is given what is new."""
    made = root(new)
    calls = trace.named(".add_param_group")
    given = [one for call in calls for value in call.arguments.values() for one in flat(value)]
    return any(one is made or made in one.deps for one in given)
