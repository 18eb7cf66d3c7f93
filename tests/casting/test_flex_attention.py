"""``flex_attention`` gets queries, keys and values of one dtype, as under torch.autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torchs

Attention = Callable[..., Tensor]
LENGTH = 8


# torch's own: where nothing is compiled, and of what it traces
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let it have gradients on a CPU, which it refuses there for what it would compile."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None, raising=False)
    yield
    torch._dynamo.reset()


class Rotary(nn.Module):
    """Attention with a bias that learns, and angles that are float32, as queries and keys become.

    Args:
        attend: an attribute, so that a table's or a compiled one may stand there.
    """

    def __init__(self, attend: Attention) -> None:
        super().__init__()
        self.attend = attend
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(2))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).view(*x.shape[:2], 3, 2, 4).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        angles = torch.arange(LENGTH, dtype=torch.float32)[:, None].cos()

        def moved(score: Tensor, batch: Any, head: Any, one: Tensor, other: Tensor) -> Tensor:
            return score + self.bias[head] * (one - other).abs()

        found = self.attend(query * angles, key * angles, value=value, score_mod=moved)
        self.seen.append(found.dtype)
        return self.out(found.transpose(1, 2).flatten(2))


def made(attend: Attention) -> tuple[Rotary, Tensor]:
    torch.manual_seed(0)
    return Rotary(attend), torch.randn(2, LENGTH, 8)


def under_autocast(dtype: torch.dtype) -> list[Tensor]:
    model, x = made(torchs.flex_attention)
    with torch.autocast("cpu", dtype=dtype):
        loss = model(x).float().square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def compiled_before() -> Attention:
    return torch.compile(torchs.flex_attention, backend="eager")


@pytest.mark.skipif(
    not hasattr(sys.modules["torch._higher_order_ops.flex_attention"], "_autocast_cast"),
    reason="autocast of this torch leaves it alone",
)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("get", [lambda: torchs.flex_attention, compiled_before])
def test_it_computes_what_it_does_under_autocast(
    amp: ModuleType, level: str, get: Callable[[], Attention]
) -> None:
    half = torch.float16 if level in ("O1", "O2") else torch.bfloat16
    wanted = under_autocast(half)
    model, x = made(get())
    model = amp.initialize(model, opt_level=level, verbosity=0)
    loss = model(x).float().square().sum()
    got = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    assert model.seen == [half]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_compiled_model_may_call_a_compiled_one(amp: ModuleType, level: str) -> None:
    model, x = made(compiled_before())
    model = amp.initialize(model, opt_level=level, verbosity=0)
    found = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(found, model(x))
    assert {*model.seen} == {torch.float16 if level == "O1" else torch.bfloat16}


@pytest.mark.skipif(not hasattr(torchs, "AuxRequest"), reason="this torch asks otherwise")
def test_the_logarithm_of_sums_stays_float32(amp: ModuleType) -> None:
    x = torch.randn(1, 2, LENGTH, 4)
    model, _ = made(lambda *args, **kwargs: None)
    amp.initialize(model, opt_level="O1", verbosity=0)
    aux = torchs.AuxRequest(lse=True)
    found, sums = torchs.flex_attention(x, x, x, return_aux=aux)
    assert (found.dtype, sums.lse.dtype) == (torch.float16, torch.float32)


def test_a_rule_of_the_users_wins(amp: ModuleType) -> None:
    model, x = made(torchs.flex_attention)
    rules = {"flex_attention": "float"}
    model = amp.initialize(model, opt_level="O1", verbosity=0, rules=rules)
    model(x)
    assert model.seen == [torch.float32]


def test_it_is_torchs_own_again(amp: ModuleType) -> None:
    before = torchs.flex_attention
    model, _ = made(before)
    for level in ("O1", "O5"):
        amp.initialize(model, opt_level=level, verbosity=0)
        assert torchs.flex_attention is not before
        amp.deactivate()
        assert torchs.flex_attention is before
        assert model.attend is before
