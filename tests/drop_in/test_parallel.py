"""apex.parallel between two processes over gloo: the wrapper, the Reducer, the flat calls."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pair import Pair
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parent.parent.parent
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# Weights after five steps differ by so much from those of an fp32 run: half a unit in the last
# place of weights up to 0.5 at O2 and O3 would be 1.2e-4 in fp16 and 1e-3 in bf16.
TOLERANCE = {"O0": 1e-6, "O1": 5e-4, "O2": 5e-4, "O3": 2e-3, "O4": 4e-3, "O5": 4e-3}
HALF = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16}
HALF |= {"O4": torch.bfloat16, "O5": torch.bfloat16}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


def parallel() -> ModuleType:
    return importlib.import_module("apex.parallel")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)


def seeded_network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return network()


def expected_weights(steps: int = 5) -> dict[str, Tensor]:
    """Train in one process, in fp32, on the whole batch, from the weights of rank 0."""
    model = seeded_network(100)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def train(rank: int, level: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], torch.dtype]:
    """Train on this rank's half of the batch; every rank starts from other weights."""
    from amp_patch import amp

    model = seeded_network(100 + rank)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    wrapped = parallel().DistributedDataParallel(model, **options)
    inputs, targets = (whole.chunk(2)[rank] for whole in batch())
    try:
        for _ in range(5):
            optimizer.zero_grad()
            loss = (wrapped(inputs).float() - targets).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        return wrapped.state_dict(), seen[0]
    finally:
        amp.deactivate()


def assert_trained(results: list[Any], level: str) -> None:
    (first, dtype), (second, _) = results
    assert dtype == HALF.get(level, torch.float32)
    for name, expected in expected_weights().items():
        assert torch.equal(first[f"module.{name}"], second[f"module.{name}"])
        torch.testing.assert_close(
            first[f"module.{name}"], expected, rtol=0, atol=TOLERANCE[level], check_dtype=False
        )


