"""The recorder: one line for each round of the optimizers, with what the script itself saw."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.nn import functional as F

from amp_patch.patching import Patches
from amp_patch.session import session
from amp_patch.tools import child
from amp_patch.tools.sweep.memory import LivingTensors
from amp_patch.tools.sweep.outcomes import Run
from amp_patch.tools.sweep.recorder import Recorder
from amp_patch.tools.sweep.runs import take
from amp_patch.tools.sweep.steps import Folder, Recording

MEBIBYTE = 2**20
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
Start = Callable[..., Recorder]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Attach a recorder that writes to a folder of the test's."""
    ends = []
    patches = Patches()

    def begin(most: int | None = None) -> Recorder:
        lines = child.Lines(tmp_path, "steps")
        recorder = Recorder(session, lines, most)
        recorder.watch_clipping(patches)
        ends.extend([session.observers.attach(recorder), recorder.end, lines.close])
        return recorder

    yield begin
    session.deactivate()  # which has replaced what was replaced before
    patches.undo()
    for end in ends:
        end()


def recorded(recorder: Recorder, folder: Path) -> Recording:
    recorder.end()
    return Folder(folder).read()[0]


def prepared(amp: ModuleType, level: str, **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def train_step(
    amp: ModuleType, model: nn.Module, optimizer: Any, factor: float = 1.0, passes: int = 1
) -> list[float]:
    """Make a step and return the losses that the script saw."""
    losses = []
    optimizer.zero_grad()
    for _ in range(passes):
        loss = factor * F.cross_entropy(model(torch.randn(8, 4)).float(), torch.tensor([0, 1] * 4))
        scaled_backward(amp, loss, optimizer)
        losses.append(loss.item())
    optimizer.step()
    return losses


@pytest.mark.parametrize("at", [1, 6])
def test_a_buffer_that_is_made_inf_is_told_once(amp, start: Start, tmp_path: Path, at: int) -> None:
    """Also of a model that is gone when the process ends; a mask is no statistic."""
    recorder = start()
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    for step in range(1, 8):
        if step == at:
            model[1].running_var.fill_(math.inf)
        train_step(amp, model, optimizer)
    if at == 1:
        del model, optimizer
        gc.collect()
    (title,) = recorded(recorder, tmp_path).spoiled
    assert title == "running_var of `1` (BatchNorm1d) holds inf, in float16"


def test_what_is_made_inf_by_the_last_step_is_told(amp, start: Start, tmp_path: Path) -> None:
    start(most=3)
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    for _ in range(3):
        train_step(amp, model, optimizer)
    model[1].running_mean.fill_(math.nan)
    with pytest.raises(SystemExit) as end:
        train_step(amp, model, optimizer)
    del model, optimizer, end
    gc.collect()
    run = Run("O4", 1)
    take(run, Folder(tmp_path))
    assert run.spoiled == ["running_mean of `1` (BatchNorm1d) holds NaN, in float32"]


@pytest.mark.parametrize("level", LEVELS)
def test_each_step_is_a_line_with_its_loss(amp, start: Start, tmp_path: Path, level: str) -> None:
    recorder = start()
    model, optimizer = prepared(amp, level)
    seen = [train_step(amp, model, optimizer)[0] for _ in range(5)]
    steps = recorded(recorder, tmp_path).steps
    assert [step.loss for step in steps] == seen
    assert {step.scale for step in steps} == {amp.loss_scale()}
    assert not any(step.skipped for step in steps)
    assert all(step.seconds > 0 for step in steps)


def test_passes_of_one_loss_are_averaged(amp, start: Start, tmp_path: Path) -> None:
    recorder = start()
    model, optimizer = prepared(amp, "O1")
    seen = [train_step(amp, model, optimizer, passes=3) for _ in range(3)]
    steps = recorded(recorder, tmp_path).steps
    assert [step.loss for step in steps] == pytest.approx([sum(losses) / 3 for losses in seen])


def test_the_networks_of_a_gan_make_one_step_together(amp, start: Start, tmp_path: Path) -> None:
    recorder = start()
    pairs = [prepared(amp, "O1"), prepared(amp, "O1")]
    seen = [[train_step(amp, *pair)[0] for pair in pairs] for _ in range(4)]
    steps = recorded(recorder, tmp_path).steps
    assert [step.losses for step in steps] == seen
    assert [step.loss for step in steps] == pytest.approx([sum(losses) for losses in seen])


def test_trainings_that_follow_each_other_share_no_step(amp, start: Start, tmp_path: Path) -> None:
    recorder = start()
    seen, pairs = [], []
    for _ in range(2):
        pairs.append(prepared(amp, "O1"))
        seen += [train_step(amp, *pairs[-1]) for _ in range(3)]
    steps = recorded(recorder, tmp_path).steps
    assert [step.losses for step in steps] == seen
    assert [step.training for step in steps] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("order", "rounds"),
    [
        ("aaaaaaaaaaaa bbbbbbbbbbbb aa", "a " * 12 + "b " * 12 + "a a"),  # one after another
        ("ddddddddddd dg dg dg", "d " * 12 + "g dg dg"),  # trained alone first, then together
        ("dddddddddddd gd gd gd", "d " * 12 + "g dg dg d"),
        ("dddddg dddddg", "d d d d dg d d d d dg"),  # a critic
    ],
)
def test_an_optimizer_that_has_rested_makes_a_step_by_itself(
    amp, start: Start, tmp_path: Path, order: str, rounds: str
) -> None:
    recorder = start()
    names = sorted(set(order) - {" "})
    models = [nn.Linear(4, 2) for _ in names]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O0", verbosity=0)
    pairs = dict(zip(names, zip(models, optimizers, strict=True), strict=True))
    losses = iter([train_step(amp, *pairs[name])[0] for name in order.replace(" ", "")])
    expected = [[next(losses) for _ in together] for together in rounds.split()]
    assert [step.losses for step in recorded(recorder, tmp_path).steps] == expected


