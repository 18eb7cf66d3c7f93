"""Each mistake is made with ``from amp_patch import amp``, and with the drop-in's ``apex.amp``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

import amp_patch.apex
from amp_patch import amp as core


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Leave most of the drop-in to the nightly run, for it calls the same functions.

    Its tests at O1 and O5, and every second one of the others by name: pytest-randomly may have
    drawn an order before.
    """
    with_params = [item for item in items if hasattr(item, "callspec")]
    of_drop_in = [one for one in with_params if one.callspec.params.get("module") == "drop-in"]
    left_out = set(sorted({item.originalname for item in of_drop_in})[1::2])
    for item in of_drop_in:
        if item.originalname in left_out or item.callspec.params.get("level") in ("O1", "O5"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=["plain", "drop-in"])
def module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module that a script calls ``amp``."""
    if request.param == "plain":
        yield core
    else:
        with amp_patch.apex.install(force=True):
            yield importlib.import_module("apex.amp")


@pytest.fixture
def amp(module: ModuleType) -> Iterator[ModuleType]:
    """It, deactivated at the end of the test."""
    yield module
    core.deactivate()
