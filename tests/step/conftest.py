"""An optimizer at O1, and its backwards that are made by hand."""

import pytest
import torch
from one_optimizer import backward_of
from torch import nn
from torch.optim import SGD, Optimizer

from amp_patch.step.optimizer_backward import OptimizerBackward


@pytest.fixture
def optimizer() -> Optimizer:
    return SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.fixture
def backward(optimizer: Optimizer) -> OptimizerBackward:
    return backward_of(optimizer)
