"""Half weights that hooks, or the step itself, write to while an optimizer steps their masters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

LEVELS = pytest.mark.parametrize("level", ["O2", "O5"])
BOUND = 0.2


class Training:
    """A small classifier, stepped by what ``make`` returns; in float32 where no level is given."""

    def __init__(
        self,
        make: Callable[[nn.Module], Optimizer],
        amp: ModuleType | None = None,
        level: str = "",
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.inputs, self.targets = torch.randn(32, 6), torch.randint(3, (32,))
        self.amp, self.optimizer = amp, make(self.model)
        if amp is not None:
            amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **options)

    def run(self, steps: int = 12) -> list[Tensor]:
        """Train; return the float32 values of the weights."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.loss()
            if self.amp is None:
                loss.backward()
            else:
                with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
                    scaled_loss.backward()
            self.optimizer.step()
        return list(self.model.state_dict().values())

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.inputs), self.targets)


@contextlib.contextmanager
def taking_hooks_off(amp: ModuleType) -> Iterator[None]:
    """Hooks of all optimizers that come in this block go with its end, as amp does."""
    known = dict(hooks)
    try:
        yield
    finally:
        amp.deactivate()
        hooks.clear()
        hooks.update(known)


@torch.no_grad()
def project(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-BOUND, BOUND)


def acting_before(
    kind: Callable[..., Optimizer],
    act: Callable[[nn.Module], None],
    everywhere: bool,
    **options: Any,
) -> Callable[[nn.Module], Optimizer]:
    """Return what makes an optimizer whose hook, or a hook of all, acts on the model before it."""

    def make(model: nn.Module) -> Optimizer:
        optimizer = kind(model.parameters(), **options)

        def before(stepped: Optimizer, *_: Any) -> None:
            if stepped is optimizer:
                act(model)

        if everywhere:
            register_optimizer_step_pre_hook(before)
        else:
            optimizer.register_step_pre_hook(before)
        return optimizer

    return make


def projecting_before(
    kind: type[Optimizer], everywhere: bool = False, **options: Any
) -> Callable[[nn.Module], Optimizer]:
    return acting_before(kind, project, everywhere, lr=0.3, **options)


@LEVELS
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        projecting_before(SGD),
        projecting_before(SGD, momentum=0.9),
        projecting_before(AdamW, fused=True),
        projecting_before(SGD, everywhere=True),
    ],
    ids=["SGD", "momentum", "AdamW", "a hook of all"],
)
def test_a_hook_before_the_step_may_write_to_the_weights(
    amp: ModuleType, level: str, fused_step: bool, make: Any
) -> None:
    with taking_hooks_off(amp):
        expected = Training(make).run()
        training = Training(make, amp, level, fused_step=fused_step)
        found = training.run()
    tolerance = 0.02 if level == "O5" else 0.005
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    free = Training(lambda model: type(training.optimizer)(model.parameters(), lr=0.3)).run()
    assert any(float((a - b).abs().max()) > 0.05 for a, b in zip(free, expected, strict=True))


