"""Optimizers that amp.initialize() was not given, or that are hardly optimizers."""

import gc
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.optim import SGD, Optimizer

from amp_patch.session import session
from amp_patch.step import prepared_optimizers

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
WITH_MASTERS = ("O2", "O5")
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def train_step(amp: ModuleType, model: nn.Module, optimizer: Any) -> None:
    scaled_backward(amp, model(X).float().square().mean(), optimizer)
    optimizer.step()


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_half_parameters_that_have_masters_are_not_stepped_by_another(
    amp: ModuleType, level: str
) -> None:
    model = nn.Linear(3, 2)
    optimizer, unknown = SGD(model.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train_step(amp, model, optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"type SGD that holds 2 of them, and that amp.initialize"
    ):
        unknown.step()
    assert all(map(torch.equal, before, model.parameters()))


def gradients(amp: ModuleType, level: str, how: str, order: int, *delays: bool) -> list[Any]:
    """Return what layers have after `deactivate`, of which two optimizers hold the second one."""
    layers = nn.ModuleList([nn.Linear(2, 1) for _ in range(3)])
    shared = layers[1].parameters() if how == "shared" else []
    first = SGD([{"params": layer.parameters()} for layer in layers[:2]], lr=1.0)
    second = SGD([*layers[2].parameters(), *shared], lr=1.0)
    both = [first, second][::order]
    amp.initialize(layers, both, opt_level=level, loss_scale=8.0, verbosity=0)
    if how == "moved":
        second.param_groups.append(first.param_groups.pop())
    elif how == "left":
        first.param_groups.pop()
    inputs = torch.ones(1, 2, dtype=layers[0].weight.dtype)
    for delay, reached in zip(delays, (layers[1], layers[2]), strict=False):
        loss = reached(inputs).float().sum() + layers[0](inputs).float().sum()
        scaled_backward(amp, loss, [first, second], delay_unscale=delay)
    amp.deactivate()
    return [None if layer.bias.grad is None else layer.bias.grad.item() for layer in layers]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("how", ["shared", "moved", "left"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_parameter_that_two_optimizers_hold_or_have_held_keeps_its_gradient_to_the_end(
    amp: ModuleType, level: str, how: str, order: int
) -> None:
    assert gradients(amp, level, how, order, False, True) == [2.0, 1.0, 1.0]
    assert gradients(amp, level, how, order, True) == [1.0, 1.0, None]
    assert gradients(amp, level, how, order, False) == [1.0, 1.0, None]


@pytest.mark.parametrize("stepped", [0, 1])
def test_an_unknown_optimizer_is_refused_whichever_of_its_parameters_have_masters(
    amp: ModuleType, stepped: int
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    count = len(list(model[stepped].parameters()))
    optimizer, unknown = SGD(model[stepped].parameters()), SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    model(X).float().square().mean().backward()
    with pytest.raises(RuntimeError, match=rf"that holds {count} of them, and that amp"):
        unknown.step()


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_an_optimizer_without_masters_is_warned_of_once(amp: ModuleType, level: str) -> None:
    model = amp.initialize(nn.Linear(3, 2), opt_level=level, verbosity=0)
    optimizer = SGD(model.parameters(), lr=0.5)
    model(X).float().square().mean().backward()
    with pytest.warns(UserWarning, match=r"This SGD steps 2 parameters.*no fp32 masters"):
        optimizer.step()
    optimizer.step()  # warnings are errors here


@pytest.mark.parametrize("level", LEVELS)
def test_optimizers_of_other_models_step_as_before(amp: ModuleType, level: str) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2).bfloat16()
    amp.initialize(model, SGD(model.parameters(), lr=0.5), opt_level=level, verbosity=0)
    other.weight.grad = torch.ones_like(other.weight)
    expected = other.weight.detach() - 0.5
    SGD(other.parameters(), lr=0.5).step()
    assert torch.equal(other.weight, expected)


class Wrapper(Optimizer):
    """Steps another optimizer; never calls Optimizer.__init__, as some wrappers do."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrapper_without_an_optimizers_hooks_trains(amp: ModuleType, level: str) -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    wrapper = Wrapper(SGD(model.parameters(), lr=0.5))
    amp.initialize(model, wrapper, opt_level=level, loss_scale=8.0, verbosity=0)
    plain = SGD(twin.parameters(), lr=0.5)
    for _ in range(3):
        wrapper.zero_grad()
        train_step(amp, model, wrapper)
        plain.zero_grad()
        twin(X).square().mean().backward()
        plain.step()
    got, expected = model.state_dict(), twin.state_dict()
    for name in expected:
        torch.testing.assert_close(got[name].float(), expected[name], rtol=2e-2, atol=2e-2)
    amp.deactivate()


@pytest.mark.parametrize("level", LEVELS)
def test_optimizers_are_found_alone_and_in_lists_where_all_are_set_up(
    amp: ModuleType, level: str
) -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    one, other = optimizers = [SGD(model.parameters(), lr=0.5) for model in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    prepared = session.optimizers
    steps = [prepared.steps[optimizer] for optimizer in optimizers]
    assert prepared.steps_of(one) == steps[:1]
    assert prepared.steps_of((one, other, one)) == steps
    unknown = SGD(nn.Linear(3, 2).parameters(), lr=0.5)
    for given in (unknown, [], [one, unknown], [one, None], None, {one}):
        assert prepared.steps_of(given) == []
    assert prepared.others(steps) == []
    assert prepared.others(steps[:1]) == [steps[1].backward.others]


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_what_was_set_up_goes_where_a_later_optimizer_cannot_be(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    models = [nn.Linear(3, 2) for _ in range(3)]
    known, one, other = (SGD(model.parameters(), lr=0.5) for model in models)
    amp.initialize(models[0], known, opt_level=level, verbosity=0)
    monkeypatch.setattr(prepared_optimizers, "local_optimizer", {one: one}.__getitem__)
    with pytest.raises(KeyError) as caught:
        amp.initialize(models[1:], [one, other], opt_level=level, verbosity=0)
    assert session.optimizers.others(session.optimizers.steps_of(known)) == []
    assert caught.tb  # whose frames hold what was set up for one
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    del caught
    gc.collect()
    assert unraisable == []


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_was_dropped_is_none_of_the_others(amp: ModuleType, level: str) -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [SGD(model.parameters(), lr=0.5) for model in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    kept = session.optimizers.steps[optimizers[0]]
    del optimizers[1]
    assert session.optimizers.others([kept]) == []
