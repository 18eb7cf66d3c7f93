"""Distributions of torch draw, and compute densities, in float32, of half parameters as well."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as dist
from torch.nn.functional import softplus

HALF_OF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}

#: What a parameter is made of: real numbers of a layer, 64 x 6.
PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "real": lambda x: x,
    "positive": lambda x: softplus(x) + 0.1,
    "small": lambda x: x.sigmoid() / 8,
    "some": lambda x: softplus(x[..., 0]) + 0.5,
    "many": lambda x: softplus(x) + 5,
    "count": lambda x: softplus(x[..., 0]) + 8,
    "above": lambda x: x + softplus(x) + 0.1,
    "probabilities": lambda x: x.softmax(-1),
    "column": lambda x: x[..., None],
    "matrix": lambda x: torch.diag_embed(softplus(x) + 0.5),
}


def independent(loc: Tensor, scale: Tensor) -> dist.Distribution:
    return dist.Independent(dist.Normal(loc, scale), 1)


def mixture(logits: Tensor, loc: Tensor, scale: Tensor) -> dist.Distribution:
    return dist.MixtureSameFamily(dist.Categorical(logits=logits), dist.Normal(loc, scale))


def squashed(loc: Tensor, scale: Tensor) -> dist.Distribution:
    transforms = [dist.TanhTransform(cache_size=1)]
    return dist.TransformedDistribution(dist.Normal(loc, scale), transforms)


#: What makes a distribution that is not its class alone.
MAKERS = {
    "Binomial": functools.partial(dist.Binomial, 10),
    "Independent": independent,
    "LKJCholesky": functools.partial(dist.LKJCholesky, 3),
    "MixtureSameFamily": mixture,
    "Multinomial": functools.partial(dist.Multinomial, 7),
    "NegativeBinomial": functools.partial(dist.NegativeBinomial, 5.0),
    "RelaxedBernoulli": functools.partial(dist.RelaxedBernoulli, torch.tensor(0.7)),
    "RelaxedOneHotCategorical": functools.partial(dist.RelaxedOneHotCategorical, torch.tensor(0.7)),
    "TransformedDistribution": squashed,
}
_LOC = {"loc": "real", "scale": "positive"}
#: The arguments of each, and what they are made of.
GIVEN: dict[str, dict[str, str]] = {
    "Bernoulli": {"logits": "real"},
    "Beta": {"concentration1": "positive", "concentration0": "many"},
    "Binomial": {"logits": "real"},
    "Categorical": {"probs": "probabilities"},
    "Cauchy": _LOC,
    "Chi2": {"df": "positive"},
    "ContinuousBernoulli": {"logits": "real"},
    "Dirichlet": {"concentration": "positive"},
    "Exponential": {"rate": "positive"},
    "FisherSnedecor": {"df1": "many", "df2": "many"},
    "Gamma": {"concentration": "positive", "rate": "many"},
    "GeneralizedPareto": {**_LOC, "concentration": "small"},
    "Geometric": {"logits": "real"},
    "Gumbel": _LOC,
    "HalfCauchy": {"scale": "positive"},
    "HalfNormal": {"scale": "positive"},
    "Independent": _LOC,
    "InverseGamma": {"concentration": "many", "rate": "positive"},
    "Kumaraswamy": {"concentration1": "positive", "concentration0": "many"},
    "LKJCholesky": {"concentration": "some"},
    "Laplace": _LOC,
    "LogNormal": _LOC,
    "LogisticNormal": _LOC,
    "LowRankMultivariateNormal": {"loc": "real", "cov_factor": "column", "cov_diag": "positive"},
    "MixtureSameFamily": {"logits": "real", **_LOC},
    "Multinomial": {"logits": "real"},
    "MultivariateNormal": {"loc": "real", "scale_tril": "matrix"},
    "NegativeBinomial": {"logits": "real"},
    "Normal": _LOC,
    "OneHotCategorical": {"logits": "real"},
    "OneHotCategoricalStraightThrough": {"logits": "real"},
    "Pareto": {"scale": "positive", "alpha": "many"},
    "Poisson": {"rate": "positive"},
    "RelaxedBernoulli": {"logits": "real"},
    "RelaxedOneHotCategorical": {"logits": "real"},
    "StudentT": {"df": "many", **_LOC},
    "TransformedDistribution": _LOC,
    "Uniform": {"low": "real", "high": "above"},
    "VonMises": {"loc": "real", "concentration": "positive"},
    "Weibull": {"scale": "positive", "concentration": "many"},
    "Wishart": {"df": "count", "covariance_matrix": "matrix"},
}
OFFERED = sorted(GIVEN.keys() & vars(dist).keys())
#: Of which nobody draws.
BASES = {"Distribution", "ExponentialFamily"}
LEVELS = list(HALF_OF)


class Head(nn.Module):
    """Returns what is drawn of a distribution, and its log-probability."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.name = name

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return drawn(self.name, parameters(self.name, self.layer(x)))


def parameters(name: str, x: Tensor) -> dict[str, Tensor]:
    return {given: PARAMETERS[kind](x) for given, kind in GIVEN[name].items()}


def drawn(name: str, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    made = MAKERS.get(name, getattr(dist, name))(**given)
    value = made.rsample() if made.has_rsample else made.sample()
    return value, made.log_prob(value)


def test_every_distribution_of_torch_is_tried() -> None:
    offered = {
        name
        for name, kind in vars(dist).items()
        if inspect.isclass(kind) and issubclass(kind, dist.Distribution)
    }
    assert offered - BASES <= GIVEN.keys()


@pytest.mark.filterwarnings("ignore:Singular sample detected")  # of a Wishart, in float32 as well
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OFFERED)
def test_half_parameters_draw_and_judge_as_float32_ones_do(
    amp: ModuleType, name: str, level: str
) -> None:
    torch.manual_seed(0)
    given = {
        key: value.to(HALF_OF[level]) for key, value in parameters(name, torch.randn(64, 6)).items()
    }
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    found = drawn(name, given)
    expected = drawn(name, {key: value.float() for key, value in given.items()})
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(one.isfinite().all() for one in found)
    assert found[1].dtype is torch.float32


@pytest.mark.filterwarnings("ignore:Singular sample detected")  # of a Wishart, in float32 as well
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OFFERED)
def test_inside_of_a_model_nothing_drawn_or_derived_is_infinite(
    amp: ModuleType, name: str, level: str
) -> None:
    torch.manual_seed(0)
    model, inputs = Head(name), torch.randn(64, 6)
    amp.initialize(model, opt_level=level, verbosity=0)
    value, log_prob = model(inputs)
    assert value.isfinite().all()
    assert log_prob.isfinite().all()
    (value.sum() + log_prob.sum()).backward()
    assert model.layer.weight.grad.isfinite().all()


class Encoder(nn.Module):
    """Returns how far its distribution is from the standard one, as an autoencoder's loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.loc, self.scale = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = dist.Normal(self.loc(x), softplus(self.scale(x)))
        return dist.kl_divergence(found, dist.Normal(torch.zeros(3), torch.ones(3)))


@pytest.mark.parametrize("level", LEVELS)
def test_torch_compile_reads_how_a_distribution_takes_its_parameters(
    amp: ModuleType, level: str
) -> None:
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(8, 6)
    amp.initialize(model, opt_level=level, verbosity=0)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(x)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert found.dtype is torch.float32
