"""An exception at any point of a step leaves everything usable.

A profile function raises once, at the n-th call that amp_patch makes inside `scale_loss` and
``optimizer.step()``, for every n (every fifth one in the ordinary run). The script catches it,
clears the gradients and goes on: the training is then, bit for bit, one in which that batch was
left out, or, where the optimizer had stepped already, one in which it was not.
"""

from __future__ import annotations

import copy
import gc
import inspect
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from support import PROFILE, nightly_but
from torch import Tensor, nn
from torch.utils import _pytree

import amp_patch
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.session import session
from amp_patch.step import loss_scaling

PACKAGE = str(Path(amp_patch.__file__).parent)
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
BATCHES = 4
#: The batch whose step fails.
FAILING = 1


class OutOfMemory(Exception):
    """What is raised; no code of ours can expect it."""


class RaiseOnce:
    """Raises at the n-th call of a function that code of amp_patch makes; counts them.

    Args:
        at: which one; 0 for none.
    """

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> RaiseOnce:
        gc.disable()  # what it frees of earlier runs are no calls of this one
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        caller = frame.f_back if event == "call" else frame
        if event not in ("call", "c_call") or not is_ours(caller):
            return
        code = frame.f_code
        called = code.co_name if event == "call" else getattr(argument, "__name__", "")
        if called in ("__enter__", "__exit__", "restore", "_set_grad_enabled"):
            return  # if what ends a block or stands in a finally does not run, nobody undoes it
        if called in ("is_compiling", "set_eval_frame") and is_around(caller):
            return  # of torch 2.6 alone, about what it calls: such as what begins or ends a block
        if event == "call" and code.co_flags & inspect.CO_GENERATOR:
            return  # Python swallows what is raised in a generator that is being closed
        if event == "call" and code.co_name == "remove" and "weak" in Path(code.co_filename).name:
            return  # and in the callback of a weak reference
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            raise OutOfMemory(f"at call {self.at}, of {code.co_name}")


def is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def is_around(frame: FrameType | None) -> bool:
    """Return whether a frame is that of `torch_compile.leave_out` around another function."""
    return frame is not None and frame.f_code.co_name == "left_out"


def new_run(amp: ModuleType, level: str, case: str) -> tuple[nn.Module, list[Any]]:
    """Build a model and optimizers, with the loss scalers of the process as a new process has them.

    Nothing is deactivated between runs: to patch torch anew for each would take most of the time.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    halves = [model[:1], model[1:]] if case == "two optimizers" else [model]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1, fused=True) for part in halves]
    fused_step = case == "fused step"
    amp.initialize(model, optimizers, opt_level=level, verbosity=0, fused_step=fused_step)
    for scaler in session.scalers:
        scaler.settle()
        scaler.set_numbers(LossScaler(scaler.rule).numbers())
    return model, optimizers


def batch(index: int) -> Tensor:
    return torch.sin(torch.arange(12.0).reshape(4, 3) * (index + 1))


def train(
    amp: ModuleType,
    model: nn.Module,
    optimizers: list[Any],
    *,
    leave_out: bool = False,
    in_block: int = 0,
    in_step: int = 0,
) -> tuple[int, int]:
    """Train on all batches; return the number of calls in the failing one's block and step.

    Args:
        leave_out: make no step with the batch that else fails.
        in_block, in_step: the call that raises there; 0 for none.
    """
    block, step = RaiseOnce(in_block), RaiseOnce(in_step)
    for index in range(BATCHES):
        loss = model(batch(index)).float().square().mean()
        if index == FAILING and leave_out:
            continue
        if index != FAILING:
            with amp.scale_loss(loss, optimizers) as scaled_loss:
                scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        else:
            try:
                backward_with(amp, block, loss, optimizers)
                for optimizer in optimizers:
                    with step:
                        optimizer.step()
            except OutOfMemory:
                del loss
        for optimizer in optimizers:
            optimizer.zero_grad()
    return block.count, step.count


def backward_with(amp: ModuleType, block: RaiseOnce, loss: Tensor, optimizers: list[Any]) -> None:
    """Make one backward pass in which only what `scale_loss` does may raise."""
    with block:
        context = amp.scale_loss(loss, optimizers)
        scaled_loss = context.__enter__()
    scaled_loss.backward()
    with block:
        context.__exit__(None, None, None)


def outcome(amp: ModuleType, model: nn.Module, optimizers: list[Any]) -> list[Any]:
    """All that a training leaves."""
    states = [
        (state["step"], state["exp_avg"], state["exp_avg_sq"])
        for optimizer in optimizers
        for state in optimizer.state.values()
    ]
    masters = [list(amp.master_params(optimizer)) for optimizer in optimizers]
    return [list(model.parameters()), masters, states, amp.state_dict()]


def outcome_of(amp: ModuleType, level: str, case: str, **failure: Any) -> list[Any]:
    model, optimizers = new_run(amp, level, case)
    train(amp, model, optimizers, **failure)
    return copy.deepcopy(outcome(amp, model, optimizers))


def are_equal(ones: Any, others: Any) -> bool:
    """Compare to the bit; torch.testing.assert_close takes as long as the training."""
    (left, kind), (right, other_kind) = _pytree.tree_flatten(ones), _pytree.tree_flatten(others)
    return kind == other_kind and all(
        one.dtype is other.dtype and torch.equal(one, other)
        if isinstance(one, Tensor)
        else one == other
        for one, other in zip(left, right, strict=True)
    )


CASES = [
    *((level, "one optimizer") for level in LEVELS),
    *((level, "two optimizers") for level in ("O1", "O2", "O5")),
    *((level, "fused step") for level in ("O2", "O5")),
    *((level, "device ahead") for level in ("O1", "O2")),
]


ORDINARY = [
    ("O1", "one optimizer"),
    ("O2", "one optimizer"),
    ("O2", "two optimizers"),
    ("O5", "fused step"),
    ("O1", "device ahead"),
]


@pytest.fixture(params=nightly_but(ORDINARY, CASES), ids="-".join)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A level and a case; in the last one the CPU counts as a device that works behind the host."""
    level, case = request.param
    if case == "device ahead":
        monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})
    return level, case


