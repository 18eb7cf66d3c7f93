"""A node with more neighbours than float16 counts to, 65504, against float32."""

from types import ModuleType
from typing import Any

import graph_training
import pytest
import support
import torch
from graph_libraries import dgl, torch_geometric
from torch import Tensor, nn

conv, fn, pyg = dgl.nn, dgl.function, torch_geometric.nn
NODES, WIDTH = 70_001, 4
SOURCES, TARGETS = torch.arange(NODES), torch.zeros(NODES, dtype=torch.long)
GRAPH = dgl.add_self_loop(dgl.graph((SOURCES[1:], TARGETS[1:]), num_nodes=NODES))
EDGES = torch.cat([torch.stack(GRAPH.edges()), torch.stack([TARGETS, SOURCES])[:, 1:]], dim=1)
ONE_GRAPH = torch.zeros(NODES, dtype=torch.long)


class Hub(nn.Module):
    """What a layer or function finds at the hub."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.before, self.found = nn.Linear(WIDTH, WIDTH), found

    def forward(self, x: Tensor) -> Tensor:
        return self.found(self.before(x))[:1]


class OfDGL(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        first = (x, x) if isinstance(self.layer, conv.GCN2Conv) else (x,)
        return self.layer(GRAPH, *first).flatten(1)


class OfPyG(OfDGL):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, EDGES)


class Aggregated(pyg.SAGEConv):
    """A class of its own: PyTorch Geometric writes one ``propagate`` for each, by the first."""


class Mean(nn.Module):
    """The mean of messages, by DGL's built-in functions."""

    def forward(self, x: Tensor) -> Tensor:
        with GRAPH.local_scope():
            GRAPH.ndata["h"], GRAPH.edata["w"] = x, torch.full((GRAPH.num_edges(), 1), 0.5)
            GRAPH.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "h"))
            return GRAPH.ndata["h"]


LAYERS = {
    "DGL, mean": Mean,
    "DGL, mean_nodes": lambda: lambda x: dgl.ops.segment_reduce(torch.tensor([NODES]), x, "mean"),
    "DGL, GraphConv both": lambda: OfDGL(conv.GraphConv(WIDTH, 8)),
    "DGL, GraphConv right": lambda: OfDGL(conv.GraphConv(WIDTH, 8, norm="right")),
    "DGL, SAGEConv mean": lambda: OfDGL(conv.SAGEConv(WIDTH, 8, "mean")),
    "DGL, SAGEConv gcn": lambda: OfDGL(conv.SAGEConv(WIDTH, 8, "gcn")),
    "DGL, APPNPConv": lambda: OfDGL(conv.APPNPConv(3, 0.1)),
    "DGL, SGConv": lambda: OfDGL(conv.SGConv(WIDTH, 8, 2)),
    "DGL, TAGConv": lambda: OfDGL(conv.TAGConv(WIDTH, 8)),
    "DGL, GCN2Conv": lambda: OfDGL(conv.GCN2Conv(WIDTH, 1)),
    "PyG, GCNConv": lambda: OfPyG(pyg.GCNConv(WIDTH, 8)),
    "PyG, APPNP": lambda: OfPyG(pyg.APPNP(3, 0.1)),
    "PyG, ChebConv": lambda: OfPyG(pyg.ChebConv(WIDTH, 8, 2)),
    "PyG, VariancePreservingAggregation": lambda: OfPyG(
        Aggregated(WIDTH, 8, aggr=pyg.VariancePreservingAggregation())
    ),
    "PyG, GraphSizeNorm": lambda: pyg.GraphSizeNorm(),
    "PyG, GraphSizeNorm of batches": lambda: lambda x: pyg.GraphSizeNorm()(x, ONE_GRAPH),
}
ORDINARY = {
    ("DGL, mean", "O1"),
    ("DGL, mean_nodes", "O2"),
    ("DGL, GraphConv both", "O1"),
    ("DGL, GraphConv right", "O2"),
    ("DGL, SAGEConv gcn", "O2"),
    ("DGL, SGConv", "O1"),
    ("PyG, GCNConv", "O1"),
    ("PyG, GCNConv", "O2"),
    ("PyG, ChebConv", "O2"),
    ("PyG, GraphSizeNorm", "O1"),
}
EVERY = [(name, level) for name in LAYERS for level in (*graph_training.LEVELS, "O3")]


@pytest.mark.parametrize("case", support.nightly_but(ORDINARY, EVERY), ids=" ".join)
def test_a_hub_counts_all_of_its_neighbours(amp: ModuleType, case: tuple[str, str]) -> None:
    """In float16 it has infinitely many: what is divided by them is zero, or its gradient is."""
    name, level = case
    torch.manual_seed(0)
    model = Hub(LAYERS[name]())
    model.before.weight.data.mul_(0.1)  # gradients of sums over so many are to be finite
    graph_training.check_step(amp, model, (torch.rand(NODES, WIDTH) + 0.5,), level)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_count_that_half_does_not_hold_is_finite(amp: ModuleType, dtype: torch.dtype) -> None:
    """Its inverse is not zero then, as in a layer of the user's own."""
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    found = torch_geometric.utils.degree(ONE_GRAPH, 1, dtype=dtype)
    assert found.dtype is dtype
    assert found.item() == pytest.approx(NODES, rel=0.07)


def test_a_graph_without_a_hub_runs_in_half(amp: ModuleType) -> None:
    """Also one of more edges than float16 counts to."""
    ring = dgl.graph((SOURCES, SOURCES.roll(1)), num_nodes=NODES)
    layer = conv.GraphConv(WIDTH, 2)
    kept: set[torch.dtype] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.dtype)
        return tensor

    model = amp.initialize(layer, opt_level="O2", verbosity=0)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(ring, torch.ones(NODES, WIDTH))
    assert torch.float32 not in kept


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_long_segment_is_not_cut_off(amp: ModuleType, reduce: str, level: str) -> None:
    """Torch's own kernel adds up half numbers one by one on a CPU."""
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    ones = torch.ones(NODES, dtype=torch.bfloat16)
    found = torch.segment_reduce(ones, reduce, lengths=torch.tensor([NODES]))
    assert found.dtype is torch.bfloat16
    assert found.item() == pytest.approx(NODES if reduce == "sum" else 1, rel=0.01)


class Typed(nn.Module):
    """A matrix for each row, by its type, of which the library makes one product."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = conv.TypedLinear(WIDTH, 8, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.arange(len(x)) % 3)


@pytest.mark.parametrize("options", [{}, {"regularizer": "basis", "num_bases": 2}])
@pytest.mark.parametrize("level", graph_training.LEVELS)
def test_a_type_of_thousands_of_rows(amp: ModuleType, level: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.rand(6000, WIDTH) + 0.5
    graph_training.check_step(amp, Typed(**options), (x,), level)
