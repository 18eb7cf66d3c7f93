"""Layers and functions of PyTorch Geometric at the levels, against float32."""

import contextlib
import sys
from types import ModuleType
from typing import Any

import graph_training
import processes
import pytest
import support
import torch
from graph_libraries import torch_geometric
from graph_training import HALF_OF, LEVELS, NODES, Layer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.casting.libraries import half_sums
from amp_patch.tools.sweep.memory import LivingTensors

pyg, utils = torch_geometric.nn, torch_geometric.utils
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
EDGES = 160
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta", "ignore:.torch.jit.script. is deprecated"
)

_generator = torch.Generator().manual_seed(1)
_ends = torch.randint(NODES, (2, EDGES), generator=_generator)
EDGE_INDEX = _ends[:, _ends[1].argsort()]
#: In float32, and no inputs of the model: at O2 and O5 they meet half features.
WEIGHTS = torch.rand(EDGES, generator=_generator) + 0.5
ATTRIBUTES = torch.randn(EDGES, 5, generator=_generator)
TYPES = torch.arange(EDGES) % 3
CSR = torch.sparse_coo_tensor(EDGE_INDEX.flip(0), WEIGHTS, (NODES, NODES)).coalesce()

ADJACENCY = utils.to_dense_adj(EDGE_INDEX, max_num_nodes=NODES)


def csr() -> Tensor:
    return CSR.to_sparse_csr()


def coo() -> Tensor:
    return CSR


def edge_index() -> Any:
    return torch_geometric.EdgeIndex(EDGE_INDEX, sparse_size=(NODES, NODES), sort_order="col")


class Aggregated(pyg.SAGEConv):
    """Other aggregations: PyTorch Geometric writes one ``propagate`` for each class."""


class OwnMessages(pyg.MessagePassing):
    """A layer of the user's own, whose messages meet float32 weights of edges."""

    def __init__(self, width: int, to: int, aggr: Any = "add") -> None:
        super().__init__(aggr=aggr)
        self.before, self.after = nn.Linear(width, to), nn.Linear(to, to)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=self.before(x), weight=WEIGHTS)
        return self.after(out * 0.2)

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.unsqueeze(-1)


class Pooled(nn.Module):
    """A convolution, and what a pooling function finds in four graphs of the same nodes."""

    def __init__(self, width: int, to: int, pool: Any) -> None:
        super().__init__()
        self.conv, self.own, self.pool = pyg.GCNConv(width, to), nn.Linear(to, to), pool

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        graphs = torch.arange(NODES) % 4
        hidden = self.conv(x, edges, WEIGHTS)
        return hidden + self.own(self.pool(hidden, graphs))[graphs]


class Dense(nn.Module):
    """Layers for dense adjacency, which meet one in float32 that is no input of the model."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.conv, self.assign = pyg.DenseSAGEConv(width, to), nn.Linear(to, 3)
        self.after = nn.Linear(to, to)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = self.conv(x, ADJACENCY)
        groups = self.assign(hidden)
        pooled, *_ = pyg.dense_diff_pool(hidden, ADJACENCY, groups)
        return (hidden + self.after(groups.softmax(-1) @ pooled)).squeeze(0)


class ToHetero(nn.Module):
    """A model for one kind of nodes, made into one for two."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        kinds = [("a", "to", "b"), ("b", "to", "a")]
        one = pyg.Sequential(
            "x, edge_index",
            [(pyg.SAGEConv((width, width), to), "x, edge_index -> x"), nn.Linear(to, to)],
        )
        self.model = pyg.to_hetero(one, (["a", "b"], kinds))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        found = self.model(
            {"a": x, "b": x.flip(0)}, {("a", "to", "b"): edges, ("b", "to", "a"): edges.flip(0)}
        )
        return found["a"] + found["b"]


def plain(layer: Any, edges: Any, x: Tensor) -> Tensor:
    return layer(x, edges)


def weighted(layer: Any, edges: Any, x: Tensor) -> Tensor:
    return layer(x, edges, WEIGHTS)


def attributes(layer: Any, edges: Any, x: Tensor) -> Tensor:
    return layer(x, edges, ATTRIBUTES)


def degrees() -> Tensor:
    return torch.bincount(torch.bincount(EDGE_INDEX[1], minlength=NODES))


