"""apex's LossScaler over amp_patch's: the fields and methods that scripts and pickles know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.kernels.tensor_values import is_large, largest
from amp_patch.scaling.loss_scaler import LossScaler as CoreScaler
from amp_patch.scaling.scale_rule import ScaleRule
from amp_patch.session import session


def scale_check_overflow_python(
    model_grad: Tensor, master_grad: Tensor, scale: float, check_overflow: bool = False
) -> bool:
    """Write ``model_grad * scale`` to ``master_grad``; return whether the first is not finite.

    Args:
        model_grad: of any floating dtype; a penalty may be computed from it.
        master_grad: of the same shape; may be the same tensor. Not written to after an overflow.
        scale: a factor. Until spring 2019 it came second, and every call looked for overflows.
        check_overflow: whether to look for inf and NaN.
    """
    if not isinstance(master_grad, Tensor):
        master_grad, scale, check_overflow = scale, master_grad, True
    if check_overflow and not _are_finite(model_grad):
        return True
    if master_grad is not model_grad:
        master_grad.copy_(model_grad)
    master_grad.mul_(scale)
    return False


def axpby_check_overflow_python(
    model_grad: Tensor,
    stashed_grad: Tensor,
    master_grad: Tensor,
    a: float,
    b: float,
    check_overflow: bool = False,
) -> bool:
    """Write ``a * model_grad + b * stashed_grad`` to ``master_grad``.

    Shapes, check and result are those of `scale_check_overflow_python`.
    """
    if check_overflow and not _are_finite(model_grad):
        return True
    with torch.no_grad():
        master_grad.copy_(a * model_grad.to(master_grad.dtype) + b * stashed_grad)
    return False


def _are_finite(grad: Tensor) -> bool:
    return bool((largest(grad) if is_large(grad) else grad).isfinite().all())


def _field_of_rule(name: str) -> Any:
    """Return a property that reads and sets a field of the rule by which a scale moves."""

    def read(scaler: LossScaler) -> Any:
        return getattr(scaler._core.rule, name)

    def write(scaler: LossScaler, value: Any) -> None:
        scaler._core.rule = replace(scaler._core.rule, **{name: value})

    return property(read, write)


class LossScaler:
    """The scale of one loss.

    Those of ``amp._amp_state.loss_scalers`` are views of the scalers that `amp.scale_loss` uses:
    what is set here holds there. Others stand for themselves.

    Where a script has replaced ``update_scale`` or ``unscale``, on one, on the class or in a
    subclass, `amp.scale_loss` calls its methods after each backward, as apex did. What
    ``update_scale`` returns decides whether the step is skipped. The gradients are unscaled by
    then: ``unscale`` gets one element in the place of all, which is inf after an overflow.

    Args:
        loss_scale: "dynamic" or a fixed factor.
        init_scale: a dynamic scale's first value.
        scale_factor: not used, as in apex; 2 and 0.5.
        scale_window: clean passes in a row until a dynamic scale grows.
        min_loss_scale: floor of a dynamic scale; None and 0 stand for 2**-24.
        max_loss_scale: its cap.
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        rule = ScaleRule.resolve(
            "dynamic" if loss_scale == "dynamic" else float(loss_scale),
            growth_factor=None,
            backoff_factor=None,
            growth_interval=scale_window,
            hysteresis=None,
            min_loss_scale=min_loss_scale or None,
            max_loss_scale=max_loss_scale,
        )
        self._set_core(CoreScaler(rule))
        if self.dynamic:
            self._loss_scale = min(max_loss_scale, init_scale)

    def _set_core(self, core: CoreScaler) -> None:
        self._core = core
        core.override = self
        self._buffer: Tensor | None = None
        self._is_behind = False
        self._overflow = False

    @classmethod
    def _view(cls, core: CoreScaler) -> LossScaler:
        view = cls.__new__(cls)
        view._set_core(core)
        return view

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self._core.rule.dynamic

    @property
    def _loss_scale(self) -> float:
        return self._core.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._core.settle()
        self._core.scale = float(value)

    @property
    def _unskipped(self) -> int:
        self._core.settle()
        return self._core.unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._core.settle()
        self._core.unskipped = int(value)

    @property
    def _has_overflow(self) -> bool:
        self._core.settle()
        return self._overflow or self._core.skipped

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._overflow = self._core.skipped = bool(value)

    @property
    def _overflow_buf(self) -> Tensor:
        self._core.is_by_hand = True  # who only logs the scale asks for its number
        if self._buffer is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._buffer = torch.zeros(1, dtype=torch.int32, device=device)
        if self._is_behind:
            self._is_behind = False
            self._core.settle()
            found = self._core.skipped or session.optimizers.has_found(self._core)
            self._buffer.fill_(int(found))
        return self._buffer

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        self._buffer, self._is_behind = value, False

    _scale_seq_len = _field_of_rule("growth_interval")
    _max_loss_scale = _field_of_rule("max_loss_scale")
    _min_loss_scale = _field_of_rule("min_loss_scale")

    def loss_scale(self) -> float:
        """Return the factor by which the next loss is multiplied."""
        return self._core.loss_scale()

    def clear_overflow_state(self) -> None:
        """Forget what `unscale` found since the last `update_scale`."""
        self._has_overflow = False
        self._overflow_buf.zero_()

    def update_scale(self) -> bool:
        """Move the scale by what was found since the last time.

        That is: by `unscale`, in ``_overflow_buf``, or by a ``scale_loss(...,
        delay_overflow_check=True)``, whose check ends here. It is then for the caller to skip the
        step.

        Returns:
            Whether the step is to be skipped; always False of a static scale.
        """
        found = bool(self._overflow_buf.item()) or self._overflow
        found = session.optimizers.take_over(self._core) or found
        self._overflow = False
        skip = self._core.update(found and self.dynamic)
        self._overflow = False
        return skip

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: Any = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write ``model_grads / scale`` to ``master_grads``, and note inf and NaN.

        They are noted in ``_overflow_buf`` (int32, shape (1,)) as 1, and in ``_has_overflow``
        where the scale moves, until `clear_overflow_state`.

        Args:
            model_grads: of any floating dtypes.
            master_grads: of the same shapes; may be the same tensors.
            unused_scale: not used.
            models_are_masters: nothing is to be done then at a static scale of 1.
            scale_override: in the place of the loss scale.
        """
        scale = self.loss_scale() if scale_override is None else scale_override
        if scale == 1.0 and models_are_masters and not self.dynamic:
            return
        sources, targets = list(model_grads), list(master_grads)
        self.note(kernels.unscale(sources, targets, scale))

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write ``model_grads / scale + stashed_master_grads`` to ``master_grads``.

        Args:
            model_grads, stashed_master_grads, master_grads: of the same shapes.
            scale_override: the scales that the first, the second and the third have.
        """
        scales = (self.loss_scale(), 1.0, 1.0) if scale_override is None else scale_override
        grads_have, stashed_have, out = scales
        sources = list(model_grads)
        with torch.no_grad():
            kept = [stashed.float() * (out / stashed_have) for stashed in stashed_master_grads]
        received = [torch.empty_like(stashed) for stashed in kept]
        self.note(kernels.unscale(sources, received, grads_have / out))
        with torch.no_grad():
            for target, new, old in zip(master_grads, received, kept, strict=True):
                target.copy_(new + old)

    def note(self, check: kernels.GradCheck) -> None:
        """Remember for `update_scale` what a check found."""
        if check.overflow:
            self._overflow_buf.fill_(1)
            self._overflow = self._overflow or self.dynamic

    def end_pass(self, is_open: bool) -> None:
        """Follow a ``scale_loss`` of this scale that has ended.

        Args:
            is_open: whether its check is left to the script (``delay_overflow_check``).
        """
        if is_open and self.is_on:
            # It is the script that calls its method, as with apex; else the step would call it.
            self._meet(session.optimizers.take_over(self._core))
        elif not self.is_on:
            self._is_behind = True  # what a device found is waited for where somebody asks
            if is_open:
                self._has_overflow = False  # until `update_scale`, or the step, looks at it

    @property
    def is_on(self) -> bool:
        """Whether a script's method stands in the place of `update_scale` or `unscale`."""
        return self._has_own("update_scale") or self._has_own("unscale")

    def _has_own(self, name: str) -> bool:
        return getattr(getattr(self, name), "__func__", None) is not _METHODS[name]

    def move(self, overflow: bool) -> bool:
        """Move the scale by the script's methods; return what its ``update_scale`` says."""
        self._meet(overflow)
        return bool(self.update_scale())

    def _meet(self, overflow: bool) -> None:
        """Note what a pass found, by the script's ``unscale`` if it has one."""
        self.clear_overflow_state()
        if not self._has_own("unscale"):
            self._overflow_buf.fill_(int(overflow))
            return
        value = math.inf if overflow else 0.0
        grads = [torch.full((1,), value, device=self._overflow_buf.device, dtype=torch.float32)]
        self.unscale(grads, [grads[0].clone()], self.loss_scale(), models_are_masters=False)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "dynamic": self.dynamic,
            "_loss_scale": self._loss_scale,
            "_unskipped": self._unskipped,
            "_has_overflow": self._has_overflow,
            "_min_loss_scale": self._min_loss_scale,
            "_max_loss_scale": self._max_loss_scale,
            "_scale_seq_len": self._scale_seq_len,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what this class pickles, or apex's, whose attributes these are."""
        dynamic = state.get("dynamic", True)
        scale = state.get("_loss_scale", 2.0**16)
        LossScaler.__init__(
            self,
            "dynamic" if dynamic else scale,
            scale_window=state.get("_scale_seq_len", 2000),
            min_loss_scale=state.get("_min_loss_scale"),
            max_loss_scale=state.get("_max_loss_scale", 2.0**24),
        )
        self._loss_scale = scale
        self._unskipped = state.get("_unskipped", 0)


