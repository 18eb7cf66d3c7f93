"""Gradients of bfloat16 convolutions on a CPU, for kernels beyond what the input holds."""

from __future__ import annotations

import copy
import functools
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from amp_patch import amp as core
from amp_patch.casting import cpu_convolutions

LAYERS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}
#: Layers and the sizes of an input of which torch 2.13 makes wrong gradients on a CPU with AVX-512.
WRONG = {
    "kernel of 3 on two frames": (nn.Conv3d(16, 16, 3, padding=1), (2, 16, 2, 4, 4)),
    "kernel of 5 on one row": (nn.Conv3d(16, 16, 5, padding=2), (2, 16, 8, 1, 4)),
    "stride of 2 on one number": (nn.Conv1d(16, 16, 3, stride=2, padding=1), (4, 16, 1)),
    "stride of 3 on two columns": (nn.Conv2d(32, 64, 3, (1, 3), 1), (4, 32, 6, 2)),
    "transposed, to two frames": (nn.ConvTranspose3d(16, 16, 3, padding=1), (2, 16, 2, 4, 4)),
    "transposed, to one column": (nn.ConvTranspose2d(16, 16, 3, 2, 1), (2, 16, 3, 1)),
    "transposed, from two frames to one": (nn.ConvTranspose3d(16, 16, 2, 1, 1), (2, 16, 2, 4, 4)),
    "frozen weight": (nn.Conv3d(16, 16, 5, padding=2), (2, 16, 4, 1, 4)),
}
WRONG["frozen weight"][0].weight.requires_grad_(False)
#: The same layers on inputs of which its gradients are right.
RIGHT = {
    "three frames": (WRONG["kernel of 3 on two frames"][0], (2, 16, 3, 4, 4)),
    "five rows": (nn.Conv3d(16, 16, 5, padding=2), (2, 16, 8, 5, 4)),
    "two numbers": (WRONG["stride of 2 on one number"][0], (4, 16, 2)),
    "three columns": (WRONG["stride of 3 on two columns"][0], (4, 32, 6, 3)),
    "a large kernel on one row": (nn.Conv2d(16, 16, (5, 3), padding=(2, 1)), (2, 16, 1, 4)),
    "one place, strided": (nn.Conv2d(16, 16, 1, stride=2), (2, 16, 1, 1)),
    "transposed, to three frames": (nn.ConvTranspose3d(16, 16, 3, padding=1), (2, 16, 3, 4, 4)),
    "transposed, from two frames to five": (nn.ConvTranspose3d(16, 16, 3, 2), (2, 16, 2, 4, 4)),
    "without gradients": (nn.Conv3d(16, 16, 3, padding=1).requires_grad_(False), (2, 16, 2, 4, 4)),
}


def saved_dtypes(model: nn.Module, x: Tensor) -> set[torch.dtype]:
    """Return the dtypes of what one call keeps for its backward, weights that wait in half too."""
    dtypes = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() > 2:  # else it is a loss's
            dtypes.add(tensor.dtype)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return dtypes


def leave_nan(like: Tensor) -> None:
    """Fill memory of a tensor's size with NaN, for who gets it next and does not write to it."""
    for dtype in (torch.float32, torch.bfloat16):
        blocks = [torch.full(like.shape, torch.nan, dtype=dtype) for _ in range(6)]
        del blocks


