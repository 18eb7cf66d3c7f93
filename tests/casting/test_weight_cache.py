"""The cache of weight casts, against the same programs run with every cast made afresh."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from cache_programs import (
    SCALE,
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
from hypothesis import given
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_patch import amp as core
from amp_patch.casting.mode import mode, process
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.kernels.reusable import _MANY_USES

HALF = torch.float16


@pytest.fixture
def model(cache: WeightCache, device: torch.device) -> nn.Linear:
    model = nn.Linear(3, 2).to(device)
    cache.add_model(model)
    return model


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refresh casts by torch's multi-tensor copy on a GPU, too: the kernels are not dispatched."""
    monkeypatch.setenv("AMP_PATCH_KERNELS", "torch")


class CastsOf(TorchDispatchMode):
    """Counts the casts of each parameter, and the bulk copies."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.names = {param.untyped_storage()._cdata: index for index, param in enumerate(params)}
        self.single: Counter[int] = Counter()
        self.bulk = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            if (index := self.names.get(source.untyped_storage()._cdata)) is not None:
                self.single[index] += 1
        self.bulk += func is torch.ops.aten._foreach_copy_.default
        return func(*args, **kwargs or {})


@pytest.fixture(params=[0, 2], ids=["first iteration", "third iteration"])
def warm_up(request: pytest.FixtureRequest, cache: WeightCache) -> Callable[..., None]:
    """Let iterations pass: from the second on, casts are refreshed by lists made once."""

    def iterate(*weights: nn.Parameter) -> None:
        for _ in range(request.param):
            for weight in weights:
                cache.cast(weight, HALF)
            cache.mark_stale()

    return iterate


# -- random programs -------------------------------------------------------------------------


@steps_without_gradients
@pytest.mark.parametrize("opt_level", ["O1", "O4"])
@shared_fixtures
@given(program=programs())
def test_a_program_sees_bit_for_bit_what_it_sees_without_the_cache(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, opt_level: str, program: Program
) -> None:
    make = maker(Run, Net, opt_level)
    for what, found, expected in run_both(make, program, monkeypatch):
        assert found.dtype is expected.dtype
        assert torch.equal(bits(found), bits(expected)), what


@steps_without_gradients
@pytest.mark.parametrize(("opt_level", "unit_roundoff"), [("O1", 2.0**-11), ("O4", 2.0**-8)])
@shared_fixtures
@given(program=programs(without=("penalty",)))
def test_weights_used_twice_differ_by_one_half_addition_at_most(
    amp: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    opt_level: str,
    unit_roundoff: float,
    program: Program,
) -> None:
    make = maker(TwiceRun, TwiceNet, opt_level)
    for what, found, expected in run_both(make, program, monkeypatch):
        if what in ("gradient", "autograd.grad"):
            # the last term is half the distance of fp16's subnormal numbers, unscaled
            bound = unit_roundoff * 1.001 * expected.abs() + 2.0**-25 / SCALE
            assert ((found - expected).abs() <= bound).all(), what
        else:
            assert torch.equal(bits(found), bits(expected)), what


# -- graphs that outlive their weights -------------------------------------------------------

USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (4, 3), (5, 3)),
    "conv1d": (F.conv1d, (2, 3, 6), (4, 3, 2)),
    "conv2d": (F.conv2d, (2, 3, 5, 5), (4, 3, 2, 2)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 3, 4, 4), (3, 2, 2, 2)),
    "prelu": (F.prelu, (4, 3), (3,)),
    "bmm": (torch.bmm, (2, 4, 3), (2, 3, 5)),
    "matmul with a vector": (torch.matmul, (4, 3), (3,)),
    "matmul with a transpose": (lambda x, w: x @ w.t(), (4, 3), (5, 3)),
    "einsum": (lambda x, w: torch.einsum("nd,kd->nk", x, w), (4, 3), (5, 3)),
    "product": (torch.mul, (4, 3), (4, 3)),
    "lookup": (
        lambda x, w: F.embedding(torch.tensor([1, 0], device=w.device), w) * x,
        (2, 3),
        (5, 3),
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_graph_gives_the_gradients_of_the_weights_it_was_built_with(
    cache: WeightCache, device: torch.device, warm_up: Callable[..., None], use: str
) -> None:
    function, x_shape, weight_shape = USES[use]
    model = nn.Module()
    model.weight = weight = nn.Parameter(torch.randn(weight_shape, device=device))
    cache.add_model(model)
    warm_up(weight)
    x = torch.randn(x_shape, device=device, dtype=HALF, requires_grad=True)
    expected = torch.autograd.grad(function(x, weight.to(HALF)).sum(), (x, weight))

    pending = function(x, cache.cast(weight, HALF))
    weight.data.neg_()
    cache.mark_stale()
    assert torch.equal(cache.cast(weight, HALF), weight.to(HALF))

    for found, wanted in zip(
        torch.autograd.grad(pending.sum(), (x, weight)), expected, strict=True
    ):
        assert torch.equal(found, wanted)


def losses_of_two_heads(model: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor]:
    features = model["body"](x)
    return tuple(model[name](features).float().square().mean() for name in ("first", "second"))


def test_two_losses_and_two_optimizers_train_as_under_autocast(amp: ModuleType) -> None:
    ours = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("body", "first", "second")})
    theirs = copy.deepcopy(ours)
    x = torch.randn(3, 4)
    optimizers = {
        model: [torch.optim.SGD(model[name].parameters(), lr=0.5) for name in ("body", "second")]
        for model in (ours, theirs)
    }
    amp.initialize(ours, optimizers[ours], opt_level="O1", loss_scale=1.0, verbosity=0)
    for _ in range(3):
        for model in (ours, theirs):
            with torch.autocast("cpu", HALF) if model is theirs else nullcontext():
                first, second = losses_of_two_heads(model, x)
            for loss, optimizer in zip((first, second), optimizers[model], strict=True):
                with amp.scale_loss(loss, optimizers[ours]) if model is ours else nullcontext(loss):
                    loss.backward(retain_graph=loss is first)
                optimizer.step()
        for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize(
    "keep", [lambda cast: cast, lambda cast: cast.detach(), lambda cast: cast[0], Tensor.numpy]
)
def test_what_a_caller_holds_of_a_cast_never_changes(
    cache: WeightCache, warm_up: Callable[..., None], keep: Callable[[Tensor], Any]
) -> None:
    process.devices = frozenset({"cpu"})
    model = nn.Linear(3, 2).requires_grad_(False)
    cache.add_model(model)
    warm_up(*model.parameters())
    held = keep(cache.cast(model.weight, HALF))
    before = copy.deepcopy(held)
    model.weight.data.neg_()
    cache.mark_stale()
    cache.cast(model.weight, HALF)
    assert (held == before).all()


# -- how often a weight is cast --------------------------------------------------------------


class Reuse(nn.Module):
    """Ties two weights, uses one in a loop, and runs a part as a checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.loop, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.last.weight = self.first.weight
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            if self.reentrant is None:
                x = self.loop(x)
            else:
                x = checkpoint(self.loop, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.fixture(params=[True, False], ids=["fused", "unfused"])
def fused(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=[None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def reuse(
    request: pytest.FixtureRequest, amp: ModuleType, fused: bool
) -> tuple[Reuse, torch.optim.Optimizer]:
    model = Reuse(request.param)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    return amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)


def count_casts(
    amp: ModuleType, reuse: tuple[Reuse, torch.optim.Optimizer], delay: bool, step: bool
) -> CastsOf:
    model, optimizer = reuse
    with CastsOf(model.parameters()) as counter:
        loss = model(torch.randn(2, 4, requires_grad=True)).float().sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
        if step:
            optimizer.step()
    return counter


def test_the_first_iteration_casts_each_weight_once_however_it_is_used(amp, reuse) -> None:
    casts = count_casts(amp, reuse, delay=True, step=False)
    assert set(casts.single) == set(range(5))
    assert set(casts.single.values()) == {1}
    again = count_casts(amp, reuse, delay=False, step=False)
    assert (again.single, again.bulk) == (Counter(), 0)


def test_later_iterations_refresh_all_weights_by_one_call(amp, reuse) -> None:
    count_casts(amp, reuse, delay=False, step=True)
    for _ in range(2):
        casts = count_casts(amp, reuse, delay=True, step=False)
        assert (casts.single, casts.bulk) == (Counter(), 1)
        for _ in range(2):
            casts = count_casts(amp, reuse, delay=True, step=False)
            assert (casts.single, casts.bulk) == (Counter(), 0)
        casts = count_casts(amp, reuse, delay=False, step=True)
        assert (casts.single, casts.bulk) == (Counter(), 0)


def test_frozen_weights_are_cached_too(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).requires_grad_(False)
    amp.initialize(model, opt_level="O1", verbosity=0)
    counters = [CastCounter(model.parameters()) for _ in range(2)]
    for counter in counters:
        with counter:
            model(torch.randn(3, 4))
    assert [counter.of_weights for counter in counters] == [4, 0]


@pytest.mark.usefixtures("by_torch")
def test_a_weight_that_is_held_costs_the_next_iteration_one_cast(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[..., None]
) -> None:
    def count() -> CastCounter:
        cache.mark_stale()
        with CastCounter(model.parameters()) as counter:
            for weight in model.parameters():
                cache.cast(weight, HALF)
        return counter

    warm_up(*model.parameters())
    cache.cast(model.bias, HALF)
    x = torch.randn(2, 3, dtype=HALF, device=model.weight.device, requires_grad=True)
    output = F.linear(x, cache.cast(model.weight, HALF))
    held = count()
    output.sum().backward()
    released = count()
    assert (held.of_weights, held.bulk_copies) == (1, 1)
    assert (released.of_weights, released.bulk_copies) == (0, 1)


def test_a_weight_used_later_than_the_others_is_refreshed_with_them(
    cache: WeightCache, model: nn.Linear
) -> None:
    for _ in range(3):
        cache.cast(model.weight, HALF)
        cache.mark_stale()
    cache.cast(model.weight, HALF)
    cache.cast(model.bias, HALF)
    model.bias.data.neg_()
    cache.mark_stale()
    cache.cast(model.weight, HALF)
    assert torch.equal(cache.cast(model.bias, HALF), model.bias.to(HALF))


@pytest.mark.filterwarnings("ignore:a hook of a")
def test_gradients_of_weights_come_as_soon_as_they_are_known(amp: ModuleType) -> None:
    """As under autocast; else all half gradients would live until the end of the backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    amp.initialize(model, opt_level="O1", verbosity=0)
    order: list[str] = []
    model[1].weight.register_post_accumulate_grad_hook(lambda _: order.append("weight"))
    model[0].register_forward_hook(
        lambda _, args, hidden: hidden.register_hook(lambda _: order.append("hidden")) and None
    )
    for _ in range(2):
        model(torch.randn(2, 4, requires_grad=True)).float().sum().backward()
    assert order == ["weight", "hidden"] * 2


def test_where_torch_cannot_tell_what_is_held_each_iteration_casts_anew(
    cache: WeightCache, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.requires_grad_(False)
    counter = "amp_patch.kernels.reusable._count_storage_uses"
    monkeypatch.setattr(counter, lambda storage: _MANY_USES)
    assert cache.cast(model.weight, HALF) is cache.cast(model.weight, HALF)
    alias = cache.cast(model.weight, HALF).detach()
    before = alias.clone()
    for _ in range(2):
        model.weight.data.mul_(2)
        cache.mark_stale()
        assert torch.equal(cache.cast(model.weight, HALF), model.weight.to(HALF))
    assert torch.equal(alias, before)


# -- changes that leave little trace ---------------------------------------------------------


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.neg_()


def multi_tensor(weight: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_copy_([weight], [weight * 3])


def new_storage(weight: nn.Parameter) -> None:
    weight.data = weight.data * 3


def from_vector(weight: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([weight]).detach() * 3, [weight])


def load(weight: nn.Parameter) -> None:
    holder = nn.ParameterDict({"weight": weight})
    holder.load_state_dict({"weight": weight.detach() * 3})


@pytest.mark.parametrize("write", [in_place, multi_tensor, new_storage, from_vector, load])
def test_a_write_is_seen_at_once(
    cache: WeightCache,
    model: nn.Linear,
    warm_up: Callable[..., None],
    write: Callable[[nn.Parameter], None],
) -> None:
    warm_up(model.weight)
    for _ in range(2):
        before = cache.cast(model.weight, HALF).detach().clone()
        write(model.weight)
        found = cache.cast(model.weight, HALF)
        assert torch.equal(found, model.weight.to(HALF))
        assert not torch.equal(found, before)


@pytest.mark.parametrize(
    "reshape",
    [
        lambda weight: torch.cat([weight, weight]),
        lambda weight: weight[:1],
        lambda weight: weight[1:],
        lambda weight: weight[:, :2],
        lambda weight: weight.t(),
        lambda weight: weight.as_strided((2, 3), (1, 2)),
        lambda weight: weight.flatten(),
    ],
    ids=["grown", "cut", "cut at the front", "narrowed", "transposed", "of another stride", "flat"],
)
def test_a_weight_of_another_shape_trains_after_the_iteration(
    cache: WeightCache,
    model: nn.Linear,
    warm_up: Callable[..., None],
    reshape: Callable[[Tensor], Tensor],
) -> None:
    weight = model.weight
    warm_up(weight)
    cache.cast(weight, HALF).float().sum().backward()
    weight.grad = None
    weight.data = reshape(weight.data)
    cache.mark_stale()
    cast = cache.cast(weight, HALF)
    assert (cast.shape, cast.stride()) == (weight.shape, weight.to(HALF).stride())
    assert torch.equal(cast, weight.to(HALF))
    cast.float().sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_a_weight_that_grows_within_an_iteration_trains(
    cache: WeightCache, model: nn.Linear
) -> None:
    cache.cast(model.weight, HALF)
    model.weight.data = torch.cat([model.weight.data] * 2)
    cache.cast(model.weight, HALF).float().sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(4, 3, device=model.weight.device))


def test_an_address_that_comes_back_with_other_values_is_seen_after_a_read(
    cache: WeightCache, model: nn.Linear
) -> None:
    cache.cast(model.weight, HALF)
    first = model.weight.data
    model.weight.data = first * 2
    with torch.no_grad():
        cache.cast(model.weight, HALF)
    model.weight.data = first.mul_(3)
    assert torch.equal(cache.cast(model.weight, HALF), model.weight.to(HALF))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_weights_are_read_as_they_are_now_without_grad(
    cache: WeightCache, model: nn.Linear, context: Callable[[], Any]
) -> None:
    cache.cast(model.weight, HALF)
    model.weight.data.neg_()
    with context():
        found = cache.cast(model.weight, HALF)
        assert torch.equal(found, model.weight.to(HALF))
        assert not found.requires_grad


def test_without_grad_a_weight_in_the_place_of_a_cast_one_is_looked_at_again(
    cache: WeightCache, device: torch.device
) -> None:
    model = nn.Linear(4, 4).to(device)
    cache.add_model(model)
    cache.cast(model.weight, HALF)
    with torch.no_grad():
        assert cache.cast_now(model.weight, HALF).dtype is HALF
        address = model.weight.data_ptr()
        model.weight.data = model.weight.data.view(torch.float64)  # is never cast
        assert model.weight.data_ptr() == address
        assert cache.cast_now(model.weight, HALF) is model.weight


def test_a_checkpoints_own_forward_shares_the_cast(cache: WeightCache, model: nn.Linear) -> None:
    with torch.no_grad():
        mode.in_checkpoint = True
        try:
            first = cache.cast(model.weight, HALF)
        finally:
            mode.in_checkpoint = False
    assert first.requires_grad
    assert cache.cast(model.weight, HALF) is first


@pytest.mark.parametrize("frozen_first", [True, False])
def test_a_toggle_of_requires_grad_decides_whether_a_gradient_comes(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[..., None], frozen_first: bool
) -> None:
    for frozen in (frozen_first, not frozen_first, frozen_first):
        warm_up(model.weight)
        model.weight.requires_grad_(not frozen)
        assert cache.cast(model.weight, HALF).requires_grad is not frozen
        assert cache.cast(model.weight, HALF) is cache.cast(model.weight, HALF)


def test_a_change_between_training_and_evaluation_makes_casts_stale(
    cache: WeightCache, model: nn.Linear
) -> None:
    for training in (True, False, True):
        model.train(training)
        model.weight.data.neg_()
        cache.observe(model)
        found = cache.cast(model.weight, HALF).detach().clone()
        assert torch.equal(found, model.weight.to(HALF))


@pytest.mark.usefixtures("by_torch")
def test_a_refresh_that_fails_is_repeated(
    cache: WeightCache,
    model: nn.Linear,
    warm_up: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm_up(model.weight)
    cache.cast(model.weight, HALF)
    model.weight.data.neg_()
    cache.mark_stale()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.cast(model.weight, HALF)
    assert torch.equal(cache.cast(model.weight, HALF), model.weight.to(HALF))


# -- what is cast, and what is kept ----------------------------------------------------------


def test_floating_weights_are_cast_and_all_others_returned(
    cache: WeightCache, device: torch.device
) -> None:
    def cast(dtype: torch.dtype, to: torch.dtype) -> tuple[nn.Parameter, Tensor]:
        weight = nn.Parameter(torch.ones(2, dtype=dtype, device=device), requires_grad=False)
        return weight, cache.cast(weight, to)

    for found in (torch.float32, torch.float16, torch.bfloat16):
        for to in (torch.float16, torch.bfloat16):
            assert cast(found, to)[1].dtype is to
    for found in (torch.float16, torch.float64, torch.complex64, torch.int64, torch.bool):
        weight, result = cast(found, HALF)
        assert result is weight


def test_weights_on_a_device_without_casts_are_returned(
    cache: WeightCache, model: nn.Linear
) -> None:
    process.devices = frozenset({"meta"})
    assert cache.cast(model.weight, HALF) is model.weight


def test_two_half_dtypes_of_one_weight_are_both_right(cache: WeightCache, model: nn.Linear) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        assert torch.equal(cache.cast(model.weight, dtype), model.weight.to(dtype))


def test_only_weights_of_known_models_are_kept(cache: WeightCache, model: nn.Linear) -> None:
    foreign = nn.Parameter(torch.ones(2, device=model.weight.device))
    for _ in range(2):
        cache.cast(foreign, HALF).float().sum().backward()
        cache.cast(model.weight, HALF)
    assert torch.equal(foreign.grad, torch.full_like(foreign, 2))
    assert len(cache) == 1
    model.extra = nn.Linear(2, 2, device=foreign.device)
    assert cache.cast(model.extra.weight, HALF) is cache.cast(model.extra.weight, HALF)
    assert len(cache) == 2


def test_a_weight_that_came_from_a_model_that_is_gone_is_refreshed(
    cache: WeightCache, device: torch.device
) -> None:
    old, new, another = (nn.Linear(3, 2, device=device) for _ in range(3))
    weight = old.weight
    cache.add_model(old)
    cache.cast(weight, HALF)
    old.weight, new.weight = None, weight
    cache.observe(new)
    del old
    cache.observe(another)  # dead models are forgotten when one comes
    weight.data.neg_()
    cache.mark_stale()
    assert torch.equal(cache.cast(weight, HALF), weight.to(HALF))


def at_the_address_of_a_dead_one(cache: WeightCache, device: torch.device) -> nn.Linear:
    """Return a model where Python had one that the cache knows, which no longer lives.

    What else is made may get that memory first (by another thread, say): then another one dies.
    """
    for _ in range(20):
        dead = nn.Linear(2, 2, device=device)
        cache.observe(dead)
        address = id(dead)
        del dead
        others = [nn.Linear.__new__(nn.Linear)]  # without weights, which may get it as well
        while id(others[-1]) != address and len(others) < 1000:
            others.append(nn.Linear.__new__(nn.Linear))
        if id(others[-1]) == address:
            others[-1].__init__(2, 2, device=device)
            return others[-1]
    raise AssertionError("Python used no address again")


def test_a_model_at_the_address_of_a_dead_one_is_told_apart(
    cache: WeightCache, device: torch.device
) -> None:
    model = at_the_address_of_a_dead_one(cache, device)
    cache.observe(model)
    assert cache.cast(model.weight, HALF) is cache.cast(model.weight, HALF)


class Searched(nn.Linear):
    """Counts how often it was looked through."""

    searches = 0

    def modules(self) -> Iterator[nn.Module]:
        self.searches += 1
        return super().modules()


def test_a_foreign_weight_is_searched_for_once(cache: WeightCache, device: torch.device) -> None:
    model = Searched(2, 2, device=device)
    cache.add_model(model)
    foreign = nn.Parameter(torch.ones(2, device=device))
    model.searches = 0
    for _ in range(3):
        cache.cast(foreign, HALF)
        cache.mark_stale()
    assert model.searches == 1


def test_a_weight_in_two_places_is_kept_while_one_of_them_has_it(
    cache: WeightCache, device: torch.device
) -> None:
    model = nn.ModuleList(nn.Linear(2, 2, device=device) for _ in range(2))
    shared = model[0].weight = model[1].weight
    cache.add_model(model)
    cache.cast(shared, HALF)
    for drop in (lambda: setattr(model[0], "weight", None), lambda: model.pop(0)):
        drop()
        cache.mark_stale()
        assert cache.cast(shared, HALF) is cache.cast(shared, HALF)
        assert len(cache) == 1


@pytest.mark.parametrize(
    "make",
    [lambda: torch.empty(0, 3), lambda: torch.empty(2, device="meta")],
    ids=["empty", "meta"],
)
def test_weights_without_an_address_are_cast_each_time(
    cache: WeightCache, make: Callable[[], Tensor]
) -> None:
    process.devices |= {"cpu", "meta"}
    model = nn.ParameterDict({"weight": nn.Parameter(make())})
    cache.add_model(model)
    assert cache.cast(model["weight"], HALF).dtype is HALF
    assert len(cache) == 0


def test_casts_made_in_inference_mode_are_not_kept(cache: WeightCache, model: nn.Linear) -> None:
    with torch.inference_mode(), torch.enable_grad():
        assert cache.cast(model.weight, HALF).dtype is HALF
    assert len(cache) == 0


def test_weights_made_in_inference_mode_are_cast_each_time(
    cache: WeightCache, device: torch.device
) -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2, device=device).requires_grad_(False)
    cache.add_model(model)
    assert cache.cast(model.weight, HALF).dtype is HALF
    assert len(cache) == 0


class Wrapping(TorchFunctionMode):
    """Makes every cast of a class of its own."""

    class Wrapped(Tensor):
        pass

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        return result.as_subclass(self.Wrapped) if func is Tensor.to else result


def test_a_cast_that_a_mode_made_something_else_of_is_not_kept(
    cache: WeightCache, model: nn.Linear
) -> None:
    with Wrapping():
        assert type(cache.cast(model.weight, HALF)) is Wrapping.Wrapped
    assert len(cache) == 0


def test_clear_forgets_everything(cache: WeightCache, model: nn.Linear) -> None:
    first = cache.cast(model.weight, HALF)
    cache.clear()
    assert len(cache) == 0
    assert cache.cast(model.weight, HALF) is not first
    assert len(cache) == 0


# -- what the user drops ---------------------------------------------------------------------


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Show that references alone free what was dropped: the collector cannot see graph nodes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def trained(cache: WeightCache, model: nn.Module) -> list[weakref.ref[Any]]:
    """Cast every weight, run a backward through it, and return references to weights and casts."""
    references = []
    for weight in model.parameters():
        cast = cache.cast(weight, HALF)
        cast.float().sum().backward()
        references += [weakref.ref(weight), weakref.ref(cast)]
    return references


@pytest.mark.usefixtures("without_collector")
def test_cleared_casts_give_their_memory_back(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[..., None]
) -> None:
    warm_up(model.weight, model.bias)
    _, weight, _, bias = trained(cache, model)
    cache.clear()
    assert weight() is bias() is None


@pytest.mark.usefixtures("without_collector")
def test_a_dropped_model_takes_its_casts_along(
    cache: WeightCache, device: torch.device, warm_up: Callable[..., None]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    cache.add_model(model)
    warm_up(*model.parameters())
    references = trained(cache, model)
    assert all(reference() is not None for reference in references)
    del model
    assert [reference() for reference in references] == [None] * 8
    assert len(cache) == 0


@pytest.mark.usefixtures("without_collector")
def test_a_replaced_submodule_takes_its_casts_along(
    cache: WeightCache, device: torch.device, warm_up: Callable[..., None]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    cache.add_model(model)
    warm_up(*model.parameters())
    references = trained(cache, model[0])
    kept = cache.cast(model[1].weight, HALF)
    model[0] = nn.Identity()
    assert [reference() for reference in references] == [None] * 4
    assert cache.cast(model[1].weight, HALF) is kept


@pytest.mark.usefixtures("without_collector")
def test_a_replaced_parameter_goes_at_the_next_use_of_its_model(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[..., None]
) -> None:
    warm_up(*model.parameters())
    references = trained(cache, model)[:2]
    model.weight = nn.Parameter(torch.ones_like(model.weight))
    cache.cast(model.weight, HALF)
    assert [reference() for reference in references] == [None] * 2
    model.bias = None
    cache.mark_stale()
    cache.cast(model.weight, HALF)
    assert len(cache) == 1


@pytest.mark.usefixtures("without_collector")
def test_a_removed_parameter_goes_at_the_next_refresh(
    cache: WeightCache, model: nn.Linear, warm_up: Callable[..., None]
) -> None:
    warm_up(*model.parameters())
    references = trained(cache, model)[2:]
    model.bias = None
    cache.mark_stale()
    cache.cast(model.weight, HALF)
    assert [reference() for reference in references] == [None] * 2


def test_a_part_of_a_model_may_lose_its_storage(
    cache: WeightCache, device: torch.device, warm_up: Callable[..., None]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    cache.add_model(model)
    warm_up(*model.parameters())
    trained(cache, model)
    for weight in model[0].parameters():
        weight.untyped_storage().resize_(0)
    cache.mark_stale()
    assert torch.equal(cache.cast(model[1].weight, HALF), model[1].weight.to(HALF))
    assert len(cache) == 2


def objects_of_the_cache() -> int:
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    places = [f"amp_patch.casting.{name}" for name in ("weight_cache", "cached_casts")]
    return sum(kind is nn.Parameter or kind.__module__ in places for kind in kinds)


def dead_references() -> int:
    gc.collect()
    return sum(type(thing) is weakref.ref and thing() is None for thing in gc.get_objects())


def train_once(amp: ModuleType) -> weakref.ref[nn.Module]:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model(torch.randn(3, 4)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return weakref.ref(model)


def test_a_hundred_models_leave_nothing_behind(amp: ModuleType) -> None:
    train_once(amp)
    before, dead_before = objects_of_the_cache(), dead_references()
    models = [train_once(amp) for _ in range(100)]
    gc.collect()
    assert all(model() is None for model in models)
    del models
    # the group of the last model goes when the next one comes
    assert objects_of_the_cache() <= before + 1
    assert dead_references() <= dead_before + 20


def call_with_new_parameters(cache: WeightCache, model: nn.Module) -> None:
    parameters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    torch.func.functional_call(
        Casting(cache, model), {f"model.{k}": v for k, v in parameters.items()}
    )


def cast_foreign(cache: WeightCache, model: nn.Module) -> None:
    cache.cast(nn.Parameter(torch.ones(2, device=model.weight.device)), HALF)


def replace(cache: WeightCache, model: nn.Module) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())
    cache.cast(model.weight, HALF)


class Casting(nn.Module):
    """Returns the casts of a model's parameters, as the model has them at the time."""

    def __init__(self, cache: WeightCache, model: nn.Module) -> None:
        super().__init__()
        self.cache, self.model = cache, model

    def forward(self) -> list[Tensor]:
        return [
            self.cache.cast(p, HALF) if type(p) is nn.Parameter else p.to(HALF)
            for p in self.model._parameters.values()
        ]


@pytest.mark.parametrize("use", [call_with_new_parameters, cast_foreign, replace])
def test_passing_parameters_do_not_pile_up(
    cache: WeightCache, model: nn.Linear, use: Callable[[WeightCache, nn.Module], None]
) -> None:
    use(cache, model)
    before = objects_of_the_cache()
    for _ in range(20):
        use(cache, model)
    assert objects_of_the_cache() <= before


def test_foreign_weights_that_are_gone_are_not_remembered(
    cache: WeightCache, model: nn.Linear
) -> None:
    before = dead_references()
    foreign = [nn.Parameter(torch.ones(2, device=model.weight.device)) for _ in range(100)]
    for weight in foreign:
        cache.cast(weight, HALF)
    del foreign, weight
    cast_foreign(cache, model)
    assert dead_references() < before + 50


# -- threads, transforms, tracing ------------------------------------------------------------


def test_threads_share_one_cast_of_each_weight(cache: WeightCache, device: torch.device) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20))).to(device)
    cache.add_model(model)
    weights = list(model.parameters())
    barrier = threading.Barrier(4)
    results: list[list[Tensor]] = []

    def forward() -> None:
        barrier.wait()
        results.append([cache.cast(weight, HALF) for weight in weights])

    for _ in range(20):
        results.clear()
        threads = [threading.Thread(target=forward) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        for casts in results:
            assert all(map(torch.equal, casts, [weight.to(HALF) for weight in weights]))
            assert all(a is b for a, b in zip(casts, results[0], strict=True))
        for weight in weights:
            weight.data.neg_()
        cache.mark_stale()


def test_a_model_dropped_in_another_thread_frees_its_casts(
    cache: WeightCache, device: torch.device
) -> None:
    models = [nn.Linear(2, 2, device=device) for _ in range(50)]
    for model in models:
        cache.add_model(model)
        trained(cache, model)
    kept = models.pop()
    thread = threading.Thread(target=models.clear)
    thread.start()
    for _ in range(50):
        cache.mark_stale()
        cache.cast(kept.weight, HALF)
    thread.join()
    del model
    assert len(cache) == 2


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], dict[str, Tensor], Tensor], Any]] = {
    "grad": lambda f, params, x: torch.func.grad(lambda p: f(p, x).sum())(params),
    "vmap": lambda f, params, x: torch.func.vmap(f, (None, 0))(params, x),
    "per-sample": lambda f, params, x: torch.func.vmap(
        torch.func.grad(lambda p, x: f(p, x).sum()), (None, 0)
    )(params, x),
    "jacrev": lambda f, params, x: torch.func.jacrev(f)(params, x),
    "jvp of x": lambda f, params, x: torch.func.jvp(lambda x: f(params, x), (x,), (x,)),
    "jvp of weights": lambda f, params, x: torch.func.jvp(lambda p: f(p, x), (params,), (params,)),
    "hessian": lambda f, params, x: torch.func.hessian(lambda x: f(params, x).sum())(x),
}


