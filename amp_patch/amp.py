"""The functions that users call; each is a few lines over the session.

Signatures, defaults and order of apex.amp (NVIDIA); what is new is keyword-only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import arguments, levels, other_names, requested_level
from . import debug as debug
from .casting import regions
from .casting.rules import PROFILES
from .casting.torch_compile import never_trace
from .common import rules_file
from .common.call_site import errors_at_the_call, returned
from .debug import overflow_report, summary
from .debug.logs import logs
from .debug.trace import tracer
from .distributed.norms import clip_by_norm
from .distributed.process_groups import StepRanks
from .initialization import initialize_at
from .mistakes.clipping import accept_finite
from .optimizers.groups import params_of
from .requested_level import Resolved
from .scaling import loss_scaler
from .session import session
from .step.scaled_loss import ScaledLoss, open_scale, with_torchs_backward
from .step.unscaled_loss import UnscaledLoss
from .step.watched_backward import tell_of_leaf
from .user_functions import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_forward_method,
    register_half_function,
    register_library_function,
    register_promote_function,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it

__all__ = [
    "bfloat16_function",
    "clip_grad_norm_",
    "deactivate",
    "disable_casts",
    "float_function",
    "float_region",
    "half_function",
    "half_region",
    "initialize",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "overflow_report",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_forward_method",
    "register_half_function",
    "register_library_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
    "step_was_skipped",
    "summary",
]

if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        raise AttributeError(other_names.message(name), name=name, obj=sys.modules[__name__])


@errors_at_the_call
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int | str = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    init_scale: float | None = None,
    growth_factor: float | None = None,
    backoff_factor: float | None = None,
    growth_interval: int | None = None,
    hysteresis: int | None = None,
    rules: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    fused_step: bool = False,
    process_group: ProcessGroup | None = None,
    tensorboard: Any = None,
    wandb: Any = None,
    logger: logging.Logger | str | bool | None = None,
    trace_overflow: bool = False,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place.

    May be called again: for further models and optimizers, or at another level.

    Args:
        models: a `torch.nn.Module` in fp32, but for what is frozen, or a list or tuple of them. An
            empty list where no model has the weights: O1 and O4 cast in every function then.
        optimizers: None, a `torch.optim.Optimizer`, or a list or tuple of them. AdamW and Adam of
            torch on a GPU, given neither ``fused`` nor ``foreach``, get ``fused=True`` until
            `deactivate`, at all levels but O0: no step waits then to hear of an overflow.
        enabled: False makes this call and every later one without effect.
        opt_level: "O0" to "O5".
        cast_model_type: dtype to store and feed the models in; False leaves them alone.
        patch_torch_functions: whether torch's functions cast; decided by the level.
        keep_batchnorm_fp32: whether batch norms stay in fp32 (O0, O2, O3, O5).
        master_weights: whether the optimizer steps fp32 copies (O0, O2, O3, O5).
        loss_scale: "dynamic" or a fixed factor of the loss.
        cast_model_outputs: dtype of floating outputs; fp32 where the model is cast.
        num_losses: how many loss_ids `scale_loss` gets for these optimizers.
        verbosity: 1 prints the level's options and a line for each skipped step, "skips" these
            lines alone, 0 nothing; 2 adds a line for every tensor that O1 and O4 cast.
        min_loss_scale: floor of a dynamic scale; None stands for 2**-24.
        max_loss_scale: cap of a dynamic scale.
        init_scale: a dynamic scale's first value; None stands for 2**16.
        growth_factor: multiplies the scale after ``growth_interval`` finite backward passes (2).
        backoff_factor: multiplies the scale at an overflow (0.5).
        growth_interval: finite backward passes in a row until the scale grows (2000).
        hysteresis: overflows until the scale backs off, that one included (1: at once).
        rules: function -> "half", "half_out", "float", "promote", "bfloat16" or "off", for O1 and
            O4: the bare name of a torch function ("softmax"), or a dotted path. Or "fast-norms",
            a profile of such rules: norms and softmax in half where torch's kernels round once
            (docs/rules.md). Or a rules file, by its path, or what it holds, ``{"opt_level": ...,
            "profile": ..., "functions": ..., "modules": ..., "inputs": ...}``: its level takes the
            place of ``opt_level``, ``functions`` stand above the profile, ``modules`` maps paths in
            the model, or patterns ("blocks.*.norm"), to "float" or "half" at every level
            (docs/tune.md), and ``inputs`` maps arguments of a model's ``forward``, or parts of one
            ("batch.boxes"), to "off": its call leaves them as they are.
        fused_step: step torch's AdamW, Adam, SGD, RMSprop and Adagrad, and `FusedLAMB`, in one pass
            over half gradients, masters, state and half weights (O2, O5). The masters' gradients
            are made only where they are read.
        process_group: of the ranks that skip a step together. Found by itself for FSDP, tensor
            parallel and ZeRO; not needed where `DistributedDataParallel` averages the gradients; to
            be given where parts of one model are on several ranks (a pipeline). All ranks are to
            make equally many blocks then, for the end of each is a collective of theirs: not so at
            a scale of 1, nor with ``delay_unscale=True``, for all blocks of a step but the last.
        tensorboard: a folder or a ``SummaryWriter``: loss scales, skipped steps, and the parameters
            that overflowed are written there, until `deactivate` or the end of the process.
        wandb: True for the run of ``wandb.init``, or a run: the same for Weights & Biases.
        logger: a ``logging.Logger``, the name of one, or True for "amp_patch": the same in lines.
        trace_overflow: find the cause of each overflow for `overflow_report`: the calls of the
            models are kept until the step, and run again. Training goes on as without.

    Returns:
        ``(models, optimizers)``, each as it came in: one, a list or a tuple. Only the models where
        ``optimizers`` is None.

    Raises:
        TypeError: models, optimizers, enabled, opt_level, verbosity, rules, fused_step or
            trace_overflow of a wrong type; an optimizer that ``fused_step`` does not know;
            no such logger; one model without optimizer, unpacked.
        ImportError: the package of a logger is missing.
        RuntimeError: an unknown level or refused override; half weights that are not frozen; a
            parallel wrapper at O2, O3 or O5; an optimizer passed before.
        ValueError: a scale, factor, count or rule out of range; a rule of no function or module; a
            file for a folder.
        FileNotFoundError: no such profile or rules file.
    """
    result = returned(models, optimizers)
    if not arguments.enabled_of(enabled):
        session.disable(optimizers)
        return result
    given, resolved = _resolved(
        rules,
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
    )
    with _observing(models, trace_overflow, tensorboard=tensorboard, wandb=wandb, logger=logger):
        initialize_at(
            resolved,
            models,
            optimizers,
            rules=given,
            num_losses=num_losses,
            verbosity=verbosity,
            fused_step=fused_step,
            process_group=process_group,
            given_scale=loss_scale,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
        )
    return result


