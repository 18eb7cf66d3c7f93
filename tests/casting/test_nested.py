"""Functions applied to the tensors in containers of every kind."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from amp_patch.casting.nested import map_tensors

Point = namedtuple("Point", ["x", "y"])


class Batch(NamedTuple):
    data: Tensor
    label: str = "none"


class Doubled(namedtuple("Doubled", ["first", "second"])):
    """A named tuple whose constructor takes something else than its fields."""

    def __new__(cls, both: Any) -> Doubled:
        return super().__new__(cls, both, both)


class Pair(tuple):
    """A tuple whose constructor takes something else than an iterable."""

    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Tagged(list):
    """A list with an attribute and a constructor of its own."""

    def __init__(self, tag: str, *items: Any) -> None:
        super().__init__(items)
        self.tag = tag


class AttributeDict(dict):
    """The idiom that makes items attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class LabelledDict(dict):
    """A dictionary with an attribute and a constructor of its own."""

    def __init__(self, label: str, **items: Any) -> None:
        super().__init__(**items)
        self.label = label


class Out(OrderedDict):
    """An ordered dictionary with an attribute and a constructor of its own."""

    def __init__(self, logits: Any, label: str = "a") -> None:
        super().__init__(logits=logits)
        self.label = label


class AttributeOrderedDict(OrderedDict):
    """The idiom of `AttributeDict` on an ordered dictionary, in the way that survives a copy."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self["x"] = x

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Ring(deque):
    """A deque with an attribute."""

    tag = "none"


class Marks(set):
    """A set with an attribute."""

    tag = "none"


class ModelOutput(OrderedDict):
    """An output as transformers has it: a dataclass, and a mapping of the fields that are set."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        made = super().__reduce__()
        return (made[0], tuple(getattr(self, f.name) for f in dataclasses.fields(self)), *made[2:])


@dataclasses.dataclass
class LossAndLogits(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


@dataclasses.dataclass
class LogitsOf(ModelOutput):
    """Has a field without a default, and an output in it, as that of VJEPA2."""

    logits: Tensor
    predictor: Any = None


class CaseInsensitive(MutableMapping[str, Any]):
    """A mapping that is no dict and keeps its items in an attribute."""

    def __init__(self, **items: Any) -> None:
        self.items_of: dict[str, Any] = {}
        self.update(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key.lower()]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of[key.lower()] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class Named(UserDict):
    """A UserDict, as transformers' BatchEncoding is one, with a constructor of its own."""

    def __init__(self, name: str, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.name = name


@dataclasses.dataclass
class Sample:
    data: Any
    count: int = 1
    derived: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True)
class FrozenSample:
    data: Tensor
    nested: Any = None


@dataclasses.dataclass
class DefaultSample:
    data: Tensor = torch.tensor(1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedSample:
    data: Tensor
    name: str = "slotted"


@dataclasses.dataclass(eq=False)
class DataclassModule(nn.Module):
    weight: Tensor

    def __post_init__(self) -> None:
        super().__init__()


def half(tensor: Tensor) -> Tensor:
    """What the tests map: floats become half, integers stay the same object."""
    return tensor.half() if tensor.is_floating_point() else tensor


X, Y, INDEX = torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([1, 0])
HX, HY = X.half(), Y.half()

#: container -> (made of the tensors given, the tensors that are then in it)
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], list[Any]]]] = {
    "list": (lambda x, y: [x, y, 1], lambda c: [c[0], c[1]]),
    "tuple": (lambda x, y: (x, y, "a"), lambda c: [c[0], c[1]]),
    "dict": (lambda x, y: {"x": x, 2: y, "n": None}, lambda c: [c["x"], c[2]]),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), lambda c: [c["x"], c["y"]]),
    "defaultdict": (lambda x, y: defaultdict(list, x=x, y=[y]), lambda c: [c["x"], c["y"][0]]),
    "OrderedDict, own constructor": (lambda x, y: Out(x), lambda c: [c["logits"]]),
    "OrderedDict, attributes": (lambda x, y: AttributeOrderedDict(x), lambda c: [c["x"], c.x]),
    "deque": (lambda x, y: deque([x, y, 1], maxlen=3), lambda c: [c[0], c[1]]),
    "deque subclass": (lambda x, y: Ring([x, [y]]), lambda c: [c[0], c[1][0]]),
    "set": (lambda x, y: {x}, list),
    "set subclass": (lambda x, y: Marks([x]), list),
    "frozenset": (lambda x, y: frozenset({(x, 1)}), lambda c: [item[0] for item in c]),
    "Counter": (lambda x, y: Counter(x=x, y=y), lambda c: [c["x"], c["y"]]),
    "named tuple": (Point, lambda c: [c.x, c.y]),
    "typed named tuple": (lambda x, y: Batch(x, "a"), lambda c: [c.data]),
    "named tuple, own constructor": (lambda x, y: Doubled(x), lambda c: [c.first, c.second]),
    "tuple subclass": (Pair, list),
    "list subclass": (lambda x, y: Tagged("tag", x, y), list),
    "dict subclass": (lambda x, y: LabelledDict("a", x=x, y=y), lambda c: [c["x"], c["y"]]),
    "attribute dict": (lambda x, y: AttributeDict(x=x, y=y), lambda c: [c.x, c["y"]]),
    "model output": (
        lambda x, y: LossAndLogits(loss=x, hidden=(y,)),
        lambda c: [c.loss, c["loss"], c.hidden[0], c["hidden"][0]],
    ),
    "model output in one": (
        lambda x, y: LogitsOf(x, predictor=LogitsOf(y)),
        lambda c: [c.logits, c.predictor["logits"], c["predictor"].logits],
    ),
    "namespace": (lambda x, y: types.SimpleNamespace(x=x, n=1, y=[y]), lambda c: [c.x, c.y[0]]),
    "user dict": (lambda x, y: Named("n", {"x": x, "y": y}), lambda c: [c["x"], c["y"]]),
    "mapping": (lambda x, y: CaseInsensitive(X=x, y=y), lambda c: [c["x"], c["Y"]]),
    "mapping proxy": (
        lambda x, y: types.MappingProxyType({"x": x, "y": y, "n": 1}),
        lambda c: [c["x"], c["y"]],
    ),
    "dataclass": (lambda x, y: Sample(x), lambda c: [c.data]),
    "frozen dataclass": (lambda x, y: FrozenSample(x, [y]), lambda c: [c.data, c.nested[0]]),
    "slotted dataclass": (lambda x, y: SlottedSample(x), lambda c: [c.data]),
    "nested": (
        lambda x, y: [{"a": (x, Point(y, [FrozenSample(x)]))}],
        lambda c: [c[0]["a"][0], c[0]["a"][1].x, c[0]["a"][1].y[0].data],
    ),
    "packed sequence": (lambda x, y: pack_sequence([x, y]), lambda c: [c.data]),
    "torch.return_types": (lambda x, y: torch.return_types.max((x, INDEX)), lambda c: [c.values]),
}


