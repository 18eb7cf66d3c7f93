"""Tests of graph libraries have them imported."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def imported(graph_libraries_imported: None) -> None:
    """See `graph_libraries`."""
