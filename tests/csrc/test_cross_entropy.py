"""The CUDA text of cross_entropy, run on the CPU, against torch's own in float64."""

import math
from typing import NamedTuple

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Kernels, LaunchError
from cuda_on_cpu.drawing import SEEDS
from cuda_on_cpu.kernel_names import DTYPES
from cuda_on_cpu.memory import Memory
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

INF, NAN = torch.inf, torch.nan
IGNORED = -100
#: Of one rounding to each dtype, and the smallest number beside 0.
ROUNDING = {
    torch.float16: (2.0**-10, 2.0**-23),
    torch.bfloat16: (2.0**-7, 1e-30),
    torch.float32: (3e-5, 1e-9),
}


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("cross_entropy.cu", pytestconfig)


class Found(NamedTuple):
    losses: Tensor
    gradient: Tensor


def run(
    kernels: Kernels,
    logits: Tensor,
    targets: Tensor,
    factors: Tensor,
    offsets: tuple[int, int] = (0, 0),
    seed: int = 0,
) -> Found:
    """Launch forward and backward; one factor is for all rows."""
    rows, classes = logits.shape
    memory = Memory()
    losses = memory.empty(torch.float32, rows)
    totals = memory.empty(torch.float32, rows, 2)
    gradient = memory.place(torch.full_like(logits, NAN), offsets[1])
    stride = 0 if factors.numel() == 1 else 1
    placed = memory.place(logits, offsets[0]), memory.place(targets)
    name = next(name for name, dtype in DTYPES.items() if dtype is logits.dtype)
    given = (*placed, classes, IGNORED)
    kernels.launch(f"cross_entropy_{name}", rows, *given, losses, totals, seed=seed)
    operands = (totals, factors, stride, gradient)
    kernels.launch(f"cross_entropy_backward_{name}", rows, *given, *operands, seed=seed)
    memory.check()
    return Found(losses, gradient.view_as(logits))


def expected(logits: Tensor, targets: Tensor, factors: Tensor) -> Found:
    exact = logits.double().requires_grad_()
    losses = functional.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="none")
    (losses * factors).sum().backward()
    assert exact.grad is not None
    return Found(losses.detach(), exact.grad)


def check(logits: Tensor, targets: Tensor, factors: Tensor, found: Found) -> None:
    reference = expected(logits, targets, factors)
    losses, gradient = (one.double() for one in found)
    torch.testing.assert_close(losses, reference.losses, rtol=2e-6, atol=2e-6, equal_nan=True)
    rtol, atol = ROUNDING[logits.dtype]
    allowed = reference.gradient.abs() * rtol + atol
    # float32 keeps little of what is left of a probability near to 1, less 1
    rounded = factors.double().expand(len(targets)) * 4e-7
    at_target = functional.one_hot(targets.clamp(min=0), logits.shape[1])
    allowed += at_target * rounded[:, None]
    assert torch.equal(gradient.isnan(), reference.gradient.isnan())
    assert not ((gradient - reference.gradient).abs() > allowed).any()


@given(
    dtype=st.sampled_from(list(DTYPES.values())),
    rows=st.integers(1, 3),
    # less than a pack, about as many as a block reads at once, and about twice of it
    classes=st.integers(1, 40) | st.integers(2040, 2060) | st.integers(4090, 4110),
    offsets=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    away=st.sampled_from([0.0, -300.0]),
    masked=st.sampled_from([0.0, 0.5]),
    shared=st.booleans(),
    seed=SEEDS,
)
def test_losses_and_gradients_are_torchs(
    kernels: Kernels,
    dtype: torch.dtype,
    rows: int,
    classes: int,
    offsets: tuple[int, int],
    scale: float,
    away: float,
    masked: float,
    shared: bool,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=draw) * scale + away
    targets = torch.randint(classes, (rows,), generator=draw)
    missing = torch.rand(rows, classes, generator=draw) < masked
    missing.scatter_(1, targets[:, None], False)
    logits = logits.masked_fill(missing, -INF).to(dtype)
    targets[torch.rand(rows, generator=draw) < 0.2] = IGNORED
    factors = torch.rand(1 if shared else rows, generator=draw) * 1024
    found = run(kernels, logits, targets, factors, offsets, seed)
    check(logits, targets, factors, found)


ODD_ROWS = {
    "a larger class is inf": [0.0, INF, 1.0],
    "the target is inf": [INF, 0.0, 1.0],
    "NaN": [0.0, NAN, 1.0],
    "NaN among -inf": [0.0, NAN, -INF],
    "NaN and inf": [0.0, NAN, INF],
    "nothing but -inf": [-INF, -INF, -INF],
    "the target is -inf": [-INF, 0.0, 1.0],
    "the target alone is not": [0.0, -INF, -INF],
}


@pytest.mark.parametrize("classes", [3, 2100])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_not_finite_stays_in_its_row_and_is_as_with_torch(
    kernels: Kernels, dtype: torch.dtype, classes: int
) -> None:
    logits = torch.full((len(ODD_ROWS), classes), -INF)
    logits[:, :3] = torch.tensor(list(ODD_ROWS.values()))
    logits = torch.cat([logits, torch.zeros(1, classes)]).to(dtype)
    targets, factors = torch.zeros(len(logits), dtype=torch.int64), torch.ones(1)
    found = run(kernels, logits, targets, factors)
    check(logits, targets, factors, found)
    # of an ignored row nothing is read
    ignored = run(kernels, logits, torch.full_like(targets, IGNORED), factors)
    assert not any(map(torch.count_nonzero, ignored))


@pytest.mark.parametrize("target", [-1, 3, 2**32])
def test_what_is_no_class_is_refused(kernels: Kernels, target: int) -> None:
    targets = torch.tensor([0, target])
    with pytest.raises(LaunchError, match="the assertion 0 <= target && target < classes"):
        run(kernels, torch.zeros(2, 3), targets, torch.ones(1))


def test_a_row_behind_the_2_to_the_31st_logit(kernels: Kernels) -> None:
    """The rows before it are ignored, so that nobody reads them: they need not be there."""
    classes = 2**19
    before = 2**31 // classes
    last = torch.zeros(1, classes, dtype=torch.float16)
    begin = last.data_ptr() - 2 * before * classes
    targets = torch.tensor([IGNORED] * before + [7])
    losses, totals = torch.full((before + 1,), NAN), torch.full((before + 1, 2), NAN)
    given = (begin, targets, classes, IGNORED, losses, totals)
    kernels.launch("cross_entropy_float16", before + 1, *given)
    assert not losses[:-1].any()
    assert losses[-1] == pytest.approx(math.log(classes))