def content(container: Any) -> Any:
    """What a container holds, by identity where it is a tensor, to compare before and after."""
    if isinstance(container, Tensor):
        return id(container)
    if isinstance(container, CaseInsensitive | UserDict | dict | types.MappingProxyType):
        return {key: content(item) for key, item in container.items()}
    if isinstance(container, list | tuple | deque):
        return [content(item) for item in container]
    if isinstance(container, set | frozenset):
        return {str(content(item)) for item in container}
    if isinstance(container, types.SimpleNamespace):
        return content(vars(container))
    if dataclasses.is_dataclass(container):
        return [content(getattr(container, f.name)) for f in dataclasses.fields(container)]
    return container


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_is_mapped_to_one_of_its_kind(name: str) -> None:
    make, tensors = CONTAINERS[name]
    container = make(X, Y)
    before = content(container)
    result = map_tensors(half, container)
    assert type(result) is type(container)
    assert [t.dtype for t in tensors(result)] == [torch.float16] * len(tensors(result))
    for found, original in zip(tensors(result), tensors(container), strict=True):
        assert torch.equal(found, original.half())
    assert result is not container
    if hasattr(container, "keys"):
        assert list(result) == list(container)
    assert content(container) == before
    assert {t.dtype for t in tensors(container)} == {torch.float32}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_without_a_change_is_returned_itself(name: str) -> None:
    make, _ = CONTAINERS[name]
    container = make(HX, HY)
    assert map_tensors(lambda tensor: tensor, container) is container


