"""Casts of large weights give their memory back in the backward; here every weight is large."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from cache_programs import (
    Net,
    Program,
    Run,
    TwiceNet,
    TwiceRun,
    bits,
    maker,
    programs,
    run_both,
    shared_fixtures,
    steps_without_gradients,
)
from cast_counter import CastCounter
from casting_support import Product
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import amp_patch.debug
from amp_patch.casting import cached_casts
from amp_patch.casting.cached_casts import Entry
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.kernels.graph_capture import captures
from amp_patch.session import session

HALF = torch.float16


@pytest.fixture(params=[1, 1 << 40], ids=["one by one", "together"], autouse=True)
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every weight is large; whether all of a model are of one batch."""
    monkeypatch.setattr(cached_casts, "LARGE", 1)
    monkeypatch.setattr(cached_casts, "LARGE_ON_GPU", 1)
    monkeypatch.setattr(cached_casts, "TOGETHER", request.param)
    monkeypatch.setattr(cached_casts, "TOGETHER_ON_GPU", request.param)
    return bool(request.param > 1)


@pytest.fixture
def model(cache: WeightCache, device: torch.device) -> nn.Linear:
    model = nn.Linear(3, 3).to(device)
    cache.add_model(model)
    return model


@pytest.fixture(params=[0, 2], ids=["first iteration", "third iteration"])
def warm_up(
    request: pytest.FixtureRequest, cache: WeightCache, model: nn.Linear
) -> Callable[[], None]:
    """Let iterations pass: from the second on, casts are refreshed by lists made once."""

    def iterate() -> None:
        for _ in range(request.param):
            forward(cache, model).backward()
            cache.mark_stale()
            model.zero_grad()

    return iterate


def forward(cache: WeightCache, model: nn.Linear) -> Tensor:
    x = torch.randn(2, 3, dtype=HALF, device=model.weight.device, requires_grad=True)
    y = F.linear(x, cache.cast(model.weight, HALF), cache.cast(model.bias, HALF))
    return y.float().square().sum()


def bytes_of(cache: WeightCache) -> int:
    return sum(cast.untyped_storage().nbytes() for cast in cache.casts())


OF_ALL = 2 * (9 + 3)  # of the casts of the linear layer


# -- when --------------------------------------------------------------------------------------


def test_memory_goes_in_the_backward_and_comes_with_the_next_use(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[[], None]
) -> None:
    warm_up()
    for _ in range(2):
        loss = forward(cache, model)
        assert bytes_of(cache) == OF_ALL
        loss.backward()
        assert bytes_of(cache) == 0
        cache.mark_stale()


def test_each_goes_as_soon_as_its_gradient_is_known(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[[], None]
) -> None:
    later = nn.Linear(3, 3).to(model.weight.device)
    cache.add_model(later)
    warm_up()
    found: list[int] = []
    x = torch.randn(2, 3, dtype=HALF, device=model.weight.device, requires_grad=True)
    hidden = F.linear(x, cache.cast(model.weight, HALF), cache.cast(model.bias, HALF))
    hidden.register_hook(lambda _: found.append(bytes_of(cache)))
    F.linear(hidden, cache.cast(later.weight, HALF)).float().sum().backward()
    assert found == [OF_ALL]  # the later ones are gone
    assert bytes_of(cache) == 0


def layers(cache: WeightCache, device: torch.device, last: int = 3) -> nn.Sequential:
    widths = [3, 3, 3, 3, last]
    model = nn.Sequential(*(nn.Linear(*both, bias=False) for both in pairwise(widths))).to(device)
    cache.add_model(model)
    return model


def pass_through(cache: WeightCache, model: nn.Sequential, found: list[int]) -> None:
    """Run forward and backward; note the bytes of casts after the backward of each layer."""
    hidden = torch.randn(2, 3, dtype=HALF, device=model[0].weight.device, requires_grad=True)
    for layer in model:
        hidden.register_hook(lambda _: found.append(bytes_of(cache)))
        hidden = F.linear(hidden, cache.cast(layer.weight, HALF))
    hidden.float().sum().backward()
    cache.mark_stale()


