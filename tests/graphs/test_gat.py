"""The example that trains a GAT, with either library, against float32."""

import functools
from typing import Any

import graph_libraries  # noqa: F401 - here, for their imports change torch and warn
import pytest
import torch
from support import nightly_but
from test_examples import HALF_LEVELS, example

from amp_patch import amp
from amp_patch.tools.sweep.memory import LivingTensors


@functools.cache
def trained_gat(library: str, level: str) -> Any:
    """Train the GAT on the karate club, once for all tests of a process."""
    result = example("gat").train(level, library=library, epochs=30)
    amp.deactivate()
    return result


GATS = [(library, level) for library in ("dgl", "pyg") for level in HALF_LEVELS]


@pytest.mark.parametrize("pair", nightly_but([("dgl", "O2")], GATS), ids="-".join)
def test_the_gat_finds_the_clubs_as_in_float32(pair: tuple[str, str]) -> None:
    library, level = pair
    result, reference = trained_gat(library, level), trained_gat(library, "O0")
    assert reference.accuracy > 75
    assert result.accuracy == pytest.approx(reference.accuracy, abs=10)  # of 22 members
    assert abs(result.final_loss - reference.final_loss) < 0.05 * reference.first_loss


@pytest.mark.parametrize(
    ("library", "scale", "most"),
    [("pyg", 0.0003, 0.6), pytest.param("dgl", 0.003, 0.9, marks=pytest.mark.slow)],
)
def test_a_graph_of_many_edges_takes_less_memory_in_half(
    library: str, scale: float, most: float
) -> None:
    """With DGL the CPU has no half kernels, and what each works in counts: see docs/graphs.md."""
    with LivingTensors() as left_by_other_tests:
        before = left_by_other_tests.peak
    torch.manual_seed(0)
    graph, peaks = example("gat").reddit_like(scale), {}
    for level in ("O0", "O2"):
        result = example("gat").train(level, graph=graph, library=library, epochs=1)
        peaks[level] = result.peak_bytes - before
        amp.deactivate()
        del result  # its model would count at the next level
    assert peaks["O2"] < most * peaks["O0"]
