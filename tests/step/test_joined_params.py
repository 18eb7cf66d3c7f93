"""Parameters that come to an optimizer after `initialize` train as in plain PyTorch.

Those of a layer that is unfrozen late, of a group that is moved, or of a second model. They may
come with gradients that blocks of other optimizers have multiplied by the loss scale.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
LEVELS = ("O0", "O1", "O2", "O4", "O5")


class Training:
    """A backbone and a head, of which an optimizer steps the head.

    Args:
        amp: trains at a level; None: plain PyTorch.
        options: of `amp.initialize`.
    """

    def __init__(self, amp: ModuleType | None, level: str = "", **options: Any) -> None:
        torch.manual_seed(0)
        self.back, self.head = nn.Linear(8, 32), nn.Linear(32, 2)
        self.model: nn.Module = nn.Sequential(self.back, nn.Tanh(), self.head)
        self.optimizer: Optimizer = SGD(self.head.parameters(), lr=0.1)
        self.amp, self._level, self._options = amp, level, options
        self.initialize()

    def initialize(self) -> None:
        if self.amp is not None:
            self.model, self.optimizer = self.amp.initialize(
                self.model, self.optimizer, opt_level=self._level, verbosity=0, **self._options
            )

    def replace_optimizer(self) -> None:
        self.optimizer = SGD(self.model.parameters(), lr=0.1)

    def backward(self, **options: Any) -> None:
        loss = self.model(X).float().square().mean()
        if self.amp is None:
            loss.backward()
        else:
            scaled_backward(self.amp, loss, self.optimizer, **options)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [value.float() for value in copy.deepcopy(self.model.state_dict()).values()]


class Follows(nn.Module):
    """Casts its input to the dtype of a layer's weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.layer.weight.dtype)


def add_group(one: Training) -> None:
    one.optimizer.add_param_group({"params": list(one.back.parameters())})


def extend(one: Training) -> None:
    one.optimizer.param_groups[0]["params"].extend(one.back.parameters())


def initialize_in_stages(one: Training) -> None:
    if one.amp is not None:
        one.amp.deactivate()
    one.replace_optimizer()
    one.initialize()


def go_on_without(one: Training) -> None:
    if one.amp is not None:
        one.amp.deactivate()
    one.replace_optimizer()
    one.amp = None


JOINS: dict[str, Callable[[Training], None]] = {
    "add_param_group": add_group,
    "extend": extend,
    "in stages": initialize_in_stages,
    "without amp": go_on_without,
}


