"""Parameters of ``optimizer.param_groups`` that are differentiated by: at O2 and O5 masters."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from training import assert_equal, batches, loss_of, make, prepared, trained_rightly, weights

from amp_patch import amp as core

LEVELS = ("O1", "O2", "O3", "O4", "O5")
HALVES = ("O2", "O5")
#: Of the gradients in half precision, against plain PyTorch.
NEAR = {"rtol": 3e-2, "atol": 3e-3}


def stepped(optimizer: Any) -> list[Tensor]:
    """Return the parameters as a script takes them from the optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


Backward = Callable[[Tensor, list[Tensor]], object]
BACKWARD: dict[str, Backward] = {
    "method": lambda loss, params: loss.backward(inputs=params),
    "function": lambda loss, params: torch.autograd.backward([loss], inputs=params),
    "each twice": lambda loss, params: loss.backward(inputs=[*params, *params]),
    "edges": lambda loss, params: loss.backward(inputs=[*map(get_gradient_edge, params)]),
}
if torch.__version__ >= "2.13":
    BACKWARD["dict"] = lambda loss, params: loss.backward(inputs=dict(enumerate(params)))


@pytest.mark.parametrize("level", HALVES)
@pytest.mark.parametrize("how", BACKWARD)
def test_a_backward_by_them_trains_as_one_without(amp: ModuleType, level: str, how: str) -> None:
    model, optimizer = prepared(amp, level)
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            BACKWARD[how](scaled_loss, stepped(optimizer))
        optimizer.step()
    assert_equal(weights(model), trained_rightly(level))


