"""A parametrized layer trains at every level as in fp32, for its weight is computed there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from amp_patch.casting.mode import mode

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALVES = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()


class Rotation(nn.Module):
    """The exponential of a matrix is a rotation."""

    def forward(self, weight: Tensor) -> Tensor:
        upper = weight.triu(1)
        return torch.matrix_exp(upper - upper.T)


class Inverse(nn.Module):
    """Small numbers meet 1, and then comes what torch has no half kernel for."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.linalg.inv(weight @ weight.T + torch.eye(8, dtype=weight.dtype))


class Solution(nn.Module):
    """It has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.eye(8) / 2)

    def forward(self, weight: Tensor) -> Tensor:
        left = self.own @ self.own.T + torch.eye(8, dtype=weight.dtype)
        return torch.linalg.solve(left, F.normalize(weight)) @ self.own


def by(parametrization: type[nn.Module]) -> Callable[[nn.Module], nn.Module]:
    return lambda layer: parametrize.register_parametrization(layer, "weight", parametrization())


def orthogonal(way: str) -> Callable[[nn.Module], nn.Module]:
    return lambda layer: parametrizations.orthogonal(layer, orthogonal_map=way)


def several(layer: nn.Module) -> nn.Module:
    """One parametrization on another, and the bias as well."""
    parametrizations.spectral_norm(by(Rotation)(layer))
    return parametrize.register_parametrization(layer, "bias", nn.Tanh())


def of_old(make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """By a hook of the layer, which torch warns of."""

    def made(layer: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return make(layer)

    return made


KINDS = {
    "matrix_exp": orthogonal("matrix_exp"),
    "cayley": orthogonal("cayley"),
    "householder": orthogonal("householder"),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "rotation": by(Rotation),
    "inverse": by(Inverse),
    "solution": by(Solution),
    "several": several,
    "old weight_norm": of_old(nn.utils.weight_norm),
    "old spectral_norm": of_old(nn.utils.spectral_norm),
}


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(KINDS[kind](nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 2))


def trained_plainly(model: nn.Module, steps: int = 10) -> list[float]:
    """Return the losses of a loop without amp_patch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(amp: ModuleType, model: nn.Module, level: str, steps: int = 10) -> list[float]:
    """Return the losses at a level; the model stays prepared."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X).float(), Y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_near(got: list[float], expected: list[float], level: str) -> None:
    # O3 has no masters: small updates of half weights are lost.
    tolerance = {"O0": 0.0, "O1": 2e-3, "O2": 1e-3, "O3": 1e-2}.get(level, 5e-3)
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_in_fp32(amp: ModuleType, level: str, kind: str) -> None:
    expected = trained_plainly(net(kind))
    assert expected[-1] < expected[0] - 0.005
    assert_near(trained(amp, net(kind), level), expected, level)


@pytest.mark.parametrize("level", HALVES)
def test_the_weight_is_rounded_once(amp: ModuleType, level: str) -> None:
    """Orthogonal numbers, rounded; those of rounded ones are further off than that."""
    torch.manual_seed(0)
    layer = parametrizations.orthogonal(nn.Linear(64, 64))
    trained_layer = nn.Sequential(nn.Linear(8, 64), layer)
    expected = layer.weight.detach()
    amp.initialize(trained_layer, opt_level=level, verbosity=0)
    assert layer.weight.dtype is layer.bias.dtype is HALVES[level]
    assert torch.equal(layer.weight, expected.to(HALVES[level]))
    assert {p.dtype for p in layer.parametrizations.parameters()} == {torch.float32}
    amp.deactivate()
    assert torch.equal(layer.weight, expected)
    assert trained_layer(X).dtype is torch.float32


@pytest.mark.parametrize("level", HALVES)
def test_a_copy_and_a_checkpoint_compute_the_same(amp: ModuleType, level: str) -> None:
    model = net("solution")
    trained(amp, model, level, steps=3)
    in_fp32 = copy.deepcopy(model)
    assert {param.dtype for param in in_fp32.parameters()} == {torch.float32}
    rounded = {"O2": 1e-3, "O3": 1e-3, "O5": 1e-2}[level]
    torch.testing.assert_close(in_fp32(X), model(X), rtol=10 * rounded, atol=rounded)
    state = model.state_dict()
    other = net("solution")
    amp.initialize(other, opt_level=level, verbosity=0)
    other.load_state_dict(state)
    assert torch.equal(other(X), model(X))
    assert mode.models == ()


@pytest.mark.parametrize("level", HALVES)
def test_a_batch_norm_gets_its_weight_as_it_is_stored(amp: ModuleType, level: str) -> None:
    norm = nn.BatchNorm1d(8)
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    model = nn.Sequential(norm, nn.Linear(8, 2))
    amp.initialize(model, opt_level=level, verbosity=0)
    assert norm.weight.dtype is norm.bias.dtype
    assert model(X).isfinite().all()


@pytest.mark.parametrize("level", HALVES)
def test_a_layer_behind_one_in_float_casts_its_inputs(amp: ModuleType, level: str) -> None:
    """Also where it has no weight of its own, but a computed one."""
    behind = parametrizations.orthogonal(nn.Linear(8, 8, bias=False))
    model = nn.Sequential(nn.Linear(8, 8), behind)
    amp.initialize(model, opt_level=level, rules={"modules": {"0": "float"}}, verbosity=0)
    assert model(X).isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_it_is_compiled_in_one_graph(amp: ModuleType, level: str, recomputes: bool) -> None:
    model = net("cayley")
    amp.initialize(model, opt_level=level, verbosity=0)
    expected = model(X)

    def run(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False) if recomputes else model(x)

    # older ones trace no checkpoint of what writes to the thread's mode
    in_one = not recomputes or torch.__version__ >= (2, 13)
    torch._dynamo.reset()  # else `run` of each case counts as compiled once more
    compiled = torch.compile(run, backend="eager", fullgraph=in_one)
    assert torch.equal(compiled(X), expected)


EXPONENTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda x: torch.matrix_exp(x),
    "torch.linalg": lambda x: torch.linalg.matrix_exp(x),
    "Tensor": lambda x: x.matrix_exp(),
}


class Flow(nn.Module):
    def __init__(self, exponential: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.exponential = exponential

    def forward(self, x: Tensor) -> Tensor:
        return self.exponential(self.layer(x).unflatten(1, (4, 4)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("found", EXPONENTIALS)
def test_the_exponential_of_a_matrix_is_finite(amp: ModuleType, level: str, found: str) -> None:
    """In torch's kernel for half numbers it is not, and no error says so."""
    torch.manual_seed(0)
    model = Flow(EXPONENTIALS[found])
    expected = model(X)
    expected.square().mean().backward()
    grad, model.layer.weight.grad = model.layer.weight.grad, None
    amp.initialize(model, opt_level=level, verbosity=0)
    out = model(X).float()
    out.square().mean().backward()
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(model.layer.weight.grad.float(), grad, rtol=0.05, atol=0.05)
