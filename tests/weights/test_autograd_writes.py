"""What a backward itself writes to the gradients of masters is told from what a script writes."""

import gc
import weakref

import torch
from torch import Tensor, nn

from amp_patch.weights.autograd_writes import AutogradWrites


def reached() -> tuple[AutogradWrites, Tensor]:
    writes, master = AutogradWrites(), nn.Parameter(torch.ones(3))
    writes.watch(master)
    master.square().sum().backward()
    return writes, master


def test_each_backward_is_noted_and_no_write_of_a_script() -> None:
    writes, master = reached()
    assert writes.has(master)
    master.square().sum().backward()  # adds in place
    assert writes.has(master)
    master.grad.mul_(2)
    assert not writes.has(master)
    assert writes.knows(master)


def test_another_gradient_in_its_place_is_the_scripts() -> None:
    writes, master = reached()
    master.grad = master.grad.clone()
    assert not writes.has(master)
    master.grad = None
    assert not writes.has(master)
    master.square().sum().backward()
    assert writes.has(master)
    writes.forget()
    assert not writes.has(master)
    assert not writes.knows(master)


def test_the_gradient_is_known_when_only_torch_has_held_it() -> None:
    writes, master = reached()
    gc.collect()
    assert writes.has(master)


def test_a_master_that_is_frozen_at_first_is_watched_when_it_is_trained() -> None:
    writes, master = AutogradWrites(), nn.Parameter(torch.ones(3), requires_grad=False)
    writes.watch(master)
    assert not master.requires_grad
    master.requires_grad_()
    master.square().sum().backward()
    assert writes.has(master)


def test_a_master_does_not_keep_the_notes_alive() -> None:
    writes, master = reached()
    reference = weakref.ref(writes)
    del writes
    gc.collect()
    assert reference() is None
    master.square().sum().backward()
    assert master.grad.tolist() == [4.0] * 3