#: The layer, and what makes the edges that it gets.
LAYERS: dict[str, tuple[Layer, Any]] = {
    "GCNConv, weights": (Layer(pyg.GCNConv, weighted), None),
    "GCNConv, CSR": (Layer(pyg.GCNConv, plain), csr),
    "GCNConv, EdgeIndex": (
        Layer(lambda i, o: pyg.GCNConv(i, o, normalize=False), weighted),
        edge_index,
    ),
    "GraphConv, weights": (Layer(pyg.GraphConv, weighted), None),
    "GATConv, attributes": (Layer(lambda i, o: pyg.GATConv(i, o, edge_dim=5), attributes), None),
    "GATv2Conv, attributes": (
        Layer(lambda i, o: pyg.GATv2Conv(i, o, edge_dim=5), attributes),
        None,
    ),
    "SAGEConv": (Layer(pyg.SAGEConv, plain), None),
    "SAGEConv, CSR": (Layer(pyg.SAGEConv, plain), csr),
    "SAGEConv lstm": (Layer(lambda i, o: Aggregated(i, o, aggr="lstm"), plain), None),
    "SAGEConv softmax": (Layer(lambda i, o: Aggregated(i, o, aggr="softmax"), plain), None),
    "SAGEConv several": (
        Layer(lambda i, o: Aggregated(i, o, aggr=["mean", "std", "max", "median"]), plain),
        None,
    ),
    "GINConv": (Layer(lambda i, o: pyg.GINConv(nn.Linear(i, o)), plain), None),
    "GINEConv, attributes": (
        Layer(lambda i, o: pyg.GINEConv(nn.Linear(i, o), edge_dim=5), attributes),
        None,
    ),
    "RGCNConv": (Layer(lambda i, o: pyg.RGCNConv(i, o, 3), lambda a, e, x: a(x, e, TYPES)), None),
    "TransformerConv, attributes": (
        Layer(lambda i, o: pyg.TransformerConv(i, o, edge_dim=5), attributes),
        None,
    ),
    "PNAConv": (
        Layer(
            lambda i, o: pyg.PNAConv(i, o, ["mean", "max", "std"], ["identity"], degrees()), plain
        ),
        None,
    ),
    "ChebConv, weights": (Layer(lambda i, o: pyg.ChebConv(i, o, 2), weighted), None),
    "own messages": (Layer(OwnMessages, plain), None),
    "own messages, aggregated by weights": (
        Layer(
            lambda i, o: OwnMessages(
                i, o, pyg.DeepSetsAggregation(nn.Linear(o, o), nn.Linear(o, o))
            ),
            plain,
        ),
        None,
    ),
    "global_mean_pool": (Layer(lambda i, o: Pooled(i, o, pyg.global_mean_pool), plain), None),
    "global_max_pool": (Layer(lambda i, o: Pooled(i, o, pyg.global_max_pool), plain), None),
    "global_add_pool": (Layer(lambda i, o: Pooled(i, o, pyg.global_add_pool), plain), None),
    "to_hetero": (Layer(ToHetero, plain), None),
    "dense layers": (Layer(Dense, plain), None),
}
ORDINARY = {
    ("GCNConv, weights", "O2"),
    ("GCNConv, CSR", "O1"),
    ("GATConv, attributes", "O1"),
    ("GATConv, attributes", "O5"),
    ("own messages", "O2"),
    ("RGCNConv", "O5"),
    ("global_mean_pool", "O4"),
    ("to_hetero", "O2"),
    ("dense layers", "O2"),
}
EVERY = [(name, level) for name in LAYERS for level in LEVELS]


@pytest.mark.parametrize("case", support.nightly_but(ORDINARY, EVERY), ids=" ".join)
def test_a_layer_trains_as_in_float32(amp: ModuleType, case: tuple[str, str]) -> None:
    name, level = case
    layer, make = LAYERS[name]
    graph_training.check(amp, layer, EDGE_INDEX if make is None else make(), level)


