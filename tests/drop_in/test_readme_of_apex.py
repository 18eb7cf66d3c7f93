"""What the README says is supplied is supplied."""

from __future__ import annotations

import importlib
import operator
import re
import types

import pytest
from running import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README[README.index("What is supplied, under") : README.index("Not supplied are")]
ROWS = re.findall(r"^\| (`.+?) \| (.+) \|$", TABLE, re.MULTILINE)
MISSING = re.findall(r"`(apex\.\w+)`", README[README.index("Not supplied are") :].split(":")[0])


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_modules_and_names_of_the_table_are_there(apex: types.ModuleType, row) -> None:
    modules = [importlib.import_module(name) for name in names(row[0])]
    if row[0] == "`apex.amp`":
        return  # its row names attributes of other objects, see test_amp_drop_in
    for name in names(row[1]):
        try:
            operator.attrgetter(name)(modules[0])
        except AttributeError:
            importlib.import_module(f"{modules[0].__name__}.{name}")


def test_the_table_has_every_package_of_apex(apex: types.ModuleType) -> None:
    listed = {name for row in ROWS for name in names(row[0])}
    packages = {f"apex.{name}" for name, one in vars(apex).items() if hasattr(one, "__path__")}
    assert packages <= listed


def test_what_is_not_supplied_is_not(apex: types.ModuleType) -> None:
    assert MISSING == ["apex.transformer", "apex.pyprof", "apex.contrib"]
    for name in MISSING[:2]:
        with pytest.raises(ImportError, match="Instead of"):
            importlib.import_module(name)
