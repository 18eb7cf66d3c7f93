"""apex.amp: amp_patch's core under apex's names, with what scripts reach for behind them."""

from . import (
    _initialize,
    _process_optimizer,
    amp,
    compat,
    frontend,
    handle,
    lists,
    opt,
    rnn_compat,
    scaler,
    utils,
    wrap,
)
from ._amp_state import _amp_state
from .amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, master_params, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "_amp_state",
    "_initialize",
    "_process_optimizer",
    "amp",
    "bfloat16_function",
    "compat",
    "disable_casts",
    "float_function",
    "frontend",
    "half_function",
    "handle",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "opt",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rnn_compat",
    "scale_loss",
    "scaler",
    "state_dict",
    "utils",
    "wrap",
]
