"""Half values that are added up at indices have float64's sums, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from casting_support import HALF_OF, activate, called_at
from support import allocations
from torch import Tensor, nn

from amp_patch import amp as core
from amp_patch.casting.added_values import adding_in_float32

MANY, PLACES = 3000, 4
INDEX = torch.arange(MANY).remainder(7).remainder(PLACES)

#: Add numbers at indices to a vector.
SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda out, at, y: torch.index_add(out, 0, at, y),
    "index_add, input by name": lambda out, at, y: torch.index_add(
        input=out, dim=0, index=at, source=y
    ),
    "index_add, a factor": lambda out, at, y: out[:, None].index_add(0, at, y[:, None], alpha=2)[
        :, 0
    ],
    "index_add, rows": lambda out, at, y: out[:, None].index_add(0, at, y[:, None])[:, 0],
    "index_add, int32": lambda out, at, y: out[:, None].index_add(0, at.int(), y[:, None])[:, 0],
    "index_add, inside": lambda out, at, y: out[None, :, None].index_add(1, at, y[None, :, None])[
        0, :, 0
    ],
    "index_add_": lambda out, at, y: out.clone().index_add_(0, at, y),
    "index_put": lambda out, at, y: out.index_put((at,), y, True),
    "index_put_": lambda out, at, y: out.clone().index_put_(
        indices=(at,), values=y, accumulate=True
    ),
    "index_put_, rows": lambda out, at, y: (
        out[:, None].clone().index_put_((at,), y[:, None], accumulate=True)[:, 0]
    ),
    "put": lambda out, at, y: out.put(at, y, accumulate=True),
    "put_": lambda out, at, y: out.clone().put_(at, y, True),
    "index_reduce": lambda out, at, y: torch.index_reduce(out, 0, at, y, "mean"),
    # factors that both half dtypes hold
    "index_reduce, products": lambda out, at, y: out.index_reduce(0, at, 1 + (y - 4) / 128, "prod"),
    "index_reduce_": lambda out, at, y: out.clone().index_reduce_(
        0, at, y, reduce="mean", include_self=False
    ),
    "scatter_add": lambda out, at, y: torch.scatter_add(out, 0, at, y),
    "scatter_add_": lambda out, at, y: out.clone().scatter_add_(0, at, src=y),
    "scatter_add, rows": lambda out, at, y: out[:, None].scatter_add(0, at[:, None], y[:, None])[
        :, 0
    ],
    "scatter_reduce": lambda out, at, y: torch.scatter_reduce(out, 0, at, y, "sum"),
    "scatter_reduce_": lambda out, at, y: out.clone().scatter_reduce_(0, at, y, reduce="mean"),
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add_": lambda out, y: out.index_add_(0, INDEX, y),
    "index_put_": lambda out, y: out.index_put_((INDEX,), y, accumulate=True),
    "index_reduce_": lambda out, y: out.index_reduce_(0, INDEX, y, "mean"),
    "put_": lambda out, y: out.put_(INDEX, y, accumulate=True),
    "scatter_add_": lambda out, y: out.scatter_add_(0, INDEX, y),
}
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")


class Running(nn.Module):
    """Calls in its forward what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, run: Callable[[], Any]) -> None:
        self.found = run()


def inside(amp: ModuleType, level: str, run: Callable[[], Any]) -> Any:
    """Return what a function returns in the forward of a model at a level."""
    model = activate(amp, level, Running())
    model(run)
    return model.found


