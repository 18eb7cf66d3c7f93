"""Results that are half where functions cast."""

from types import ModuleType

import pytest
import torch
from casting_support import HALF_OF, called_at

from amp_patch.casting.libraries.library_casts import Rule, wrap

F16, F32 = torch.float16, torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_result_is_half_where_functions_cast(amp: ModuleType, level: str) -> None:
    function = wrap(lambda x: x + torch.ones(4), Rule("result"))
    found = called_at(level, "inside", function, torch.ones(2, 4, dtype=HALF_OF.get(level, F16)))
    assert found.dtype is (HALF_OF[level] if level in ("O1", "O4") else F32)
    assert called_at(level, "float_region", function, torch.ones(2, 4)).dtype is F32
