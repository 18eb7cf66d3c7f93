"""Tables and sets of modules tell them apart by identity, and keep none alive."""

from __future__ import annotations

import gc

from torch import Tensor, nn

from amp_patch.common.weak_modules import ModuleTable, WeakModules


class Compared(nn.Linear):
    """A layer whose == compares weights."""

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]  # that is the mistake
        return self.weight == getattr(other, "weight", other)

    __hash__ = nn.Module.__hash__


def test_modules_are_told_apart_by_identity() -> None:
    table = ModuleTable()
    one, other = Compared(2, 2), Compared(2, 2)
    table[one] = "one"
    table[one] = "it again"
    assert one in table
    assert other not in table
    assert table.setdefault(other, "other") == "other"
    assert table.pop(one) == "it again"
    assert [module is other for module in table] == [True]
    table.clear()
    assert len(table) == 0


def test_an_entry_goes_with_its_module() -> None:
    table = ModuleTable()
    kept, gone = nn.Linear(2, 2), nn.Linear(2, 2)
    table[kept] = table[gone] = 1
    del gone
    gc.collect()
    assert list(table) == [kept]


def test_a_set_tells_modules_apart_by_identity() -> None:
    found = WeakModules()
    one, other = Compared(2, 2), Compared(2, 2)
    found.add(one)
    assert one in found
    assert other not in found
    assert [module is other for module in found.new([one, other, other])] == [True]
    found.update([one, other])
    assert [module is one for module in found] == [True, False]
    found.discard(one)
    found.discard(one)
    assert [module is other for module in found] == [True]


def test_a_set_keeps_no_module_alive() -> None:
    found = WeakModules()
    kept, gone = nn.Linear(2, 2), nn.Linear(2, 2)
    found.update([kept, gone])
    del gone
    gc.collect()
    assert len(found) == 1
    assert list(found) == [kept]
