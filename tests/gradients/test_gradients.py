"""Gradients from scaled to unscaled, against sums written by hand: equal to the bit.

All coefficients and scales are powers of two or small integers, so no sum is ever rounded.
"""

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_patch.gradients.gradient_buffers import GradientBuffers
from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.session import session

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
NAMES = ("a", "b", "norm")


class Weights(nn.Module):
    """Two weights that go half where the level stores halves, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(2, 2))
        self.norm = nn.BatchNorm1d(2)
        self.norm.bias.requires_grad_(False)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        return {"a": self.a, "b": self.b, "norm": self.norm.weight}

    def loss(self, coefficients: dict[str, float]) -> Tensor:
        """Return a loss whose gradients are the coefficients."""
        return sum(self.named[name].float().sum() * c for name, c in coefficients.items())


def prepared(
    amp: ModuleType, level: str, loss_scale: Any = 8.0, num_losses: int = 1
) -> tuple[Weights, Optimizer]:
    model = Weights()
    optimizer = SGD(model.named.values(), lr=1.0)
    return amp.initialize(
        model,
        optimizer,
        opt_level=level,
        loss_scale=loss_scale,
        num_losses=num_losses,
        verbosity=0,
        min_loss_scale=0.25,
    )


def backward(
    amp: ModuleType, model: Weights, optimizer: Any, coefficients: dict[str, float], **options: Any
) -> None:
    scaled_backward(amp, model.loss(coefficients), optimizer, **options)


def gradients(amp: ModuleType, optimizer: Optimizer) -> dict[str, list[float] | None]:
    """Return what the optimizer is about to step with."""
    return {
        name: None if param.grad is None else param.grad.flatten().tolist()
        for name, param in zip(NAMES, amp.master_params(optimizer), strict=True)
    }


class Reference:
    """Sums of coefficients: those unscaled, and those delayed."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.clear()

    def clear(self) -> None:
        self.sums: dict[str, float] = {}
        self.delayed: dict[str, float] = {}

    def backward(self, coefficients: dict[str, float], delay: bool) -> None:
        for name, c in coefficients.items():
            self.delayed[name] = self.delayed.get(name, 0.0) + c
        if not delay:
            for name, c in self.delayed.items():
                self.sums[name] = self.sums.get(name, 0.0) + c
            self.delayed = {}

    def fail(self, wrote: bool) -> None:
        if wrote:
            self.delayed = {}

    @property
    def gradients(self) -> dict[str, list[float] | None]:
        return {
            name: [self.sums[name]] * size if name in self.sums else None
            for name, size in self.sizes.items()
        }


COEFFICIENTS = st.dictionaries(
    st.sampled_from(NAMES), st.integers(-8, 8).map(float), min_size=1, max_size=3
)
SCALES = st.integers(-2, 8).map(lambda power: 2.0**power)
ACTIONS = st.one_of(
    st.tuples(st.just("backward"), COEFFICIENTS, st.booleans(), st.integers(0, 1)),
    st.tuples(st.just("fail"), COEFFICIENTS, st.booleans(), st.booleans()),
    st.tuples(st.just("clear"), st.sampled_from(["optimizer", "model", "one by one"])),
    st.tuples(st.just("scale"), st.integers(0, 1), SCALES),
)


def clear(how: str, model: Weights, optimizer: Optimizer) -> None:
    if how == "optimizer":
        optimizer.zero_grad()
    elif how == "model":
        model.zero_grad()
    else:
        for param in model.parameters():
            param.grad = None


def fail(
    amp: ModuleType, model: Weights, optimizer: Optimizer, coefficients: dict[str, float],
    delay: bool, wrote: bool,
) -> None:  # fmt: skip
    loss = model.loss(coefficients)
    with pytest.raises(ArithmeticError):  # noqa: PT012, SIM117  # what raises is the body
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
            if wrote:
                scaled_loss.backward()
            raise ArithmeticError


