"""What ``initialize`` and ``scale_loss`` are given in the place of models, optimizers, losses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from amp_patch.tools.check.guards import Guards
from amp_patch.tools.check.trace import Trace, is_module, is_optimizer
from amp_patch.tools.check.values import (
    Items,
    Made,
    Params,
    Table,
    Value,
    alternatives,
    root,
)

from .registry import rule

#: The names that each takes arguments by: amp_patch's, apex's and those of ROCm's apex.
_TAKEN = {
    "amp.initialize": frozenset(
        {
            *("models", "optimizers", "enabled", "opt_level", "cast_model_type"),
            *("patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32"),
            *("master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity"),
            *("min_loss_scale", "max_loss_scale", "init_scale", "growth_factor", "backoff_factor"),
            *("growth_interval", "hysteresis", "rules", "fused_step", "process_group"),
            *("tensorboard", "wandb", "logger", "trace_overflow"),
        }
    ),
    "amp.scale_loss": frozenset(
        {"loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check"}
    ),
}


@rule(
    "argument",
    "initialize or scale_loss gets something else than models, optimizers and a loss, or by a name "
    "that it has not",
    "write amp.initialize(model, optimizer) and amp.scale_loss(loss, optimizer)",
)
def argument(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    """Arguments in the wrong order or of other names, parameters, a number for a loss."""
    for call in (*trace.named("amp.initialize"), *trace.named("amp.scale_loss")):
        # what ** adds may be of a dict that names were taken out of, or whose keys nobody knows
        for name in (one.arg for one in getattr(call.node, "keywords", ())):
            if name is not None and name not in _TAKEN[call.name]:
                yield call.node, f"{call.name}({name}=...), which is none of its arguments"
        is_initialize = call.name == "amp.initialize"
        for place, name, wanted in (
            (0, "models", "model") if is_initialize else (0, "loss", "loss"),
            (1, "optimizers", "optimizer"),
        ):
            if what := _wrong(call.arguments.get(name, place), wanted, call.guards):
                yield call.node, f"{call.name}() with {what} in the place of the {wanted}"
    yield from _of_other_calls(trace)


def _of_other_calls(trace: Trace) -> Iterator[tuple[ast.AST, str]]:
    for call in trace.named("amp.scale_loss"):
        if isinstance(call.arguments.get("loss", 0), Items | Table):
            yield call.node, "amp.scale_loss() with several losses, whose sum it takes"
    for call in trace.named("amp.master_params", "amp.clip_grad_norm_", "amp.step_was_skipped"):
        given = call.arguments.get("optimizer", 0)
        if given is not None and (what := _what(given, "optimizer")):
            yield call.node, f"{call.name}() with {what} in the place of the optimizer"


def _wrong(value: Value | None, wanted: str, guards: Guards) -> str:
    """Return what is not wanted of a value, or of the list that it is; "" where it may be right."""
    found = []
    for _, one in alternatives(value, guards):
        held = one.items if isinstance(one, Items) else []
        found.append(
            next(filter(None, (_wrong(item, wanted, guards) for item in held)), "")
            or _what(one, wanted)
        )
    return found[0] if all(found) and found else ""


#: Make a tensor of a number, of which no backward comes to a model.
_OF_NUMBERS = ("torch.tensor", "torch.as_tensor", "torch.autograd.Variable")


def _what(value: Value, wanted: str) -> str:
    """Return what a value is for sure; "" where that is wanted, or not known."""
    made = root(value)
    dotted = made.dotted if isinstance(made, Made) else ""
    source = "" if made.source is None else made.source.name
    found = {
        "parameters": isinstance(made, Params),
        "a scheduler": dotted.startswith("torch.optim.lr_scheduler."),
        "an optimizer": is_optimizer(made) and wanted != "optimizer",
        "a model": is_module(made) and wanted != "model",
        "a number": source in (".item", "builtins.float"),
        "a detached tensor": source == ".detach" and wanted == "loss",
        "a tensor without a graph": source in _OF_NUMBERS and wanted == "loss",
    }
    return next((name for name, is_so in found.items() if is_so), "")
