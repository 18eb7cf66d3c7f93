"""One backward pass of a scaled loss: what is yielded, checked, said, and how the scale moves."""

import re
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import exactly, scaled_backward, trains
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch.session import session

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
STEP_SKIPPED = "Gradient overflow.  Skipping step, loss scaler {} {} {}\n"


class Weight(nn.Module):
    """A loss whose gradient is the factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.bias = nn.Parameter(torch.zeros(1))

    def loss(self, factor: float, bias: float = 1.0) -> Tensor:
        return self.weight.float().sum() * factor + self.bias.float().sum() * bias


def prepared(
    amp: ModuleType, level: str = "O2", loss_scale: Any = "dynamic", **options: Any
) -> tuple[Weight, Optimizer]:
    model = Weight()
    optimizer = SGD(model.parameters(), lr=1.0)
    return amp.initialize(
        model, optimizer, opt_level=level, loss_scale=loss_scale, **{"verbosity": 0, **options}
    )


def backward(
    amp: ModuleType, model: Weight, optimizers: Any, factor: float = 1.0, **options: Any
) -> None:
    scaled_backward(amp, model.loss(factor), optimizers, **options)


def train_step(
    amp: ModuleType, model: Weight, optimizer: Any, factor: float = 1.0, **options: Any
) -> None:
    optimizer.zero_grad()
    backward(amp, model, optimizer, factor, **options)
    optimizer.step()


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Give what was printed since the last call, without the names of tests/mistakes/test_skips."""
    return lambda: re.sub("; not finite: .*", "", capsys.readouterr().out)