def act(
    action: tuple[Any, ...], amp: ModuleType, model: Weights, optimizer: Optimizer,
    reference: Reference,
) -> None:  # fmt: skip
    """Do the same to the model and to the reference."""
    kind, *details = action
    if kind == "backward":
        coefficients, delay, loss_id = details
        backward(amp, model, optimizer, coefficients, delay_unscale=delay, loss_id=loss_id)
        reference.backward(coefficients, delay)
    elif kind == "fail":
        fail(amp, model, optimizer, *details)
        reference.fail(wrote=details[2])
    elif kind == "clear":
        clear(details[0], model, optimizer)
        reference.clear()
    else:
        session.scalers[details[0]].scale = details[1]


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_any_sequence_of_backward_passes_gives_the_exact_sums(amp: ModuleType, level: str) -> None:
    kept = prepared(amp, level, "dynamic", num_losses=2)  # torch stays patched while it lives

    @given(st.lists(ACTIONS, max_size=10))
    def run(actions: list[tuple[Any, ...]]) -> None:
        model, optimizer = prepared(amp, level, "dynamic", num_losses=2)
        reference = Reference({name: p.numel() for name, p in model.named.items()})
        for scaler in session.scalers:
            scaler.scale = 8.0
        for action in [*actions, ("backward", {"a": 1.0}, False, 0)]:
            act(action, amp, model, optimizer, reference)
            if action[0] in ("clear", "scale"):
                continue  # the masters follow a cleared model at the next call
            if not reference.delayed:
                assert gradients(amp, optimizer) == reference.gradients
            else:
                with pytest.raises(RuntimeError, match="needs unscaled gradients"):
                    optimizer.step()

    run()
    del kept


@pytest.mark.filterwarnings("ignore:gradients must last until the step")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["optimizer", "model", "one by one"])
@pytest.mark.parametrize("delay", [False, True])
def test_a_step_after_clearing_changes_nothing(
    amp: ModuleType, level: str, how: str, delay: bool
) -> None:
    model, optimizer = prepared(amp, level)
    backward(amp, model, optimizer, {"a": 1.0, "b": 1.0})
    backward(amp, model, optimizer, {"a": 1.0, "norm": 1.0}, delay_unscale=delay)
    clear(how, model, optimizer)
    assert amp.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    optimizer.step()
    assert [param.sum().item() for param in model.named.values()] == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("loss_scale", [None, 1.0, 8.0, "dynamic"])
def test_accumulated_gradients_are_the_exact_sum(
    amp: ModuleType, level: str, delay: bool, loss_scale: Any
) -> None:
    model, optimizer = prepared(amp, level, loss_scale)
    if level != "O0" and amp.loss_scale() > 2.0**10:
        session.scalers[0].scale = 2.0**10
    for i, c in enumerate((1.0, 2.0, 3.0, 0.5)):
        names = {"a": c, "norm": c} if i % 2 else {"a": c, "b": c}
        backward(amp, model, optimizer, names, delay_unscale=delay and i < 3)
    assert gradients(amp, optimizer) == {"a": [6.5] * 3, "b": [4.0] * 4, "norm": [2.5] * 2}
    optimizer.step()
    for name, value in (("a", -6.5), ("b", -4.0), ("norm", 1 - 2.5)):
        assert model.named[name].flatten().tolist() == [value] * model.named[name].numel()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_of_one_cleared_parameter_only_what_came_before_is_lost(
    amp: ModuleType, level: str, delay: bool
) -> None:
    model, optimizer = prepared(amp, level)
    every = {"a": 1.0, "b": 1.0, "norm": 1.0}
    backward(amp, model, optimizer, every)
    backward(amp, model, optimizer, every, delay_unscale=delay)
    model.norm.zero_grad()
    by_hand = level == "O1" and not delay  # else what came before is not in it
    if by_hand:
        model.a.grad = None
    backward(amp, model, optimizer, every)
    optimizer.step()
    expected = [-1.0 if by_hand else -3.0, -3.0, 1.0 - 1.0]
    assert [model.a[0].item(), model.b[0, 0].item(), model.norm.weight[0].item()] == expected


