"""A model in float64, of which no level casts anything, is told of once; a part in it is not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amp_patch.levels import OPT_LEVELS

ALL_IN = r"whose floating parameters \(\d\) are all in float64: opt_level .O\d. casts none of them"


def told(amp: Any, models: Any, level: str, **options: Any) -> list[warnings.WarningMessage]:
    """Return what two calls of `initialize` warn of, of as many models."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            amp.initialize(models(), opt_level=level, verbosity=0, **options)
    return caught


@pytest.mark.parametrize("level", sorted(OPT_LEVELS))
def test_a_model_in_float64_is_told_of_once_at_each_level_that_casts(amp, level: str) -> None:
    caught = told(amp, lambda: nn.Linear(4, 4).double(), level)
    assert [one.filename for one in caught] == [__file__] * (level != "O0")
    for one in caught:
        assert re.search(f"got a model of type Linear {ALL_IN}", str(one.message))
        assert "Call model.float() before amp.initialize()" in str(one.message)


@pytest.mark.filterwarnings("ignore:amp.initialize.. casts models in float32")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_told_is_so_and_the_call_mends_it(amp, level: str) -> None:
    made = {}
    for dtype in (torch.float64, torch.float32):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().to(dtype)
        model[0].register_forward_hook(lambda _, __, out, key=dtype: made.update({key: out.dtype}))
        amp.initialize(model, opt_level=level, verbosity=0)(torch.randn(2, 4, dtype=dtype))
    assert made == {torch.float64: torch.float64, torch.float32: torch.float16}


def _frozen_half() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4).double())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex128))


SILENT: dict[str, Callable[[], Any]] = {
    "float32": lambda: nn.Linear(4, 4),
    "a part in float64": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()),
    "the rest in half": _frozen_half,
    "no parameters": nn.Tanh,
    "a buffer in float64": lambda: nn.BatchNorm1d(4, affine=False).double(),
    "complex": Complex,
}


@pytest.mark.parametrize("kind", SILENT)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_meant_in_float64_is_not_told(amp, level: str, kind: str) -> None:
    assert not told(amp, SILENT[kind], level)


def test_integers_beside_float64_are_no_floating_parameters(amp) -> None:
    model = nn.Linear(4, 4).double()
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    with pytest.warns(UserWarning, match=r"parameters \(2\) are all in float64"):
        amp.initialize(model, opt_level="O1", verbosity=0)


def test_where_amp_is_off_nothing_is_told(amp) -> None:
    assert not told(amp, lambda: nn.Linear(4, 4).double(), "O1", enabled=False)


def test_of_several_models_that_in_float64_is_told(amp) -> None:
    models = nn.Linear(4, 4), nn.Bilinear(4, 4, 4).double()
    with pytest.warns(UserWarning, match=ALL_IN) as caught:
        amp.initialize(list(models), opt_level="O1", verbosity=0)
    assert ["of type Bilinear whose" in str(one.message) for one in caught] == [True]
