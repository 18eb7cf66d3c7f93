"""In which dtype mixed arguments run, against the rules in other words; what is kept."""

from typing import Any

import pytest
import torch
from casting_support import HALF_OF, called_at
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.casting import cached_casts
from amp_patch.casting.libraries.library_casts import CASTS, IN_FLOAT, PLACES, Rule, wrap
from amp_patch.casting.libraries.promoted_calls import call_dtypes
from amp_patch.casting.mode import mode, process

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# --- dtypes ---


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Note what came, and multiply; torch's own casts must not act inside."""
    SEEN.append((a.dtype, b.dtype, a.mm(b.T).dtype))
    return a * b


SEEN: list[tuple[torch.dtype, ...]] = []


@given(
    st.sampled_from(CASTS[:2]),
    st.sampled_from(IN_FLOAT),
    st.sampled_from(["O0", *HALF_OF]),
    st.tuples(*[st.sampled_from([F16, BF16, F32, F64])] * 2),
    st.sampled_from(["inside", "outside", "float_region", "half_region"]),
)
def test_every_mix_runs_in_one_dtype_and_the_result_has_its_own(
    casts: str, in_float: str, level: str, dtypes: tuple[torch.dtype, ...], where: str
) -> None:
    """Against the rules, said again here in other words."""
    half, widest = HALF_OF.get(level, F16), torch.promote_types(*dtypes)
    half_at = {"O1", "O4"} if casts == "half" else set()
    result = half if level in half_at else widest
    if where == "inside" and level in {"O2", "O3", "O5"}:
        result = half
    if where.endswith("region"):
        result = F32 if where == "float_region" else half
    computed = result if where.endswith("region") or level in half_at else widest
    computed = F32 if in_float != "never" else computed
    if widest is F64:
        result = computed = F64

    a, b = torch.full((2, 4), 3.0, dtype=dtypes[0]), torch.full((2, 4), 1.5, dtype=dtypes[1])
    found = called_at(level, where, wrap(multiply, Rule(casts, in_float)), a, b)
    assert SEEN.pop() == (computed, computed, computed)
    assert found.dtype is result
    assert torch.equal(found.double(), a.double() * b.double())


@pytest.mark.parametrize("in_float", IN_FLOAT)
@pytest.mark.parametrize("dtypes", [(F16, F16), (F16, F32)])
def test_where_half_is_computed_in_float32(in_float: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """On a device with half kernels a mix of dtypes is promoted too, and comes back in half."""
    a, b = (torch.ones(2, dtype=dtype, device="meta") for dtype in dtypes)
    in_half = in_float in ("never", "cpu") or (in_float == "mixed" and dtypes[0] is dtypes[1])

    def found() -> tuple[torch.dtype, torch.dtype]:
        return call_dtypes(True, PLACES[in_float].in_float, [a, b])

    assert called_at("O1", "inside", found) == (F16 if in_half else F32, F16)


def add_up(
    src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Stand in for PyTorch Geometric's ``scatter``, in the dtype of the rows."""
    SEEN.append((src.dtype,))
    shape = (int(index.max()) + 1 if dim_size is None else dim_size, *src.shape[1:])
    index = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    start = torch.zeros(shape, dtype=src.dtype)
    return start.scatter_reduce(0, index, src, {"add": "sum", "max": "amax"}.get(reduce, reduce))


@given(
    st.sampled_from(["O0", *HALF_OF]),
    st.sampled_from([F16, BF16, F32, F64]),
    st.sampled_from(["inside", "outside", "float_region", "half_region"]),
    st.sampled_from(["sum", "add", "max"]),
    st.booleans(),
)
def test_sums_of_any_dtype_are_made_in_float32_and_have_the_dtype_of_a_promotion(
    level: str, dtype: torch.dtype, where: str, reduce: str, named: bool
) -> None:
    rows, index = torch.linspace(1, 2, 600).view(300, 2).to(dtype), torch.arange(300) % 2
    wrapped = wrap(add_up, Rule("sums", "always"))
    SEEN.clear()

    def call(src: Tensor, index: Tensor) -> Tensor:
        if named:
            return wrapped(src=src, reduce=reduce, index=index)
        return wrapped(src, index, 0, 2, reduce)

    found = called_at(level, where, call, rows, index)
    as_by_promotion = called_at(level, where, wrap(torch.clone, Rule("promote", "always")), rows)
    assert found.dtype is as_by_promotion.dtype
    assert SEEN in ([], [(torch.promote_types(dtype, F32),)])
    exact = add_up(rows.double(), index, 0, 2, reduce)
    eps = torch.finfo(F32 if dtype is F64 else found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=4 * eps, atol=0)


def test_sums_elsewhere_than_on_the_models_device_are_left_alone() -> None:
    rows, index = torch.ones(3, 2, dtype=BF16), torch.tensor([0, 0, 1])
    assert process.devices == frozenset()
    SEEN.clear()
    assert wrap(add_up, Rule("sums", "always"))(rows, index).dtype is BF16
    assert SEEN == [(BF16,)]


# --- what is kept for backward ---


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("transform", [torch.func.vmap, None])
def test_what_is_recorded_or_transformed_keeps_nothing_in_half(
    transform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors have no memory there."""
    monkeypatch.setattr(cached_casts, "LARGE", 1)
    wrapped = wrap(lambda x: torch.tanh(x * x), Rule("promote", "always"))
    given = torch.rand(5, 3).half()

    def call() -> Tensor:
        return (transform(wrapped) if transform else torch.jit.trace(wrapped, given))(given)

    assert called_at("O1", "inside", call).equal(torch.tanh(given.float() ** 2).half())


@given(
    st.sampled_from([F16, BF16]),
    st.sampled_from([F16, BF16, F32]),
    st.booleans(),
    st.sampled_from([1, 100]),
)
def test_gradients_are_those_of_float32(
    first: torch.dtype, second: torch.dtype, recomputed: bool, large: int
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 3).to(first), torch.randn(5, 3).to(second)
    ours, theirs = ([t.detach().requires_grad_() for t in (a, b)] for _ in range(2))
    process.devices = frozenset({"cpu"})
    mode.enter_model(1, F32, first, first)
    mode.in_checkpoint = recomputed
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cached_casts, "LARGE", large)  # what is kept is in half from there on
            found = wrap(lambda x, y: torch.tanh(x * y), Rule("promote", "always"))(*ours)
    finally:
        mode.in_checkpoint = False
        mode.leave_model(1)
        process.reset()
    expected = torch.tanh(theirs[0].double() * theirs[1].double())
    found.float().square().sum().backward()
    expected.square().sum().backward()
    precision = 4 * torch.finfo(first).eps
    assert found.dtype is first
    assert found.double().allclose(expected, atol=precision, rtol=precision)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad.double().allclose(other.grad.double(), atol=8 * precision, rtol=precision)