def test_a_batch_goes_with_its_first_layers_gradient(
    cache: WeightCache, device: torch.device, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if together:  # 18 numbers, two layers
        monkeypatch.setattr(cached_casts, "TOGETHER", 18)
        monkeypatch.setattr(cached_casts, "TOGETHER_ON_GPU", 18)
    model = layers(cache, device)
    for _ in range(3):
        found: list[int] = []
        pass_through(cache, model, found)
        left = [4, 2, 2] if together else [3, 2, 1]
        assert found[:3] == [2 * 9 * count for count in left]
        assert bytes_of(cache) == 0


def test_a_cast_larger_than_a_batch_waits_for_no_other(
    cache: WeightCache, device: torch.device, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a language model's head, beside whose gradient little memory is left."""
    if together:
        monkeypatch.setattr(cached_casts, "TOGETHER", 36)
        monkeypatch.setattr(cached_casts, "TOGETHER_ON_GPU", 36)
    found: list[int] = []
    pass_through(cache, layers(cache, device, last=30), found)
    assert found[0] == 2 * 9 * 3
    assert bytes_of(cache) == 0


def test_those_of_a_batch_whose_first_was_replaced_go_all_the_same(
    cache: WeightCache, device: torch.device, together: bool
) -> None:
    model = layers(cache, device)
    for place in (0, 2, 0):
        pass_through(cache, model, [])
        model[place].weight = nn.Parameter(torch.ones(3, 3, device=device))
        found: list[int] = []
        pass_through(cache, model, found)
        assert found[0] == 2 * 9 * (4 if together else 3)
        assert bytes_of(cache) == 0


def test_a_cast_that_is_made_later_does_not_wait_for_a_batch_before(
    cache: WeightCache, device: torch.device
) -> None:
    """It may be of a layer that the forward comes to before the batch's first."""
    model = layers(cache, device)
    pass_through(cache, model[1:], [])
    for _ in range(2):
        pass_through(cache, model, [])
        assert bytes_of(cache) == 0


def test_a_graph_that_will_be_read_again_keeps_the_memory(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[[], None]
) -> None:
    warm_up()
    loss = forward(cache, model)
    loss.backward(retain_graph=True)
    first = model.weight.grad.clone()
    assert bytes_of(cache) >= 2 * 9  # no backward reads a bias
    model.weight.grad = None
    loss.backward()
    assert torch.equal(model.weight.grad, first)
    assert bytes_of(cache) == 0


def test_two_graphs_of_the_same_weights_keep_it_until_both_are_done(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[[], None]
) -> None:
    warm_up()
    first, second = forward(cache, model), forward(cache, model)
    first.backward()
    assert bytes_of(cache) >= 2 * 9
    second.backward()
    assert bytes_of(cache) == 0


@pytest.mark.parametrize(
    "keep", [lambda cast: cast, lambda cast: cast.detach(), lambda cast: cast[0], Tensor.tolist]
)
def test_what_a_caller_holds_of_a_cast_stays_as_it_is(
    cache: WeightCache,
    model: nn.Linear,
    warm_up: Callable[[], None],
    keep: Callable[[Tensor], Any],
) -> None:
    warm_up()
    held = keep(cache.cast(model.weight, HALF))
    expected = torch.tensor(model.weight.to(HALF).tolist(), dtype=HALF)
    for _ in range(2):
        forward(cache, model).backward()
        model.weight.data.neg_()
        cache.mark_stale()
    found = held if isinstance(held, Tensor) else torch.tensor(held, dtype=HALF)
    assert torch.equal(found.detach().cpu(), expected[0] if found.dim() == 1 else expected)


def test_memory_that_is_held_without_its_tensor_is_not_written_over(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[[], None]
) -> None:
    """``data`` is no view: nothing leads from it to the cast."""
    warm_up()
    held = cache.cast(model.weight, HALF).data
    expected = held.clone()
    model.weight.data.neg_()
    cache.mark_stale()
    assert torch.equal(cache.cast(model.weight, HALF), model.weight.to(HALF))
    assert torch.equal(held, expected)


class SavingAnAlias(Product):
    """Saves its weight by another tensor of the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight.detach())
        return x @ weight


@pytest.mark.parametrize("is_refreshed", [True, False])
def test_a_graph_that_saved_an_alias_reads_the_weight_of_its_forward(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[[], None], is_refreshed: bool
) -> None:
    warm_up()
    x = torch.randn(2, 3, dtype=HALF, device=model.weight.device, requires_grad=True)

    def loss() -> Tensor:
        return SavingAnAlias.apply(x, cache.cast(model.weight, HALF)).float().sum()

    first = loss()
    expected = model.weight.detach().to(HALF).sum(1).expand(2, 3)
    loss().backward()
    x.grad = None
    if is_refreshed:
        model.weight.data.neg_()
        cache.mark_stale()
    loss()
    first.backward()
    assert torch.allclose(x.grad, expected, atol=1e-3)


def test_nothing_goes_while_a_graph_is_captured(
    cache: WeightCache, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replays read the casts at the addresses of the capture."""
    monkeypatch.setattr(captures, "are_made", lambda device: True)
    forward(cache, model).backward()
    assert bytes_of(cache) == OF_ALL


def test_the_cast_of_a_frozen_weight_goes_with_the_last_graph_that_took_it(
    cache: WeightCache, model: nn.Linear
) -> None:
    """No gradient would tell when it could go."""
    model.requires_grad_(False)
    hidden = x = torch.randn(2, 3, dtype=HALF, device=model.weight.device, requires_grad=True)
    with CastCounter(model.parameters()) as counter:
        for _ in range(3):
            hidden = F.linear(hidden, cache.cast(model.weight, HALF))
    assert counter.of_weights == 1
    cast = weakref.ref(cache.cast(model.weight, HALF))
    gc.collect()
    assert cast() is not None
    hidden.float().sum().backward()
    del hidden
    gc.collect()
    assert cast() is None
    assert x.grad is not None


def test_a_frozen_weight_that_was_written_to_is_cast_again(
    cache: WeightCache, model: nn.Linear
) -> None:
    model.weight.requires_grad_(False)
    kept: list[Tensor] = []

    def found(dtype: torch.dtype = HALF) -> Tensor:
        kept.append(cache.cast(model.weight, dtype))
        return kept[-1]

    before = found()
    model.weight.mul_(2)
    assert torch.equal(found(), 2 * before)
    model.weight.data.mul_(2)  # leaves no trace
    cache.mark_stale()
    cache.cast(model.bias, HALF)  # a refresh, by another weight
    assert torch.equal(found(), 4 * before)
    model.weight.data = model.weight.data * 2
    assert torch.equal(found(), 8 * before)
    assert found(torch.bfloat16).dtype is torch.bfloat16
    assert found().dtype is HALF


def test_a_frozen_weight_at_the_address_of_a_dead_one_is_told_apart(
    cache: WeightCache, model: nn.Linear
) -> None:
    values = model.weight.detach().clone()
    data = values.data  # the same numbers, and a version of its own
    model.weight = nn.Parameter(data, requires_grad=False)
    address, cast = id(model.weight), cache.cast(model.weight, HALF)
    model.weight = None
    values.mul_(2)
    others = [nn.Parameter(data, requires_grad=False)]
    while id(others[-1]) != address and len(others) < 10_000:
        others.append(nn.Parameter(data, requires_grad=False))
    model.weight = others[-1]
    assert id(model.weight) == address
    assert torch.equal(cache.cast(model.weight, HALF), 2 * cast)


def test_a_frozen_cast_that_a_mode_made_something_else_of_is_not_kept(
    cache: WeightCache, model: nn.Linear
) -> None:
    class Other(Tensor):
        pass

    class Wrapping(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(Other) if func is Tensor.to else result

    model.requires_grad_(False)
    with Wrapping():
        held = cache.cast(model.weight, HALF)
    assert type(held) is Other
    assert type(cache.cast(model.weight, HALF)) is Tensor


# -- how often a weight is cast ------------------------------------------------------------------


def trained(amp: ModuleType, fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    return amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)


def count(amp: ModuleType, model: Any, optimizer: Any, passes: int) -> list[tuple[int, int]]:
    """Make one step; return the single casts and the bulk copies of weights in each pass."""
    optimizer.zero_grad()
    found = []
    for number in range(1, passes + 1):
        with CastCounter(model.parameters()) as counter:
            loss = model(torch.randn(3, 4)).float().square().sum()
            with amp.scale_loss(loss, optimizer, delay_unscale=number < passes) as scaled:
                scaled.backward()
        found.append((counter.of_weights, counter.bulk_copies))
    optimizer.step()
    return found


@pytest.mark.parametrize("fused", [True, False])  # fused steps move no version
def test_later_iterations_still_refresh_all_weights_by_one_call(
    amp: ModuleType, fused: bool
) -> None:
    model, optimizer = trained(amp, fused)
    assert count(amp, model, optimizer, 1) == [(4, 0)]
    for _ in range(3):
        assert count(amp, model, optimizer, 1) == [(0, 1)]


def test_a_cast_that_no_graph_reads_goes_before_the_backward(amp: ModuleType) -> None:
    model, optimizer = trained(amp)
    for _ in range(2):
        count(amp, model, optimizer, 1)
    loss = model(torch.randn(3, 4)).float().square().sum()
    assert bytes_of(session.cache) == 2 * (16 + 4 + 8 + 2)
    with amp.scale_loss(loss, optimizer) as scaled:
        # The weight of the first layer is for the gradient of its input, which gets none.
        assert bytes_of(session.cache) == 2 * 8
        scaled.backward()


def test_a_pass_that_reads_them_or_adds_up_changes_nothing_for_later_ones(amp: ModuleType) -> None:
    model, optimizer = trained(amp)

    def kept(x: Tensor, passes: int = 1) -> int:
        optimizer.zero_grad()
        for number in range(1, passes + 1):
            loss = model(x).float().square().sum()
            with amp.scale_loss(loss, optimizer, delay_unscale=number < passes) as scaled:
                found = bytes_of(session.cache)
                scaled.backward()
        optimizer.step()
        return found

    for _ in range(3):
        kept(torch.randn(3, 4))
    assert kept(torch.randn(3, 4, requires_grad=True)) == 2 * (16 + 8)
    kept(torch.randn(3, 4), passes=3)
    kept(torch.randn(3, 4))  # finds that they are not used again
    assert kept(torch.randn(3, 4)) == 2 * 8


def test_two_losses_that_take_turns_give_each_what_it_does_not_read(amp: ModuleType) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    (make, judge), (of_make, of_judge) = amp.initialize(
        models, optimizers, opt_level="O1", verbosity=0
    )
    first = judge[0].weight
    given: list[bool] = []
    for _ in range(24):
        fake = make(torch.randn(3, 4))
        with amp.scale_loss(judge(fake.detach()).float().sum(), of_judge) as scaled:
            given.append(not session.cache._entries[id(first)].has_memory)
            scaled.backward()
        of_judge.step()
        with amp.scale_loss(judge(fake).float().sum(), of_make) as scaled:
            assert session.cache._entries[id(first)].has_memory
            scaled.backward()
        of_make.step()
        of_judge.zero_grad()
        of_make.zero_grad()
    assert given[-3:] == [True] * 3


def test_a_backward_waits_for_a_thread_that_makes_lists_anew(
    amp: ModuleType,
) -> None:
    model, optimizer = trained(amp)
    for _ in range(2):
        count(amp, model, optimizer, 1)
    cache, errors = session.cache, []

    def begin() -> None:
        try:
            cache.begin_backward()
        except AttributeError as error:
            errors.append(error)

    other = threading.Thread(target=begin)
    with cache._lock:
        other.start()
        other.join(0.1)
        assert other.is_alive()
        for group in cache._groups.values():
            group.bulk = None
    other.join()
    assert errors == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_who_runs_a_forward_again_in_the_backward_casts_once_more_and_never_again(
    amp: ModuleType, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_casts, "_FIRST_PAUSE", 4)

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self[0](x)
            hidden = checkpoint(lambda h: self[2](self[1](h)), hidden, use_reentrant=reentrant)
            return self[3](hidden)

    layers = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    model = Checkpointed(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    found = [count(amp, model, optimizer, 1)[0] for _ in range(10)]
    assert found[0] == (8, 0)
    assert found[1][1] == 1
    assert found[2:] == [(0, 1)] * 8


def test_who_accumulates_casts_a_weight_once_more_and_never_again(amp: ModuleType) -> None:
    model, optimizer = trained(amp)
    assert count(amp, model, optimizer, 3) == [(4, 0), (4, 0), (0, 0)]
    for _ in range(2):
        assert count(amp, model, optimizer, 3) == [(0, 1), (0, 0), (0, 0)]


def test_who_stops_to_accumulate_has_the_memory_back(amp: ModuleType) -> None:
    model, optimizer = trained(amp)
    cache = session.cache
    count(amp, model, optimizer, 2)
    for _ in range(2):
        count(amp, model, optimizer, 2)
        assert bytes_of(cache) > 0
    count(amp, model, optimizer, 1)
    count(amp, model, optimizer, 1)
    assert bytes_of(cache) == 0


def test_reads_of_casts_are_counted_as_those_of_casts_that_are_kept(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads() -> tuple[int, int]:
        torch.manual_seed(0)
        model, optimizer = trained(amp)
        count(amp, model, optimizer, 1)
        with amp_patch.debug.op_stats() as stats:
            for _ in range(3):
                count(amp, model, optimizer, 1)
        amp.deactivate()
        return stats.cache_hits, stats.first_reads

    given_back = reads()
    monkeypatch.setattr(cached_casts, "LARGE", 1 << 14)
    monkeypatch.setattr(cached_casts, "LARGE_ON_GPU", 1 << 18)
    assert given_back == reads() > (0, 0)


# -- against the same programs with every cast made afresh ---------------------------------------


@steps_without_gradients
@shared_fixtures
@given(program=programs())
def test_a_program_sees_bit_for_bit_what_it_sees_without_the_cache(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    for what, found, expected in run_both(maker(Run, Net, "O1"), program, monkeypatch):
        assert found.dtype is expected.dtype
        assert torch.equal(bits(found), bits(expected)), what


@steps_without_gradients
@shared_fixtures
@given(program=programs(without=("penalty",)))
def test_weights_used_twice_see_the_same_outputs(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    for what, found, expected in run_both(maker(TwiceRun, TwiceNet, "O4"), program, monkeypatch):
        if what in ("output", "read", "average"):
            assert torch.equal(bits(found), bits(expected)), what


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_weight_that_several_checkpoints_share_has_the_gradient_of_plain_calls(
    amp: ModuleType, reentrant: bool
) -> None:
    """A reentrant one runs a backward of its own: the cast gives its memory back in the first."""
    model, _ = trained(amp)
    x = torch.randn(3, 4, requires_grad=True)

    def gradient(run: Callable[..., Tensor]) -> Tensor:
        model.zero_grad()
        hidden = x
        for _ in range(3):
            hidden = run(model[0], hidden).tanh()
        hidden.float().sum().backward()
        return model[0].weight.grad

    expected = gradient(lambda layer, hidden: layer(hidden)).clone()
    for _ in range(2):
        found = gradient(lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=reentrant))
        assert torch.allclose(found, expected, rtol=2.0**-9, atol=1e-3)


# -- several threads -----------------------------------------------------------------------------


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Let threads take turns after almost each step of the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_backward_in_another_thread_waits_for_a_refresh(
    cache: WeightCache, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would take the memory away between the look for it and the write to it."""
    graph = cache.cast(model.bias, HALF).float().sum()  # reads nothing in its backward
    others: list[threading.Thread] = []
    claim = Entry.claim

    def interrupted(entry: Entry) -> None:
        claim(entry)
        others.append(threading.Thread(target=graph.backward))
        others[-1].start()
        others[-1].join(0.2)

    monkeypatch.setattr(Entry, "claim", interrupted)
    cache.mark_stale()
    found = cache.cast(model.bias, HALF)
    (other,) = others
    other.join()
    assert torch.equal(found, model.bias.to(HALF))


def test_a_cast_that_was_dropped_while_a_thread_takes_it_keeps_its_memory(
    cache: WeightCache, model: nn.Linear
) -> None:
    taken = cache.cast(model.weight, HALF)
    entry = cache._entries[id(model.weight)]  # what the thread holds until it has the cast
    graph = taken.float().sum()
    for _ in range(2):  # held, it is dropped; then all casts are refreshed as one list
        cache.mark_stale()
        assert cache.cast(model.weight, HALF) is not taken
    assert entry.group.bulk is not None
    graph.backward()
    assert torch.equal(taken, model.weight.to(HALF))


@pytest.mark.usefixtures("often_switched")
# of a thread that has never used the device
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA")
def test_threads_that_share_a_model_never_see_a_cast_without_memory(
    cache: WeightCache, model: nn.Linear
) -> None:
    x = torch.randn(2, 3, dtype=HALF, device=model.weight.device, requires_grad=True)
    expected = F.linear(x, model.weight.to(HALF)).detach()
    failures: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(400):
                found = F.linear(x, cache.cast(model.weight, HALF))
                assert torch.equal(found, expected)
                torch.autograd.grad(found.float().sum(), model.weight)
                # As after a block, so that memory goes again where it was taken anew.
                cache.mark_stale()
                for group in cache._groups.values():
                    group.accumulates = False
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
