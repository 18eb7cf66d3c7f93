"""Layers give the same, and find their weights wherever they are, while casts are on."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

CASES: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(4, 3), (2, 4)),
    (nn.Linear(4, 3, bias=False), (2, 4)),
    (nn.LayerNorm(4), (2, 4)),
    (nn.LayerNorm(4, elementwise_affine=False), (2, 4)),
    (nn.LayerNorm(4, bias=False), (2, 4)),
    (nn.Conv1d(2, 3, 2), (2, 2, 5)),
    (nn.Conv2d(2, 3, 3, padding="same"), (1, 2, 5, 5)),
    (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", groups=2), (1, 2, 5, 5)),
    (nn.Conv3d(1, 2, 2, bias=False), (1, 1, 3, 3, 3)),
]
KINDS = {type(layer) for layer, _ in CASES}


def cast_by_hand(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer of its own in half, norms in fp32."""
    twin = copy.deepcopy(layer)
    return twin(x) if isinstance(layer, nn.LayerNorm) else twin.half()(x.half())


@pytest.mark.parametrize(("layer", "shape"), CASES, ids=lambda case: str(case))
def test_a_layer_gives_what_its_cast_twin_gives(
    amp: ModuleType, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    layer, x = copy.deepcopy(layer), torch.randn(shape)
    expected = cast_by_hand(layer, x)
    amp.initialize(layer, opt_level="O1", verbosity=0)
    for found in (layer(x), layer(input=x), type(layer).forward(layer, x)):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", sorted(KINDS, key=str))
def test_forwards_look_as_before_and_come_back(amp: ModuleType, kind: type[nn.Module]) -> None:
    original, signature = kind.forward, inspect.signature(kind.forward)
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    assert kind.forward is not original
    assert inspect.signature(kind.forward) == signature
    assert kind.forward.__doc__ == original.__doc__
    amp.deactivate()
    assert kind.forward is original


def test_levels_that_cast_no_functions_leave_them_alone(amp: ModuleType) -> None:
    original = nn.Linear.forward
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    assert nn.Linear.forward is original


@pytest.mark.parametrize(("layer", "shape"), CASES, ids=lambda case: str(case))
def test_a_forward_that_the_script_has_replaced_is_called(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    layer, x, original = copy.deepcopy(layer), torch.randn(shape), type(layer).forward
    expected = cast_by_hand(layer, x) * 2

    @functools.wraps(original)
    def doubled(self: nn.Module, input: Tensor) -> Tensor:
        return original(self, input) * 2

    monkeypatch.setattr(type(layer), "forward", doubled)
    amp.initialize(layer, opt_level="O1", verbosity=0)
    assert torch.equal(layer(x), expected)
    amp.deactivate()
    assert type(layer).forward is doubled


class Halved(nn.Linear):
    """A layer whose weight is computed when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value / 2 if name == "weight" else value


def halved() -> Halved:
    layer = Halved(3, 2).requires_grad_(False)
    layer._parameters["weight"].normal_()  # else what initializes it gets the half
    return layer


def shadowed(layer: nn.Linear) -> nn.Linear:
    vars(layer)["weight"] = layer.weight.detach() * 3
    return layer


@pytest.mark.parametrize(
    "make",
    [
        halved,
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: parametrizations.orthogonal(nn.Linear(3, 2)),
        lambda: shadowed(nn.Linear(3, 2)),
    ],
    ids=["own __getattr__", "weight norm", "orthogonal", "shadowed"],
)
def test_a_weight_that_is_no_parameter_of_the_layer_is_found(amp: ModuleType, make: Any) -> None:
    layer, x = make(), torch.randn(4, 3)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    expected = nn.functional.linear(x.half(), weight.half(), bias.half())
    amp.initialize(layer, opt_level="O1", verbosity=0)
    assert torch.equal(layer(x), expected)


def test_weights_swapped_for_one_call_are_used(amp: ModuleType) -> None:
    layer = amp.initialize(nn.Linear(3, 2), opt_level="O1", verbosity=0)
    swapped = {"weight": torch.zeros(2, 3), "bias": torch.ones(2)}
    found = torch.func.functional_call(layer, swapped, (torch.randn(4, 3),))
    assert torch.equal(found, torch.ones(4, 2, dtype=torch.float16))


def test_a_layer_without_a_weight_fails_as_before(amp: ModuleType) -> None:
    layer = amp.initialize(nn.Linear(3, 2), opt_level="O1", verbosity=0)
    del layer.weight
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        layer(torch.randn(4, 3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_layers_are_scripted_traced_and_pickled_as_before(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(2, 2, 1))
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.randn(2, 4)
    assert torch.jit.script(copy.deepcopy(model))(x).shape == (2, 4)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    nodes = torch.fx.symbolic_trace(model).graph.nodes
    assert [node.target for node in nodes if node.op == "call_module"] == ["0", "1", "2"]


def test_a_patch_of_the_function_below_is_reached(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = amp.initialize(nn.Linear(3, 2), opt_level="O1", verbosity=0)
    monkeypatch.setattr(nn.functional, "linear", lambda *args: len(args))
    assert layer(torch.randn(1, 3)) == 3