def calls_in(amp: ModuleType, run: tuple[str, str]) -> tuple[range, range]:
    """Return the numbers of the calls that raise, one after the other, in block and step.

    In the ordinary run every fifth one: the cases have most calls in common, and begin in turn.
    """
    counts = train(amp, *new_run(amp, *run))
    assert min(counts) > 10
    if PROFILE == "nightly":
        return range(1, counts[0] + 1), range(1, counts[1] + 1)
    first = 1 + CASES.index(run) % 5
    return range(first, counts[0] + 1, 5), range(first, counts[1] + 1, 5)


def test_a_block_that_fails_is_as_if_it_had_not_been(amp: ModuleType, run: tuple[str, str]) -> None:
    without = outcome_of(amp, *run, leave_out=True)
    assert not are_equal(without, outcome_of(amp, *run))
    in_block, _ = calls_in(amp, run)
    found = {at: outcome_of(amp, *run, in_block=at) for at in in_block}
    assert [at for at, one in found.items() if not are_equal(one, without)] == []


# Of two optimizers' steps the first may be made and the second not.
@pytest.mark.parametrize(
    "run",
    nightly_but(ORDINARY, [case for case in CASES if case[1] != "two optimizers"]),
    ids="-".join,
    indirect=True,
)
def test_a_step_that_fails_is_made_as_a_whole_or_not_at_all(
    amp: ModuleType, run: tuple[str, str]
) -> None:
    without, made = (outcome_of(amp, *run, leave_out=leave_out) for leave_out in (True, False))
    # the backward pass was made, and is counted
    without[-1] = made[-1]
    _, in_step = calls_in(amp, run)
    found = {at: outcome_of(amp, *run, in_step=at) for at in in_step}
    kinds = {at: (are_equal(one, without), are_equal(one, made)) for at, one in found.items()}
    assert [at for at, kind in kinds.items() if not any(kind)] == []
    # first it is not made, and from some call on it is
    order = [was_made for _, (_, was_made) in sorted(kinds.items())]
    assert order == sorted(order)


def test_the_profile_raises_where_it_is_told_to(amp: ModuleType) -> None:
    model, optimizers = new_run(amp, "O2", "one optimizer")
    loss = model(batch(0)).float().square().mean()
    with RaiseOnce(3) as failing, pytest.raises(OutOfMemory, match="at call 3"):
        amp.scale_loss(loss, optimizers)
    assert failing.count == 3
