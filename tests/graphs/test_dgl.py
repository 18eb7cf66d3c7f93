"""Layers and functions of DGL at the levels, against float32; graphs and dtypes are drawn."""

import operator
import os
import sys
from types import FunctionType, ModuleType
from typing import Any

import graph_training
import processes
import pytest
import support
import torch
from graph_libraries import dgl
from graph_training import CLASSES, FEATURES, HALF_OF, LEVELS, NODES, Layer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

fn = dgl.function
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
EDGES = 160


def random_graph() -> dgl.DGLGraph:
    generator = torch.Generator().manual_seed(1)
    ends = torch.randint(NODES, (2, EDGES), generator=generator)
    return dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=NODES))


GRAPH = random_graph()
#: In float32, and no input of the model: at O2 and O5 they meet half features.
WEIGHTS = torch.rand(GRAPH.num_edges(), 1, generator=torch.Generator().manual_seed(2)) + 0.5
TYPES = torch.arange(GRAPH.num_edges()) % 3


class OwnFunctions(nn.Module):
    """Message and reduce functions of the user's own, with weights of edges."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, to), nn.Linear(to, to)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"], graph.edata["w"] = self.before(x), WEIGHTS
            graph.update_all(
                lambda edges: {"m": edges.src["h"] * edges.data["w"]},
                lambda nodes: {"h": nodes.mailbox["m"].mean(1)},
            )
            return self.after(graph.ndata["h"])


class OwnLayers(nn.Module):
    """Functions of the user's own that call layers, on features of which some are float32."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.before, self.score = nn.Linear(width, to), nn.Linear(2 * to + 1, 1)
        self.after = nn.Linear(2 * to, to)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"], graph.edata["w"] = self.before(x), WEIGHTS
            graph.ndata["own"] = torch.ones(NODES, self.after.out_features)
            graph.apply_edges(self.attend)
            graph.update_all(self.send, self.reduce, self.finish)
            return graph.ndata["h"]

    def attend(self, edges: Any) -> dict[str, Tensor]:
        both = torch.cat([edges.src["h"], edges.dst["h"], edges.data["w"]], dim=1)
        return {"a": self.score(both).sigmoid() * WEIGHTS}

    def send(self, edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["h"] * edges.data["a"]}

    def reduce(self, nodes: Any) -> dict[str, Tensor]:
        return {"sum": torch.cat([nodes.mailbox["m"].mean(1), nodes.data["own"]], dim=1)}

    def finish(self, nodes: Any) -> dict[str, Tensor]:
        return {"h": self.after(nodes.data["sum"])}


class Rows(nn.Module):
    """Writes some rows of a column that is float32, as networks on trees do."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.before, self.update, self.after = (
            nn.Linear(width, to),
            nn.Linear(to, to),
            nn.Linear(to, to),
        )

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = torch.zeros(NODES, self.after.in_features)
            graph.ndata["x"] = self.before(x)
            graph.pull(range(NODES), fn.copy_u("x", "m"), fn.mean("m", "h"))
            graph.prop_nodes(
                [torch.arange(4)],
                lambda edges: {"m": edges.src["h"]},
                lambda nodes: {"h": self.update(nodes.mailbox["m"].mean(1))},
            )
            return self.after(graph.ndata["h"])


class Readout(nn.Module):
    """Layers of other rooms than the convolutions, which meet float32 features as well."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.typed = conv.HeteroLinear({"n": width}, to)
        self.pool, self.after = conv.GlobalAttentionPooling(nn.Linear(to, 1)), nn.Linear(to, to)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        hidden = self.typed({"n": x.float()})["n"]
        return hidden + self.after(self.pool(graph, hidden.float()))


