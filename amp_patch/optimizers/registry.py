"""The types of optimizers that fused steps know, and what they refuse.

A new one takes a subclass of `GroupUpdate` in a file of its own, and a row in `UPDATES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from .adagrad import AdagradUpdate
from .adam import AdamUpdate, AdamWUpdate
from .groups import GroupUpdate, values_of
from .lamb import FusedLAMB, LambUpdate
from .rmsprop import RMSpropUpdate
from .sgd import SgdUpdate

#: How optimizers of these very types step. A subclass is another type: it may step otherwise.
UPDATES: dict[type[Optimizer], type[GroupUpdate]] = {
    AdamW: AdamWUpdate,
    Adam: AdamUpdate,
    SGD: SgdUpdate,
    RMSprop: RMSpropUpdate,
    Adagrad: AdagradUpdate,
    FusedLAMB: LambUpdate,
}


def register(kind: type[Optimizer], update: type[GroupUpdate]) -> None:
    """Enter a row for a type that the core does not import, as the drop-in's are.

    A type of the same module and name gives way: its module was imported anew.
    """
    for known in [one for one in UPDATES if _full_name(one) == _full_name(kind)]:
        del UPDATES[known]
    UPDATES[kind] = update


_MEND = "call amp.initialize(..., fused_step=False)"


def update_of(optimizer: Optimizer) -> type[GroupUpdate]:
    """Return how an optimizer steps.

    Raises:
        TypeError: its type is not exactly one of `UPDATES`.
    """
    if type(optimizer) not in UPDATES:
        raise TypeError(
            f"fused_step=True steps {', '.join(map(_name, UPDATES))}, these very types; got "
            f"{_full_name(type(optimizer))}; {_MEND}."
        )
    return UPDATES[type(optimizer)]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _name(kind: type) -> str:
    """Return the name that users import a type by: from the package, not from its file."""
    return f"{kind.__module__.rpartition('.')[0]}.{kind.__qualname__}".strip(".")


def refuse_unknown(optimizer: Optimizer) -> None:
    """Raise for an optimizer that no fused step is known for.

    Raises:
        TypeError: see `update_of`.
        RuntimeError: its ``step`` was replaced, or that of its type; or a group has an option that
            fused steps lack.
    """
    update_of(optimizer)
    own = vars(optimizer).get("step")
    is_replaced = own is not None and not hasattr(own, "_wrapped_by_lr_sched")
    if is_replaced or not _has_own_step(type(optimizer)):
        raise RuntimeError(
            "fused_step=True takes the place of the optimizer's own step(); got one that was "
            f"replaced on this {type(optimizer).__name__}, and would not be called; {_MEND}."
        )
    for group in optimizer.param_groups:
        refuse_options(optimizer, group)


def _has_own_step(kind: type[Optimizer]) -> bool:
    """Return whether a type's step, and all that it wraps, is of its own package or of torch."""
    known = {"torch", *(_package(one.__module__) for one in kind.__mro__)}
    function: Any = kind.step
    while function is not None:
        if _package(getattr(function, "__globals__", {}).get("__name__", "")) not in known:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _package(module: str) -> str:
    return module.partition(".")[0]


def refuse_options(optimizer: Optimizer, group: Mapping[str, Any] | Any) -> None:
    """Raise for a parameter group with an option that fused steps lack.

    Args:
        optimizer: of a type in `UPDATES`.
        group: what lacks there is the optimizer's default. What is no dict is for torch to refuse.

    Raises:
        RuntimeError: ``differentiable``, or a tensor in the place of a number other than lr.
    """
    given = {**optimizer.defaults, **(group if isinstance(group, dict) else {})}
    lacking = ["differentiable"] * bool(given.get("differentiable"))
    for name in update_of(optimizer).numbers:
        if any(isinstance(value, Tensor) for value in values_of(given.get(name))):
            lacking.append(name)
    if lacking:
        raise RuntimeError(
            "fused_step=True knows no differentiable=True and no tensors as options but for lr; "
            f"got {lacking[0]}={given[lacking[0]]!r}; leave that out, or {_MEND}."
        )