class Coarsened(nn.Module):
    """A layer that pools nodes, by sparse products, distances or matrices of its own."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.before, self.pool = nn.Linear(16, 16), pool

    def forward(self, edges: Tensor, x: Tensor) -> Any:
        return CALLS[type(self.pool)](self.pool, self.before(x), edges)


GRAPH_OF = torch.arange(NODES) // (NODES // 2)
CALLS = {
    pyg.ASAPooling: lambda pool, x, edges: pool(x, edges, WEIGHTS),
    pyg.GraphUNet: lambda pool, x, edges: pool(x, edges),
    # of more than 25 nodes torch finds the distances by a product of matrices
    pyg.MemPooling: lambda pool, x, edges: pool(x[:20], GRAPH_OF[10:30]),
    pyg.pool.ClusterPooling: lambda pool, x, edges: pool(x, edges, GRAPH_OF),
}
POOLS = {
    "ASAPooling": lambda: pyg.ASAPooling(16, 0.5),
    "GraphUNet": lambda: pyg.GraphUNet(16, 8, 4, 1, pool_ratios=1.0),
    "MemPooling": lambda: pyg.MemPooling(16, 6, 2, 3),
    "ClusterPooling": lambda: pyg.pool.ClusterPooling(16),
}
POOLED = [(name, level) for name in POOLS for level in (*LEVELS, "O3")]
POOLED_ORDINARY = {
    ("ASAPooling", "O1"),
    ("ASAPooling", "O2"),
    ("GraphUNet", "O5"),
    ("MemPooling", "O2"),
    ("ClusterPooling", "O2"),
}


@pytest.mark.parametrize("case", support.nightly_but(POOLED_ORDINARY, POOLED), ids=" ".join)
def test_pooling_without_half_kernels_is_that_of_float32(
    amp: ModuleType, case: tuple[str, str]
) -> None:
    torch.manual_seed(1)  # by 0, two scores are so near that bfloat16 swaps the nodes
    model = Coarsened(POOLS[case[0]]())
    graph_training.check_step(amp, model, (EDGE_INDEX, torch.randn(NODES, 16)), case[1])


# --- functions, on drawn indices and dtypes ---

DTYPES = st.sampled_from([F16, BF16, F32])
GROUPS = st.lists(st.integers(0, 4), max_size=8)
REDUCTIONS = ("sum", "mean", "max", "min", "mul")


def in_parts(name: str, values: Tensor, index: Tensor, size: int) -> Tensor:
    """The reference: one group after another, in float64; what is empty is 0, or 1 for products."""
    parts = [values[index == group] for group in range(size)]
    if name == "softmax":
        return torch.cat([part.softmax(0) for part in parts])
    reduce = {"mul": "prod", "max": "amax", "min": "amin"}.get(name, name)
    empty = torch.full_like(values.new_zeros(values.shape[1]), float(name == "mul"))
    return torch.stack([getattr(part, reduce)(0) if len(part) else empty for part in parts])


@pytest.mark.parametrize("level", support.nightly_but(["O1", "O5"], LEVELS))
def test_groups_of_any_size_and_dtype_are_reduced_as_in_float64(
    amp: ModuleType, level: str
) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)

    @given(GROUPS, DTYPES, st.sampled_from([*REDUCTIONS, "softmax"]), st.booleans())
    def check(groups: list[int], dtype: torch.dtype, name: str, sliced: bool) -> None:
        torch.manual_seed(0)
        index = torch.tensor(sorted(groups), dtype=torch.long)
        values = torch.randn(len(groups), 3).to(dtype)
        ends = torch.searchsorted(index, torch.arange(6))
        if name == "softmax":
            found = utils.softmax(values, index, ends if sliced else None, num_nodes=5)
        elif sliced and name != "mul":
            found = utils.segment(values, ends, reduce=name)
        else:
            found = utils.scatter(values, index, dim_size=5, reduce=name)
        half = name == "softmax" and level in ("O1", "O4")
        assert found.dtype is (HALF_OF[level] if half else dtype)
        eps = 4 * torch.finfo(found.dtype).eps
        assert found.double().allclose(
            in_parts(name, values.double(), index, 5), atol=eps, rtol=eps
        )

    check()


@pytest.mark.parametrize("wrong", [{"dim_sise": 5}, {"index": torch.zeros(4, dtype=torch.long)}])
def test_an_argument_that_scatter_does_not_take_is_refused(
    amp: ModuleType, wrong: dict[str, Any]
) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    with pytest.raises(TypeError, match="scatter"):
        utils.scatter(torch.ones(4, dtype=F16), torch.zeros(4, dtype=torch.long), **wrong)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_group_of_many_is_not_cut_off(amp: ModuleType, reduce: str, dtype: torch.dtype) -> None:
    """One by one a sum of ones ends at 2048 in float16, at 256 in bfloat16."""
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    ones = torch.ones(4096, 1, dtype=dtype)
    for found in (
        utils.segment(ones, torch.tensor([0, 4096]), reduce=reduce),
        utils.scatter(ones, torch.zeros(4096, dtype=torch.long), reduce=reduce),
    ):
        assert found.item() == (4096 if reduce == "sum" else 1)
        assert found.dtype is dtype


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_messages_take_no_more_memory_than_under_autocast(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str, aggr: str
) -> None:
    """Which adds them up in half."""
    monkeypatch.setattr(half_sums, "_LEAST", 1)

    def peak(is_ours: bool) -> int:
        torch.manual_seed(0)
        model = pyg.GraphSAGE(64, 64, num_layers=2, aggr=aggr, project=True)
        x, edges = torch.randn(100, 64), torch.randint(100, (2, 8000))
        if is_ours:
            model = amp.initialize(model, opt_level=level, verbosity=0)
        casts = contextlib.nullcontext() if is_ours else torch.autocast("cpu", HALF_OF[level])
        with LivingTensors() as living:
            before = living.peak
            with casts:
                loss = model(x, edges).float().square().mean()
            torch.autograd.grad(loss, list(model.parameters()))
        return living.peak - before

    theirs = peak(is_ours=False)
    assert peak(is_ours=True) <= 1.1 * theirs  # a sixteenth of them is in float32


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F16), (BF16, F32), (BF16, BF16)])
def test_a_sparse_matrix_of_one_dtype_meets_features_of_another(
    amp: ModuleType, dtypes: tuple[torch.dtype, ...], reduce: str
) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    x = torch.randn(NODES, 3, dtype=dtypes[1])
    matrix = csr().to(dtypes[0])
    found = utils.spmm(matrix, x, reduce)
    dense = matrix.to_dense().double()
    messages = torch.where(dense != 0, dense, torch.nan)[:, :, None] * x.double()
    expected = {
        "sum": messages.nansum(1),
        "mean": messages.nanmean(1).nan_to_num(),
        "max": messages.nan_to_num(nan=-torch.inf).amax(1),
    }[reduce]
    expected = torch.where(expected.isinf(), 0.0, expected)
    assert found.dtype is torch.promote_types(*dtypes)
    eps = 8 * torch.finfo(found.dtype).eps
    assert found.double().allclose(expected, atol=eps, rtol=eps)


class ByMatrix(nn.Module):
    """Multiplies by a float32 matrix that is no input of the model, as Kipf's networks do."""

    def __init__(self, matrix: Any) -> None:
        super().__init__()
        self.before, self.after, self.matrix = nn.Linear(16, 16), nn.Linear(16, 4), matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.spmm(self.matrix(), self.before(x)))


