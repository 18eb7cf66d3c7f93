"""Train a graph attention network at a level, with DGL or PyTorch Geometric; tell what it took.

Three layers classify the nodes of Zachary's karate club, or of a drawn graph of the shape of
Reddit's (232,965 nodes, 602 features, 41 classes, 114 million edges), made smaller by a factor:

    python examples/gat.py --opt-level O2 --library dgl
    python examples/gat.py --opt-level O2 --graph reddit --scale 0.002 --epochs 3

The memory is the most that CUDA's allocator handed out, or on a CPU the most bytes of tensors that
lived at once, from the first training step on.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import networkx
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from amp_patch import amp
from amp_patch.tools.sweep.memory import LivingTensors

HIDDEN = 256
REDDIT = {"nodes": 232_965, "edges": 114_615_892, "features": 602, "classes": 41}


@dataclass(frozen=True)
class Graph:
    """A graph whose nodes have classes, each node with an edge to itself.

    Attributes:
        edges: sources and targets, (2, E).
        features: of the nodes, (N, F), float32.
        classes: of the nodes, (N,).
        train_mask: which nodes' classes are trained on, (N,).
    """

    edges: Tensor
    features: Tensor
    classes: Tensor
    train_mask: Tensor


@dataclass(frozen=True)
class Result:
    """What a training run ends with; the losses are those of the training nodes."""

    model: nn.Module
    optimizer: Optimizer
    first_loss: float
    final_loss: float
    accuracy: float
    """Share of the other nodes whose class is found, in percent."""
    peak_bytes: int


def with_self_loops(edges: Tensor, nodes: int) -> Tensor:
    """Return the edges, less those from a node to itself, and one of these for each node."""
    loops = torch.arange(nodes).expand(2, -1)
    return torch.cat([edges[:, edges[0] != edges[1]], loops], dim=1)


def karate_club() -> Graph:
    """Return Zachary's karate club, 34 members and the two clubs that it split into."""
    club = networkx.karate_club_graph()
    ends = torch.tensor(list(club.edges)).T
    classes = torch.tensor([int(club.nodes[node]["club"] == "Officer") for node in club.nodes])
    return Graph(
        edges=with_self_loops(torch.cat([ends, ends.flip(0)], dim=1), len(classes)),
        features=torch.eye(len(classes)),
        classes=classes,
        train_mask=torch.arange(len(classes)) % 3 == 0,
    )


def reddit_like(scale: float) -> Graph:
    """Draw a graph with that share of Reddit's nodes and edges: most edges stay in a class."""
    nodes, edges = max(int(REDDIT["nodes"] * scale), 82), int(REDDIT["edges"] * scale)
    classes = torch.arange(nodes) % REDDIT["classes"]
    centers = torch.randn(REDDIT["classes"], REDDIT["features"])
    sources, hops = torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))
    inside = (sources + hops * REDDIT["classes"]) % nodes
    targets = torch.where(torch.rand(edges) < 0.8, inside, hops)
    return Graph(
        edges=with_self_loops(torch.stack([sources, targets]), nodes),
        features=centers[classes] + torch.randn(nodes, REDDIT["features"]),
        classes=classes,
        train_mask=torch.rand(nodes) < 0.66,
    )


class DGLNet(nn.Module):
    """Layers of DGL: features (N, F) to (N, classes)."""

    def __init__(self, widths: Sequence[int], heads: Sequence[int]) -> None:
        import dgl.nn

        super().__init__()
        inputs = [widths[0], *(w * h for w, h in zip(widths[1:-1], heads[:-1], strict=True))]
        self.layers = nn.ModuleList(
            dgl.nn.GATConv(*shape) for shape in zip(inputs, widths[1:], heads, strict=True)
        )

    def forward(self, graph: object, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.elu(layer(graph, x)).flatten(1)
        return self.layers[-1](graph, x).mean(1)


class PyGNet(nn.Module):
    """The same of PyTorch Geometric."""

    def __init__(self, widths: Sequence[int], heads: Sequence[int]) -> None:
        from torch_geometric.nn import GATConv

        super().__init__()
        inputs = [widths[0], *(w * h for w, h in zip(widths[1:-1], heads[:-1], strict=True))]
        self.layers = nn.ModuleList(
            GATConv(*shape, add_self_loops=False)
            for shape in zip(inputs[:-1], widths[1:-1], heads[:-1], strict=True)
        )
        last = GATConv(inputs[-1], widths[-1], heads[-1], concat=False, add_self_loops=False)
        self.layers.append(last)

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.elu(layer(x, edges))
        return self.layers[-1](x, edges)


def train(
    opt_level: str,
    *,
    graph: Graph | None = None,
    library: str = "dgl",
    heads: Sequence[int] = (1, 1, 1),
    epochs: int = 100,
    seed: int = 0,
    device: str | None = None,
) -> Result:
    """Train from scratch at ``opt_level`` on all nodes at once, on the karate club by default."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    graph = graph or karate_club()
    x, classes, mask = (one.to(device) for one in (graph.features, graph.classes, graph.train_mask))
    widths = (x.shape[1], HIDDEN, HIDDEN, int(classes.max()) + 1)
    structure: object = graph.edges.to(device)
    if library == "dgl":
        import dgl

        structure = dgl.graph(tuple(structure), num_nodes=len(x))
    model = (DGLNet if library == "dgl" else PyGNet)(widths, heads).to(device)
    optimizer = Adam(model.parameters(), lr=1e-3, weight_decay=5e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    def loss_of_training_nodes() -> Tensor:
        return F.cross_entropy(model(structure, x)[mask], classes[mask])

    with torch.no_grad():
        first_loss = loss_of_training_nodes().item()
    counted = LivingTensors() if device == "cpu" else contextlib.nullcontext()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    with counted:
        for _ in range(epochs):
            optimizer.zero_grad()
            loss = loss_of_training_nodes()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    peak = counted.peak if device == "cpu" else torch.cuda.max_memory_allocated()
    with torch.no_grad():
        final_loss = loss_of_training_nodes().item()
        found = model(structure, x).argmax(1)
    accuracy = 100 * (found == classes)[~mask].float().mean().item()
    return Result(model, optimizer, first_loss, final_loss, accuracy, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O2", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--library", choices=["dgl", "pyg"], default="dgl")
    parser.add_argument("--graph", choices=["karate", "reddit"], default="karate")
    parser.add_argument(
        "--scale", type=float, default=0.001, help="share of Reddit's nodes and edges"
    )
    parser.add_argument("--heads", type=int, nargs=3, default=[1, 1, 1])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda when there is one, else cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    graph = karate_club() if args.graph == "karate" else reddit_like(args.scale)
    result = train(
        args.opt_level,
        graph=graph,
        library=args.library,
        heads=args.heads,
        epochs=args.epochs,
        seed=args.seed,
        device=args.device,
    )
    print(f"{args.opt_level}: loss {result.first_loss:.4f} -> {result.final_loss:.4f}", end=", ")
    print(f"accuracy {result.accuracy:.1f} %, peak memory {result.peak_bytes / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
