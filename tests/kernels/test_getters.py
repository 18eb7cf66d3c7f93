"""Each getter returns what its name says, of the tensor that it is given."""

import pytest
import torch

from amp_patch.kernels import getters

ATTRIBUTES = {
    "DEVICE": "device",
    "DTYPE": "dtype",
    "GRAD": "grad",
    "IS_CPU": "is_cpu",
    "IS_CUDA": "is_cuda",
    "IS_SPARSE": "is_sparse",
    "LAYOUT": "layout",
    "REQUIRES_GRAD": "requires_grad",
    "VERSION": "_version",
}


def test_none_is_left_out() -> None:
    assert {name for name in vars(getters) if name.isupper()} == set(ATTRIBUTES)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_what_it_returns(name: str) -> None:
    param = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    param.sum().backward()
    sparse = torch.ones(2).to_sparse()
    with torch.no_grad():
        param.add_(1.0)
    for tensor in (param, sparse):
        found, expected = getattr(getters, name)(tensor), getattr(tensor, ATTRIBUTES[name])
        assert found is expected or found == expected
