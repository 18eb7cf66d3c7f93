"""Weights that are written to by ``.data`` in a forward, against what the layer's weight gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from amp_patch import amp as core
from amp_patch.casting import data_reads
from amp_patch.casting.mode import process
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.patching import Patches

HALVES = {"O1": torch.float16, "O4": torch.bfloat16}
SIZE = 8


def in_forward(layer: Constrained) -> None:
    layer.weight.data.clamp_(min=0)


def by_another_tensor(layer: Constrained) -> None:
    layer.weight.data = layer.weight.data.clamp(min=0)


def by_a_version(layer: Constrained) -> None:
    with torch.no_grad():
        layer.weight.clamp_(min=0)


def by_rows(layer: Constrained) -> None:
    for row in range(SIZE):
        layer.weight[row].data.clamp_(min=0)


WRITES: dict[str, Callable[[Constrained], None]] = {
    "in place": in_forward,
    "rows": by_rows,
    "another tensor": by_another_tensor,
    "no_grad": by_a_version,
}


class Constrained(nn.Linear):
    """Keeps its weight positive before each use, as layers of convex networks do.

    Attributes:
        constrain: writes to the weight.
        uses: how often a forward uses it; before each use it is halved and constrained.
        seen: pairs of what the layer returned in half, and what its weight gave by torch.
    """

    def __init__(self, constrain: Callable[[Constrained], None], uses: int = 1) -> None:
        super().__init__(SIZE, SIZE)
        self.constrain = constrain
        self.uses = uses
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            self.constrain(self)
            y = super().forward(x)
            with torch.no_grad():
                weight, bias = (one.detach().to(y.dtype) for one in (self.weight, self.bias))
                self.seen.append((y.detach(), torch.ops.aten.linear(x.to(y.dtype), weight, bias)))
            x = y
        return y


@pytest.fixture(params=sorted(WRITES))
def layers(request: pytest.FixtureRequest) -> nn.Sequential:
    torch.manual_seed(0)
    write = WRITES[request.param]
    return nn.Sequential(nn.Linear(SIZE, SIZE), *[Constrained(write, uses) for uses in (1, 1, 2)])


@pytest.mark.parametrize("level", sorted(HALVES))
def test_a_layer_computes_with_what_it_has_just_written(
    amp: ModuleType, level: str, layers: nn.Sequential
) -> None:
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    amp.initialize(layers, optimizer, opt_level=level, verbosity=0)
    for _ in range(4):
        loss = layers(torch.randn(4, SIZE)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = [pair for layer in list(layers)[1:] for pair in layer.seen]
    assert len(seen) == 16
    for found, expected in seen:
        assert found.dtype is HALVES[level]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert any((layer.weight < 0).any() for layer in list(layers)[1:])  # a step undoes it


def clip(layer: nn.Linear, _: object) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("level", sorted(HALVES))
def test_a_hook_may_write_it(amp: ModuleType, level: str) -> None:
    """As the weight clipping of old code does."""
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    model[1].register_forward_pre_hook(clip)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(4, SIZE)
    for _ in range(3):
        y = model(x)
        half = HALVES[level]
        hidden = F.linear(x, model[0].weight, model[0].bias).to(half)
        with amp.disable_casts():
            expected = F.linear(hidden, *(one.detach().to(half) for one in model[1].parameters()))
        assert torch.equal(y, expected)
        with amp.scale_loss(y.float().square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def model(cache: WeightCache) -> nn.Linear:
    process.devices = frozenset({"cpu"})
    model = nn.Linear(3, 2)
    cache.add_model(model)
    return model


def test_a_doubted_cast_is_made_in_its_own_memory_unless_somebody_holds_it(
    cache: WeightCache, model: nn.Linear
) -> None:
    cast = cache.cast(model.weight, torch.float16)
    address = cast.data_ptr()
    del cast
    for held in (False, True):
        model.weight.data.neg_()
        cache.doubt(model.weight)
        again = cache.cast(model.weight, torch.float16)
        assert (again.data_ptr() == address) is not held
        assert torch.equal(again, model.weight.half())
        if not held:
            kept = again.detach()
            before = kept.clone()
            del again
    assert torch.equal(kept, before)


def test_a_use_ends_the_doubt(cache: WeightCache, model: nn.Linear) -> None:
    for _ in range(3):
        cache.cast(model.weight, torch.float16)
        cache.mark_stale()
    cache.cast(model.weight, torch.float16)
    cache.doubt(model.weight)
    cache.mark_stale()
    cast = cache.cast(model.weight, torch.float16)
    model.weight.data.neg_()
    assert torch.equal(cache.cast(model.weight, torch.float16), cast)  # nobody has told the cache


def test_a_large_frozen_weight_is_cast_anew(cache: WeightCache) -> None:
    process.devices = frozenset({"cpu"})
    model = nn.Linear(128, 128).requires_grad_(False)
    cache.add_model(model)
    cache.mark_stale()
    first = cache.cast(model.weight, torch.float16)
    model.weight.data.neg_()
    cache.doubt(model.weight)
    assert torch.equal(cache.cast(model.weight, torch.float16), -first)


@pytest.mark.parametrize("level", sorted(HALVES))
def test_data_is_torchs_again_afterwards(amp: ModuleType, level: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert "data" in vars(Tensor)
    weight.data = weight.data * 3
    assert weight.data.tolist() == [3.0, 3.0]
    assert not weight.data.requires_grad
    core.deactivate()
    assert "data" not in vars(Tensor)


class Named(Tensor):
    """A class of a script's own."""


def test_only_parameters_and_their_views_are_told_of() -> None:
    weight, other = nn.Parameter(torch.ones(2, 2)), torch.zeros(2, 2)
    told: list[Any] = []
    with contextlib.ExitStack() as undo:
        patches = Patches()
        undo.callback(patches.undo)
        data_reads.install(
            patches,
            told.append,
            lambda param, new: told.append((param, new)),
            lambda: told.append("half"),
        )
        for plain in (other, other[0], torch.ones(2).as_subclass(Named), (weight * 2)[0]):
            plain.data.zero_()
            plain.data = plain.data.clone()
            assert plain.data.count_nonzero() == 0
        assert told == []
        weight.data[1, 1] = 2.0
        weight[0].data.zero_()
        weight.view(-1).data[2] = 3.0
        assert len(told) == 3
        assert all(one is weight for one in told)
        weight.data = other
        assert told[3][0] is weight
        assert told[3][1] is other
        weight.detach().bfloat16().data.zero_()
        assert told[4:] == ["half"]
    assert weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_compiled_function_may_read_and_write_it(amp: ModuleType) -> None:
    def function(layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x) + layer.weight.data.sum()

    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    amp.initialize(layer, opt_level="O1", verbosity=0)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(layer, x), function(layer, x))


class Seen(TorchFunctionMode):
    """Notes by its name what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(resolve_name(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(3, dtype=torch.float16)[1:]])
def test_a_mode_sees_one_read_under_torchs_own_name(amp: ModuleType, tensor: Tensor) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    with Seen() as seen:
        assert tensor.data.tolist() == tensor.tolist()
    assert seen.names[0] == "torch.Tensor.data.__get__"
    assert seen.names.count("torch.Tensor._base.__get__") == 0


def test_a_class_that_answers_for_itself_is_asked_for_nothing_else(amp: ModuleType) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    table = {Tensor.data.__get__: lambda tensor: "its own"}

    class Strict(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return table[func](*args) if func in table else NotImplemented

    assert torch.ones(3).as_subclass(Strict).data == "its own"
    with pytest.raises(RuntimeError):
        del nn.Parameter(torch.ones(2)).data