class BuiltIn(nn.Module):
    """Built-in functions in two stages: of the edges, then of the nodes."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, to), nn.Linear(to, to)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"], graph.edata["w"] = self.before(x), WEIGHTS
            graph.apply_edges(fn.u_dot_v("h", "h", "score"))
            graph.edata["a"] = dgl.ops.edge_softmax(graph, graph.edata["score"] * 0.1)
            graph.apply_edges(fn.u_mul_e("h", "a", "m"))
            graph.edata["m"] = graph.edata["m"] * graph.edata["w"]
            graph.update_all(fn.copy_e("m", "m"), fn.max("m", "h"))
            return self.after(graph.ndata["h"])


conv = dgl.nn


def plain(layer: Any, graph: Any, x: Tensor) -> Tensor:
    return layer(graph, x)


def weighted(layer: Any, graph: Any, x: Tensor) -> Tensor:
    return layer(graph, x, edge_weight=WEIGHTS)


LAYERS = {
    "GraphConv": Layer(conv.GraphConv, plain),
    "GraphConv, weights": Layer(conv.GraphConv, weighted),
    "GATConv": Layer(lambda i, o: conv.GATConv(i, o, 1, residual=True), plain),
    "GATv2Conv": Layer(lambda i, o: conv.GATv2Conv(i, o, 1), plain),
    "SAGEConv mean, weights": Layer(lambda i, o: conv.SAGEConv(i, o, "mean"), weighted),
    "SAGEConv gcn": Layer(lambda i, o: conv.SAGEConv(i, o, "gcn"), plain),
    "SAGEConv pool": Layer(lambda i, o: conv.SAGEConv(i, o, "pool"), plain),
    "SAGEConv lstm": Layer(lambda i, o: conv.SAGEConv(i, o, "lstm"), plain),
    "GINConv sum": Layer(lambda i, o: conv.GINConv(nn.Linear(i, o), "sum"), plain),
    "GINConv max, weights": Layer(lambda i, o: conv.GINConv(nn.Linear(i, o), "max"), weighted),
    "RelGraphConv basis": Layer(
        lambda i, o: conv.RelGraphConv(i, o, 3, "basis", 2), lambda a, g, x: a(g, x, TYPES)
    ),
    "RelGraphConv bdd, norm": Layer(
        lambda i, o: conv.RelGraphConv(i, o, 3, "bdd", 2),
        lambda a, g, x: a(g, x, TYPES, norm=WEIGHTS),
    ),
    "user-defined functions": Layer(OwnFunctions, plain),
    "user-defined functions with layers": Layer(OwnLayers, plain),
    "rows of a column": Layer(Rows, plain),
    "layers that are no convolutions": Layer(Readout, plain),
    "built-in functions": Layer(BuiltIn, plain),
}
ORDINARY = {
    ("GATConv", "O1"),
    ("GATConv", "O2"),
    ("GATConv", "O5"),
    ("GraphConv, weights", "O2"),
    ("RelGraphConv bdd, norm", "O4"),
    ("user-defined functions", "O2"),
    ("user-defined functions with layers", "O2"),
    ("rows of a column", "O1"),
    ("layers that are no convolutions", "O5"),
    ("built-in functions", "O1"),
    ("built-in functions", "O5"),
}
EVERY = [(name, level) for name in LAYERS for level in LEVELS]


@pytest.mark.parametrize("case", support.nightly_but(ORDINARY, EVERY), ids=" ".join)
def test_a_layer_trains_as_in_float32(amp: ModuleType, case: tuple[str, str]) -> None:
    name, level = case
    graph_training.check(amp, LAYERS[name], GRAPH, level)


POSITIONS = torch.randn(NODES, 3, generator=torch.Generator().manual_seed(3))
LONELY = dgl.add_self_loop(dgl.graph(([0, 1, 0], [1, 0, 2]), num_nodes=NODES))


class Equivariant(nn.Module):
    """Edges from a node to itself have length zero, by which their direction is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv.EGNNConv(FEATURES, 8, CLASSES)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        return torch.cat(self.conv(graph, x, POSITIONS), dim=1)


class Principal(nn.Module):
    """The deviation of equal messages is zero, and its root has no finite gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv.PNAConv(FEATURES, CLASSES, ["mean", "std", "moment3"], ["identity"], 2.5)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        return self.conv(graph, x)


class Directional(nn.Module):
    """A node whose only neighbour is itself divides by a distance of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv.DGNConv(FEATURES, CLASSES, ["dir1-av", "dir1-dx"], ["identity"], 2.5)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        return self.conv(graph, x, eig_vec=POSITIONS)


DIVIDE_BY_ZERO = (Equivariant, Principal, Directional)


@pytest.mark.parametrize("level", support.nightly_but(["O2"], [*LEVELS, "O3"]))
@pytest.mark.parametrize("layer", DIVIDE_BY_ZERO)
def test_constants_below_float16_still_keep_from_dividing_by_zero(
    amp: ModuleType, layer: type[nn.Module], level: str
) -> None:
    torch.manual_seed(0)
    graph_training.check_step(amp, layer(), (LONELY, torch.randn(NODES, FEATURES)), level)


