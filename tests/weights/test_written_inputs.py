"""What a model writes into what it was passed is there for its caller, as in plain PyTorch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.weights.written_inputs import written_inputs

LEVELS = pytest.mark.parametrize("level", ["O2", "O3", "O5"])
THIRD = 1 / 3  # half precision rounds it


class Model(nn.Module):
    """Calls what it is given with a linear layer and its inputs."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(3, 3), run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.layer, *args, **kwargs)


def prepared(amp: ModuleType, level: str, run: Callable[..., Any]) -> tuple[Model, Model]:
    """Return a model at a level, and the plain one that it was."""
    torch.manual_seed(0)
    model = Model(run)
    plain = copy.deepcopy(model)
    amp.initialize(model, opt_level=level, verbosity=0)
    return model, plain


def assert_alike(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def fill_second(layer: nn.Linear, x: Tensor, cache: Tensor) -> Tensor:
    cache[1] = layer(x).detach().sum(0)
    return layer(x)


@LEVELS
@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_cache_is_filled_and_what_is_not_written_stays_exact(
    amp: ModuleType, level: str, around: Callable[[], Any], by_name: bool
) -> None:
    model, plain = prepared(amp, level, fill_second)
    caches = [torch.full((3, 3), THIRD) for _ in range(2)]
    with around():
        for one, cache in zip((model, plain), caches, strict=True):
            one(torch.ones(2, 3), cache=cache) if by_name else one(torch.ones(2, 3), cache)
    assert_alike(*caches)
    assert torch.equal(caches[0][::2], torch.full((2, 3), THIRD))
    assert caches[0].dtype is torch.float32


@LEVELS
def test_gradients_flow_through_what_was_written(amp: ModuleType, level: str) -> None:
    def write(layer: nn.Linear, x: Tensor, cache: Tensor) -> None:
        cache[0] = layer(x).sum(0)

    grads = []
    for one in prepared(amp, level, write):
        cache = torch.full((2, 3), THIRD)
        one(torch.ones(2, 3), cache)
        cache.square().sum().backward()
        grads.append(one.layer.bias.grad.float())
    assert_alike(*grads)


@LEVELS
def test_gradients_flow_through_a_write_that_changes_nothing(amp: ModuleType, level: str) -> None:
    def write(layer: nn.Linear, x: Tensor) -> None:
        x.mul_(layer.bias / layer.bias.detach())  # by 1

    for one in prepared(amp, level, write):
        x = torch.tensor([[THIRD, 2.0, 3.0]])
        one(x)
        (x * 2).sum().backward()
        assert x.tolist() == [[torch.tensor(THIRD).item(), 2.0, 3.0]]
        expected = torch.tensor([2 * THIRD, 4.0, 6.0]) / one.layer.bias.detach().float()
        torch.testing.assert_close(one.layer.bias.grad.float(), expected, rtol=2e-2, atol=1e-2)


@LEVELS
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.requires_grad_(),
        lambda x: x.requires_grad_().sigmoid(),  # whose backward reads it
        lambda x: x[:1].expand(2, 3),
        lambda x: (torch.stack([x, x]).requires_grad_() * 1).unbind()[0],
    ],
    ids=["leaf", "saved", "expanded", "one of several"],
)
def test_what_plain_pytorch_would_refuse_to_write_to_stays(
    amp: ModuleType, level: str, make: Callable[[Tensor], Tensor]
) -> None:
    model, _ = prepared(amp, level, lambda layer, x: layer(x.mul_(2)))
    x = make(torch.full((2, 3), THIRD))
    before = x.detach().clone()
    model(x).sum().backward()
    assert torch.equal(x, before)


@LEVELS
def test_a_batch_has_what_the_model_adds_in_the_dtype_of_its_outputs(
    amp: ModuleType, level: str
) -> None:
    def add(layer: nn.Linear, batch: dict[str, Any]) -> Tensor:
        batch["out"] = layer(batch["x"])
        batch["parts"].append(batch["out"] * 2)
        batch["x"], batch["y"] = batch["y"], batch["x"]
        del batch["gone"]
        return batch["out"]

    batches = []
    for one in prepared(amp, level, add):
        x, y = torch.full((1, 3), THIRD), torch.ones(1, 3)
        batch = {"x": x, "y": y, "parts": [torch.ones(1)], "gone": torch.ones(1), "n": 1}
        assert isinstance(one(batch), Tensor)
        assert batch["x"] is y
        assert batch["y"] is x  # no cast of it
        batches.append(batch)
    assert_alike(*batches)


