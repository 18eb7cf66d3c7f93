"""Large half weights are compared with their masters where a write may have been unseen."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fine_linear import copies, fine_linear, prepared, train_step
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from amp_patch.common.early_looks import WATCHED, EarlyLooks
from amp_patch.kernels import small_tensors, torch_comparison
from amp_patch.kernels.large_copies import LargeCopies
from amp_patch.weights import unseen_half_writes
from amp_patch.weights.unseen_half_writes import UnseenHalfWrites

LEVELS = {"O2": torch.float16, "O5": torch.bfloat16}


def watching(*params: Tensor) -> tuple[UnseenHalfWrites, Any]:
    values: Any = SimpleNamespace(data_reads=0)
    pairs: Any = SimpleNamespace(params=params or [nn.Parameter(torch.zeros(2).half())])
    return UnseenHalfWrites(pairs, values), values


def after_watching(*params: Tensor) -> tuple[UnseenHalfWrites, Any]:
    writes, values = watching(*params)
    for _ in range(WATCHED):
        assert writes.may_be_any()
        writes.looks.count()
    return writes, values


def test_after_the_first_steps_a_read_of_data_tells_once() -> None:
    writes, values = after_watching()
    assert not writes.may_be_any()
    values.data_reads += 1
    assert [writes.may_be_any(), writes.may_be_any()] == [True, False]


def test_a_write_that_nothing_told_of_is_looked_for_in_all_later_steps() -> None:
    writes, _ = watching()
    assert writes.may_be_any()
    writes.note_found()
    for _ in range(2 * WATCHED):
        writes.looks.count()
    assert writes.may_be_any()


def test_a_write_that_a_read_told_of_says_nothing_of_later_steps() -> None:
    writes, values = watching()
    values.data_reads += 1
    assert writes.may_be_any()
    writes.note_found()
    for _ in range(WATCHED):
        writes.looks.count()
    assert not writes.may_be_any()


def test_of_what_is_no_plain_parameter_nothing_is_told() -> None:
    writes, _ = after_watching(torch.zeros(2).half())
    assert writes.may_be_any()


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no values of copies, and give none a memory that they share: all count as large."""
    monkeypatch.setattr(small_tensors, "_SMALL", 0)
    for name in ("_LEAST", "_MOST", "_SHARE"):
        monkeypatch.setattr(torch_comparison, name, 0)


@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.usefixtures("all_large")
def test_a_plain_training_compares_nothing_after_its_first_steps(
    amp: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Optimizer],
    fused_step: bool,
) -> None:
    model, optimizer = prepared(amp, make=make, fused_step=fused_step)
    counts: list[int] = []
    looked = LargeCopies.unequal_perhaps

    def noted(self: LargeCopies, trusts: bool) -> Any:
        found = looked(self, trusts)
        counts.append(len(found))
        return found

    monkeypatch.setattr(LargeCopies, "unequal_perhaps", noted)
    for _ in range(WATCHED + 4):
        train_step(amp, model, optimizer)
    assert counts[-4:] == [0] * 4
    assert 0 not in counts[:WATCHED]


class Kept:
    """What a script keeps of a weight, from step to step.

    Attributes:
        is_written: it was written to since the last step, and is not let go before the next one.
    """

    def __init__(self) -> None:
        self.of_weight: Tensor | None = None
        self.is_written = False

    def keep(self, kept: Tensor | None) -> None:
        if not self.is_written:
            self.of_weight = kept

    def write(self) -> None:
        if self.of_weight is not None:
            self.is_written = True
            self.of_weight.data.copy_(self.of_weight.flip(0))


def shrink(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight.mul_(0.5)


#: What a script does between two steps.
ACTS: dict[str, Callable[[nn.Linear, Kept], Any]] = {
    "nothing": lambda model, kept: None,
    "keep data": lambda model, kept: kept.keep(model.weight.data),
    "keep detached": lambda model, kept: kept.keep(model.weight.detach()),
    "keep numpy": lambda model, kept: kept.keep(
        torch.from_numpy(model.weight.detach().view(torch.int16).numpy())
    ),
    "write to what is kept": lambda model, kept: kept.write(),
    "let go": lambda model, kept: kept.keep(None),
    "write to data": lambda model, kept: model.weight.data.add_(0.25),
    "write": lambda model, kept: shrink(model),
    "set data": lambda model, kept: setattr(model.weight, "data", model.weight.data.clone() * 2),
    "load": lambda model, kept: model.load_state_dict(
        {name: torch.full_like(value, 0.75) for name, value in model.state_dict().items()}
    ),
    "write to data of what is detached": lambda model, kept: model.weight.detach().data.mul_(0.5),
    "write to data of a row": lambda model, kept: model.weight[0].data.zero_(),
    "bias": lambda model, kept: model.bias.data.zero_(),
}
PROGRAMS = st.lists(st.lists(st.sampled_from(sorted(ACTS)), max_size=4), min_size=1, max_size=6)


def trained(amp: ModuleType, level: str, program: list[list[str]]) -> list[dict[str, Tensor]]:
    """Return half weights and fp32 values after each step."""
    torch.manual_seed(0)
    model = fine_linear()
    optimizer = SGD(model.parameters(), lr=0.25, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    kept = Kept()
    found: list[dict[str, Tensor]] = []
    for acts in ([], [], [], *program):
        for act in acts:
            ACTS[act](model, kept)
        train_step(amp, model, optimizer)
        kept.is_written = False
        halves = {f"half {name}": one.detach().clone() for name, one in model.named_parameters()}
        found.append({**copies(model), **halves})
    amp.deactivate()
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("all_large")
def test_what_is_passed_by_changes_no_number(amp: ModuleType, level: str) -> None:
    @given(PROGRAMS)
    def run(program: list[list[str]]) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(unseen_half_writes, "EarlyLooks", lambda: EarlyLooks(2))
            found = trained(amp, level, program)
            monkeypatch.setattr(UnseenHalfWrites, "may_be_any", lambda self: True)
            expected = trained(amp, level, program)
        for mine, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)

    run()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("all_large")
def test_who_writes_unseen_in_the_first_steps_is_followed_in_all(
    amp: ModuleType, level: str
) -> None:
    """By an array that lives for one statement: no version moves, and nobody holds the memory."""
    model, optimizer = prepared(amp, level)
    for _ in range(WATCHED + 5):
        model.weight.detach().view(torch.int16).numpy().fill(0)
        train_step(amp, model, optimizer)
    # One step of SGD from zeros, whatever was there before.
    assert torch.equal(copies(model)["weight"], torch.full((3, 4), -0.25))


@pytest.mark.parametrize("is_skipped", [False, True])
@pytest.mark.usefixtures("all_large")
def test_what_is_written_to_the_data_of_given_masters_reaches_the_weights(
    amp: ModuleType, is_skipped: bool
) -> None:
    model, optimizer = prepared(amp)
    for _ in range(WATCHED + 1):
        train_step(amp, model, optimizer)
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward(torch.tensor(torch.inf) if is_skipped else None)
    [weight, _] = amp.master_params(optimizer)
    weight.data.fill_(0.75)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is is_skipped
    model(torch.ones(2, 4))
    expected = torch.full((3, 4), 0.75 if is_skipped else 0.5)
    assert torch.equal(model.weight.float(), expected)
    assert torch.equal(copies(model)["weight"], expected)


def test_among_several_processes_all_are_compared_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one sends to others moves no version of theirs."""
    writes, _ = after_watching()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert writes.may_be_any()
