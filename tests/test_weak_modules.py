"""A table of modules tells them apart by identity, and keeps none alive."""

from __future__ import annotations

import gc

from torch import Tensor, nn

from amp_patch.weak_modules import table_of_modules


class Compared(nn.Linear):
    """A layer whose == compares weights."""

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]  # that is the mistake
        return self.weight == getattr(other, "weight", other)

    __hash__ = nn.Module.__hash__


def test_modules_are_told_apart_by_identity() -> None:
    table = table_of_modules()
    one, other = Compared(2, 2), Compared(2, 2)
    table[one] = "one"
    table[one] = "it again"
    assert one in table
    assert other not in table
    assert table.setdefault(other, "other") == "other"
    assert table.pop(one) == "it again"
    assert [module is other for module in table] == [True]


def test_an_entry_goes_with_its_module() -> None:
    table = table_of_modules()
    kept, gone = nn.Linear(2, 2), nn.Linear(2, 2)
    table[kept] = table[gone] = 1
    del gone
    gc.collect()
    assert list(table) == [kept]