@LEVELS
def test_one_tensor_that_was_passed_twice_has_both_writes(amp: ModuleType, level: str) -> None:
    def write(layer: nn.Linear, one: Tensor, batch: dict[str, Tensor]) -> None:
        one[0] = 7
        batch["x"][1] = 5

    for one in prepared(amp, level, write):
        x = torch.zeros(3)
        one(x, {"x": x})
        assert x.tolist() == [7.0, 5.0, 0.0]


class Pair(NamedTuple):
    """What a script may pass to its model."""

    first: Tensor
    second: Any


@LEVELS
@pytest.mark.parametrize("around", [torch.enable_grad, torch.inference_mode])
def test_the_model_finds_what_it_writes_wherever_it_was_passed_the_same(
    amp: ModuleType, level: str, around: Callable[[], Any]
) -> None:
    def write(layer: nn.Linear, x: Tensor, batch: dict[str, Any], *, again: Pair) -> None:
        x[0] = 7
        batch["list"].append(layer(batch["x"]).detach())
        (other,) = again.second["list"][1:]
        again.second["out"] = other + batch["x"]
        assert x is batch["x"] is again.first
        assert batch is again.second
        assert type(again) is Pair

    found = []
    for one in prepared(amp, level, write):
        x = torch.zeros(1, 3)
        batch = {"x": x, "list": [torch.ones(1)]}
        with around():
            one(x, batch, again=Pair(x, batch))
        assert batch["x"] is x
        found.append(batch)
    assert_alike(*found)
    assert found[0]["out"].dtype is torch.float32


