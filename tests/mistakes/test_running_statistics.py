"""``model.eval()`` says that float16 could not hold running statistics, and seldom looks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from amp_patch.amp import deactivate

WORDS = "running statistics in float16 must lie below 65504"
OPTIONS = [("O3", {}), ("O2", {"keep_batchnorm_fp32": False})]


def initialized(amp: Any, level: str, **options: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


def trained(model: nn.Module) -> None:
    """Call it with numbers of which float16 holds each, and not their variance."""
    model.train()
    x = torch.linspace(-1e3, 1e3, 64).reshape(16, 4)
    with torch.no_grad():
        for _ in range(3):
            assert model(x).isfinite().all()


def warnings_of(model: nn.Module, calls: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            assert model.eval() is model
            assert not model[1].training
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(("level", "options"), OPTIONS)
def test_it_is_said_once_at_the_users_line(amp, level: str, options: dict[str, Any]) -> None:
    model = initialized(amp, level, **options)
    assert warnings_of(model) == []
    trained(model)
    with pytest.warns(UserWarning, match=WORDS) as caught:
        model.eval()
    assert caught[0].filename == __file__
    assert "1.running_var of Sequential" in str(caught[0].message)
    assert warnings_of(model, 10) == []


@pytest.mark.parametrize(
    ("level", "options"),
    [("O2", {}), ("O3", {"keep_batchnorm_fp32": True}), ("O5", {"keep_batchnorm_fp32": False})],
)
def test_statistics_that_are_held_are_not_looked_at(
    amp, level: str, options: dict[str, Any]
) -> None:
    original = nn.Module.eval
    model = initialized(amp, level, **options)
    assert nn.Module.eval is original
    trained(model)
    assert warnings_of(model) == []


def test_a_script_that_evaluates_in_each_step_waits_seldom(amp, monkeypatch) -> None:
    from amp_patch.mistakes import running_statistics

    looked: list[int] = []
    look = running_statistics.is_infinite
    monkeypatch.setattr(
        running_statistics, "is_infinite", lambda buffer: looked.append(1) or look(buffer)
    )
    model = initialized(amp, "O3")
    for _ in range(100):
        model.train()
        model.eval()
    assert len(looked) == 2 * 7  # both statistics at 1, 2, 4, 8, 16, 32 and 64


def functional(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    return model[1](model[0](x))


def traced(model: nn.Module) -> list[Any]:
    graph = make_fx(functional)(model, torch.ones(2, 4).half()).graph
    return [node.target for node in graph.nodes]


def batched(model: nn.Module) -> list[int]:
    buffers = {name: torch.stack([one, one]) for name, one in model.named_buffers()}

    def call(own: dict[str, torch.Tensor]) -> torch.Tensor:
        model[1].eval()
        return torch.func.functional_call(model, own, torch.ones(2, 4).half())

    return list(torch.vmap(call)(buffers).shape)


def without_numbers(model: nn.Module) -> bool:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model.eval().training


WITHOUT_NUMBERS: dict[str, Callable[[nn.Module], Any]] = {
    "a trace": traced,
    "a batch": batched,
    "fake tensors": without_numbers,
}


@pytest.mark.parametrize("way", WITHOUT_NUMBERS)
def test_what_is_traced_is_not_looked_at(amp, way: str) -> None:
    call = WITHOUT_NUMBERS[way]
    expected = call(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).half())
    assert call(initialized(amp, "O3")) == expected


def test_another_session_says_it_again_and_the_end_puts_the_method_back(amp) -> None:
    original = nn.Module.eval
    for _ in range(2):
        model = initialized(amp, "O3")
        trained(model)
        assert len(warnings_of(model)) == 1
        deactivate()  # which the drop-in has not
        assert nn.Module.eval is original