def test_gradients_that_were_delayed_go_when_they_are_cleared(amp: ModuleType) -> None:
    """Else they would lie in memory beside those of the next forward and backward."""
    model, optimizer = prepared(amp, "O1")
    for delay in (True, True, False):
        backward(amp, model, optimizer, {"a": 1.0, "b": 1.0, "norm": 1.0}, delay_unscale=delay)
    grads = [weakref.ref(param.grad) for param in model.named.values()]
    optimizer.step()
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None] * 3


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_half_would_flush_to_zero_reaches_the_master(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level, 2.0**16)
    backward(amp, model, optimizer, {"a": 2.0**-40})
    assert gradients(amp, optimizer)["a"] == [2.0**-40] * 3


def test_accumulation_without_delay_adds_in_fp32(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O2", 2.0**4)
    for c in (1.0, 2.0**-14, 2.0**-14):
        backward(amp, model, optimizer, {"a": c})
    assert gradients(amp, optimizer)["a"] == [1.0 + 2.0**-13] * 3


def test_the_scale_may_change_between_delayed_backward_passes(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O2", "dynamic", num_losses=2)
    for loss_id, scale in ((0, 4.0), (1, 64.0), (0, 0.5)):
        session.scalers[loss_id].scale = scale
        backward(amp, model, optimizer, {"a": 3.0}, loss_id=loss_id, delay_unscale=True)
        assert model.a.grad.tolist() == [3.0 * scale * (loss_id + 1 if scale != 0.5 else 3)] * 3
    backward(amp, model, optimizer, {"b": 1.0})
    assert gradients(amp, optimizer) == {"a": [9.0] * 3, "b": [1.0] * 4, "norm": None}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_is_the_same_object_while_it_accumulates(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    backward(amp, model, optimizer, {"a": 1.0})
    master = next(amp.master_params(optimizer))
    first = master.grad
    backward(amp, model, optimizer, {"a": 1.0})
    assert master.grad is first


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("wrote", [False, True])
def test_a_body_that_raises_leaves_every_gradient_as_it_was(
    amp: ModuleType, level: str, wrote: bool
) -> None:
    model, optimizer = prepared(amp, level)
    backward(amp, model, optimizer, {"a": 3.0, "norm": 2.0})
    before = [p.grad if p.grad is None else p.grad.clone() for p in model.named.values()]
    objects = [p.grad for p in model.named.values()]
    expected = gradients(amp, optimizer)
    fail(amp, model, optimizer, {"a": 1.0, "b": 1.0}, False, wrote)
    assert gradients(amp, optimizer) == expected
    for param, old, value in zip(model.named.values(), objects, before, strict=True):
        assert param.grad is old
        assert value is None or torch.equal(param.grad, value)
    backward(amp, model, optimizer, {"a": 1.0, "b": 1.0})
    assert gradients(amp, optimizer) == {"a": [4.0] * 3, "b": [1.0] * 4, "norm": [2.0] * 2}


def test_a_body_that_raises_before_backward_keeps_delayed_gradients(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O2")
    backward(amp, model, optimizer, {"a": 3.0}, delay_unscale=True)
    fail(amp, model, optimizer, {"a": 1.0}, True, wrote=False)
    backward(amp, model, optimizer, {"a": 1.0})
    assert gradients(amp, optimizer)["a"] == [4.0] * 3


# --- whoever holds a gradient keeps its values ---


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda grad: grad,
    "a view": lambda grad: grad[:1],
    "detached": lambda grad: grad.detach(),
    "numpy": lambda grad: grad.numpy(),
    "dlpack": lambda grad: torch.from_dlpack(grad),
    "a parameter's grad": lambda grad: _as_grad(grad),
}


def _as_grad(grad: Tensor) -> Tensor:
    holder = nn.Parameter(torch.zeros_like(grad))
    holder.grad = grad
    return holder


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")
@pytest.mark.parametrize("hold", HOLDS)
def test_a_held_gradient_is_not_written_over_by_the_next_step(amp: ModuleType, hold: str) -> None:
    model, optimizer = prepared(amp, "O2")
    for _ in range(3):
        optimizer.zero_grad()
        backward(amp, model, optimizer, {"a": 1.0, "b": 1.0})
        optimizer.step()
    backward(amp, model, optimizer, {"a": 2.0, "b": 2.0})
    held = HOLDS[hold](next(amp.master_params(optimizer)).grad)
    optimizer.step()
    optimizer.zero_grad()
    backward(amp, model, optimizer, {"a": 5.0, "b": 5.0})
    held = held.grad if isinstance(held, nn.Parameter) else held
    assert set(held.tolist()) == {2.0}
    assert gradients(amp, optimizer)["a"] == [5.0] * 3


def test_gradients_of_two_backward_passes_never_share_memory(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O2")
    for _ in range(2):
        optimizer.zero_grad()
        backward(amp, model, optimizer, {"a": 1.0})
        backward(amp, model, optimizer, {"a": 2.0})
        backward(amp, model, optimizer, {"a": 4.0})
        assert gradients(amp, optimizer)["a"] == [7.0] * 3
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_deactivate_unscales_what_was_delayed_and_keeps_the_rest(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    backward(amp, model, optimizer, {"a": 3.0, "norm": 2.0})
    backward(amp, model, optimizer, {"a": 1.0, "b": 5.0}, delay_unscale=True)
    amp.deactivate()
    grads = {name: param.grad.flatten().tolist() for name, param in model.named.items()}
    assert grads == {"a": [4.0] * 3, "b": [5.0] * 4, "norm": [2.0] * 2}


@pytest.mark.parametrize("level", LEVELS)
def test_deactivate_in_a_block_keeps_what_its_backward_wrote(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    backward(amp, model, optimizer, {"a": 3.0})
    with amp.scale_loss(model.loss({"a": 1.0, "b": 5.0}), optimizer) as scaled_loss:
        scaled_loss.backward()
        amp.deactivate()
    assert model.a.grad.flatten().tolist() == [4.0] * 3
    assert model.b.grad.flatten().tolist() == [5.0] * 4


# --- parameters that two optimizers step ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", [False, True])
def test_a_parameter_of_two_optimizers_is_unscaled_once(
    amp: ModuleType, level: str, delay: bool
) -> None:
    model = Weights()
    optimizers = [SGD([model.a, model.b], lr=1.0), SGD([model.b, model.a], lr=1.0)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=8.0, verbosity=0)
    backward(amp, model, optimizers, {"a": 3.0}, delay_unscale=delay)
    session.scalers[0].scale = 4.0
    backward(amp, model, optimizers, {"a": 1.0, "b": 2.0})
    for optimizer in optimizers:
        grads = {p.numel(): p.grad.flatten().tolist() for p in amp.master_params(optimizer)}
        assert grads == {3: [4.0] * 3, 4: [2.0] * 4}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_failing_body_restores_what_two_optimizers_share(amp: ModuleType, level: str) -> None:
    model = Weights()
    optimizers = [SGD([model.a], lr=1.0), SGD([model.a], lr=1.0)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=8.0, verbosity=0)
    backward(amp, model, optimizers, {"a": 3.0})
    fail(amp, model, optimizers, {"a": 1.0}, False, wrote=True)
    for optimizer in optimizers:
        assert next(amp.master_params(optimizer)).grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_backward_that_does_not_reach_an_optimizer_leaves_its_gradients(
    amp: ModuleType, level: str
) -> None:
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level=level, loss_scale=8.0, verbosity=0)
    inputs = torch.ones(1, 2)

    def run(reached: list[nn.Module], **options: Any) -> None:
        loss = sum(model(inputs).float().sum() for model in reached)
        with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
            scaled_loss.backward()

    run(models)
    run(models[:1], delay_unscale=True)
    run(models[:1])
    got = [next(amp.master_params(optimizer)).grad.tolist() for optimizer in optimizers]
    assert got == [[[3.0, 3.0]], [[1.0, 1.0]]]
    run(models[1:], delay_unscale=True)
    for model in models:
        model.zero_grad()
    run(models)
    got = [next(amp.master_params(optimizer)).grad.tolist() for optimizer in optimizers]
    assert got[1] == [[1.0, 1.0]]


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_whose_gradients_the_user_drops_skips_no_step(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    backward(amp, model, optimizer, {"a": float("inf"), "b": 1.0})
    model.zero_grad()
    backward(amp, model, optimizer, {"a": 1.0})
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    backward(amp, model, optimizer, {"a": float("inf"), "b": 1.0})
    model.a.grad = None  # b's gradient is still of the pass that overflowed
    backward(amp, model, optimizer, {"a": 1.0})
    optimizer.step()
    assert amp.step_was_skipped(optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_moved_between_steps_receives_where_it_is(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    for device in ("cpu", "cuda", "cpu"):
        model.to(device)
        optimizer.zero_grad()
        backward(amp, model, optimizer, {"a": 1.0, "b": 2.0, "norm": 3.0})
        got = gradients(amp, optimizer)
        assert got == {"a": [1.0] * 3, "b": [2.0] * 4, "norm": [3.0] * 2}
        optimizer.step()
        assert {param.device.type for param in amp.master_params(optimizer)} == {device}


def test_gradients_of_what_other_ranks_step_follow_the_scale_or_go() -> None:
    """Parameters of a `ZeroRedundancyOptimizer` that are not of this rank's share."""
    own, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    pairs, gradients = ParamPairs([own], [own]), Gradients()
    own.grad, elsewhere.grad = torch.full((2,), 4.0), torch.full((2,), 12.0)
    gradients.elsewhere = [elsewhere]
    gradients.delay(pairs, 4.0)
    gradients.set_aside(pairs, 8.0)
    assert own.grad.tolist() == [8.0, 8.0]
    assert elsewhere.grad.tolist() == [24.0, 24.0]
    gradients.passes.finish(gradients.passes.receive(pairs, 8.0))
    gradients.set_aside(pairs, 8.0)
    assert elsewhere.grad is None


def test_a_gradient_that_fits_no_more_does_not_hide_the_error_of_a_backward() -> None:
    """A flat parameter of FSDP1 stays gathered where its backward fails."""
    param = nn.Parameter(torch.zeros(2))
    pairs, gradients = ParamPairs([param], [param]), Gradients()
    param.grad = torch.ones(2)
    gradients.set_aside(pairs, 8.0)
    param.data = torch.zeros(4)
    gradients.put_back(pairs)
    assert param.grad is None


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_script_that_clears_by_zeros_has_its_buffers_kept(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """The half parameters' zeros are taken in before each block, and no table is made for them."""
    model, optimizer = prepared(amp, level)
    made: list[GradientBuffers] = []
    make = GradientBuffers.__init__

    def noting(self: GradientBuffers, pairs: ParamPairs) -> None:
        made.append(self)
        make(self, pairs)

    monkeypatch.setattr(GradientBuffers, "__init__", noting)
    for step in range(1, 6):
        optimizer.zero_grad(set_to_none=False)
        with amp.scale_loss(model.loss({"a": 1.0, "b": 2.0, "norm": 4.0}), optimizer) as loss:
            loss.backward()
        optimizer.step()
        if step == 3:
            made.clear()
    assert made == []
    assert model.a.tolist() == [-5.0] * 3
    assert model.b.flatten().tolist() == [-10.0] * 4
    assert model.norm.weight.tolist() == [1.0 - 20.0] * 2
