"""Averages of the weights, right in fp32, or told of at the first update."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from support import nightly_but
from torch import Tensor, nn
from torch.optim import swa_utils
from training import LEVELS, batches, loss_of, make, prepared, weights

from amp_patch import amp as core
from amp_patch.mistakes import plain_averages
from amp_patch.session import session

HALF = ("O2", "O5")
DECAY = 0.9


def train(
    amp: ModuleType, model: nn.Module, optimizer: Any, update: Callable[[], Any]
) -> list[Tensor]:
    """Train; return the fp32 average of the weights with `DECAY`."""
    average: list[Tensor] = []
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        update()
        now = [value for value in weights(model) if value.is_floating_point()]
        pairs = zip(average, now, strict=True)
        average = [torch.lerp(a, b, 1 - DECAY) for a, b in pairs] if average else now
    return average


KINDS: dict[str, dict[str, Any]] = {
    "multi_avg_fn": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(DECAY)},
    "avg_fn": {"avg_fn": swa_utils.get_ema_avg_fn(DECAY), "use_buffers": True},
}


@pytest.mark.parametrize("level", [*LEVELS, "O3"])
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_averaged_model_is_exact(amp: ModuleType, level: str, made: str, kind: str) -> None:
    model, optimizer = make()
    averaged = swa_utils.AveragedModel(model, **KINDS[kind]) if made == "before" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    averaged = averaged or swa_utils.AveragedModel(model, **KINDS[kind])
    expected = train(amp, model, optimizer, lambda: averaged.update_parameters(model))
    got = list(averaged.module.parameters())
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert {param.dtype for param in got} == {torch.float32}
    inputs = next(batches())
    assert averaged(inputs).dtype in (torch.float32, torch.float16)
    with core.disable_casts():
        exact = nn.functional.linear(inputs, got[0], got[1]).tanh()
        exact = nn.functional.linear(exact, got[2], got[3])
    torch.testing.assert_close(averaged(inputs).float(), exact, rtol=1e-2, atol=1e-3)


def test_a_plain_average_of_batch_norms_is_exact(amp: ModuleType) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32=False, verbosity=0)
    averaged = swa_utils.AveragedModel(model)
    train(amp, model, optimizer, lambda: averaged.update_parameters(model))
    assert {buffer.dtype for buffer in averaged.module.buffers()} <= {torch.float32, torch.int64}
    swa_utils.update_bn(batches(), averaged)
    assert averaged(next(batches())).isfinite().all()


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_constants_in_an_averaged_model_are_exact(amp: ModuleType, level: str, kind: str) -> None:
    model, optimizer = make()
    mean = torch.tensor([0.485, 0.456, 0.406])
    model.register_buffer("mean", mean.clone())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    averaged = swa_utils.AveragedModel(model, **KINDS[kind])
    train(amp, model, optimizer, lambda: averaged.update_parameters(model))
    torch.testing.assert_close(averaged.module.mean, mean, rtol=1e-7, atol=0)


Pair = tuple[Tensor, Tensor]


def parameters(averaged: nn.Module, model: nn.Module) -> list[Pair]:
    return list(zip(averaged.parameters(), model.parameters(), strict=True))


def data(averaged: nn.Module, model: nn.Module) -> list[Pair]:
    return [(average.data, param.data) for average, param in parameters(averaged, model)]


def entries(averaged: nn.Module, model: nn.Module) -> list[Pair]:
    return list(zip(averaged.state_dict().values(), model.state_dict().values(), strict=True))


def lerp(pairs: list[Pair]) -> None:
    for average, value in pairs:
        average.lerp_(value, 1 - DECAY)


def lerp_by_name(pairs: list[Pair]) -> None:
    for average, value in pairs:
        average.copy_(torch.lerp(input=average, end=value, weight=1 - DECAY))
        average.copy_(average.lerp(end=value, weight=torch.tensor(0.0)))


def lerp_each(pairs: list[Pair]) -> None:
    averages, values = zip(*pairs, strict=True)
    torch._foreach_lerp_(averages, values, weight=1 - DECAY)
    torch._foreach_copy_(averages, torch._foreach_lerp(averages, values, 0.0))


def lerp_from_the_weight(pairs: list[Pair]) -> None:
    """As StyleGAN's trainings do."""
    for average, value in pairs:
        average.copy_(value.lerp(average, DECAY))
        average.copy_(torch.lerp(input=value, end=average, weight=1.0))


