"""Writes to half weights and to masters, against a model of who wins when."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from fine_linear import FINE, copies, fine_linear, prepared, train_step
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam

F16, BF16 = torch.float16, torch.bfloat16
LEVELS = {"O2": F16, "O5": BF16}


IN_PLACE_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp_": lambda param: param.clamp_(-0.25, 0.25),
    "init": lambda param: nn.init.constant_(param, 0.75),
    "data.clamp_": lambda param: param.data.clamp_(-0.25, 0.25),
    "data =": lambda param: setattr(param, "data", torch.full_like(param, 0.5)),
    "copy_": lambda param: param.copy_(torch.full(param.shape, 0.625)),
    "one element": lambda param: param.view(-1)[:1].fill_(3.0),
    "numpy": lambda param: param.detach().view(torch.int16).numpy().fill(0),
}


@pytest.mark.parametrize("write", IN_PLACE_WRITES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seen_by", ["state_dict", "step", "deactivate", "master_params"])
def test_writes_to_half_weights_reach_the_masters(
    amp: ModuleType, level: str, write: str, seen_by: str
) -> None:
    model, optimizer = prepared(amp, level, make=lambda params, lr: Adam(params, lr=lr, fused=True))
    train_step(amp, model, optimizer)
    exact, rounded = copies(model)["weight"], model.weight.detach().clone()
    with torch.no_grad():
        IN_PLACE_WRITES[write](model.weight)
    written = model.weight.detach().clone()
    expected = torch.where(written == rounded, exact, written.float())
    optimizer.zero_grad()
    if seen_by == "state_dict":
        actual = model.state_dict()["weight"]
    elif seen_by == "deactivate":
        amp.deactivate()
        actual = model.weight
    elif seen_by == "master_params":
        actual = next(amp.master_params(optimizer))
    else:
        optimizer.step()
        actual = next(iter(optimizer.param_groups[0]["params"]))
        assert torch.equal(model.weight, written)
    assert torch.equal(actual, expected)


def test_a_clamped_weight_trains_on_from_the_clamp(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    for _ in range(20):
        train_step(amp, model, optimizer)
        with torch.no_grad():
            model.weight.clamp_(-0.5, 0.5)
    assert torch.equal(model.weight, torch.full((3, 4), -0.5, dtype=F16))
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), -0.5))


@pytest.mark.parametrize("how", ["copy_", "data"])
def test_writes_to_masters_reach_the_model(amp: ModuleType, how: str) -> None:
    model, optimizer = prepared(amp)
    master = next(amp.master_params(optimizer))
    new = torch.full((3, 4), 2 + FINE)
    with torch.no_grad():
        (master if how == "copy_" else master.data).copy_(new)
    assert torch.equal(model.state_dict()["weight"], new)
    optimizer.step()
    assert torch.equal(model.weight, new.half())
    assert torch.equal(model.state_dict()["weight"], new)


def test_a_half_weight_written_after_the_masters_were_read_is_kept(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    list(amp.master_params(optimizer))
    with torch.no_grad():
        model.weight.fill_(0.5)
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), 0.5))
    optimizer.step()
    assert torch.equal(model.weight, torch.full((3, 4), 0.5).half())


@pytest.mark.parametrize("through_data", [False, True])
def test_a_skipped_step_ends_what_the_masters_may_be_written_for(
    amp: ModuleType, through_data: bool
) -> None:
    """Clip, skip, clamp, as training a critic does."""
    model, optimizer = prepared(amp)
    with amp.scale_loss(model(torch.ones(2, 4)).sum() * torch.inf, optimizer) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    with torch.no_grad():
        (model.weight.data if through_data else model.weight).clamp_(-0.125, 0.125)
    optimizer.zero_grad()
    assert model.state_dict()["weight"].abs().max() == 0.125
    optimizer.step()
    assert model.weight.abs().max() == 0.125


@pytest.mark.parametrize("turns", [(0, 0), (1, 1), (0, 1), (1, 0, 1)])
def test_writes_reach_the_masters_of_two_optimizers_of_one_parameter(
    amp: ModuleType, turns: tuple[int, ...]
) -> None:
    model = fine_linear()
    optimizers = [SGD(model.parameters(), lr=0.5) for _ in range(2)]
    model, optimizers = amp.initialize(
        model, optimizers, opt_level="O2", loss_scale=8.0, verbosity=0
    )
    for turn in turns:
        train_step(amp, model, optimizers[turn])
        with torch.no_grad():
            model.weight.clamp_(-0.25, 0.25)
        assert model.state_dict()["weight"].abs().max() == 0.25
    amp.deactivate()
    assert model.weight.abs().max() == 0.25


class Reference:
    """One weight in fp32, its half copy, and who wins where the two differ.

    Attributes:
        exact, half: its values.
        exposed: the user has had the master, and has not written to the half weight since.
        expects_step: the user has had the master, and no step has come since, made or skipped.
    """

    def __init__(self, value: Tensor, dtype: torch.dtype) -> None:
        self.exact = value.clone()
        self.half = value.to(dtype)
        self.dtype = dtype
        self.exposed = self.expects_step = False

    def follow_early(self, half: Tensor) -> None:
        """Let the half copy have followed the exposed value, as it may before the next forward.

        A state dict has the master: a write to that is one to the state dict of before as well,
        which in plain PyTorch is the parameter.
        """
        rounded = self.exact.to(self.dtype)
        if self.exposed and (rounded == half).all():
            self.half = rounded

    def settle(self) -> None:
        """Let the two agree, as before each step."""
        if self.exposed:
            self.half = self.exact.to(self.dtype)
        else:
            same = self.exact.to(self.dtype) == self.half
            self.exact = torch.where(same, self.exact, self.half.float())
        self.exposed = self.expects_step = False

    def step(self, gradient: float) -> None:
        self.settle()
        self.exact = self.exact - 0.125 * gradient
        self.half = self.exact.to(self.dtype)

    def load(self, value: Tensor) -> None:
        self.exact = value.float().clone()
        self.half = self.exact.to(self.dtype)
        self.exposed = False

    @property
    def state(self) -> Tensor:
        if self.exposed:
            return self.exact
        same = self.exact.to(self.dtype) == self.half
        return torch.where(same, self.exact, self.half.float())


VALUES = st.sampled_from([0.0, 1.0, -0.3, 1 + FINE, 1000.1, -(2.0**-20), float("inf")])


BEYOND_HALF = st.just(7e4)


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["step", "skip", "state", "expose", "release"])),
    st.tuples(st.sampled_from(["half", "half data", "half element"]), VALUES),
    st.tuples(st.sampled_from(["master", "load"]), VALUES | BEYOND_HALF),
)


def apply(action: tuple[Any, ...], amp: ModuleType, model: nn.Module, optimizer: Any) -> None:
    """Do to a model and its optimizer what `follow` does to the reference."""
    kind, *value = action
    if kind in ("step", "skip"):
        optimizer.zero_grad()
        factor = 1.0 if kind == "step" else float("inf")
        with amp.scale_loss(model(torch.ones(2, 4)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    elif kind == "half":
        model.weight.fill_(value[0])
    elif kind == "half data":
        model.weight.data.mul_(value[0])
    elif kind == "half element":
        model.weight[0, 0] = value[0]
    elif kind == "master":
        next(amp.master_params(optimizer)).data.fill_(value[0])
    elif kind == "expose":
        list(amp.master_params(optimizer))
    elif kind == "load":
        model.load_state_dict({"weight": torch.full((3, 4), value[0])}, strict=False)


def follow(action: tuple[Any, ...], reference: Reference) -> None:
    kind, *value = action
    if kind == "step":
        reference.step(2.0)
    elif kind == "skip" and reference.expects_step:
        reference.settle()
    elif kind.startswith("half"):
        write_half(kind, value[0], reference)
    elif kind in ("master", "expose"):
        reference.settle()
        reference.expects_step = True
        before = reference.exact
        if kind == "master":
            reference.exact = torch.full_like(before, value[0])
        # masters that are only read are known to be so in the first steps; as a read counts a write
        # of which their bits have the same sum, as of 1 over as many inf as -inf: docs/limits.md,
        # "one that leaves the sum of the bits as it was"
        reference.exposed = sum_of_bits(reference.exact) != sum_of_bits(before)
    elif kind == "load":
        reference.load(torch.full((3, 4), value[0]))


def sum_of_bits(weight: Tensor) -> int:
    return int(weight.view(torch.int32).sum())


def write_half(kind: str, value: float, reference: Reference) -> None:
    if kind == "half data":
        reference.half = reference.half.clone().mul_(value)
        return
    # seen to be written, while the actions write to the masters through .data only
    reference.exposed = False
    reference.half = reference.half.clone()
    (reference.half if kind == "half" else reference.half[0, 0]).fill_(value)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused", [False, True])
def test_any_sequence_of_writes_steps_and_loads_follows_the_rule(
    amp: ModuleType, level: str, fused: bool
) -> None:
    @example([("master", 7e4), ("half", 1000.1), ("skip",), ("half data", 1000.1)])
    @given(st.lists(ACTIONS, max_size=12))
    def run(actions: list[tuple[Any, ...]]) -> None:
        model = fine_linear()
        reference = Reference(model.weight.detach(), LEVELS[level])
        model, optimizer = prepared(
            amp, level, model, lambda params, lr: SGD(params, lr=lr, fused=fused)
        )
        for action in actions:
            if action[0] == "release":
                break
            with torch.no_grad() if action[0] not in ("step", "skip") else torch.enable_grad():
                apply(action, amp, model, optimizer)
            follow(action, reference)
            if action[0] in ("state", "step", "load"):
                state = model.state_dict()["weight"]
                reference.follow_early(model.weight.data)
                torch.testing.assert_close(state, reference.state, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(
                    model.weight.data, reference.half, rtol=0, atol=0, equal_nan=True
                )
        reference.settle()
        amp.deactivate()
        torch.testing.assert_close(
            model.weight.data, reference.exact, rtol=0, atol=0, equal_nan=True
        )

    run()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("written", ["master", "master.data", "half weight"])
def test_a_group_that_comes_when_the_user_has_the_masters_may_be_written_to(
    amp: ModuleType, level: str, written: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = SGD(model[0].parameters(), lr=0.125)
    model[1].requires_grad_(False)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    list(amp.master_params(optimizer))
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    master = optimizer.param_groups[1]["params"][0]
    with torch.no_grad():
        if written == "half weight":
            model[1].weight.fill_(2.0)
        else:
            (master.data if written == "master.data" else master).fill_(2.0)
    model(torch.ones(2, 4))
    assert model[1].weight.eq(2.0).all()
    optimizer.step()
    assert model[1].weight.eq(2.0).all()
    assert model.state_dict()["1.weight"].eq(2.0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_half_weight_that_is_set_anew_to_what_it_was_wins_over_a_write_before(
    amp: ModuleType, level: str
) -> None:
    """While a state dict is held, which has the master."""
    model, optimizer = prepared(amp, level)
    with torch.no_grad():
        model.load_state_dict({"weight": torch.full((3, 4), 0.5)}, strict=False)
        state = model.state_dict()
        next(amp.master_params(optimizer)).data.fill_(100.0)
        model.weight.fill_(0.5)
    train_step(amp, model, optimizer)
    assert state["weight"].abs().max() < 1.0
    assert model.weight.abs().max() < 1.0
