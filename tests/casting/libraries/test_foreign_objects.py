"""Objects that are no tensors: converted where they can be, left as they are where not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from graph_libraries import dgl, torch_geometric
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_patch.casting.libraries.foreign_objects import cast_object, has_more_neighbours
from amp_patch.weights.half_model import cast_floats

pytestmark = pytest.mark.usefixtures("graph_libraries_imported")
Batch, Data = torch_geometric.data.Batch, torch_geometric.data.Data
HeteroData, TemporalData = torch_geometric.data.HeteroData, torch_geometric.data.TemporalData
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_LEVELS = {"O2": F16, "O3": F16, "O5": BF16}


def cast(item: Any, dtype: torch.dtype = F16) -> Any:
    return cast_object(item, dtype, lambda inner: cast_floats(inner, dtype))


class Converts:
    """Its ``to`` returns a new object."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, dtype: Any) -> Any:
        return type(self)(self.x.to(dtype))


class InPlace(Converts):
    def to(self, dtype: Any) -> Any:
        self.x = self.x.to(dtype)
        return self


class InPlaceWithoutResult(Converts):
    def to(self, dtype: Any) -> Any:
        self.x = self.x.to(dtype)


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x

    to = InPlace.to


class DevicesOnly(Converts):
    def to(self, device: Any) -> Any:
        self.x = None  # what it did until it failed must not be seen
        return self.x.to(torch.device(device))


class NamedDevices(DevicesOnly):
    def to(self, device: Any) -> Any:
        if device not in ("cpu", "cuda"):
            raise KeyError(device)
        return self


class Ignores(Converts):
    def to(self, dtype: Any) -> Any:
        return self


class NoCopy(DevicesOnly):
    def __copy__(self) -> Any:
        raise TypeError("there is one of it")


class NotCallable(Converts):
    to = "somewhere"


@pytest.mark.parametrize("kind", [Converts, InPlace, InPlaceWithoutResult, Slots])
def test_what_can_convert_itself_does_and_the_callers_object_stays(kind: type) -> None:
    item = kind(torch.ones(2))
    new = cast(item)
    assert type(new) is kind
    assert (new.x.dtype, item.x.dtype) == (F16, F32)


@pytest.mark.parametrize(
    "item",
    [
        *(
            kind(torch.ones(2))
            for kind in (DevicesOnly, NamedDevices, Ignores, NoCopy, NotCallable)
        ),
        nn.Linear(2, 2),
        Converts,  # a class
    ],
    ids=lambda item: getattr(item, "__name__", type(item).__name__),
)
def test_what_cannot_is_passed_as_it_is(item: Any) -> None:
    before = dict(vars(item))
    assert cast(item) is item
    assert all(vars(item)[name] is before[name] for name in before)


class Trainer:
    """Is passed along by a framework, and moves what it trains."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.models: Any = {"model": model}
        self.optimizer: Any = optimizer
        self.x = torch.ones(2)

    def to(self, *args: Any) -> Trainer:
        for model in self.models.values() if isinstance(self.models, dict) else ():
            model.to(*args)
        self.x = self.x.to(*args)
        return self


class Holder(Trainer):
    """Holds a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.models, self.optimizer, self.x = [trainer], None, torch.ones(2)


def test_what_holds_a_model_or_an_optimizer_converts_neither() -> None:
    model = nn.BatchNorm1d(2)
    trainer = Trainer(model, SGD(model.parameters(), 0.1))
    alone = Trainer(model, trainer.optimizer)
    alone.models = {}
    for item in (trainer, alone, Holder(trainer)):
        assert cast(item) is item
    assert model.weight.dtype is model.running_mean.dtype is torch.float32
    alone.optimizer = None
    converted = cast(alone)
    assert converted.x.dtype is torch.float16


class LazilyRead(dict[str, Any]):
    """Reads a file for each item."""

    def __getitem__(self, name: str) -> Any:
        raise OSError("a closed file")

    def values(self) -> Any:
        raise OSError("a closed file")


def test_what_an_object_holds_is_not_read_to_find_a_model() -> None:
    batch = Converts(torch.ones(2))
    batch.meta = LazilyRead(one=1)
    assert cast(batch).x.dtype is F16


