"""Parallel wrappers that stand around a model before `amp.initialize` gets it, or share it late.

They go on with a model whose parameters stay as they are. Where these are stored in another dtype,
the wrapper would go on with what they were, and the ranks train apart without a word. So they would
where a wrapper shares gradients in memory of its own, for a block of ``scale_loss`` sets aside what
was there before it. One that steps in the backward steps what no block has unscaled. Knows modules
of torch; nothing of what was prepared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from amp_patch.common.living_objects import living_modules
from amp_patch.distributed.process_groups import is_on
from amp_patch.levels import OptLevel


def wrappers_of(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the parallel wrappers that are, or are in, some models, or that hold one's parameters.

    Around a model that is given without its `nn.DataParallel` there may be one: this makes its
    replicas anew at each forward.
    """
    inside = [one for model in models for one in model.modules()]
    wrappers: list[nn.Module] = [
        one for one in inside if isinstance(one, (DataParallel, DistributedDataParallel))
    ]
    if not is_on():
        return wrappers
    own = {id(param) for model in models for param in model.parameters()}
    known = set(map(id, wrappers))
    return wrappers + [
        one
        for one in living_modules(DistributedDataParallel)
        if id(one) not in known and any(id(param) in own for param in one.parameters())
    ]


def refuse(wrappers: Iterable[nn.Module], models: Iterable[nn.Module], level: OptLevel) -> None:
    """Raise for wrappers around models whose parameters a level stores in another dtype.

    And for those that share gradients in memory of their own, where losses are scaled.

    Raises:
        RuntimeError: as said.
    """
    wrappers = list(wrappers)
    if level.loss_scale != 1.0 and any(
        getattr(wrapper, "_delay_all_reduce_params", None) for wrapper in wrappers
    ):
        _refuse_delay()
    if not _changes(models, level.cast_model_type or None):
        return
    for wrapper in wrappers:
        raise RuntimeError(
            "Parallel wrappers should only be applied to the model AFTER the model has been "
            f"returned from amp.initialize(); got a wrapper of type {type(wrapper).__name__} "
            f"around one whose parameters opt_level {level.name} stores in "
            f"{level.cast_model_type}. Call amp.initialize(model, ...) with the model that nothing "
            "wraps yet (del the wrapper of an earlier stage), then wrap what it returns."
        )


def refusing_delay(
    original: Callable[..., None], sets_aside: Callable[[Sequence[Tensor]], bool]
) -> Callable[..., None]:
    """Return an ``__init__`` of `DistributedDataParallel` that shares no gradients by itself.

    Args:
        original: is replaced.
        sets_aside: returns whether blocks set aside gradients of some of these parameters.
    """

    @functools.wraps(original)
    def refusing_init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        delayed = [param for _, param in kwargs.get("delay_all_reduce_named_params") or ()]
        if delayed and sets_aside(delayed):
            _refuse_delay()
        original(wrapper, *args, **kwargs)

    return refusing_init


def _refuse_delay() -> NoReturn:
    raise RuntimeError(
        "DistributedDataParallel must share the gradients that parameters have when backward() "
        "ends; got delay_all_reduce_named_params, by which it shares memory that scale_loss() "
        "sets aside where losses are scaled or weights are in half. Leave out "
        "delay_all_reduce_named_params and param_to_hook_all_reduce, or call "
        "amp.initialize(..., opt_level='O4')."
    )


def refusing_fused(
    original: Callable[..., None], blocks_end_before: Callable[[Sequence[Tensor]], bool]
) -> Callable[..., None]:
    """Return a `DistributedDataParallel._register_fused_optim` that steps what gradients suit.

    Args:
        original: is replaced.
        blocks_end_before: returns whether some of these parameters have masters to step, or
            gradients that are scaled until their block ends.
    """

    @functools.wraps(original)
    def refusing_register(
        wrapper: Any, optim: Any, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        given = None if optim_params is None else list(optim_params)  # it may be a generator
        if blocks_end_before(list(wrapper.parameters()) if given is None else given):
            raise RuntimeError(
                "losses are unscaled, and masters stepped, when a backward has ended; got "
                "DistributedDataParallel._register_fused_optim(), which steps the model's own "
                "weights within it. Give the optimizer to amp.initialize() and call "
                "optimizer.step() after the backward, or call amp.initialize(..., "
                "opt_level='O4')."
            )
        original(wrapper, optim, *args, optim_params=given, **kwargs)

    return refusing_register


def _changes(models: Iterable[nn.Module], dtype: torch.dtype | None) -> bool:
    params = [param for model in models for param in model.parameters()]
    return dtype is not None and any(
        param.is_floating_point() and param.dtype is not dtype for param in params
    )