def _resolved(rules: Any, opt_level: Any, **options: Any) -> tuple[rules_file.Rules, Resolved]:
    """Return the rules that the user gave, and the level that they, or the call, name."""
    given = rules_file.rules_of(rules, levels.OPT_LEVELS, PROFILES)
    return given, requested_level.resolve_forced(opt_level, given.opt_level, **options)


@contextlib.contextmanager
def _observing(models: Any, trace_overflow: Any, **loggers: Any) -> Iterator[None]:
    """Check loggers and the tracer, and attach them when the models have been initialized."""
    traces = arguments.trace_overflow_of(trace_overflow)
    sinks = logs.prepare(**loggers)
    yield
    logs.attach(sinks)
    if traces:
        tracer.start(arguments.models_of(models, allow_half=True))


def deactivate() -> None:
    """Restore everything patched. Models and optimizers stay usable, in fp32.

    At O2, O3 and O5 the same Parameter objects hold fp32 values again (the masters' where there
    are any) and the optimizer steps them, its state kept. What was frozen in half is so
    again. Without effect before `initialize`.
    """
    session.deactivate()


@never_trace
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[Tensor]:
    """Scale a loss for its backward; on exit unscale and check the gradients it wrote.

    ``with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``

    Args:
        loss: tensor of any shape and floating dtype.
        optimizers: one, or a list or tuple: those whose gradients this backward writes.
        loss_id: which loss scaler, below ``num_losses``.
        model: not used; apex has it.
        delay_unscale: leave the gradients scaled, for further backward passes to add to. The last
            `scale_loss` before the step leaves it out.
        delay_overflow_check: unscale, but look at the flags only when the step (or the next
            `scale_loss` of the optimizer) comes.

    Returns:
        A context manager that yields ``loss * scale`` in fp32 (a float64 loss stays float64).

    Raises:
        RuntimeError: `initialize` was not called with these optimizers, or a block inside another
            of the same optimizer.
        TypeError: loss is not a floating tensor, optimizers are none, or loss_id is no int.
        IndexError: no such loss_id.
        FloatingPointError: from the exit, when two steps in a row overflow at the floor.
    """
    steps = session.lookup.steps_of(optimizers, "with amp.scale_loss(loss, optimizer)")
    if steps is None:
        return contextlib.nullcontext(with_torchs_backward(loss))
    loss = with_torchs_backward(arguments.loss_of(loss))
    if loss.grad_fn is None and loss.requires_grad:
        tell_of_leaf(loss)
    may_be_plain = not delay_unscale and not delay_overflow_check
    scaling = session.passes.no_scaling(steps, loss_id, loss.device) if may_be_plain else None
    if scaling is not None:
        return UnscaledLoss(loss, session.cache, scaling)
    backward_pass = session.passes.of_loss(steps, loss_id, loss.device, delay_overflow_check)
    return ScaledLoss(loss, backward_pass, delay_unscale, delay_overflow_check)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over what the optimizer steps: fp32 masters at O2 and O5, else the parameters.

    In the order of its ``param_groups``. What is written to a master until the next step is
    rounded into the model's parameter.

    Raises:
        TypeError: not one optimizer.
    """
    arguments.optimizer_of(optimizer, "amp.master_params()")
    return _shown_masters(session.optimizers.originals_of(optimizer))


def _shown_masters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield them as `master_params` does; what asks for the first of them tells who gets them.

    A generator, as apex returns: torch warns where an exhausted one is clipped.
    """
    step = session.optimizers.steps.get(optimizer)
    if step is not None and step.masters is not None:
        step.backward.shown.show()
    yield from params_of(optimizer)


