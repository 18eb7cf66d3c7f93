"""Optimizers that wrap another one: they step it in their own step, or, as SAM, in its place."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Optimizer

LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])


class SharpnessAware(Optimizer):
    """SAM, written as most scripts have it: two steps, each after a backward of its own.

    Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, 2021.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _with_gradients(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from (param for param in group["params"] if param.grad is not None)

    @torch.no_grad()
    def first_step(self) -> None:
        norms = [param.grad.norm() for param in self._with_gradients()]
        scale = 0.2 / (torch.stack(norms).norm() + 1e-12)
        for param in self._with_gradients():
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for param in self._with_gradients():
            param.data = self.state[param]["old"]
        self.base.step()
        self.zero_grad()


class OwnBackwards(SGD):
    """Makes the backwards in its own step, as GSAM does: one where it is, one a little further."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.evaluate()
        moves = [(param, 0.1 * param.grad) for param in self.param_groups[0]["params"]]
        for param, move in moves:
            param.add_(move)
        self.evaluate()
        for param, move in moves:
            param.sub_(move)
        super().step(closure)

    def evaluate(self) -> None:
        self.zero_grad()
        with torch.enable_grad():
            self.loss().backward()

    loss: Callable[[], Tensor]


class Lookahead(Optimizer):
    """Steps another optimizer in its own step; here it follows each step at once."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.fast = Adagrad(self.param_groups, **options)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self) -> None:
        self.fast.step()
        for slow, param in zip(self.slow, self.param_groups[0]["params"], strict=True):
            param.copy_(slow.lerp_(param, 0.5))


class SharingHooks(Lookahead):
    """Calls no ``super().__init__()``, and takes over what the optimizer that it steps has."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.fast = Adagrad(params, **options)
        vars(self).update(vars(self.fast))
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self) -> None:
        self.fast.step()
        for slow, param in zip(self.slow, self.param_groups[0]["params"], strict=True):
            param.data.copy_(slow.lerp_(param.data, 0.5))


class HoldingHooks(SharingHooks):
    """Has dicts of its own in the place of torch's hooks, none of which it calls."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        names = [name for name in vars(self) if name.endswith("_hooks")]
        assert names
        vars(self).update((name, {}) for name in names)


class Training:
    """A small classifier; in plain float32 where no level is given."""

    def __init__(
        self,
        make: Callable[..., Optimizer],
        amp: ModuleType | None = None,
        level: str = "",
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.amp = amp
        self.model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
        self.optimizer: Any = make(self.model.parameters(), lr=0.2)
        if amp is not None:
            self.model, self.optimizer = amp.initialize(
                self.model, self.optimizer, opt_level=level, verbosity=0, **options
            )
        self.inputs = torch.randn(64, 8)
        self.targets = (self.inputs[:, 0] * self.inputs[:, 1] > 0).long()

    def backward(self, factor: float = 1.0) -> float:
        loss = F.cross_entropy(self.model(self.inputs), self.targets)
        if self.amp is None:
            loss.backward()
        else:
            scaled_backward(self.amp, loss * factor, self.optimizer)
        return loss.item()

    def iterate_once(self) -> float:
        """Make one iteration as any script does; return the loss."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def iterate(self, factors: tuple[float, float] = (1.0, 1.0)) -> list[float]:
        """Make one iteration of SAM; return the losses of both backwards."""
        first = self.backward(factors[0])
        self.optimizer.first_step()
        second = self.backward(factors[1])
        self.optimizer.second_step()
        return [first, second]


def tolerance(level: str) -> float:
    return 0.02 if level in ("O4", "O5") else 0.003


@LEVELS
def test_sharpness_aware_minimization_trains_as_in_float32(amp: ModuleType, level: str) -> None:
    by_hand, training = Training(SharpnessAware), Training(SharpnessAware, amp, level)
    for _ in range(20):
        first, second = by_hand.iterate()
        assert second > 1.02 * first  # the first step ascends by far more than rounding
        assert training.iterate() == pytest.approx([first, second], rel=tolerance(level))


@LEVELS
@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
def test_methods_of_its_own_find_the_gradients_of_plain_backwards(
    amp: ModuleType, level: str
) -> None:
    by_hand, training = Training(SharpnessAware), Training(SharpnessAware, amp, level)
    training.amp = None
    for _ in range(20):
        assert training.iterate() == pytest.approx(by_hand.iterate(), rel=tolerance(level))


class Reading(SGD):
    """Adds to a curvature between steps, as Sophia does, by backwards that no step uses."""

    curvature = 0.0

    def update(self) -> None:
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        self.curvature += sum(grad.square().sum().item() for grad in grads if grad is not None)

    def step(self, closure: None = None) -> None:
        self.update()
        super().step(closure)


@LEVELS
@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
@pytest.mark.parametrize("backwards", [1, 3])
def test_what_backwards_add_up_to_is_read_between_steps(
    amp: ModuleType, level: str, backwards: int
) -> None:
    by_hand, training = Training(Reading), Training(Reading, amp, level)
    training.amp = None
    for one in (by_hand, training):
        for _ in range(3):
            for _ in range(backwards):
                one.backward()
                one.optimizer.update()
            one.optimizer.zero_grad()
            one.iterate_once()
    assert by_hand.optimizer.curvature > 0.0
    expected = pytest.approx(by_hand.optimizer.curvature, rel=5 * tolerance(level))
    assert training.optimizer.curvature == expected
    assert training.iterate_once() == pytest.approx(by_hand.iterate_once(), rel=tolerance(level))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("factors", [(torch.inf, 1.0), (1.0, torch.inf)], ids=["first", "second"])
def test_an_iteration_with_an_overflow_is_left_out(
    amp: ModuleType, level: str, factors: tuple[float, float]
) -> None:
    by_hand = Training(SharpnessAware)
    training = Training(SharpnessAware, amp, level, loss_scale="dynamic")
    for iteration in range(6):
        if iteration in (1, 4):
            scale = amp.loss_scale()
            training.iterate(factors)
            assert amp.step_was_skipped(training.optimizer)
            assert amp.loss_scale() < scale
        expected = by_hand.iterate()
        assert training.iterate() == pytest.approx(expected, rel=tolerance(level))
        assert not amp.step_was_skipped(training.optimizer)


@LEVELS
@pytest.mark.parametrize("make", [Lookahead, SharingHooks, HoldingHooks])
def test_a_step_that_steps_the_wrapped_optimizer_is_one(
    amp: ModuleType, level: str, make: type[Optimizer]
) -> None:
    by_hand, training = Training(make), Training(make, amp, level)
    for made in range(1, 8):
        expected = by_hand.iterate_once()
        assert training.iterate_once() == pytest.approx(expected, rel=tolerance(level))
        assert amp.session.optimizers.steps[training.optimizer].ended == made


def test_a_step_of_the_wrapped_optimizer_is_skipped_once(amp: ModuleType) -> None:
    training = Training(Lookahead, amp, "O2", loss_scale="dynamic")
    before = [param.detach().clone() for param in amp.master_params(training.optimizer)]
    training.backward(torch.inf)
    training.optimizer.fast.step()
    assert all(map(torch.equal, amp.master_params(training.optimizer), before))
    training.optimizer.zero_grad()
    training.backward()
    training.optimizer.fast.step()
    assert not any(map(torch.equal, amp.master_params(training.optimizer), before))


def test_the_wrapped_optimizer_clears_half_gradients_too(amp: ModuleType) -> None:
    training = Training(SharpnessAware, amp, "O2")
    training.backward()
    assert all(param.grad is not None for param in training.model.parameters())
    training.optimizer.base.zero_grad()
    assert all(param.grad is None for param in training.model.parameters())


def test_deactivate_gives_the_wrapped_optimizer_its_methods_back(amp: ModuleType) -> None:
    training = Training(SharpnessAware, amp, "O2")
    wrapped = training.optimizer.base
    assert {"step", "zero_grad"} <= vars(wrapped).keys()
    amp.deactivate()
    assert vars(wrapped).keys().isdisjoint({"step", "zero_grad"})


def test_an_optimizer_that_another_holds_and_does_not_step_is_left_alone(amp: ModuleType) -> None:
    def holding(params: Any, lr: float) -> Optimizer:
        optimizer = SGD(params, lr=lr)
        optimizer.other = SGD([nn.Parameter(torch.zeros(1))], lr=lr)  # type: ignore[attr-defined]
        return optimizer

    training = Training(holding, amp, "O2")
    assert vars(training.optimizer.other).keys().isdisjoint({"step", "zero_grad"})


class Forwarding(Optimizer):
    """Hands each call on to what it wraps; clears twice."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def step(self) -> None:
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)
        super().zero_grad(set_to_none)


class Outer(SharpnessAware):
    """Wraps what wraps another: the innermost one steps."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.inner, self.base = self.base, Forwarding(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def second_step(self) -> None:
        for param in self._with_gradients():
            param.data = self.state[param]["old"]
        self.base.base.step()
        self.zero_grad()


@LEVELS
def test_a_wrapper_may_clear_in_both_ways(amp: ModuleType, level: str) -> None:
    by_hand, training = Training(Forwarding), Training(Forwarding, amp, level)
    for _ in range(4):
        expected = by_hand.iterate_once()
        assert training.iterate_once() == pytest.approx(expected, rel=tolerance(level))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_two_levels_down_is_skipped(amp: ModuleType, level: str) -> None:
    by_hand = Training(Outer)
    training = Training(Outer, amp, level, loss_scale="dynamic")
    training.iterate((1.0, torch.inf))
    for _ in range(3):
        expected = by_hand.iterate()
        assert training.iterate() == pytest.approx(expected, rel=tolerance(level))


def test_an_unfinished_optimizer_that_another_holds_is_left_alone(amp: ModuleType) -> None:
    def holding(params: Any, lr: float) -> Optimizer:
        optimizer = SGD(params, lr=lr)
        optimizer.later = object.__new__(SGD)  # type: ignore[attr-defined]
        return optimizer

    training = Training(holding, amp, "O2")
    assert vars(training.optimizer.later) == {}


@pytest.mark.filterwarnings("ignore:an optimizer that steps float16 weights needs an eps")
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_the_state_of_the_wrapped_optimizer_is_kept(amp: ModuleType, level: str) -> None:
    training = Training(Lookahead)  # by Adagrad
    state = training.optimizer.fast.state
    for made in (1, 2, 3):
        if made == 2:
            amp.initialize(training.model, training.optimizer, opt_level=level, verbosity=0)
            training.amp = amp
        elif made == 3:
            amp.deactivate()
            training.amp = None
        training.optimizer.zero_grad()
        training.backward()
        training.optimizer.step()
        params = training.optimizer.param_groups[0]["params"]
        assert [int(state[param]["step"]) for param in params] == [made] * 4
        assert len(state) == 4
        assert all(state[param]["sum"].dtype is param.dtype for param in params)


@LEVELS
@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
def test_a_step_makes_its_own_backwards(amp: ModuleType, level: str) -> None:
    trained = []
    for initialize in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = OwnBackwards(model.parameters(), lr=0.5)
        if initialize:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        optimizer.loss = lambda model=model: model(torch.ones(4, 3)).float().square().mean()
        for _ in range(3):
            optimizer.step()
        trained.append(model.state_dict())
    torch.testing.assert_close(*trained, rtol=0.02, atol=0.01)


class DerivedSharpnessAware(SGD):
    """SAM that is derived from what it steps by, and steps in a method of its own."""

    @torch.no_grad()
    def first_step(self) -> None:
        self.before = [(param, param.clone()) for param in self.param_groups[0]["params"]]
        for param, _ in self.before:
            param.add_(param.grad, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for param, before in self.before:
            param.copy_(before)
        super().step()


class ClearingSharpnessAware(DerivedSharpnessAware):
    """Goes as far as the gradients say, of whatever size they are, and clears both."""

    def second_step(self) -> None:
        super().second_step()
        self.zero_grad()


@LEVELS
@pytest.mark.parametrize("make", [SharpnessAware, ClearingSharpnessAware])
def test_its_first_step_finds_gradients_that_wait_scaled(
    amp: ModuleType, level: str, make: Callable[..., Optimizer]
) -> None:
    """As DDP's ``no_sync()`` leaves them, under which SAM's first backward is on each rank."""
    by_hand, training = Training(make), Training(make, amp, level)
    for _ in range(8):
        expected = by_hand.iterate()
        loss = F.cross_entropy(training.model(training.inputs), training.targets)
        scaled_backward(amp, loss, training.optimizer, delay_unscale=True)
        training.optimizer.first_step()
        found = [loss.item(), training.backward()]
        training.optimizer.second_step()
        assert found == pytest.approx(expected, rel=tolerance(level))


class PastOwn(SGD):
    """Is stepped by its class."""

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        SGD.step(self)


@LEVELS
@pytest.mark.parametrize("make", [DerivedSharpnessAware, PastOwn])
def test_a_step_past_the_own_one_trains_as_in_fp32(amp: ModuleType, level: str, make: Any) -> None:
    found, expected = (stepped_past_own(make, one, amp, [1.0] * 4) for one in (level, None))
    for one, other in zip(found[-1], expected[-1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.003)
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [DerivedSharpnessAware, PastOwn])
def test_a_step_past_the_own_one_is_skipped_after_an_overflow(
    amp: ModuleType, level: str, make: Any
) -> None:
    first, skipped, last = stepped_past_own(make, level, amp, [1.0, torch.inf, 1.0])
    assert all(map(torch.equal, first, skipped))
    assert all(bool(one.isfinite().all()) for one in last)
    assert not torch.equal(last[0], skipped[0])


def stepped_past_own(
    make: Any, level: str | None, amp: ModuleType, factors: list[float]
) -> list[list[Tensor]]:
    """Return the weights after each step, of which the second loss is multiplied by a factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    inputs, targets = torch.randn(32, 6), torch.randint(3, (32,))
    optimizer = make(model.parameters(), lr=0.1)
    if level is not None:
        options = {"opt_level": level, "init_scale": 256.0, "verbosity": 0}
        model, optimizer = amp.initialize(model, optimizer, **options)
    weights = []
    for factor in factors:
        for act, times in ((optimizer.first_step, 1.0), (optimizer.second_step, factor)):
            loss = F.cross_entropy(model(inputs), targets) * times
            if level is None:
                loss.backward()
            else:
                scaled_backward(amp, loss, optimizer)
            act()
        if level is not None:
            assert amp.step_was_skipped(optimizer) == (factor == torch.inf)
        optimizer.zero_grad()
        weights.append([value.clone() for value in model.state_dict().values()])
    return weights


@LEVELS
def test_a_write_through_data_before_an_own_method_is_kept(amp: ModuleType, level: str) -> None:
    """Of which no version tells, while the method writes to the masters."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = DerivedSharpnessAware(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.weight.data.fill_(0.5)
    for act in (optimizer.first_step, optimizer.second_step):
        scaled_backward(amp, model(torch.ones(1, 4)).float().square().mean(), optimizer)
        act()
    assert model.state_dict()["weight"].eq(0.5).all()


def descent() -> tuple[type[Optimizer], type[Optimizer]]:
    """Return a class of which no optimizer was made: torch calls no hooks there; and one of it."""

    class Descent(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-self.param_groups[0]["lr"])

    class Derived(Descent):
        def first_step(self) -> None:
            self.zero_grad()

        def second_step(self) -> None:
            super().step()

        def step(self, closure: Any = None) -> None:
            super().step(closure)

    return Descent, Derived


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_past_the_own_one_is_skipped_where_torch_calls_no_hooks(
    amp: ModuleType, level: str
) -> None:
    base, derived = descent()
    own = base.step
    first, skipped, last = stepped_past_own(derived, level, amp, [1.0, torch.inf, 1.0])
    assert all(map(torch.equal, first, skipped))
    assert all(bool(one.isfinite().all()) for one in last)
    assert not torch.equal(last[0], skipped[0])
    amp.deactivate()
    assert base.step is own


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_hooks_of_a_derived_optimizer_are_called_as_often_as_without(
    amp: ModuleType, level: str
) -> None:
    model = nn.Linear(4, 2)
    optimizer = descent()[1](model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    calls: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for _ in range(2):
        scaled_backward(amp, model(torch.ones(1, 4)).float().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert calls == ["post"] * 2


def test_gradients_kept_from_a_step_that_raised_are_not_stepped_later(amp: ModuleType) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = DerivedSharpnessAware(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, init_scale=4.0)
    optimizer.before = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    scaled_backward(amp, model(torch.ones(1, 4)).float().mean() * torch.inf, optimizer)
    with pytest.raises(KeyboardInterrupt):
        optimizer.second_step()
    handle.remove()
    optimizer.zero_grad()
    before = model.weight.clone()
    scaled_backward(amp, model(torch.ones(1, 4)).float().mean(), optimizer)
    optimizer.second_step()
    assert not amp.step_was_skipped(optimizer)
    assert not torch.equal(model.weight, before)
    assert bool(model.weight.isfinite().all())


@LEVELS
def test_own_methods_find_gradients_that_a_script_gave_to_the_model(
    amp: ModuleType, level: str
) -> None:
    """By ``torch.autograd.grad``, after which no backward was."""
    model = nn.Linear(4, 2)
    optimizer = DerivedSharpnessAware(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    before = model.weight.clone()
    params = list(model.parameters())
    grads = torch.autograd.grad(model(torch.ones(1, 4)).float().sum(), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.first_step()
    assert not torch.equal(model.state_dict()["weight"], before)
