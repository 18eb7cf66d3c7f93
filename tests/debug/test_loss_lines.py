"""The line of the script that has called an operator of a loss is told with its cause."""

from __future__ import annotations

import pytest
import torch
from plants import WIDTH, around, prepared, the_cause, train
from torch import Tensor, nn

from amp_patch.debug.loss_lines import LossLines
from amp_patch.debug.trace import tracer


def root(outputs: Tensor) -> Tensor:
    total = outputs.float().square().sum() * 0.0
    return total.sqrt()  # has no gradient at 0


def logarithm(outputs: Tensor) -> Tensor:
    nothing = outputs.float() * 0.0
    return nothing.log().mean()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("loss", "line"), [(root, "total.sqrt()"), (logarithm, "nothing.log()")])
def test_the_line_is_told_where_it_is_noted(amp, loss, line: str, level: str) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), level)
    train(amp, model, optimizer, loss)
    assert the_cause(amp).line == ""
    amp.deactivate()
    model, optimizer = prepared(amp, around(nn.Tanh()), level)
    with tracer.lines:
        train(amp, model, optimizer, loss)
    cause = the_cause(amp)
    assert cause.where == "loss"
    assert line in cause.line
    assert f"  line: {cause.line}\n" in str(cause)


def test_each_call_has_its_line_and_what_is_not_noted_has_none() -> None:
    is_off = False
    x = torch.ones(WIDTH, requires_grad=True)
    earlier = x.exp()
    with LossLines(lambda: is_off) as lines:
        one = x.sin()
        other = nn.functional.cross_entropy(one, one.detach())  # several nodes
        is_off = True
        off = x.cos()
    first, second = lines.line_of(one.grad_fn._sequence_nr()), other.grad_fn
    assert first is not None
    assert first[0] == __file__
    while second is not one.grad_fn:
        assert lines.line_of(second._sequence_nr()) == (__file__, first[1] + 1)
        second = second.next_functions[0][0]
    for unknown in (earlier, off):
        assert lines.line_of(unknown.grad_fn._sequence_nr()) is None