def clip_grad_norm_(
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Clip the unscaled gradients of an optimizer to a total norm, in place.

    Between `scale_loss` and the step. After an overflow the gradients are not finite, and the step
    is skipped. Where gradients are spread over ranks (FSDP, tensor parallel, ZeRO) the norm is that
    of all of them, and every rank must call this.

    Args:
        optimizer: as `initialize` returned it, or any other.
        max_norm: the largest norm allowed, in units of the unscaled gradients.
        norm_type: the p of the p-norm; ``float("inf")`` for the largest magnitude.
        error_if_nonfinite: raise where the norm is inf or NaN, for which the device is waited for.
            Nothing is clipped then. An overflow, whose step is skipped, is no error otherwise.
        process_group: of ranks that each hold another part of the model (the stages of a pipeline),
            whose gradients are taken together. All of them must call this.

    Returns:
        The total norm before clipping, 0-dim fp32 (float64 for float64 gradients).

    Raises:
        TypeError: not one optimizer, a norm that is no number, or no process group.
        ValueError: a negative norm or NaN.
        RuntimeError: the gradients are still scaled (``delay_unscale``), or ``error_if_nonfinite``.
    """
    arguments.optimizer_of(optimizer, "amp.clip_grad_norm_()", ", max_norm")
    optimizer = session.optimizers.originals_of(optimizer)
    max_norm, norm_type = arguments.norms_of(max_norm, norm_type)
    stages = arguments.process_group_of(process_group, "amp.clip_grad_norm_(optimizer, max_norm")
    step = session.optimizers.steps.get(optimizer)
    owners = [] if step is None else [step.backward]
    accept = functools.partial(accept_finite, owners) if error_if_nonfinite else None
    if step is None:
        grads = [param.grad for param in params_of(optimizer) if param.grad is not None]
        total = clip_by_norm(grads, max_norm, norm_type, StepRanks(), stages, accept=accept)
    else:
        step.backward.refuse_scaled("amp.clip_grad_norm_()")
        total = step.backward.clip(max_norm, norm_type, stages, accept)
    session.observers.clipped(optimizer, total)
    return total


def step_was_skipped(optimizer: Optimizer) -> bool:
    """Return whether the last ``optimizer.step()`` was skipped after an overflow.

    Raises:
        TypeError: not one optimizer.
        RuntimeError: `initialize` was not called with this optimizer.
    """
    steps = session.lookup.steps_of(optimizer, "amp.step_was_skipped(optimizer)")
    if steps is None:
        return False
    arguments.optimizer_of(optimizer, "amp.step_was_skipped()")
    return steps[0].skip.was_skipped


def loss_scale(loss_id: int | None = None) -> float:
    """Return the factor that a loss is multiplied by; 1.0 where amp is disabled.

    Args:
        loss_id: position in the list of this process's loss scalers. None inside of a block of
            `scale_loss`, as hooks of its backward are: the block's. None elsewhere: 0.

    Raises:
        RuntimeError: `initialize` was not called.
        TypeError, IndexError: no such loss_id.
    """
    if session.lookup.is_off("amp.loss_scale()"):
        return 1.0
    open_block = open_scale() if loss_id is None else None
    if open_block is not None:
        return open_block
    session.optimizers.settle()
    return session.scalers[session.optimizers.scalers.check(loss_id or 0)].loss_scale()


def state_dict(
    destination: OrderedDict[str, dict[str, Any]] | None = None,
) -> OrderedDict[str, dict[str, Any]]:
    """Return the state of the loss scalers, in apex's format.

    Args:
        destination: filled and returned if given.

    Returns:
        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``, with ``"hysteresis"``
        where that is above 1; empty where amp is disabled.

    Raises:
        RuntimeError: `initialize` was not called.
    """
    result = OrderedDict() if destination is None else destination
    if not session.lookup.is_off("amp.state_dict()"):
        session.optimizers.settle()
        result.update(loss_scaler.state_dict(session.scalers))
    return result


@errors_at_the_call
def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Set the loss scalers from `state_dict`, apex's, or a `torch.amp.GradScaler`'s.

    Where it holds another number of scalers apex's warnings are printed (``verbosity``); of one
    that holds none, what a disabled run saves, a warning is logged as well.

    Raises:
        RuntimeError: `initialize` was not called, or a key that is no loss scaler's.
        TypeError, ValueError: no state dict, or an entry that holds no scale.
    """
    if not session.lookup.is_off("amp.load_state_dict()"):
        arguments.refuse_no_state(state_dict)
        session.optimizers.settle()
        loss_scaler.load_state_dict(session.scalers, state_dict, session.announce)


@regions.without_arguments
def disable_casts() -> regions.CastsOff:
    """Switch the casts of O1/O4 off for this thread; also a decorator. May be nested."""
    return regions.CastsOff()


@regions.without_arguments
def half_region() -> regions.HalfRegion:
    """Compute in the level's half dtype (fp16 at O0) inside the block, at every level.

    For this thread; may be nested, the innermost region decides; also a decorator. Functions
    without a half kernel on the CPU run in fp32 there.
    """
    return regions.HalfRegion()


@regions.without_arguments
def float_region() -> regions.FloatRegion:
    """Compute in fp32 inside the block, at every level; see `half_region`."""
    return regions.FloatRegion()