def multiply_and_add(pairs: list[Pair]) -> None:
    for average, value in pairs:
        average.mul_(DECAY).add_(value, alpha=1 - DECAY)


def test_a_call_of_lerp_is_as_torch_has_it(amp: ModuleType) -> None:
    model, optimizer = make()
    average, out = torch.zeros(2), torch.empty(2)
    end = torch.tensor([1.0, 3.0])
    calls = [
        lambda lerp: lerp(average, end, 0.5),
        lambda lerp: lerp(average, end, torch.tensor([0.5, 0.25])),
        lambda lerp: (out.zero_(), lerp(average, end=end, weight=0.5, out=out))[0],
        lambda lerp: lerp(average, end),  # refused
        lambda lerp: lerp(average, end, 0.5, 0.5),
    ]
    found = [outcome(call) for call in calls]
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert [outcome(call) for call in calls] == found
    end = end.half()
    assert [outcome(call) for call in calls] == found


def outcome(call: Any) -> Any:
    try:
        return call(torch.lerp).tolist()
    except TypeError:
        return TypeError


READS = [parameters, data, entries]
UPDATES = [lerp, lerp_by_name, lerp_from_the_weight, lerp_each, multiply_and_add]


@pytest.mark.parametrize("level", [*LEVELS, "O3"])
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("update", nightly_but([lerp, lerp_from_the_weight], UPDATES))
def test_an_average_in_a_copy_is_right(
    amp: ModuleType, level: str, made: str, read: Any, update: Any
) -> None:
    """A rounded weight is near enough to average: what must not be rounded is the average."""
    model, optimizer = make()
    averaged = copy.deepcopy(model) if made == "before" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    averaged = averaged or copy.deepcopy(model)
    average = [value.clone() for value in averaged.parameters()]

    @torch.no_grad()
    def follow() -> None:
        update(read(averaged, model))
        pairs = zip(average, weights(model), strict=True)
        average[:] = [torch.lerp(a, b, 1 - DECAY) for a, b in pairs]

    train(amp, model, optimizer, follow)
    rough = 0 if read is entries else {"O2": 1e-3, "O5": 1e-2}.get(level, 0)
    got = list(averaged.parameters())
    torch.testing.assert_close(got, average, rtol=rough, atol=1e-6)
    assert {value.dtype for value in got} == {torch.float32}
    assert averaged(next(batches())).isfinite().all()


def test_lerp_refuses_other_mixtures_as_torch_does(amp: ModuleType) -> None:
    prepared(amp, "O2")
    half, wide = torch.zeros(3).half(), torch.zeros(3)
    for start, end in ((half, wide), (wide, wide.double())):
        with pytest.raises(RuntimeError, match="expected dtype"):
            start.lerp_(end, 0.1)


