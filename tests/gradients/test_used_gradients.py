"""Which gradients a step has used is known while they live, and keeps none of the large alive."""

import gc
import weakref

import torch

from amp_patch.gradients.used_gradients import UsedGradients


def test_those_that_went_are_not_among_the_used() -> None:
    small, large, unused = torch.ones(2), torch.ones(3), torch.ones(4)
    used = UsedGradients()
    used.begin([small, weakref.ref(large)])
    assert [id(one) for one in used.alive()] == [id(small), id(large)]
    assert [ref() is large for ref in used.among([unused, large])] == [True]
    gone = weakref.ref(large)
    del large
    gc.collect()
    assert gone() is None
    assert [id(one) for one in used.alive()] == [id(small)]


def test_the_next_step_begins_anew() -> None:
    first, second, third = torch.ones(2), torch.ones(3), torch.ones(4)
    used = UsedGradients()
    used.begin([first])
    used.begin([second])
    used.add([weakref.ref(third)])
    assert [id(one) for one in used.alive()] == [id(second), id(third)]
    assert not used.among([first])


def test_a_tensor_whose_python_object_came_back_is_the_same() -> None:
    param = torch.ones(3, requires_grad=True)
    param.sum().backward()
    used = UsedGradients()
    used.begin([weakref.ref(param.grad)])
    gc.collect()  # C++ keeps the gradient, and with it the object
    assert [one is param.grad for one in used.alive()] == [True]


def test_of_many_micro_batches_only_the_last_leave_references() -> None:
    used = UsedGradients()
    used.begin([torch.ones(2)])
    before = _living_references()
    for _ in range(50):
        used.add([torch.ones(2)])
    assert _living_references() - before <= 2


def test_gradients_of_earlier_micro_batches_that_live_are_used_too() -> None:
    kept = [torch.ones(2) for _ in range(5)]
    used = UsedGradients()
    used.begin(kept[:1])
    for one in kept[1:]:
        used.add([one])
    assert [id(one) for one in used.alive()] == list(map(id, kept))
    used.drop(kept[:2])
    assert [id(one) for one in used.alive()] == list(map(id, kept[2:]))
    used.add([torch.ones(3)])
    used.begin([])
    assert not used.alive()


def _living_references() -> int:
    return sum(type(one) is weakref.ref for one in gc.get_objects())
