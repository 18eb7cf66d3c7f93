"""A GradScaler of torch's that a script keeps: it trains as ``scale_loss`` does."""

from __future__ import annotations

import itertools
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from training import (
    LEVELS,
    assert_equal,
    batches,
    loss_of,
    make,
    prepared,
    trained_rightly,
    weights,
)

from amp_patch import amp as core
from amp_patch.session import session

SCALERS = {
    "torch.amp": lambda: torch.amp.GradScaler("cpu"),
    "torch.cuda.amp": lambda: torch.cuda.amp.GradScaler(),
    "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "FSDP1": lambda: ShardedGradScaler("cpu"),
}
MAX_NORM = 0.1


def scaler_of(kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no CUDA, and that the name is old
        return SCALERS[kind]()


def clip_by_norm(model: nn.Module, optimizer: Any) -> None:
    core.clip_grad_norm_(optimizer, MAX_NORM)


def clip_masters_by_value(model: nn.Module, optimizer: Any) -> None:
    for param in core.master_params(optimizer):
        param.grad.clamp_(-1e-3, 1e-3)


CLIPS = {
    "no clipping": (None, None),
    "unscale_ alone": (lambda model: None, None),
    "norm": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM), clip_by_norm),
    "value": (
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        clip_masters_by_value,
    ),
}


CASES = [
    *(("torch.amp", clip, level) for clip in CLIPS for level in LEVELS),
    *(
        (kind, "norm", level)
        for kind in ("torch.cuda.amp", "disabled", "FSDP1")
        for level in LEVELS
    ),
    *(("torch.amp", "norm", level) for level in ("O0", "O3", "O4")),
]


@pytest.mark.parametrize(("kind", "clip", "level"), CASES)
def test_a_grad_scaler_trains_as_scale_loss_does(
    amp: ModuleType, kind: str, clip: str, level: str
) -> None:
    torchs, ours = CLIPS[clip]
    expected = trained_rightly(level, ours)
    model, optimizer = prepared(amp, level)
    scaler = scaler_of(kind)
    for inputs in batches():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs)).backward()
        if torchs is not None:
            scaler.unscale_(optimizer)
            torchs(model)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(weights(model), expected, rtol=1e-6, atol=1e-8)
    assert scaler.get_scale() == session.scalers[0].loss_scale()


@pytest.mark.parametrize("level", LEVELS)
def test_what_it_has_unscaled_is_clipped_in_the_groups_of_the_optimizer(
    amp: ModuleType, level: str
) -> None:
    expected = trained_rightly(level, clip_masters_by_value)
    model, optimizer = prepared(amp, level)
    scaler = scaler_of("torch.amp")
    for inputs in batches():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs)).backward()
        scaler.unscale_(optimizer)
        for param in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            param.grad.clamp_(-1e-3, 1e-3)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(weights(model), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_hits(level: str) -> None:
    for clip in (clip_by_norm, clip_masters_by_value):
        plain, clipped = trained_rightly(level), trained_rightly(level, clip)
        assert not all(map(torch.equal, plain, clipped))


@pytest.mark.parametrize("behind_a_block", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_losses_are_accumulated(amp: ModuleType, level: str, behind_a_block: bool) -> None:
    def train(scaled: bool) -> list[torch.Tensor]:
        model, optimizer = prepared(amp if scaled else core, level)
        scaler = torch.amp.GradScaler("cpu")
        if behind_a_block:  # from then on each backward is compared with the blocks
            with core.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        for pair in itertools.pairwise(batches()):
            optimizer.zero_grad()
            for number, inputs in enumerate(pair):
                loss = loss_of(model, inputs) / 2
                if scaled:
                    scaler.scale(loss).backward()
                else:
                    with core.scale_loss(loss, optimizer, delay_unscale=not number) as scaled_loss:
                        scaled_loss.backward()
            scaler.step(optimizer) if scaled else optimizer.step()
            if scaled:
                scaler.update()
        found = weights(model)
        core.deactivate()
        return found

    assert_equal(train(True), train(False))


def of_groups(model: nn.Module, optimizer: Any) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def of_masters(model: nn.Module, optimizer: Any) -> list[Any]:
    return list(core.master_params(optimizer))


@pytest.mark.parametrize(
    ("level", "options"), [("O1", {}), ("O2", {}), ("O5", {}), ("O2", {"fused_step": True})]
)
@pytest.mark.parametrize("place", [of_groups, of_masters])
def test_scaled_gradients_are_read_and_written_where_they_are_stepped(
    amp: ModuleType, level: str, options: dict[str, Any], place: Any
) -> None:
    """As a script does that averages them over ranks, here with a rank whose gradients are 0."""

    def train(model: nn.Module, optimizer: Any, scaler: Any, place: Any) -> list[torch.Tensor]:
        begun = weights(model)
        for pair in itertools.pairwise(batches()):
            optimizer.zero_grad()
            for inputs in pair:
                scaler.scale(loss_of(model, inputs)).backward()
                for param in place(model, optimizer):
                    torch._foreach_mul_([param.grad.data], 0.5)  # moves no version
            place(model, optimizer)[1].grad = None
            assert place(model, optimizer)[1].grad is None
            scaler.step(optimizer)
            scaler.update()
        return [now - before for now, before in zip(weights(model), begun, strict=True)]

    expected = train(*make(), torch.amp.GradScaler("cpu", enabled=False), of_groups)
    # the drop-in has no option of ours
    model, optimizer = prepared(core if options else amp, level, **options)
    found = train(model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**10), place)
    assert not found[1].any()
    size = max(one.abs().max().item() for one in expected)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.03 * size)


