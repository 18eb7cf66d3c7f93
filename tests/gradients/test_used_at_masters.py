"""What a script does to gradients of the groups after a step, the next backward adds to."""

import copy
import warnings

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.common.early_looks import WATCHED
from amp_patch.gradients import used_at_masters
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.gradients.used_at_masters import UsedAtMasters
from amp_patch.gradients.used_gradients import UsedGradients
from amp_patch.weights.own_gradients import OwnGradients
from amp_patch.weights.parameter_lists import stored_grad

X = torch.linspace(-1, 1, 12).reshape(4, 3)


def stepped_by(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def with_grads(params):
    return [param for param in params if param.grad is not None]


def set_to_none(params):
    for param in params:
        param.grad = None


def without_halves(model, optimizer):
    """Return the masters whose half parameters have no gradient."""
    rows = zip(model.parameters(), stepped_by(optimizer), strict=True)
    return [one for param, one in rows if param is not one and param.grad is None]


def replace(params):
    for param in with_grads(params):
        param.grad = param.grad * 0.25


def fill(params):
    for param in params:
        param.grad = torch.full_like(param, 0.1)


def zero(params):
    for param in with_grads(params):
        param.grad.zero_()


def zero_data(params):
    for param in with_grads(params):
        param.grad.data.zero_()


def halve(params):
    for param in with_grads(params):
        param.grad.mul_(0.5)


CLEARS = {
    "none": lambda model, optimizer: set_to_none(stepped_by(optimizer)),
    "first": lambda model, optimizer: set_to_none(stepped_by(optimizer)[:1]),
    "zeros": lambda model, optimizer: zero(stepped_by(optimizer)),
    "zeros through data": lambda model, optimizer: zero_data(stepped_by(optimizer)),
    "halves": lambda model, optimizer: halve(stepped_by(optimizer)),
    "replaced": lambda model, optimizer: replace(stepped_by(optimizer)),
    "filled": lambda model, optimizer: fill(stepped_by(optimizer)),
    "read": lambda model, optimizer: [param.grad for param in stepped_by(optimizer)],
    "by the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "to zeros by the optimizer": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "by a part": lambda model, optimizer: model[0].zero_grad(),
    "of the model": lambda model, optimizer: set_to_none(model.parameters()),
}


@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("opt_level", ["O2", "O5"])
def test_any_clears_between_plain_steps_are_as_in_float32(amp, opt_level, fused_step):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"opt_level": opt_level, "fused_step": fused_step, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    initial = [param.detach().clone() for param in model.parameters()]

    @example([["none"], ["zeros"], ["zeros through data"], ["halves"]])
    @example([["by a part", "none"]])
    @example([["halves", "of the model"]])
    @example([["by the model", "filled"], [], ["halves"]])
    @example([["none", "of the model", "filled"]])
    @example([["first", "of the model", "replaced"]])
    @example([["zeros", "by a part", "filled"]])
    @example([["halves", "by a part", "zeros through data"]])
    @example([["by the optimizer", "filled", "by a part"]])
    @given(st.lists(st.lists(st.sampled_from([*CLEARS]), max_size=3), max_size=4))
    def run(steps):
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), initial)
        plain = copy.deepcopy(model).float()
        twins = torch.optim.SGD(plain.parameters(), lr=0.1)
        for mine, twin in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
            twin.data.copy_(mine.data)
        # one after the other, for a backward of the twin would offer the model's gradients, too
        for network, one in ((model, optimizer), (plain, twins)):
            for clears in [[], *steps]:
                given = []
                for clear in clears:
                    if clear == "of the model":
                        # None in the place of None, which nobody is told of: docs/limits.md,
                        # "A gradient that a script gives to a parameter of `param_groups`"
                        assume(all(stored_grad(master) is None for master in given))
                    if clear == "filled":
                        given = without_halves(network, one)
                    CLEARS[clear](network, one)
                network(X).float().square().mean().backward()
                one.step()
        mine, theirs = stepped_by(optimizer), list(plain.parameters())
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=5e-3)

    run()


@pytest.fixture
def halves() -> list[Tensor]:
    halves = [torch.ones(3, dtype=torch.bfloat16), torch.ones(2)]
    for half in halves:
        half.grad = torch.full_like(half, 2.0)
    return halves


@pytest.fixture
def masters(halves: list[Tensor]) -> list[Tensor]:
    return [halves[0].float(), halves[1]]


def stepped(halves: list[Tensor], masters: list[Tensor]) -> UsedAtMasters:
    used, own = UsedGradients(), OwnGradients()
    used.begin([half.grad for half in halves])
    used.note_versions()
    gradients = UsedAtMasters(used, own)
    gradients.copy_to_masters(ParamPairs(halves, masters))
    return gradients