def skipped_steps(rank: int, level: str) -> tuple[list[bool], float]:
    """Train a part of a model that is on two ranks, of which rank 1 overflows in the third step."""
    amp = importlib.import_module("apex.amp")
    model = seeded_network(rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    own = scaler.update_scale

    def update_scale() -> bool:
        dist.all_reduce(scaler._overflow_buf, op=dist.ReduceOp.MAX)
        return own()

    scaler.update_scale = update_scale
    skipped = []
    try:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch()[0]).float().square().mean()
            factor = float("inf") if (step, rank) == (2, 1) else 2.0**-8
            with amp.scale_loss(loss * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
            before = [param.detach().clone() for param in amp.master_params(optimizer)]
            optimizer.step()
            skipped.append(all(map(torch.equal, before, amp.master_params(optimizer))))
        return skipped, scaler.loss_scale()
    finally:
        importlib.import_module("amp_patch.amp").deactivate()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_skip_together_where_a_script_shares_their_overflows(pair: Pair, level: str) -> None:
    assert pair.run(skipped_steps, level) == [([False, False, True, False], 2.0**15)] * 2


def train_sharded(rank: int, name: str, level: str) -> dict[str, Tensor]:
    """Train with a sharded optimizer by `apex.amp` or `amp_patch.amp`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer

    amp = importlib.import_module(name)
    model = seeded_network(0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    inputs, targets = (whole.chunk(2)[rank] for whole in batch())
    wrapped = parallel().DistributedDataParallel(model)
    try:
        for _ in range(3):
            optimizer.zero_grad()
            loss = (wrapped(inputs).float() - targets).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            if name == "apex.amp":
                stash = optimizer._amp_stash
                assert not stash.already_patched
                assert len(stash.all_fp16_params) == len(stash.all_fp32_from_fp16_params) > 0
            optimizer.step()
        return model.state_dict()
    finally:
        importlib.import_module("amp_patch.amp").deactivate()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_sharded_optimizer_trains_as_without_the_drop_in(pair: Pair, level: str) -> None:
    found = pair.run(train_sharded, "apex.amp", level)
    expected = pair.run(train_sharded, "amp_patch.amp", level)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
    assert not torch.equal(found[0]["0.weight"], seeded_network(0)[0].weight)


@pytest.mark.parametrize("level", LEVELS)
def test_two_processes_train_as_one_with_the_whole_batch(pair: Pair, level: str) -> None:
    assert_trained(pair.run(train, level, {}), level)


@pytest.mark.parametrize(
    "options",
    [
        {"delay_allreduce": True},
        {"shared_param": True},
        {"message_size": 50},
        {"allreduce_always_fp32": True, "gradient_predivide_factor": 2.0},
        {"gradient_average_split_factor": 2.0, "num_allreduce_streams": 2, "prof": True},
        {"retain_allreduce_buffers": True, "allreduce_trigger_params": []},
    ],
    ids=str,
)
def test_every_option_trains(pair: Pair, options: dict[str, Any]) -> None:
    assert_trained(pair.run(train, "O2", options), "O2")


class Scaled(nn.Module):
    """Multiplies by its parameters: the gradient of each is its factor."""

    def __init__(self, *values: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.tensor([v], dtype=dtype) for v in values)

    def forward(self, *factors: float | None) -> Tensor:
        return torch.stack(
            [w.float() * f for w, f in zip(self.weights, factors, strict=True) if f is not None]
        ).sum()


def grads_of(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def reduced(rank: int, dtype: torch.dtype, mine: list[Any], options: dict[str, Any]) -> Any:
    model = Scaled(*[1.0] * len(mine[rank]), dtype=dtype)
    parallel().DistributedDataParallel(model, **options)(*mine[rank]).backward()
    return grads_of(model)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4.0, 5.0]),
        ({"gradient_average": False}, [8.0, 10.0]),
        ({"gradient_predivide_factor": 4.0}, [4.0, 5.0]),
        # as in apex, what is divided before the sum is not multiplied again
        ({"gradient_predivide_factor": 4.0, "gradient_average": False}, [2.0, 2.5]),
        ({"delay_allreduce": True}, [4.0, 5.0]),
    ],
)
def test_options_say_what_the_sum_is_divided_by(
    pair: Pair, options: dict[str, Any], expected: list[float]
) -> None:
    mine = [[1.0, 2.0], [7.0, 8.0]]
    assert pair.run(reduced, torch.float32, mine, options) == [expected, expected]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, float("inf")),
        ({"allreduce_always_fp32": True}, 40_000.0),
        ({"gradient_predivide_factor": 2.0}, 40_000.0),
    ],
)
def test_sums_beyond_fp16(pair: Pair, options: dict[str, Any], expected: float) -> None:
    mine = [[40_000.0], [40_000.0]]
    assert pair.run(reduced, torch.float16, mine, options) == [[expected], [expected]]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("message_size", [1, 100])
def test_parameters_that_a_loss_does_not_reach(pair: Pair, delay: bool, message_size: int) -> None:
    mine = [[1.0, 2.0, None, None], [3.0, None, 4.0, None]]
    options = {"delay_allreduce": delay, "message_size": message_size}
    expected = [2.0, 1.0, 2.0, None]
    assert pair.run(reduced, torch.float32, mine, options) == [expected, expected]


def count_sums(rank: int, options: dict[str, Any], how: str = "") -> list[str]:
    """Name what happens in one backward, in its order."""
    events = []
    model = Scaled(*[1.0] * 5)
    wrapped = parallel().DistributedDataParallel(model, **options)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: events.append("grad"))
    loss = wrapped(*[1.0] * 5)
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        events.append("sum")
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        if how == "autograd.grad":
            torch.autograd.grad(loss, list(model.parameters()))
        else:
            with wrapped.no_sync() if how == "no_sync" else contextlib.nullcontext():
                loss.backward()
    finally:
        dist.all_reduce = original
    return events


def test_buckets_are_summed_while_the_backward_runs(pair: Pair) -> None:
    for events in pair.run(count_sums, {"message_size": 1}):
        assert events.count("sum") == 5
        assert events[-1] == "grad"  # the hook of the test, after the last sum
    for events in pair.run(count_sums, {"message_size": 2}):
        assert events.count("sum") == 3
    for events in pair.run(count_sums, {"message_size": 1, "delay_allreduce": True}):
        assert events == ["grad"] * 5 + ["sum"] * 5


def test_nothing_is_summed_where_nothing_is_written_or_averaging_is_off(pair: Pair) -> None:
    assert pair.run(count_sums, {}, "autograd.grad") == [[], []]
    assert pair.run(count_sums, {}, "no_sync") == [["grad"] * 5] * 2


def accumulate(rank: int, way: str) -> Any:
    model = Scaled(1.0)
    wrapped = parallel().DistributedDataParallel(model)
    if way == "no_sync":
        with wrapped.no_sync():
            wrapped(1.0 + rank).backward()
    else:
        wrapped.disable_allreduce()
        wrapped(1.0 + rank).backward()
        wrapped.enable_allreduce()
    local = model.weights[0].grad.item()
    wrapped(10.0 + rank).backward()
    return local, model.weights[0].grad.item()


@pytest.mark.parametrize("way", ["no_sync", "disable_allreduce"])
def test_gradients_gather_while_averaging_is_off(pair: Pair, way: str) -> None:
    assert pair.run(accumulate, way) == [(1.0, 12.0), (2.0, 12.0)]


def accumulate_scaled(rank: int, level: str) -> Any:
    from amp_patch import amp

    model = Scaled(1.0)
    optimizer = SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    wrapped = parallel().DistributedDataParallel(model)
    wrapped.disable_allreduce()
    with amp.scale_loss(wrapped(1.0 + rank), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    wrapped.enable_allreduce()
    with amp.scale_loss(wrapped(10.0 + rank), optimizer) as scaled_loss:
        scaled_loss.backward()
    grads = [master.grad.item() for master in amp.master_params(optimizer)]
    amp.deactivate()
    return grads


def overflow_while_averaging_is_off(rank: int, way: str) -> Any:
    from amp_patch import amp

    model = Scaled(1.0)
    optimizer = SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    wrapped = parallel().DistributedDataParallel(model)
    with wrapped.no_sync() if way == "no_sync" else contextlib.nullcontext():
        if way == "disable_allreduce":
            wrapped.disable_allreduce()
        loss = wrapped(float("inf") if rank == 1 else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    wrapped.enable_allreduce()
    with amp.scale_loss(wrapped(1.0), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    found = amp.step_was_skipped(optimizer), amp.loss_scale()
    amp.deactivate()
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_scaled_gradients_gather_with_delay_unscale(pair: Pair, level: str) -> None:
    assert pair.run(accumulate_scaled, level) == [[12.0], [12.0]]


@pytest.mark.parametrize("way", ["no_sync", "disable_allreduce"])
def test_no_process_decides_by_what_it_alone_has(pair: Pair, way: str) -> None:
    assert pair.run(overflow_while_averaging_is_off, way) == [(True, 2.0**15)] * 2


def forwards_and_backwards(rank: int) -> Any:
    grads = []
    model = Scaled(1.0)
    wrapped = parallel().DistributedDataParallel(model)
    mine = 1.0 + rank  # on average 1.5
    (wrapped(mine) + wrapped(mine)).backward()
    grads.append(grads_of(model))
    model.zero_grad()
    first, second = wrapped(mine), wrapped(10 * mine)
    first.backward()
    second.backward()
    grads.append(grads_of(model))
    model.zero_grad()
    loss = wrapped(mine)
    loss.backward(retain_graph=True)
    loss.backward()
    grads.append(grads_of(model))
    model.zero_grad()
    model(mine).backward()  # not by the wrapper's forward
    grads.append(grads_of(model))
    return grads


def test_forwards_and_backwards_in_any_order(pair: Pair) -> None:
    expected = [[3.0], [16.5], [3.0], [1.5]]
    assert pair.run(forwards_and_backwards) == [expected, expected]


class Checkpointed(nn.Module):
    """Uses one weight in two parts that backward computes again, and one outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, use_reentrant: bool) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: y * self.inner, x, use_reentrant=use_reentrant)
        return x * self.outer