@pytest.mark.parametrize("level", support.nightly_but(["O2", "O5"], [*LEVELS, "O3"]))
@pytest.mark.parametrize("is_in_rows", [False, True])
def test_spmm_multiplies_half_features(amp: ModuleType, level: str, is_in_rows: bool) -> None:
    torch.manual_seed(0)
    model = ByMatrix(csr if is_in_rows else coo)
    graph_training.check_step(amp, model, (torch.randn(NODES, 16),), level)


# --- objects ---


class OfData(nn.Module):
    """Takes all of a graph from one object."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(16, 4)

    def forward(self, data: Any) -> Tensor:
        assert data.x.dtype is self.conv.lin.weight.dtype
        return pyg.global_mean_pool(
            self.conv(data.x, data.edge_index, data.edge_weight), data.batch
        )


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_batch_of_graphs_trains(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    graph = torch_geometric.data.Data(
        x=torch.randn(NODES, 16), edge_index=EDGE_INDEX, edge_weight=WEIGHTS
    )
    batch = torch_geometric.data.Batch.from_data_list([graph, graph.clone()])
    model = OfData()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0
    )
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), torch.tensor([0, 1]))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] + 0.01
    assert batch.x.dtype is batch.edge_weight.dtype is F32


@pytest.mark.slow(instead="the library imported before; one written for the test, in each order")
def test_import_after_initialize_and_nothing_left() -> None:
    """In a process of its own, for PyTorch Geometric is imported here."""
    code = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from amp_patch import amp
model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O5", verbosity=0)
from torch_geometric.utils import scatter
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation
ones, index = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.long)
assert scatter(ones, index).item() == 4096
assert "__call__" in vars(MessagePassing)
amp.deactivate()
assert "__call__" not in vars(MessagePassing)
assert "amp_patch" not in Aggregation.__call__.__code__.co_filename
for name, module in list(sys.modules.items()):
    if name.startswith("torch_geometric"):
        for key, value in vars(module).items():
            assert "amp_patch" not in str(getattr(value, "__code__", "")), (name, key)
"""
    run = processes.run([sys.executable, "-c", code])
    assert run.returncode == 0, run.stderr
