"""Casts by hand, and calls that go past those of amp."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check import names
from amp_patch.tools.check.trace import Trace, is_module
from amp_patch.tools.check.values import Cast, Made, Value, flat

from .registry import rule

_REGIONS = {"amp.float_region", "amp.disable_casts"}
_OVERFLOW = (
    *("exp", "expm1", "log", "log2", "log10", "log1p", "pow", "square", "reciprocal", "rsqrt"),
    *("softmax", "log_softmax", "logsumexp", "cumsum", "prod"),
)


@rule(
    "half-model",
    "the model is cast to half by hand, which is what initialize does",
    "remove the cast: opt_level='O2' (float16) or 'O5' (bfloat16) stores the model in half",
)
def half_model(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``.half()``, ``.bfloat16()``, ``.to(torch.float16)`` of a model, before or after."""
    for call in trace.calls:
        is_half = isinstance(call.result, Cast) and call.result.dtype in names.HALVES
        if is_half and call.receiver is not None and trace.of_models(call.receiver, call):
            yield call.node, "a cast of the model to half"


@rule(
    "cast-model",
    "the model is cast after initialize, which undoes its level",
    "remove the cast; amp.deactivate() gives the model back in float32",
)
def cast_model(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``.float()``, ``.double()`` of a model that is initialized."""
    for call in trace.calls:
        if isinstance(call.result, Cast) and call.result.dtype not in names.HALVES:
            inits = trace.of_models(call.receiver, call) if call.receiver is not None else []
            if any(one.call.order < call.order for one in inits):
                yield call.node, f"a cast of the model to {call.result.dtype} after initialize"


@rule(
    "half-inputs",
    "the model's inputs are cast to half by hand",
    "pass float32 inputs: the level casts them where it should",
)
def half_inputs(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``model(x.half())``, in a run that initializes the model."""
    for call in trace.named("()"):
        inits = trace.of_models(call.receiver, call) if call.receiver is not None else []
        runs = [call.guards | one.call.guards for one in inits]
        given = (flat(value, run) for run in runs for value in call.arguments.values())
        if any(_is_half(one) for values in given for one in values):
            yield call.node, "a call of the model with inputs that were cast to half"


def _is_half(value: Value) -> bool:
    return isinstance(value, Cast) and value.dtype in names.HALVES and not is_module(value)


@rule(
    "forward-call",
    "model.forward() goes past the hooks that cast inputs and outputs",
    "call the model: model(inputs)",
)
def forward_call(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """A direct call of ``forward`` of a model that is initialized."""
    for call in trace.named(".forward"):
        if call.receiver is not None and trace.of_models(call.receiver, call):
            yield call.node, "model.forward()"


@rule(
    "half-range",
    "a function that overflows or rounds badly gets a tensor cast to half by hand",
    "compute it in float32: leave the cast out, or call .float() before",
)
def half_range(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """exp, log and the like of ``x.half()``."""
    functions = [f"torch.{name}" for name in _OVERFLOW]
    functions += [f"torch.nn.functional.{name}" for name in ("softmax", "log_softmax")]
    for call in trace.named(*functions, *(f".{name}" for name in _OVERFLOW)):
        tensor = call.receiver or call.arguments.get("input", 0)
        if isinstance(tensor, Cast) and _is_half(tensor) and trace.uses_amp(call):
            yield call.node, f"{call.name.rpartition('.')[2]} of a tensor in half"


@rule(
    "bce",
    "binary_cross_entropy of half probabilities, which O1 and O4 refuse on a GPU",
    "leave the sigmoid out and call binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss)",
)
def bce(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``F.binary_cross_entropy`` and ``nn.BCELoss``, of what was not cast to float32."""
    for call in trace.named("torch.nn.functional.binary_cross_entropy", "()"):
        if call.name == "()" and not _is_bce(call.receiver):
            continue
        inits = trace.initializations(call)
        if not any(one.is_at("O1", "O4") for one in inits) or _REGIONS & set(call.regions):
            continue
        given = call.arguments.get("input", 0)
        if given is not None and not _is_float(given):
            yield call.node, "binary_cross_entropy of probabilities"


def _is_bce(value: Value | None) -> bool:
    return isinstance(value, Made) and value.dotted == "torch.nn.BCELoss"


def _is_float(value: Value) -> bool:
    return isinstance(value, Cast) and value.dtype not in names.HALVES