def gradients(model: nn.Module, x: Tensor, levels: ModuleType, level: str) -> list[Tensor]:
    """Return the gradients of a layer's weights by a level, of the sum of its squared outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = levels.initialize(model, optimizer, opt_level=level, verbosity=0)
    loss = (model(x).float() ** 2).sum()
    with levels.scale_loss(loss, optimizer) as scaled_loss:
        leave_nan(next(model.parameters()))
        scaled_loss.backward()
    return [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]


def assert_near_float64(layer: nn.Module, x: Tensor, levels: ModuleType, level: str) -> None:
    exact = copy.deepcopy(layer).double()
    (exact(x.double()) ** 2).sum().backward()
    wanted = [p.grad for p in exact.parameters() if p.grad is not None]
    try:
        found = gradients(copy.deepcopy(layer), x, levels, level)
    finally:
        levels.deactivate()
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.linalg.norm(one - other) < 0.03 * torch.linalg.norm(other) + 1e-3


@pytest.mark.parametrize("level", ["O4", "O5"])
@pytest.mark.parametrize("name", WRONG)
def test_gradients_are_those_of_float64(amp: ModuleType, name: str, level: str) -> None:
    layer, sizes = WRONG[name]
    torch.manual_seed(0)
    assert_near_float64(layer, torch.randn(sizes), amp, level)


@pytest.mark.parametrize("level", ["O4", "O5"])
@pytest.mark.parametrize("name", WRONG)
def test_a_compiled_model_has_them_too(amp: ModuleType, name: str, level: str) -> None:
    layer, sizes = WRONG[name]
    torch.manual_seed(0)
    torch.compiler.reset()  # else what others compiled counts as compiled too often
    compiled = nn.Sequential(copy.deepcopy(layer))
    compiled.compile(backend="aot_eager", fullgraph=True)
    exact, x = nn.Sequential(copy.deepcopy(layer)).double(), torch.randn(sizes)
    (exact(x.double()) ** 2).sum().backward()
    found = gradients(compiled, x, amp, level)
    wanted = [p.grad for p in exact.parameters() if p.grad is not None]
    for one, other in zip(found, wanted, strict=True):
        assert torch.linalg.norm(one - other) < 0.03 * torch.linalg.norm(other)


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_gets_wrong_is_computed_in_float32(amp: ModuleType, name: str) -> None:
    layer, sizes = WRONG[name]
    model = amp.initialize(nn.Sequential(copy.deepcopy(layer)), opt_level="O4", verbosity=0)
    assert torch.float32 in saved_dtypes(model, torch.randn(sizes))
    assert model(torch.randn(sizes)).dtype is torch.bfloat16


@pytest.mark.parametrize("name", RIGHT)
def test_everything_else_in_bfloat16(amp: ModuleType, name: str) -> None:
    layer, sizes = RIGHT[name]
    model = amp.initialize(nn.Sequential(copy.deepcopy(layer)), opt_level="O4", verbosity=0)
    assert saved_dtypes(model, torch.randn(sizes, requires_grad=True)) == {torch.bfloat16}


@pytest.mark.parametrize("name", WRONG)
def test_float16_stays(amp: ModuleType, name: str) -> None:
    layer, sizes = WRONG[name]
    model = amp.initialize(nn.Sequential(copy.deepcopy(layer)), opt_level="O1", verbosity=0)
    assert saved_dtypes(model, torch.randn(sizes, requires_grad=True)) == {torch.float16}


def test_arguments_by_name_and_torchs_own_errors(amp: ModuleType) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    x, weight = torch.randn(2, 16, 2, 4, 4), torch.randn(16, 16, 3, 3, 3, requires_grad=True)
    y = nn.functional.conv3d(input=x, weight=weight, padding="same", dilation=(1, 1, 1))
    assert y.dtype is torch.bfloat16
    assert nn.functional.conv_transpose3d(input=x, weight=weight, padding=[1]).shape == x.shape
    with pytest.raises(RuntimeError, match="expected stride to be a single integer value or"):
        nn.functional.conv3d(x, weight, stride=(1, 1))
    with pytest.raises(RuntimeError, match="expected stride to be a single integer value or"):
        nn.functional.conv_transpose3d(x, weight, stride=(1, 1))
    with pytest.raises(RuntimeError, match="Expected 3D .* or 4D .* input to conv2d, but got"):
        nn.functional.conv2d(torch.tensor(1.0), weight)


@st.composite
def calls(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Draw a convolution, and the sizes of an input that it takes."""
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())

    def each(values: list[int]) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in range(dims))

    kernel, stride = each([1, 2, 3, 3, 5]), each([1, 1, 2, 3])
    padding = tuple(draw(st.sampled_from([0, one // 2])) for one in kernel)
    dilation = each([1, 2]) if draw(st.booleans()) else (1,) * dims
    # Large enough for one place of the kernel: of what is given, or of what comes out.
    wanted = [
        spread * (taken - 1) + 1 - 2 * pad
        for spread, taken, pad in zip(dilation, kernel, padding, strict=True)
    ]
    least = [2 if transposed and one < 1 else max(1, one) for one in wanted]
    sizes = tuple(map(max, each([1, 2, 3, 4, 6]), least))
    channels = [draw(st.sampled_from([1, 3, 16, 32])) for _ in range(2)]
    make: Any = LAYERS[dims, transposed]
    layer = make(*channels, kernel, stride=stride, padding=padding, dilation=dilation)
    return layer, (draw(st.integers(1, 3)), channels[0], *sizes)


@pytest.mark.usefixtures("amp")
@given(calls(), st.sampled_from(["O4", "O5"]))
def test_drawn_convolutions(call: tuple[nn.Module, tuple[int, ...]], level: str) -> None:
    layer, sizes = call
    with torch.no_grad():
        x = torch.rand(sizes) + 0.5
        for param in layer.parameters():
            param.abs_()  # no sum is a small difference of large numbers
    assert_near_float64(layer, x, core, level)


@pytest.mark.parametrize("by_name", [False, True])
def test_options_in_lists_are_looked_at_too(amp: ModuleType, by_name: bool) -> None:
    """A kernel of 4 on images of 2 x 2 with a stride of 3 is computed in float32, as in tuples."""
    own = torch.conv2d
    amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)  # a CPU's tensors are cast
    taken: list[torch.dtype] = []

    @functools.wraps(own)
    def noted(input: Tensor, *args: Any, **named: Any) -> Tensor:
        taken.append(input.dtype)
        return own(input, *args, **named)

    convolution = cpu_convolutions.right_on_cpu(noted)
    weight = torch.randn(3, 2, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    for size, dtype in ((2, torch.float32), (8, torch.bfloat16), (2, torch.float32)):
        image = torch.randn(1, 2, size, size, dtype=torch.bfloat16)
        if by_name:
            convolution(image, weight, stride=[3, 3], padding=[2, 2], dilation=[1, 1])
        else:
            convolution(image, weight, None, [3, 3], [2, 2], [1, 1])
        assert taken.pop() is dtype
