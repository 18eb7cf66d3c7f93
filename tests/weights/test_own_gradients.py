"""Gradients of masters that no script has written are told from those that one has."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from amp_patch.weights.own_gradients import OwnGradients


def watched(count: int = 1, memory: Tensor | None = None) -> tuple[OwnGradients, list[Tensor]]:
    """Return masters of three numbers, whose gradients are parts of a memory if one is given."""
    own, masters = OwnGradients(), [nn.Parameter(torch.ones(3)) for _ in range(count)]
    for row, master in enumerate(masters):
        own.watch(master)
        if memory is not None:
            master.grad = memory[row]
    return own, masters


def backward(*masters: Tensor) -> None:
    torch.stack([master.square().sum() for master in masters]).sum().backward()


def test_each_backward_is_followed_and_a_write_of_a_script_is_seen() -> None:
    own, (master,) = watched()
    assert not own.has(master)  # it has none
    for count in (1, 2):
        backward(master)
        assert own.has(master)
        torch.testing.assert_close(own.sums[id(master)], torch.full((3,), 2.0 * count))
    master.grad.mul_(2)
    assert not own.has(master)
    backward(master)
    assert not own.has(master)


def test_a_gradient_that_a_script_has_given_is_not_own_and_a_noted_one_is() -> None:
    own, (master,) = watched()
    master.grad = torch.ones(3)
    backward(master)
    assert not own.has(master)
    own.note(master)
    backward(master)
    assert own.has(master)
    own.forget()
    assert not own.has(master)
    assert not own.sums


def test_a_noted_write_is_one_until_the_gradient_is_another() -> None:
    master, own = torch.ones(2, requires_grad=True), OwnGradients()
    own.watch(master)
    own.note_written(master)  # there is none yet
    master.sum().backward()
    own.note(master)
    own.note_written(master)
    master.sum().backward()
    assert (own.has(master), own.has_stored(master)) == (False, True)
    master.grad = None
    master.sum().backward()
    assert own.has(master)


def test_what_autograd_adds_to_a_part_of_one_memory_is_no_write_to_the_others() -> None:
    """Those parts have one version."""
    own, masters = watched(3, torch.zeros(3, 3))
    for master in masters:
        own.note(master)
    backward(*masters[:2])
    assert all(map(own.has, masters))
    masters[2].grad.add_(1)
    assert not any(map(own.has, masters))


def test_a_sum_begins_anew_where_the_gradient_was_dropped() -> None:
    own, (master,) = watched()
    backward(master)
    master.grad = None
    own.keeps_sums = False
    backward(master)
    master.grad = None
    own.keeps_sums = True
    backward(master)
    torch.testing.assert_close(own.sums[id(master)], torch.full((3,), 2.0))


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_is_known_when_only_torch_has_held_it(sparse: bool) -> None:
    own, table = OwnGradients(), nn.Embedding(4, 3, sparse=sparse)
    own.watch(table.weight)
    table(torch.tensor([1])).sum().backward()
    gc.collect()
    assert own.has(table.weight)
    assert table.weight.grad.is_sparse is sparse


def test_a_master_that_is_frozen_at_first_is_followed_when_it_is_trained() -> None:
    own, master = OwnGradients(), nn.Parameter(torch.ones(3), requires_grad=False)
    own.watch(master)
    assert not master.requires_grad
    master.requires_grad_()
    backward(master)
    assert own.has(master)


def test_neither_keeps_the_other_alive() -> None:
    own, (master,) = watched()
    backward(master)
    references = weakref.ref(own), weakref.ref(master)
    del own
    gc.collect()
    assert references[0]() is None
    backward(master)
    assert master.grad.tolist() == [4.0] * 3
    del master
    gc.collect()
    assert references[1]() is None
