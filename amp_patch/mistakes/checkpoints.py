"""``torch.distributed.checkpoint`` of models in half: for it the masters are the parameters.

It finds a parameter's state by the parameter object, which stands in the model and in the optimizer
alike, so that it knows no masters. Knows what was prepared; nothing of loss scales.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from amp_patch.distributed.flat_parameters import flat_modules
from amp_patch.distributed.fully_sharded import follow_parameters, reshard
from amp_patch.patching import Patches, bind
from amp_patch.step.optimizer_step import OptimizerStep
from amp_patch.step.prepared_optimizers import PreparedOptimizers

from .late_sharding import FSDP

_MODULE = "torch.distributed.checkpoint.state_dict"
_WRITE = ("set_state_dict", "set_optimizer_state_dict", "set_model_state_dict")
_FSDP1 = f"{FSDP}.FullyShardedDataParallel"
_OF_FSDP1 = ("optim_state_dict", "optim_state_dict_to_load")
_Lent = Callable[..., contextlib.AbstractContextManager[None]]


class _Lending:
    """Whether one of the functions runs; a second thread waits until it has ended."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_on = False


def replacements(optimizers: PreparedOptimizers) -> dict[str, dict[str, Callable[[Any], Any]]]:
    """Return what makes the replacements, by the modules that have them."""
    lent = functools.partial(_lent, optimizers, _Lending())
    make = functools.partial(_with_masters, lent)
    return {
        # what all six functions enter, for a script may have imported these by their names
        _MODULE: {f"{_MODULE}._gc_context": functools.partial(_in_caller, lent)},
        FSDP: {f"{_FSDP1}.{name}": functools.partial(_static, make) for name in _OF_FSDP1},
    }


def _static(make: Callable[[Any], Any], original: Callable[..., Any]) -> Any:
    return staticmethod(make(original))


def _with_masters(lent: _Lent, original: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function that takes a model first while its parameters are those that are stepped."""

    @functools.wraps(original)
    def with_masters(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with lent(model, writes=False):
            return original(model, *args, **kwargs)

    return with_masters


def _in_caller(lent: _Lent, original: Callable[[], Any]) -> Callable[[], Any]:
    """Have the same in the block that a function with an argument ``model`` enters."""

    @functools.wraps(original)
    def block() -> Any:
        caller = sys._getframe(1)
        return _both(lent(caller.f_locals["model"], caller.f_code.co_name in _WRITE), original())

    return block


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


@contextlib.contextmanager
def _lent(
    optimizers: PreparedOptimizers, lending: _Lending, model: nn.Module, writes: bool
) -> Iterator[None]:
    """Let a model's parameters be those that are stepped.

    Args:
        optimizers: those that are prepared.
        lending: whether they are so, for one of the functions calls another.
        model: of torch's, or wrapped by it.
        writes: whether the parameters may be written to.
    """
    with lending.lock:
        if lending.is_on:  # of this very thread
            yield
            return
        steps = list(optimizers.steps.values())
        masters_in = _fp32_in if flat_modules(model) else _masters_in
        lending.is_on = True
        try:
            with _plain_steps(steps), masters_in(model, steps, writes):
                yield
        finally:
            lending.is_on = False


@contextlib.contextmanager
def _plain_steps(steps: Iterable[OptimizerStep]) -> Iterator[None]:
    """Let optimizers step as torch does: a step with a rate of 0 makes their state."""
    patches = Patches()
    try:
        for optimizer in filter(None, (step.optimizer for step in steps)):
            patches.replace(optimizer, "step", bind(type(optimizer).step, optimizer))
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _masters_in(model: nn.Module, steps: Iterable[OptimizerStep], writes: bool) -> Iterator[None]:
    """Put masters in the place of their parameters in a model.

    Args:
        model: whose parameters may have masters.
        steps: that have them.
        writes: whether masters may be written to, so that the parameters are to follow.
    """
    masters = [step.masters for step in steps if step.masters is not None]
    master_of = {key: master for one in masters for key, master in one.pairs.by_param().items()}
    if not master_of:
        yield
        return
    reshard(model)
    for one in masters:
        one.reconcile()
    replaced: list[tuple[dict[str, Any], str, Tensor]] = [
        (module._parameters, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None and id(param) in master_of
    ]
    try:
        for params, name, param in replaced:
            params[name] = master_of[id(param)]
        yield
    finally:
        for params, name, param in replaced:
            params[name] = param
        follow_parameters(model)
        for one in masters:
            one.follow(writes)


@contextlib.contextmanager
def _fp32_in(model: nn.Module, steps: Iterable[OptimizerStep], writes: bool) -> Iterator[None]:
    """Let a model of FSDP1 be in fp32, for its modules know no other parameters than their own.

    Args:
        model: whose flat parameters may have masters.
        steps, writes: as in `_masters_in`.
    """
    params = list(model.parameters())
    every = [step.masters for step in steps if step.masters is not None]
    masters = [one for one in every if one.has_master_of_any(params)]
    try:
        with contextlib.ExitStack() as lent:
            for one in masters:
                lent.enter_context(one.given_back())
            follow_parameters(model)
            yield
    finally:
        follow_parameters(model)
        for one in masters:
            one.follow(writes)