def test_masters_get_copies_that_go_with_the_next_backward(halves, masters):
    gradients = stepped(halves, masters)
    torch.testing.assert_close(masters[0].grad, torch.full((3,), 2.0), rtol=0, atol=0)
    gradients.follow(steps=False)
    assert masters[0].grad is None
    assert [half.grad.tolist() for half in halves] == [[2.0] * 3, [2.0] * 2]


def test_a_script_that_asks_finds_none_where_the_half_one_is_gone(halves, masters):
    gradients = stepped(halves, masters)
    halves[0].grad = None
    gradients.look_at(masters[0])
    assert masters[0].grad is None
    masters[0].grad = given = torch.ones(3)
    gradients.look_at(masters[0])
    gradients.follow()
    assert masters[0].grad is given
    assert halves[0].grad is None


@pytest.mark.parametrize("steps", [False, True])
def test_what_is_cleared_there_is_cleared(halves, masters, steps):
    gradients = stepped(halves, masters)
    masters[0].grad = None
    gradients.follow(steps=steps)
    assert halves[0].grad is None
    assert halves[1].grad is not None


def test_what_is_written_there_is_for_a_step_or_a_backward(halves, masters):
    gradients = stepped(halves, masters)
    masters[0].grad.mul_(2)
    gradients.follow(steps=True)
    assert masters[0].grad.tolist() == [4.0] * 3
    masters[0].grad = None
    gradients = stepped(halves, masters)
    masters[0].grad.mul_(2)
    gradients.follow(steps=False)
    assert masters[0].grad is None
    assert halves[0].grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("replaces", [False, True])
def test_behind_blocks_what_is_set_there_is_stepped_though_the_half_one_is_gone(
    halves, masters, replaces
):
    used, own = UsedGradients(), OwnGradients()
    used.begin([half.grad for half in halves])
    gradients = UsedAtMasters(used, own)
    gradients.copy_to_masters(ParamPairs(halves, masters))
    halves[0].grad = None
    if replaces:
        masters[0].grad = torch.ones(3)
    else:
        masters[0].grad.mul_(2)
    gradients.follow(steps=True)
    assert (masters[0].grad is not None) == replaces


def test_a_half_one_that_is_given_after_that_there_was_cleared_stays(halves, masters):
    gradients = stepped(halves, masters)
    masters[0].grad = None
    halves[0].grad = given = torch.ones(3, dtype=torch.bfloat16)
    gradients.follow(steps=True)
    assert halves[0].grad is given


def test_a_step_uses_no_gradient_again_that_is_not_a_number(halves, masters):
    halves[0].grad.fill_(torch.nan)
    gradients = stepped(halves, masters)
    gradients.follow(steps=True)
    assert masters[0].grad is None


def test_what_a_backward_adds_to_again_is_no_longer_shown(halves, masters):
    gradients = stepped(halves, masters)
    gradients.follow(steps=False)
    halves[0].grad.add_(1)
    gradients.copy_to_masters(ParamPairs(halves, masters))
    assert masters[0].grad is None


class ClearsItself(torch.optim.SGD):
    """A user's own optimizer, whose step leaves no gradients."""

    def step(self, closure=None):
        super().step(closure)
        set_to_none(stepped_by(self))


def in_the_step(optimizer, model):
    model(X).float().square().mean().backward()
    optimizer.step()


def in_a_closure(optimizer, model):
    def closure():
        set_to_none(stepped_by(optimizer))
        loss = model(X).float().square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
@pytest.mark.parametrize(
    ("kind", "run"), [(ClearsItself, in_the_step), (torch.optim.SGD, in_a_closure)]
)
@pytest.mark.parametrize("opt_level", ["O2", "O5"])
def test_what_is_cleared_in_the_step_is_cleared(amp, opt_level, kind, run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    plain = copy.deepcopy(model)
    twins = kind(plain.parameters(), lr=0.1)
    optimizer = kind(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    for _ in range(3):
        run(optimizer, model)
    for _ in range(3):  # not in turn: a backward of the twin would offer the model's gradients, too
        run(twins, plain)
    mine, theirs = list(amp.master_params(optimizer)), list(plain.parameters())
    torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=5e-3)


class Averages:
    """Wraps an optimizer; after every third step averages what has a gradient in its groups."""

    def __init__(self, optimizer):
        self.optimizer, self.steps, self.averages = optimizer, 0, {}

    def step(self):
        self.optimizer.step()
        self.steps += 1
        for param in with_grads(stepped_by(self.optimizer)) if self.steps % 3 == 0 else ():
            average = self.averages.setdefault(id(param), param.detach().clone())
            param.data.copy_(average.lerp_(param.detach(), 0.5))


LEVELS_AND_STEPS = pytest.mark.parametrize(
    ("opt_level", "fused_step"), [("O2", False), ("O5", False)]
)


def trained_by_blocks(amp, opt_level, fused_step, scale=64.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))
    groups = [{"params": list(part.parameters())} for part in (model[0], model[2], model[3])]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    options = {"loss_scale": scale, "fused_step": fused_step, "verbosity": 0}
    amp.initialize(model, optimizer, opt_level=opt_level, **options)
    return model, optimizer


