"""Drawn training scripts end as they do in float32, without amp."""

from types import ModuleType

import pytest
import torch
from drawn_scripts import LINES, SETTINGS, Script, Setting
from hypothesis import HealthCheck, given
from support import examples
from torch import Tensor

#: How far a gradient in half may be off, of the whole movement of the weights.
TOLERANCES = {"O1": 0.03, "O2": 0.03, "O5": 0.12}


def distances(some: list[Tensor], others: list[Tensor]) -> list[float]:
    assert [one.dtype for one in some] == [one.dtype for one in others]
    pairs = zip(some, others, strict=True)
    return [float(torch.dist(one.detach().float(), other.float())) for one, other in pairs]


# a script may well clear what no step has used, and write no block
@pytest.mark.filterwarnings("ignore:gradients must last until the step")
@pytest.mark.filterwarnings("ignore:at a level with a loss scale every loss")
@examples(4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SETTINGS, LINES)
def test_a_script_trains_as_without_amp(
    amp: ModuleType, setting: Setting, lines: list[tuple[str, int]]
) -> None:
    amp.deactivate()  # of the example before
    ours, theirs = Script(amp, setting), Script(None, setting)
    before = [value.clone() for value in theirs.model.state_dict().values()]
    theirs.run(lines)
    ours.run(lines)
    tolerance = TOLERANCES[str(setting.level)]
    if ours.gradients in ("ready", "plain") and not ours.overflowed:
        expected = [param.grad for param in theirs.masters()]
        found = [param.grad for param in ours.masters()]
        zeros = list(map(torch.zeros_like, theirs.masters()))
        expected = [
            one if grad is None else grad for one, grad in zip(zeros, expected, strict=True)
        ]
        found = [one if grad is None else grad for one, grad in zip(zeros, found, strict=True)]
        allowed = tolerance * sum(distances(expected, zeros))
        assert max(distances(found, expected)) <= allowed
    saved = list(ours.model.state_dict().values())
    trained = list(theirs.model.state_dict().values())
    allowed = tolerance * sum(distances(trained, before)) + 1e-6
    assert max(distances(saved, trained)) <= allowed
    amp.deactivate()
    assert max(distances(list(ours.model.state_dict().values()), saved)) == 0
