"""Large copies are passed by only where nobody can have written to them unseen."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amp_patch.kernels import large_copies
from amp_patch.kernels.large_copies import LargeCopies


def made(count: int = 2) -> tuple[list[Tensor], list[Tensor], LargeCopies]:
    """Return sources and copies that others have, and what watches these, equal and unheld."""
    sources = [torch.randn(8) for _ in range(count)]
    copies = [source.half() for source in sources]
    pairs = zip(sources, copies, strict=True)
    large = LargeCopies([(source.detach(), copy.detach()) for source, copy in pairs])
    large.note_equal()
    looked_at(large, trusts=False)
    return sources, copies, large


def looked_at(large: LargeCopies, trusts: bool = True) -> list[tuple[int, bool]]:
    """Return the rows that are to be compared, with whether they were written to."""
    rows = {id(pair): row for row, pair in enumerate(large.pairs)}
    return [(rows[id(pair)], written) for pair, written in large.unequal_perhaps(trusts)]


def test_what_nobody_wrote_to_and_holds_is_passed_by() -> None:
    _, _, large = made()
    assert looked_at(large) == []
    assert looked_at(large, trusts=False) == [(0, False), (1, False)]


@pytest.mark.parametrize("written", ["source", "copy"])
def test_what_a_version_tells_of_comes_last(written: str) -> None:
    sources, copies, large = made(3)
    (sources if written == "source" else copies)[0].mul_(2)
    kept = copies[2].detach()
    assert looked_at(large) == [(2, False), (0, True)]
    large.note_equal()
    del kept
    assert looked_at(large) == [(2, False)]
    assert looked_at(large) == []


def test_nothing_is_passed_by_where_nothing_is_known() -> None:
    _, _, large = made()
    large.forget()
    assert looked_at(large) == [(0, True), (1, True)]


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda copy: copy.data,
    "detach": lambda copy: copy.detach(),
    "view": lambda copy: copy.view(2, 4),
    "element": lambda copy: copy[3],
    "numpy": lambda copy: copy.numpy(),
    "bits in numpy": lambda copy: copy.view(torch.int16).numpy(),
    "dlpack": lambda copy: np.from_dlpack(copy.detach()),
    "storage": lambda copy: copy.untyped_storage(),
    "typed storage": lambda copy: copy._typed_storage(),
    "a tensor of the storage": lambda copy: torch.empty(0, dtype=copy.dtype).set_(
        copy.untyped_storage()
    ),
    "another's data": lambda copy: setattr(other := torch.zeros(8).half(), "data", copy) or other,
}


@pytest.mark.parametrize("hold", HOLDERS)
def test_what_others_hold_is_compared_until_they_let_it_go(hold: str) -> None:
    _, copies, large = made()
    held = HOLDERS[hold](copies[1])
    assert looked_at(large) == [(1, False)]
    assert looked_at(large) == [(1, False)]
    del held  # written to just before, perhaps
    assert looked_at(large) == [(1, False)]
    assert looked_at(large) == []


def test_a_graph_that_is_gone_holds_nothing() -> None:
    _, copies, large = made()
    inputs = torch.ones(2, 8, dtype=torch.float16, requires_grad=True)
    loss = torch.nn.functional.linear(inputs, copies[0].requires_grad_().view(1, 8)).sum()
    assert looked_at(large) == [(0, False)]
    loss.backward()
    looked_at(large)
    assert looked_at(large) == []


def test_memory_of_several_processes_is_always_compared() -> None:
    source, copy = torch.randn(8), torch.randn(8).half().share_memory_()
    large = LargeCopies([(source.detach(), copy.detach())])
    large.note_equal()
    assert [looked_at(large), looked_at(large)] == [[(0, False)]] * 2


@pytest.mark.parametrize("make", [torch.from_numpy, torch.from_dlpack, torch.frombuffer])
def test_memory_that_torch_has_not_made_is_always_compared(make: Callable[[Any], Tensor]) -> None:
    memory = np.zeros(8, dtype=np.int16)
    options = {"dtype": torch.int16} if make is torch.frombuffer else {}
    source, copy = torch.zeros(8), make(memory, **options).view(torch.float16)
    large = LargeCopies([(source.detach(), copy.detach())])
    large.note_equal()
    assert [looked_at(large), looked_at(large)] == [[(0, False)]] * 2


class Sub(torch.Tensor):
    """A class of which nobody is told what is read."""


def test_subclasses_are_always_compared() -> None:
    large = LargeCopies([(torch.randn(8), torch.randn(8).half().as_subclass(Sub).detach())])
    large.note_equal()
    assert [looked_at(large), looked_at(large)] == [[(0, False)]] * 2


def test_all_are_compared_where_torch_counts_no_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_copies, "_CAN_COUNT", False)
    _, _, large = made()
    assert looked_at(large) == [(0, False), (1, False)]
