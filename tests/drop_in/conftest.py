"""The drop-in, installed for one test or for a file of them."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator

import pytest

import amp_patch.apex


@pytest.fixture(scope="module")
def apex_of_file() -> Iterator[types.ModuleType]:
    """The package apex as scripts import it."""
    with amp_patch.apex.install(force=True):
        yield importlib.import_module("apex")


@pytest.fixture
def apex(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    """The same, imported anew, unless the file says ``SHARES_APEX = True``.

    To import it takes longer than many of the tests. Those of a file that says so change nothing
    in its modules that the next one could see.
    """
    if getattr(request.module, "SHARES_APEX", False):
        yield request.getfixturevalue("apex_of_file")
        return
    with amp_patch.apex.install(force=True):
        yield importlib.import_module("apex")
