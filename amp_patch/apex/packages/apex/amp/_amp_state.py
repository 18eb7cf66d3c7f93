"""What scripts read and set as ``amp._amp_state``: a view of amp_patch's session.

apex has an object and a module of this name, reached by ``amp._amp_state`` and by ``import
apex.amp._amp_state``. Here they are one: the module, whose class has the properties.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from amp_patch.amp import master_params
from amp_patch.session import session

from .scaler import LossScaler, scalers_of

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


class AmpState(types.ModuleType):
    """The state of apex.amp.

    Attributes:
        hard_override: True prints what an opt_level refuses, and does it.
        allow_incoming_model_not_fp32: True takes models with half parameters.
        opt_properties: what the last `initialize` was asked for; missing before it.
        handle: what casts functions; missing before O1, O4 or `init`.
        min_loss_scale, max_loss_scale: as given to `initialize`.
        num_losses: of the last `initialize`, whose scalers come first among the process's.
    """

    hard_override: bool
    allow_incoming_model_not_fp32: bool
    opt_properties: Any
    handle: Any
    min_loss_scale: float | None
    max_loss_scale: float
    num_losses: int

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """Those that the last `initialize` gave its losses; each the same object each time."""
        if session.initialized:
            views = scalers_of(session.scalers)
            return views[: self.num_losses] or views
        if not session.disabled:
            raise AttributeError("loss_scalers")
        scaler = LossScaler(1.0)
        # Scripts step their schedulers where this is not 0, and without amp no step is skipped.
        scaler._unskipped = 1
        return [scaler]

    @property
    def verbosity(self) -> int:
        """Above 0, apex's messages are printed."""
        return session.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        session.verbosity = value

    def __getattr__(self, name: str) -> Any:
        # In the place of what modules of the drop-in say: it is there after `initialize`.
        raise AttributeError(f"'AmpState' object has no attribute {name!r}")

    def forget(self) -> None:
        """Take off what `initialize` and `init` left here."""
        for name in ("opt_properties", "handle", "min_loss_scale", "max_loss_scale"):
            vars(self).pop(name, None)
        self.num_losses = 0


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