def hetero_graph() -> dgl.DGLGraph:
    a, b = torch.arange(NODES), torch.arange(NODES).flip(0)
    return dgl.heterograph(
        {
            ("n", "next", "n"): (a, (a + 1) % NODES),
            ("n", "mirrors", "n"): (a, b),
            ("n", "in", "g"): (a, a % 3),
        }
    )


class Hetero(nn.Module):
    """Two relations of the nodes, added; a third one goes to other nodes and is not read."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        kinds = ("next", "mirrors", "in")
        self.convs = conv.HeteroGraphConv({kind: conv.GraphConv(width, to) for kind in kinds})
        self.own = nn.Linear(to, to)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        weights = {"next": {"edge_weight": torch.ones(NODES, 1)}}
        return self.own(self.convs(graph, {"n": x, "g": x[:3]}, mod_kwargs=weights)["n"])


class CrossType(nn.Module):
    """Functions on several types of edges at once, added up across them."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, to), nn.Linear(to, to)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.nodes["n"].data["h"] = self.before(x)
            message = fn.copy_u("h", "m")
            graph.multi_update_all(
                {kind: (message, fn.mean("m", "h")) for kind in ("next", "mirrors")}, "sum"
            )
            return self.after(graph.nodes["n"].data["h"])


@pytest.mark.parametrize("level", support.nightly_but(["O2"], LEVELS))
@pytest.mark.parametrize("module", support.nightly_but([Hetero], [Hetero, CrossType]))
def test_a_heterogeneous_graph_trains_as_in_float32(
    amp: ModuleType, module: type, level: str
) -> None:
    graph_training.check(amp, Layer(module, plain), hetero_graph(), level)


class Sampled(nn.Module):
    """Reads the features of the blocks, which are float32 in the graph that was sampled."""

    def __init__(self, layer: type) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(FEATURES, 8, "mean"), layer(8, CLASSES, "mean")])

    def forward(self, blocks: list[Any]) -> Tensor:
        assert blocks[0].srcdata["x"].dtype is self.layers[0].fc_neigh.weight.dtype
        hidden = self.layers[0](blocks[0], blocks[0].srcdata["x"], blocks[0].edata["w"]).relu()
        return self.layers[1](blocks[1], hidden)


@pytest.mark.parametrize("level", support.nightly_but(["O5"], LEVELS))
def test_sampled_blocks_train_as_in_float32(amp: ModuleType, level: str) -> None:
    graph = random_graph()
    graph.ndata["x"], graph.ndata["y"] = torch.randn(NODES, FEATURES), torch.arange(NODES) % 4
    graph.edata["w"] = WEIGHTS
    expected = sampled_losses(amp, graph, None)
    losses = sampled_losses(amp, graph, level)
    assert expected[-1] < 0.9 * expected[0]
    assert losses == pytest.approx(expected, abs=0.05 * expected[0])
    assert graph.ndata["x"].dtype is F32


