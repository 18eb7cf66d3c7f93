"""apex.parallel's SyncBatchNorm against a plain batch norm of the whole batch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from gloo_pair import Pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

SHAPES = {"2d": (8, 3), "3d": (8, 3, 5), "4d": (8, 3, 2, 4), "5d": (8, 3, 2, 2, 2)}
# Channels far from 0, where a variance from a sum of squares would cancel.
OFFSET = 100.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


def parallel() -> ModuleType:
    return importlib.import_module("apex.parallel")


def whole_batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a batch and the gradient of what a norm makes of it."""
    generator = torch.Generator().manual_seed(len(shape))
    batch = torch.randn(shape, generator=generator) + OFFSET
    return batch, torch.randn(shape, generator=generator)


def filled(norm: nn.Module) -> nn.Module:
    """Give a norm weights and biases of its own."""
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 1.0, -2.0]))
        norm.bias.copy_(torch.tensor([1.0, 0.0, 3.0]))
    return norm


def synced(rank: int, shape: tuple[int, ...], sizes: list[int], options: dict[str, Any]) -> Any:
    """Normalize this rank's part of the batch twice; return output, gradients and statistics."""
    norm = filled(parallel().SyncBatchNorm(3, **options))
    batch, grad = (whole.split(sizes)[rank] for whole in whole_batch(shape))
    if norm.channel_last:
        batch, grad = batch.movedim(1, -1), grad.movedim(1, -1)
    norm(batch + 1.0)
    batch = batch.clone().requires_grad_()
    output = norm(batch)
    output.backward(grad)
    if norm.channel_last and len(shape) > 2:
        output, batch.grad = output.movedim(-1, 1), None
    return (
        output.detach(),
        batch.grad,
        norm.weight.grad,
        norm.bias.grad,
        norm.running_mean,
        norm.running_var,
        norm.num_batches_tracked,
    )


def expected_of(shape: tuple[int, ...], momentum: float | None) -> list[Tensor]:
    """Compute the same in one process, in float64, with torch's batch norm."""
    batch, grad = (whole.double() for whole in whole_batch(shape))
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    norm = filled(kind(3, momentum=momentum).double())
    norm(batch + 1.0)
    batch.requires_grad_()
    output = norm(batch)
    output.backward(grad)
    return [output.detach(), batch.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()]


@pytest.mark.parametrize("sizes", [[4, 4], [1, 7]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"channel_last": True}, {"momentum": 0.7}], ids=str
)
@pytest.mark.parametrize("name", SHAPES)
def test_two_processes_normalize_as_one(
    pair: Pair, name: str, options: dict[str, Any], sizes: list[int]
) -> None:
    shape = SHAPES[name]
    first, second = pair.run(synced, shape, sizes, options)
    expected = expected_of(shape, options.get("momentum", 0.1))
    joined = [torch.cat([first[0], second[0]]), None]
    if first[1] is not None:
        joined[1] = torch.cat([first[1], second[1]])
    sums = [first[2] + second[2], first[3] + second[3]]
    for rank in (first, second):
        for got, wanted in zip([*joined, *sums, *rank[4:]], expected, strict=True):
            if got is not None:
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, check_dtype=False)


def synced_half(rank: int, dtype: torch.dtype) -> Any:
    norm = filled(parallel().SyncBatchNorm(3))
    batch = whole_batch(SHAPES["4d"])[0].to(dtype).chunk(2)[rank].requires_grad_()
    output = norm(batch)
    output.float().square().sum().backward()
    return output.dtype, batch.grad.dtype, norm.running_mean, norm.running_var


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_of_half_inputs_are_taken_in_fp32(pair: Pair, dtype: torch.dtype) -> None:
    norm = nn.BatchNorm2d(3).double()
    norm(whole_batch(SHAPES["4d"])[0].to(dtype).double())
    for output_dtype, grad_dtype, mean, variance in pair.run(synced_half, dtype):
        assert (output_dtype, grad_dtype, mean.dtype) == (dtype, dtype, torch.float32)
        torch.testing.assert_close(mean.double(), norm.running_mean, rtol=1e-5, atol=0)
        torch.testing.assert_close(variance.double(), norm.running_var, rtol=1e-4, atol=0)


def without_sync(rank: int) -> Any:
    norm = parallel().SyncBatchNorm(3).eval()
    untracked = parallel().SyncBatchNorm(3, affine=False, track_running_stats=False)
    batch = whole_batch(SHAPES["4d"])[0].chunk(2)[rank]
    return norm(batch).detach(), untracked(batch)


def test_eval_needs_no_other_process_and_statistics_need_no_buffers(pair: Pair) -> None:
    batch = whole_batch(SHAPES["4d"])[0]
    plain, shared = (torch.cat(parts) for parts in zip(*pair.run(without_sync), strict=True))
    torch.testing.assert_close(plain, batch / (1 + 1e-5) ** 0.5)
    torch.testing.assert_close(
        shared, F.batch_norm(batch.double(), None, None, training=True).float(), rtol=0, atol=1e-3
    )


def grouped(rank: int, group_size: int) -> Any:
    group = parallel().create_syncbn_process_group(group_size)
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
    model = parallel().convert_syncbn_model(model, process_group=group)
    model(torch.tensor([[0.0], [2.0]]) + 10 * rank)
    return None if group is None else group.size(), model[0].running_mean.item()


