"""Clipping of one optimizer's gradients: the total norm, and the half gradients that follow."""

from types import ModuleType

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.optim import SGD

from amp_patch.distributed.process_groups import StepRanks
from amp_patch.gradients.gradients import Gradients
from amp_patch.session import session
from amp_patch.step.clipped_gradients import ClippedGradients
from amp_patch.step.held_params import HeldParams


def prepared(amp: ModuleType, fused: bool) -> tuple[nn.Linear, ClippedGradients]:
    """Return a model at O2 with gradients of 3 and 4, and what clips these."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=1.0)
    options = {"loss_scale": 128.0, "fused_step": fused, "verbosity": 0}
    amp.initialize(model, optimizer, opt_level="O2", **options)
    scaled_backward(amp, model(torch.tensor([[3.0, 4.0]])).sum(), optimizer)
    (step,) = session.optimizers.steps.values()
    model.kept = optimizer  # type: ignore[assignment]  # it is held weakly
    return model, step.backward.clipped


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (1.0, 7.0)])
@pytest.mark.parametrize("fused", [True, False])
def test_masters_and_half_gradients_are_clipped(
    amp: ModuleType, fused: bool, norm_type: float, norm: float
) -> None:
    model, clipped = prepared(amp, fused)
    total = clipped.clip(norm / 2, norm_type, None, None)
    assert total.item() == pytest.approx(norm)
    (master,) = amp.master_params(model.kept)
    torch.testing.assert_close(master.grad, torch.tensor([[1.5, 2.0]]))
    if not fused:  # else half gradients stay as the backward left them
        assert model.weight.grad.tolist() == [[1.5, 2.0]]


@pytest.mark.parametrize("fused", [True, False])
def test_what_does_not_accept_the_norm_has_nothing_clipped(amp: ModuleType, fused: bool) -> None:
    """Also of what waits for the step to be unscaled."""

    def accept(total: torch.Tensor) -> None:
        raise ArithmeticError(total.item())

    model, clipped = prepared(amp, fused)
    with pytest.raises(ArithmeticError, match=r"^5\.0$"):
        clipped.clip(1.0, 2.0, None, None, accept)
    (master,) = amp.master_params(model.kept)
    assert master.grad.tolist() == [[3.0, 4.0]]


def test_half_gradients_follow_masters_that_others_have_clipped(amp: ModuleType) -> None:
    model, clipped = prepared(amp, fused=False)
    (master,) = amp.master_params(model.kept)
    master.grad.mul_(0.5)
    clipped.note([torch.zeros(1)])
    assert model.weight.grad.tolist() == [[3.0, 4.0]]
    clipped.note([torch.zeros(1), master])
    assert model.weight.grad.tolist() == [[1.5, 2.0]]


def test_gradients_that_all_ranks_have_are_told_from_parts() -> None:
    part, whole = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    part.grad, whole.grad = torch.ones(2), torch.ones(2)
    optimizer = SGD([part, whole])
    for parts, found in ((None, set()), (frozenset({id(part)}), {id(whole.grad)})):
        held = HeldParams(optimizer, None, StepRanks((), have_parts=True, parts=parts))
        assert ClippedGradients(optimizer, held, Gradients(), None).whole() == found