def checkpointed(rank: int, use_reentrant: bool, options: dict[str, Any]) -> Any:
    model = Checkpointed()
    wrapped = parallel().DistributedDataParallel(model, **options)
    for _ in range(2):
        model.zero_grad()
        wrapped(torch.full((1,), 1.0 + rank, requires_grad=True), use_reentrant).sum().backward()
    return grads_of(model)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"message_size": 1}, {"delay_allreduce": True}], ids=str)
def test_checkpoints(pair: Pair, use_reentrant: bool, options: dict[str, Any]) -> None:
    # twice x for the weight used twice, x for the other; x is 1.5 on average
    assert pair.run(checkpointed, use_reentrant, options) == [[3.0, 1.5]] * 2


def checkpointed_as_a_whole(rank: int, use_reentrant: bool) -> Any:
    """Use one weight after a checkpoint of the wrapper, one inside of it, one before it."""
    model = Scaled(1.0, 1.0, 1.0)
    wrapped = parallel().DistributedDataParallel(model, gradient_average=False)
    behind, _, before = model.weights
    output = checkpoint(
        lambda x: x * wrapped(None, 1.0 + rank, None),
        before * torch.ones(1, requires_grad=True),
        use_reentrant=use_reentrant,
    )
    (output * behind).sum().backward()
    return grads_of(model)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_wrapper(pair: Pair, use_reentrant: bool) -> None:
    # the product of the weights and 1 or 2, summed once
    assert pair.run(checkpointed_as_a_whole, use_reentrant) == [[3.0, 3.0, 3.0]] * 2


