"""apex.amp's older interface, and casts for functions of the script's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_patch import amp
from amp_patch.amp import bfloat16_function, float_function, half_function, promote_function
from amp_patch.common.warn_once import warn_once
from amp_patch.requested_level import resolve
from amp_patch.session import session

from ._amp_state import _amp_state
from .frontend import (
    Properties,
    initialize,
    load_state_dict,
    master_params,
    opt_levels,
    state_dict,
)
from .handle import AmpHandle, NoOpHandle
from .lists.rules import rules_of_lists

__all__ = [
    "Properties",
    "bfloat16_function",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "opt_levels",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "state_dict",
]


def _but_no_class(register: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Let the name of a class pass, with a warning: apex cast what it is made from, numbers say."""

    @functools.wraps(register)
    def register_function(module: Any, name: str) -> None:
        found = getattr(module, name, None) if isinstance(name, str) else None
        if not isinstance(found, type):
            register(module, name)
            return
        call = f"amp.{register.__name__}({found.__module__}.{found.__qualname__}, 'forward')"
        mend = f"Call {call}, to cast what such layers compute with."
        warn_once(
            "a registered function computes with tensors, and a class makes objects; got the class "
            f"{name!r}, which is left as it is, for its calls had nothing to cast under apex. "
            f"{mend if issubclass(found, nn.Module) else 'Leave it out.'}"
        )

    return register_function


register_bfloat16_function = _but_no_class(amp.register_bfloat16_function)
register_float_function = _but_no_class(amp.register_float_function)
register_half_function = _but_no_class(amp.register_half_function)
register_promote_function = _but_no_class(amp.register_promote_function)


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: Any = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Cast in every function from now on, in every model, on every device.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: of the optimizers used with the handle.
        enable_caching: not used; ROCm's ``patch_type`` where it stands third.
        verbose: print a line for every tensor that is cast.
        allow_banned: run ``binary_cross_entropy`` in fp32 rather than refuse it.
        patch_type: torch.float16 or torch.bfloat16.

    Returns:
        A handle with ``wrap_optimizer``, ``scale_loss`` and ``_deactivate``.
    """
    handle: AmpHandle | NoOpHandle = NoOpHandle()
    if not enabled:
        _amp_state.handle = handle
        return handle
    if isinstance(enable_caching, torch.dtype):
        patch_type, enable_caching = enable_caching, True
    opt_level = "O4" if patch_type is torch.bfloat16 else "O1"
    session.cast_without_model(resolve(opt_level), rules_of_lists(allow_banned), bool(verbose))
    session.call_at_deactivate(_amp_state.forget)
    handle = AmpHandle(loss_scale, enable_caching, verbose, opt_level=opt_level)
    handle.casts_are_on()
    _amp_state.handle = handle
    return handle
