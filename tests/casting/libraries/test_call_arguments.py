"""What comes to a function by a rule: tensors in containers are cast, all else is the very same."""

from typing import Any

import pytest
import torch
from casting_support import called_at
from torch import Tensor

from amp_patch.casting.libraries.library_casts import Rule, wrap

F16, F32 = torch.float16, torch.float32


@pytest.mark.parametrize("casts", ["promote", "told"])
def test_a_dictionary_that_needs_no_cast_is_the_very_one(casts: str) -> None:
    """To which a function may write."""
    cache: dict[str, int] = {}

    def count(x: Tensor, cache: dict[str, int]) -> dict[str, int]:
        cache["calls"] = cache.get("calls", 0) + 1
        return cache

    found = called_at("O2", "inside", wrap(count, Rule(casts)), torch.ones(2, dtype=F16), cache)
    assert found is cache
    assert cache == {"calls": 1}


def test_tensors_in_containers_are_cast_and_all_else_passes() -> None:
    given_to: list[Any] = []
    function = wrap(lambda *args, **kwargs: given_to.extend([args, kwargs]), Rule("promote"))
    index = torch.tensor([1, 2])
    values = ([torch.ones(1, dtype=F16), None], {"key": torch.ones(1)}, index, "sum")
    called_at("O2", "outside", lambda: function(*values, dim=0))
    (listed, mapped, found, word), kwargs = given_to
    assert (listed[0].dtype, listed[1], mapped["key"].dtype) == (F32, None, F32)
    assert found is index
    assert (word, kwargs) == ("sum", {"dim": 0})
    assert values[0][0].dtype is F16