def test_lerp_takes_a_half_share_of_a_half_weight(amp: ModuleType) -> None:
    prepared(amp, "O2")
    average, weight, share = torch.zeros(3), torch.ones(3).half(), torch.tensor([0.0, 0.5, 1.0])
    assert torch.equal(average.lerp_(weight, share.half()), share)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_lerp_is_scripted_as_before(amp: ModuleType) -> None:
    prepared(amp, "O2")

    def between(x: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(x, y, 0.5).lerp_(y, 0.5)

    x, y = torch.zeros(3), torch.ones(3)
    assert torch.equal(torch.jit.script(between)(x, y), torch.full((3,), 0.75))


@pytest.mark.parametrize("level", HALF)
def test_a_copy_that_only_follows_is_not_told_of(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    best, teacher, loaded = (copy.deepcopy(model) for _ in range(3))

    def follow() -> None:
        best.load_state_dict(model.state_dict())
        with torch.no_grad():
            for param, source in zip(teacher.parameters(), model.parameters(), strict=True):
                param.copy_(source)
        loaded.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        assert core.loss_scale()

    train(amp, model, optimizer, follow)


def shadow_in_place(params: list[Tensor], average: list[Tensor]) -> list[Tensor]:
    for one, param in zip(average, params, strict=True):
        one.mul_(DECAY).add_(param.data, alpha=1 - DECAY)
    return average


def shadow_made_anew(params: list[Tensor], average: list[Tensor]) -> list[Tensor]:
    pairs = zip(average, params, strict=True)
    return [(1 - DECAY) * param.data + DECAY * one for one, param in pairs]


def shadow_through_data(params: list[Tensor], average: list[Tensor]) -> list[Tensor]:
    """Write as BYOL and DINO do, which no version tells of."""
    for one, param in zip(average, params, strict=True):
        one.data.mul_(DECAY).add_(param.data, alpha=1 - DECAY)
    return average


def shadow_assigned(params: list[Tensor], average: list[Tensor]) -> list[Tensor]:
    """Write as MoCo does."""
    for one, param in zip(average, params, strict=True):
        one.data = one.data * DECAY + param.data * (1 - DECAY)
    return average


def stuck_in_half(params: list[Tensor], average: list[Tensor]) -> list[Tensor]:
    for one, param in zip(average, params, strict=True):
        one.lerp_(param.data, 1e-6)
    return average


def slowly(params: list[Tensor], average: list[Tensor]) -> list[Tensor]:
    """Write as mmcv's hook does with its own momentum."""
    for one, param in zip(average, params, strict=True):
        one.mul_(0.998).add_(param.data, alpha=0.002)
    return average


def noise(params: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [torch.randn_like(param) / 4 for param in params]


def opposites(params: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [one.copy_(-param.data) for one, param in zip(others, params, strict=True)]


def squares(params: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    pairs = zip(others, params, strict=True)
    return [one.mul_(0.9).addcmul_(param.data, param.data, value=0.1) for one, param in pairs]


def last_values(params: list[Tensor], average: list[Tensor]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def first_values(params: list[Tensor], average: list[Tensor]) -> list[Tensor]:
    return average


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Give the threads that there are, whatever other tests have left."""
    found = [threading.current_thread()]
    monkeypatch.setattr(threading, "enumerate", lambda: found)
    return found


def steps_with(
    amp: ModuleType,
    level: str,
    update: Any,
    read: str = "model",
    still: int | None = None,
    lr: float = 0.01,
) -> list[Any]:
    """Train 24 steps with what a script keeps beside a model; return the warnings of averages."""
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    params = list(model.parameters())
    if read == "masters":
        params = list(core.master_params(optimizer))
    kept = [param.data.clone() for param in params]
    others = [torch.eye(3).half().to_sparse(), torch.ones(3, device="meta").half()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, inputs in enumerate(itertools.islice(itertools.cycle(batches()), 24)):
            optimizer.param_groups[0]["lr"] = 0.0 if number == still else lr
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            kept = update(params, kept)
    del others
    return [one for one in caught if "average of weights" in str(one.message)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("level", [*HALF, "O3"])
@pytest.mark.parametrize(
    "update",
    [shadow_in_place, shadow_made_anew, shadow_through_data, shadow_assigned, stuck_in_half],
)
def test_an_average_in_plain_tensors_is_told_of_once(
    amp: ModuleType, level: str, update: Any
) -> None:
    caught = steps_with(amp, level, update)
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize(
    ("update", "count"),
    [
        *((one, 1) for one in (shadow_in_place, slowly, stuck_in_half)),
        *((one, 0) for one in (noise, opposites, squares, last_values, first_values)),
    ],
)
def test_weights_that_move_fast_hide_no_average(
    amp: ModuleType, level: str, update: Any, count: int
) -> None:
    """An average lags them by more than half of what they are; other tensors are still none."""
    assert len(steps_with(amp, level, update, lr=1.0)) == count


@pytest.mark.usefixtures("threads")
def test_of_a_large_weight_no_first_value_is_kept(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_averages, "_SMALL", 0)
    prepared(amp, "O2")
    (followed,) = session.guard.plain_averages._followed
    assert not [one for one in vars(followed).values() if isinstance(one, Tensor)]
    assert len(steps_with(amp, "O2", shadow_in_place)) == 1


class TwoEncoders(nn.Module):
    """As MoCo: an encoder that is an average of the trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        self.key = copy.deepcopy(self.query)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            average = self.key(inputs)
        return cast(Tensor, self.query(inputs) - average)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("given", ["one model", "two models"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize(("update", "count"), [(shadow_through_data, 1), (first_values, 0)])
def test_an_average_that_was_given_to_initialize_is_told_of(
    amp: ModuleType, level: str, frozen: bool, given: str, update: Any, count: int
) -> None:
    """It is in half, and so are other weights that nobody steps, which only stay.

    A deep copy asks for gradients as its model does, unless the script freezes it.
    """
    torch.manual_seed(0)
    model = TwoEncoders()
    model.key.requires_grad_(requires_grad=not frozen)
    optimizer = torch.optim.AdamW(model.query.parameters(), lr=0.01)
    parts = [model] if given == "one model" else [model.query, model.key]
    amp.initialize(parts, optimizer, opt_level=level, verbosity=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(24):
            inputs = torch.randn(16, 4)
            outputs = model(inputs) if given == "one model" else model.query(inputs)
            optimizer.zero_grad()
            with amp.scale_loss((outputs - inputs).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            update([*model.query.parameters()], [*model.key.parameters()])
    averages = [one for one in caught if "average of weights" in str(one.message)]
    assert len(averages) == count


@pytest.mark.parametrize(("kind", "count"), [("tqdm._monitor", 1), ("threading", 0)])
def test_beside_threads_that_may_free_tensors_no_look_is_taken(
    amp: ModuleType, threads: list[threading.Thread], kind: str, count: int
) -> None:
    threads.append(type("Other", (threading.Thread,), {"__module__": kind})())
    assert len(steps_with(amp, "O2", shadow_in_place)) == count


@pytest.mark.usefixtures("threads")
def test_a_step_that_changes_nothing_is_no_reason_to_stop(amp: ModuleType) -> None:
    assert len(steps_with(amp, "O2", shadow_in_place, still=17)) == 1


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("update", [last_values, first_values])
def test_copies_of_values_are_no_averages(amp: ModuleType, update: Any) -> None:
    assert not steps_with(amp, "O2", update)


@pytest.mark.usefixtures("threads")
def test_a_view_that_torch_refuses_to_tell_of_ends_no_training(amp: ModuleType) -> None:
    base = torch.zeros(4, dtype=torch.half)
    with torch.no_grad():
        view = base[:2]
    base.mul_(torch.ones(4, dtype=torch.half, requires_grad=True))
    assert len(steps_with(amp, "O2", shadow_in_place)) == 1
    assert view.shape == (2,)


def test_an_average_of_masters_is_right(amp: ModuleType) -> None:
    assert not steps_with(amp, "O2", shadow_in_place, "masters")
    assert not steps_with(amp, "O1", shadow_in_place)


@pytest.mark.usefixtures("threads")
def test_another_model_that_trains_alike_is_no_average(amp: ModuleType) -> None:
    """Masters keep views of their half parameters, which are plain tensors that move with them."""
    runs = [make() for _ in range(2)]
    for model, optimizer in runs:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs in itertools.islice(itertools.cycle(batches()), 24):
            for number, (model, optimizer) in enumerate(runs):
                optimizer.zero_grad()
                with amp.scale_loss(loss_of(model, inputs * (1 + number)), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()


def test_nothing_is_kept_of_models_that_were_dropped_before_the_first_look(amp: ModuleType) -> None:
    for _ in range(3):
        prepared(amp, "O2")
        gc.collect()
    assert len(session.guard.plain_averages._followed) == 1


@pytest.mark.usefixtures("threads")
def test_what_lets_nobody_read_it_is_passed_by(amp: ModuleType) -> None:
    """As a result of a CUDA graph of ``torch.compile``, once a later call has overwritten it."""
    overwritten = torch.ones(4, 4, dtype=torch.half)
    torch._C._set_throw_on_mutable_data_ptr(overwritten)
    assert len(steps_with(amp, "O2", shadow_in_place)) == 1
    assert overwritten.shape == (4, 4)
