"""Optimizers are told apart by numbers, whichever of them are gone."""

from __future__ import annotations

import torch
from torch.optim import SGD

from amp_patch.tools.optimizer_numbers import OptimizerNumbers


def test_no_number_is_given_twice() -> None:
    numbers = OptimizerNumbers()
    optimizers = [SGD([torch.zeros(1)]) for _ in range(2)]
    assert [numbers.of(one) for one in optimizers] == [0, 1]
    del optimizers[0]
    optimizers.append(SGD([torch.zeros(1)]))
    assert [numbers.of(one) for one in optimizers] == [1, 2]
