"""What tests of updates share: the inputs of a group's step, and a comparison of two optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from amp_patch.optimizers.groups import GroupUpdate, StepInputs


def random_values(generator: torch.Generator) -> list[Tensor]:
    """Return tensors of several shapes and magnitudes."""
    shapes = [(3, 5), (1,), (17,)]
    return [
        torch.randn(shape, generator=generator) * 10.0**power
        for power, shape in enumerate(shapes, start=-1)
    ]


def give_gradients(optimizers: list[Optimizer], generator: torch.Generator) -> None:
    """Give optimizers of the same parameters the same gradients."""
    grads = random_values(generator)
    for optimizer in optimizers:
        for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
            param.grad = grad.clone()


def inputs_of(optimizer: Optimizer) -> StepInputs:
    """Return what its first group steps now; all of its parameters have gradients."""
    group = optimizer.param_groups[0]
    params = group["params"]
    states = [optimizer.state[param] for param in params]
    return StepInputs(group, group, params, [param.grad for param in params], states)


def same_state(ours: Optimizer, theirs: Optimizer) -> None:
    """Assert that parameters and state are equal to the bit."""
    for one, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(one, other)
        mine, expected = ours.state.get(one, {}), theirs.state.get(other, {})
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            assert value is mine[name] is None or torch.equal(mine[name], value)


def assert_torchs_steps(
    kind: Callable[..., Optimizer], update: GroupUpdate, options: dict[str, Any], seed: int
) -> None:
    """Assert that three steps leave the bits, and the state, that torch's own leave."""
    generator = torch.Generator().manual_seed(seed)
    values = random_values(generator)
    ours, theirs = (
        kind([nn.Parameter(value.clone()) for value in values], lr=0.1, **options) for _ in range(2)
    )
    for _ in range(3):
        give_gradients([ours, theirs], generator)
        theirs.step()
        with torch.no_grad():
            update.step(inputs_of(ours))
        same_state(ours, theirs)


def _adagrad_makes_states() -> bool:
    param = nn.Parameter(torch.ones(1))
    optimizer = Adagrad([param])
    optimizer.state.clear()
    param.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


#: Whether torch's Adagrad makes the state of a parameter that has none; that of torch 2.6 fails.
ADAGRAD_MAKES_STATES = _adagrad_makes_states()
