"""What tests of the checks of arguments share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD

MEND = "call model, optimizer = amp.initialize(model, optimizer, opt_level=...)."


def optimizer(kind: type = SGD) -> Any:
    return kind([nn.Parameter(torch.zeros(1))], lr=0.1)


def frozen(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(1, 1).to(dtype).requires_grad_(False)
