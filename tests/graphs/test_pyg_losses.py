"""Methods of PyTorch Geometric's models that scripts call for a loss, which are no model's call."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import support
import torch
from graph_libraries import torch_geometric
from graph_training import LEVELS
from torch import Tensor, nn

pyg = torch_geometric.nn
NODES, WIDTH = 40, 16
_generator = torch.Generator().manual_seed(0)
EDGES = torch.randint(NODES, (2, 160), generator=_generator)
OTHERS = torch.randint(NODES, (2, 160), generator=_generator)
X = torch.randn(NODES, WIDTH, generator=_generator)
PATHS = {
    ("a", "to", "b"): EDGES,
    ("b", "to", "a"): EDGES.flip(0),
}


class Encoder(nn.Module):
    """A convolution; its results are large, so that probabilities are nearly 0 and 1."""

    def __init__(self, results: int = 1) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.GCNConv(WIDTH, 8) for _ in range(results))

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        found = [4.0 / len(self.convs) * conv(x, edges) for conv in self.convs]
        return found if len(found) > 1 else found[0]


class Case(NamedTuple):
    """A model, and what its script computes of it."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]


def variational_loss(model: Any) -> Tensor:
    weight = model.encoder.convs[0].lin.weight
    z = model.encode(X.to(weight.dtype), EDGES)  # which is no model's call either
    return model.recon_loss(z, EDGES, OTHERS) + model.kl_loss() / NODES


def adversarial_loss(model: Any) -> Tensor:
    z = model(X, EDGES)
    reconstruction = model.recon_loss(z, EDGES, OTHERS)
    torch.manual_seed(1)
    return reconstruction + model.reg_loss(z) + model.discriminator_loss(z)


def infomax() -> nn.Module:
    model = pyg.DeepGraphInfomax(
        8, Encoder(), lambda z, *_: z.mean(0).sigmoid(), lambda x, edges: (x.flip(0), edges)
    )
    model.weight.data.mul_(30.0)  # as of a model that has been trained for a while
    return model


def walks() -> nn.Module:
    model = pyg.MetaPath2Vec(PATHS, 64, list(PATHS), 2, 2)
    model.embedding.weight.data[-1] = 0.0  # that of no node
    return model


def walks_loss(model: Any) -> Tensor:
    near, far = EDGES.t() + torch.tensor([0, NODES]), OTHERS.t() + torch.tensor([0, NODES])
    return model.loss(near, far)


CASES = {
    "VGAE": Case(lambda: pyg.VGAE(Encoder(2)), variational_loss),
    "ARGA": Case(lambda: pyg.ARGA(Encoder(), nn.Linear(8, 1)), adversarial_loss),
    "DeepGraphInfomax": Case(infomax, lambda model: model.loss(*model(X, EDGES))),
    "MetaPath2Vec": Case(walks, walks_loss),
    "SignedGCN": Case(
        lambda: pyg.SignedGCN(WIDTH, 8, 2),
        lambda model: model.loss(model(X, EDGES, OTHERS), EDGES, OTHERS),
    ),
    "LightGCN": Case(
        lambda: pyg.LightGCN(NODES, 8, 2),
        lambda model: model.recommendation_loss(
            *model(EDGES, torch.cat([EDGES, OTHERS], 1)).chunk(2), lambda_reg=1e-2
        ),
    ),
}
ORDINARY = {
    ("VGAE", "O5"),
    ("ARGA", "O2"),
    ("DeepGraphInfomax", "O1"),
    ("DeepGraphInfomax", "O2"),
    ("MetaPath2Vec", "O2"),
    ("MetaPath2Vec", "O5"),
    ("SignedGCN", "O2"),
}
EVERY = [(name, level) for name in CASES for level in (*LEVELS, "O3")]


@pytest.mark.parametrize("case", support.nightly_but(ORDINARY, EVERY), ids=" ".join)
def test_a_loss_by_a_method_is_that_of_float32(amp: ModuleType, case: tuple[str, str]) -> None:
    """Of probabilities that half precision rounds to 1, the logarithm of 1 - p + 1e-15 is off."""
    name, level = case

    def found(level: str | None) -> tuple[float, list[Tensor]]:
        torch.manual_seed(0)
        model = CASES[name].make()
        if level is not None:
            model = amp.initialize(model, opt_level=level, verbosity=0)
        torch.manual_seed(1)
        random.seed(1)  # by which PyTorch Geometric draws edges
        loss = CASES[name].loss(model)
        assert loss.dtype is torch.float32
        loss.backward()
        return loss.item(), [one.grad for one in model.parameters() if one.grad is not None]

    expected, theirs = found(None)
    loss, ours = found(level)
    near = 0.01 if level in ("O1", "O2", "O3") else 0.05
    assert loss == pytest.approx(expected, rel=near)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 8 * near * other.norm() + 1e-4


def test_the_loss_of_a_float32_model_is_left_alone(amp: ModuleType) -> None:
    torch.manual_seed(0)
    model = walks()
    expected = walks_loss(model)
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert torch.equal(walks_loss(model), expected)
