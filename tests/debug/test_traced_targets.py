"""What a loss was given without gradients: the model that made it inf or NaN is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plants import WIDTH, Scores, around, prepared, square, the_cause, train
from support import scaled_backward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

NO_GRAPH = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "frozen": torch.enable_grad,  # of weights without gradients, as those of a perceptual loss
}


def distilled(amp: Any, teacher: nn.Module, level: str, loss_of: Callable[..., Tensor]) -> None:
    """Train a student for two steps on what `loss_of` makes of the teacher's calls."""
    student = around(nn.Tanh())
    teacher.requires_grad_(False)
    optimizer = SGD(student.parameters(), lr=0.01)
    options = {"verbosity": 0, "trace_overflow": True, "loss_scale": 8.0}
    models, optimizer = amp.initialize([teacher, student], optimizer, opt_level=level, **options)
    for _ in range(2):
        loss = loss_of(*models, torch.randn(4, WIDTH))
        optimizer.zero_grad()
        scaled_backward(amp, loss, optimizer)
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("graph", NO_GRAPH)
def test_a_teacher_that_overflows_is_named(amp, graph: str, level: str) -> None:
    def loss_of(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
        with NO_GRAPH[graph]():
            target = teacher(x).float().softmax(-1)
        outputs = student(x).float().log_softmax(-1)
        return F.kl_div(outputs, target.clone(), reduction="batchmean")

    distilled(amp, around(Scores()), level, loss_of)
    cause = the_cause(amp)
    assert (cause.where, cause.model) == ("forward", "Sequential 1")
    assert (cause.module, cause.operator, cause.rule) == ("1.1", "matmul", {"0:1.1": "float"})
    assert "The loss was given it" in cause.note


@pytest.mark.parametrize("graph", NO_GRAPH)
def test_of_several_calls_without_gradients_the_one_that_overflows_is_found(
    amp, graph: str
) -> None:
    # as of the two views of BYOL, or of the real image before the fake one
    def loss_of(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
        with NO_GRAPH[graph]():
            view = teacher(x * 60000.0).float().clone()
            other = teacher(x).float().clone()
        return square(student(x).float() - view) + square(student(x).float() - other)

    distilled(amp, around(nn.Tanh(), 0), "O1", loss_of)
    cause = the_cause(amp)
    assert (cause.where, cause.model, cause.operator) == ("forward", "Sequential 1", "cast")


def test_a_loss_that_is_finite_by_its_mask_has_the_teachers_cause(amp) -> None:
    def loss_of(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x).float()
        outputs = student(x).float()
        return torch.where(target.isfinite(), outputs, (outputs * target).sigmoid()).mean()

    distilled(amp, around(Scores()), "O1", loss_of)
    assert (the_cause(amp).model, the_cause(amp).operator) == ("Sequential 1", "matmul")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).masked_fill(torch.arange(WIDTH) < 2, -torch.inf)


def test_a_mask_of_a_model_without_gradients_is_not_to_blame_for_nan_in_the_data(amp) -> None:
    def loss_of(policy: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            action = policy(x).argmax(-1)
        return square(student(x).float() - x.fill_(torch.nan)[range(4), action, None])

    distilled(amp, Masked(), "O1", loss_of)
    cause = the_cause(amp)
    assert (cause.where, cause.spoiled_by) == ("loss", "mse_loss")
    assert cause.advice().startswith("Look at the loss and its targets: NaN in the data")


def test_a_call_after_the_loss_is_not_to_blame(amp) -> None:
    model, other = around(nn.Tanh()), around(Scores())
    optimizer = SGD(model.parameters(), lr=0.01)
    (model, other), optimizer = amp.initialize(
        [model, other], optimizer, opt_level="O1", verbosity=0, loss_scale=1.0, trace_overflow=True
    )
    scaled_backward(amp, square(model(torch.randn(4, WIDTH))) * torch.nan, optimizer)
    with torch.no_grad():
        other(torch.randn(4, WIDTH))
    optimizer.step()
    assert the_cause(amp).where == "loss"


class Cached(nn.Module):
    """Writes to a tensor that it has kept, in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        self.mean = y if self.mean is None else self.mean
        return self.mean.mul_(0.5).add_(y) * torch.inf


def test_what_a_teacher_keeps_of_inference_mode_ends_no_search(amp) -> None:
    def loss_of(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            target = teacher(x)
        return square(student(x).float() - target.float().clone())

    distilled(amp, Cached(), "O1", loss_of)
    causes = [cause for cause, _ in amp.overflow_report().causes]
    assert "unknown" not in [cause.where for cause in causes]


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, guess: Tensor) -> Tensor:
        return self.proj(torch.cat([x, guess], -1))


def test_a_model_that_is_given_its_own_guess_has_the_cause_of_that(amp) -> None:
    model, optimizer = prepared(amp, Conditioned(), "O1")

    def called(x: Tensor) -> Tensor:
        with torch.no_grad():
            guess = model(x * 60000.0, torch.zeros_like(x))
        return model(x, guess)

    # the graph of a step lives on in the next, as by a name of the script's
    graphs: list[Tensor] = []
    train(amp, called, optimizer, lambda outputs: graphs.append(outputs) or square(outputs), 2)
    cause = the_cause(amp)
    assert (cause.where, cause.module, cause.operator) == ("forward", "proj", "cast")
    assert "was given it, or what was made of it" in cause.note


def test_a_level_that_casts_functions_is_said_to_do_so_without_gradients_as_well(amp) -> None:
    teacher = around(Scores())  # that nobody has initialized
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")

    def loss_of(outputs: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(torch.ones(4, WIDTH))
        return square(outputs.float() - target.float())

    train(amp, model, optimizer, loss_of)
    assert "O1 casts functions there, too" in the_cause(amp).advice()
