"""The modules on the stack: those that are being called in this thread, and no other."""

import threading
from collections.abc import Callable

import torch
from torch import nn

from amp_patch.casting.running_modules import calls_of, is_called, running_modules


class Seen(nn.Module):
    """Notes which modules run while it does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()
        self.in_thread: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found = running_modules()
        thread = threading.Thread(target=lambda: self.in_thread.update(running_modules()))
        thread.start()
        thread.join()
        return x


def test_it_is_the_stack_that_tells() -> None:
    seen, beside = Seen(), nn.Identity()
    model = nn.Sequential(beside, seen)
    model(torch.zeros(1))
    assert seen.found == {id(model), id(seen)}
    assert seen.in_thread == set()
    assert running_modules() == set()


def test_a_module_that_calls_itself_has_several_calls() -> None:
    class Tree(nn.Module):
        def forward(self, depth: int) -> list[int]:
            return [calls_of(self), *(self(depth - 1) if depth else []), calls_of(self)]

    tree = Tree()
    assert nn.Sequential(tree)(2) == [1, 2, 3, 3, 2, 1]
    assert calls_of(tree) == 0


def test_a_function_is_called_until_it_returns() -> None:
    def outer(call: Callable[[], bool]) -> bool:
        return call()

    assert outer(lambda: is_called(outer.__code__))
    assert not is_called(outer.__code__)
