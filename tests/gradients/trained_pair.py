"""A model that amp prepares, beside the same one in fp32."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import torch
from support import scaled_backward
from torch import Tensor, nn

INPUTS = torch.randn(4, 16, 4, generator=torch.Generator().manual_seed(0))


class Pair:
    """A model that amp prepares, and the same in fp32."""

    def __init__(self, amp: ModuleType, level: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.amp = amp
        self.plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.model: nn.Module = copy.deepcopy(self.plain)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.model, self.optimizer = amp.initialize(
            self.model, optimizer, opt_level=level, verbosity=0, **options
        )

    def backward(self, inputs: Tensor, **options: Any) -> None:
        self.plain(inputs).square().mean().backward()
        loss = self.model(inputs).float().square().mean()
        scaled_backward(self.amp, loss, self.optimizer, **options)

    def assert_equal_gradients(self) -> None:
        for param, other in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.float(), other.grad, rtol=3e-2, atol=3e-3)