def tensors(half: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return a vector, and numbers of which hundreds are added to each of its own."""
    torch.manual_seed(0)
    vector = torch.rand(PLACES).to(device, half).requires_grad_()
    return vector, torch.randint(1, 8, (MANY,)).to(device, half).requires_grad_()


def with_gradients(found: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = torch.arange(1.0, 1 + PLACES).to(found)
    return found.detach(), *torch.autograd.grad(found, inputs, weights)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_sums_and_gradients_are_those_of_float64(
    amp: ModuleType, level: str, device: torch.device
) -> None:
    half, index = HALF_OF[level], INDEX.to(device)
    out, y = tensors(half, device)
    exact = [one.detach().double().requires_grad_() for one in (out, y)]
    for name, add in SUMS.items():
        got = inside(amp, level, lambda add=add: with_gradients(add(out, index, y), out, y))
        with core.disable_casts():
            wanted = with_gradients(add(exact[0], index, exact[1]), *exact)
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype is half, name
            eps = torch.finfo(half).eps
            close = torch.allclose(a.double(), b.double(), rtol=2 * eps, atol=1e-3)
            assert close, (name, a, b)


@pytest.mark.parametrize("write", IN_PLACE)
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_what_is_written_to_is_the_same_tensor_once_more(
    amp: ModuleType, level: str, write: str
) -> None:
    add, half = IN_PLACE[write], HALF_OF[level]
    start, y = tensors(half)

    def run() -> tuple[Tensor, ...]:
        whole = torch.stack([start, start])
        out = whole[1]  # a view, of which the other row stays
        before = out._version
        assert add(out, y) is out
        assert out.dtype is half
        assert out._version == before + 1
        assert whole[0].equal(start)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            add(start, y)
        kept = torch.sin(out)
        with torch.no_grad():
            add(out.detach(), y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()
        again = torch.stack([start, start])
        add(again[1], y)
        return with_gradients(again.sum(0), start, y)

    got = inside(amp, level, run)
    exact = start.detach().double().requires_grad_(), y.detach().double().requires_grad_()
    with core.disable_casts():
        wanted = with_gradients(exact[0] + add(exact[0] * 1, exact[1]), *exact)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2 * torch.finfo(half).eps, atol=1e-3)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_compiled_code_adds_alike(amp: ModuleType, level: str) -> None:
    half = HALF_OF[level]
    index = torch.zeros(MANY, dtype=torch.long)

    @torch.compile(backend="eager", fullgraph=True)
    def count(one: Tensor) -> Tensor:
        ones = one.expand(MANY)
        counts = one.new_zeros(PLACES).index_add_(0, index, ones)
        return torch.index_put(counts, (index,), ones, accumulate=True)

    found = inside(amp, level, lambda: count(torch.ones(1, dtype=half)))
    assert found[0].item() == torch.tensor(2 * MANY).to(half).item()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_where_nothing_casts_torch_adds_as_it_does(amp: ModuleType, level: str) -> None:
    model = activate(amp, level, Running())
    ones, index = torch.ones(MANY, dtype=torch.float16), torch.zeros(MANY, dtype=torch.long)

    def run() -> Tensor:
        with core.disable_casts():
            return ones.new_zeros(1).index_add_(0, index, ones)

    if level == "O1":
        model(run)
    else:
        model.found = ones.new_zeros(1).index_add_(0, index, ones)
    assert model.found.item() == 2048


def dtypes_at(name: str, *args: Any, **kwargs: Any) -> list[torch.dtype]:
    """Return which dtypes a function of torch is called with at O5."""
    seen: list[torch.dtype] = []

    def function(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        seen.extend(v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point())
        return args[0] if args else kwargs["input"]

    function.__name__ = name
    adding = adding_in_float32(function)
    called_at("O5", "inside", lambda: adding(*args, **kwargs))
    return sorted(set(seen), key=str)


def rows(count: int, *width: int, device: str = "meta") -> Tensor:
    return torch.zeros(count, *width, dtype=torch.bfloat16, device=device)


def at(count: int, *width: int, device: str = "meta") -> Tensor:
    return torch.zeros(count, *width, dtype=torch.long, device=device)


@pytest.mark.parametrize("name", ["scatter_add", "scatter_add_", "scatter_reduce"])
def test_a_scatter_stays_in_half_on_a_cpu_alone(name: str) -> None:
    reduce = {"reduce": "mean"} if name == "scatter_reduce" else {}
    for device, dtype in (("cpu", torch.bfloat16), ("meta", torch.float32)):
        args = rows(4, 2, device=device), 0, at(9, 2, device=device), rows(9, 2, device=device)
        assert dtypes_at(name, *args, **reduce) == [dtype]
        vectors = rows(4, device=device), 0, at(2, device=device), rows(2, device=device)
        assert dtypes_at(name, *vectors, **reduce) == [dtype]
    assert dtypes_at("scatter_reduce", rows(4), 0, at(9), rows(9), "amax") == [torch.bfloat16]


def test_rows_are_left_to_a_kernel_that_adds_in_float32() -> None:
    def on_cpu(*args: Any, **kwargs: Any) -> bool:
        return dtypes_at("index_add", *args, **kwargs) == [torch.float32]

    many, index = rows(9, 2, device="cpu"), at(9, device="cpu")
    out = rows(4, 2, device="cpu")
    assert not on_cpu(out, 0, index, many)
    assert not on_cpu(out, -2, index, source=many)
    assert not on_cpu(input=out, dim=0, index=index, source=many)
    assert on_cpu(out, 0, index, many, alpha=2)
    assert on_cpu(out, 0, index.int(), many)
    assert on_cpu(out.T, 1, index, many.T)
    assert on_cpu(out[0], 0, index % 2, many[:, 0])


def test_few_rows_are_added_in_half_on_a_device_of_atomics() -> None:
    """As those of the tokens of one expert, to the tensor of all tokens."""
    for count, dtype in ((8, torch.bfloat16), (9, torch.float32)):
        assert dtypes_at("index_add_", rows(8, 2), 0, at(count), rows(count, 2)) == [dtype]
        assert dtypes_at("scatter_add", rows(8, 2), -2, at(count, 2), rows(count, 2)) == [dtype]
        assert dtypes_at("index_add_", rows(2, 8), 1, at(count), rows(2, count)) == [dtype]


def test_what_adds_nothing_is_called_as_it_was() -> None:
    out, index, y = rows(4), at(9), rows(9)
    assert dtypes_at("index_put_", out, (index,), y) == [torch.bfloat16]
    assert dtypes_at("index_put_", out, (index,), y, accumulate=False) == [torch.bfloat16]
    assert dtypes_at("put", out, index, y, False) == [torch.bfloat16]
    assert dtypes_at("index_reduce", out, 0, index, y, "amin") == [torch.bfloat16]
    assert dtypes_at("index_add", out, 0, index, y, out=rows(4)) == [torch.bfloat16]
    assert adding_in_float32(torch.index_copy) is torch.index_copy


def test_wrong_calls_are_refused_by_torch(amp: ModuleType) -> None:
    activate(amp, "O1")
    out = torch.zeros(4, 4, dtype=torch.float16)
    for args in ((), (0,), (0, INDEX), (0, None, out)):
        with pytest.raises(TypeError, match="index_add"):
            out.index_add(*args)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds|out of range"):
        out.index_add_(1, torch.tensor([4]), out[:, :1])
    assert not out.any()


class Attention(nn.Module):
    """Attention of nodes to their neighbours, by hand, of one head or several."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.values, self.scores = nn.Linear(4, 8), nn.Linear(8, heads)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        values = self.values(x)
        scores = self.scores(values).squeeze(1)[sources]
        weights = (scores - scores.max()).exp()
        total = weights.new_zeros(len(x), *weights.shape[1:]).index_add(0, targets, weights)
        weights = weights / total[targets].clamp(min=1e-4)
        weights = weights.reshape(len(sources), -1).mean(1, keepdim=True)
        return torch.zeros_like(values).index_add(0, targets, weights * values[sources])


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_attention_to_thousands_of_neighbours_is_that_of_float64(
    amp: ModuleType, level: str, heads: int
) -> None:
    torch.manual_seed(0)
    model, x = Attention(heads), torch.rand(200, 4)
    sources, targets = torch.arange(8000) % 200, torch.zeros(8000, dtype=torch.long)
    expected = model.double()(x.double(), sources, targets)[0]
    found = activate(amp, level, model.float())(x, sources, targets)[0]
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 4 * torch.finfo(HALF_OF[level]).eps


#: What the documentation says to write for ``h[ids]``, whose gradient autograd adds up in half.
LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_select": lambda h, ids: h.index_select(0, ids),
    "in float32": lambda h, ids: h.float()[ids].to(h.dtype),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_lookup_as_is_documented_has_the_gradient_of_float64(
    amp: ModuleType, level: str, lookup: str
) -> None:
    table = tensors(HALF_OF[level])[0].detach()[:, None].requires_grad_()
    weights = torch.rand(MANY, 1).to(table.dtype)

    def gradient() -> Tensor:
        return torch.autograd.grad(LOOKUPS[lookup](table, INDEX), table, weights)[0]

    found = inside(amp, level, gradient)
    exact = torch.zeros(PLACES, 1, dtype=torch.float64).index_add(0, INDEX, weights.double())
    assert found.dtype is table.dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(table.dtype).eps, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_few_rows_that_are_added_to_a_table_make_no_copy_of_it(
    amp: ModuleType, level: str
) -> None:
    half = HALF_OF[level]
    table, rows = torch.zeros(40_000, 8, dtype=half), torch.ones(4, 8, dtype=half)
    ids = torch.tensor([3, 5, 3, 7])
    calls = {
        "index_put_": lambda: table.index_put_((ids,), rows, accumulate=True),
        "index_add_": lambda: table.index_add_(0, ids.int(), rows),
        "index_add_ times": lambda: table.index_add_(0, ids, rows, alpha=-2),
    }
    for name, call in calls.items():
        taken = inside(amp, level, lambda call=call: allocations(call))
        assert sum(taken) < table.nbytes // 4, name
    assert not table.any()  # twice the rows, and -2 times
