"""What models and optimizers held is put back: the very tensors, not copies of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from amp_patch.weights.rollback import Attributes, Snapshot


def trained() -> tuple[nn.Module, Optimizer]:
    """Return a model with buffers and a frozen parameter, and its optimizer, one step on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].bias.requires_grad_(False)
    optimizer = Adam(model.parameters())
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def held(model: nn.Module, optimizer: Optimizer) -> list[object]:
    """Return all tensors that a model and its optimizer hold, those of parameters by address."""
    params = list(model.parameters())
    addresses = [(param.data_ptr(), param.dtype) for param in params]
    grads = [param.grad for param in params]
    groups = [param for group in optimizer.param_groups for param in group["params"]]
    states = [value for param in groups for value in optimizer.state.get(param, {}).values()]
    return [*addresses, *map(id, [*grads, *model.buffers(), *groups, *states])]


def test_conversion_to_half_is_taken_back_tensor_by_tensor() -> None:
    model, optimizer = trained()
    before = held(model, optimizer)
    snapshot = Snapshot([model], [optimizer])
    values = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = None
        param.data = param.data.half()
    model.half()
    assert held(model, optimizer) != before
    snapshot.restore()
    assert held(model, optimizer) == before
    for param, value in zip(model.parameters(), values, strict=True):
        torch.testing.assert_close(param.detach(), value, rtol=0, atol=0)


def test_groups_and_state_are_taken_back_in_the_lists_that_the_optimizer_has() -> None:
    model, optimizer = trained()
    before = held(model, optimizer)
    params = optimizer.param_groups[0]["params"]
    snapshot = Snapshot([model], [optimizer])
    first = params[0]
    params[:] = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer.state[params[0]] = optimizer.state.pop(first)
    optimizer.state[params[0]]["step"] = torch.tensor(7.0)
    snapshot.restore()
    assert held(model, optimizer) == before
    assert optimizer.param_groups[0]["params"] is params
    assert optimizer.state[first]["step"] == 1


def test_what_had_no_gradient_and_no_state_has_none_again() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    snapshot = Snapshot([model], [optimizer])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    snapshot.restore()
    assert model.weight.grad is None
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_buffers_of_what_torch_jit_compiled_are_no_dict_and_are_taken_back() -> None:
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)))
    snapshot = Snapshot([model], [])
    before = model[0].running_mean
    model[0].running_mean = torch.ones(2)
    snapshot.restore()
    assert torch.equal(model[0].running_mean, torch.zeros(2))
    assert model[0].running_mean.data_ptr() == before.data_ptr()


def test_options_of_groups_are_taken_back() -> None:
    model, optimizer = trained()
    group = optimizer.param_groups[0]
    before = dict(group)
    snapshot = Snapshot([model], [optimizer])
    group.update(fused=True, extra=1)
    del group["eps"]
    snapshot.restore()
    assert optimizer.param_groups[0] is group
    assert group == before


def test_attributes_and_hooks_of_an_optimizer_are_taken_back() -> None:
    model, optimizer = trained()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    before = dict(vars(optimizer))
    attributes = Attributes([optimizer])
    optimizer.register_step_pre_hook(lambda *_: calls.append("left"))
    optimizer.step, optimizer.extra = None, 1
    optimizer.defaults = {}
    attributes.restore()
    assert vars(optimizer) == before
    optimizer.step()
    assert calls == ["before"]
