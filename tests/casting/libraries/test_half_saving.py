"""What a call in float32 keeps for backward is in half, not copied where a half one is there."""

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.casting.libraries.half_saving import HalfSaving
from amp_patch.casting.libraries.library_casts import Rule, wrap
from amp_patch.casting.mode import mode, process
from amp_patch.tools.sweep.memory import LivingTensors

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SIDE = 128
SIZE = SIDE * SIDE


@pytest.fixture(autouse=True)
def cpu():
    process.devices = frozenset({"cpu"})
    yield
    process.reset()


def kept(function: Callable[..., Tensor], *args: Tensor) -> int:
    """Return the bytes that live after a call because of it, the result's among them."""
    gc.disable()  # a cycle that is collected meanwhile would count
    try:
        with LivingTensors() as living:
            before = living._bytes
            result = function(*args)
            after = living._bytes
    finally:
        gc.enable()
    assert result.grad_fn is not None
    return after - before


def leaves(dtype: torch.dtype = F16) -> list[Tensor]:
    return [torch.randn(SIDE, SIDE).to(dtype).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize(
    ("function", "in_half", "in_float"),
    [
        (torch.mul, 2, 2 + 4 + 4),  # its arguments: the half ones are there
        (lambda a, b: torch.softmax(a + b, 0), 2, 2 + 4),  # its result: the half one is there
        (lambda a, b: torch.tanh((a * b).sin()), 2 + 2, 2 + 4 * 4),  # what is in between: half
    ],
    ids=["arguments", "result", "between"],
)
def test_what_is_kept(function: Callable[..., Tensor], in_half: int, in_float: int) -> None:
    def casts(a: Tensor, b: Tensor) -> Tensor:
        return function(a.float(), b.float()).half()

    assert kept(wrap(function, Rule("promote", "cpu")), *leaves()) == in_half * SIZE
    assert kept(casts, *leaves()) == in_float * SIZE


@pytest.mark.parametrize(
    ("function", "word", "in_half"),
    [
        (lambda x: x.logsumexp(1), "lengths", (4 + 2) / SIDE),  # its result, and the half one
        (torch.rsqrt, "steep", 2),  # its result: the half one is there
    ],
    ids=["logsumexp", "rsqrt"],
)
def test_what_a_half_model_keeps(
    function: Callable[..., Tensor], word: str, in_half: float
) -> None:
    x, _ = leaves()
    around, mode.stored = mode.stored, F16
    try:
        found = kept(wrap(function, Rule(word, "always")), x)
    finally:
        mode.stored = around
    assert found <= in_half * SIZE


def test_few_numbers_are_kept_as_they_are() -> None:
    """Hooks take the host longer than their memory is worth."""
    few = [torch.randn(8, 8).to(F16).requires_grad_() for _ in range(2)]
    assert kept(wrap(torch.mul, Rule("promote", "cpu")), *few) == (2 + 4 + 4) * 64


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad(), LivingTensors() as living:
        values = [one.detach() for one in leaves()]
        before = living._bytes
        result = wrap(torch.mul, Rule("promote", "cpu"))(*values)
        assert living._bytes - before == 2 * result.numel()


@given(st.sampled_from([F16, BF16]), st.booleans(), st.booleans())
def test_a_tensor_that_is_written_to_before_backward_is_refused(
    dtype: torch.dtype, argument: bool, written: bool
) -> None:
    a, b = (one.clone() for one in leaves(dtype))
    function = wrap(torch.mul if argument else torch.exp, Rule("promote", "cpu"))
    result = function(a, b) if argument else function(a)
    if written:
        with torch.no_grad():
            (a if argument else result).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
    else:
        result.sum().backward()


def test_a_transform_of_torch_func_which_allows_no_hooks_goes_on_without() -> None:
    function = wrap(torch.exp, Rule("promote", "cpu"))
    x = torch.tensor([0.0, 1.0], dtype=F16)
    grad = torch.func.grad(lambda x: function(x).sum())(x)
    assert torch.equal(grad, x.float().exp().half())


def test_integers_are_kept_as_they_are() -> None:
    index = torch.tensor([2, 0, 1])
    values = torch.randn(3, dtype=F16, requires_grad=True)
    wrap(lambda x, i: x.index_select(0, i) * 2.0, Rule("promote", "cpu"))(
        values, index
    ).sum().backward()
    assert torch.equal(values.grad, torch.full((3,), 2.0, dtype=F16))


def test_a_view_of_an_argument_is_the_half_argument() -> None:
    saving = HalfSaving(F16)
    half = torch.randn(6, dtype=F16)
    wide = half.float()
    saving.note(wide, half)
    saved = saving._pack(wide.view(2, 3))
    saving.settle()
    assert saved._tensor.data_ptr() == half.data_ptr()
    assert torch.equal(saved.read(), wide.view(2, 3))


def test_another_order_or_a_part_of_an_argument_is_no_half_argument() -> None:
    values = torch.arange(6.0).view(2, 3)
    for half in (values.half(), values.half().t()):
        saving, wide = HalfSaving(F16), half.float()
        saving.note(wide, half)
        for view in (wide, wide.t(), wide[0], wide[:1]):
            saved = saving._pack(view)
            saving.settle()
            saving.note(wide, half)
            assert torch.equal(saved.read(), view)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_is_kept_as_it_is() -> None:
    matrix = torch.eye(3).to_sparse_csr()
    x = torch.randn(3, 2, dtype=F16, requires_grad=True)
    result = wrap(torch.sparse.mm, Rule("promote", "cpu"))(matrix.half(), x)
    result.sum().backward()
    assert torch.equal(result, x)
    assert torch.equal(x.grad, torch.ones(3, 2, dtype=F16))


def test_what_float16_does_not_hold_is_kept_in_float32() -> None:
    """A count of more than 65504, by which a mean divides: its gradients would be zero."""
    count = torch.full((2, 1), 70000.0)
    sums = torch.full((2, 3), 140.0, dtype=F16, requires_grad=True)
    wrap(lambda x: x / count * 1000.0, Rule("promote", "cpu"))(sums).sum().backward()
    assert torch.equal(sums.grad, torch.full((2, 3), 1000.0 / 70000.0).half())