def test_a_network_that_steps_more_often_closes_the_round(
    amp, start: Start, tmp_path: Path
) -> None:
    recorder = start()
    critic, generator = prepared(amp, "O0"), prepared(amp, "O0")
    for _ in range(2):
        train_step(amp, *critic)
        train_step(amp, *critic)
        train_step(amp, *generator)
    lengths = [len(step.losses) for step in recorded(recorder, tmp_path).steps]
    assert lengths == [1, 2, 1, 2]


@pytest.mark.filterwarnings("ignore:a hook of a")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_names_the_parameters(amp, start: Start, tmp_path: Path, level: str) -> None:
    recorder = start()
    model, optimizer = prepared(amp, level)
    hook = model[2].bias.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    train_step(amp, model, optimizer)
    hook.remove()
    train_step(amp, model, optimizer)
    first, second = recorded(recorder, tmp_path).steps
    assert (first.skipped, first.overflows) == (True, [["2.bias", "inf"]])
    assert (second.skipped, second.overflows) == (False, [])
    assert second.scale == first.scale / 2


@pytest.mark.parametrize("by_torch", [False, True])
def test_the_norm_is_known_where_the_script_clips(
    amp, start: Start, tmp_path: Path, by_torch: bool
) -> None:
    recorder = start()
    model, optimizer = prepared(amp, "O1")
    train_step(amp, model, optimizer)
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.randn(8, 4)).float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    true = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    if by_torch:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        amp.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    first, second = recorded(recorder, tmp_path).steps
    assert first.norm is None
    assert second.norm == pytest.approx(true, rel=1e-5)


def test_the_script_is_ended_after_so_many_steps(amp, start: Start, tmp_path: Path) -> None:
    recorder = start(most=3)
    model, optimizer = prepared(amp, "O0")
    for _ in range(3):
        train_step(amp, model, optimizer)
    for _ in range(2):  # the second, where the script has caught the first
        with pytest.raises(SystemExit) as raised:
            train_step(amp, model, optimizer)
        assert raised.value.code == 0
    recording = recorded(recorder, tmp_path)
    assert (len(recording.steps), recording.done) == (3, True)


def test_tensors_are_counted_in_one_early_step_that_was_made(
    amp, start: Start, tmp_path: Path
) -> None:
    with LivingTensors() as left_by_other_tests:
        before = left_by_other_tests.peak
    recorder = start()
    model, optimizer = prepared(amp, "O1")
    train_step(amp, model, optimizer, factor=float("inf"))
    for _ in range(4):
        train_step(amp, model, optimizer)
    steps = recorded(recorder, tmp_path).steps
    assert [step.counted for step in steps] == [False, False, True, False, False]
    weights = 4 * sum(param.numel() for param in model.parameters())
    counted = steps[2].tensors - before
    assert 2 * weights < counted < 2 * weights + 10 * MEBIBYTE  # with the gradients


@pytest.mark.parametrize(("enabled", "state"), [(None, "no"), (False, "disabled"), (True, "yes")])
def test_a_script_without_steps_says_what_became_of_amp(
    amp, start: Start, tmp_path: Path, enabled: bool | None, state: str
) -> None:
    recorder = start()
    if enabled is not None:
        prepared(amp, "O1", enabled=enabled)
    recording = recorded(recorder, tmp_path)
    assert (recording.initialized, recording.steps) == (state, [])


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_the_loss_may_have_any_shape_and_be_written_to(
    amp, start: Start, tmp_path: Path, dims: int
) -> None:
    recorder = start()
    model, optimizer = prepared(amp, "O0")
    squares = model(torch.ones(8, 4)).square()
    loss = {0: squares.sum(), 1: squares.sum(1), 2: squares}[dims]
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.sum().backward()
    true = loss.double().mean().item()
    with torch.no_grad():
        loss.zero_()
    optimizer.step()
    assert recorded(recorder, tmp_path).steps[0].loss == pytest.approx(true)
