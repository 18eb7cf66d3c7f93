"""A half gradient that a script puts in the place of a block's is stepped as in plain PyTorch."""

import functools

import pytest
import torch
from gradient_programs import (
    WITH_MASTERS,
    backward,
    backward_of,
    float32_twin,
    start,
    values,
)
from torch import nn

from amp_patch.session import session

# tests/mistakes/test_optimizers.py is about that warning
pytestmark = pytest.mark.filterwarnings("ignore:at a level with a loss scale")


def compare_with_float32(amp, opt_level, train):
    """Train a model and its float32 twin by ``train(model, optimizer, scale_loss, masters)``."""
    model, optimizer = start(amp, opt_level, loss_scale=128.0)
    plain, twins = float32_twin(amp, model, optimizer)
    before = values(plain.parameters())
    train(model, optimizer, amp.scale_loss, lambda: amp.master_params(optimizer))
    train(plain, twins, None, plain.parameters)
    stepped = values(amp.master_params(optimizer))
    torch.testing.assert_close(stepped, values(plain.parameters()), rtol=2e-2, atol=5e-3)
    assert not all(map(torch.equal, before, plain.parameters()))


def replace_and_clip(params, masters, clip):
    params[0].grad = params[0].grad * 2
    clip()


def replace_before_masters_are_written(params, masters, clip):
    params[0].grad, params[3].grad = torch.ones_like(params[0]), None
    for master in masters():
        if master is not params[3] and master.grad is not None:
            master.grad *= 3


def replace_all_twice(params, masters, clip):
    for factor in (0.5, 3):
        for param in params:
            param.grad = param.grad * factor
        list(masters())


def clip_and_replace(params, masters, clip):
    clip()
    params[0].grad = torch.ones_like(params[0])


def clip_what_nobody_keeps_and_replace(params, masters, clip):
    nn.utils.clip_grad_norm_(masters(), 0.05)
    params[1].grad = torch.ones_like(params[1])


@pytest.mark.parametrize(
    "change",
    [
        replace_and_clip,
        clip_and_replace,
        clip_what_nobody_keeps_and_replace,
        replace_before_masters_are_written,
        replace_all_twice,
    ],
)
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_gradients_of_a_block_of_which_some_are_replaced_are_those_of_float32(
    amp, opt_level, goes_on, change
):
    """As adversarial training does (PGD), which restores the gradients of the first loss."""

    def train(model, optimizer, scaled, masters):
        for _ in range(2):
            backward_of("block", model, optimizer, None, scaled)
            clip = functools.partial(nn.utils.clip_grad_norm_, list(masters()), 0.05)
            change(list(model.parameters()), masters, clip)
            if goes_on:
                backward_of("block", model, optimizer, None, scaled)
            optimizer.step()
            optimizer.zero_grad()

    compare_with_float32(amp, opt_level, train)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_gradients_that_are_restored_count_where_the_last_block_came_to_no_such_parameter(
    amp, opt_level
):
    def train(model, optimizer, scaled, _):
        backward_of("block", model, optimizer, None, scaled)
        saved = [param.grad for param in model.parameters()]
        optimizer.zero_grad()
        model[0].requires_grad_(False)
        backward_of("block", model, optimizer, None, scaled)
        model[0].requires_grad_(True)
        assert model[0].weight.grad is None
        for param, grad in zip(model.parameters(), saved, strict=True):
            param.grad = grad * 3
        optimizer.step()

    compare_with_float32(amp, opt_level, train)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_is_written_to_masters_is_not_lost_by_a_copy_of_half_gradients(amp, opt_level, clips):
    """Also of large ones, which nobody keeps to compare the copy with; and beside a clip."""
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 300)).float().sum(), optimizer) as scaled:
        scaled.backward()
    masters = list(amp.master_params(optimizer))
    before = values(masters)
    for master in masters:
        master.grad *= 3
    if clips:
        nn.utils.clip_grad_norm_(masters[1], 1e3)
    for param in model.parameters():
        param.grad = param.grad.nan_to_num()
    with pytest.warns(UserWarning, match="has no effect"):
        optimizer.step()
    moved = [old - new.detach() for old, new in zip(before, masters, strict=True)]
    torch.testing.assert_close(moved, [torch.full_like(one, 3.0) for one in moved])


def test_a_clip_of_masters_that_nobody_keeps_notes_nothing_of_them(amp):
    """It comes in each step of most scripts."""
    model, optimizer = start(amp, "O2", loss_scale=128.0)
    backward_of("block", model, optimizer, None, amp.scale_loss)
    replaced = session.optimizers.steps[optimizer].backward.gradients.replaced
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.05)
    assert not replaced.read
    list(amp.master_params(optimizer))
    assert replaced.read


@pytest.mark.parametrize("came", ["a write to masters", "another's block"])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_came_before_the_last_block_or_step_keeps_no_gradient_from_being_replaced(
    amp, opt_level, came
):
    model, optimizer = start(amp, opt_level, loss_scale=128.0)
    other = nn.Linear(3, 2)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    other, others = amp.initialize(other, others, opt_level=opt_level, verbosity=0)
    backward_of("block", model, optimizer, None, amp.scale_loss)
    if came == "a write to masters":
        for master in amp.master_params(optimizer):
            master.grad *= 2
    else:
        backward_of("block", other, others, None, amp.scale_loss)
        optimizer.step()
        optimizer.zero_grad()
    backward_of("block", model, optimizer, None, amp.scale_loss)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    masters = list(amp.master_params(optimizer))
    assert all(torch.equal(master.grad, torch.ones_like(master)) for master in masters)


