"""``model.half()`` and its like, called on a model that `amp.initialize` has prepared.

What becomes float32 gets its exact values: ``model.float()`` is often the last call before an
export. Knows prepared models and their levels; no optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casting.running_modules import running_modules
from amp_patch.common.warn_once import warn_once
from amp_patch.levels import HALVES, OptLevel
from amp_patch.weights.half_storage import kept_in_fp32

_TO_HALF = ("half", "bfloat16")
_METHODS = (*_TO_HALF, "double", "to", "type")

#: Returns the fp32 values of those tensors that are weights and buffers in half, by their ids.
ExactValues = Callable[[Sequence[Tensor]], Mapping[int, Tensor]]


def replacements(
    levels: Callable[[], Mapping[nn.Module, OptLevel]], exact: ExactValues
) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method by its path, what makes its replacement.

    Args:
        levels: returns the prepared models, with what they were prepared at.
        exact: see `ExactValues`.
    """
    checking = {name: functools.partial(_checking, levels, exact, name) for name in _METHODS}
    made = {**checking, "float": functools.partial(_widening, exact)}
    return {f"torch.nn.modules.module.Module.{name}": make for name, make in made.items()}


def _widening(exact: ExactValues, original: Callable[..., Any]) -> Callable[..., Any]:
    """Convert, and say nothing: the next forward of the model tells of its dtypes."""

    @functools.wraps(original)
    def convert(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What a forward casts for itself goes on from the half numbers that it has begun with.
        moves_alone = original.__name__ == "to" and not _names_a_dtype(*args, **kwargs)
        before = {} if moves_alone or running_modules() else _tensors_of(self)
        values = exact(list(before.values()))
        result = original(self, *args, **kwargs)
        if values:
            with torch.no_grad():
                for name, tensor in _tensors_of(self).items():
                    value = values.get(id(before.get(name)))
                    if value is not None and tensor.dtype not in HALVES:
                        tensor.copy_(value)
        return result

    return convert


def _names_a_dtype(*args: Any, **kwargs: Any) -> bool:
    """Tell whether a call of ``to`` may change dtypes: by one, or by a tensor that has one.

    Who moves a model to a device alone need not have all weights read.
    """
    given = (*args, *kwargs.values())
    return any(isinstance(one, (torch.dtype, Tensor)) for one in given)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers; of buffers torch puts new ones in their places."""
    params = module.named_parameters(remove_duplicate=False)
    return dict(chain(params, module.named_buffers(remove_duplicate=False)))


def _checking(
    levels: Callable[[], Mapping[nn.Module, OptLevel]],
    exact: ExactValues,
    name: str,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    converted = original if name in _TO_HALF else _widening(exact, original)

    @functools.wraps(original)
    def convert(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _dtypes(self)
        result = converted(self, *args, **kwargs)
        pairs = zip(before, _dtypes(self), strict=False)  # torch hands on the same parameters
        if new := {now for was, now in pairs if now is not was}:
            _tell(self, name, new, levels())
        return result

    return convert


def _dtypes(module: nn.Module) -> list[torch.dtype]:
    return [param.dtype for param in module.parameters()]


def _tell(
    module: nn.Module, name: str, new: set[torch.dtype], levels: Mapping[nn.Module, OptLevel]
) -> None:
    """Warn if the weights of a prepared model are no longer in the dtypes of its level."""
    for model, level in list(levels.items()):
        stored = level.cast_model_type or torch.float32
        if not _share(module, model):
            continue
        # as a layer that comes to the model later needs; the level keeps a batch norm in float32
        keeps = level.master_weights and kept_in_fp32(module, bool(level.keep_batchnorm_fp32))
        if new <= {stored} and not keeps:
            continue
        if new <= {torch.float32} and _keeps_a_layer(module, model):
            continue
        warn_once(
            f"amp.initialize(..., opt_level={level.name!r}) {_rule(new, stored)}; got "
            f"{type(module).__name__}.{name}() afterwards, which stores them in "
            f"{', '.join(sorted(map(str, new)))}{_loss(new, stored)}. Leave that call out; "
            f"{_other_call(new, stored)}."
        )
        return


def _keeps_a_layer(module: nn.Module, model: nn.Module) -> bool:
    """Tell whether a model's own forward casts a layer of its to float32, as routers do.

    It casts what the layer takes as well. A float32 weight holds all that its master does: from the
    half numbers on that the first forward hands it, it trains as without amp.
    """
    parts = set(map(id, model.modules()))
    return id(model) not in map(id, module.modules()) and not parts.isdisjoint(running_modules())


def _rule(new: set[torch.dtype], stored: torch.dtype) -> str:
    if new <= {stored}:
        return "keeps some weights in float32, those of batch norms say"
    return f"keeps weights in {stored}"


def _loss(new: set[torch.dtype], stored: torch.dtype) -> str:
    if new.isdisjoint(HALVES) or (stored in HALVES and stored not in new):
        return ""
    return ", where the optimizer's small updates are rounded away"


def _other_call(new: set[torch.dtype], stored: torch.dtype) -> str:
    if new <= {stored}:
        return "to have batch norms in half call amp.initialize(..., keep_batchnorm_fp32=False)"
    if new.isdisjoint(HALVES):
        return "to train in another dtype call amp.deactivate() before it"
    return (
        "to store the model in half precision call amp.initialize(..., opt_level='O2'), or 'O5' "
        "for bfloat16"
    )


def _share(module: nn.Module, model: nn.Module) -> bool:
    """Tell whether one of the two is, or is inside of, the other."""
    return any(one is model for one in module.modules()) or any(
        one is module for one in model.modules()
    )
