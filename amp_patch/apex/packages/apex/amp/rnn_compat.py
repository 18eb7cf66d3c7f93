"""Names of apex's module of the same name; torch's RNNs are cast by amp_patch's own rules."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RNN_NAMES", "VariableFunctionsShim", "has_old_rnns", "whitelist_rnn_cells"]

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


class VariableFunctionsShim:
    """Reaches the functions of ``torch._VF``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._VF, name)


def has_old_rnns() -> bool:
    """Return False."""
    return False


def whitelist_rnn_cells(handle: Any, verbose: bool) -> None:
    """Do nothing: `initialize` and `init` cast the cells."""