@pytest.mark.parametrize(
    ("group_size", "expected"),
    [(0, [(None, 6.0), (None, 6.0)]), (1, [(1, 1.0), (1, 11.0)]), (2, [(2, 6.0), (2, 6.0)])],
)
def test_groups_normalize_by_themselves(pair: Pair, group_size: int, expected: Any) -> None:
    assert pair.run(grouped, group_size) == expected


def refused_groups(rank: int) -> list[str]:
    messages = []
    for group_size in (3, -1):
        with pytest.raises(ValueError, match="group_size") as caught:
            parallel().create_syncbn_process_group(group_size)
        messages.append(str(caught.value))
    return messages


def test_groups_that_do_not_divide_the_processes_are_refused(pair: Pair) -> None:
    for too_large, negative in pair.run(refused_groups):
        assert "(3) must not exceed the world size (2)" in too_large
        assert "(-1) must be positive" in negative


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def train_synced(rank: int, level: str) -> Any:
    from amp_patch import amp

    model = parallel().convert_syncbn_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapped = parallel().DistributedDataParallel(model)
    dtypes = [param.dtype for param in model.parameters()]
    batch = whole_batch((8, 3))[0].chunk(2)[rank] - OFFSET
    for _ in range(20):
        optimizer.zero_grad()
        loss = (wrapped(batch).float() - batch[:, :1]).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    state = {name: value.float().clone() for name, value in model.state_dict().items()}
    amp.deactivate()
    return dtypes, state


def trained_with_plain_norms() -> dict[str, Tensor]:
    """Train in one process, in fp32, on the whole batch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = whole_batch((8, 3))[0] - OFFSET
    for _ in range(20):
        optimizer.zero_grad()
        (model(batch) - batch[:, :1]).square().mean().backward()
        optimizer.step()
    return {name: value.float() for name, value in model.state_dict().items()}


FLOAT, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = {
    "O0": [FLOAT] * 6,
    "O1": [FLOAT] * 6,
    "O2": [HALF] * 2 + [FLOAT] * 2 + [HALF] * 2,
    "O3": [HALF] * 6,
    "O4": [FLOAT] * 6,
    "O5": [BFLOAT16] * 2 + [FLOAT] * 2 + [BFLOAT16] * 2,
}
#: Largest difference of a weight or a statistic, which is 1 or so, to fp32 after twenty steps.
TOLERANCE = {"O0": 1e-5, "O1": 1e-2, "O2": 1e-2, "O3": 1e-2, "O4": 2e-2, "O5": 2e-2}


@pytest.mark.parametrize("level", sorted(DTYPES))
def test_two_processes_train_as_one_with_plain_norms(pair: Pair, level: str) -> None:
    (dtypes, state), (_, other) = pair.run(train_synced, level)
    assert dtypes == DTYPES[level]
    assert all(torch.equal(state[name], other[name]) for name in state)
    for name, expected in trained_with_plain_norms().items():
        assert (state[name] - expected).abs().max() < TOLERANCE[level], name


@given(
    st.sampled_from(sorted(SHAPES)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_process_is_a_plain_batch_norm(
    apex: ModuleType,
    name: str,
    channel_last: bool,
    fuse_relu: bool,
    adds: bool,
    is_training: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, other = (torch.randn(SHAPES[name], generator=generator) for _ in range(2))
    norm = filled(
        apex.parallel.SyncBatchNorm(3, channel_last=channel_last, fuse_relu=fuse_relu)
    ).train(is_training)
    plain = filled(nn.BatchNorm1d(3)).train(is_training)
    flat = batch.movedim(1, -1).reshape(-1, 3)
    expected = plain(flat).view(batch.movedim(1, -1).shape)
    arranged = [one.movedim(1, -1) if channel_last else one for one in (batch, other)]
    expected = expected if channel_last else expected.movedim(-1, 1)
    expected = expected + arranged[1] if adds else expected
    expected = expected.clamp(min=0) if fuse_relu else expected
    got = norm(*arranged[: 1 + adds])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var, plain.running_var)


def test_conversion_keeps_all_but_the_class(apex: ModuleType) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm3d(4, eps=0.1, momentum=0.3, affine=False)
            self.instance = nn.InstanceNorm2d(4)

    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), Inner())
    model[1].eval()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    converted = apex.parallel.convert_syncbn_model(model, channel_last=True)
    assert converted is model
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    first, second = model[1], model[2].norm
    assert type(first) is type(second) is apex.parallel.SyncBatchNorm
    assert (first.training, second.training, first.channel_last) == (False, True, True)
    assert (second.eps, second.momentum, second.affine) == (0.1, 0.3, False)
    assert type(model[2].instance) is nn.InstanceNorm2d


def test_a_batch_norm_itself_is_converted(apex: ModuleType) -> None:
    norm = nn.BatchNorm1d(3)
    converted = apex.parallel.convert_syncbn_model(norm)
    assert isinstance(converted, apex.parallel.SyncBatchNorm)
    assert converted.weight is norm.weight


def test_torchs_wrapper_takes_a_model_with_it_on_the_cpu(apex: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(2, 2), apex.parallel.SyncBatchNorm(2))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(model)(torch.randn(4, 2)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert model[0].weight.grad is not None


def test_scripts_find_it_under_both_modules(apex: ModuleType) -> None:
    for name in ("sync_batchnorm", "optimized_sync_batchnorm"):
        module = importlib.import_module(f"apex.parallel.{name}")
        assert module.SyncBatchNorm is apex.parallel.SyncBatchNorm