@pytest.mark.parametrize(
    "leaf",
    [
        None, True, 3, 2.5, 1j, "text", b"bytes", torch.Size([2, 3]), torch.float32,
        torch.device("cpu"), {1, 2}, frozenset({1}), range(3), slice(1), int, DefaultSample,
        pytest.param(object(), id="object"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_container_is_returned_itself(leaf: Any) -> None:
    assert map_tensors(half, leaf) is leaf


@pytest.mark.parametrize(
    "module", [nn.Linear(1, 1), DataclassModule(X)], ids=["module", "dataclass"]
)
def test_a_module_is_left_alone(module: nn.Module) -> None:
    assert map_tensors(half, module) is module


def test_other_leaves_go_through_the_second_function() -> None:
    seen: list[Any] = []
    leaf, module = object(), nn.Identity()
    result = map_tensors(half, [leaf, {"a": (module, X)}, "text", 3], lambda i: seen.append(i) or i)
    assert seen == [leaf, module]
    assert result[0] is leaf
    assert result[1]["a"][0] is module


def test_a_leaf_that_the_second_function_changes_is_replaced() -> None:
    container = Point(FrozenSample(INDEX, nested=range(2)), 1)
    result = map_tensors(half, container, lambda leaf: list(leaf))
    assert (result.x.nested, container.x.nested) == ([0, 1], range(2))
    assert result.x.data is INDEX


@pytest.mark.parametrize(
    ("container", "attributes"),
    [
        (Tagged("tag", X), {"tag": "tag"}),
        (LabelledDict("label", x=X), {"label": "label"}),
        (defaultdict(list, x=X), {"default_factory": list}),
        (Named("name", {"x": X}), {"name": "name"}),
        (Out(X, "b"), {"label": "b"}),
        (deque([X], maxlen=2), {"maxlen": 2}),
        (Sample(X, count=5), {"count": 5, "derived": None}),
        (SlottedSample(X, "s"), {"name": "s"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_attributes_are_kept(container: Any, attributes: dict[str, Any]) -> None:
    result = map_tensors(half, container)
    assert result is not container
    assert {name: getattr(result, name) for name in attributes} == attributes


def test_fields_that_no_constructor_takes_are_mapped() -> None:
    sample = Sample(INDEX)
    sample.derived = [X]
    result = map_tensors(half, sample)
    assert result.derived[0].dtype is torch.float16
    assert sample.derived[0] is X
    assert result.data is INDEX


def test_a_field_that_was_never_set_stays_so() -> None:
    sample = Sample(X)
    del sample.data
    assert map_tensors(half, sample) is sample


def test_items_keep_their_order() -> None:
    container = OrderedDict(b=INDEX, a=X, c=1)
    assert list(map_tensors(half, container)) == ["b", "a", "c"]
    assert list(map_tensors(half, dict(container))) == ["b", "a", "c"]


class Labelled(dict[str, Any]):
    """A dict with an attribute."""


def test_a_list_in_an_attribute_of_a_dict_is_not_shared_with_the_callers() -> None:
    container = Labelled(x=X)
    container.tags = ["given"]
    result = map_tensors(half, container)
    result.tags.append("in the model")
    assert container.tags == ["given"]


def test_an_attribute_dict_stays_one() -> None:
    result = map_tensors(half, AttributeDict(x=X))
    result.y = 1
    assert result["y"] == 1


def test_a_model_output_keeps_its_unset_fields() -> None:
    result = map_tensors(half, LossAndLogits(logits=X))
    assert result.loss is None
    assert list(result) == ["logits"]


def test_a_packed_sequence_keeps_its_order() -> None:
    packed = pack_sequence([Y, X], enforce_sorted=False)
    result = map_tensors(torch.clone, packed)
    assert isinstance(result, PackedSequence)
    for found, expected in zip(result[1:], packed[1:], strict=True):
        assert found is expected


def test_a_tensor_subclass_is_a_tensor() -> None:
    parameter = nn.Parameter(X.clone())
    assert map_tensors(half, [parameter])[0].dtype is torch.float16


# -- any nesting -----------------------------------------------------------------------------

leaves = st.one_of(
    st.sampled_from([X, Y, INDEX]), st.integers(), st.text(max_size=2), st.none(), st.booleans()
)
nestings = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(OrderedDict, st.dictionaries(st.text(max_size=2), inner, max_size=3)),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Sample, inner),
        st.builds(FrozenSample, inner, inner),
        st.builds(CaseInsensitive, x=inner),
    ),
    max_leaves=12,
)


def flatten(value: Any) -> list[Any]:
    """The leaves of a nesting with the kinds of the containers around them."""
    if isinstance(value, dict | CaseInsensitive):
        return [type(value), [(key, flatten(item)) for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value), [flatten(item) for item in value]]
    if dataclasses.is_dataclass(value):
        return [type(value), [flatten(getattr(value, f.name)) for f in dataclasses.fields(value)]]
    return [value]


def same_leaves(found: Any, expected: Any) -> bool:
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same_leaves, found, expected))
    return found is expected or (not isinstance(found, Tensor) and found == expected)


@given(nestings)
def test_any_nesting_keeps_its_shape_and_its_original(nesting: Any) -> None:
    halves = {id(X): HX, id(Y): HY}
    before = copy.deepcopy(content(nesting)), flatten(nesting)
    result = map_tensors(lambda tensor: halves.get(id(tensor), tensor), nesting)
    assert (content(nesting), flatten(nesting)) == before

    def expect(leaf: Any) -> Any:
        if isinstance(leaf, list | tuple):
            return type(leaf)(expect(item) for item in leaf)
        return halves.get(id(leaf), leaf)

    assert same_leaves(flatten(result), expect(flatten(nesting)))
    unchanged = same_leaves(flatten(result), flatten(nesting))
    assert (result is nesting) == unchanged
