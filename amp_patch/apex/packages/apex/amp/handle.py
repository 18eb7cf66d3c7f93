"""apex.amp.scale_loss, and the handle of its older interface, made to work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from amp_patch import amp
from amp_patch.amp import disable_casts
from amp_patch.casting.mode import mode
from amp_patch.initialization import initialize_at
from amp_patch.requested_level import Resolved, resolve
from amp_patch.session import session

from ._amp_state import _amp_state
from ._process_optimizer import attach
from .opt import OptimWrapper
from .scaled_loss import scale_loss

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


class AmpHandle:
    """What `apex.amp.init` returns: casts are on in every function, whatever model calls it.

    Args:
        loss_scale: "dynamic" or a fixed factor, for the optimizers used with this handle.
        enable_caching: not used; casts of weights are kept where a model is known.
        verbose: as given.
        opt_level: that of the casts, for these optimizers.

    Attributes:
        is_on: whether its optimizers' losses are scaled, also where casts are switched off.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        *,
        opt_level: str = "O1",
    ) -> None:
        self._opt_level = opt_level
        self._loss_scale = loss_scale
        self._enable_caching = enable_caching
        self._verbose = verbose
        self.is_on = True

    def is_active(self) -> bool:
        """Return whether functions are cast: not so inside of `disable_casts` in this thread."""
        return self.is_on and (not mode.off or mode.region is not None)

    @property
    def _is_active(self) -> bool:
        """See `is_active`. Scripts of apex read it, and some set it in a block of their own.

        Inside of `disable_casts` to set it is without effect: in apex its end sets it once more.
        """
        return self.is_active()

    @_is_active.setter
    def _is_active(self, is_on: bool) -> None:
        if not mode.off:
            self.is_on = is_on

    def casts_are_on(self) -> None:
        """Functions cast from now on, until the session ends."""
        self.is_on = True
        session.call_at_deactivate(self._casts_are_off)

    def _casts_are_off(self) -> None:
        self.is_on = False

    def _disable_casts(self) -> Any:
        return disable_casts()

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer whose ``scale_loss(loss)`` unscales its gradients.

        Args:
            optimizer: of torch.
            num_loss: how many losses each step has; each has a scale of its own.
        """
        self._prepare(optimizer, num_loss)
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Scale a loss for its backward; see `amp_patch.amp.scale_loss`."""
        inner = getattr(optimizer, "optimizer", optimizer)
        self._prepare(inner, 1)
        with scale_loss(loss, inner) as scaled_loss:
            yield scaled_loss

    def _prepare(self, optimizer: Any, num_loss: int) -> None:
        """Set an optimizer up, which this handle's scripts do not give to `initialize`."""
        if optimizer not in session.optimizers.steps:
            level = resolve(self._opt_level, loss_scale=self._loss_scale)
            initialize_at(
                Resolved(level, None),
                [],
                optimizer,
                num_losses=num_loss,
                verbosity=0,
                tells_casts=self._verbose,
            )
            session.verbosity = 1  # it is the level that init() does not print
            attach(optimizer)
            self.casts_are_on()

    def _clear_cache(self) -> None:
        session.cache.mark_stale()

    def _save_func(self, mod: Any, fn: str, func: Any) -> None:
        """Do nothing: amp_patch knows what it replaced."""

    def _deactivate(self) -> None:
        """Restore every function, model and optimizer; see `amp_patch.amp.deactivate`."""
        is_known = vars(_amp_state).get("handle") is self
        amp.deactivate()
        self._casts_are_off()
        if is_known:  # scripts that deactivate what they train next ask for it again
            _amp_state.handle = self
            session.call_at_deactivate(_amp_state.forget)

    @property
    def has_cache(self) -> bool:
        """Whether casts of weights are kept, as asked for."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Any, Any]:
        """Empty: casts of weights are kept by the core, which knows when they are stale."""
        return {}

    def remove_cache(self, param: Any) -> None:
        """Do not use a parameter's cast again."""
        session.cache.mark_stale()

    @property
    def verbose(self) -> bool:
        """As given."""
        return self._verbose


class NoOpHandle:
    """What ``init(enabled=False)`` returns: nothing is cast or scaled."""

    is_on = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    def _disable_casts(self) -> Any:
        return contextlib.nullcontext()

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return a wrapper that scales nothing."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yield the loss."""
        yield loss

    @property
    def has_cache(self) -> bool:
        """False."""
        return False

    @property
    def verbose(self) -> bool:
        """False."""
        return False

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""
