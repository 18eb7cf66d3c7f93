"""What is printed of casts at verbosity=2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from casting_support import HALVES, half_kernels_as_on_cuda
from torch import nn
from torch.nn import functional as F

from amp_patch.casting.verbose_casts import telling

F16, F32 = torch.float16, torch.float32
PROFILE = "fast-norms"
UP, DOWN = "Half->Float ({})", "Float->Half ({})"


@pytest.mark.parametrize("opt_level", HALVES)
@pytest.mark.parametrize("as_on_cuda", [False, True])
def test_each_cast_is_printed(
    amp: ModuleType, capsys: pytest.CaptureFixture[str], opt_level: str, as_on_cuda: bool
) -> None:
    x = torch.randn(4, 8)
    weight, bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
    half = x.to(HALVES[opt_level])
    calls: list[tuple[str, Callable[[], Any], list[str]]] = [
        # the result alone, for all is computed in float32
        ("layer_norm", lambda: F.layer_norm(x, (8,), weight, bias), [DOWN]),
        # the weight and the bias, for a kernel of half tensors; else the input, and the result
        (
            "layer_norm",
            lambda: F.layer_norm(half, (8,), weight, bias),
            [DOWN, DOWN] if as_on_cuda else [UP, DOWN],
        ),
        (
            "layer_norm",
            lambda: F.layer_norm(input=half, normalized_shape=(8,)),
            [] if as_on_cuda else [UP, DOWN],
        ),
        ("softmax", lambda: F.softmax(x, -1), [DOWN]),
        ("softmax", lambda: F.softmax(half, -1), []),
        ("softmax", lambda: half.softmax(-1, dtype=F32), []),
        ("softmax", lambda: x.double().softmax(-1), []),
    ]
    with half_kernels_as_on_cuda() if as_on_cuda else contextlib.nullcontext():
        amp.initialize(nn.Linear(1, 1), opt_level=opt_level, rules=PROFILE, verbosity=2)
        for name, call, lines in calls:
            capsys.readouterr()
            call()
            found = capsys.readouterr().out.splitlines()
            assert found == [line.format(name) for line in lines]
        with amp.disable_casts():
            F.softmax(x, -1)
        assert capsys.readouterr().out == ""


def test_what_is_compiled_prints_nothing(
    amp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model = amp.initialize(nn.LayerNorm(8), opt_level="O1", rules=PROFILE, verbosity=2)
    capsys.readouterr()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.randn(4, 8).half()).dtype is F16
    assert capsys.readouterr().out == ""
    torch._dynamo.reset()


def test_a_rule_that_casts_nothing_tells_nothing() -> None:
    assert telling(torch.neg, torch.neg, "off", print) is torch.neg
