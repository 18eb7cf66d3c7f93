"""apex.normalization against the published formulas in float64."""

from __future__ import annotations

import importlib
import itertools
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import amp_patch.amp

SHARES_APEX = True
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAMES = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
TOLERANCE = {
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
}


@pytest.fixture
def norms(apex: types.ModuleType) -> Any:
    """The module apex.normalization.fused_layer_norm."""
    return importlib.import_module("apex.normalization.fused_layer_norm")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def published(name: str, x: Tensor, count: int, eps: float) -> Tensor:
    """The formula in float64, over the last dimensions, count of them."""
    dims = tuple(range(-count, 0))
    x = x.double()
    if "Layer" in name or "layer" in name:
        x = x - x.mean(dims, keepdim=True)
    return x / (x.pow(2).mean(dims, keepdim=True) + eps).sqrt()


def weighted(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in norm.parameters():
            param.copy_(torch.rand(param.shape) + 0.5)
    return norm


def affine(norm: nn.Module, normalized: Tensor) -> Tensor:
    bias = getattr(norm, "bias", None)
    return normalized * norm.weight.double() + (0.0 if bias is None else bias.double())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("input", "weight"), list(itertools.product(DTYPES, DTYPES)))
def test_any_dtypes(norms: Any, name: str, input: torch.dtype, weight: torch.dtype) -> None:
    norm = weighted(getattr(norms, name)((3, 4))).to(weight)
    x = (torch.randn(5, 3, 4) * 3 + 1).to(input).requires_grad_()
    output = norm(x)
    out_dtype = weight if name.startswith("Mixed") else input
    assert output.dtype == out_dtype
    exact_x = x.detach().double().requires_grad_()
    expected = affine(norm, published(name, exact_x, 2, 1e-5))
    low = max(input, weight, key=lambda dtype: torch.finfo(dtype).eps)
    torch.testing.assert_close(output.double(), expected, **TOLERANCE[low])
    direction = torch.randn(5, 3, 4)
    output.backward(direction.to(out_dtype))
    expected.backward(direction.double())
    loose = {key: 8 * value for key, value in TOLERANCE[low].items()}
    torch.testing.assert_close(x.grad.double(), exact_x.grad, **loose)
    assert x.grad.dtype == input
    assert norm.weight.grad.dtype == weight


FUNCTIONS = [
    ("fused_layer_norm", 0, False),
    ("fused_layer_norm_affine", 2, False),
    ("mixed_dtype_fused_layer_norm_affine", 2, True),
    ("fused_rms_norm", 0, False),
    ("fused_rms_norm_affine", 1, False),
    ("mixed_dtype_fused_rms_norm_affine", 1, True),
]


@pytest.mark.parametrize(("name", "count", "is_mixed"), FUNCTIONS)
def test_functions(norms: Any, name: str, count: int, is_mixed: bool) -> None:
    x = torch.randn(5, 4) * 1e-3  # so small that eps counts
    affines = [torch.rand(4, dtype=torch.float64) + 0.5 for _ in range(count)]
    function = getattr(norms, name)
    for arguments, eps in [(((4,),), 1e-6), ((4, 1e-4), 1e-4), (([4], 1e-4, True), 1e-4)]:
        expected = published(name, x, 1, eps)
        for value, combine in zip(affines, (torch.mul, torch.add), strict=False):
            expected = combine(expected, value)
        output = function(x, *affines, *arguments)
        assert output.dtype == (torch.float64 if is_mixed else torch.float32)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("autograd", "name"),
    [
        ("FusedLayerNormFunction", "fused_layer_norm"),
        ("FusedLayerNormAffineFunction", "fused_layer_norm_affine"),
        ("FusedLayerNormAffineMixedDtypesFunction", "mixed_dtype_fused_layer_norm_affine"),
        ("FusedRMSNormFunction", "fused_rms_norm"),
        ("FusedRMSNormAffineFunction", "fused_rms_norm_affine"),
        ("FusedRMSNormAffineMixedDtypesFunction", "mixed_dtype_fused_rms_norm_affine"),
    ],
)
def test_apply_of_the_functions(norms: Any, autograd: str, name: str) -> None:
    count = next(count for known, count, _ in FUNCTIONS if known == name)
    arguments = [torch.randn(5, 4), *[torch.rand(4).half()] * count, torch.Size([4]), 1e-5]
    output = getattr(norms, autograd).apply(*arguments)
    expected = getattr(norms, name)(*arguments)
    assert torch.equal(output, expected)
    assert output.dtype == expected.dtype


