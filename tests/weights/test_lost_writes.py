"""Half weights written to after their masters: what is lost is told of, the rest is kept."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.optim import SGD, Optimizer

X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture(params=["O2", "O5"])
def run(amp: ModuleType, request: pytest.FixtureRequest) -> tuple[nn.Linear, Optimizer]:
    """Return a model after a step, and its optimizer."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=request.param, verbosity=0)
    scaled_backward(amp, model(X).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def decay_what_is_given(amp: ModuleType, optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        master.mul_(0.5)


def decay_groups(amp: ModuleType, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for master in group["params"]:
            master.mul_(0.5)


@torch.no_grad()
def test_a_write_behind_one_to_the_master_warns(
    amp: ModuleType, run: tuple[nn.Linear, Optimizer]
) -> None:
    model, optimizer = run
    decay_what_is_given(amp, optimizer)
    model.weight.fill_(3.0)
    with pytest.warns(UserWarning, match=r"writes to both of a weight of shape \(2, 3\)"):
        model(X)
    assert not model.weight.eq(3.0).any()


@pytest.mark.parametrize("decay", [decay_what_is_given, decay_groups])
@torch.no_grad()
def test_a_write_that_agrees_or_comes_after_a_forward_is_no_loss(
    amp: ModuleType, run: tuple[nn.Linear, Optimizer], decay: Callable[..., None]
) -> None:
    model, optimizer = run
    decay(amp, optimizer)
    for weight, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        weight.copy_(master)  # as fp16_utils does
    model(X)
    decay(amp, optimizer)
    model(X)
    model.weight.fill_(3.0)
    model(X)  # warnings are errors here
    assert model.weight.eq(3.0).all()
    assert next(amp.master_params(optimizer)).eq(3.0).all()


@torch.no_grad()
def test_a_load_reaches_the_master_and_is_no_loss(
    amp: ModuleType, run: tuple[nn.Linear, Optimizer]
) -> None:
    model, optimizer = run
    masters = list(amp.master_params(optimizer))
    loaded = {name: value + 2.0**-14 for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    for master in masters:
        master.mul_(0.5)
    model(X)  # warnings are errors here
    for master, value in zip(masters, loaded.values(), strict=True):
        assert torch.equal(master, value * 0.5)


def test_a_write_by_data_to_a_given_master_still_counts(
    amp: ModuleType, run: tuple[nn.Linear, Optimizer]
) -> None:
    model, optimizer = run
    for master in amp.master_params(optimizer):
        master.data.fill_(3.0)
    model(X)
    assert all(param.eq(3.0).all() for param in model.parameters())


def clip(amp: ModuleType, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 100.0)


def clip_those_with_gradients(amp: ModuleType, optimizer: Optimizer) -> None:
    used = (master for master in amp.master_params(optimizer) if master.grad is not None)
    nn.utils.clip_grad_value_(used, 100.0)


def read_norms(amp: ModuleType, optimizer: Optimizer) -> None:
    torch.stack([master.grad.norm() for master in amp.master_params(optimizer)]).norm().item()


def decay_by_data_and_clip(amp: ModuleType, optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        master.data.mul_(0.5)
    clip(amp, optimizer)


@pytest.mark.parametrize("read", [clip, clip_those_with_gradients, read_norms])
def test_masters_that_are_only_read_are_not_taken_to_be_written(
    amp: ModuleType, run: tuple[nn.Linear, Optimizer], read: Callable[..., None]
) -> None:
    """An adversarial training moves a weight after the clip, and back before the step."""
    model, optimizer = run
    for _ in range(20):  # beyond the first steps it is looked for because it was found
        scaled_backward(amp, model(X).square().mean(), optimizer)
        read(amp, optimizer)
        kept = model.weight.data.clone()
        model.weight.data.fill_(3.0)
        model(X)
        assert model.weight.eq(3.0).all()
        model.weight.data = kept
        model(X)
        assert torch.equal(model.weight, kept)
        optimizer.step()
        optimizer.zero_grad()


def test_a_write_to_masters_before_they_are_clipped_still_counts(
    amp: ModuleType, run: tuple[nn.Linear, Optimizer]
) -> None:
    model, optimizer = run
    scaled_backward(amp, model(X).square().mean(), optimizer)
    expected = [param.detach().float() / 2 for param in model.parameters()]
    decay_by_data_and_clip(amp, optimizer)
    model(X)
    for param, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.float(), value, rtol=0.01, atol=1e-3)