def test_they_are_those_of_the_model_and_multiplied_by_the_scale(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O2")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, next(batches()))).backward()
    half = [param.grad.clone() for param in model.parameters()]
    shown = [param.grad for param in of_groups(model, optimizer)]
    assert_equal(shown, [grad.float() for grad in half])
    model.zero_grad()
    assert all(param.grad is None for param in of_groups(model, optimizer))
    scaler.scale(loss_of(model, next(batches()))).backward()
    assert_equal([param.grad for param in model.parameters()], half)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_step_and_lowers_the_scale(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    scaler = torch.amp.GradScaler("cpu")
    before, scale = weights(model), scaler.get_scale()
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        inputs = next(iter(batches()))
        scaler.scale(loss_of(model, inputs) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale / 2
        assert all(map(torch.equal, weights(model), before)) is (factor != 1.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_optimizers_move_the_scale_once(amp: ModuleType, level: str) -> None:
    (one, first), (two, second) = make(), make()
    amp.initialize([one, two], [first, second], opt_level=level, verbosity=0)
    scaler = torch.amp.GradScaler("cpu")
    scale = scaler.get_scale()
    session.scalers[0].unskipped = 1998
    inputs = next(iter(batches()))
    for factor, expected in ((float("inf"), scale / 2), (1.0, scale / 2)):
        for model, optimizer in ((one, first), (two, second)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, inputs) * factor).backward()
        before = weights(one) + weights(two)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        assert scaler.get_scale() == expected
        moved = [
            not torch.equal(*pair) for pair in zip(weights(one) + weights(two), before, strict=True)
        ]
        assert any(moved) is (factor == 1.0)
    assert session.scalers[0].unskipped == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_generator_and_a_discriminator_train_without_a_warning(
    amp: ModuleType, level: str
) -> None:
    """The generator's loss leaves gradients at the discriminator, which its `zero_grad` clears."""
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    models = [generator, discriminator]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = [one.detach().clone().requires_grad_() for one in weights(discriminator)]
    for _ in range(3):
        optimizers[1].zero_grad()
        scaler.scale(discriminator(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizers[1])
        optimizers[0].zero_grad()
        scaler.scale(discriminator(generator(torch.ones(2, 4))).sum()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        for param in expected:  # of a sum over two rows of ones each gradient is 2
            param.data -= 0.1 * 2
    for found, value in zip(weights(discriminator), expected, strict=True):
        torch.testing.assert_close(found.float(), value.detach(), rtol=0.01, atol=0.01)


@pytest.mark.filterwarnings("ignore:at a level with a loss scale every loss")
@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_is_stepped_by_itself_trains_beside_an_accumulation(
    amp: ModuleType, level: str
) -> None:
    """Its plain loss comes between two that the GradScaler scales, for another optimizer."""
    trained = []
    for lone in (True, False):
        (one, first), (two, second) = make(), make()
        amp.initialize([one, two], [first, second], opt_level=level, verbosity=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for inputs in batches():
            if not lone:
                scaler.scale(loss_of(one, inputs)).backward()
            loss_of(two, inputs).backward()
            if not lone:
                scaler.scale(loss_of(one, inputs)).backward()
                scaler.step(first)
            second.step()
            scaler.update()
            first.zero_grad()
            second.zero_grad()
        trained.append(weights(two))
        core.deactivate()
    assert_equal(*trained)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_of_two_optimizers_that_overflows_skips_alone(amp: ModuleType, level: str) -> None:
    (one, first), (two, second) = make(), make()
    amp.initialize([one, two], [first, second], opt_level=level, verbosity=0)
    scaler = torch.amp.GradScaler("cpu")
    inputs = next(iter(batches()))
    before_one, before_two = weights(one), weights(two)
    scaler.scale(loss_of(one, inputs) * float("inf")).backward()
    scaler.scale(loss_of(two, inputs)).backward()
    scaler.step(second)
    scaler.step(first)
    scaler.update()
    assert_equal(weights(one), before_one)
    assert not all(map(torch.equal, weights(two), before_two))


def test_the_state_is_our_scalers(amp: ModuleType) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    saved = {**scaler.state_dict(), "_growth_tracker": 7}
    model, optimizer = prepared(amp, "O1")
    assert scaler.state_dict()["scale"] == 256.0  # its own, until it has scaled something
    assert session.scalers[0].loss_scale() == 65536.0
    scaler.load_state_dict(saved)
    assert session.scalers[0].state_dict() == {"loss_scale": 256.0, "unskipped": 7}
    assert scaler.state_dict() == saved
    assert scaler.get_scale() == 256.0
    scaler.update(64.0)
    assert session.scalers[0].loss_scale() == 64.0
    other = {**saved, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 5}
    scaler.load_state_dict(other)
    assert scaler.state_dict() == other
    assert session.scalers[0].rule.backoff_factor == 0.25
    scaler.set_growth_interval(3)
    assert scaler.get_growth_interval() == session.scalers[0].rule.growth_interval == 3
    scaler.load_state_dict(other)
    assert scaler.state_dict() == other
    del model, optimizer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps", ["scaler.step", "optimizer.step"])
def test_scaling_what_scale_loss_yields_scales_once(
    amp: ModuleType, level: str, steps: str
) -> None:
    expected = trained_rightly(level)
    model, optimizer = prepared(amp, level)
    scaler = torch.amp.GradScaler("cpu")
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaler.scale(scaled_loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer) if steps == "scaler.step" else optimizer.step()
        scaler.update()
    assert_equal(weights(model), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_scale_loss_of_what_a_grad_scaler_scaled_is_refused(
    amp: ModuleType, level: str, factor: float
) -> None:
    model, optimizer = prepared(amp, level)
    before = weights(model)
    scaled_by_torch = torch.amp.GradScaler("cpu").scale(loss_of(model, next(iter(batches()))))
    with (
        pytest.raises(RuntimeError, match="a loss must be scaled once.* Remove the GradScaler"),
        amp.scale_loss(scaled_by_torch * factor, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(weights(model), before)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("call", ["step", "clip"])
def test_gradients_that_were_not_unscaled_are_refused(
    amp: ModuleType, level: str, call: str
) -> None:
    model, optimizer = prepared(amp, level)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, next(iter(batches())))).backward()
    with pytest.raises(RuntimeError, match=r"scaler\.unscale_\(optimizer\)"):
        optimizer.step() if call == "step" else nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.filterwarnings("ignore:a hook of a")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_backward_that_raises_leaves_no_gradient_behind(amp: ModuleType, level: str) -> None:
    expected = trained_rightly(level)
    model, optimizer = prepared(amp, level)
    scaler = torch.amp.GradScaler("cpu")

    def fail(grad: torch.Tensor) -> None:
        raise MemoryError("out of memory")

    for inputs in batches():
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        failing = loss_of(model, inputs)
        failing.register_hook(fail)
        with pytest.raises(MemoryError):
            scaler.scale(failing).backward()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_equal(weights(model), expected)


def test_a_model_that_is_not_prepared_trains_beside_one_that_is(amp: ModuleType) -> None:
    (exact, plain), (model, optimizer) = make(), make()
    kept = prepared(amp, "O2")
    scaler = torch.amp.GradScaler("cpu")
    for inputs in batches():
        for one, stepper in ((exact, plain), (model, optimizer)):
            stepper.zero_grad()
            loss = loss_of(one, inputs)
            scaler.scale(loss).backward() if one is model else loss.backward()
        plain.step()
        scaler.unscale_(optimizer)
        torch.testing.assert_close(gradients(model), gradients(exact))
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(list(model.parameters()), list(exact.parameters()))
    scaler.scale(loss_of(model, inputs) * float("inf")).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(list(model.parameters()), list(exact.parameters()))
    assert kept


def gradients(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters()]


def test_without_a_prepared_optimizer_it_is_torchs_own(amp: ModuleType) -> None:
    model, optimizer = make()
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


OPTIONS = {"init_scale": 128.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}


@pytest.mark.parametrize(("level", "scale"), [("O1", 2048.0), ("O2", 2048.0), ("O5", 1.0)])
def test_how_it_was_made_is_how_it_scales(amp: ModuleType, level: str, scale: float) -> None:
    model, optimizer = prepared(amp, level)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    for inputs in batches():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == scale
    assert_equal(weights(model), trained_rightly(level))


@pytest.mark.parametrize("told", [False, True])
def test_what_initialize_was_told_counts_before_it(amp: ModuleType, told: bool) -> None:
    options = OPTIONS if told else {"init_scale": 64.0}
    model, _ = prepared(amp, "O1", loss_scale=64.0)
    scaler = torch.amp.GradScaler("cpu", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs in batches():
            scaler.scale(loss_of(model, inputs))
    assert [one.filename for one in caught] == [__file__] * told
    assert all("got GradScaler(init_scale=128.0, growth" in str(one.message) for one in caught)
    assert scaler.get_scale() == 64.0


def test_what_initialize_was_told_counts_before_what_is_loaded(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O1", max_loss_scale=2.0**20)
    scaler = torch.amp.GradScaler("cpu")
    saved = {**scaler.state_dict(), "scale": 32.0, "growth_interval": 7}
    with pytest.warns(UserWarning, match="as amp.initialize.* was told"):
        scaler.load_state_dict(saved)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (32.0, 2000)
    assert model
    assert optimizer


@pytest.mark.parametrize("loaded", ["amp", "scaler", "amp, scaler", "scaler, amp"])
def test_a_resumed_scale_goes_on_by_the_rule_of_the_gradscaler(
    amp: ModuleType, loaded: str
) -> None:
    def started() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        core.deactivate()
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        return model, optimizer, scaler

    def scales(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).float().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        return found

    model, optimizer, scaler = started()
    scales(4)
    states = {"amp": amp.state_dict(), "scaler": scaler.state_dict()}
    expected = scales(8)
    assert expected[-1] == 16384.0
    model, optimizer, scaler = started()
    for name in loaded.split(", "):
        {"amp": amp, "scaler": scaler}[name].load_state_dict(states[name])
    assert scales(8) == expected


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_a_script_unscales_itself_are_of_a_scaled_loss(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs in batches():
            params = list(model.parameters())
            grads = torch.autograd.grad(scaler.scale(loss_of(model, inputs)), params)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad / scaler.get_scale()
            optimizer.step()
    assert not caught
    torch.testing.assert_close(weights(model), trained_rightly(level), rtol=1e-3, atol=1e-4)
