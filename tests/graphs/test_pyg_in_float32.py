"""Layers of PyTorch Geometric that half numbers would break: they compute in float32."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import graph_training
import pytest
import support
import torch
from graph_libraries import torch_geometric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn.attention.polynormer import PolynormerAttention
from torch_geometric.nn.attention.sgformer import SGFormerAttention
from torch_geometric.nn.models import tgn, visnet
from torch_geometric.nn.unpool import knn_interpolate as interpolate

pyg, utils = torch_geometric.nn, torch_geometric.utils
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = support.nightly_but(["O1", "O2"], graph_training.LEVELS)
WIDTH = 32


class After(nn.Module):
    """What a function or layer makes of half features."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.before, self.then = nn.Linear(WIDTH, WIDTH), then

    def forward(self, *inputs: Tensor) -> Any:
        *others, x = inputs
        return self.then(self.before(x), *others)


class First(nn.Module):
    """A layer that gets the features as they come."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, edges: Tensor, x: Tensor) -> Any:
        return self.layer(x, edges)


class FeaturesFirst(First):
    """The order in which explainers pass what a model takes."""

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        return self.layer(x, edges)


def check(amp: ModuleType, then: Any, level: str, *inputs: Tensor) -> None:
    torch.manual_seed(0)
    graph_training.check_step(amp, After(then), inputs, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("norm", [pyg.LayerNorm, pyg.InstanceNorm])
def test_a_graph_of_many_nodes_is_normalized(
    amp: ModuleType, norm: type[nn.Module], level: str
) -> None:
    """They divide by 3000 nodes times 32 features, and a sum of 3000 times 30: more than 65504."""
    graphs = (torch.arange(3100) >= 3000).long()
    x = torch.randn(3100, WIDTH, generator=torch.Generator().manual_seed(0))
    model = After(norm(WIDTH))
    model.before.weight.data = torch.eye(WIDTH)
    model.before.bias.data.fill_(30.0)
    graph_training.check_step(amp, model, (graphs, x), level)


def diff_pool(x: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
    pooled, *_, link, entropy = pyg.dense_diff_pool(x, adjacency, x[..., :4], mask)
    return torch.as_tensor(pooled + link + entropy)


def mincut_pool(x: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
    pooled, between, _, _ = pyg.dense_mincut_pool(x, adjacency, x[..., :4], mask)
    return torch.as_tensor(pooled + between.sum())


class DMoN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = pyg.DMoNPooling(WIDTH, 4)

    def forward(self, x: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        _, pooled, between, *_ = self.pool(x, adjacency, mask)
        return torch.as_tensor(pooled + between.sum())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pool", [diff_pool, mincut_pool, DMoN])
def test_padded_graphs_and_those_of_light_edges_are_pooled(
    amp: ModuleType, pool: Any, level: str
) -> None:
    """The logarithm, or the quotient, of 0 + 1e-15 is none in float16."""
    torch.manual_seed(0)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    adjacency = (torch.rand(2, 9, 9) < 0.3).float() * mask[:, None] * mask[:, :, None]
    if pool is not diff_pool:
        adjacency[0] *= 1e-6
    then = pool if pool is not DMoN else DMoN()
    check(amp, then, level, adjacency, mask, torch.randn(2, 9, WIDTH))


def sgformer() -> nn.Module:
    return SGFormerAttention(WIDTH, 1, 8)


def polynormer() -> nn.Module:
    return PolynormerAttention(WIDTH, 1, 8)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [sgformer, polynormer])
def test_all_nodes_of_a_large_graph_attend_to_all(
    amp: ModuleType, make: Callable[[], nn.Module], level: str
) -> None:
    """They divide by sums over all of them, and multiply by their number."""
    torch.manual_seed(0)
    model = FirstRow(make())
    graph_training.check_step(amp, model, (torch.randn(1, 70_000, WIDTH),), level)


class FirstRow(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(WIDTH, WIDTH), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.before(x))[0, :1]


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_a_cutoff_meet_half_layers(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    then = nn.Sequential(visnet.CosineCutoff(5.0), nn.Linear(WIDTH, 8))
    check(amp, then, level, torch.rand(20, WIDTH))


@pytest.mark.parametrize("level", LEVELS)
def test_a_kernel_that_is_nearly_a_point_has_gradients(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    edges, places = torch.randint(20, (2, 60)), torch.rand(60, 2)
    conv = pyg.GMMConv(WIDTH, 8, 2, 3)
    conv.sigma.data[0] = 1e-4  # its square is zero in float16
    check(amp, conv, level, edges, places, torch.randn(20, WIDTH))


@pytest.mark.parametrize("level", LEVELS)
def test_a_point_interpolates_one_at_its_own_place(
    amp: ModuleType, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which divides by a distance of 0 that is at least 1e-16."""
    found = torch.arange(10).repeat_interleave(2), torch.arange(20) % 7
    monkeypatch.setitem(interpolate.__globals__, "knn", lambda *_, **__: found)
    places = torch.rand(10, 3, generator=torch.Generator().manual_seed(0))

    def then(x: Tensor, places: Tensor) -> Any:
        return torch_geometric.nn.unpool.knn_interpolate(x[:7], places[:7], places)

    check(amp, then, level, places, torch.randn(10, WIDTH))


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_for_each_degree_writes_to_one_result(amp: ModuleType, level: str) -> None:
    """In the dtype that its sums of neighbours have: float32 where the features are."""
    torch.manual_seed(0)
    edges, conv = torch.randint(20, (2, 60)), pyg.MFConv(WIDTH, 8)
    graph_training.check_step(amp, First(conv), (edges, torch.randn(20, WIDTH)), level)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_memory_of_float32_is_written_to(amp: ModuleType, level: str) -> None:
    """At times that float16 does not hold, and bfloat16 not exactly."""
    torch.manual_seed(0)
    memory = tgn.TGNMemory(9, 4, 8, 6, tgn.IdentityMessage(4, 8, 6), tgn.LastAggregator())
    memory.train()
    plain = copy.deepcopy(memory)
    plain.reset_state()
    source, target, messages = torch.arange(4), torch.arange(4, 8), torch.randn(4, 4)
    memory = amp.initialize(memory, opt_level=level, verbosity=0)
    memory.reset_state()
    for each in (plain, memory):
        for time in (70_001, 140_003):
            each.update_state(source, target, torch.full((4,), time), messages)
    found, expected = memory(torch.arange(9))[0], plain(torch.arange(9))[0]
    assert torch.allclose(found.float(), expected, atol=1e-5)
    assert torch.allclose(memory.memory, plain.memory, atol=1e-5)


