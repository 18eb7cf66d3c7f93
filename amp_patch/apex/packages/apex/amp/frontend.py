"""apex.amp.initialize and the state of the loss scalers, over amp_patch's."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from amp_patch import amp as core_amp
from amp_patch import levels as core_levels
from amp_patch.amp import load_state_dict, master_params, state_dict
from amp_patch.arguments import enabled_of, models_of, optimizers_of
from amp_patch.casting.rules import PROFILES
from amp_patch.common.call_site import errors_at_the_call, returned
from amp_patch.common.rules_file import rules_of
from amp_patch.initialization import initialize_at
from amp_patch.levels import OptLevel
from amp_patch.requested_level import Resolved, resolve_forced
from amp_patch.session import session

from ._amp_state import _amp_state, warn_or_err
from ._process_optimizer import attach, renew_scalers
from .direct_forward import cast_direct_calls
from .handle import AmpHandle
from .lists.rules import rules_of_lists

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "Properties",
    "initialize",
    "load_state_dict",
    "master_params",
    "opt_levels",
    "state_dict",
]


class Properties:
    """What `initialize` was asked for: ``properties.opt_level``, ``properties.options``.

    Attributes:
        options: name -> value, in the order in which they are printed.
    """

    options: dict[str, Any]

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        blank = dict.fromkeys(core_levels.OPT_LEVELS["O0"].options())
        defaults = {"enabled": False, "patch_torch_functions": False, "loss_scale": 1.0}
        vars(self)["options"] = {**blank, **defaults} if options is None else options

    def __getattr__(self, name: str) -> Any:
        options = vars(self).get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options:
            self.options[name] = value
        else:
            object.__setattr__(self, name, value)

    def _update_options_dict(self, new_options: dict[str, Any]) -> None:
        unknown = [name for name in new_options if name not in self.options]
        if unknown:
            raise ValueError(
                f"options must be among {', '.join(self.options)}; got {unknown[0]!r}; look at "
                "properties.options."
            )
        self.options.update(new_options)


class _Level:
    """One level as a function that sets properties to its defaults."""

    def __init__(self, level: OptLevel) -> None:
        self._level = level
        self.brief = level.brief
        self.more = ""

    def __call__(self, properties: Properties) -> Properties:
        properties.options.update(self._level.options())
        return properties


opt_levels = {name: _Level(level) for name, level in core_levels.OPT_LEVELS.items()}
O0, O1, O2, O3, O4, O5 = opt_levels.values()


@functools.partial(errors_at_the_call, larger=core_amp.initialize)
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int | str = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Prepare models and optimizers, in place; see `amp_patch.amp.initialize`.

    Functions are cast by apex's lists (`apex.amp.lists`) where these go beyond amp_patch's own.

    Args:
        enabled: anything that is true or false, as in apex; see `_is_enabled`.
        num_losses: 0 where a later call, with the optimizer, is to say it.
        min_loss_scale: 0 is no floor of the script's own.
        patch_torch_functions_type: of ROCm's fork, where it tells O1 from O4; not used.

    Raises:
        TypeError, RuntimeError, ValueError: as `amp_patch.amp.initialize`, also of the file that
            ``amp-patch run --rules`` names.
    """
    result = returned(models, optimizers)
    _forget_at_deactivate()
    if not _is_enabled(enabled, opt_level):
        _amp_state.opt_properties = Properties()
        session.disable(optimizers)
        return result
    _refuse_fp16_optimizers(optimizers)
    given = rules_of(None, core_levels.OPT_LEVELS, PROFILES)
    resolved = _resolve(
        opt_level,
        given.opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
    )
    level = resolved.level
    initialize_at(
        resolved,
        models,
        optimizers,
        rules=given,
        lists=rules_of_lists() if level.casts_functions else None,
        num_losses=1 if num_losses == 0 else num_losses,
        verbosity=verbosity,
        allow_half=_amp_state.allow_incoming_model_not_fp32,
        min_loss_scale=min_loss_scale or None,
        max_loss_scale=max_loss_scale,
    )
    _amp_state.opt_properties = Properties(level.options())
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    _publish(level, models, optimizers)
    if num_losses == 0:
        _amp_state.num_losses = 0
    return result


def _is_enabled(enabled: Any, opt_level: Any) -> bool:
    """Return whether it is true, as apex asked.

    Public scripts write ``initialize(model, optimizer, "O1")``, where the level stands in its
    place. The level is the default then, so what they name may be no other.

    Raises:
        TypeError: another level, or another text, which is true whatever it says.
    """
    if isinstance(enabled, str) and enabled not in ("", opt_level):
        enabled_of(enabled)
    return bool(enabled)


def _publish(level: OptLevel, models: Any, optimizers: Any) -> None:
    """Let scripts find under apex's names what `initialize` made."""
    if level.casts_functions:
        _amp_state.handle = AmpHandle("dynamic")
    if level.cast_model_type or level.cast_model_outputs:
        for model in models_of(models, allow_half=True):
            cast_direct_calls(model)
    prepared = optimizers_of(optimizers)
    for optimizer in prepared:
        attach(optimizer)
    if prepared:
        renew_scalers(prepared[0])


def _resolve(opt_level: str, by_rules: str | None, **overrides: Any) -> Resolved:
    """Return the level; under ``hard_override`` it takes what it would refuse."""
    forced_values = {}
    if _amp_state.hard_override:
        for option, value in overrides.items():
            try:
                resolve_forced(opt_level, by_rules, **{option: value})
            except RuntimeError as error:
                warn_or_err(str(error))
                forced_values[option] = value
    taken = {option: value for option, value in overrides.items() if option not in forced_values}
    level, message = resolve_forced(opt_level, by_rules, **taken)
    return Resolved(replace(level, **forced_values), message)


def _refuse_fp16_optimizers(optimizers: Any) -> None:
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise RuntimeError(
                "optimizers must not keep fp32 masters of their own, for amp.initialize() gives "
                "them some; got an FP16_Optimizer; call amp.initialize(model, optimizer) with the "
                "optimizer inside of it."
            )


def _forget_at_deactivate() -> None:
    """Have `amp.deactivate` take off what scripts find in ``_amp_state``."""
    session.call_at_deactivate(_amp_state.forget)