# forward mode, in torch itself
@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning"
)
@pytest.mark.parametrize("warm", [True, False], ids=["after training", "before"])
@pytest.mark.parametrize("given", ["parameters", "tensors"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_compute_what_they_compute_without_the_cache(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, transform: str, given: str, warm: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.randn(5, 3)
    if warm:
        model(x)
    params = dict(model.named_parameters())
    if given == "tensors":
        params = {name: param.detach() for name, param in params.items()}

    def run() -> Any:
        # the root's hooks run as well; unwrapped rows are what vmap hands over
        return TRANSFORMS[transform](
            lambda p, x: torch.func.functional_call(model, p, (x,)), params, x
        )

    found = run()
    with monkeypatch.context() as patch:
        patch.setattr(WeightCache, "cast", lambda _, param, dtype: param.to(dtype))
        torch.testing.assert_close(found, run(), rtol=0, atol=0)
    model(x).float().sum().backward()
    for param in model.parameters():
        assert type(param.grad) is Tensor


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_weight_that_a_transform_closes_over_is_not_kept(
    cache: WeightCache, model: nn.Linear, transform: str
) -> None:
    x = torch.randn(5, 3, device=model.weight.device)

    def output(x: Tensor) -> Tensor:
        return F.linear(x, cache.cast(model.weight, HALF).float()).sum()

    getattr(torch.func, transform)(output)(x)
    assert len(cache) == 0


def test_fake_tensors_are_never_kept(cache: WeightCache, model: nn.Linear) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert cache.cast(model.weight, HALF).dtype is HALF
    assert len(cache) == 0
    real = cache.cast(model.weight, HALF)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert cache.cast(model.weight, HALF) is not real
    assert cache.cast(model.weight, HALF) is real


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_torch_jit_trace_casts_the_weights_itself_after_a_forward(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.randn(2, 3)
    expected = model(x)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), expected)
    with torch.no_grad():
        model[0].weight.neg_()
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_a_traced_graph_casts_the_weight_itself(
    cache: WeightCache, model: nn.Linear, tracing_mode: str, warm: bool
) -> None:
    if warm:
        cache.cast(model.weight, HALF)
    x = torch.randn(2, 3, dtype=HALF, device=model.weight.device)
    make = make_fx(
        lambda x: F.linear(x, cache.cast(model.weight, HALF)),
        tracing_mode=tracing_mode,
        _allow_non_fake_inputs=True,
    )
    graph = make(x)
    assert len(cache) == warm
    model.weight.data.neg_()
    cache.mark_stale()
    assert torch.equal(graph(x), F.linear(x, model.weight.to(HALF)))


def test_a_compiled_function_casts_the_weight_itself(amp: ModuleType) -> None:
    model = nn.Linear(3, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.randn(4, 3, dtype=HALF)
    compiled = torch.compile(lambda x: F.linear(x, model.weight), backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x), F.linear(x, model.weight.to(HALF)))
        model(x)
        model.weight.data.neg_()


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_steps_by_hand_through_data_train_without_any_optimizer(
    amp: ModuleType, level: str
) -> None:
    """As in PyTorch's own tutorial: ``p.data.sub_(p.grad * lr)``, which moves no version."""
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    inputs = torch.randn(32, 8)
    model = amp.initialize(copy.deepcopy(exact), opt_level=level, verbosity=0)
    losses = []
    for net in (exact, model):
        with nullcontext() if net is model else core.disable_casts():
            for _ in range(20):
                net.zero_grad()
                loss = F.mse_loss(net(inputs), inputs[:, :2])
                loss.backward()
                for param in net.parameters():
                    assert param.grad is not None
                    param.data.sub_(param.grad, alpha=0.3)
        losses.append(loss.item())
    assert losses[0] < 0.1
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_a_copy_of_a_model_casts_its_own_weights(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.randn(4, 3)
    model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.neg_()
    for each in (model, twin):
        expected = F.linear(x.half(), each[0].weight.half(), each[0].bias.half())
        for _ in range(2):
            assert torch.equal(each(x), expected)
    with CastCounter(twin.parameters()) as counter:
        twin(x)
    assert counter.of_weights == 0