class Scaled(First):
    """Whose gradient is the same whichever of two equal rows a median is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, sets: Tensor, x: Tensor) -> Any:
        return self.layer(x * self.scale, sets)


AGGREGATIONS: dict[str, Callable[[], nn.Module]] = {
    "median": pyg.MedianAggregation,
    "quantile": lambda: pyg.QuantileAggregation([0.1, 0.999], "nearest"),
    "equilibrium": lambda: pyg.EquilibriumAggregation(WIDTH, 8, [16], 2),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_thousands_of_rows_are_aggregated(amp: ModuleType, name: str, level: str) -> None:
    """Numbers of rows above 2048 are no numbers of float16, nor are sums of so many gradients."""
    x = torch.randn(3000, WIDTH, generator=torch.Generator().manual_seed(0)) + 1
    sets = (torch.arange(3000) >= 2500).long()
    torch.manual_seed(0)
    graph_training.check_step(amp, Scaled(AGGREGATIONS[name]()), (sets, x), level)


class Sums(TorchDispatchMode):
    """Notes the dtypes in which values are added up by index."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::scatter"):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


INDEX = torch.arange(12) % 3
COUNTS: dict[str, Callable[[], Tensor]] = {
    "degree": lambda: utils.degree(INDEX, 3, dtype=BF16),
    "several": lambda: torch.cat(
        pyg.aggr.fused.FusedAggregation(["sum", "mean", "std"])(
            torch.ones(12, 2, dtype=BF16), INDEX
        )
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_nothing_is_counted_in_half(amp: ModuleType, name: str) -> None:
    """On a GPU a count in bfloat16 ends at 256."""
    amp.initialize(nn.Linear(2, 2), opt_level="O5", verbosity=0)
    with Sums() as sums:
        found = COUNTS[name]()
    assert found.dtype is BF16
    assert found[0].unique().item() == 4
    assert sums.dtypes == {F32}
    assert F.relu(found).dtype is BF16


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_is_explained_by_a_network_of_its_embeddings(amp: ModuleType, level: str) -> None:
    """The explainer's network is no part of the model, and trains in float32."""
    torch.manual_seed(0)
    edges, x, labels = torch.randint(20, (2, 60)), torch.randn(20, WIDTH), torch.arange(20) % 4

    def explained(model: nn.Module) -> Tensor:
        torch.manual_seed(1)
        algorithm = torch_geometric.explain.PGExplainer(epochs=4, lr=0.01)
        config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
        torch_geometric.explain.Explainer(
            model,
            algorithm,
            explanation_type="phenomenon",
            edge_mask_type="object",
            model_config=config,
        )
        return torch.tensor(
            [
                algorithm.train(epoch, model, x, edges, target=labels, index=epoch)
                for epoch in range(4)
            ]
        )

    model = FeaturesFirst(pyg.GCNConv(WIDTH, 4)).eval()
    expected = explained(model)
    amp.initialize(model, opt_level=level, verbosity=0)
    assert explained(model).allclose(expected, rtol=0.02)
