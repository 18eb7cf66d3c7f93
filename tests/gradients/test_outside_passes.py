"""A backward outside of ``scale_loss`` trains as in plain torch, at a scale of 1."""

import copy
import warnings
import weakref

import pytest
import torch
from gradient_programs import (
    WITH_MASTERS,
    X,
    backward,
    backward_of,
    float32_twin,
    start,
    stepped_by,
    values,
    with_penalty,
)
from hypothesis import example, given
from hypothesis import strategies as st
from support import CountItems
from torch import nn

from amp_patch.gradients import gradients
from amp_patch.session import session

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# tests/mistakes/test_optimizers.py is about that warning
pytestmark = pytest.mark.filterwarnings("ignore:at a level with a loss scale")


def gradients_of_a_copy(model):
    """Return what a backward of a copy of the model gives, in float32."""
    twin = copy.deepcopy(model).to(model[0].weight.dtype)
    twin.zero_grad()
    twin(X).float().square().mean().backward()
    return [param.grad.float() for param in twin.parameters()]


@pytest.mark.parametrize(
    ("opt_level", "fused_step"),
    [(level, False) for level in LEVELS] + [(level, True) for level in WITH_MASTERS],
)
def test_steps_without_scale_loss_train(amp, opt_level, fused_step):
    model, optimizer = start(amp, opt_level, fused_step=fused_step)
    expected = [param.float() for param in values(amp.master_params(optimizer))]
    for _ in range(3):
        expected = [p - 0.5 * g for p, g in zip(expected, gradients_of_a_copy(model), strict=True)]
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if opt_level == "O3" else {"rtol": 1e-6, "atol": 1e-7}
    stepped = [param.float() for param in values(amp.master_params(optimizer))]
    torch.testing.assert_close(stepped, expected, **tolerance)


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_before_the_block_adds_to_it(amp, opt_level, set_to_none):
    model, optimizer = start(amp, opt_level, loss_scale=64.0)
    expected = [param.float() for param in values(amp.master_params(optimizer))]
    for _ in range(3):
        gradients = gradients_of_a_copy(model)
        expected = [p - 0.5 * (1 + 2) * g for p, g in zip(expected, gradients, strict=True)]
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model)
        with amp.scale_loss(2 * model(X).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    tolerance = {"O3": 2e-2, "O4": 2e-2, "O5": 2e-2}.get(opt_level, 1e-3)
    stepped = [param.float() for param in values(amp.master_params(optimizer))]
    torch.testing.assert_close(stepped, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_two_backwards_add_up(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    once = gradients_of_a_copy(model)
    backward(model)
    backward(model)
    got = [param.grad for param in amp.master_params(optimizer)]
    torch.testing.assert_close(got, [2 * grad for grad in once], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_clipping_finds_the_gradients(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    expected = torch.cat([grad.flatten() for grad in gradients_of_a_copy(model)])
    backward(model)
    norm = amp.clip_grad_norm_(optimizer, 0.01)
    torch.testing.assert_close(norm, expected.norm())
    got = torch.cat([param.grad.flatten() for param in amp.master_params(optimizer)])
    torch.testing.assert_close(got, expected * 0.01 / (expected.norm() + 1e-6))


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")
@pytest.mark.parametrize("scaled_first", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_step_without_a_backward_uses_no_gradient_again(amp, opt_level, scaled_first):
    model, optimizer = start(amp, opt_level)
    if scaled_first:
        with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
            scaled.backward()
    else:
        backward(model)
    optimizer.step()
    before = values(model.parameters())
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_model_zero_grad_and_another_backward_are_another_gradient(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    for _ in range(4):
        model.zero_grad()
        before = values(model.parameters())
        backward(model)
        optimizer.step()
        assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_gradients_that_are_put_back_behind_model_zero_grad_are_added_to(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    masters = list(amp.master_params(optimizer))

    def scaled_backward() -> None:
        with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
            scaled.backward()

    scaled_backward()
    expected = [3 * master.grad for master in masters]
    kept = [2 * param.grad for param in model.parameters()]
    model.zero_grad()
    assert [master.grad for master in masters] == [None] * len(masters)
    for param, grad in zip(model.parameters(), kept, strict=True):
        param.grad = grad
    scaled_backward()
    torch.testing.assert_close([master.grad for master in masters], expected, rtol=1e-2, atol=1e-3)
    before = values(masters)
    optimizer.step()
    assert not any(map(torch.equal, before, masters))


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_model_zero_grad_says_nothing_of_gradients_that_it_leaves(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    for param in model.parameters():
        param.grad.mul_(0.5)
    model[0].zero_grad()
    have_grads = [master.grad is not None for master in amp.master_params(optimizer)]
    assert have_grads == [False, False, True, True]
    with pytest.warns(UserWarning, match="What is written to the gradients of half parameters"):
        optimizer.step()


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_gradients_that_the_user_gave_the_masters_count_alone(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    backward(model)
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    for master in masters:
        master.grad = torch.ones_like(master)
    expected = [master - 0.5 for master in values(masters)]
    optimizer.step()
    torch.testing.assert_close(values(masters), expected)


@pytest.mark.parametrize("write", ["multiply", "backward"])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_write_to_half_gradients_that_masters_have_received_is_told_once(amp, opt_level, write):
    model, optimizer = start(amp, opt_level, loss_scale=4.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            if write == "multiply":
                torch._foreach_mul_([param.grad for param in model.parameters()], 1e-3)
            else:
                backward(model)
            optimizer.step()
    assert len(caught) == 1
    assert "has no effect" in str(caught[0].message)
    assert "amp.clip_grad_norm_(optimizer, max_norm)" in str(caught[0].message)


def freshly(grad, factor):
    """Return other numbers in a tensor of the version that a backward leaves at a scale of 128."""
    return torch.empty_like(grad).copy_(grad * factor)


@pytest.mark.parametrize("anew", [lambda grad, factor: grad * factor, freshly], ids=["new", "1"])
@pytest.mark.parametrize("options", [{}, {"fused_step": True}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_another_gradient_in_the_place_of_one_that_a_master_has_received_is_stepped(
    amp, opt_level, scale, options, anew
):
    """Also after the first steps, in which more is looked at.

    Not where a step is fused: the half gradient that a script makes another of is scaled there.
    """
    model, optimizer = start(amp, opt_level, loss_scale=scale, **options)

    def train(factor):
        before = values(amp.master_params(optimizer))
        optimizer.zero_grad()
        with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        if factor is not None:
            for param in model.parameters():
                param.grad = anew(param.grad, factor)
        optimizer.step()
        after = values(amp.master_params(optimizer))
        return [new - old for new, old in zip(after, before, strict=True)]

    for _ in range(40):
        assert any(moved.any() for moved in train(None))
    assert not any(moved.any() for moved in train(0.0))  # as where it is cleared
    if options:
        with pytest.warns(UserWarning, match="has no effect"):
            assert any(moved.any() for moved in train(-3.0))
    else:
        moved = train(-3.0)
        expected = [-0.5 * param.grad.float() for param in model.parameters()]
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)
        assert any(one.any() for one in expected)


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_part_that_was_cleared_makes_the_rest_no_new_gradients(amp, opt_level):
    model, optimizer = start(amp, opt_level, loss_scale=1024.0)
    with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    model[0].zero_grad()
    before = values(model.parameters())
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_zeros_that_the_optimizer_wrote_are_added_to(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = values(model.parameters())
    backward(model)
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_large_gradients_that_were_used_are_known_and_not_kept_alive(amp, opt_level):
    model = nn.Sequential(nn.Linear(3, 3000), nn.Linear(3000, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=1024.0, verbosity=0)
    with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    grad = weakref.ref(model[0].weight.grad)
    model[0].zero_grad()
    assert grad() is None
    before = values(model.parameters())
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_backward_adds_to_the_zeros_that_the_optimizer_has_set(amp, opt_level):
    model, optimizer = start(amp, opt_level, loss_scale=1.0)
    with amp.scale_loss(model(X).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.zero_grad(set_to_none=False)
    backward(model)
    before = values(amp.master_params(optimizer))
    expected = [p - 0.5 * g for p, g in zip(before, gradients_of_a_copy(model), strict=True)]
    optimizer.step()
    torch.testing.assert_close(
        values(amp.master_params(optimizer)), expected, rtol=0.02, atol=0.002, check_dtype=False
    )


READS = {
    "read": lambda amp, one: amp.master_params(one),
    "read groups": lambda _, one: stepped_by(one),
}
PLAIN = st.lists(st.sampled_from(["data", "penalty", "both", "of groups", *READS]), max_size=8)
BLOCKS = st.lists(st.sampled_from(["block", "block of both", *READS]), max_size=3)


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_any_backwards_of_halves_and_masters_add_up(amp, opt_level, fused_step):
    """To what a float32 loop has, however often the masters are read; blocks come last."""
    model, optimizer = start(amp, opt_level, fused_step=fused_step, loss_scale=8.0)
    initial = values(model.parameters())

    @given(PLAIN, BLOCKS)
    def run(kinds, blocks):
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), initial)
        plain, twins = float32_twin(amp, model, optimizer)
        for kind in (*kinds, *blocks):
            if kind in READS:
                grads = [param.grad for param in READS[kind](amp, optimizer)]
                expected = [param.grad for param in plain.parameters()]
                torch.testing.assert_close(grads, expected, rtol=2e-2, atol=5e-3)
            else:
                backward_of(kind, model, optimizer, amp.master_params, amp.scale_loss)
                backward_of(kind, plain, twins, stepped_by)
        for one in (optimizer, twins):
            one.step()
            one.zero_grad()
        stepped = values(amp.master_params(optimizer))
        torch.testing.assert_close(stepped, values(plain.parameters()), rtol=2e-2, atol=5e-3)

    run()


def halve(params):
    for param in params:
        if param.grad is not None:
            param.grad.mul_(0.5)


def replace_by_halves(params):
    for param in params:
        param.grad = param.grad / 2


def clear(params):
    for param in params:
        param.grad = None


def clip(params):
    nn.utils.clip_grad_norm_(params, 0.01)


def set_to_zero(params):
    for param in params:
        param.grad.zero_()


def set_to_ones(params):
    for param in params:
        param.grad = torch.ones_like(param)


def drop_first(params):
    del params[0].grad


def take_norm(params):
    total = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(params, 0.1, total)


@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize(
    "write", [halve, replace_by_halves, clear, set_to_ones, drop_first, take_norm]
)
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_a_script_writes_to_gradients_of_the_groups_is_stepped(
    amp, opt_level, write, fused_step
):
    """After a plain backward, as in plain PyTorch: a script clips by hand, merges, or freezes."""
    model, optimizer = start(amp, opt_level, fused_step=fused_step)
    plain, twins = float32_twin(amp, model, optimizer)
    for _ in range(3):
        for network, one in ((model, optimizer), (plain, twins)):
            one.zero_grad()
            backward(network)
            write(stepped_by(one))
            one.step()
        torch.testing.assert_close(
            values(stepped_by(optimizer)), values(plain.parameters()), rtol=2e-2, atol=5e-3
        )


@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_compiled_code_finds_the_gradients_of_the_groups(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    backward(model)
    torch.compile(halve, backend="eager")(stepped_by(optimizer))
    halved = [param.grad / 2 for param in model.parameters()]
    grads = [param.grad for param in stepped_by(optimizer)]
    torch.testing.assert_close(grads, halved, check_dtype=False)


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_a_script_does_to_shown_gradients_is_stepped(amp, opt_level, fused_step):
    """A further backward outside of a block adds to it, as in plain PyTorch."""
    model, optimizer = start(amp, opt_level, fused_step=fused_step)
    backward(model)
    masters = list(amp.master_params(optimizer))
    expected = [master - 0.5 * 1.1 * master.grad for master in masters]
    for master in masters:
        master.grad.mul_(0.1)
    backward(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "What is written to the gradients of half parameters")
        optimizer.step()
    torch.testing.assert_close(values(masters), values(expected), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_gradients_that_are_cleared_when_masters_were_shown_are_gone(amp, opt_level):
    """Those of a penalty, too, as in plain torch, where a parameter has one gradient."""
    model, optimizer = start(amp, opt_level)
    masters = list(amp.master_params(optimizer))
    with_penalty(model(X).float().square().mean(), masters).backward()
    list(amp.master_params(optimizer))
    model[0].zero_grad()
    backward(model)
    once = gradients_of_a_copy(model)
    with_penalty(0.0, masters[2:]).backward()
    last = [param.grad for param in amp.master_params(optimizer)][2:]
    expected = [2 * (g + 0.2 * m.detach()) for g, m in zip(once[2:], masters[2:], strict=True)]
    torch.testing.assert_close(last, expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close([m.grad for m in masters[:2]], once[:2], rtol=1e-6, atol=1e-7)
    before = values(model.parameters())
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("in_block", [False, True])
def test_a_step_forgets_what_a_penalty_has_written(amp, in_block):
    """In a block there is nothing to keep."""
    model, optimizer = start(amp, "O5")
    masters = list(amp.master_params(optimizer))
    sums = session.optimizers.steps[optimizer].masters.own_gradients.sums
    loss = with_penalty(model(X).float().square().mean(), masters)
    if in_block:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    assert len(sums) == (0 if in_block else len(masters))
    optimizer.step()
    assert not sums


def zero_by_hand(params):
    for param in params:
        if param.grad is not None:
            param.grad.zero_()


CLEARS = {
    "by hand": lambda model, optimizer: zero_by_hand(model.parameters()),
    "by the model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "in the groups and the model": lambda model, optimizer: (
        zero_by_hand(stepped_by(optimizer)[:2]),
        zero_by_hand([*model.parameters()][2:]),
    ),
    "not": lambda model, optimizer: None,
}


@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
@pytest.mark.parametrize("are_read", [False, True])
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_gradients_of_a_step_that_stay_are_added_to(amp, opt_level, fused_step, are_read, clear):
    """As in plain torch; without a backward the step does not use them again."""
    model, optimizer = start(amp, opt_level, fused_step=fused_step)
    plain = copy.deepcopy(model).float()
    twins = torch.optim.SGD(plain.parameters(), lr=0.5)
    for mine, twin in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        twin.data.copy_(mine.data)
    for _ in range(4):
        for one, stepped in ((model, optimizer), (plain, twins)):
            clear(one, stepped)
            backward(one)
            if are_read and one is model:
                list(amp.master_params(optimizer))
            stepped.step()
    stepped = values(amp.master_params(optimizer))
    torch.testing.assert_close(stepped, values(plain.parameters()), rtol=2e-2, atol=5e-3)
    with pytest.warns(UserWarning, match=r"got an optimizer\.step\(\) with those of the last step"):
        optimizer.step()
    assert all(map(torch.equal, values(amp.master_params(optimizer)), stepped))


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_backward_behind_a_block_adds_nothing_whatever_came_before(amp, opt_level):
    model, optimizer = start(amp, opt_level, loss_scale=64.0)
    backward(model)
    list(amp.master_params(optimizer))
    for param in model.parameters():
        param.grad = None
    with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    shown = [master.grad.clone() for master in amp.master_params(optimizer)]
    backward(model)
    again = [master.grad for master in amp.master_params(optimizer)]
    torch.testing.assert_close(again, shown, rtol=0, atol=0)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_write_that_changes_no_number_is_not_told(amp, opt_level):
    """StyleGAN's training replaces NaN in all gradients, of which there are none most often."""
    model, optimizer = start(amp, opt_level, loss_scale=128.0)
    with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for param in model.parameters():
            torch.nan_to_num(param.grad, nan=0.0, posinf=1e5, out=param.grad)
        optimizer.step()
    optimizer.zero_grad()
    with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    model[0].weight.grad[0, 0] += 1
    with pytest.warns(UserWarning, match="has no effect"):
        optimizer.step()


def halve_data(params):
    for param in params:
        if param.grad is not None:
            param.grad.data.mul_(0.5)


@pytest.mark.parametrize("write", [clip, halve, halve_data, replace_by_halves, clear, set_to_zero])
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_backward_adds_to_what_a_script_made_of_gradients_of_groups(
    amp, opt_level, fused_step, write
):
    """Micro-batches that are clipped one by one, say; as in plain PyTorch."""
    model, optimizer = start(amp, opt_level, fused_step=fused_step)
    plain, twins = float32_twin(amp, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "at a level with a loss scale")
        for _ in range(3):
            for one, stepped in ((model, optimizer), (plain, twins)):
                stepped.zero_grad()
                backward(one)
                write(stepped_by(stepped))
                backward(one)
                write(stepped_by(stepped))
                backward(one)
                stepped.step()
    stepped = values(amp.master_params(optimizer))
    torch.testing.assert_close(stepped, values(plain.parameters()), rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_a_script_gives_parameters_that_a_backward_has_not_reached_is_added_to(
    amp, opt_level, fused_step
):
    model, optimizer = start(amp, opt_level, fused_step=fused_step)
    plain, twins = float32_twin(amp, model, optimizer)
    for one, stepped in ((model, optimizer), (plain, twins)):
        one[2](torch.ones(4, 5, dtype=one[2].weight.dtype)).float().square().mean().backward()
        for param in stepped_by(stepped):
            param.grad = torch.full_like(param, 0.2)
        backward(one)
        stepped.step()
    stepped = values(amp.master_params(optimizer))
    torch.testing.assert_close(stepped, values(plain.parameters()), rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_write_to_half_gradients_behind_one_to_masters_is_told(amp, opt_level):
    model, optimizer = start(amp, opt_level)
    backward(model)
    halve(stepped_by(optimizer))
    model[0].weight.grad.mul_(0.25)
    with pytest.warns(UserWarning, match="has no effect"):
        optimizer.step()


def clear_in_place(model):
    for param in model.parameters():
        param.grad.zero_()


def clear_past_the_version(model):
    for param in model.parameters():
        param.grad.data.zero_()


def clear_by_hand(model):
    for param in model.parameters():
        param.grad = None


IN_PLACE = {
    "None": clear_by_hand,
    "model": lambda model: model.zero_grad(set_to_none=False),
    "by hand": clear_in_place,
    "data": clear_past_the_version,
}


@pytest.mark.parametrize("clear", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_backward_adds_to_what_a_block_left_and_a_script_zeroed(
    amp, opt_level, fused_step, is_stepped, clear
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"loss_scale": 64.0, "fused_step": fused_step, "verbosity": 0}
    amp.initialize(model, optimizer, opt_level=opt_level, **options)
    with amp.scale_loss(8 * model(X).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    if is_stepped:
        optimizer.step()
    clear(model)
    before = values(amp.master_params(optimizer))
    twin = copy.deepcopy(model)  # in float32
    backward(twin)
    gradients = [param.grad for param in twin.parameters()]
    backward(model)
    optimizer.step()
    expected = [param - 0.5 * grad for param, grad in zip(before, gradients, strict=True)]
    torch.testing.assert_close(values(amp.master_params(optimizer)), expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_backward_of_another_model_reads_no_numbers(amp, opt_level, fused_step, monkeypatch):
    """A GPU would be waited for: at each layer of a discriminator, while the generator trains."""
    model, optimizer = start(amp, opt_level, fused_step=fused_step, loss_scale=64.0)
    another = nn.Linear(3, 2)
    for _ in range(40):  # while mistakes are looked for
        optimizer.zero_grad()
        with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        backward(another)
    monkeypatch.setattr(gradients, "are_any", None)
    with CountItems() as items:
        backward(another)
    assert items.count == 0


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("clear", IN_PLACE.values(), ids=IN_PLACE)
def test_a_backward_of_another_model_makes_no_gradient_of_zeros(amp, clear, fused_step):
    model, optimizer = start(amp, "O2", fused_step=fused_step, loss_scale=64.0)
    another = nn.Linear(3, 2)
    before = values(amp.master_params(optimizer))
    for factor in (torch.inf, 1.0):
        with amp.scale_loss(factor * model(X).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        if factor == torch.inf:
            clear(model)
        backward(another)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    after = values(amp.master_params(optimizer))
    assert not any(map(torch.equal, before, after))


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_step_behind_deactivate_has_the_gradients_of_a_backward(amp, opt_level, fused_step):
    model, optimizer = start(amp, opt_level, fused_step=fused_step)
    before, expected = values(amp.master_params(optimizer)), gradients_of_a_copy(model)
    backward(model)
    amp.deactivate()
    torch.testing.assert_close([param.grad for param in model.parameters()], expected)
    optimizer.step()
    expected = [param - 0.5 * grad for param, grad in zip(before, expected, strict=True)]
    torch.testing.assert_close(values(model.parameters()), expected)


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")  # what is left of a step
@pytest.mark.parametrize("fused_step", [False, True])
def test_zeros_in_what_an_earlier_step_has_used_are_added_to(amp, fused_step):
    """The last step had gradients of the first layer alone; those of the last are older."""
    found = []
    for cleared in ("last", "all"):
        model, optimizer = start(amp, "O5", fused_step=fused_step)
        losses = [lambda model=model: model(X).float().square().mean()]
        losses.append(lambda model=model: model[0](X.bfloat16()).float().square().mean())
        for loss in losses:
            for param in model[0].parameters():
                param.grad = None
            with amp.scale_loss(loss(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        for param in model[2 if cleared == "last" else 0 :].parameters():
            param.grad.zero_()
        before = values(amp.master_params(optimizer))[2:]
        losses[0]().backward()
        optimizer.step()
        after = values(amp.master_params(optimizer))[2:]
        found.append([new - old for new, old in zip(after, before, strict=True)])
        amp.deactivate()
    assert all(step.any() for step in found[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def two_numbers(amp, opt_level, **options):
    """Return a model of two numbers, 0 at first, and an optimizer that steps them by gradients."""
    model = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_a_step_has_used_is_not_stepped_beside_another_parts_plain_backward(
    amp, opt_level, fused_step
):
    model, optimizer = two_numbers(amp, opt_level, fused_step=fused_step, loss_scale=64.0)
    with amp.scale_loss(model[0].float().sum() * 2.0, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (model[1].float().sum() * 3.0).backward()
    first, second = stepped_by(optimizer)
    torch.nn.utils.clip_grad_norm_([second], 100.0)  # reads it
    first.grad = None
    optimizer.step()
    assert [first.item(), second.item()] == [-2.0, -3.0]


def zero(params):
    for param in params:
        if param.grad is not None:
            param.grad.zero_()


def step_and_clear(model, optimizer):
    optimizer.step()
    optimizer.zero_grad()


def backward_to_twos(output):
    (output.float() - 2.0).square().mean().backward()


def backward_of_first(model):
    backward_to_twos(model[0](X.to(model[0].weight.dtype)))


def backward_of_last(model):
    backward_to_twos(model[2](model[:2](X.to(model[0].weight.dtype)).detach()))


CLIP = torch.nn.utils.clip_grad_norm_
#: What a script may do from one step to the next; masters are the model's own in float32.
ACTIONS = {
    "backward": lambda model, optimizer, masters: backward_to_twos(model(X)),
    "backward of the last": lambda model, optimizer, masters: backward_of_last(model),
    "backward of the first": lambda model, optimizer, masters: backward_of_first(model),
    "halve the masters'": lambda model, optimizer, masters: halve(masters()),
    "clip the model's": lambda model, optimizer, masters: CLIP(model.parameters(), 0.3),
    "clip the masters'": lambda model, optimizer, masters: CLIP(masters(), 0.2),
    "read": lambda model, optimizer, masters: [param.grad for param in masters()],
    "clear": lambda model, optimizer, masters: clear(model.parameters()),
    "clear a part": lambda model, optimizer, masters: clear(model[2].parameters()),
    "zero": lambda model, optimizer, masters: zero(model.parameters()),
    "zero a part": lambda model, optimizer, masters: zero(model[2].parameters()),
    "zero_grad": lambda model, optimizer, masters: optimizer.zero_grad(),
    "zero_grad of the model": lambda model, optimizer, masters: model.zero_grad(),
    "step": lambda model, optimizer, masters: step_and_clear(model, optimizer),
}


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_a_script_clips_and_clears_by_hand_is_as_in_plain_pytorch(amp, opt_level, fused_step):
    model, optimizer = start(amp, opt_level, loss_scale=1.0, fused_step=fused_step)
    initial = values(model.parameters())

    @given(names=st.lists(st.sampled_from(sorted(ACTIONS)), max_size=8))
    @example(names=["backward", "clip the model's", "clear", "backward"])
    @example(names=["backward", "clip the masters'", "clear a part", "backward"])
    @example(names=["backward", "clip the model's", "zero", "backward"])
    @example(names=["backward", "read", "zero a part", "backward"])
    @example(names=["backward of the first", "read", "backward of the last"])
    @example(names=["backward", "halve the masters'", "read", "clear a part"])
    @example(names=["backward", "clip the model's", "read", "clear a part"])
    def run(names):
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), initial)
        plain, plain_optimizer = float32_twin(amp, model, optimizer)
        for name in [*names, "step"]:
            ACTIONS[name](model, optimizer, lambda: list(amp.master_params(optimizer)))
            ACTIONS[name](plain, plain_optimizer, lambda: list(plain.parameters()))
        found = values(amp.master_params(optimizer))
        torch.testing.assert_close(found, values(plain.parameters()), rtol=2e-2, atol=5e-3)

    run()


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_a_backward_adds_to_what_masters_were_given_in_the_place_of_what_was_cleared(
    amp, opt_level, fused_step
):
    model, optimizer = start(amp, opt_level, loss_scale=1.0, fused_step=fused_step)
    plain, plain_optimizer = float32_twin(amp, model, optimizer)
    for one, of, stepped in (
        (model, optimizer, list(amp.master_params(optimizer))),
        (plain, plain_optimizer, list(plain.parameters())),
    ):
        backward_to_twos(one(X))
        CLIP(one.parameters(), 0.3)
        clear(one.parameters())
        for param in stepped:
            param.grad = torch.full_like(param, 0.5)
        backward_to_twos(one(X))
        of.step()
    found = values(amp.master_params(optimizer))
    torch.testing.assert_close(found, values(plain.parameters()), rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_what_is_added_to_gradients_of_a_step_beside_a_part_of_its_own_is_stepped(
    amp, opt_level, fused_step
):
    """A script that clears the head alone lets the body's gradients add up from step to step."""
    model, optimizer = two_numbers(amp, opt_level, fused_step=fused_step, loss_scale=1.0)
    (model[0].float() + model[1].float()).sum().backward()
    optimizer.step()
    model[1].grad = None
    (model[1].float() * 0.5).sum().backward()
    assert stepped_by(optimizer)[1].grad is not None  # reads it
    (model[0].float() + model[1].float()).sum().backward()
    optimizer.step()
    assert [param.item() for param in amp.master_params(optimizer)] == [-3.0, -2.5]


@pytest.mark.parametrize("opt_level", WITH_MASTERS)
def test_micro_batches_wait_for_no_device_though_masters_were_read(amp, opt_level):
    model, optimizer = start(amp, opt_level, loss_scale=1.0)
    for _ in range(100):  # in the first passes gradients are looked at
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    backward(model)
    assert all(param.grad is not None for param in amp.master_params(optimizer))
    with CountItems() as items:
        backward(model)
        backward(model)
    assert items.count <= 1


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
@pytest.mark.filterwarnings("ignore:at a level with a loss scale every loss")
def test_each_optimizer_of_a_layer_steps_what_a_plain_backward_left_before_their_block(
    amp, fused_step, loss_scale
):
    model = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    both = [torch.optim.SGD(params, lr=1.0) for params in (model.parameters(), [model[1]])]
    options = {"fused_step": fused_step, "loss_scale": loss_scale, "verbosity": 0}
    amp.initialize(model, both, opt_level="O2", **options)
    (model[0].float() + 2.0 * model[1].float()).sum().backward()
    with amp.scale_loss((model[0].float() + model[1].float()).sum(), both) as scaled:
        scaled.backward()
    found = []
    for optimizer in both:
        optimizer.step()
        found.append([value.item() for value in model.state_dict().values()])
    assert found == [[-2.0, -3.0], [-2.0, -6.0]]
