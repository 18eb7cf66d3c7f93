"""Functions are patched while a model at O1 or O4 lives; what fails leaves the rules of before."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping

import pytest
import torch

from amp_patch.casting.mode import OFF, process
from amp_patch.casting.patched_functions import PatchedFunctions, expand
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.casting.wrappers import Casts
from amp_patch.levels import OPT_LEVELS

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ONES = torch.ones(2, 2)


@pytest.fixture
def functions() -> Iterator[PatchedFunctions]:
    saved = process.save()
    process.devices = frozenset({"cpu"})
    functions = PatchedFunctions(Casts(WeightCache()), {})
    yield functions
    functions.undo()
    process.restore(saved)


def set_up(
    functions: PatchedFunctions,
    level: str,
    rules: Mapping[str, str] | None = None,
    casting: set[torch.dtype] | None = None,
) -> contextlib.ExitStack:
    """Set up for a level, and return what undoes it."""
    undo = contextlib.ExitStack()
    functions.set_up([], OPT_LEVELS[level], expand(rules or {}), casting or set(), undo)
    return undo


def dtypes() -> list[torch.dtype]:
    """Return what a function of each rule computes in, given float32."""
    return [torch.mm(ONES, ONES).dtype, torch.relu(ONES).dtype]


@pytest.mark.parametrize(
    ("level", "expected"), [("O0", F32), ("O1", F16), ("O2", F32), ("O4", BF16)]
)
def test_levels_that_cast_functions_patch_them(
    functions: PatchedFunctions, level: str, expected: torch.dtype
) -> None:
    set_up(functions, level)
    assert dtypes() == [expected, F32]


def test_they_go_with_the_last_model_and_follow_those_that_are_left(
    functions: PatchedFunctions,
) -> None:
    original = torch.mm
    set_up(functions, "O1")
    set_up(functions, "O4", casting={F16})
    assert dtypes() == [BF16, F32]
    functions.follow_models({F16})
    assert dtypes() == [F16, F32]
    functions.follow_models(set())
    assert torch.mm is original
    assert process.dtype is OFF


def test_earlier_rules_hold_while_a_model_casts(functions: PatchedFunctions) -> None:
    set_up(functions, "O1", {"mm": "off"})
    set_up(functions, "O1", {"relu": "half"}, casting={F16})
    assert dtypes() == [F32, F16]
    set_up(functions, "O1")
    assert dtypes() == [F16, F32]


@pytest.mark.parametrize("before", [None, {"mm": "off"}])
def test_what_undoes_a_set_up_leaves_what_was_before(
    functions: PatchedFunctions, before: dict[str, str] | None
) -> None:
    original = torch.matmul
    if before is not None:
        set_up(functions, "O1", before)
    expected = dtypes()
    undo = set_up(functions, "O4", {"relu": "half"}, casting={F16})
    assert dtypes() == [F32 if before else BF16, BF16]
    undo.close()
    assert dtypes() == expected
    assert (torch.matmul is original) == (before is None)


def test_a_registration_that_fails_leaves_those_of_before(functions: PatchedFunctions) -> None:
    library = types.SimpleNamespace(function=lambda x: x.dtype)
    set_up(functions, "O1")
    functions.register(library, "function", "half")
    with pytest.raises(TypeError):
        functions.register(int, "bit_count", "half")
    assert library.function(ONES) is F16
    assert dtypes() == [F16, F32]


def test_a_registration_outlives_undo(functions: PatchedFunctions) -> None:
    library = types.SimpleNamespace(function=lambda x: x.dtype)
    original = library.function
    functions.register(library, "function", "half")
    assert library.function is original
    set_up(functions, "O1")
    assert library.function(ONES) is F16
    functions.undo()
    assert library.function is original
    set_up(functions, "O1")
    assert library.function(ONES) is F16


def test_a_rule_is_expanded_to_every_place_of_its_function() -> None:
    assert expand({"mm": "float", "torch.nn.functional.gelu": "half"}) == {
        "torch.mm": "float",
        "torch.Tensor.mm": "float",
        "torch.nn.functional.gelu": "half",
    }


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of 'half', .*; got 'double' for 'mm'"):
        expand({"mm": "double"})