class AllTensors:
    """Its ``to`` hands its arguments to all its tensors, as TensorFrame's of PyTorch Frame does."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def to(self, *args: Any) -> Any:
        new = {name: tensor.to(*args) for name, tensor in self.tensors.items()}
        return AllTensors(**{name: tensor.to(dtype=args[0]) for name, tensor in new.items()})


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_converts_all_its_tensors_keeps_integers_masks_and_float64(
    amp: ModuleType, level: str, compiled: bool
) -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(5000, 3)
            self.linear = nn.Linear(3, 2)

        def forward(self, item: AllTensors) -> Tensor:
            tensors = item.tensors
            assert tensors["x"].dtype is HALF_LEVELS[level]
            assert (tensors["mask"].dtype, tensors["time"].dtype) == (torch.bool, F64)
            return self.linear(self.rows(tensors["index"]) + tensors["x"])

    model = amp.initialize(Embeds(), opt_level=level, verbosity=0)
    item = AllTensors(
        x=torch.zeros(2, 3),
        index=torch.tensor([4097, 1]),
        mask=torch.ones(2, dtype=torch.bool),
        time=torch.ones(2, dtype=F64),
    )
    result = (torch.compile(model, backend="eager") if compiled else model)(item)
    alone = model.linear(model.rows(item.tensors["index"]))
    assert torch.equal(result, alone.float())


def test_memory_that_runs_out_is_no_sign_of_a_method_for_devices() -> None:
    class Large(Converts):
        def to(self, dtype: Any) -> Any:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        cast(Large(torch.ones(2)))


class Reads(nn.Module):
    """Notes what came, and computes with the tensor that a function finds in it."""

    def __init__(self, find: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.find = find
        self.came: list[Any] = []

    def forward(self, item: Any) -> Tensor:
        self.came.append(item)
        return self.layer(self.find(item))


def graph() -> dgl.DGLGraph:
    found = dgl.graph(([0, 1, 1], [1, 2, 2]), num_nodes=4)
    found.ndata["x"] = torch.randn(4, 3)
    found.ndata["label"] = torch.arange(4)
    found.edata["w"] = torch.rand(3, dtype=F64)
    found.edata["x"] = torch.rand(3, 3)
    return found


def heterograph() -> dgl.DGLGraph:
    found = dgl.heterograph({("a", "to", "b"): ([0, 1], [1, 0]), ("b", "of", "a"): ([0], [1])})
    found.nodes["a"].data["x"] = torch.randn(2, 3)
    found.edges["to"].data["x"] = torch.randn(2, 3)
    return found


def block() -> dgl.DGLGraph:
    """Make a block of a sampler, whose features wait to be sliced."""
    sampler = dgl.dataloading.NeighborSampler([2])
    return sampler.sample_blocks(graph(), torch.tensor([2]))[2][0]


def hetero_data() -> HeteroData:
    found = HeteroData()
    found["a"].x = torch.randn(2, 3)
    found["a", "to", "a"].edge_index = torch.tensor([[0], [1]])
    found["a", "to", "a"].edge_attr = torch.randn(1, 3)
    return found


def data() -> Data:
    return Data(
        x=torch.randn(4, 3),
        edge_index=torch.tensor([[0, 1], [1, 2]]),
        pos=torch.randn(4, 2, dtype=F64),
        parts=[torch.ones(1), {"deep": torch.ones(1)}],
        name="a graph",
    )


GRAPHS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Tensor]]]] = {
    "graph": (graph, lambda g: [g.ndata["x"], g.edata["x"]]),
    "heterograph": (heterograph, lambda g: [g.nodes["a"].data["x"], g.edges["to"].data["x"]]),
    "block": (block, lambda g: [g.srcdata["x"], g.dstdata["x"], g.edata["x"]]),
    "batched graph": (lambda: dgl.batch([graph(), graph()]), lambda g: [g.ndata["x"]]),
    "Data": (data, lambda d: [d.x, d.parts[0], d.parts[1]["deep"]]),
    "Batch": (lambda: Batch.from_data_list([data(), data()]), lambda d: [d.x]),
    "HeteroData": (
        hetero_data,
        lambda d: [d["a"].x, d["a", "to", "a"].edge_attr],
    ),
    "TemporalData": (
        lambda: TemporalData(
            src=torch.tensor([0]), dst=torch.tensor([1]), t=torch.tensor([2]), msg=torch.ones(1, 3)
        ),
        lambda d: [d.msg],
    ),
}


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_features_in_a_graph_come_in_half_and_the_callers_stay(
    amp: ModuleType, kind: str, level: str
) -> None:
    make, features = GRAPHS[kind]
    item = make()
    before = [tensor.clone() for tensor in features(item)]
    model = Reads(lambda found: features(found)[0].reshape(-1, 3))
    model = amp.initialize(model, opt_level=level, verbosity=0)
    for given_as in (item, [item], {"graph": item}):
        assert model(given_as if given_as is item else item).dtype is F32
        model.find = lambda found: torch.ones(1, 3, dtype=HALF_LEVELS[level])
        model(given_as)
        model.find = lambda found: features(found)[0].reshape(-1, 3)
    came = model.came[0]
    assert type(came) is type(item)
    for ours, theirs, old in zip(features(came), features(item), before, strict=True):
        assert ours.dtype is HALF_LEVELS[level]
        assert theirs.dtype is F32
        assert torch.equal(theirs, old)
        assert torch.equal(ours, old.to(HALF_LEVELS[level]))


def test_integers_float64_and_what_is_no_tensor_stay() -> None:
    new = cast(graph())
    assert (new.ndata["label"].dtype, new.edata["w"].dtype) == (torch.int64, F64)
    new = cast(data())
    assert (new.edge_index.dtype, new.pos.dtype, new.name) == (torch.int64, F64, "a graph")


def test_features_that_are_written_inside_do_not_reach_the_caller() -> None:
    item = graph()
    cast(item).ndata["new"] = torch.ones(4)
    assert "new" not in item.ndata


@pytest.mark.parametrize("kind", GRAPHS)
def test_what_is_in_half_already_is_the_very_object(kind: str) -> None:
    item = cast(GRAPHS[kind][0]())
    assert cast(item) is item


def test_a_column_that_waits_is_not_sliced_to_be_cast() -> None:
    new = cast(block())
    waiting = [frame._columns["x"] for frame in new._node_frames if "x" in frame._columns]
    assert waiting
    assert all(column.index is not None for column in waiting)


@dataclasses.dataclass
class Both:
    graph: Any
    x: Tensor


@given(st.lists(st.sampled_from([graph, data, lambda: DevicesOnly(torch.ones(1))]), max_size=4))
def test_objects_in_containers_are_cast_beside_tensors(makers: list[Callable[[], Any]]) -> None:
    items = [make() for make in makers]
    new = cast_floats(Both(items, torch.ones(1)), F16)
    assert new.x.dtype is F16
    for ours, theirs in zip(new.graph, items, strict=True):
        assert (ours is theirs) is isinstance(theirs, DevicesOnly)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_model_that_is_compiled_takes_such_objects(amp: ModuleType, level: str) -> None:
    model = amp.initialize(Reads(lambda item: item.x), opt_level=level, verbosity=0)
    compiled = torch.compile(model, backend="eager")
    item = InPlace(torch.ones(2, 3))
    assert compiled(item).dtype is F32
    assert item.x.dtype is F32


def test_the_neighbours_of_a_graph_are_counted_in_both_directions() -> None:
    star = dgl.graph((torch.arange(5), torch.zeros(5).long()))
    for graph in (star, dgl.reverse(star)):
        assert has_more_neighbours(graph, 4)
        assert not has_more_neighbours(graph, 5)
    ring = dgl.graph((torch.arange(5), torch.arange(5).roll(1)))
    assert not has_more_neighbours(ring, 1)
    assert not has_more_neighbours(torch.ones(9), 1)


class Takes(nn.Linear):
    def forward(self, graph: Any, data: Any) -> Tensor:  # type: ignore[override]  # no tensor
        self.seen = graph, data
        return super().forward(data.x)


def test_a_rule_leaves_one_feature_of_a_graph(amp: ModuleType) -> None:
    graph = dgl.graph((torch.tensor([0, 1]), torch.tensor([1, 0])))
    graph.ndata["x"], graph.ndata["at"] = torch.ones(2, 4), torch.full((2,), 1333.3)
    data = torch_geometric.data.Data(x=torch.ones(3, 4), at=torch.full((3,), 1333.3))
    rules = {"inputs": {"graph.ndata.at": "off", "data.at": "off"}}
    model = amp.initialize(Takes(4, 4), opt_level="O5", verbosity=0, rules=rules)
    model(graph, data=data)
    seen, features = model.seen
    assert seen.ndata["x"].dtype is features.x.dtype is torch.bfloat16
    assert seen.ndata["at"].dtype is features["at"].dtype is torch.float32
    assert data.x.dtype is torch.float32
    assert graph.ndata["x"].dtype is torch.float32
