"""What a value holds is put back; a second run leaves nothing of what modules hold changed."""

from __future__ import annotations

import functools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from plants import WIDTH, prepared, square, the_cause, train
from torch import Tensor, nn

from amp_patch.debug.held_values import HeldValue


class Slotted:
    __slots__ = ("__hidden", "count")

    def __init__(self) -> None:
        self.count = 0.0
        self.__hidden = 0


class SlottedCounter(Slotted):
    """Keeps its attributes in slots, of which one is not set."""

    __slots__ = ("late",)


@dataclass
class Counter:
    """What a script may keep in a class of its own."""

    count: float = 0.0
    inner: Any = None


def _append(held: Any, x: Tensor) -> float:
    held.append(float(x.float().clamp(-1, 1).mean()))
    return float(sum(held) / len(held))


def _smooth(held: Tensor, x: Tensor) -> Tensor:
    return held.mul_(0.5).add_(x.detach().float().clamp(-1, 1).mean(0)).mean()


def _smooth_array(held: Any, x: Tensor) -> float:
    held *= 0.5
    held += x.detach().float().clamp(-1, 1).mean(0).numpy()
    return float(held.mean())


def _count(held: Any, x: Tensor) -> float:
    held.count += 0.1
    return float(held.count)


def _count_bytes(held: bytearray, x: Tensor) -> float:
    held[0] += 1
    return 0.1 * held[0]


def _count_inside(held: Any, x: Tensor) -> float:
    return _count(held["first"][0], x)


def _resize(held: Tensor, x: Tensor) -> float:
    held.data = torch.cat([held.data, x.detach().float().clamp(-1, 1).mean().reshape(1)])
    return float(held.mean())


#: What a module holds, and how its forward changes that and makes a number of it.
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "tensor": (lambda: torch.zeros(WIDTH), _smooth),
    "tensor that grows": (lambda: torch.zeros(1), _resize),
    "array": (lambda: np.zeros(WIDTH, dtype=np.float32), _smooth_array),
    "list": (list, _append),
    "queue": (lambda: deque(maxlen=3), _append),
    "object": (Counter, _count),
    "object with slots": (SlottedCounter, _count),
    "bytes": (lambda: bytearray(1), _count_bytes),
    "namespace": (lambda: SimpleNamespace(count=0.0), _count),
    "object in containers": (lambda: {"first": (Counter(),)}, _count_inside),
    "Generator": (lambda: np.random.default_rng(0), lambda held, x: held.random()),
    "RandomState": (lambda: np.random.RandomState(0), lambda held, x: held.rand()),
    "Random": (lambda: random.Random(0), lambda held, x: held.random()),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(0),
        lambda held, x: torch.rand((), generator=held).item(),
    ),
}


