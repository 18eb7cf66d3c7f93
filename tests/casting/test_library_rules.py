"""The data of library_rules: its words mean something, and each row stands for a function."""

import importlib

import graph_libraries  # noqa: F401 - quietly
import pytest

from amp_patch.casting.library_casts import (
    CASTS,
    IN_FLOAT,
    OWN_CASTS,
    OWN_IN_FLOAT,
    WITHOUT_HALF,
)
from amp_patch.casting.library_rules import REASONS, RULES
from amp_patch.patching import resolve_in

pytestmark = pytest.mark.usefixtures("graph_libraries_imported")
ROWS = [(module, name, *row) for module, names in RULES.items() for name, row in names.items()]
#: What `amp_patch[graphs]` brings; the others must be compiled for the torch at hand.
INSTALLED = ("dgl", "torch_geometric")


@pytest.mark.parametrize(("module", "name", "casts", "in_float", "reason"), ROWS)
def test_a_row_says_known_words_and_why(
    module: str, name: str, casts: str, in_float: str, reason: str
) -> None:
    assert casts in (*CASTS, *OWN_CASTS, *WITHOUT_HALF)
    assert casts not in OWN_CASTS[:2] or module.startswith("dgl.")
    assert in_float in (*IN_FLOAT, *OWN_IN_FLOAT)
    assert in_float not in OWN_IN_FLOAT or module.startswith("dgl.")
    assert reason in REASONS


@pytest.mark.parametrize(
    ("module", "name"), [row[:2] for row in ROWS if row[0].partition(".")[0] in INSTALLED]
)
def test_a_row_names_what_the_installed_version_has(module: str, name: str) -> None:
    found = importlib.import_module(module)
    if not name.startswith("*"):
        assert callable(resolve_in(found, name)[2])