#: As they are here, whatever a script puts in their places.
_METHODS = {name: vars(LossScaler)[name] for name in ("unscale", "update_scale")}

# Checkpoints hold it, an FP16_Optimizer's for one, and torch.load(path) refuses unknown classes.
torch.serialization.add_safe_globals([LossScaler])


def view_of(core: CoreScaler) -> LossScaler:
    """Return the view of a scaler, the same one each time."""
    return cast(LossScaler, core.override or LossScaler._view(core))


def cores_of(scalers: Any) -> list[CoreScaler]:
    """Return what is behind scalers, which are the views of these from now on.

    Raises:
        TypeError: no list or tuple of them.
    """
    given = scalers if isinstance(scalers, (list, tuple)) else [scalers]
    # Of what torch.load made the class may be that of an earlier `amp_patch.apex.install`.
    are_scalers = all(isinstance(getattr(one, "_core", None), CoreScaler) for one in given)
    if given is not scalers or not are_scalers:
        kinds = ", ".join(type(one).__name__ for one in given)
        got = f"a list of {kinds}" if given is scalers else kinds
        raise TypeError(
            "amp._amp_state.loss_scalers must be a list of LossScaler objects; got "
            f"{got}; call amp.load_state_dict() with what amp.state_dict() returned, or assign "
            "[apex.amp.scaler.LossScaler('dynamic'), ...]."
        )
    return [one._core for one in given]