def around_failures(rank: int) -> Any:
    model = Scaled(1.0, 1.0)
    wrapped = parallel().DistributedDataParallel(model)
    mine = 1.0 + rank
    hook = model.weights[0].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrapped(mine, mine).backward()
    hook.remove()
    model.zero_grad()
    wrapped(mine, mine).backward()
    after_failure = grads_of(model)
    model.zero_grad()
    torch.autograd.grad(wrapped(mine, mine), list(model.parameters()))
    model.weights[0].requires_grad_(False)
    wrapped(mine, mine).backward()
    return after_failure, grads_of(model)


def test_after_failed_backwards_and_frozen_parameters(pair: Pair) -> None:
    expected = ([1.5, 1.5], [None, 1.5])
    assert pair.run(around_failures) == [expected, expected]


def unfrozen_later(rank: int) -> Any:
    model = Scaled(1.0, 1.0)
    model.weights[0].requires_grad_(False)
    wrapped = parallel().DistributedDataParallel(model)
    model.weights[0].requires_grad_(True)
    wrapped(1.0 + rank, 1.0 + rank).backward()
    return grads_of(model)


def test_parameters_that_train_later_are_averaged(pair: Pair) -> None:
    assert pair.run(unfrozen_later) == [[1.5, 1.5]] * 2


def retained(rank: int) -> Any:
    model = Scaled(1.0, 1.0)
    wrapped = parallel().DistributedDataParallel(model, retain_allreduce_buffers=True)
    wrapped(1.0 + rank, 10.0 + rank).backward()
    (flat,) = wrapped.allreduce_buffers
    flat *= 2
    return flat.tolist(), grads_of(model)


def test_retained_buffers_are_what_the_gradients_are_views_of(pair: Pair) -> None:
    # in the order of the backward
    assert pair.run(retained) == [([21.0, 3.0], [3.0, 21.0])] * 2


def started(rank: int, level: str) -> Any:
    from amp_patch import amp

    model = seeded_network(rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    parallel().DistributedDataParallel(model)
    masters = [master.detach().clone() for master in amp.master_params(optimizer)]
    amp.deactivate()
    return masters


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_all_processes_start_from_rank_0_to_the_last_bit_of_the_masters(
    pair: Pair, level: str
) -> None:
    expected = list(seeded_network(0).parameters())
    for got in pair.run(started, level):
        assert all(map(torch.equal, got, expected))


def copied(rank: int, how: str) -> Any:
    wrapped = parallel().DistributedDataParallel(Scaled(1.0), gradient_average=False)
    if how == "deepcopy":
        twin = copy.deepcopy(wrapped)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(wrapped))
    else:
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    twin(1.0 + rank).backward()
    return grads_of(twin), grads_of(wrapped)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_sum_their_own_gradients(pair: Pair, how: str) -> None:
    assert pair.run(copied, how) == [([3.0], [None])] * 2


def in_groups(rank: int) -> Any:
    alone = [dist.new_group([one]) for one in (0, 1)][rank]
    communicators = ([alone, dist.group.WORLD], [None, None])
    model = Scaled(1.0, 1.0)
    wrapped = parallel().DistributedDataParallel(
        model, message_size=1, allreduce_communicators=communicators
    )
    wrapped(1.0 + rank, 1.0 + rank).backward()
    return grads_of(model)


def test_buckets_take_turns_in_the_groups_given(pair: Pair) -> None:
    assert pair.run(in_groups) == [[1.5, 1.0], [1.5, 2.0]]


def by_reducer(rank: int) -> Any:
    model = Scaled(float(rank + 1), 1.0)
    reducer = parallel().Reducer(model)
    model(1.0 + rank, None).backward()
    reducer.reduce()
    listed = [torch.full((2,), 1.0 + rank), torch.full((1,), 1.0 + rank, dtype=torch.float64)]
    parallel().Reducer(listed).reduce()
    return model.weights[0].item(), grads_of(model), [one.tolist() for one in listed]


