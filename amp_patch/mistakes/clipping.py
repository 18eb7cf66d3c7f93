"""torch's functions that clip gradients, given parameters whose masters are what is stepped.

At O2 and O5 they clip the masters' gradients. Where each rank has another part of these (ZeRO,
FSDP1), or some are DTensors and others not (tensor parallel), the norm is that of all ranks.
Gradients that are still scaled are refused. Knows the prepared optimizers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.nn.utils.clip_grad
from torch import Tensor, nn
from torch.compiler import is_compiling

from amp_patch.distributed.norms import clip_by_norm
from amp_patch.distributed.shards import by_mesh
from amp_patch.kernels.torch_norms import CLIP_EPS, clip_factor
from amp_patch.kernels.without_grad import without_grad
from amp_patch.step.optimizer_backward import OptimizerBackward
from amp_patch.step.prepared_optimizers import PreparedOptimizers
from amp_patch.step.shown_masters import only_read
from amp_patch.weights.parameter_lists import are_same

from .late_sharding import FSDP

_OF_PARAMETERS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")
_BY_NORM = ("torch.nn.utils.clip_grad_norm_()", "torch.nn.utils.clip_grad_norm()")
_NUMBER = (int, float)
_BY_VALUE = "torch.nn.utils.clip_grad_value_()"
#: Masters of one parameter: the one that is clipped, and that of a further optimizer.
Others = list[tuple[Tensor, Tensor]]


def replacements(
    optimizers: PreparedOptimizers, refuse: Callable[[Sequence[Tensor], str], None]
) -> dict[str, Callable[[Any], Any]]:
    """Return, for each function by its path, what makes its replacement.

    Args:
        optimizers: the prepared ones.
        refuse: gets what is clipped, and the call; raises for gradients that nobody unscales.
    """
    by_name: dict[str, Callable[[Any], Any]] = {
        name: functools.partial(_clipping, optimizers, refuse, f"torch.nn.utils.{name}()")
        for name in _OF_PARAMETERS
    }
    by_name["get_total_norm"] = functools.partial(_measuring, optimizers)
    found = {
        f"{module.__name__}.{name}": make
        for name, make in by_name.items()
        for module in (torch.nn.utils, torch.nn.utils.clip_grad)
        if hasattr(module, name)
    }
    if FSDP in sys.modules:
        name = f"{FSDP}.FullyShardedDataParallel.clip_grad_norm_"
        found[name] = functools.partial(_clipping_flat, optimizers, refuse)
    return found


def _clipping(
    optimizers: PreparedOptimizers,
    refuse: Callable[[Sequence[Tensor], str], None],
    call: str,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    clip_all = _in_few_calls(original) if call == _BY_NORM[0] else original

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        stepped, owners, others = _stepped(optimizers, parameters, call)
        if isinstance(stepped, list):
            refuse(stepped, call)
        if call in _BY_NORM and owners and _are_parts(stepped, owners):
            result = _clip_parts(stepped, owners, *args, **kwargs)
        elif call == _BY_VALUE and owners and all(one.grad is None for one in stepped):
            # Those of masters go with the step; torch's function raises where it finds none.
            result = None
        else:
            try:
                result = clip_all(stepped, *args, **kwargs)
            except RuntimeError as error:
                if owners and "non-finite" in str(error):
                    refuse_infinite_norm(owners, error)
                raise
        _note(stepped, owners, others)
        return result

    return clip


def _note(stepped: Any, owners: Sequence[OptimizerBackward], others: Others) -> None:
    """Let half gradients follow those that were clipped, and those of other optimizers' masters.

    Args:
        stepped, owners, others: see `_stepped`.
    """
    for clipped, other in others:
        if clipped.grad is not None and other.grad is not None:
            with torch.no_grad():
                other.grad.copy_(clipped.grad)
    for owner in owners:  # there are some only where this is a list
        owner.clipped.note(stepped)


def _in_few_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``clip_grad_norm_`` with a short way for gradients of one kind.

    Torch's own takes a hundred calls of Python to find that they are.

    Args:
        original: another one, which a script has put there, stays as it is.
    """
    if getattr(original, "__globals__", None) is not vars(torch.nn.utils.clip_grad):
        return original

    def clip(stepped: Any, *args: Any, **kwargs: Any) -> Any:
        norms = _norms(*args, **kwargs)
        grads = [] if norms is None else _grads_of_one_kind(stepped)
        if norms is None or not grads:
            return original(stepped, *args, **kwargs)
        return _clip_together(grads, *norms)

    return clip


