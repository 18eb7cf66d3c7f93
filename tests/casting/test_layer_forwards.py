"""Layers give the same, and find their weights wherever they are, while casts are on."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import wrapt
from torch import Tensor, nn
from torch.nn import functional as F
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


def test_a_level_without_half_precision_leaves_them_alone(amp: ModuleType) -> None:
    original = nn.Linear.forward
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
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


def with_buffer(layer: nn.Linear, name: str) -> nn.Linear:
    value = getattr(layer, name).detach()
    delattr(layer, name)
    layer.register_buffer(name, value)
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
        lambda: with_buffer(nn.Linear(3, 2), "bias"),
        lambda: with_buffer(nn.Linear(3, 2), "weight"),
    ],
    ids=[
        "own __getattr__",
        "weight norm",
        "orthogonal",
        "shadowed",
        "bias buffer",
        "weight buffer",
    ],
)
def test_what_is_no_parameter_of_the_layer_is_found(amp: ModuleType, make: Any) -> None:
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


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("linear", nn.Linear(4, 4)),
        ("layer_norm", nn.LayerNorm(4)),
        ("group_norm", nn.GroupNorm(2, 4)),
    ],
)
def test_a_proxy_that_is_equal_to_the_function_below_is_called(
    amp: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    layer: nn.Module,
    level: str,
) -> None:
    x = torch.randn(3, 4)
    expected = 3 * layer(x)
    model = amp.initialize(copy.deepcopy(layer), opt_level=level, verbosity=0)

    def triple(function: Any, instance: None, args: Any, kwargs: Any) -> Tensor:
        return 3 * function(*args, **kwargs)

    proxy = wrapt.FunctionWrapper(getattr(F, name), triple)
    assert proxy == getattr(F, name)
    monkeypatch.setattr(F, name, proxy)
    torch.testing.assert_close(model(x).float(), expected, atol=0.05, rtol=0.02)


TAKING: list[tuple[nn.Module, tuple[int, ...], int]] = [
    *((layer, shape, 1) for layer, shape in CASES if layer.weight is not None),
    (nn.GroupNorm(2, 4), (2, 4, 3), 1),
    (nn.RMSNorm(4), (2, 4), 1),
    (nn.InstanceNorm1d(4, affine=True), (2, 4, 3), 1),
    (nn.ConvTranspose1d(4, 3, 2), (2, 4, 5), 1),
    (nn.ConvTranspose2d(4, 3, 2), (2, 4, 5, 5), 1),
    (nn.ConvTranspose3d(1, 2, 2), (1, 1, 3, 3, 3), 1),
    (nn.PReLU(4), (2, 4), 1),
    (nn.Bilinear(4, 4, 2), (2, 4), 2),
    (nn.RNN(4, 3), (2, 5, 4), 1),
    (nn.GRU(4, 3, batch_first=True), (2, 5, 4), 1),
    (nn.LSTM(4, 3), (2, 5, 4), 1),
    (nn.RNNCell(4, 3), (2, 4), 1),
    (nn.GRUCell(4, 3), (2, 4), 1),
    (nn.LSTMCell(4, 3), (2, 4), 1),
    (nn.MultiheadAttention(4, 2), (2, 5, 4), 3),
    (nn.TransformerEncoderLayer(4, 2, 8, 0.0), (2, 5, 4), 1),
    (nn.TransformerDecoderLayer(4, 2, 8, 0.0), (2, 5, 4), 2),
    (parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4), 1),
]


class Given(nn.Module):
    """Gives a layer what it makes itself, in some dtype."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], count: int) -> None:
        super().__init__()
        self.layer, self.count = layer, count
        # rounded, so that it is the same in float32
        self.made = [torch.randn(shape).bfloat16().float() for _ in range(count)]

    def forward(self, dtype: torch.dtype) -> Any:
        return first(self.layer(*(one.to(dtype) for one in self.made)))


