"""One or several become a list, and what is of another kind is described."""

from __future__ import annotations

import pytest
import torch
from arguments_support import optimizer
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from amp_patch import arguments
from amp_patch.arguments.kinds import described


@pytest.mark.parametrize("container", [list, tuple])
def test_models_and_optimizers_become_lists_in_their_order(container: type) -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [optimizer(), optimizer(Adam)]
    assert arguments.models_of(container(models)) == models
    assert arguments.models_of(models[0]) == models[:1]
    assert arguments.optimizers_of(container(optimizers)) == optimizers
    assert arguments.optimizers_of(optimizers[0]) == optimizers[:1]
    assert arguments.optimizers_of(None) == []


def test_a_wrapper_is_told_where_it_holds_what_is_meant() -> None:
    holds = "StepLR, which holds one to pass: its .optimizer"
    assert described(StepLR(optimizer(), 5), Optimizer) == holds
    assert described(torch.zeros(1), Optimizer) == "Tensor"


def test_another_class_of_the_same_name_comes_with_its_module() -> None:
    other = type("Optimizer", (), {"__module__": "fastai.optimizer"})()
    assert described(other, Optimizer) == "fastai.optimizer.Optimizer"
    assert described(other, nn.Module) == "Optimizer"