@pytest.mark.parametrize("first", ["block", "data"])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_takes_the_place_of_clipped_gradients_is_stepped_without_a_warning(
    amp, opt_level, first
):
    """Again and again: each of them counts, so that no warning says it had no effect."""

    def train(model, optimizer, scaled, masters):
        backward_of(first, model, optimizer, None, scaled)
        for factor in (1, 2):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            for param in model.parameters():
                param.grad = torch.full_like(param, factor)
        optimizer.step()

    compare_with_float32(amp, opt_level, train)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_gradient_with_a_graph_takes_the_place_of_none(amp, opt_level):
    model, optimizer = start(amp, opt_level, loss_scale=128.0)
    backward_of("block", model, optimizer, None, amp.scale_loss)
    expected = [master.grad.clone() for master in amp.master_params(optimizer)]
    for param in model.parameters():
        param.grad = (param.grad * 2).requires_grad_()
    found = [master.grad for master in amp.master_params(optimizer)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.warns(UserWarning, match="has no effect"):
        optimizer.step()


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_plain_backward_adds_to_gradients_that_were_all_replaced(amp, opt_level, read):
    def train(model, optimizer, scaled, masters):
        backward_of("block", model, optimizer, None, scaled)
        for param in model.parameters():
            param.grad = param.grad * -2
        if read:
            list(masters())
        backward(model)
        optimizer.step()

    compare_with_float32(amp, opt_level, train)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_a_script_gives_a_master_is_stepped_whatever_it_gives_its_half_parameter(
    amp, opt_level
):
    model, optimizer = start(amp, opt_level, loss_scale=128.0)
    master = next(amp.master_params(optimizer))
    backward_of("block", model, optimizer, None, amp.scale_loss)
    before = master.detach().clone()
    master.grad = torch.ones_like(master)
    model[0].weight.grad = torch.zeros_like(model[0].weight) + 7
    with pytest.warns(UserWarning, match="has no effect"):
        optimizer.step()
    torch.testing.assert_close(before - master, torch.full_like(master, 0.5))


class Program:
    """Steps of two layers, of which blocks reach one or both, and gradients are set by hand."""

    def __init__(self, amp, opt_level, **options):
        torch.manual_seed(0)
        self.amp = amp
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        params = [param for layer in layers for param in layer.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.5)
        self.layers, self.optimizer = amp.initialize(
            layers, optimizer, opt_level=opt_level, verbosity=0, **options
        )

    def run(self, steps):
        """Make steps, and return what they have left of the weights."""
        for number, calls in enumerate(steps, 1):
            self.optimizer.zero_grad()
            for name, *which in calls:
                getattr(self, name)(number, *which)
            self.optimizer.step()
        found = values(self.amp.master_params(self.optimizer))
        self.amp.deactivate()
        return found

    def block(self, number, *which):
        inputs = torch.full((2, 4), 0.1 * number)
        outputs = [self.layers[one](inputs).float() for one in which]
        loss = sum(output.square().mean() for output in outputs)
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def give(self, number, which):
        for param in self.layers[which].parameters():
            param.grad = torch.full_like(param, 0.25 * number)

    def clear(self, number, which):
        for param in self.layers[which].parameters():
            param.grad = None

    def clip(self, number):
        nn.utils.clip_grad_norm_(self.amp.master_params(self.optimizer), 0.7)


ONE, OTHER, BOTH = ("block", 0), ("block", 1), ("block", 0, 1)


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize(
    "calls",
    [
        [ONE, ("give", 1)],
        [ONE, ("give", 1), ("clip",)],
        [ONE, OTHER, ("clear", 0), ("clip",), ("give", 0)],
        [ONE, ONE, ("give", 1), ("give", 1)],
        [("give", 1), ONE, ("clip",)],
        [ONE, ("clip",), ("give", 1), ("clip",)],
    ],
)
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_gradients_given_where_no_block_has_come_are_stepped(amp, opt_level, calls, fused_step):
    """As by torch.autograd.grad for the encoder, beside a block for the head."""
    steps = [calls, calls, [BOTH], calls, [ONE], calls]
    expected = Program(amp, "O0").run(steps)
    found = Program(amp, opt_level, loss_scale=128.0, fused_step=fused_step).run(steps)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_gradients_that_the_block_of_another_optimizer_may_have_left_are_not_given(amp, opt_level):
    """They may be multiplied by its scale."""
    program = Program(amp, opt_level, loss_scale=128.0)
    other = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other, optimizer = amp.initialize(
        other, optimizer, opt_level=opt_level, verbosity=0, loss_scale=128.0
    )
    with amp.scale_loss(other(torch.ones(2, 4)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = values(program.layers[1].parameters())
    program.optimizer.zero_grad()
    program.block(1, 0)
    with amp.scale_loss(other(torch.ones(2, 4)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    program.give(1, 1)
    program.optimizer.step()
    assert all(map(torch.equal, before, values(program.layers[1].parameters())))