def _norms(
    max_norm: Any = None, norm_type: Any = 2.0, *others: Any, **named: Any
) -> tuple[float, float] | None:
    """Return what ``clip_grad_norm_`` is told of norms; None where it is told anything else."""
    if others or named or not isinstance(max_norm, _NUMBER) or not isinstance(norm_type, _NUMBER):
        return None
    return float(max_norm), float(norm_type)


def _grads_of_one_kind(stepped: Any) -> list[Tensor]:
    """Return the gradients that ``clip_grad_norm_`` clips by one call for all; none of others.

    Args:
        stepped: what it is given.
    """
    if is_compiling() or not isinstance(stepped, list):
        return []
    grads = [grad for one in stepped if (grad := one.grad) is not None]
    if not grads or not (grads[0].is_cpu or grads[0].is_cuda):
        return []
    device = grads[0].get_device()
    for grad in grads:
        if type(grad) is not Tensor or grad.dtype is not torch.float32 or grad.is_sparse:
            return []
        if grad.get_device() != device:
            return []
    return grads


@without_grad
def _clip_together(grads: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Do what ``clip_grad_norm_`` does with gradients of one kind, by the same functions."""
    norms = torch._foreach_norm(grads, norm_type)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    torch._foreach_mul_(grads, clip_factor(total, max_norm, CLIP_EPS))
    return total


def _clipping_flat(
    optimizers: PreparedOptimizers,
    refuse: Callable[[Sequence[Tensor], str], None],
    original: Callable[..., Any],
) -> Any:
    """Return the method of an FSDP1 model, which else would clip half or scaled gradients."""

    @functools.wraps(original)
    def clip_grad_norm_(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        params = list(model.parameters())
        call = "FullyShardedDataParallel.clip_grad_norm_()"
        stepped, owners, others = _stepped(optimizers, params, call)
        if any(one is not param for one, param in zip(stepped, params, strict=True)):
            return torch.nn.utils.clip_grad_norm_(params, *args, **kwargs)
        refuse(stepped, call)
        result = original(model, *args, **kwargs)
        _note(stepped, owners, others)
        return result

    return clip_grad_norm_


def _are_parts(stepped: Sequence[Tensor], owners: Sequence[OptimizerBackward]) -> bool:
    """Return whether torch's function has not the norm of all: of parts, or of several meshes."""
    return any(one.ranks.have_parts for one in owners) or len(by_mesh(stepped)) > 1


def _clip_parts(
    stepped: Sequence[Tensor],
    owners: Sequence[OptimizerBackward],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Do what ``clip_grad_norm_`` does, by the norm over all ranks, which must all come here.

    Args:
        stepped: what this rank steps, and half parameters that others do.
        owners: at least one.
        max_norm, norm_type, error_if_nonfinite: as torch's.
        foreach: as torch's; of no effect.

    Raises:
        RuntimeError: parameters of optimizers that other ranks share; the norm is not finite.
    """
    ranks = owners[0].ranks
    have_parts = any(one.ranks.have_parts for one in owners)
    if have_parts and any(one.ranks != ranks for one in owners):
        raise RuntimeError(
            "gradients that are clipped together must be shared by the same ranks; got those of "
            f"{len(owners)} optimizers whose ranks differ. Call amp.clip_grad_norm_(optimizer, "
            "max_norm) for each of them."
        )
    elsewhere = {id(param) for one in owners for param in one.gradients.elsewhere}
    grads = [one.grad for one in stepped if one.grad is not None and id(one) not in elsewhere]
    device = owners[0].device
    whole = set().union(*(one.clipped.whole() for one in owners))
    return clip_by_norm(
        grads,
        float(max_norm),
        float(norm_type),
        ranks,
        device=device,
        whole=whole,
        accept=functools.partial(accept_finite, owners) if error_if_nonfinite else None,
    )


def accept_finite(owners: Sequence[OptimizerBackward], total: Tensor) -> None:
    """Let gradients of a finite norm be clipped, for which the device is waited for.

    Args:
        owners: of the gradients, those that are prepared.
        total: their norm, 0-dim.

    Raises:
        RuntimeError: it is inf or NaN.
    """
    if not torch.isfinite(total):
        refuse_infinite_norm(owners)


def refuse_infinite_norm(
    owners: Sequence[OptimizerBackward], cause: RuntimeError | None = None
) -> NoReturn:
    """Raise for ``error_if_nonfinite=True``, which knows of no loss scale."""
    for check in {check for one in owners for check in one.skip.pending}:
        check.settle()  # as the step would
    if any(one.skip.is_possible for one in owners):
        mend = (
            "as an overflow leaves it. Leave it out: optimizer.step() then skips the step, and "
            "lowers a dynamic loss scale, which expects that now and then."
        )
    else:
        mend = "for which no step is skipped. `amp-patch diagnose -- SCRIPT` names where it began."
    raise RuntimeError(
        "error_if_nonfinite=True wants a finite norm of the gradients; got one that is not, " + mend
    ) from cause


def _measuring(optimizers: PreparedOptimizers, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        wanted = set(map(id, given))
        params = [one for one in optimizers.params() if id(one.grad) in wanted]
        stepped, *_ = _stepped(optimizers, params, "torch.nn.utils.get_total_norm()")
        true = {
            id(param.grad): one.grad
            for param, one in zip(params, stepped, strict=True)
            if one.grad is not None
        }
        return original([true.get(id(grad), grad) for grad in given], *args, **kwargs)

    return get_total_norm


def _stepped(
    optimizers: PreparedOptimizers, parameters: Any, call: str
) -> tuple[Any, list[OptimizerBackward], Others]:
    """Return what is stepped for each parameter, with its gradient unscaled, and whose they are.

    Of a parameter with several masters, of as many optimizers, the first that has a gradient stands
    for all: third comes each such master with one of the others, which is to have the same.

    Raises:
        RuntimeError: it is still scaled.
    """
    if not isinstance(parameters, Iterable):
        return parameters, [], []
    with only_read():
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not given:
        return parameters, [], []  # of an empty generator torch warns
    owners: list[OptimizerBackward] = []
    masters: dict[int, Tensor] = {}
    others: Others = []
    wanted = set(map(id, given))
    for owner in _owners(optimizers, wanted):
        owner.refuse_scaled(call, among=wanted)
        owners.append(owner)
        pairs = owner.pairs()
        # most often they are given as `amp.master_params` yields them, and stand for themselves
        if pairs.model is not pairs.master and not are_same(given, pairs.master):
            for param, master in zip(*pairs, strict=True):
                first = masters.setdefault(id(param), master)
                if first is not master and id(param) in wanted:
                    if first.grad is None:
                        masters[id(param)], master = master, first
                    others.append((masters[id(param)], master))
    stepped = [masters.get(id(param), param) for param in given] if masters else given
    return stepped, owners, others


def _owners(optimizers: PreparedOptimizers, wanted: set[int]) -> Iterator[OptimizerBackward]:
    """Yield the optimizers that step some parameters, those first whose gradients wait for a step.

    Of several that step a parameter, one after the other, those are meant that have a gradient for
    it: the others are left out, unless they step more.

    Args:
        optimizers: the prepared ones.
        wanted: ids of parameters, or of masters.
    """
    taken: list[list[Tensor]] = []  # parameters and masters of those whose gradients wait
    for one in sorted((step.backward for step in list(optimizers.steps.values())), key=_has_none):
        pairs, is_pending, left = one.pairs(), one.gradients.are_pending, wanted
        if taken and not is_pending:
            left = wanted.difference(map(id, chain.from_iterable(taken)))
        # This rank may step none of the parameters that all ranks clip together (ZeRO).
        if left.isdisjoint(map(id, chain(*pairs, one.gradients.elsewhere))):
            continue
        if is_pending:
            taken += pairs
        yield one


def _has_none(backward: OptimizerBackward) -> bool:
    return not backward.gradients.are_pending