@LEVELS
def test_queries_that_are_keys_are_known_to_be(amp: ModuleType, level: str) -> None:
    """By which torch's attention chooses one product of matrices for all three."""

    def attend(layer: nn.Linear, q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
        assert q is k is v
        assert other is not q
        return layer(q)

    model, _ = prepared(amp, level, attend)
    x = torch.full((1, 3), THIRD)
    model(x, x, x, x.clone())
    assert x.tolist() == torch.full((1, 3), THIRD).tolist()


@LEVELS
def test_new_containers_hold_what_the_caller_knows(amp: ModuleType, level: str) -> None:
    def add(layer: nn.Linear, batch: dict[str, Any]) -> None:
        batch["new"] = {"parent": batch, "x": [batch["x"], layer(batch["x"])]}

    for one in prepared(amp, level, add):
        batch: dict[str, Any] = {"x": torch.ones(1, 3)}
        one(batch)
        assert batch["new"]["parent"] is batch
        assert batch["new"]["x"][0] is batch["x"]
        assert batch["new"]["x"][1].dtype is torch.float32


@LEVELS
def test_what_the_model_keeps_stays_as_it_is(amp: ModuleType, level: str) -> None:
    def add(layer: nn.Linear, batch: dict[str, Any], kept: list[Any], counts: list[int]) -> None:
        kept.append(layer(batch["x"]))
        counts.append(1)
        batch["kept"], batch["counts"] = kept, counts

    model, _ = prepared(amp, level, add)
    kept: list[Any] = []
    counts: list[int] = []
    batch: dict[str, Any] = {"x": torch.ones(1, 3)}
    model(batch, kept, counts)
    assert kept[0].dtype is model.layer.weight.dtype
    assert batch["kept"][0].dtype is torch.float32
    assert batch["counts"] is counts


class Refuses(OrderedDict[str, Any]):
    """As the outputs of transformers, which can be written to by single keys only."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError

    def pop(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError


@LEVELS
def test_containers_of_other_kinds_get_it_too(amp: ModuleType, level: str) -> None:
    class Batch(list[Any]):
        pass

    def add(layer: nn.Linear, batch: Batch, named: Refuses, pair: tuple[Any, ...]) -> None:
        batch.insert(0, layer(batch[0]))
        named["out"] = batch[0]
        pair[0].mul_(2)
        pair[1]["out"] = batch[0]

    found = []
    for one in prepared(amp, level, add):
        x = torch.full((1, 3), THIRD)
        passed = Batch([x]), Refuses(x=x.clone()), (x.clone(), {"x": x.clone()})
        one(*passed)
        found.append((list(passed[0]), dict(passed[1]), passed[2]))
        assert passed[0][1] is x
    assert_alike(*found)


@LEVELS
def test_what_was_written_before_an_error_is_there_and_nothing_is_held(
    amp: ModuleType, level: str
) -> None:
    def fail(layer: nn.Linear, x: Tensor) -> None:
        x.zero_()
        raise KeyError(level)

    model, _ = prepared(amp, level, fail)
    x = torch.ones(1, 3)
    with pytest.raises(KeyError):
        model(x)
    assert not x.any()
    assert written_inputs._calls == []


def test_a_call_that_fails_before_the_model_casts_leaves_those_around_it(amp: ModuleType) -> None:
    def refuse(*_: Any) -> None:
        raise KeyError

    inner, _ = prepared(amp, "O2", lambda layer, x: layer(x))
    inner.register_forward_pre_hook(refuse, prepend=True)

    def run(layer: nn.Linear, x: Tensor) -> None:
        with pytest.raises(KeyError):
            inner(x)
        x.zero_()

    outer, _ = prepared(amp, "O2", run)
    x = torch.ones(1, 3)
    outer(x)
    assert not x.any()


@LEVELS
def test_a_model_that_calls_itself_gives_each_caller_its_own(amp: ModuleType, level: str) -> None:
    def descend(layer: nn.Linear, depth: Tensor, cache: Tensor, model: Callable[..., Any]) -> None:
        if depth > 0:
            inner = torch.zeros(3)
            model(depth - 1, inner, model)
            cache.copy_(inner + 1)

    model, _ = prepared(amp, level, descend)
    cache = torch.zeros(3)
    model(torch.tensor(3), cache, model)
    assert cache.tolist() == [3.0] * 3


@LEVELS
def test_another_method_of_the_model_gives_it_back(amp: ModuleType, level: str) -> None:
    class Encoder(nn.Linear):
        def encode(self, x: Tensor, cache: Tensor) -> Tensor:
            cache.copy_(self(x).detach())
            return cache

    model = Encoder(3, 3)
    amp.initialize(model, opt_level=level, verbosity=0)
    amp.register_forward_method(Encoder, "encode")
    cache = torch.zeros(2, 3)
    assert_alike(model.encode(torch.ones(2, 3), cache), cache)
    assert cache.any()


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_gives_it_back(amp: ModuleType, whole: bool) -> None:
    model, plain = prepared(amp, "O5", fill_second)
    if whole:
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    else:
        model.compile(backend="aot_eager")
    caches = [torch.zeros(3, 3) for _ in range(2)]
    for one, cache in zip((model, plain), caches, strict=True):
        one(torch.ones(2, 3), cache)
    assert_alike(*caches)


#: Each changes a batch with the numbers of a layer.
CHANGES: dict[str, Callable[[dict[str, Any], nn.Linear], object]] = {
    "new": lambda batch, layer: batch.update(new=layer(batch["x"])),
    "in place": lambda batch, layer: batch["x"].mul_(0.5),
    "a view": lambda batch, layer: batch["x"][0].add_(1),
    "other": lambda batch, layer: batch.update(x=layer(batch["x"])),
    "swapped": lambda batch, layer: batch.update(x=batch["y"], y=batch["x"]),
    "both": lambda batch, layer: batch.update(y=batch["x"]),
    "cleared": lambda batch, layer: batch["list"].clear(),
    "appended": lambda batch, layer: batch["list"].append(layer(batch["y"])),
    "reversed": lambda batch, layer: batch["list"].reverse(),
    "inner": lambda batch, layer: batch["inner"].update(z=batch["x"] + 1),
    "out of inner": lambda batch, layer: batch.update(y=batch["inner"]["z"]),
    "popped": lambda batch, layer: batch.pop("new", None),
    "number": lambda batch, layer: batch.update(n=batch["n"] + 1),
}


@LEVELS
@pytest.mark.parametrize("grad", [False, True])
def test_any_changes_are_those_of_a_plain_model(amp: ModuleType, level: str, grad: bool) -> None:
    def change(layer: nn.Linear, batch: dict[str, Any], names: list[str]) -> None:
        for name in names:
            CHANGES[name](batch, layer)

    pair = prepared(amp, level, change)

    @example(["other", "in place", "swapped", "a view"])
    @example(["in place", "appended", "both"])
    @given(st.lists(st.sampled_from([*CHANGES]), max_size=5))
    def run(names: list[str]) -> None:
        batches = []
        for one in pair:
            numbers = torch.linspace(-1, 1, 6).reshape(2, 3) * THIRD
            batch = {"x": numbers.clone(), "y": numbers.flip(0), "n": 1, "list": [numbers + 1]}
            batch["inner"] = {"z": numbers - 1}
            with torch.set_grad_enabled(grad):
                for _ in range(2):
                    one(batch, names)
            batches.append(batch)
        assert_alike(*batches)
        assert [*batches[0]] == [*batches[1]]

    run()
