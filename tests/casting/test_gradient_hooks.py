"""Hooks of float32 gradients compute without casts at every level, as beside torch.autocast."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from casting_support import Product
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from amp_patch import amp as core
from amp_patch.casting import gradient_hooks

pytestmark = pytest.mark.filterwarnings("ignore:a hook of a")  # of the loss scale

MATRIX = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
HALVES = {"O1": torch.float16, "O4": torch.bfloat16, "O2": torch.float16, "O5": torch.bfloat16}
#: Gradients, each with the product of it and `MATRIX`.
Seen = list[tuple[Tensor, Tensor]]


class Model(nn.Module):
    """A norm, whose gradients are in float32 at O1 and O4, and a linear, whose output's are not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def note(seen: Seen, grad: Tensor) -> None:
    seen.append((grad.clone(), torch.mm(grad, MATRIX)))


def of_parameter(model: Model, seen: Seen) -> Any:
    return model.linear.weight.register_hook(lambda grad: note(seen, grad))


def after_accumulation(model: Model, seen: Seen) -> Any:
    weight = model.linear.weight
    return weight.register_post_accumulate_grad_hook(lambda param: note(seen, param.grad))


def of_module(model: Model, seen: Seen) -> Any:
    return model.norm.register_full_backward_hook(lambda _, given, __: note(seen, given[0]))


def of_several(model: Model, seen: Seen) -> Any:
    return register_multi_grad_hook([model.linear.weight], lambda grads: note(seen, grads[0]))


REGISTER = (of_parameter, after_accumulation, of_module)


def prepared(amp: ModuleType, model: nn.Module, level: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return optimizer


def backward(amp: ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.tensor([[1.0, 2.0, 4.0, 3.0]], requires_grad=True)
    with amp.scale_loss(1e-3 * model(x).float().square().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


def assert_in_float32(seen: Seen) -> None:
    ((grad, product),) = seen
    assert product.dtype is torch.float32
    exact = grad.double() @ MATRIX.double()
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-5 * grad.abs().max())


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("register", [*REGISTER, of_several])
def test_a_hook_multiplies_in_float32(
    amp: ModuleType, level: str, register: Callable[[Model, Seen], Any]
) -> None:
    model, seen = Model(), []
    optimizer = prepared(amp, model, level)
    register(model, seen)
    backward(amp, model, optimizer)
    assert_in_float32(seen)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("register", REGISTER)
def test_so_does_one_from_before_initialize(
    amp: ModuleType, level: str, register: Callable[[Model, Seen], Any]
) -> None:
    model, seen = Model(), []
    handle = register(model, seen)
    table = handle.hooks_dict_ref()
    hooks = dict(table)
    optimizer = prepared(amp, model, level)
    backward(amp, model, optimizer)
    assert_in_float32(seen)
    amp.deactivate()
    assert dict(table) == hooks  # the script's own again
    handle.remove()
    assert not table


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_what_a_hook_returns_keeps_the_dtype_of_the_gradient(amp: ModuleType, level: str) -> None:
    """Torch refuses a gradient in another dtype."""
    model = Model()
    optimizer = prepared(amp, model, level)
    model.linear.weight.register_hook(lambda grad: grad @ MATRIX)
    expected: list[Tensor] = []
    model.linear.weight.register_hook(lambda grad: expected.append(grad.clone()))
    backward(amp, model, optimizer)
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    torch.testing.assert_close(model.linear.weight.grad, expected[0] / scale)


@pytest.mark.parametrize("level", HALVES)
def test_a_hook_of_a_half_gradient_computes_as_the_forward_that_registers_it(
    amp: ModuleType, level: str
) -> None:
    """As an implicit layer's: a float32 matrix meets the gradient, a solver gets float32."""
    model, found = Model(), []

    def hook(grad: Tensor) -> Tensor:
        found.append(grad @ MATRIX)
        return torch.linalg.solve(MATRIX, grad.T).T.to(grad)

    optimizer = prepared(amp, model, level)
    model.linear.register_forward_hook(lambda *hooked: hooked[2].register_hook(hook) and None)
    backward(amp, model, optimizer)
    assert [one.dtype for one in found] == [HALVES[level]]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_model_that_a_hook_calls_casts_and_the_rest_of_the_hook_does_not(
    amp: ModuleType, level: str
) -> None:
    model, seen, found = Model(), [], []
    optimizer = prepared(amp, model, level)

    def hook(grad: Tensor) -> None:
        found.append(model(torch.ones(2, 4)).dtype)
        note(seen, grad)

    model.linear.weight.register_hook(hook)
    backward(amp, model, optimizer)
    assert found == [HALVES[level]]
    assert_in_float32(seen)


class ComputedAnew(Product):
    """Computes anew in its backward, as reversible layers do."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            multiplied.append((inner @ weight).dtype)
        return Product.backward(ctx, grad)


#: Of what the backward of `ComputedAnew` has computed.
multiplied: list[torch.dtype] = []


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_backward_that_a_hook_calls_runs_functions_in_the_mode_of_their_forward(
    amp: ModuleType, level: str
) -> None:
    multiplied.clear()
    model = Model()
    optimizer = prepared(amp, model, level)
    x = torch.ones(2, 4, requires_grad=True)
    inner = ComputedAnew.apply(x, MATRIX.clone().requires_grad_()).float().sum()

    def hook(grad: Tensor) -> None:
        torch.autograd.grad(inner, x)

    model.linear.weight.register_hook(hook)
    backward(amp, model, optimizer)
    assert multiplied == [HALVES[level]]


def halved(module: nn.Module, given: tuple[Tensor | None, ...], _: Any) -> tuple[Any, ...]:
    return tuple(None if one is None else one / 2 for one in given)


def test_a_copy_of_a_model_has_hooks_in_their_mode_and_a_pickle_the_scripts_own(
    amp: ModuleType,
) -> None:
    model = Model()
    prepared(amp, model, "O1")
    model.norm.register_full_backward_hook(halved)
    (hook,) = copy.deepcopy(model).norm._backward_hooks.values()
    assert hook is not halved
    assert gradient_hooks.own(hook) is halved
    (hook,) = pickle.loads(pickle.dumps(model)).norm._backward_hooks.values()
    assert hook is halved


class Hooked(Model):
    """Hooks itself, as a model that tells of its gradients does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.register_full_backward_hook(self.tell)

    def tell(self, *hooked: Any) -> None:
        """Be called by the backward."""


def test_a_model_that_hooks_itself_goes_with_its_last_user(amp: ModuleType) -> None:
    model = Hooked()
    prepared(amp, model, "O1")
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_block_around_a_backward_holds_in_functions_of_the_scripts_own(
    amp: ModuleType, level: str
) -> None:
    multiplied.clear()
    prepared(amp, Model(), level)
    x = torch.ones(2, 4, requires_grad=True)
    made = ComputedAnew.apply(x, MATRIX.clone().requires_grad_()).float().sum()
    with core.disable_casts():
        made.backward()
    assert multiplied == [torch.float32]