def sampled_losses(amp: ModuleType, graph: dgl.DGLGraph, level: str | None) -> list[float]:
    """Train on the same samples at a level, or in float32 without amp."""
    torch.manual_seed(0)
    dgl.seed(0)
    model = Sampled(conv.SAGEConv)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    sampler = dgl.dataloading.NeighborSampler([3, 3])
    losses = []
    for _ in range(10):
        _, _, blocks = sampler.sample_blocks(graph, torch.arange(NODES))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(blocks).float(), blocks[-1].dstdata["y"])
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- functions, on drawn graphs and dtypes ---


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Nodes and the ends of the edges: none, isolated nodes, several edges between two, loops."""
    nodes = draw(st.integers(0, 5))
    ids = st.integers(0, max(nodes - 1, 0))
    edges = draw(st.integers(0, 8)) if nodes else 0
    ends = [draw(st.lists(ids, min_size=edges, max_size=edges)) for _ in range(2)]
    return nodes, *ends


DTYPES = st.sampled_from([F16, BF16, F32])
MESSAGES = {"mul": operator.mul, "add": operator.add, "sub": operator.sub, "div": operator.truediv}


def in_loops(
    message: Any, reduce: str, graph: tuple[int, list[int], list[int]], x: Tensor, w: Tensor
) -> Tensor:
    """The reference: messages one by one in float64, which isolated nodes do not get."""
    nodes, sources, targets = graph
    rows = []
    for node in range(nodes):
        got = [message(x[s], w[e]) for e, s in enumerate(sources) if targets[e] == node]
        if not got:
            rows.append(torch.zeros_like(x[0]))
            continue
        stacked = torch.stack(got)
        rows.append(stacked.amax(0) if reduce == "max" else getattr(stacked, reduce)(0))
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[1])


def has_ties(
    message: Any, graph: tuple[int, list[int], list[int]], x: Tensor, w: Tensor, eps: float
) -> bool:
    """Tell whether two messages to one node are so near that rounding may make them equal."""
    nodes, sources, targets = graph
    for node in range(nodes):
        got = [message(x[s], w[e]) for e, s in enumerate(sources) if targets[e] == node]
        if len(got) > 1:
            largest = torch.stack(got).topk(2, dim=0).values
            if (largest[0] - largest[1] <= eps * (1 + largest[0].abs())).any():
                return True
    return False


@pytest.mark.parametrize("level", support.nightly_but(["O1", "O2"], LEVELS))
def test_messages_of_any_graph_and_dtypes_are_those_of_loops(amp: ModuleType, level: str) -> None:
    """Outside of a model: at O1 and O4 functions cast to half; else mixed dtypes are promoted."""
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)

    @given(
        graphs(),
        st.sampled_from(list(MESSAGES)),
        st.sampled_from(["sum", "mean", "max"]),
        st.tuples(DTYPES, DTYPES),
    )
    def check(drawn: Any, message: str, reduce: str, dtypes: tuple[torch.dtype, ...]) -> None:
        graph = dgl.graph(
            (torch.tensor(drawn[1]).long(), torch.tensor(drawn[2]).long()), num_nodes=drawn[0]
        )
        torch.manual_seed(0)
        x, w = torch.randn(drawn[0], 3), torch.rand(len(drawn[1]), 1) + 0.5
        x, w = x.to(dtypes[0]).requires_grad_(), w.to(dtypes[1]).requires_grad_()
        graph.ndata["x"], graph.edata["w"] = x, w
        graph.update_all(
            getattr(fn, f"u_{message}_e")("x", "w", "m"), getattr(fn, reduce)("m", "h")
        )
        found = graph.ndata["h"]
        widest = torch.promote_types(*dtypes)
        assert found.dtype is (HALF_OF[level] if level in ("O1", "O4") else widest)

        exact = [value.detach().double().requires_grad_() for value in (x, w)]
        expected = in_loops(MESSAGES[message], reduce, drawn, *exact)
        eps = 8 * max(torch.finfo(one).eps for one in (found.dtype, F16))
        assert found.double().allclose(expected, atol=eps, rtol=eps)
        # Of messages that are equal, or round to the same, each library picks its own.
        if drawn[1] and (reduce != "max" or not has_ties(MESSAGES[message], drawn, *exact, eps)):
            found.float().sum().backward()
            expected.sum().backward()
            for ours, theirs in zip((x, w), exact, strict=True):
                assert ours.grad.dtype is ours.dtype
                scale = 1 + theirs.grad.abs().max()
                eps = 16 * torch.finfo(ours.dtype).eps + 8 * torch.finfo(found.dtype).eps
                assert (ours.grad.double() - theirs.grad).abs().max() < eps * scale

    check()


SOFTMAX_ROWS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@pytest.mark.parametrize("level", support.nightly_but(["O2"], LEVELS))
def test_softmax_and_segments_of_any_lengths_and_dtype(amp: ModuleType, level: str) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)

    @given(SOFTMAX_ROWS, DTYPES)
    def check(lengths: list[int], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        targets = torch.repeat_interleave(torch.tensor(lengths))
        values = torch.randn(len(targets), 2).to(dtype)
        graph = dgl.graph((targets, targets), num_nodes=len(lengths))
        found = {
            "edge_softmax": dgl.ops.edge_softmax(graph, values),
            "sum": dgl.ops.segment_reduce(torch.tensor(lengths), values, "sum"),
        }
        parts = values.double().split(lengths)
        expected = {
            "edge_softmax": torch.cat([part.softmax(0) for part in parts]),
            "sum": torch.stack([part.sum(0) for part in parts]),
        }
        for name, value in found.items():
            assert value.dtype is (HALF_OF[level] if level in ("O1", "O4") else dtype)
            eps = 8 * torch.finfo(value.dtype).eps
            assert value.double().allclose(expected[name], atol=eps, rtol=eps)

    check()


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_hub_of_many_neighbours_is_not_cut_off(amp: ModuleType, reduce: str) -> None:
    """One by one in float16 a sum of ones ends at 2048, and one of 40 times 2000 is infinite."""
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    count = 4096
    graph = dgl.graph((torch.arange(count), torch.zeros(count).long()), num_nodes=count)
    value = 1.0 if reduce == "sum" else 40.0
    operation = getattr(dgl.ops, f"copy_u_{reduce}")
    found = operation(graph, torch.full((count, 1), value, dtype=F16))
    assert found[0] == (count if reduce == "sum" else value)
    assert found.dtype is F16


@pytest.mark.parametrize("level", LEVELS)
def test_near_points_are_found_far_from_the_origin(amp: ModuleType, level: str) -> None:
    """Their distances are differences of products that half numbers hold to a tenth or so."""
    points = torch.arange(24.0).reshape(8, 3) + 64.0  # half numbers all of them
    expected = set(zip(*(ends.tolist() for ends in dgl.knn_graph(points, 3).edges()), strict=True))
    found = []

    class Near(nn.Module):
        def forward(self, points: Tensor) -> Tensor:
            found.append(dgl.nn.KNNGraph(3)(points))
            return points

    model = amp.initialize(nn.Sequential(Near(), nn.Linear(3, 3)), opt_level=level, verbosity=0)
    model(points)
    assert set(zip(*(ends.tolist() for ends in found[0].edges()), strict=True)) == expected


def patched_places(library: str) -> list[str]:
    """Return where a function of amp_patch stands in a library, in its modules and classes.

    Not in the modules that PyTorch Geometric writes while it runs, into a folder of their own, with
    all names that the caller's module has: those of a test's, classes of amp_patch among them.
    """
    folder = os.path.dirname(str(sys.modules[library].__file__))
    places = {
        f"{name}.{key}": value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == library
        if str(getattr(module, "__file__", None) or folder).startswith(folder)
        for key, value in vars(module).items()
    }
    methods = {
        f"{place}.{key}": method
        for place, kind in places.items()
        if isinstance(kind, type)
        for key, method in vars(kind).items()
    }
    return [
        place
        for place, value in {**places, **methods}.items()
        if isinstance(value, FunctionType) and "amp_patch/" in value.__code__.co_filename
    ]


@pytest.mark.parametrize("library", ["dgl", "torch_geometric"])
def test_a_library_is_left_as_it_was(amp: ModuleType, library: str) -> None:
    assert not patched_places(library)
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert len(patched_places(library)) > 50
    amp.deactivate()
    assert not patched_places(library)


@pytest.mark.slow(instead="the library imported before; one written for the test, in each order")
def test_import_after_initialize_and_nothing_left() -> None:
    """In a process of its own, for DGL is imported here."""
    code = """
import torch
from amp_patch import amp
model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O2", verbosity=0)
import dgl
from dgl.ops import copy_u_sum, gspmm, edge_softmax
graph = dgl.graph(([0, 1], [1, 0]))
half = copy_u_sum(graph, torch.ones(2, 1, dtype=torch.float16))
assert half.dtype is torch.float16
assert hasattr(gspmm, "__wrapped__")
amp.deactivate()
for name, module in list(__import__("sys").modules.items()):
    if name.startswith("dgl"):
        for key, value in vars(module).items():
            assert "amp_patch" not in str(getattr(value, "__code__", "")), (name, key)
            called = vars(value).get("__call__") if isinstance(value, type) else None
            assert "amp_patch" not in str(getattr(called, "__code__", "")), (name, key)
try:
    copy_u_sum(graph, torch.ones(2, 1, dtype=torch.float16))
except Exception as error:
    assert "float32/float64" in str(error)
else:
    raise AssertionError("DGL has a half kernel: its rules can go")
"""
    run = processes.run([sys.executable, "-c", code])
    assert run.returncode == 0, run.stderr