def block(amp, model, optimizer, factor=1.0):
    with amp.scale_loss(model(X).float().square().mean() * factor, optimizer) as scaled:
        scaled.backward()


@LEVELS_AND_STEPS
def test_what_wraps_an_optimizer_finds_which_parameters_a_step_of_blocks_has_used(
    amp, opt_level, fused_step
):
    model, optimizer = trained_by_blocks(amp, opt_level, fused_step)
    plain = copy.deepcopy(model).float()
    for mine, twin in zip(stepped_by(optimizer), plain.parameters(), strict=True):
        twin.data.copy_(mine.data)
    twins = torch.optim.SGD(plain.parameters(), lr=0.1)
    for network, one in ((model, optimizer), (plain, twins)):
        wrapper = Averages(one)
        for _ in range(9):
            one.zero_grad()
            if network is model:
                block(amp, model, optimizer)
            else:
                network(X).square().mean().backward()
            wrapper.step()
        assert len(wrapper.averages) == 6
    torch.testing.assert_close(
        stepped_by(optimizer), list(plain.parameters()), rtol=3e-2, atol=5e-3
    )


@LEVELS_AND_STEPS
def test_gradients_that_a_step_of_blocks_has_used_are_true_ones_at_the_masters(
    amp, opt_level, fused_step
):
    model, optimizer = trained_by_blocks(amp, opt_level, fused_step)
    for _ in range(2):
        optimizer.zero_grad()
        block(amp, model, optimizer)
        before = [master.grad.clone() for master in stepped_by(optimizer)]
        optimizer.step()
        found = [master.grad for master in stepped_by(optimizer)]
        torch.testing.assert_close(found, before, rtol=1e-2, atol=1e-3)


@LEVELS_AND_STEPS
def test_they_take_no_memory_until_one_is_read(amp, opt_level, fused_step):
    model, optimizer = trained_by_blocks(amp, opt_level, fused_step)
    block(amp, model, optimizer)
    optimizer.step()
    masters = stepped_by(optimizer)
    of_halves = [
        master
        for param, master in zip(model.parameters(), masters, strict=True)
        if param is not master
    ]
    assert of_halves[0] is masters[0]
    assert [stored_grad(master) for master in of_halves] == [None] * len(of_halves)
    assert len(with_grads(masters)) == len(masters)
    optimizer.zero_grad()
    assert not with_grads(masters)


def test_a_skipped_step_has_used_none(amp):
    model, optimizer = trained_by_blocks(amp, "O2", False, scale="dynamic")
    block(amp, model, optimizer, factor=float("inf"))
    optimizer.step()
    assert not with_grads([stepped_by(optimizer)[0], stepped_by(optimizer)[-1]])


@LEVELS_AND_STEPS
def test_a_second_step_behind_one_of_blocks_changes_nothing_where_they_were_read(
    amp, opt_level, fused_step
):
    model, optimizer = trained_by_blocks(amp, opt_level, fused_step)
    block(amp, model, optimizer)
    optimizer.step()
    assert len(with_grads(stepped_by(optimizer))) == 6
    before = [master.detach().clone() for master in stepped_by(optimizer)[:2]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a step without gradients
        optimizer.step()
    torch.testing.assert_close(stepped_by(optimizer)[:2], before, rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("clear", [zero, zero_data, set_to_none])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_script_may_clear_those_of_the_groups_between_step_and_block(
    amp, level, beside, clear
) -> None:
    """Also where another model, which amp never got, has a backward beside."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alike = torch.optim.SGD(plain.parameters(), lr=0.1)
    other = nn.Linear(3, 1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(40):  # more than are watched
        clear(stepped_by(optimizer))
        with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if beside:
            other(X).sum().backward()
    for _ in range(40):
        alike.zero_grad()
        plain(X).square().mean().backward()
        alike.step()
    pairs = zip(stepped_by(optimizer), plain.parameters(), strict=True)
    for master, exact in pairs:
        torch.testing.assert_close(master.detach(), exact.detach(), rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")
def test_to_read_them_after_each_step_waits_in_the_first_ones_alone(amp, monkeypatch) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    compared: list[int] = []  # in each look, for which a device is waited

    def have_other_numbers(rows):
        compared.append(len(rows))
        return set()

    monkeypatch.setattr(used_at_masters, "have_other_numbers", have_other_numbers)
    for _ in range(WATCHED + 4):
        with_grads(stepped_by(optimizer))
        with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert compared[:WATCHED] == [2] * WATCHED
    assert not any(compared[WATCHED:])
    assert len(compared) > WATCHED
