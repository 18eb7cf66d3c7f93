"""The state of optimizers, entered for another tensor."""

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from amp_patch.weights.stepped_state import SteppedState


def two_optimizers() -> tuple[nn.Parameter, list[Optimizer]]:
    param = nn.Parameter(torch.zeros(2))
    optimizers = [Adam([param]), SGD([param], lr=1.0)]
    for one in optimizers:
        one.state[param] = {"average": torch.ones(2), "step": torch.ones(())}
    return param, optimizers


def test_it_moves_in_every_optimizer_that_lives_and_has_it() -> None:
    param, optimizers = two_optimizers()
    new = nn.Parameter(torch.zeros(2))
    state = SteppedState(optimizers)
    kept = optimizers.pop()
    moved = kept.state[param]
    optimizers.clear()
    state.move(param, new)
    state.move(param, nn.Parameter(torch.zeros(2)))  # of which there is none
    assert list(kept.state) == [new]
    assert kept.state[new] is moved


def test_what_has_the_shape_of_a_tensor_follows_it_to_its_device() -> None:
    _, optimizers = two_optimizers()
    there = nn.Parameter(torch.zeros(2, device="meta"))
    optimizers[0].state[there] = {"average": torch.ones(2), "step": torch.ones(())}
    SteppedState(optimizers).follow_device(there)
    state = optimizers[0].state[there]
    assert (state["average"].device.type, state["step"].device.type) == ("meta", "cpu")
