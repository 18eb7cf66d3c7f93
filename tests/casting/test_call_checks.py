"""Which calls get casts: of which functions, of which dtypes, and with what beside the tensors."""

import functools

import pytest
import torch
from casting_support import ANY_DTYPE, casts_on
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from amp_patch import amp as public
from amp_patch.casting import call_checks
from amp_patch.levels import HALVES


@given(dtypes=st.lists(ANY_DTYPE, min_size=1, max_size=4))
def test_promote_casts_up_only_where_floating_dtypes_are_mixed(dtypes):
    function = public.promote_function(lambda tensors, *, key: [*tensors, key])
    tensors = [torch.ones(2, dtype=dtype) for dtype in dtypes]
    with casts_on():
        result = function(tensors[1:], key=tensors[0])
    mixed = len({torch.float32, torch.float16, torch.bfloat16} & set(dtypes)) > 1
    for tensor, got in zip([*tensors[1:], tensors[0]], result, strict=True):
        if mixed and tensor.dtype in (torch.float16, torch.bfloat16):
            assert got.dtype is torch.float32
        else:
            assert got is tensor


@given(
    given_=st.lists(st.tuples(ANY_DTYPE, st.sampled_from(["cpu", "meta"])), min_size=2, max_size=4)
)
def test_dtypes_on_other_devices_than_the_models_mix_with_none(given_):
    function = public.promote_function(lambda *tensors: tensors)
    tensors = [torch.ones(2, dtype=dtype, device=device) for dtype, device in given_]
    with casts_on():
        result = function(*tensors)
    halves = {torch.float16, torch.bfloat16}
    kinds = {dtype for dtype, device in given_ if device == "cpu"} & {torch.float32, *halves}
    for tensor, got in zip(tensors, result, strict=True):
        if len(kinds) > 1 and tensor.is_cpu and tensor.dtype in halves:
            assert got.dtype is torch.float32
        else:
            assert got is tensor


class Metres:
    """A number with a unit: no tensor, but torch hands its functions on to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def bare(value):
            return value.tensor if isinstance(value, Metres) else value

        named = {name: bare(value) for name, value in (kwargs or {}).items()}
        return Metres(function(*map(bare, args), **named))


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x, layer: layer(x),
        lambda x, layer: F.linear(x, layer.weight),
        lambda x, layer: torch.matmul(x, layer.weight.t()),
        lambda x, layer: torch.addmm(layer.weight[:, 0], x, layer.weight.t()),
        lambda x, layer: torch.mm(layer.weight, mat2=Metres(x.tensor.t())),
    ],
    ids=["layer", "linear", "matmul", "addmm", "by name"],
)
def test_an_object_that_is_no_tensor_gets_what_torch_hands_on(amp, level, compute) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(Metres(x.to(self.layer.weight.dtype)), self.layer).tensor

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 6)
    expected = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    torch.testing.assert_close(model(x).float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("function", "is_in_c"),
    [(torch.mm, True), (torch.Tensor.mm, True), (F.softmax, False), (len, False)],
)
def test_torchs_functions_in_c_are_told_from_others(function, is_in_c: bool) -> None:
    assert call_checks.is_in_torchs_c(function) is is_in_c


def test_torchs_own_functions_are_told_from_those_that_took_their_place() -> None:
    @functools.wraps(torch.einsum)
    def replaced(*args):
        return torch.einsum(*args)

    assert call_checks.is_unreplaced(torch.functional.norm)
    assert call_checks.is_unreplaced(torch.mm)
    assert not call_checks.is_unreplaced(replaced)


def test_a_function_without_a_name_has_that_of_its_class() -> None:
    assert call_checks.name_of(torch.mm) == "mm"
    assert call_checks.name_of(functools.partial(torch.mm)) == "partial"


def test_arguments_stay_that_need_no_cast_or_are_written_to() -> None:
    x = torch.ones(2)
    with casts_on():
        assert call_checks.all_stay((x, 1), {}, HALVES)
        assert not call_checks.all_stay((x.half(),), {}, HALVES)
        assert not call_checks.all_stay((x,), {"other": x.half()}, HALVES)
        assert call_checks.all_stay((x.half(),), {"out": x}, HALVES)


def test_a_dtype_is_asked_for_by_place_or_by_name() -> None:
    x = torch.ones(2)
    assert call_checks.asks_for_dtype((x, 0, torch.float32), {})
    assert call_checks.asks_for_dtype((x,), {"dtype": torch.float32})
    assert not call_checks.asks_for_dtype((x, 0, None), {"dtype": None})
