"""What scripts read and set as ``amp._amp_state``: a view of amp_patch's session.

apex has an object and a module of this name, reached by ``amp._amp_state`` and by ``import
apex.amp._amp_state``. Here they are one: the module, whose class has the properties.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.amp import master_params
from amp_patch.scaling.loss_scaler import LossScaler as CoreScaler
from amp_patch.session import session

from .scaler import LossScaler, cores_of, view_of

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


def _and_used(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that writes to a list of scalers, with which the process goes on."""

    @functools.wraps(method)
    def write(scalers: LossScalers, *args: Any, **kwargs: Any) -> Any:
        written = list(scalers)
        result = method(written, *args, **kwargs)
        _amp_state.use_scalers(written)
        method(scalers, *args, **kwargs)
        return result

    return write


class LossScalers(list[LossScaler]):
    """``_amp_state.loss_scalers``: what is written to it holds for the losses from then on."""

    __setitem__ = _and_used(list.__setitem__)
    __delitem__ = _and_used(list.__delitem__)
    append = _and_used(list.append)
    clear = _and_used(list.clear)
    extend = _and_used(list.extend)
    insert = _and_used(list.insert)
    pop = _and_used(list.pop)
    remove = _and_used(list.remove)
    reverse = _and_used(list.reverse)
    sort = _and_used(list.sort)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)  # a copy, or what is loaded from a file, is a list of its own


# As which it stands in checkpoints; torch.load(path) refuses what it does not know.
torch.serialization.add_safe_globals([list])


class AmpState(types.ModuleType):
    """The state of apex.amp.

    Attributes:
        hard_override: True prints what an opt_level refuses, and does it.
        allow_incoming_model_not_fp32: True takes models with half parameters.
        opt_properties: what the last `initialize` was asked for; missing before it.
        handle: what casts functions; missing before O1, O4 or `init`.
        min_loss_scale, max_loss_scale: as given to `initialize`.
        assigned: scalers that were assigned while there were none.
        num_losses: of the last `initialize`, whose scalers come first among the process's; None
            before one with an optimizer.
    """

    hard_override: bool
    allow_incoming_model_not_fp32: bool
    opt_properties: Any
    handle: Any
    min_loss_scale: float | None
    max_loss_scale: float
    assigned: list[LossScaler]
    num_losses: int | None

    @property
    def loss_scalers(self) -> LossScalers:
        """Those that the last `initialize` gave its losses; each the same object each time.

        They may be replaced: loss 0 uses the first of a list that is assigned, and so on. A list
        that is shorter leaves the losses after its end their scalers.
        """
        if session.initialized:
            return LossScalers(map(view_of, session.scalers[: self.num_losses]))
        if "assigned" in vars(self):
            return LossScalers(self.assigned)
        if not session.lookup.disabled:
            raise AttributeError("loss_scalers")
        scaler = LossScaler(1.0)
        # Scripts step their schedulers where this is not 0, and without amp no step is skipped.
        scaler._unskipped = 1
        return LossScalers([scaler])

    @loss_scalers.setter
    def loss_scalers(self, value: list[LossScaler]) -> None:
        self.use_scalers(value)

    def use_scalers(self, value: list[LossScaler]) -> None:
        """Put scalers in the places of those there are; see `loss_scalers`.

        Before `initialize`, which makes new ones, and where it was disabled they are only kept.

        Raises:
            TypeError: no list of them.
        """
        cores = cores_of(value)
        if not session.initialized:
            self.assigned = list(value)
            session.call_at_deactivate(self.forget)
            return
        session.settle()

        def instead(loss_id: int, index: int, scaler: CoreScaler) -> CoreScaler:
            # Others are of earlier calls, with rules of their own.
            return cores[loss_id] if index == loss_id < len(cores) else scaler

        session.optimizers.scalers.put_first(cores, instead)
        self.num_losses = len(cores)

    @property
    def verbosity(self) -> int | str:
        """Above 0, apex's messages are printed."""
        return session.verbosity

    @verbosity.setter
    def verbosity(self, value: int | str) -> None:
        session.verbosity = value

    def __getattr__(self, name: str) -> Any:
        # In the place of what modules of the drop-in say: it is there after `initialize`.
        raise AttributeError(f"'AmpState' object has no attribute {name!r}")

    def forget(self) -> None:
        """Take off what `initialize` and `init` left here."""
        fields = ("opt_properties", "handle", "min_loss_scale", "max_loss_scale", "assigned")
        for name in fields:
            vars(self).pop(name, None)
        self.num_losses = None

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print a message, unless ``verbosity`` is 0; with rank0 on the first rank only."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not rank0 or not distributed or torch.distributed.get_rank() == 0:
        session.announce(msg)


def warn_or_err(msg: str) -> None:
    """Print a warning under ``hard_override``.

    Raises:
        RuntimeError: else.
    """
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    print(f"Warning:  {msg}")


_module: Any = sys.modules[__name__]
_module.__class__ = AmpState
_amp_state: AmpState = _module
_amp_state.forget()
_amp_state.hard_override = False
_amp_state.allow_incoming_model_not_fp32 = False