# --- what is yielded ---


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_comes_scaled_in_fp32_or_float64(
    amp: ModuleType, level: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    _, optimizer = prepared(amp, level, 2.0**12)
    loss = torch.full(shape, 65000.0, dtype=dtype)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.dtype is (F64 if dtype is F64 else F32)
        assert torch.equal(scaled_loss, loss.to(scaled_loss.dtype) * 2.0**12)


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_a_scale_of_one_changes_nothing_and_checks_nothing(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level, None)
    assert amp.loss_scale() == 1.0
    loss = model.loss(1.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    grad = model.weight.grad
    with amp.scale_loss(model.loss(INF), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad is grad
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert model.weight.isinf().all()


@pytest.mark.parametrize("delay", [False, True])
def test_o5_accumulates_at_its_scale_of_one(amp: ModuleType, delay: bool) -> None:
    model, optimizer = prepared(amp, "O5", None)
    for i in range(3):
        backward(amp, model, optimizer, delay_unscale=delay and i < 2)
    weight, _ = amp.master_params(optimizer)
    assert weight.grad.tolist() == [3.0, 3.0]


def test_o5_does_not_check_at_its_scale_of_one(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O5", None)
    train_step(amp, model, optimizer, INF)
    assert not amp.step_was_skipped(optimizer)
    assert model.weight.isinf().all()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1.0, "unskipped": 1}


def test_float64_gradients_keep_their_precision(amp: ModuleType) -> None:
    model = Weight()
    model.precise = nn.Parameter(torch.zeros(1, dtype=F64))
    optimizer = SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=64.0, verbosity=0)
    with amp.scale_loss(model.precise.sum() * (1 + 2.0**-45), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.precise.grad.item() == 1 + 2.0**-45


# --- several losses, optimizers, ids ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_one_loss_of_two_optimizers_unscales_both(amp: ModuleType, level: str, kind: type) -> None:
    models = [Weight(), Weight()]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(models[0].loss(1.0) + models[1].loss(2.0), kind(optimizers)) as scaled:
            scaled.backward()
    for optimizer, factor in zip(optimizers, (2.0, 4.0), strict=True):
        assert next(amp.master_params(optimizer)).grad.tolist() == [factor] * 2


def test_an_overflow_skips_every_optimizer_of_the_loss(
    amp: ModuleType, printed: Callable[[], str]
) -> None:
    models = [Weight(), Weight()]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", loss_scale=8.0)
    printed()
    with amp.scale_loss(models[0].loss(1.0) + models[1].loss(INF), optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert model.weight.tolist() == [0.0, 0.0]
    assert printed() == 2 * STEP_SKIPPED.format(0, "keeping loss scale at", 8.0)


def test_each_loss_id_has_its_own_scale(amp: ModuleType, printed: Callable[[], str]) -> None:
    model, optimizer = prepared(amp, num_losses=3, verbosity=1)
    session.scalers[0].scale = session.scalers[1].scale = 4.0
    printed()
    train_step(amp, model, optimizer, INF, loss_id=1)
    assert [amp.loss_scale(i) for i in range(3)] == [4.0, 2.0, 65536.0]
    assert printed() == STEP_SKIPPED.format(1, "reducing loss scale to", 2.0)
    optimizer.zero_grad()
    backward(amp, model, optimizer, loss_id=0)
    backward(amp, model, optimizer, loss_id=1)
    weight, _ = amp.master_params(optimizer)
    assert weight.grad.tolist() == [2.0, 2.0]


def test_a_finite_loss_after_one_that_overflowed_does_not_save_the_step(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, loss_scale=8.0, num_losses=2)
    backward(amp, model, optimizer, INF, loss_id=0)
    backward(amp, model, optimizer, loss_id=1)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert model.weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_a_user_makes_of_each_losss_own_are_unscaled(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level, 1024.0)
    params = list(model.parameters())
    losses = torch.stack([model.loss(1.5, 0.5), model.loss(-0.25, 3.0)])
    with amp.scale_loss(losses, optimizer) as scaled:
        each = [torch.autograd.grad(one, params, retain_graph=True) for one in scaled]
        for param, one, other in zip(params, *each, strict=True):
            param.grad = one - 2 * other
    optimizer.step()
    assert model.weight.tolist() == [-(1.5 + 2 * 0.25)] * 2
    assert model.bias.tolist() == [-(0.5 - 2 * 3.0)]


def test_an_optimizer_that_was_not_passed_is_left_alone(amp: ModuleType) -> None:
    models = [Weight(), Weight()]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level="O1", loss_scale=8.0, verbosity=0)
    with amp.scale_loss(models[0].loss(1.0) + models[1].loss(1.0), optimizers[0]) as scaled_loss:
        scaled_loss.backward()
    assert models[0].weight.grad.tolist() == [1.0, 1.0]
    assert models[1].weight.grad.tolist() == [8.0, 8.0]


# --- nesting ---


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_blocks_of_one_optimizer_inside_each_other_are_refused(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level, 8.0)
    message = (
        "scale_loss() blocks of one optimizer must follow each other, for both would unscale the "
        "same gradients; got one inside another. Add the losses and scale the sum, or leave the "
        "first block before the second (delay_unscale=True keeps its gradients)."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):  # noqa: SIM117
        with amp.scale_loss(model.loss(1.0), optimizer):
            backward(amp, model, optimizer)
    train_step(amp, model, optimizer)
    assert model.weight.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("wrote", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_block_that_an_interrupt_kept_from_its_body_is_as_if_it_had_not_been(
    amp: ModuleType, level: str, wrote: bool
) -> None:
    """Python calls no ``__exit__`` where Ctrl-C comes right after ``__enter__``."""
    values = []
    for is_interrupted in (False, True):
        model, optimizer = prepared(amp, level, 1024.0)
        train_step(amp, model, optimizer, 0.5)
        if is_interrupted:
            scaled = amp.scale_loss(model.loss(3.0), optimizer).__enter__()
            if wrote:
                scaled.backward()
        for _ in range(2):
            train_step(amp, model, optimizer, 0.25)
        values.append((model.weight.tolist(), model.bias.tolist()))
    assert values[0] == values[1]


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_of_different_optimizers_may_be_nested(amp: ModuleType, level: str) -> None:
    models = [Weight(), Weight()]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level=level, loss_scale=8.0, verbosity=0)
    with (
        amp.scale_loss(models[0].loss(1.0), optimizers[0]) as outer,
        amp.scale_loss(models[1].loss(3.0), optimizers[1]) as inner,
    ):
        (inner + outer).backward()
    for optimizer, factor in zip(optimizers, (1.0, 3.0), strict=True):
        optimizer.step()
        assert next(amp.master_params(optimizer)).tolist() == [-factor] * 2


# --- the scale ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_static_scale_is_checked_and_stays(
    amp: ModuleType, printed: Callable[[], str], level: str, bad: float
) -> None:
    model, optimizer = prepared(amp, level, 128.0, verbosity=1)
    printed()
    for _ in range(3):
        train_step(amp, model, optimizer, bad)
        assert amp.step_was_skipped(optimizer)
        assert amp.loss_scale() == 128.0
        assert printed() == STEP_SKIPPED.format(0, "keeping loss scale at", 128.0)
    train_step(amp, model, optimizer)
    assert model.weight.tolist() == [-1.0, -1.0]
    assert printed() == ""


@pytest.mark.parametrize("level", LEVELS)
def test_a_skipped_step_is_said_in_apexs_words_unless_verbosity_is_0(
    amp: ModuleType, printed: Callable[[], str], level: str
) -> None:
    model, optimizer = prepared(amp, level, verbosity=1)
    printed()
    backward(amp, model, optimizer, INF)
    assert printed() == ""
    optimizer.step()
    assert printed() == STEP_SKIPPED.format(0, "reducing loss scale to", 32768.0)
    session.verbosity = 0
    train_step(amp, model, optimizer, INF)
    assert printed() == ""


def test_the_scale_moves_once_per_backward_pass(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, growth_interval=4, max_loss_scale=2.0**20)
    session.scalers[0].scale = 4.0
    for i in range(2):
        backward(amp, model, optimizer, delay_unscale=True)
        backward(amp, model, optimizer)
        backward(amp, model, optimizer)
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == (2, 0)[i]
    assert amp.loss_scale() == 8.0


FACTORS = st.lists(st.sampled_from([1.0, -2.0, 0.5, 3e4, INF, NAN]), max_size=12)


@pytest.mark.parametrize("make", [
    lambda params: SGD(params, lr=0.01, momentum=0.9),
    lambda params: Adam(params, lr=0.01, fused=True),
], ids=["sgd", "adam"])  # fmt: skip
def test_in_fp32_it_trains_as_torchs_grad_scaler(
    amp: ModuleType, make: Callable[..., Optimizer]
) -> None:
    @trains()
    @given(FACTORS)
    def run(factors: list[float]) -> None:
        amp.deactivate()
        model, reference = Weight(), Weight()
        optimizer, expected = make(model.parameters()), make(reference.parameters())
        options = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
        amp.initialize(
            model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0,
            max_loss_scale=2.0**60, **options,
        )  # fmt: skip
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, **options)
        for factor in factors:
            train_step(amp, model, optimizer, factor)
            expected.zero_grad()
            scaler.scale(reference.loss(factor)).backward()
            scaler.step(expected)
            scaler.update()
            assert amp.loss_scale() == scaler.get_scale()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(ours, theirs)

    run()


# --- the floor ---


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_the_second_overflow_in_a_row_at_the_floor_names_the_parameters(
    amp: ModuleType, printed: Callable[[], str], level: str
) -> None:
    model, optimizer = prepared(amp, level, min_loss_scale=2.0**15, verbosity=1)
    printed()
    train_step(amp, model, optimizer, INF)  # reaches the floor
    train_step(amp, model, optimizer, INF)  # the first at the floor
    assert printed() == (
        STEP_SKIPPED.format(0, "reducing loss scale to", 32768.0)
        + STEP_SKIPPED.format(0, "keeping loss scale at", 32768.0)
    )
    message = (
        "gradients must become finite at some loss scale; got two steps in a row that are not, "
        "with loss scaler 0 at its floor 32768.0: weight (NaN), bias (inf). Run amp-patch "
        "diagnose -- SCRIPT, which names the module and operator that make them so, or leave "
        "min_loss_scale out, for a smaller scale may do, or call amp.initialize(..., "
        "opt_level='O0') to train in fp32."
    )
    optimizer.zero_grad()
    with pytest.raises(FloatingPointError, match=exactly(message)):  # noqa: SIM117
        with amp.scale_loss(model.loss(NAN, INF), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert model.weight.tolist() == [0.0, 0.0]


def test_a_finite_step_at_the_floor_begins_the_count_anew(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, min_loss_scale=2.0**15, max_loss_scale=2.0**15)
    for factor in (INF, 0.5, INF, 0.5, INF):
        train_step(amp, model, optimizer, factor)
    with pytest.raises(FloatingPointError, match=r"weight \(inf\)"):
        train_step(amp, model, optimizer, INF)


def test_the_floor_is_there_without_being_asked_for(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    for _ in range(16 + 24 + 1):
        train_step(amp, model, optimizer, INF)
    assert amp.loss_scale() == 2.0**-24
    with pytest.raises(FloatingPointError, match=r"floor 5.96.*make them so, or call"):
        train_step(amp, model, optimizer, INF)


def test_a_mixture_of_inf_and_nan_and_many_parameters_is_said_shortly(amp: ModuleType) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(13)])
    optimizer = SGD([*model, nn.Parameter(torch.zeros(2, 3))], lr=1.0)
    amp.initialize(
        model, optimizer, opt_level="O1", verbosity=0, min_loss_scale=2.0**16, loss_scale="dynamic"
    )
    bad = torch.tensor([INF, NAN])

    def overflow() -> None:
        loss = sum((param * bad).sum() for param in model)
        loss = loss + optimizer.param_groups[0]["params"][-1].sum() * INF
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    overflow()
    message = r"65536.0: 0 \(inf and NaN\), 1 \(inf and NaN\), .*, 9 \(inf and NaN\) and 4 more\. "
    with pytest.raises(FloatingPointError, match=message):
        overflow()


def test_a_parameter_of_no_model_is_named_by_its_shape(amp: ModuleType) -> None:
    stray = nn.Parameter(torch.zeros(2, 3))
    optimizer = SGD([stray], lr=1.0)
    amp.initialize(
        [], optimizer, opt_level="O1", verbosity=0, min_loss_scale=2.0**16, loss_scale="dynamic"
    )

    def overflow() -> None:
        with amp.scale_loss(stray.sum() * INF, optimizer) as scaled_loss:
            scaled_loss.backward()

    overflow()
    with pytest.raises(FloatingPointError, match=r"a parameter of shape \(2, 3\) \(inf\)\. "):
        overflow()


# --- delay_overflow_check ---


SETTLING: dict[str, Callable[[ModuleType, Weight, Optimizer], Any]] = {
    "step": lambda amp, model, optimizer: optimizer.step(),
    "loss_scale": lambda amp, model, optimizer: amp.loss_scale(),
    "state_dict": lambda amp, model, optimizer: amp.state_dict(),
    "scale_loss": lambda amp, model, optimizer: backward(amp, model, optimizer),
    "zero_grad": lambda amp, model, optimizer: optimizer.zero_grad(),
    "closure": lambda amp, model, optimizer: optimizer.step(lambda: torch.zeros(())),
}


@pytest.mark.filterwarnings("ignore:gradients must last until the step")
@pytest.mark.parametrize("by", SETTLING)
def test_a_delayed_check_is_made_when_somebody_asks(amp: ModuleType, by: str) -> None:
    model, optimizer = prepared(amp)
    session.scalers[0].scale = 8.0
    backward(amp, model, optimizer, INF, delay_overflow_check=True)
    assert session.scalers[0].scale == 8.0
    SETTLING[by](amp, model, optimizer)
    assert session.scalers[0].scale == 4.0
    if by not in ("step", "closure"):
        optimizer.step()
    assert amp.step_was_skipped(optimizer) == (by != "zero_grad")
    assert model.weight.tolist() == [0.0, 0.0]


def test_a_delayed_check_cleared_with_its_gradients_skips_nothing(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, loss_scale=8.0)
    backward(amp, model, optimizer, INF, delay_overflow_check=True)
    optimizer.zero_grad()
    train_step(amp, model, optimizer, delay_overflow_check=True)
    assert not amp.step_was_skipped(optimizer)
    assert model.weight.tolist() == [-1.0, -1.0]


def test_a_delayed_check_of_two_optimizers_is_made_once(amp: ModuleType) -> None:
    models = [Weight(), Weight()]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    with amp.scale_loss(
        models[0].loss(INF) + models[1].loss(1.0), optimizers, delay_overflow_check=True
    ) as scaled_loss:
        scaled_loss.backward()
    for optimizer in reversed(optimizers):
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
    assert amp.loss_scale() == 2.0**15


@pytest.mark.filterwarnings("ignore:trainings that share a loss scale")  # the two calls' do
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_delayed_checks_train_as_checks_made_at_once(amp: ModuleType, level: str) -> None:
    @trains()
    @given(FACTORS)
    def run(factors: list[float]) -> None:
        amp.deactivate()
        runs = [prepared(amp, level, num_losses=2) for _ in range(2)]
        for i in range(2):
            session.scalers[i].scale = 16.0
        for factor in factors:
            for i, (model, optimizer) in enumerate(runs):
                train_step(amp, model, optimizer, factor, loss_id=i, delay_overflow_check=bool(i))
        amp.loss_scale()
        states = amp.state_dict()
        assert states["loss_scaler0"] == states["loss_scaler1"]
        assert torch.equal(runs[0][0].weight, runs[1][0].weight)

    run()


def test_a_sum_of_halves_that_alone_overflows_skips_the_step(amp: ModuleType) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.125)
    optimizer = SGD(model.parameters(), lr=1.0)
    # O3 with a scale that checks and changes nothing
    options = {"loss_scale": "dynamic", "max_loss_scale": 1.0, "verbosity": 0}
    amp.initialize(model, optimizer, opt_level="O3", **options)
    for expected in (False, True):
        with amp.scale_loss(model(torch.tensor([[40000.0]])).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert model.weight.grad.isinf().item() == expected
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert model.weight.item() == 0.125


class Operators(TorchDispatchMode):
    """Lists what torch runs while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("width", [3, 1024])
@pytest.mark.parametrize(("level", "scale"), [
    ("O2", 8.0), ("O2", 1.0), ("O4", None), ("O5", None), ("O5", 8.0),
])  # fmt: skip
def test_gradients_are_checked_only_where_an_overflow_counts(
    amp: ModuleType, level: str, scale: float | None, width: int, fused_step: bool
) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {} if scale is None else {"loss_scale": scale}
    if level != "O4":
        options["fused_step"] = fused_step
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    loss = model(torch.ones(4, width)).float().sum()
    with Operators() as operators, amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    is_checked = "_amp_foreach_non_finite_check_and_unscale_" in operators.names
    assert is_checked == (scale == 8.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_backward_works_with_gradients_off_as_it_does_without_amp(
    amp: ModuleType, level: str, dtype: torch.dtype
) -> None:
    model, optimizer = prepared(amp, level, 4.0 if level in ("O1", "O2") else 1.0)
    loss = model.loss(0.25).to(dtype)
    with torch.no_grad():
        scaled_backward(amp, loss, optimizer)
        assert not torch.is_grad_enabled()
        optimizer.step()
    assert model.state_dict()["weight"].tolist() == [-0.25, -0.25]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_block_in_inference_mode_is_refused_and_leaves_nothing(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level, 1.0 if level == "O5" else 4.0)
    message = (
        "scale_loss() must be entered outside of torch.inference_mode(), for gradients that are "
        "made there cannot be unscaled outside; got a block inside of it. End the "
        "inference_mode() before the block, or write torch.no_grad() in its place."
    )
    loss = model.loss(0.25)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=exactly(message)):
        scaled_backward(amp, loss, optimizer)
    scaled_backward(amp, loss, optimizer)
    optimizer.step()
    assert model.state_dict()["weight"].tolist() == [-0.25, -0.25]


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_have_true_gradients_in_the_block_behind_its_backward(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    """So what a script writes to them there is stepped: an average over ranks, a clip by hand."""

    @trains()
    @given(
        factors=st.lists(st.sampled_from([0.5, 3.0, INF]), min_size=1, max_size=4),
        delays=st.booleans(),
    )
    def run(factors: list[float], delays: bool) -> None:
        def train(*, in_block: bool) -> list[Tensor]:
            model, optimizer = prepared(amp, level, 4.0, fused_step=fused_step)
            for factor in factors:
                optimizer.zero_grad()
                if delays:
                    backward(amp, model, optimizer, delay_unscale=True)
                with amp.scale_loss(model.loss(factor), optimizer) as scaled_loss:
                    scaled_loss.backward()
                    if in_block:
                        halve(amp, optimizer)
                if not in_block:
                    halve(amp, optimizer)
                optimizer.step()
            weights = [param.detach().clone() for param in amp.master_params(optimizer)]
            amp.deactivate()
            return weights

        behind, inside = train(in_block=False), train(in_block=True)
        torch.testing.assert_close(inside, behind, rtol=0, atol=0)

    run()


def halve(amp: ModuleType, optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        assert master.grad is not None
        master.grad.mul_(0.5)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_hook_asks_for_the_scale_of_its_block(amp: ModuleType, level: str) -> None:
    """Its loss has the second scaler, and another training has the first."""
    other = prepared(amp, "O4", loss_scale=1.0)
    prepared_models = [other, prepared(amp, "O1", loss_scale=16.0)]
    model, optimizer = prepared(amp, level, loss_scale=1024.0)
    seen = []

    def clamped(grad: Tensor) -> Tensor:
        seen.append(amp.loss_scale())
        return (grad / amp.loss_scale()).clamp(-0.25, 0.25) * amp.loss_scale()

    model.weight.register_hook(clamped)
    other[0].weight.register_hook(clamped)
    with amp.scale_loss(model.loss(3.0), optimizer) as scaled_loss:
        with amp.scale_loss(other[0].loss(3.0), other[1]) as other_loss:
            other_loss.backward()
        kept = amp.scale_loss(other[0].loss(3.0), other[1])
        with pytest.raises(ZeroDivisionError), kept:
            1 / 0  # noqa: B018  # a block that an error ends is closed
        scaled_loss.backward()
    assert seen == [1.0, 1024.0]
    assert amp.loss_scale() == amp.loss_scale(0) == 1.0
    assert [amp.loss_scale(i) for i in (1, 2)] == [16.0, 1024.0]
    optimizer.step()
    torch.testing.assert_close(model.weight.grad.float(), torch.full((2,), 0.25))
    del prepared_models


def test_a_hook_asks_for_the_block_of_its_thread_and_else_for_the_last(amp: ModuleType) -> None:
    one, other = (prepared(amp, "O1", loss_scale=scale) for scale in (8.0, 32.0))
    found: list[float] = []
    is_open, is_done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        found.append(amp.loss_scale())
        with amp.scale_loss(other[0].loss(1.0), other[1]) as other_loss:
            other_loss.backward()
            is_open.set()
            is_done.wait(60)
            found.append(amp.loss_scale())

    thread = threading.Thread(target=elsewhere)
    with amp.scale_loss(one[0].loss(1.0), one[1]) as scaled_loss:
        thread.start()
        is_open.wait(60)
        scaled_loss.backward()
        found.append(amp.loss_scale())
        is_done.set()
        thread.join()
    assert found == [8.0, 8.0, 32.0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_may_have_a_backward_of_its_own_that_opens_the_block(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level, 64.0)
    loss = model.loss(2.0)
    loss.backward = lambda: scaled_backward(amp, loss, optimizer)
    loss.backward()
    optimizer.step()
    assert model.weight.tolist() == [-2.0, -2.0]


def test_so_it_may_where_amp_is_disabled(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O2", enabled=False)
    loss = model.loss(2.0)
    loss.backward = lambda: scaled_backward(amp, loss, optimizer)
    loss.backward()
    optimizer.step()
    assert model.weight.tolist() == [-2.0, -2.0]
    with amp.scale_loss(None, optimizer) as given:  # which nobody looks at then
        assert given is None
