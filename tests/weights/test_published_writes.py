"""Writes to the masters, and the forward that comes next: it reads the rounded masters."""

import copy
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import numbers_like, scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from amp_patch import amp as core
from amp_patch.weights.user_writes import UserWrites

HALVES = {"O2": torch.float16, "O5": torch.bfloat16}
LEVELS = pytest.mark.parametrize("level", HALVES)
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))


class Training:
    """A small model at a level, and what its optimizer steps."""

    def __init__(self, amp: ModuleType, level: str, fused: bool) -> None:
        self.amp, self.level = amp, level
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = amp.initialize(
            model, optimizer, opt_level=level, fused_step=fused, loss_scale=64.0, verbosity=0
        )
        self.inputs = torch.randn(4, 8)

    @property
    def masters(self) -> list[Tensor]:
        """What the optimizer steps, without amp_patch being told that somebody has it."""
        return self.optimizer.param_groups[0]["params"]

    def step(self) -> None:
        self.optimizer.zero_grad()
        scaled_backward(self.amp, self.model(self.inputs).square().mean(), self.optimizer)
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def assert_forward_reads(self, state: dict[str, Tensor]) -> None:
        """Assert that a forward computes with these values, rounded, and that they stay."""
        half = HALVES[self.level]
        hand_written = model_of().to(half)
        hand_written.load_state_dict({name: value.to(half) for name, value in state.items()})
        expected = hand_written(self.inputs.to(half)).float()
        assert torch.equal(self.model(self.inputs), expected)
        after = self.model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in state.items())


@torch.no_grad()
def write(training: Training) -> None:
    for master in training.masters:
        master.mul_(1.5)


def write_shown(training: Training) -> None:
    for master in training.amp.master_params(training.optimizer):
        master.data.mul_(1.5)  # leaves no trace in a version


def write_between_forwards(training: Training) -> None:
    masters = list(training.amp.master_params(training.optimizer))
    for factor in (0.75, 1.25, 3.0):
        training.model(training.inputs)
        expected = [master.detach() * factor for master in masters]
        for master in masters:
            master.data.mul_(factor)
        training.model(training.inputs)
        assert all(map(torch.equal, masters, expected))


@torch.no_grad()
def give_other_memory(training: Training) -> None:
    """As a step of SAM does: back to the weights of before, and a step of another optimizer."""
    for master in training.masters:
        master.data = master.data * 2.0
        master.mul_(0.75)


@torch.no_grad()
def write_one(training: Training) -> None:
    training.masters[1].fill_(0.3)


WRITES = [write, write_shown, write_between_forwards, give_other_memory, write_one]


@LEVELS
@FUSED
@pytest.mark.parametrize("write", WRITES)
def test_a_forward_reads_what_was_written_to_the_masters(
    amp: ModuleType, level: str, fused: bool, write: Callable[[Training], None]
) -> None:
    training = Training(amp, level, fused)
    for _ in range(3):
        training.step()
        before = training.state()
        write(training)
        written = dict(zip(before, map(torch.clone, training.masters), strict=True))
        assert not torch.equal(written["0.bias"], before["0.bias"])
        training.assert_forward_reads(written)


@LEVELS
@FUSED
@pytest.mark.parametrize("write", WRITES)
def test_a_forward_without_gradients_reads_them_and_training_goes_on(
    amp: ModuleType, level: str, fused: bool, write: Callable[[Training], None]
) -> None:
    training = Training(amp, level, fused)
    training.step()
    write(training)
    with torch.inference_mode():
        training.assert_forward_reads(training.state())
    training.step()
    write_shown(training)
    training.assert_forward_reads(training.state())


READS: dict[str, Callable[[Training], object]] = {
    "nothing": lambda training: None,
    "all": lambda training: [one.norm() for one in training.amp.master_params(training.optimizer)],
    "one, and writes one": lambda training: (
        next(training.amp.master_params(training.optimizer)),
        write_one(training),
    ),
}


