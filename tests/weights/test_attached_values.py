"""What ``state_dict(keep_vars=True)`` gives does what the parameters do in plain PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from fine_linear import fine_linear
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.func import functional_call

from amp_patch import amp as core

LEVELS = ("O1", "O2", "O3", "O4", "O5")
HALVES = ("O2", "O3", "O5")
MASTERS = ("O2", "O5")


def prepared(level: str, lr: float = 0.125) -> tuple[nn.Linear, Any]:
    """Return a layer with numbers that half precision has not, and its optimizer."""
    model = fine_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scale = 128.0 if level in ("O1", "O2") else 1.0
    core.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    return model, optimizer


@pytest.fixture
def amp() -> Any:
    yield core
    core.deactivate()


def kept(model: nn.Module) -> dict[str, Any]:
    return model.state_dict(keep_vars=True)


def step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    with core.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_penalty_of_them_trains(amp: ModuleType, level: str) -> None:
    """As far as in plain PyTorch."""
    model, optimizer = prepared(level)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        penalty = sum(value.float().square().sum() for value in kept(model).values())
        step(model, optimizer, cast(Tensor, penalty))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, start[name] * 0.75**3, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_they_are_frozen_and_trained_by_name(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(level)
    kept(model)["weight"].requires_grad_(False)
    kept(model)["bias"].requires_grad = False
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(value.requires_grad for value in kept(model).values())
    kept(model)["weight"].requires_grad_()
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer, model(torch.ones(2, model.in_features)).float().square().mean())
    after = model.state_dict()
    assert not torch.equal(after["weight"], before["weight"])
    assert torch.equal(after["bias"], before["bias"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by", ["value", "parameter"])
def test_what_is_unfrozen_later_trains(amp: ModuleType, level: str, by: str) -> None:
    model = fine_linear().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    core.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    value = kept(model)["weight"]
    assert not value.requires_grad
    assert torch.equal(torch.from_numpy(value.numpy()), value.detach())
    (value if by == "value" else model.weight).requires_grad_(True)
    assert value.requires_grad
    value.square().sum().backward()
    torch.testing.assert_close(value.grad.float(), 2 * value.detach(), rtol=2e-2, atol=1e-3)
    value.requires_grad_(False).grad = None
    kept(model)["bias"].requires_grad_(True)
    (value.square().sum() + kept(model)["bias"].sum()).backward()
    assert value.grad is None


@pytest.mark.parametrize("level", HALVES)
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_their_gradients_are_clipped(amp: ModuleType, level: str, has_optimizer: bool) -> None:
    model = prepared(level)[0] if has_optimizer else fine_linear()
    if not has_optimizer:
        core.initialize(model, opt_level=level, verbosity=0)
    model(torch.ones(2, model.in_features)).float().sum().backward()
    nn.utils.clip_grad_norm_(kept(model).values(), 1e-2)
    assert all(value.grad.norm() < 2e-2 for value in kept(model).values())


@pytest.mark.filterwarnings("ignore:a hook of a tensor")  # at O2: it depends on the scale
@pytest.mark.parametrize("level", HALVES)
def test_hooks_on_them_get_and_return_float32(amp: ModuleType, level: str) -> None:
    """Those on what the optimizer steps as well, in its dtype."""
    model, optimizer = prepared(level)
    value, stepped = kept(model)["weight"], optimizer.param_groups[0]["params"][0]
    seen: list[Any] = []
    for one in (value, stepped):
        handle = one.register_hook(lambda g, one=one: (seen.append(g), g + one.detach())[1])
        late = value.register_post_accumulate_grad_hook(seen.append)
        model.zero_grad()
        model(torch.ones(2, model.in_features)).float().sum().backward()
        assert seen[0].dtype is one.dtype
        assert seen.pop() is value
        expected = (seen.pop() + one.detach()).to(model.weight.dtype)
        assert torch.equal(value.grad.to(model.weight.dtype), expected)
        handle.remove()
        late.remove()


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_called_with_them_trains(amp: ModuleType, level: str) -> None:
    losses = []
    model, optimizer = prepared(level)
    for _ in range(2):
        out = functional_call(model, kept(model), (torch.ones(2, model.in_features),))
        loss = out.float().square().mean()
        losses.append(loss.item())
        step(model, optimizer, loss)
    assert losses[1] < losses[0]
    assert all(p.grad is not None for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("level", LEVELS)
def test_they_have_the_gradients_of_the_parameters(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(level, lr=0.0)
    assert all(value.grad is None for value in kept(model).values())
    with core.scale_loss(model(torch.ones(2, model.in_features)).float().sum(), optimizer) as loss:
        loss.backward()
    stepped = optimizer.param_groups[0]["params"]
    for value, param in zip(kept(model).values(), stepped, strict=True):
        assert value.grad is param.grad
    value = kept(model)["bias"]
    value.grad = torch.ones_like(value)
    assert stepped[1].grad.eq(1.0).all()
    for value in kept(model).values():
        del value.grad
    assert [p.grad for p in (*stepped, *model.parameters())] == [None] * 4


@pytest.mark.parametrize("level", HALVES)
def test_they_are_differentiated_by(amp: ModuleType, level: str) -> None:
    """The gradients of the half parameters, in float32; also of what was computed of them."""
    model, _ = prepared(level)

    def loss() -> Tensor:
        return model(torch.ones(2, model.in_features)).float().square().mean()

    values, params = list(kept(model).values()), list(model.parameters())
    found = torch.autograd.grad(loss(), values)
    expected = torch.autograd.grad(loss(), params)
    assert [g.dtype for g in found] == [v.dtype for v in values]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other.float())
    loss().backward(inputs=values)
    assert [torch.equal(cast(Tensor, p.grad), g) for p, g in zip(params, expected, strict=True)]
    (slope,) = torch.autograd.grad(values[1].square().sum(), values[1:])
    torch.testing.assert_close(slope, 2 * values[1].detach(), rtol=2e-2, atol=1e-3)
    with pytest.raises(RuntimeError, match="at index 0 appears to not have been used in the graph"):
        torch.autograd.grad(values[1].sum(), values)
    seen: list[Any] = []
    register_multi_grad_hook(values, seen.append)
    loss().backward()
    assert [g.dtype for g in seen[0]] == [v.dtype for v in values]


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_on_them_are_called_in_the_backward_of_the_model(amp: ModuleType, level: str) -> None:
    model, _ = prepared(level)
    seen: list[Any] = []
    value = kept(model)["weight"]
    with pytest.warns() if level == "O1" else pytest.MonkeyPatch.context():
        handles = [value.register_hook(seen.append)]
        handles.append(value.register_post_accumulate_grad_hook(seen.append))
    model(torch.ones(2, model.in_features)).float().sum().backward()
    assert len(seen) == 2
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("level", HALVES)
def test_they_are_exact_and_so_are_copies_and_what_is_saved(amp: ModuleType, level: str) -> None:
    """These are ordinary parameters, which load without amp_patch."""
    model, _ = prepared(level)
    exact, file = model.state_dict(), io.BytesIO()
    torch.save(kept(model), file)
    file.seek(0)
    for state in (
        kept(model),
        copy.deepcopy(kept(model)),
        pickle.loads(pickle.dumps(kept(model))),
        torch.load(file, weights_only=True),
    ):
        for name, value in state.items():
            assert torch.equal(value, exact[name])
            assert value.dtype is torch.float32
            assert value.requires_grad
    assert type(copy.deepcopy(kept(model)["weight"])) is nn.Parameter
    fresh = nn.Linear(model.in_features, model.out_features)
    fresh.load_state_dict(kept(model))
    assert torch.equal(fresh.weight, exact["weight"])


@pytest.mark.parametrize("level", HALVES)
@pytest.mark.parametrize("by", ["in place", "data", "new data"])
def test_what_is_written_to_them_is_in_the_model(amp: ModuleType, level: str, by: str) -> None:
    model, _ = prepared(level)
    value = kept(model)["weight"]
    if by == "in place":
        with torch.no_grad():
            value.copy_(torch.full_like(value, 0.3))
    elif by == "data":
        value.data.fill_(0.3)
    else:
        value.data = torch.full_like(value, 0.3)
    model(torch.ones(2, model.in_features))
    assert model.weight.eq(torch.tensor(0.3).to(model.weight.dtype)).all()
    assert level == "O3" or model.state_dict()["weight"].eq(0.3).all()


@pytest.mark.parametrize("level", MASTERS)
def test_what_a_step_changes_may_not_be_differentiated_any_more(
    amp: ModuleType, level: str
) -> None:
    """Torch says so, as of parameters."""
    model, optimizer = prepared(level)
    penalty = kept(model)["weight"].square().sum()
    step(model, optimizer, model(torch.ones(2, model.in_features)).float().sum())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@pytest.mark.parametrize("level", HALVES)
def test_without_grad_and_in_inference_mode_they_require_their_gradients(
    amp: ModuleType, level: str
) -> None:
    model, _ = prepared(level)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert all(value.requires_grad for value in kept(model).values())


def test_a_state_without_keep_vars_has_plain_tensors(amp: ModuleType) -> None:
    model, _ = prepared("O2")
    assert {type(value) for value in model.state_dict().values()} == {Tensor}


def test_afterwards_they_stand_for_the_parameters(amp: ModuleType) -> None:
    model, _ = prepared("O2")
    value = kept(model)["weight"]
    core.deactivate()
    assert torch.equal(value, model.weight)
    model.weight.grad = torch.ones_like(model.weight)
    assert torch.equal(value.grad, model.weight.grad)
    value.requires_grad_(False)
    assert not model.weight.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_is_made_of_them_has_the_parameters(amp: ModuleType, level: str) -> None:
    model, _ = prepared(level)
    values = kept(model)
    assert all(isinstance(value, nn.Parameter) and value.is_leaf for value in values.values())
    for given in (values.values(), [{"params": values["weight"]}], values.items()):
        optimizer = torch.optim.SGD(cast(Any, given), lr=0.125)
        assert optimizer.param_groups[0]["params"][0] is model.weight


def test_a_group_that_is_added_later_may_hold_them(amp: ModuleType) -> None:
    model = fine_linear()
    optimizer = torch.optim.SGD([model.weight], lr=0.125)
    core.initialize(model, optimizer, opt_level="O2", loss_scale=1.0, verbosity=0)
    optimizer.add_param_group({"params": kept(model)["bias"]})
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer, model(torch.ones(2, model.in_features)).float().square().mean())
    assert not torch.equal(model.state_dict()["bias"], before["bias"])


def test_an_optimizer_of_them_that_is_not_prepared_is_refused(amp: ModuleType) -> None:
    """As is one of the model's parameters."""
    model, _ = prepared("O2")
    optimizer = torch.optim.SGD(kept(model).values(), lr=0.125)
    model(torch.ones(2, model.in_features)).float().sum().backward()
    with pytest.raises(RuntimeError, match="amp.initialize"):
        optimizer.step()
