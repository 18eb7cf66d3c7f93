"""Gradients that masters have received are told from what a user makes of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.gradients.received_gradients import ReceivedGradients


def params_with_gradients() -> list[Tensor]:
    params = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def noted(params: list[Tensor], weakly: bool = False) -> ReceivedGradients:
    """Note them as two passes have given them."""
    received = ReceivedGradients()
    for part in (params[:1], params[1:]):
        grads = [param.grad for param in part if param.grad is not None]
        references = list(map(weakref.ref, grads)) if weakly else grads
        received.note(part, grads, references, [])
    return received


def written(param: Tensor) -> None:
    param.grad.mul_(2)


def replaced(param: Tensor) -> None:
    param.grad = torch.zeros_like(param)  # of the version that the other has


def cleared(param: Tensor) -> None:
    param.grad = None


@pytest.mark.parametrize("weakly", [False, True])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("touch", [written, replaced, cleared])
def test_each_touch_of_each_gradient_is_seen(
    touch: Callable[[Tensor], None], which: int, weakly: bool
) -> None:
    params = params_with_gradients()
    received = noted(params, weakly)
    assert received
    assert received.are_untouched()
    touch(params[which])
    assert not received.are_untouched()


class _Spread(Tensor):
    """Of a class whose ``.data`` nobody sees a script read."""


def of_a_class(param: Tensor) -> None:
    param.grad = torch.ones_like(param).as_subclass(_Spread)


@pytest.mark.parametrize("weakly", [False, True])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("touch", [written, replaced, cleared, of_a_class])
def test_each_touch_after_the_step_is_seen(
    touch: Callable[[Tensor], None], which: int, weakly: bool
) -> None:
    params = params_with_gradients()
    received = noted(params, weakly)
    assert not received.are_as_stepped()  # they are waiting for it
    received.end()
    assert received.are_as_stepped()
    touch(params[which])
    assert not received.are_as_stepped()


def test_after_a_read_of_data_nobody_knows_what_a_script_wrote() -> None:
    params, reads = params_with_gradients(), [7]
    received = ReceivedGradients(count_data_reads=lambda: reads[0])
    grads = [param.grad for param in params if param.grad is not None]
    received.note(params, grads, grads, [])
    received.end()
    assert received.are_as_stepped()
    reads[0] += 1
    assert not received.are_as_stepped()


def test_gradients_are_more_where_no_pass_has_come_and_until_the_step() -> None:
    params = params_with_gradients()
    one, two, three = ([param] for param in params)
    grads = {id(param): [param.grad] for param in params}
    for param in two + three:
        param.grad = None
    received = ReceivedGradients()
    received.note(one, grads[id(params[0])], grads[id(params[0])], [], unreached=two + three)
    assert not received.are_more()
    params[1].grad = grads[id(params[1])][0]
    assert received.are_more()
    received.note(two, grads[id(params[1])], grads[id(params[1])], [], unreached=three)
    assert not received.are_more()
    received.keep(one, {id(params[1])})  # a script has cleared it, and gives it another
    assert received.are_more()
    received.end()
    assert not received.are_more()


def test_what_a_step_has_used_goes_with_the_next_pass() -> None:
    """Here small gradients are held, not referred to."""
    params = params_with_gradients()
    received = noted(params)
    received.end()
    used = [weakref.ref(param.grad) for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    grads = [param.grad for param in params]
    assert [one() for one in used] != [None] * 3
    received.note(params, grads, grads, [])
    assert [one() for one in used] == [None] * 3


def test_gradients_of_a_class_of_their_own_are_never_known_to_be_as_stepped() -> None:
    params = params_with_gradients()
    of_a_class(params[1])
    received = noted(params)
    received.end()
    assert not received.are_as_stepped()


def test_what_was_done_to_each_is_told_apart() -> None:
    params = params_with_gradients()
    masters = [param.detach().float() for param in params]
    received = noted(params)
    pairs = ParamPairs([*params], masters)
    assert received.changes(pairs) == (([], []), ([], []), [])
    cleared(params[0])
    params[1].grad = torch.full((2,), 3.0, dtype=torch.float16)
    params[2].grad.data.mul_(2)  # which moves no version
    assert not received.are_untouched()
    changes = received.changes(pairs)
    for row, (model, master) in enumerate((changes.cleared, changes.given)):
        assert [model[0] is params[row], master[0] is masters[row], len(model)] == [True, True, 1]
    assert [grad is params[2].grad for grad in changes.written] == [True]


@pytest.mark.parametrize("weakly", [False, True])
def test_a_copy_with_the_same_numbers_is_no_write(weakly: bool) -> None:
    params = params_with_gradients()
    masters = [param.detach().float() for param in params]
    for param, master in zip(params, masters, strict=True):
        param.grad[0] = torch.nan
        master.grad = param.grad.float()
    received = noted(params, weakly)
    earlier = [param.grad for param in params]
    for param, grad, by in zip(params, earlier, (0.0, 1.0, 0.0), strict=True):
        param.grad = grad + by
        grad.zero_()  # its bucket is written to by the next backward
    changes = received.changes(ParamPairs(params, masters))
    assert [param is params[1] for param in changes.given.model] == [True]
    assert not changes.written


def test_those_that_are_kept_are_as_they_were_noted() -> None:
    params = params_with_gradients()
    received = noted(params)
    replaced(params[1])
    assert received.params() == params
    received.keep(params, {id(params[1])})
    assert received.are_untouched()
    written(params[2])
    assert not received.are_untouched()
    received.clear()
    assert not received
    assert received.are_untouched()


def test_those_that_are_noted_again_have_other_values_or_were_replaced() -> None:
    params = params_with_gradients()
    received = noted(params)
    for param in params[::2]:
        written(param)
    replaced(params[1])
    received.note_again(params[:2])
    assert not received.are_untouched()
    received.note_again(params[2:])
    assert received.are_untouched()
    for change in (written, replaced, cleared):
        change(params[1])
        assert not received.are_untouched()
        received.note_again(params)
        assert received.are_untouched() == (change is not cleared)


def test_what_masters_got_is_known_while_it_lives() -> None:
    params, received = params_with_gradients(), ReceivedGradients()
    got = [torch.ones(2), torch.ones(2)]
    grads: list[Any] = [param.grad for param in params]
    received.note(params[:1], grads[:1], grads[:1], got[:1])
    received.note(params[1:], grads[1:], grads[1:], [weakref.ref(got[1])])
    received.keep(params, {id(params[0])})
    assert received.stored() == set(map(id, got))
    del got[1]
    assert received.stored() == {id(got[0])}
