"""Which tensors of arguments are cast: the table says so of every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from amp_patch.casting.argument_casts import (
    dtypes_in,
    float_on_cpu,
    holds_half,
    is_half,
    tensors_in,
    to_dtype,
    to_float,
)
from amp_patch.casting.mode import process

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# What each dtype becomes by to_dtype(FP16), to_dtype(BF16), to_dtype(FP32), and by to_float.
BECOMES = {
    FP16: (FP16, BF16, FP32, FP32),
    BF16: (FP16, BF16, FP32, FP32),
    FP32: (FP16, BF16, FP32, FP32),
    torch.float64: (torch.float64,) * 4,
    torch.complex64: (torch.complex64,) * 4,
    torch.int64: (torch.int64,) * 4,
    torch.bool: (torch.bool,) * 4,
}
NESTS = {
    "alone": lambda tensor: tensor,
    "list": lambda tensor: [1, tensor],
    "tuple in a dict": lambda tensor: {"a": ("b", tensor)},
    "last of lists": lambda tensor: [1, 2.0, [None, (3,)], ("b", tensor)],
}


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    process.devices = frozenset({"cpu"})
    yield
    process.reset()


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
@pytest.mark.parametrize("dtype", BECOMES, ids=str)
def test_each_dtype_becomes_what_the_table_says(dtype: torch.dtype, nest: Any) -> None:
    value = nest(torch.ones(2, dtype=dtype))
    casts = [to_dtype(value, wanted) for wanted in (FP16, BF16, FP32)]
    casts += [to_float(value), float_on_cpu(value)]
    for cast, wanted in zip(casts, (*BECOMES[dtype], BECOMES[dtype][-1]), strict=True):
        assert dtypes_of(cast) == [wanted]
        assert type(cast) is type(value)
        assert (cast is value) == (wanted is dtype)


@pytest.mark.parametrize("value", [[], (1, -1), [2.0, None, "sum", True, FP16], [(1,), [2]]])
def test_a_list_without_tensors_is_the_very_same(value: Any) -> None:
    assert to_dtype(value, FP16) is to_float(value) is float_on_cpu(value) is value


def dtypes_of(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in torch.utils._pytree.tree_leaves(value) if hasattr(leaf, "dtype")]


@pytest.mark.parametrize("dtype", BECOMES, ids=str)
def test_what_a_value_holds_is_found(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, dtype=dtype)
    assert is_half(tensor) is holds_half((1, tensor)) is (dtype in (FP16, BF16))
    assert not holds_half(([tensor],))
    assert tensors_in([{"a": tensor}, "b"])[0] is tensor
    assert dtypes_in([{"a": tensor}]) == ([dtype] if dtype in (FP16, BF16, FP32) else [])


def test_tensors_on_other_devices_are_left_alone() -> None:
    half = torch.ones(2, dtype=FP16, device="meta")
    value = {"a": [half, half.float()]}
    assert to_dtype(value, BF16) is to_float(value) is float_on_cpu(value) is value
    assert not is_half(half)
    assert not dtypes_in(value)
    process.devices |= {"meta"}
    assert to_float(half).dtype is FP32
    assert float_on_cpu(half) is half


def test_a_parameter_is_cast_by_whom_it_is_given_to() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    seen = []

    def weight(value: torch.nn.Parameter, dtype: torch.dtype) -> str:
        seen.append((value, dtype))
        return "cast"

    assert to_dtype([param], FP16, weight) == ["cast"]
    assert seen[0][0] is param
    assert seen[0][1] is FP16