@pytest.mark.parametrize(
    ("weight", "dtype"), [(None, torch.float32), (torch.float16, torch.float16)]
)
def test_manual_rms_norm(norms: Any, weight: torch.dtype | None, dtype: torch.dtype) -> None:
    x = torch.randn(5, 4).half()
    scale = None if weight is None else torch.rand(4).to(weight)
    output = norms.manual_rms_norm(x, (4,), scale, 1e-5)
    expected = published("rms", x, 1, 1e-5) * (1.0 if scale is None else scale.double())
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, **TOLERANCE[torch.float16])


@pytest.mark.parametrize("name", NAMES)
def test_half_is_normalized_in_float32(norms: Any, name: str) -> None:
    @given(st.integers(0, 2**32), st.floats(0.1, 200.0), st.integers(2, 600))
    def holds(seed: int, size: float, width: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(2, width, generator=generator) * size).half()
        norm = getattr(norms, name)(width).half()
        expected = published(name, x, 1, 1e-5)
        torch.testing.assert_close(norm(x).double(), expected, rtol=1e-3, atol=2e-4)

    holds()


def test_means_of_many_halves_are_right(norms: Any) -> None:
    x = (torch.randn(2, 40_000) + 100).half()  # whose sum and squares are beyond float16
    for name in ("FusedLayerNorm", "FusedRMSNorm"):
        output = getattr(norms, name)(40_000).half()(x)
        torch.testing.assert_close(
            output.double(), published(name, x, 1, 1e-5), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_decides_the_output(norms: Any, name: str, dtype: torch.dtype) -> None:
    norm = weighted(getattr(norms, name)(4))
    x = torch.randn(5, 4).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = norm(x)
    keeps = dtype == torch.float64 and not name.startswith("Mixed")
    assert output.dtype == (dtype if keeps else torch.bfloat16)
    expected = affine(norm, published(name, x, 1, 1e-5))
    torch.testing.assert_close(output.double(), expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("name", NAMES)
def test_the_casts_of_functions_do_not(apex: Any, norms: Any, name: str, level: str) -> None:
    model = apex.amp.initialize(nn.Linear(4, 4), opt_level=level, verbosity=0)
    try:
        assert torch.is_autocast_enabled()
        assert getattr(norms, name)(4)(torch.randn(5, 4)).dtype is torch.float32
    finally:
        amp_patch.amp.deactivate()
    del model


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", NAMES)
def test_every_opt_level_trains_it(apex: Any, norms: Any, name: str, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), getattr(norms, name)(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp = importlib.import_module("apex.amp")
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    inputs = torch.randn(32, 4)
    targets = inputs[:, :1].tanh()
    losses = []
    try:
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(inputs).float() - targets).pow(2).mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
    finally:
        amp_patch.amp.deactivate()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_settings(norms: Any, name: str) -> None:
    norm = getattr(norms, name)(4, 1e-3)
    expected = {"weight": torch.ones(4)} | ({"bias": torch.zeros(4)} if "Layer" in name else {})
    assert norm.state_dict().keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(getattr(norm, key), value)
    weighted(norm).reset_parameters()
    assert torch.equal(norm.weight, torch.ones(4))
    assert (norm.normalized_shape, norm.eps) == (torch.Size([4]), 1e-3)
    assert norm.elementwise_affine is True
    assert repr(norm) == f"{name}((4,), eps=0.001, elementwise_affine=True)"
    assert getattr(norms, name)(4, memory_efficient=True).memory_efficient is True


@pytest.mark.parametrize("name", NAMES[:2])
def test_without_weights(norms: Any, name: str) -> None:
    norm = getattr(norms, name)([3, 4], elementwise_affine=False)
    assert norm.weight is None
    assert not list(norm.parameters())
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(norm(x).double(), published(name, x, 2, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES[2:])
def test_mixed_needs_weights(norms: Any, name: str) -> None:
    norm_class = getattr(norms, name)
    assert norm_class(4, elementwise_affine=True).weight is not None
    with pytest.raises(RuntimeError, match=rf"got elementwise_affine=False. Call {name[5:]}\("):
        norm_class(4, elementwise_affine=False)
    with pytest.raises(TypeError, match=rf"{name} takes .*; got bias as well. Call {name}\(n"):
        norm_class(4, bias=False)


def test_names_of_the_package(apex: Any) -> None:
    names: dict[str, Any] = {}
    exec("from apex.normalization import *", names)
    assert sorted(set(names) - {"__builtins__"}) == sorted([*NAMES, "fused_layer_norm"])
    assert names["FusedLayerNorm"].__module__ == "apex.normalization.fused_layer_norm"
