"""What an optimizer holds, while a script changes its groups."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from amp_patch.session import session
from amp_patch.step.held_params import HeldParams


def ids(tensors: list[Tensor]) -> list[int]:
    return list(map(id, tensors))


@pytest.fixture
def optimizer() -> Optimizer:
    return SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.fixture
def held(optimizer: Optimizer) -> HeldParams:
    return HeldParams(optimizer, masters=None)


def test_pairs_are_the_same_object_until_a_group_is_added(
    optimizer: Optimizer, held: HeldParams
) -> None:
    pairs = held.pairs()
    assert held.pairs() is pairs
    added = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added]})
    assert ids(held.pairs().model) == ids(held.pairs().master) == [*ids(pairs.model), id(added)]


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_parameter_in_the_place_of_an_equal_one_is_seen(size: int) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(size))], lr=1.0)
    held = HeldParams(optimizer, masters=None)
    held.pairs()
    other = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(size))
    assert ids(held.pairs().model) == [id(other)]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_repeated_parameter_is_held_once() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    optimizer = SGD([one, other, one], lr=1.0)
    repeating = HeldParams(optimizer, masters=None)
    pairs = repeating.pairs()
    assert ids(pairs.model) == ids(pairs.master) == [id(one), id(other)]
    assert repeating.pairs() is pairs
    assert repeating.are_repeated
    del optimizer.param_groups[0]["params"][2]
    assert repeating.pairs() is not pairs
    assert not repeating.are_repeated


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_repeated_parameter_is_trained_as_in_fp32(
    amp: ModuleType, level: str, make: Callable[..., Optimizer]
) -> None:
    """Which steps it twice; so a gradient that is divided by the scale twice would be seen."""

    def trained(level: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = make([*model.parameters(), *model[0].parameters()], lr=0.05)
        if level is not None:
            options = {"opt_level": level, "init_scale": 256.0, "verbosity": 0}
            model, optimizer = amp.initialize(model, optimizer, **options)
        inputs = torch.randn(16, 4)
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(inputs).float() - 1).square().mean()
            if level is None:
                loss.backward()
            else:
                scaled_backward(amp, loss, optimizer)
            optimizer.step()
        return list(model.state_dict().values())

    for found, expected in zip(trained(level), trained(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.01)


def test_there_are_none_without_the_optimizer() -> None:
    held = HeldParams(SGD([nn.Parameter(torch.zeros(1))]), masters=None)
    assert held.pairs().model == []


def test_the_models_own_parameters_in_the_groups_are_replaced_by_their_masters(
    amp: ModuleType,
) -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    masters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = list(model.parameters())
    pairs = session.optimizers.steps[optimizer].backward.pairs()
    assert ids(pairs.model) == ids([*model.parameters()])
    assert ids(pairs.master) == ids(optimizer.param_groups[0]["params"]) == ids(masters)


@pytest.mark.parametrize("where", ["in the group", "in another"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_models_own_parameters_beside_their_masters_are_stepped_once(
    amp: ModuleType, level: str, where: str
) -> None:
    """As a library adds what it does not find in the groups, after a model has grown."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    groups, new = optimizer.param_groups, nn.Parameter(torch.zeros(1))
    masters = [*groups[0]["params"]]
    if where == "in the group":
        groups[0]["params"] += [*model.parameters(), new]
    else:
        groups.append({**groups[0], "params": [*model.parameters(), new]})
    before = [master.clone() for master in masters]
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    for master, was in zip(masters, before, strict=True):
        torch.testing.assert_close(master, was - 1.0)
    stepped = [param for group in groups for param in group["params"]]
    assert ids(stepped) == ids([*masters, new])