def projecting_in(model: nn.Module) -> Optimizer:
    class Projected(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                param -= 0.3 * param.grad
            project(model)

    return Projected(model.parameters(), {"lr": 0.3})


def projecting_behind(model: nn.Module) -> Optimizer:
    SGD(model.parameters())  # from now on its step calls hooks, that of a subclass as well

    class Projected(SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            project(model)
            return result

    return Projected(model.parameters(), lr=0.3)


def of_its_own_list(model: nn.Module) -> Optimizer:
    class Own(Optimizer):
        def __init__(self, params: Any) -> None:
            self.own = list(params)
            super().__init__(self.own, {"lr": 0.3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.own:
                param -= 0.3 * param.grad  # type: ignore[operator]  # there is one

    return Own(model.parameters())


def writing_to_its_groups(model: nn.Module) -> Optimizer:
    class Plain(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param -= 0.3 * param.grad

    return Plain(model.parameters(), {"lr": 0.3})


def evaluating(model: nn.Module) -> Optimizer:
    """The step moves the weights, evaluates the model there, and moves them on."""

    class Evaluating(SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            with torch.no_grad():
                model(torch.zeros(1, 6))
            super().step()

    return Evaluating(model.parameters(), lr=0.15)


def evaluating_by_hand(model: nn.Module) -> Optimizer:
    """As `evaluating`; nothing publishes the masters but the forward."""

    class Evaluating(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                param -= 0.3 * param.grad
            model(torch.zeros(1, 6))

    return Evaluating(model.parameters(), {"lr": 0.3})


def stepping_twice(model: nn.Module) -> Optimizer:
    """By a kernel that moves no version."""
    AdamW(model.parameters(), fused=True)

    class Twice(AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

    return Twice(model.parameters(), lr=0.02, fused=True)


def preconditioning(model: nn.Module) -> Optimizer:
    """As K-FAC: it writes to the gradients of the model, and steps those of its groups."""

    class Preconditioned(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in model.parameters():
                assert param.grad is not None
                param.grad.data.copy_(param.grad.data.sign())
            for param in self.param_groups[0]["params"]:
                param -= 0.01 * param.grad

    return Preconditioned(model.parameters(), {"lr": 0.01})


def clipping(model: nn.Module) -> Optimizer:
    """By torch's function, which shows the model's gradients anew."""

    class Clipped(SGD):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return super().step(closure)

    return Clipped(model.parameters(), lr=0.3)


def triple(param: Any) -> None:
    param.grad = param.grad * 3


def drop_small(param: Any) -> None:
    if param.dim() == 1:
        param.grad = None


def triple_in_place(param: Any) -> None:
    param.grad.mul_(3)


def begin_anew(param: Any) -> None:
    param.grad = torch.ones_like(param)


class Nested(SGD):
    """Its step calls another one, so that hooks are called twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class ByHand(Optimizer):
    """A step that is not torch's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])


def changing_before(
    kind: Callable[..., Optimizer], change: Callable[[Any], None], everywhere: bool = False
) -> Callable[[nn.Module], Optimizer]:
    """Return what makes an optimizer whose hook changes gradients of the model before each step."""

    def change_all(model: nn.Module) -> None:
        for param in model.parameters():
            change(param)

    return acting_before(kind, change_all, everywhere, lr=0.05)


@LEVELS
@pytest.mark.parametrize(
    ("kind", "everywhere"), [(SGD, False), (SGD, True), (Nested, False), (ByHand, False)]
)
@pytest.mark.parametrize("change", [triple, drop_small, begin_anew])
def test_a_hook_before_the_step_may_give_and_clear_gradients(
    amp: ModuleType, level: str, change: Any, kind: Any, everywhere: bool
) -> None:
    make = changing_before(kind, change, everywhere)
    with taking_hooks_off(amp):
        expected = Training(make).run(3)
        found = Training(make, amp, level, loss_scale=128.0).run(3)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-3)


@LEVELS
@pytest.mark.parametrize("options", [{}, {"fused_step": True}], ids=["", "fused"])
def test_gradients_that_a_hook_gives_alone_are_stepped(
    amp: ModuleType, level: str, options: dict[str, bool]
) -> None:
    """As evolution strategies have them: no backward has come before."""
    make = changing_before(SGD if not options else AdamW, begin_anew)
    plain, training = Training(make), Training(make, amp, level, loss_scale=128.0, **options)
    for one in (plain, training):
        one.optimizer.step()
    found = list(training.model.state_dict().values())
    expected = list(plain.model.state_dict().values())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@LEVELS
def test_what_a_hook_writes_to_half_gradients_in_place_is_told_of(
    amp: ModuleType, level: str
) -> None:
    with pytest.warns(UserWarning, match="written to the gradients of half parameters"):
        Training(changing_before(SGD, triple_in_place), amp, level, loss_scale=128.0).run(1)


@LEVELS
@pytest.mark.parametrize(
    ("make", "count"),
    [(preconditioning, 1), (writing_to_its_groups, 0), (clipping, 0), (evaluating, 0)],
    ids=["preconditions", "groups", "clips", "evaluates"],
)
def test_what_the_step_writes_to_half_gradients_is_told_of(
    amp: ModuleType, level: str, make: Any, count: int
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Training(make, amp, level).run()
    told = ["written to the gradients of half parameters" in str(one.message) for one in caught]
    assert told == [True] * count


@LEVELS
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (projecting_in, 1),
        (of_its_own_list, 1),
        (writing_to_its_groups, 0),
        (evaluating, 0),
        (projecting_before(SGD), 0),
        (projecting_behind, 0),
        (evaluating_by_hand, 0),
        (stepping_twice, 0),
    ],
    ids=["projects", "own list", "groups", "evaluates", "hook", "after", "by hand", "twice"],
)
def test_what_the_step_writes_to_half_weights_is_told_of(
    amp: ModuleType, level: str, make: Any, count: int
) -> None:
    training = Training(make, amp, level)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.run(3)
    assert ["wrote to half weights itself" in str(one.message) for one in caught] == [True] * count
    assert [one.filename for one in caught] == [__file__] * count


@LEVELS
@pytest.mark.parametrize(
    "make", [projecting_behind, evaluating, stepping_twice], ids=["projects", "evaluates", "twice"]
)
def test_a_step_may_go_on_behind_another_one(amp: ModuleType, level: str, make: Any) -> None:
    """Of which the hooks have published the masters."""
    expected = Training(make).run()
    found = Training(make, amp, level).run()
    tolerance = 0.02 if level == "O5" else 0.005
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@LEVELS
def test_a_hook_behind_the_step_may_write_to_the_weights(amp: ModuleType, level: str) -> None:
    def make(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.3)
        optimizer.register_step_post_hook(lambda *_: project(model))
        return optimizer

    found = Training(make, amp, level).run()
    assert max(float(one.abs().max()) for one in found) <= BOUND + 1e-3


@LEVELS
def test_a_hook_that_comes_later_is_followed_too(amp: ModuleType, level: str) -> None:
    training = Training(lambda model: SGD(model.parameters(), lr=0.3), amp, level)
    training.optimizer.register_step_pre_hook(lambda *_: project(training.model))
    by_hand = Training(projecting_before(SGD))
    for one, other in zip(training.run(), by_hand.run(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 if level == "O5" else 0.005)


class Ascending(Optimizer):
    """Goes up before it steps what it wraps, as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.3})
        self.base = SGD(self.param_groups, lr=0.3)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def up(self) -> None:
        self.moved = [(param, param.clone()) for param in self.param_groups[0]["params"]]
        for param, _ in self.moved:
            param.add_(param.grad, alpha=0.1)

    @torch.no_grad()
    def down(self) -> None:
        for param, before in self.moved:
            param.copy_(before)
        self.base.step()


@LEVELS
def test_a_state_dict_in_the_step_of_a_wrapped_optimizer_writes_nothing(
    amp: ModuleType, level: str
) -> None:
    training = Training(lambda model: Ascending(model.parameters()), amp, level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for act in (training.optimizer.up, training.optimizer.down):
                training.optimizer.zero_grad()
                with amp.scale_loss(training.loss(), training.optimizer) as scaled_loss:
                    scaled_loss.backward()
                training.model.state_dict()
                act()


def test_deactivate_takes_the_hook_off(amp: ModuleType) -> None:
    training = Training(lambda model: SGD(model.parameters(), lr=0.3), amp, "O2")
    assert training.optimizer._optimizer_step_pre_hooks
    amp.deactivate()
    assert not training.optimizer._optimizer_step_pre_hooks


def test_deactivate_takes_the_hook_of_a_wrapped_optimizer_off(amp: ModuleType) -> None:
    training = Training(lambda model: Ascending(model.parameters()), amp, "O2")
    assert training.optimizer.base._optimizer_step_pre_hooks
    amp.deactivate()
    assert not training.optimizer.base._optimizer_step_pre_hooks


@LEVELS
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("steps", [3, 20])
def test_a_hook_before_the_step_may_write_by_data(
    amp: ModuleType, level: str, fused_step: bool, steps: int
) -> None:
    """As a mask of pruning does, which moves no version."""
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.25)
    amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, fused_step=fused_step, verbosity=0
    )

    def step(by: float) -> None:
        optimizer.zero_grad()
        loss = by * model(torch.ones(1, 4)).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    for _ in range(steps):
        step(0.0)

    def fill(*_: object) -> None:
        model.weight.data.fill_(0.5)

    hook = optimizer.register_step_pre_hook(fill)
    step(1.0)
    hook.remove()
    assert torch.equal(model.weight.float(), torch.full((4, 4), 0.25))
    assert torch.equal(model.state_dict()["weight"], torch.full((4, 4), 0.25))