def test_reducer(pair: Pair) -> None:
    assert pair.run(by_reducer) == [(1.0, [1.5, None], [[1.5, 1.5], [1.5]])] * 2


def by_flat_calls(rank: int) -> Any:
    module = importlib.import_module("apex.parallel.distributed")
    tensors = [
        torch.full((2, 2), rank + 1.0),
        torch.full((3,), rank + 1.0, dtype=torch.float16),
        torch.full((1, 4), rank + 1.0).t(),
    ]
    averaged = [tensor.clone() for tensor in tensors]
    module.flat_dist_call(averaged, dist.all_reduce)
    module.flat_dist_call(tensors, dist.broadcast, (1,))
    return averaged, tensors


def test_flat_dist_call_averages_sums_and_takes_any_call(pair: Pair) -> None:
    for averaged, sent in pair.run(by_flat_calls):
        assert all(torch.equal(got, torch.full_like(got, 1.5)) for got in averaged)
        assert all(torch.equal(got, torch.full_like(got, 2.0)) for got in sent)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_wrapped_model_is_not_stored_in_half(
    apex: ModuleType, amp: ModuleType, alone: None
) -> None:
    wrapped = apex.parallel.DistributedDataParallel(network())
    for model in (wrapped, wrapped.module):
        with pytest.raises(RuntimeError, match="only be applied to the model AFTER"):
            amp.initialize(model, opt_level="O2")


def test_without_a_process_group_there_is_no_wrapper(apex: ModuleType) -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        apex.parallel.DistributedDataParallel(network())


def test_sparse_gradients_are_refused(apex: ModuleType, alone: None) -> None:
    wrapped = apex.parallel.DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    message = r"sums dense gradients; got a sparse one of shape \(3, 2\).*sparse=False"
    with pytest.raises(RuntimeError, match=message):
        wrapped(torch.tensor([1])).sum().backward()


def test_a_dropped_wrapper_leaves_gradients_alone(apex: ModuleType, alone: None) -> None:
    model = Scaled(1.0)
    wrapped = apex.parallel.DistributedDataParallel(model, gradient_predivide_factor=0.0)
    del wrapped  # which would divide by 0
    model(3.0).backward()
    assert grads_of(model) == [3.0]


def test_flat_tensors_and_their_views(apex: ModuleType) -> None:
    module = importlib.import_module("apex.parallel.distributed")
    tensors = [torch.arange(4.0).view(2, 2).t(), torch.ones(())]
    flat = module.flatten(tensors)
    assert flat.tolist() == [0.0, 2.0, 1.0, 3.0, 1.0]
    assert all(map(torch.equal, module.unflatten(flat, tensors), tensors))
    mixed = [torch.ones(1), torch.ones(1).half(), torch.ones(2)]
    assert [[len(one) for one in some] for some in module.split_by_type(mixed).values()] == [
        [1, 2],
        [1],
    ]


SCRIPT = """
import pathlib
import sys
import time

world_size = int(sys.argv[sys.argv.index("--world-size") + 1])
rank = int(sys.argv[sys.argv.index("--rank") + 1])
folder = pathlib.Path(sys.argv[1])
(folder / str(rank)).touch()
while len(list(folder.iterdir())) < world_size:  # they run at the same time
    time.sleep(0.01)
print("rank", rank, "of", world_size)
sys.exit(5 * rank)
"""


def test_multiproc_starts_a_script_once_per_rank(
    apex: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    multiproc = importlib.import_module("apex.parallel.multiproc")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "started").mkdir()
    monkeypatch.chdir(tmp_path)
    code = multiproc.main(["script.py", "started", "--world-size", "2"])
    assert code == 5  # of rank 1
    assert capfd.readouterr().out == "rank 0 of 2\n"
    assert (tmp_path / "GPU_1.log").read_text() == "rank 1 of 2\n"


@pytest.mark.slow(instead="torchrun with a smaller script")
def test_multiproc_runs_as_a_module_of_the_drop_in(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys, apex.parallel\nprint(sys.argv[1:])\n")
    command = [sys.executable, "-m", "amp_patch", "run", "-m", "apex.parallel.multiproc"]
    command += ["script.py", "--rank", "7", "--world-size", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout == "['--rank', '0', '--world-size', '1']\n"
