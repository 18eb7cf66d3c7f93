"""Instances are found by their type, and threads beside go on."""

import copy
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn

from amp_patch.common.living_objects import instances, is_leaf, living_modules, weakly


class Layer(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("base", "make"),
    [
        (nn.Module, lambda: Layer(2, 2)),
        (Tensor, lambda: torch.ones(2)),
        (Tensor, lambda: nn.Parameter(torch.ones(2))),
        (Tensor, lambda: torch.ones(2, requires_grad=True) * 2),
        (nn.Parameter, lambda: nn.Parameter(torch.ones(2))),
    ],
)
def test_what_lives_is_found_once_and_nothing_else(base: type, make: Any) -> None:
    made = [make() for _ in range(3)]
    found = instances(base)
    assert {id(one) for one in found} >= set(map(id, made))
    assert len({id(one) for one in found}) == len(found)
    assert all(isinstance(one, base) for one in found)


def test_a_view_that_torch_refuses_to_tell_of_is_no_leaf() -> None:
    base, leaf = torch.zeros(4), torch.ones(4, requires_grad=True)
    with torch.no_grad():
        view = base[:2]
    base.mul_(leaf)
    with pytest.raises(RuntimeError, match="no_grad mode"):
        view.is_leaf  # noqa: B018
    assert not is_leaf(view)
    assert not is_leaf(base)
    assert is_leaf(leaf)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_what_a_failed_copy_has_left_is_no_module(amp: ModuleType, opt_level: str) -> None:
    """A notebook keeps the traceback, and with it the copy that ``deepcopy`` had begun."""
    broken = nn.Sequential(nn.Linear(2, 2))
    broken.kept = torch.ones(2, requires_grad=True) * 2  # no leaf, which torch refuses to copy
    with pytest.raises(RuntimeError, match="deepcopy") as error:
        copy.deepcopy(broken)
    half_made = [one for one in instances(nn.Sequential) if not vars(one)]
    assert half_made
    assert all(one is not broken for one in half_made)
    living = set(map(id, living_modules(nn.Module)))
    assert living.issuperset(map(id, (broken, broken[0])))
    assert living.isdisjoint(map(id, half_made))

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    scaled_backward(amp, model(torch.ones(1, 2)).sum(), optimizer)
    optimizer.step()
    amp.deactivate()
    del error


def test_proxies_are_not_woken() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("woken")

    proxy = Proxy()
    assert all(one is not proxy for one in instances(nn.Module))


def test_threads_beside_make_their_tuples() -> None:
    """Whoever holds a tuple that another thread is making breaks that thread (SystemError)."""
    ended = threading.Event()
    failed = []

    def work() -> None:
        try:
            while not ended.is_set():
                tuple(value for value in range(200))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        param = nn.Parameter(torch.ones(2))
        for _ in range(5):
            assert any(one is param for one in instances(nn.Parameter))
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_method_is_called_as_long_as_its_object_lives() -> None:
    class Counter:
        def count(self) -> None:
            counted.append(1)

    counted: list[int] = []
    counter = Counter()
    call = weakly(counter.count)
    call()
    del counter
    call()
    assert counted == [1]
