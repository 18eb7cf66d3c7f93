"""What runs beside torch's default device, and that it is back afterwards."""

from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from amp_patch.kernels.default_device import without_default_device


@without_default_device
def place(fails: bool = False) -> str:
    if fails:
        raise KeyError("mine")
    return torch.empty(1).device.type


def test_the_default_device_is_not_seen_and_comes_back() -> None:
    with torch.device("meta"):
        assert place() == "cpu"
        assert torch.empty(1).is_meta
        with pytest.raises(KeyError, match="mine"):
            place(fails=True)
        assert torch.empty(1).is_meta
    assert place() == "cpu"


def test_set_default_device_is_the_same(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_default_device(None))
    torch.set_default_device("meta")
    assert place() == "cpu"
    assert torch.empty(1).is_meta


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_mode_of_the_script_sees_all(is_alone: bool) -> None:
    class Noting(BaseTorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    seen: list[Any] = []
    if is_alone:
        with Noting():
            assert place() == "cpu"
    else:
        with torch.device("meta"), Noting():
            assert place() == "meta"
    assert torch.empty in seen
