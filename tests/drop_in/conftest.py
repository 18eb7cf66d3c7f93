"""The drop-in, installed for one test."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator

import pytest

import amp_patch.apex


@pytest.fixture
def apex() -> Iterator[types.ModuleType]:
    """The package apex as scripts import it."""
    with amp_patch.apex.install(force=True):
        yield importlib.import_module("apex")