def test_so_does_one_outside_of_a_block(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O5")
    for inputs in batches():
        optimizer.zero_grad()
        loss_of(model, inputs).backward(inputs=stepped(optimizer))
        optimizer.step()
    assert_equal(weights(model), trained_rightly("O5"))


@pytest.mark.parametrize("level", HALVES)
def test_only_what_is_named_gets_a_gradient(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    first = amp.master_params(optimizer)
    with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
        scaled_loss.backward(inputs=[next(iter(first))])
    assert [p.grad is not None for p in stepped(optimizer)] == [True, False, False, False]


@pytest.mark.parametrize("level", ["O2"])
@pytest.mark.parametrize("is_edge", [False, True])
def test_a_backward_of_another_loss_by_them_is_refused(
    amp: ModuleType, level: str, is_edge: bool
) -> None:
    """As it is where they are the model's parameters: the block divides what it writes."""
    model, optimizer = prepared(amp, level)
    loss, params = loss_of(model, next(batches())), stepped(optimizer)
    named: list[Any] = [*map(get_gradient_edge, params)] if is_edge else params
    with (
        pytest.raises(RuntimeError, match="must be that of the loss it yields"),
        amp.scale_loss(loss * 2, optimizer),
    ):
        loss.backward(inputs=named)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by", ["tensors", "edges"])
def test_their_gradients_are_those_of_plain_pytorch(amp: ModuleType, level: str, by: str) -> None:
    """In float32, which masters are."""
    (plain, _), (model, optimizer) = make(), prepared(amp, level)
    inputs, params = next(batches()), stepped(optimizer)
    asked: list[Any] = params if by == "tensors" else [*map(get_gradient_edge, params)]
    found = torch.autograd.grad(loss_of(model, inputs), asked)
    expected = torch.autograd.grad(loss_of(plain, inputs), list(plain.parameters()))
    assert [g.dtype for g in found] == [p.dtype for p in params]
    torch.testing.assert_close([g.float() for g in found], list(expected), **NEAR)


@pytest.mark.parametrize("level", HALVES)
def test_they_may_stand_among_inputs_and_half_parameters(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    inputs, (weight, bias, *_) = next(batches()).requires_grad_(), stepped(optimizer)
    half = model.first.weight
    asked = [bias, inputs, half, weight]
    found = torch.autograd.grad(loss_of(model, inputs), asked)
    for grad, one in zip(found, asked, strict=True):
        assert (grad.dtype, grad.shape) == (one.dtype, one.shape)
    assert torch.equal(found[3], found[2].float())


@pytest.mark.parametrize("level", HALVES)
def test_a_penalty_of_masters_is_added_to_what_comes_to_the_half_parameters(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    params, inputs = stepped(optimizer), next(batches())
    of_model = torch.autograd.grad(loss_of(model, inputs), params)
    loss = loss_of(model, inputs) + params[0].square().sum()
    found = torch.autograd.grad(loss, params)
    assert_equal(list(found), [of_model[0] + 2 * params[0].detach(), *of_model[1:]])
    (alone,) = torch.autograd.grad(params[0].square().sum(), [params[0]])
    assert torch.equal(alone, 2 * params[0])


@pytest.mark.parametrize("level", HALVES)
def test_they_are_differentiated_twice(amp: ModuleType, level: str) -> None:
    """A product with the Hessian, as conjugate gradients and influence functions take it."""

    def product(model: nn.Module, params: list[Tensor]) -> list[Tensor]:
        loss = loss_of(model, next(batches()))
        grads = torch.autograd.grad(loss, params, create_graph=True)
        slope = sum(g.float().sum() for g in grads)
        assert isinstance(slope, Tensor)
        again = torch.autograd.grad(slope, params, retain_graph=True, materialize_grads=True)
        return [g.float() for g in again]

    (plain, _), (model, optimizer) = make(), prepared(amp, level)
    found, expected = product(model, stepped(optimizer)), product(plain, list(plain.parameters()))
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize("level", HALVES)
def test_they_are_differentiated_in_a_batch(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    params, out = stepped(optimizer), model(next(batches())).float().square().mean(dim=0)
    each = [torch.autograd.grad(one, params, retain_graph=True) for one in out]
    batch = torch.autograd.grad(out, params, torch.eye(2), is_grads_batched=True)
    for i, grads in enumerate(each):
        torch.testing.assert_close([g[i] for g in batch], list(grads), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("level", HALVES)
def test_functions_of_them_have_their_jacobian(amp: ModuleType, level: str) -> None:
    _, optimizer = prepared(amp, level)
    weight = stepped(optimizer)[0]
    for creates in (False, True):
        found = torch.autograd.functional.jacobian(
            lambda w: w.square().sum(), weight, create_graph=creates
        )
        assert torch.equal(found, 2 * weight)


@pytest.mark.parametrize("level", HALVES)
def test_one_that_is_not_used_is_refused_or_has_none(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    params = stepped(optimizer)

    def loss() -> Tensor:
        return model.last.weight.float().square().sum()

    with pytest.raises(RuntimeError, match="at index 0 appears to not have been used in the graph"):
        torch.autograd.grad(loss(), params)
    found = torch.autograd.grad(loss(), params, allow_unused=True)
    assert [g is None for g in found] == [True, True, False, True]
    found = torch.autograd.grad(loss(), params, materialize_grads=True)
    assert [float(g.norm()) > 0 for g in found] == [False, False, True, False]


@pytest.mark.parametrize("level", HALVES)
def test_one_whose_weight_is_frozen_is_refused(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    params = stepped(optimizer)
    model.first.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"not have been used in the graph|not require grad"):
        torch.autograd.grad(loss_of(model, next(batches())), params)


@pytest.mark.parametrize("level", HALVES)
def test_in_a_block_they_are_multiplied_by_the_scale_as_the_half_ones_are(
    amp: ModuleType, level: str
) -> None:
    """What is made of them is assigned to the model's parameters (docs/gradients.md)."""
    model, optimizer = prepared(amp, level)
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            grads = torch.autograd.grad(scaled_loss, stepped(optimizer))
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad.to(param.dtype)
        optimizer.step()
    assert_equal(weights(model), trained_rightly(level))


def test_torchs_functions_are_its_own_again_afterwards(amp: ModuleType) -> None:
    before = torch.autograd._engine_run_backward
    prepared(amp, "O2")
    assert torch.autograd._engine_run_backward is not before
    core.deactivate()
    assert torch.autograd._engine_run_backward is before
    assert torch.autograd.graph._engine_run_backward is before