def copy_by_version(param: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        param.copy_(value)


def copy_by_data(param: Tensor, value: Tensor) -> None:
    param.data.copy_(value)


def set_data(param: Tensor, value: Tensor) -> None:
    param.data = value.clone()


#: With steps before them. After more than 16 steps a write in place by ``.data`` is not seen.
PUTS = [
    (copy_by_version, 1),
    (copy_by_version, 20),
    (copy_by_data, 1),
    (set_data, 1),
    (set_data, 20),
]


@LEVELS
@pytest.mark.parametrize(("put", "steps"), PUTS)
@pytest.mark.parametrize("read", sorted(READS))
def test_half_weights_that_are_changed_for_a_forward_leave_the_masters_as_they_were(
    amp: ModuleType, level: str, put: Callable[[Tensor, Tensor], None], steps: int, read: str
) -> None:
    """As for an evaluation of averages, or an attack; also where the masters were read."""
    training = Training(amp, level, False)
    for _ in range(steps):
        training.step()
    READS[read](training)
    training.model(training.inputs)
    before = [master.clone() for master in training.masters]
    params = list(training.model.parameters())
    kept = [param.detach().clone() for param in params]
    for param, value in zip(params, kept, strict=True):
        put(param, value * 0.5)
    other = model_of().to(HALVES[level])
    other.load_state_dict(
        {
            name: value * 0.5
            for name, value in zip(dict(training.model.named_parameters()), kept, strict=True)
        }
    )
    expected = other(training.inputs.to(HALVES[level])).float()
    for _ in range(2):
        assert torch.equal(training.model(training.inputs), expected)
    for param, value in zip(params, kept, strict=True):
        put(param, value)
    training.model(training.inputs)
    assert all(map(torch.equal, training.masters, before))
    assert all(map(torch.equal, training.model.state_dict().values(), before))


def saved(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


def copied(model: nn.Module) -> list[Tensor]:
    return [param.detach() for param in copy.deepcopy(model).parameters()]


@LEVELS
@pytest.mark.parametrize(("put", "steps"), PUTS)
@pytest.mark.parametrize("taken", [saved, copied])
def test_what_is_saved_of_half_weights_that_are_changed_is_the_change(
    amp: ModuleType,
    level: str,
    put: Callable[[Tensor, Tensor], None],
    steps: int,
    taken: Callable[[nn.Module], list[Tensor]],
) -> None:
    """As averages are put in the weights' place to save them; also where the masters were read."""
    training = Training(amp, level, False)
    for _ in range(steps):
        training.step()
    READS["all"](training)
    values = [param.detach() * 0.5 for param in training.model.parameters()]
    for param, value in zip(training.model.parameters(), values, strict=True):
        put(param, value)
    for value, found in zip(values, taken(training.model), strict=True):
        assert torch.equal(found, value.float())


@LEVELS
@pytest.mark.parametrize("taken", [saved, copied])
def test_a_write_to_a_master_by_its_data_is_saved_without_a_forward(
    amp: ModuleType, level: str, taken: Callable[[nn.Module], list[Tensor]]
) -> None:
    """As of Lookahead, in the first steps."""
    training = Training(amp, level, False)
    training.step()
    for master in training.masters:
        master.data.mul_(0.3)
    assert all(map(torch.equal, taken(training.model), training.masters))
    assert any(map(torch.Tensor.any, training.masters))


@LEVELS
def test_a_compiled_forward_reads_them(amp: ModuleType, level: str) -> None:
    training = Training(amp, level, False)
    training.step()
    compiled = torch.compile(training.model, backend="eager", fullgraph=True)
    before = compiled(training.inputs)
    write(training)
    after = compiled(training.inputs)
    assert not torch.equal(before, after)
    assert torch.equal(after, training.model(training.inputs))


def test_a_transformed_forward_reads_them(amp: ModuleType) -> None:
    training = Training(amp, "O2", False)
    training.step()
    with torch.no_grad():
        for master in training.masters:
            master.zero_()
    gradient = torch.func.grad(lambda x: training.model(x).sum())(training.inputs)
    assert torch.equal(gradient, torch.zeros(4, 8))
    write_shown(training)
    assert torch.func.vmap(training.model)(training.inputs).count_nonzero() == 0
    training.step()


class HalfWay(Optimizer):
    """Stops between the two halves of its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.half_way, self.go_on = threading.Event(), threading.Event()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        torch._foreach_sub_(params, 0.5)
        self.half_way.set()
        assert self.go_on.wait(timeout=20)
        torch._foreach_sub_(params, 0.5)


@LEVELS
def test_a_forward_of_another_thread_leaves_a_step_alone(amp: ModuleType, level: str) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = HalfWay(model.parameters())
    (model, other), optimizer = amp.initialize(
        [model, other], optimizer, opt_level=level, loss_scale=1.0, verbosity=0
    )
    scaled_backward(amp, model(torch.ones(1, 2)).sum(), optimizer)
    before = model.weight.detach().clone()
    (master, _) = amp.master_params(optimizer)
    stepped = (master.detach() - 0.5 - 0.5).to(before.dtype)
    step = threading.Thread(target=optimizer.step)
    step.start()
    assert optimizer.half_way.wait(timeout=20)
    other(torch.ones(1, 2))
    seen = model.weight.detach().clone()
    optimizer.go_on.set()
    step.join()
    assert torch.equal(seen, before)
    assert torch.equal(model.weight, stepped)


@FUSED
@LEVELS
@pytest.mark.filterwarnings("ignore:a hook of a tensor")
def test_a_thread_that_reads_masters_in_a_backward_changes_nothing(
    amp: ModuleType, level: str, fused: bool
) -> None:
    def trained(reads: bool) -> list[Tensor]:
        training = Training(amp, level, fused)
        first, *rest = training.model
        found: list[Tensor] = []

        def read() -> None:  # as one that logs, or averages, or saves
            found.extend(master.detach().sum() for master in amp.master_params(training.optimizer))

        def read_beside(_: Tensor) -> None:
            thread = threading.Thread(target=read)
            thread.start()
            thread.join(timeout=20)

        for _ in range(4):
            training.optimizer.zero_grad()
            outputs = first(training.inputs.to(first.weight.dtype))
            if reads:  # when the gradients of the later layers are there, and no others
                outputs.register_hook(read_beside)
            for module in rest:
                outputs = module(outputs)
            scaled_backward(amp, outputs.float().square().sum(), training.optimizer)
            training.optimizer.step()
        assert bool(found) == reads
        masters = [master.detach().clone() for master in training.masters]
        amp.deactivate()
        return masters

    for with_reads, without in zip(trained(True), trained(False), strict=True):
        assert torch.equal(with_reads, without)


def test_another_model_reads_what_was_written_to_it(amp: ModuleType) -> None:
    """Of two models each forward reads its own, and an O1 model between them nothing."""
    first, second = Training(amp, "O2", False), Training(amp, "O2", True)
    for training in (first, second):
        training.step()
        write(training)
    for training in (first, second):
        training.assert_forward_reads(training.state())


# --- any program ---


@torch.no_grad()
def draw_master(training: Training, seed: int) -> None:
    master = training.masters[seed % 4]
    master.copy_(numbers_like(master, seed))


def draw_shown_master(training: Training, seed: int) -> None:
    master = list(training.amp.master_params(training.optimizer))[seed % 4]
    master.data.copy_(numbers_like(master, seed))


@torch.no_grad()
def draw_half(training: Training, seed: int) -> None:
    half = list(training.model.parameters())[seed % 4]
    half.copy_(numbers_like(half, seed))


def load(training: Training, seed: int) -> None:
    state = copy.deepcopy(training.model.state_dict())
    training.model.load_state_dict({name: value + 2.0**-14 for name, value in state.items()})


def step(training: Training, seed: int) -> None:
    training.step()


def look(training: Training, seed: int) -> None:
    training.assert_forward_reads(training.state())


EVENTS = st.tuples(
    st.sampled_from([draw_master, draw_shown_master, draw_half, load, step, look]),
    st.integers(0, 11),
)


@pytest.mark.filterwarnings("ignore:between two forward passes")  # a program may write to both
def test_after_any_program_a_forward_reads_what_the_state_dict_says(amp: ModuleType) -> None:
    kept = Training(amp, "O2", False)  # torch stays patched while it lives

    @given(
        level=st.sampled_from(sorted(HALVES)),
        fused=st.booleans(),
        events=st.lists(EVENTS, max_size=8),
    )
    def run(level: str, fused: bool, events: list[tuple[Any, int]]) -> None:
        training = Training(amp, level, fused)
        for event, seed in [*events, (look, 0)]:
            event(training, seed)

    run()
    del kept


@LEVELS
@FUSED
def test_an_average_that_changes_places_with_the_masters_is_evaluated(
    amp: ModuleType, level: str, fused: bool
) -> None:
    training = Training(amp, level, fused)
    average = [master.detach().clone() for master in training.masters]
    for _ in range(3):
        training.step()
        for kept, master in zip(average, training.masters, strict=True):
            kept.lerp_(master.detach(), 0.5)
    trained = [master.detach().clone() for master in training.masters]
    with torch.no_grad():
        for kept, master in zip(average, training.masters, strict=True):
            master.copy_(kept)
    names = training.state()
    training.assert_forward_reads(dict(zip(names, average, strict=True)))
    with torch.no_grad():
        for kept, master in zip(trained, training.masters, strict=True):
            master.copy_(kept)
    training.assert_forward_reads(dict(zip(names, trained, strict=True)))


@LEVELS
@pytest.mark.parametrize(
    ("optimizer_of", "fused"),
    [(SGD, False), (SGD, True), (AdamW, False), (AdamW, True), (Adagrad, False)],
)
def test_weights_that_are_tied_by_their_data_afterwards_train_as_those_tied_before(
    amp: ModuleType, level: str, optimizer_of: type[Optimizer], fused: bool
) -> None:
    found = []
    for is_tied_before in (True, False):
        torch.manual_seed(0)
        table, middle, out = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        model = nn.Sequential(table, middle, nn.Tanh(), out)
        if is_tied_before:
            out.weight.data = table.weight.data
        optimizer = optimizer_of(model.parameters(), lr=0.1)  # type: ignore[call-arg]  # all have it
        amp.initialize(
            model, optimizer, opt_level=level, fused_step=fused, loss_scale=64.0, verbosity=0
        )
        if not is_tied_before:
            out.weight.data = table.weight.data
        for _ in range(4):
            places = torch.arange(6)
            scaled_backward(amp, nn.functional.cross_entropy(model(places), places), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append([value.clone() for value in model.state_dict().values()])
        assert torch.equal(found[-1][0], found[-1][-1])
        core.deactivate()
        assert table.weight.data_ptr() == out.weight.data_ptr()
    assert all(map(torch.equal, *found))


@LEVELS
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize(
    "move",
    [lambda model: model.to("cpu"), lambda model: model.cpu(), lambda model: model.share_memory()],
    ids=["to", "cpu", "share_memory"],
)
def test_a_model_that_is_moved_to_where_it_is_keeps_what_was_written_to_its_masters(
    amp: ModuleType, level: str, steps: int, move: Callable[[nn.Module], object]
) -> None:
    """It sets the ``.data`` of each parameter; warnings are errors here."""
    training = Training(amp, level, False)
    for _ in range(steps):
        training.step()
    masters = list(amp.master_params(training.optimizer))
    expected = [master.detach() * 0.5 for master in masters]
    for master in masters:
        master.data.mul_(0.5)
    move(training.model)
    assert all(map(torch.equal, saved(training.model), expected))
    training.model(training.inputs)
    assert all(map(torch.equal, masters, expected))


@LEVELS
@pytest.mark.parametrize("taken", [saved, copied])
def test_a_state_dict_or_copy_between_forward_and_backward_leaves_the_graph_as_it_is(
    amp: ModuleType, level: str, taken: Callable[[nn.Module], list[Tensor]]
) -> None:
    training = Training(amp, level, False)
    training.step()
    loss = training.model(training.inputs).square().mean()
    for master in amp.master_params(training.optimizer):
        master.data.mul_(0.9)
    expected = [master.clone() for master in training.masters]
    assert all(map(torch.equal, taken(training.model), expected))
    scaled_backward(amp, loss, training.optimizer)


@LEVELS
@pytest.mark.parametrize("is_stepped", [False, True])
def test_weights_that_are_tied_no_longer_are_stepped_apart(
    amp: ModuleType, level: str, is_stepped: bool
) -> None:
    """A tie for one forward alone leaves both masters as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    one, two = (model[row].weight for row in (0, 1))

    def step() -> None:
        scaled_backward(amp, model(torch.ones(2, 4)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step()
    kept = two.data
    masters = [master for master in amp.master_params(optimizer) if master.dim() == 2]
    before = [master.clone() for master in masters]
    two.data = one.data
    model(torch.ones(2, 4))
    if is_stepped:
        step()
        assert masters[0].data_ptr() == masters[1].data_ptr()
        two.data = two.data.clone()
    else:
        two.data = kept
        model(torch.ones(2, 4))
        assert all(map(torch.equal, masters, before))
    step()
    assert masters[0].data_ptr() != masters[1].data_ptr()
    assert not torch.equal(*masters)
    for half, master in zip((one, two), masters, strict=True):
        assert torch.equal(half, master.to(half.dtype))


@LEVELS
@FUSED
def test_what_is_clamped_before_masters_are_read_stays(
    amp: ModuleType, level: str, fused: bool
) -> None:
    """As a critic's weights are, of which the script then logs a norm, or keeps an average."""
    training = Training(amp, level, fused)
    for _ in range(3):
        training.step()
        with torch.no_grad():
            for master in training.masters:
                master.clamp_(-0.0625, 0.0625)
        norms = [master.abs().max() for master in amp.master_params(training.optimizer)]
        assert max(norms) == 0.0625
        state = training.state()
        assert max(value.abs().max() for value in state.values()) == 0.0625
        training.assert_forward_reads(state)


STATES = {
    "nothing was stepped": lambda training: None,
    "masters were given": lambda training: [*training.amp.master_params(training.optimizer)],
    "their data was read": lambda training: training.masters[0].data.sum(),
}


def stepped(training: Training, state: str) -> Training:
    if state != "nothing was stepped":
        for _ in range(20):
            training.step()
    STATES[state](training)
    return training


@LEVELS
@FUSED
@pytest.mark.parametrize("state", [one for one in STATES if one != "masters were given"])
def test_an_evaluation_looks_at_masters_in_its_first_forwards_alone(
    amp: ModuleType, level: str, fused: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look sums the bits of all masters, or rounds them anew, and waits for a GPU."""
    training = stepped(Training(amp, level, fused), state)
    looks: list[object] = []
    find = UserWrites.find_unseen
    monkeypatch.setattr(UserWrites, "find_unseen", lambda self: (looks.append(self), find(self)))
    with torch.no_grad():
        for _ in range(100):
            training.model(training.inputs)
    assert 0 < len(looks) <= 17
    training.step()
    looks.clear()
    with torch.no_grad():
        training.model(training.inputs)
    assert len(looks) == (state == "nothing was stepped")  # whose first steps are looked at


def by_version(master: Tensor) -> None:
    with torch.no_grad():
        master.mul_(0.5)


def by_data(master: Tensor) -> None:
    master.data.mul_(0.5)


def by_address(master: Tensor) -> None:
    master.data = master.detach() * 0.5


@LEVELS
@FUSED
@pytest.mark.parametrize("write", [by_version, by_data, by_address])
@pytest.mark.parametrize("state", STATES)
def test_a_write_within_a_long_evaluation_is_read(
    amp: ModuleType, level: str, fused: bool, state: str, write: Callable[[Tensor], None]
) -> None:
    training = stepped(Training(amp, level, fused), state)
    for _ in range(2):
        expected = training.state()  # before the forwards: the next one looks at what it has
        expected["0.weight"] *= 0.5
        for _ in range(20):
            training.model(training.inputs)
        write(training.masters[0])
        training.assert_forward_reads(expected)


@LEVELS
@FUSED
def test_a_script_that_writes_by_kept_data_is_looked_at_in_long_evaluations_too(
    amp: ModuleType, level: str, fused: bool
) -> None:
    training = Training(amp, level, fused)
    kept = training.masters[0].data
    training.step()
    for _ in range(3):
        expected = training.state()
        expected["0.weight"] *= 0.5
        training.model(training.inputs)
        kept.mul_(0.5)
        training.assert_forward_reads(expected)
        for _ in range(20):
            training.model(training.inputs)


@LEVELS
@FUSED
@pytest.mark.parametrize("are_given", [False, True])
@pytest.mark.parametrize("as_data", [False, True])
def test_each_candidate_is_evaluated_with_its_weights(
    amp: ModuleType, level: str, fused: bool, as_data: bool, are_given: bool
) -> None:
    """As evolution strategies write them, into memory that they have taken once."""
    training = Training(amp, level, fused)
    for _ in range(3):
        training.step()
    masters = [*amp.master_params(training.optimizer)] if are_given else training.masters
    kept = masters[0].data if as_data else torch.from_numpy(masters[0].detach().numpy())
    expected = training.state()
    for number in (1.0, -2.0, 3.0):
        kept.fill_(number)
        expected["0.weight"].fill_(number)
        for _ in range(20):
            training.assert_forward_reads(expected)
