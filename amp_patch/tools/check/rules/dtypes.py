"""Casts by hand, and calls that go past those of amp."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check import names
from amp_patch.tools.check.trace import Call, Initialization, Trace, cast_by, is_module
from amp_patch.tools.check.values import Cast, Imported, Made, Value, Wrapper, flat, root

from .registry import rule

_REGIONS = {"amp.float_region", "amp.disable_casts"}
_DEFAULTS = ("torch.set_default_dtype", "torch.set_default_tensor_type")
_OVERFLOW = (
    *("exp", "expm1", "log", "log2", "log10", "log1p", "pow", "square", "reciprocal", "rsqrt"),
    *("softmax", "log_softmax", "logsumexp", "cumsum", "prod"),
)
_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("kl_div", "binary_cross_entropy_with_logits"),
)


@rule(
    "half-model",
    "the model is cast to half by hand, which is what initialize does",
    "remove the cast: opt_level='O2' (float16) or 'O5' (bfloat16) stores the model in half",
)
def half_model(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``.half()``, ``.to(torch.float16)`` of a model, before or after; a default dtype in half."""
    for call in trace.calls:
        cast = cast_by(call)
        is_half = cast is not None and cast.dtype in names.HALVES
        if is_half and call.receiver is not None and trace.of_models(call.receiver, call):
            yield call.node, "a cast of the model to half"
    for one in trace.named("amp.initialize"):
        for model in Initialization(one).models:
            if default := _default_dtype(trace, model):
                yield default.node, "a default dtype in half, in which the model is made"
            if isinstance(model, Wrapper) and model.by.startswith("apex.fp16_utils."):
                yield one.node, "amp.initialize of a model that network_to_half has cast"


def _default_dtype(trace: Trace, model: Value) -> Call | None:
    """Return the call that has made the default dtype half in which a model was made."""
    made = root(model)
    if not isinstance(made, Made) or made.source is None or not is_module(made):
        return None
    calls = trace.with_call(made.source, *_DEFAULTS)
    last = [one for one in calls if one.order < made.source.order][-1:]
    given = [value for one in last for value in one.arguments.values()]
    is_half = any(
        isinstance(one, Imported) and names.DTYPES.get(one.dotted) in names.HALVES for one in given
    )
    return last[0] if is_half else None


@rule(
    "cast-model",
    "the model is cast after initialize, which undoes its level",
    "remove the cast; amp.deactivate() gives the model back in float32",
)
def cast_model(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """``.float()``, ``.double()`` of a model that is initialized."""
    for call in trace.calls:
        cast = cast_by(call)
        if cast is not None and cast.dtype not in names.HALVES:
            inits = trace.of_models(call.receiver, call) if call.receiver is not None else []
            if any(one.call.order < call.order for one in inits):
                yield call.node, f"a cast of the model to {cast.dtype} after initialize"


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
    """A direct call of ``forward`` of a model whose hooks cast: O1 and O4 have none by default."""
    for call in trace.named(".forward"):
        inits = [] if call.receiver is None else trace.of_models(call.receiver, call)
        if any(map(_may_have_hooks, inits)):
            yield call.node, "model.forward()"


def _may_have_hooks(one: Initialization) -> bool:
    """Return whether a model may get hooks that cast, also where O1 is only an option's default."""
    given = one.call.arguments.get("opt_level", 3)
    is_option = any(value.default is not None for value in flat(given, one.call.guards))
    casts_outputs = "cast_model_outputs" in one.call.arguments.keywords
    return is_option or casts_outputs or not one.levels or one.is_at("O2", "O3", "O5")


@rule(
    "half-range",
    "a function that overflows or rounds badly gets a tensor cast to half by hand",
    "compute it in float32: leave the cast out, or call .float() before",
)
def half_range(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """exp, log, a loss and the like of ``x.half()``."""
    functions = [f"torch.{name}" for name in _OVERFLOW]
    functions += [f"torch.nn.functional.{name}" for name in ("softmax", "log_softmax", *_LOSSES)]
    for call in trace.named(*functions, *(f".{name}" for name in _OVERFLOW)):
        tensors = list(flat(call.receiver or call.arguments.get("input", 0), call.guards))
        if tensors and all(map(_is_half, tensors)) and trace.uses_amp(call):
            yield call.node, f"{call.name.rpartition('.')[2]} of a tensor in half"
    for block in trace.blocks:
        if block.loss is not None and _is_half(block.loss):
            yield block.call.node, "scale_loss of a loss in half"


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