class Holding(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.proj, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        make, self.change = HELD[kind]
        self.held, self.factor = make(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x * self.factor)
        return self.head(y * (1.0 + 0.1 * self.change(self.held, x)))


@pytest.mark.parametrize("kind", HELD)
def test_training_goes_on_bit_for_bit_whatever_modules_hold(amp, kind: str) -> None:
    states = []
    for trace in (False, True):
        torch.manual_seed(0)
        model, optimizer = prepared(amp, Holding(kind), "O1", trace_overflow=trace)
        for step in range(5):
            model.factor = 1e6 if step == 2 else 1.0  # overflows once
            train(amp, model, optimizer)
        assert bool(amp.overflow_report().causes) == trace
        states.append([param.detach().clone() for param in model.parameters()])
        amp.deactivate()
    for plain, traced in zip(*states, strict=True):
        assert torch.equal(plain, traced)


def test_an_attribute_in_a_slot_that_was_set_since_is_gone_again() -> None:
    counter = SlottedCounter()
    held = HeldValue(counter)
    counter.count, counter.late, counter._Slotted__hidden = 1.0, 2, 3
    assert not held.is_unchanged()
    held.put_back()
    assert held.is_unchanged()
    assert (counter.count, counter._Slotted__hidden) == (0.0, 0)
    assert not hasattr(counter, "late")


def test_what_is_written_in_c_has_no_slots_of_its_own() -> None:
    """Such a member may be another object at each look."""
    for value in (functools.partial(torch.add, alpha=2), operator.itemgetter(0), np.dtype("U300")):
        held = HeldValue(value)
        assert held.is_unchanged()
        held.put_back()


class Averaging(nn.Module):
    """Subtracts a mean that it keeps in an attribute, which inf in float16 spoils for good."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.proj, self.keep = nn.Linear(WIDTH, WIDTH), keep
        if keep == "buffer":
            self.register_buffer("mean", torch.zeros(WIDTH))
        elif keep != "nothing at first":
            self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x).float()
        mean = getattr(self, "mean", torch.zeros(WIDTH))
        new = 0.5 * mean + 0.5 * y.detach().mean(0)
        if self.keep == "in place":
            self.mean.copy_(new)
        else:
            self.mean = new
        return y - self.mean


@pytest.mark.parametrize("keep", ["buffer", "replaced", "in place", "nothing at first"])
def test_a_second_run_begins_with_what_the_call_has_found(amp, keep: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Averaging(keep), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    model, optimizer = prepared(amp, model, "O1")
    train(amp, lambda x: model(x * 1e6), optimizer, square)
    cause = the_cause(amp)
    # the mean of before would be inf in float32 as well, had the first run's stayed
    assert (cause.module, cause.mended_by) == ("0.proj", "module")
    train(amp, model, optimizer, square)
    (_, (then, _)) = amp.overflow_report().causes
    assert (then.where, then.module, then.operator) == ("weight", "0", "mean")
    assert then.result.kinds == ("NaN",)


class _Refusing:
    """An object whose class refuses comparison, as an array's does."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = object.__hash__


@hypothesis.given(
    st.recursive(
        st.integers() | st.builds(_Refusing) | st.builds(lambda: torch.zeros(2)),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(), inner)
            | st.dictionaries(st.text(), inner).map(OrderedDict)
            | st.lists(inner).map(deque)
            | st.builds(Counter, inner=inner)
        ),
    ),
    st.booleans(),
)
def test_any_nesting_holds_again_what_it_held(value: Any, again: bool) -> None:
    held, before = HeldValue(value), _shown(value)
    assert held.is_unchanged()
    for _ in range(1 + again):
        changed = _spoil(value)
        assert held.is_unchanged() == (not changed)
        held.put_back()
        assert held.is_unchanged()
        assert _shown(value) == before


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Counter):
        return [value.count, value.inner]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (list, tuple, deque)) else []


def _shown(value: Any) -> Any:
    """Return the identities of all that is in a value, in order, and the numbers in tensors."""
    numbers = value.tolist() if isinstance(value, Tensor) else ()
    return id(value), numbers, [_shown(part) for part in _parts(value)]


def _spoil(value: Any) -> bool:
    """Write to all that can be written to; return whether there was anything."""
    changed = [_spoil(part) for part in _parts(value)]
    if isinstance(value, Tensor):
        value.add_(1.0)
    elif isinstance(value, Counter):
        value.count, value.inner = -1.0, None
    elif isinstance(value, dict):
        value.clear()
        value["new"] = 1
    elif isinstance(value, (list, deque)):
        value.append(1)
    else:
        return any(changed)
    return True


class _Uncopied(dict[str, int]):
    """A mapping that refuses to be read."""

    def keys(self) -> Any:
        raise RuntimeError("closed")

    def __iter__(self) -> Any:
        raise RuntimeError("closed")


def _freed() -> Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)  # as FSDP does between two forwards
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        _freed,
        lambda: torch.zeros(4, device="meta"),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.zeros(4).to(torch.float8_e4m3fn),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: np.array(
            [torch.zeros(2), None], dtype=object
        ),  # says of no two that they are equal
        lambda: _Uncopied(),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_has_no_numbers_to_read_is_left_alone(make: Callable[[], Any]) -> None:
    held = HeldValue({"inside": make()})
    held.put_back()
    assert held.is_unchanged()