def first(outputs: Any) -> Any:
    """Return a tensor, or the first of a tuple of them."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


@pytest.mark.parametrize(("layer", "shape", "count"), TAKING, ids=lambda case: str(case))
@pytest.mark.parametrize("level", ["O3", "O5"])
def test_a_layer_of_a_model_in_half_takes_float32(
    amp: ModuleType, layer: nn.Module, shape: tuple[int, ...], count: int, level: str
) -> None:
    """As a mask, noise or positions that ``forward`` makes bring it along."""
    model = Given(copy.deepcopy(layer), shape, count)
    amp.initialize(model, opt_level=level, verbosity=0)
    half = {"O3": torch.float16, "O5": torch.bfloat16}[level]
    expected, found = model(half), model(torch.float32)
    assert torch.equal(found, expected)
    found.square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())


STATES: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Any]]] = {
    "by name": (nn.RMSNorm(4), lambda layer, x: layer(x=x)),
    "a state": (nn.GRUCell(4, 4), lambda layer, x: layer(x, x)),
    "a state by name": (nn.RNN(4, 4), lambda layer, x: layer(x, hx=x[:1])),
    "a pair of states": (nn.LSTMCell(4, 4), lambda layer, x: layer(x, (x, x))),
    "all by name": (nn.LSTM(4, 4), lambda layer, x: layer(input=x, hx=(x[:1], x[1:2]))),
    "a mask": (
        nn.MultiheadAttention(4, 2),
        lambda layer, x: layer(x, key=x, value=x, attn_mask=x @ x.T),
    ),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("level", ["O3", "O5"])
def test_float32_comes_by_name_and_in_tuples(amp: ModuleType, level: str, name: str) -> None:
    layer, call = STATES[name]

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)
            self.made = torch.randn(3, 4).bfloat16().float()

        def forward(self, dtype: torch.dtype) -> Any:
            return first(call(self.layer, self.made.to(dtype)))

    model = amp.initialize(Called(), opt_level=level, verbosity=0)
    half = {"O3": torch.float16, "O5": torch.bfloat16}[level]
    assert torch.equal(model(torch.float32), model(half))


@pytest.mark.filterwarnings("ignore:.torch.jit")  # is deprecated
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(layer, shape) for layer, shape, count in TAKING[:-1] if count == 1],
    ids=lambda case: str(case),
)
def test_torchscript_compiles_what_torch_has_written(
    amp: ModuleType, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(copy.deepcopy(layer)).eval()
    amp.initialize(model, opt_level="O5", cast_model_outputs=torch.bfloat16, verbosity=0)
    made = torch.randn(shape).bfloat16()
    with torch.no_grad():
        script = torch.jit.script(model)
        torch.testing.assert_close(first(script(made)), first(model(made)))


def test_float32_stays_where_it_is_meant(amp: ModuleType) -> None:
    """In a region, in a layer that is kept in float32, and outside of the model's call."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> list[torch.dtype]:
            thirds = torch.ones_like(x, dtype=torch.float32) / 3
            with amp.float_region():
                self.in_region = self.layer(thirds)
            self.expected = F.linear(thirds, self.layer.weight.float(), self.layer.bias.float())
            self.seen = [self.norm(x.float()).dtype, self.layer(x.float()).dtype]
            return self.layer(x)

    model = Mixed()
    amp.initialize(model, opt_level="O2", verbosity=0)
    model(torch.randn(2, 4))
    assert torch.equal(model.in_region, model.expected)
    assert model.seen == [torch.float32, torch.float16]
    with pytest.raises(RuntimeError, match="dtype"):
        model.layer(torch.randn(2, 4))


def test_a_compiled_model_takes_float32_as_well(amp: ModuleType) -> None:
    model = Given(nn.Linear(4, 3), (2, 4), 1)
    amp.initialize(model, opt_level="O2", verbosity=0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.float32), model(torch.float16))
