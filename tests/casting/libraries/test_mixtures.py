"""``torch.lerp`` takes float32 tensors beside half ones, in a model and beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
CALLS: dict[str, Callable[..., Tensor]] = {
    "function": lambda a, b, w: torch.lerp(a, b, w),
    "by name": lambda a, b, w: torch.lerp(input=a, end=b, weight=w),
    "method": lambda a, b, w: a.lerp(b, w),
    "method, by name": lambda a, b, w: a.lerp(b, weight=w),
}


class Shifting(nn.Module):
    """Mixes values in its forward, as a token shift does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, call: Callable[[], Tensor]) -> Tensor:
        self.found = call()
        return self.layer(torch.ones(1, 2))


def drawn(dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    values = [torch.randn(3), torch.randn(3), torch.rand(3)]
    return tuple(one.to(dtype) for one, dtype in zip(values, dtypes, strict=True))


@pytest.mark.parametrize("level", [*HALF, "O1", "O4"])
@pytest.mark.parametrize("name", CALLS)
def test_any_dtypes_are_mixed_in_float32(amp: ModuleType, level: str, name: str) -> None:
    """Of a half activation in a model that is stored in half the result is half, else float32."""
    half, call = HALF.get(level, torch.bfloat16), CALLS[name]
    dtypes = (torch.float32, half)
    model = amp.initialize(Shifting(), opt_level=level, verbosity=0)
    for kinds in [(a, b, w) for a in dtypes for b in dtypes for w in dtypes]:
        values = drawn(kinds)
        model(lambda values=values: call(*values))
        got, exact = model.found, torch.lerp(*(one.double() for one in values))
        is_half = kinds[0] is half and (level in HALF or set(kinds) == {half})
        assert got.dtype is (half if is_half else torch.float32), kinds
        eps = torch.finfo(got.dtype).eps * (4 if len(set(kinds)) == 1 else 1)
        assert (got - exact).abs().max() <= eps * exact.abs().max(), kinds


@pytest.mark.parametrize("weight", [0.25, torch.tensor(0.25)])
def test_beside_a_model_an_average_stays_in_float32(amp: ModuleType, weight: Any) -> None:
    model = amp.initialize(nn.Linear(2, 2), opt_level="O5", verbosity=0)
    average, param = torch.ones(2, 2), model.weight.detach()
    assert param.dtype is torch.bfloat16
    want = torch.lerp(average, param.float(), 0.25)
    for got in (torch.lerp(average, param, weight), param.lerp(average, 1 - weight)):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, want)