def assert_alike(found: list[Tensor], expected: list[Tensor], level: str) -> None:
    """At O5 gradients of some passes were added up in bfloat16, which has 8 bits."""
    atol = 5e-3 if level == "O5" else 3e-4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=atol)


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused_step", [False, True])
def test_gradients_of_the_stage_before_count_once(
    amp: ModuleType, level: str, join: str, fused_step: bool
) -> None:
    fused_step = fused_step and level in ("O2", "O5")
    options = {"fused_step": True} if fused_step else {}
    trained = []
    for one in (Training(None), Training(amp, level, **options)):
        for step in range(5):
            if step == 2:
                JOINS[join](one)
            one.step()
        trained.append(one.weights())
    assert_alike(trained[1], trained[0], level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_scale_that_has_moved_meanwhile_is_followed(amp: ModuleType, level: str) -> None:
    trained = []
    options = {"loss_scale": "dynamic", "growth_interval": 1, "init_scale": 2.0}
    for one in (Training(None), Training(amp, level, **options)):
        for _ in range(3):
            one.step()
        add_group(one)
        one.step()
        trained.append(one.weights())
    assert_alike(trained[1], trained[0], level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("delays", [(True, False), (False, False)])
def test_a_group_may_come_between_two_blocks_of_a_step(
    amp: ModuleType, level: str, delays: tuple[bool, bool]
) -> None:
    trained = []
    for one in (Training(None), Training(amp, level)):
        one.backward(delay_unscale=delays[0])
        add_group(one)
        one.backward(delay_unscale=delays[1])
        one.optimizer.step()
        trained.append(one.weights())
    assert_alike(trained[1], trained[0], level)


def block(
    one: Training,
    before: Callable[[Training], None],
    after: Callable[[Training], None],
    model: nn.Module | None = None,
    **options: Any,
) -> None:
    """Make a block; call these in it, before its backward and after it.

    Args:
        model: that the loss is of; None: the whole.
        options: of ``scale_loss``.
    """
    loss = (model or one.model)(X).float().square().mean()
    plain: Any = contextlib.nullcontext(loss)
    scaled = plain if one.amp is None else one.amp.scale_loss(loss, one.optimizer, **options)
    with scaled as scaled_loss:
        before(one)
        scaled_loss.backward()
        after(one)


def nothing(_: Training) -> None:
    pass


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    "acts", [(add_group, nothing), (nothing, add_group)], ids=["before", "after"]
)
def test_a_group_may_come_inside_of_a_block(
    amp: ModuleType, level: str, steps_before: int, acts: Any
) -> None:
    trained = []
    for one in (Training(None), Training(amp, level)):
        for _ in range(steps_before):
            one.step()
        block(one, *acts)
        one.optimizer.step()
        one.optimizer.zero_grad()
        one.step()
        trained.append(one.weights())
    assert_alike(trained[1], trained[0], level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("reaches", [False, True])
@pytest.mark.parametrize("acts", [(extend, nothing), (nothing, extend)], ids=["before", "after"])
def test_a_layer_with_a_gradient_may_come_inside_of_a_block_that_leaves_its_own_scaled(
    amp: ModuleType, level: str, acts: Any, reaches: bool
) -> None:
    trained = []
    for one in (Training(None), Training(amp, level, loss_scale=2.0**8)):
        one.backward()
        part = nn.Sequential(nn.ConstantPad1d((0, 24), 1.0), Follows(one.head), one.head)
        block(one, *acts, None if reaches else part, delay_unscale=True)
        one.backward()
        one.optimizer.step()
        trained.append(one.weights())
    assert_alike(trained[1], trained[0], level)


class Stray:
    """An optimizer of one layer, and another layer, whose gradient is 1 for each backward."""

    def __init__(self, amp: ModuleType, level: str, scale: float = 64.0) -> None:
        self.amp = amp
        self.own, self.stray = nn.Linear(2, 1), nn.Linear(2, 1)
        self.optimizer = SGD(self.own.parameters(), lr=1.0)
        options = {"loss_scale": scale} if level in ("O1", "O2", "O5") else {}
        self.amp.initialize(
            [self.own, self.stray], self.optimizer, opt_level=level, verbosity=0, **options
        )

    def loss(self, *layers: nn.Module) -> Tensor:
        inputs = torch.ones(1, 2)  # initialized one by one, layers cast them
        return sum((layer(inputs).float().sum() for layer in layers), torch.zeros(()))

    def block(self, *layers: nn.Module, **options: Any) -> None:
        scaled_backward(self.amp, self.loss(*layers), self.optimizer, **options)

    def join(self, how: str = "add") -> None:
        if how == "add":
            self.optimizer.add_param_group({"params": self.stray.parameters()})
        else:
            self.optimizer.param_groups[0]["params"].extend(self.stray.parameters())

    def moved_by(self) -> float:
        """Step; return what the layer's bias has moved by."""
        before = self.stray.state_dict()["bias"].clone()
        self.optimizer.step()
        return round((before - self.stray.state_dict()["bias"]).item(), 2)


@pytest.mark.parametrize("order", ["plain first", "block first", "both twice"])
@pytest.mark.parametrize("level", LEVELS)
def test_plain_backwards_and_blocks_add_up_at_a_layer_without_an_optimizer(
    amp: ModuleType, level: str, order: str
) -> None:
    one = Stray(amp, level)
    if order == "block first":
        one.block(one.own, one.stray)
    one.loss(one.stray).backward()
    if order != "block first":
        one.block(one.own, one.stray)
    if order == "both twice":
        one.loss(one.stray).backward()
        one.block(one.own, one.stray, delay_unscale=True)
        one.block(one.own)
    one.join()
    assert one.moved_by() == (4.0 if order == "both twice" else 2.0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_true_gradient_that_no_block_reaches_stays_as_it_is(amp: ModuleType, level: str) -> None:
    one = Stray(amp, level, scale=2.0**16)
    one.loss(one.stray).backward()
    one.block(one.own)
    assert one.stray.bias.grad.item() == 1.0


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_of_true_gradients_that_are_cleared_in_the_block_nothing_is_left(
    amp: ModuleType, level: str
) -> None:
    one = Stray(amp, level)
    one.loss(one.stray).backward()
    with amp.scale_loss(one.loss(one.own, one.stray), one.optimizer) as scaled_loss:
        one.stray.zero_grad()
        scaled_loss.backward()
    one.join()
    assert one.moved_by() == 1.0


@pytest.mark.parametrize("how", ["add", "extend"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("reaches", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_with_a_true_gradient_may_come_inside_of_a_block(
    amp: ModuleType, level: str, reaches: bool, delay: bool, when: str, how: str
) -> None:
    one = Stray(amp, level)
    one.loss(one.stray).backward()
    loss = one.loss(one.own, *([one.stray] if reaches else []))
    with amp.scale_loss(loss, one.optimizer, delay_unscale=delay) as scaled_loss:
        if when == "before":
            one.join(how)
        scaled_loss.backward()
        if when == "after":
            one.join(how)
    if delay:
        one.block(one.own)
    assert one.moved_by() == (2.0 if reaches else 1.0)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_layer_with_a_true_gradient_keeps_it_where_the_block_fails_in_which_it_comes(
    amp: ModuleType, level: str
) -> None:
    one = Stray(amp, level)
    one.loss(one.stray).backward()

    def fail() -> None:
        with amp.scale_loss(one.loss(one.own), one.optimizer):
            one.join()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    one.block(one.own)
    assert one.moved_by() == 1.0


@pytest.mark.parametrize(("level", "fused"), [("O1", False), ("O2", False), ("O2", True)])
def test_a_layer_may_come_to_another_optimizer_inside_of_a_block(
    amp: ModuleType, level: str, fused: bool
) -> None:
    layers = nn.ModuleList([nn.Linear(2, 1) for _ in range(3)])
    first, second = (SGD(layer.parameters(), lr=1.0) for layer in layers[:2])
    options = {"fused_step": True} if fused else {}
    amp.initialize(
        layers, [first, second], opt_level=level, loss_scale=64.0, verbosity=0, **options
    )
    before = layers.state_dict()["2.bias"].clone()
    inputs = torch.ones(1, 2, dtype=layers[0].weight.dtype)
    loss = layers[0](inputs).float().sum() + layers[2](inputs).float().sum()
    with amp.scale_loss(loss, first) as scaled_loss:
        scaled_loss.backward()
        second.add_param_group({"params": layers[2].parameters()})
    second.step()
    torch.testing.assert_close(layers.state_dict()["2.bias"], before - 1.0, rtol=0, atol=1e-2)


@pytest.mark.filterwarnings("ignore:Gradient overflow")
@pytest.mark.parametrize("fused", [False, True])
def test_what_has_overflowed_does_not_wait_for_the_next_step(amp: ModuleType, fused: bool) -> None:
    one = Training(amp, "O2", loss_scale=2.0**8, fused_step=fused)
    scaled_backward(amp, one.model(X).float().square().mean() * torch.inf, one.optimizer)
    one.optimizer.step()
    one.optimizer.zero_grad()
    add_group(one)
    one.step()
    assert all(weight.isfinite().all() for weight in one.weights())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_that_wait_for_a_fused_step_wait_on_when_a_layer_comes_in_a_block(
    amp: ModuleType, level: str
) -> None:
    trained = []
    for one in (Training(None), Training(amp, level, fused_step=True, loss_scale=2.0**8)):
        one.backward()
        block(one, add_group, nothing)
        one.optimizer.step()
        trained.append(one.weights())
    assert_alike(trained[1], trained[0], level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize(
    "acts", [(add_group, nothing), (nothing, add_group)], ids=["before", "after"]
)
def test_of_a_block_that_fails_a_group_that_came_in_it_has_nothing(
    amp: ModuleType, level: str, acts: Any
) -> None:
    def fail(one: Training) -> None:
        acts[1](one)
        raise InterruptedError

    one, plain = Training(amp, level), Training(None)
    with pytest.raises(InterruptedError):
        block(one, acts[0], fail)
    add_group(plain)
    for each in (one, plain):
        each.step()
    assert_alike(one.weights(), plain.weights(), level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_layer_with_a_plain_gradient_may_come_between_two_blocks_of_a_step(
    amp: ModuleType, level: str
) -> None:
    trained = []
    for one in (Training(None), Training(amp, level)):
        torch.manual_seed(1)
        layer = nn.Linear(2, 2)
        layer(torch.ones(1, 2)).square().sum().backward()
        one.backward(delay_unscale=True)
        one.optimizer.add_param_group({"params": list(layer.parameters())})
        one.backward()
        one.optimizer.step()
        trained.append([param.detach().float() for param in layer.parameters()])
    assert_alike(trained[1], trained[0], level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("reads", ["master_params", "clips by hand"])
def test_masters_that_are_read_after_a_group_has_come_have_true_gradients(
    amp: ModuleType, level: str, reads: str
) -> None:
    norms = []
    for one in (Training(None), Training(amp, level)):
        one.backward()
        add_group(one)
        params = [param for group in one.optimizer.param_groups for param in group["params"]]
        if one.amp is not None and reads == "master_params":
            params = list(amp.master_params(one.optimizer))
        norms.append(torch.stack([param.grad.float().norm() for param in params]))
    torch.testing.assert_close(norms[1], norms[0], rtol=2e-2, atol=1e-4)


CLEARS: dict[str, Callable[[Training], object]] = {
    "model": lambda one: one.model.zero_grad(),
    "optimizer": lambda one: one.optimizer.zero_grad(),
    "by hand": lambda one: [setattr(param, "grad", None) for param in one.model.parameters()],
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("clear", CLEARS)
def test_what_is_cleared_after_a_group_has_come_is_gone(
    amp: ModuleType, level: str, clear: str
) -> None:
    trained = []
    for one in (Training(None), Training(amp, level)):
        one.step()
        add_group(one)
        CLEARS[clear](one)
        one.step()
        trained.append(one.weights())
    assert_alike(trained[1], trained[0], level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_after_a_group_has_come_deactivate_leaves_true_gradients(
    amp: ModuleType, level: str
) -> None:
    found = []
    for one in (Training(None), Training(amp, level)):
        one.backward()
        add_group(one)
        if one.amp is not None:
            amp.deactivate()
        found.append([param.grad.float() for param in one.back.parameters()])
    assert_alike(found[1], found[0], level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_group_that_comes_back_with_a_plain_gradient_is_stepped(
    amp: ModuleType, level: str
) -> None:
    trained = []
    for one in (Training(None), Training(amp, level)):
        layer = nn.Linear(2, 2, bias=False)
        nn.init.ones_(layer.weight)
        one.optimizer.add_param_group({"params": list(layer.parameters())})
        one.step()
        out = one.optimizer.param_groups.pop(1)
        layer(torch.ones(1, 2)).square().sum().backward()
        one.backward()
        one.optimizer.param_groups.append(out)
        one.optimizer.step()
        trained.append([param.detach().float() for param in layer.parameters()])
    assert_alike(trained[1], trained[0], level)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_group_that_comes_before_a_clip_is_clipped_by_its_true_gradients(
    amp: ModuleType, level: str
) -> None:
    norms = []
    for one in (Training(None), Training(amp, level)):
        one.backward()
        add_group(one)
        norms.append(nn.utils.clip_grad_norm_(one.model.parameters(), 0.01))
    torch.testing.assert_close(norms[1].float(), norms[0], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("steps_without", [1, 2])
@pytest.mark.parametrize("comes_back", ["before the block", "before the step"])
def test_a_group_may_be_taken_out_and_put_back(
    amp: ModuleType, level: str, steps_without: int, comes_back: str
) -> None:
    trained = []
    for one in (Training(None), Training(amp, level)):
        add_group(one)
        one.step()
        out = one.optimizer.param_groups.pop(1)
        for _ in range(steps_without):
            one.step()
        if comes_back == "before the block":
            one.optimizer.param_groups.append(out)
            one.backward()
        else:
            one.backward()
            one.optimizer.param_groups.append(out)
        one.optimizer.step()
        trained.append(one.weights())
    assert_alike(trained[1], trained[0], level)


@pytest.mark.filterwarnings("ignore:Gradient overflow")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_has_overflowed_is_gone(amp: ModuleType, level: str) -> None:
    one = Training(amp, level, loss_scale=2.0**8)
    scaled_backward(amp, one.model(X).float().square().mean() * torch.inf, one.optimizer)
    one.optimizer.step()
    one.optimizer.zero_grad()
    assert amp.step_was_skipped(one.optimizer)
    before = one.weights()
    add_group(one)
    one.step()
    assert all(weight.isfinite().all() for weight in one.weights())
    assert not torch.equal(one.weights()[0], before[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["append", "add its params", "add the model's"])
def test_a_group_may_move_to_another_optimizer(amp: ModuleType, level: str, how: str) -> None:
    def train(amp: ModuleType | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        first = SGD(
            [{"params": list(layer.parameters())} for layer in (model[0], model[2])], lr=0.1
        )
        other = nn.Linear(2, 2)
        second = SGD(other.parameters(), lr=0.1)
        if amp is not None:
            amp.initialize([model, other], [first, second], opt_level=level, verbosity=0)
        for step in range(4):
            if step == 2:
                group = first.param_groups.pop(0)
                if how == "append":
                    second.param_groups.append(group)
                else:
                    own = how == "add its params"
                    second.add_param_group(
                        {"params": group["params"] if own else list(model[0].parameters())}
                    )
            for optimizer in (first, second):
                optimizer.zero_grad()
            loss = other(model(X)).float().square().mean()
            scaled_backward(amp, loss, [first, second]) if amp else loss.backward()
            for optimizer in (first, second):
                optimizer.step()
        return [value.float() for value in copy.deepcopy(model.state_dict()).values()]

    assert_alike(train(amp), train(None), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["move", "join"])
def test_what_a_block_of_the_other_optimizer_wrote_before_is_unscaled(
    amp: ModuleType, level: str, how: str
) -> None:
    def train(amp: ModuleType | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        first, second = (SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
        if amp is not None:
            amp.initialize(model, [first, second], opt_level=level, verbosity=0)
        loss = model(X).float().square().mean()
        scaled_backward(amp, loss, second) if amp else loss.backward()
        if how == "move":
            second.param_groups.append(first.param_groups.pop(0))
        else:
            second.add_param_group({"params": list(model[0].parameters())})
        second.step()
        return [value.float() for value in copy.deepcopy(model.state_dict()).values()]

    assert_alike(train(amp), train(None), level)


@pytest.mark.parametrize("first", ["with its optimizer", "without"])
@pytest.mark.parametrize("level", LEVELS)
def test_each_model_of_an_optimizer_may_be_initialized_by_itself(
    amp: ModuleType, level: str, first: str
) -> None:
    """At a learning rate of which a half weight sees nothing."""

    def train(amp: ModuleType | None) -> list[Tensor]:
        torch.manual_seed(0)
        one, other = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = SGD([*one.parameters(), *other.parameters()], lr=1e-4)
        options = {"opt_level": level, "verbosity": 0}
        if amp is not None and first == "without":
            amp.initialize(other, **options)
        if amp is not None:
            amp.initialize(one, optimizer, **options)
        if amp is not None and first != "without":
            amp.initialize(other, **options)
        before = other.state_dict()["weight"].float().clone()
        for _ in range(20):
            optimizer.zero_grad()
            loss = one(X).float().square().mean() + other(X).float().square().mean()
            scaled_backward(amp, loss, optimizer) if amp else loss.backward()
            optimizer.step()
        return [other.state_dict()["weight"].float() - before]

    (found,), (expected,) = train(amp), train(None)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-6)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_half_parameters_of_a_later_call_are_not_stepped_without_masters(
    amp: ModuleType, level: str
) -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = SGD([*one.parameters(), *other.parameters()], lr=0.1)
    amp.initialize(one, optimizer, opt_level=level, verbosity=0)
    amp.initialize(other, opt_level="O2", verbosity=0)
    before = other.weight.detach().clone()
    loss = one(X).float().square().mean() + other(X).float().square().mean()
    scaled_backward(amp, loss, optimizer)
    with pytest.raises(RuntimeError, match=r"got 2 in the SGD .* Call amp\.initialize\(\[model, "):
        optimizer.step()
    assert torch.equal(other.weight, before)
    other.requires_grad_(False)
    optimizer.zero_grad()
    scaled_backward(amp, one(X).float().square().mean(), optimizer)
    optimizer.step()
