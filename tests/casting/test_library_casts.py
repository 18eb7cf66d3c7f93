"""What a rule casts and where it is computed, against the rules in other words; what is kept."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.casting import cached_casts
from amp_patch.casting.library_casts import CASTS, IN_FLOAT, Rule, _dtypes, wrap
from amp_patch.casting.mode import mode, process

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_OF = {"O1": F16, "O2": F16, "O3": F16, "O4": BF16, "O5": BF16}


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


def called_at(level: str, where: str, function: Any, *args: Tensor) -> Tensor:
    """Call it as if a model at this level lived, in its forward or not, or in a region."""
    from amp_patch.casting.regions import FloatRegion, HalfRegion

    half, casting = HALF_OF.get(level, F16), level in {"O1", "O4"}
    before = process.save()
    process.devices, process.region_dtype = frozenset({"cpu"}), half
    process.dtype = half if casting else F32
    try:
        if where == "inside":
            stored = half if level in {"O2", "O3", "O5"} else None
            mode.enter_model(1, half if casting else F32, half, stored)
        if where == "half_region":
            with HalfRegion():
                return function(*args)
        if where == "float_region":
            with FloatRegion():
                return function(*args)
        return function(*args)
    finally:
        mode.leave_model(1)
        process.restore(before)


@pytest.mark.parametrize("in_float", IN_FLOAT)
@pytest.mark.parametrize("dtypes", [(F16, F16), (F16, F32)])
def test_where_half_is_computed_in_float32(in_float: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """On a device with half kernels a mix of dtypes is promoted too, and comes back in half."""
    a, b = (torch.ones(2, dtype=dtype, device="meta") for dtype in dtypes)
    in_half = in_float in ("never", "cpu") or (in_float == "mixed" and dtypes[0] is dtypes[1])

    def found() -> tuple[torch.dtype, torch.dtype]:
        return _dtypes(Rule("half", in_float), [a, b])

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


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_result_is_half_where_functions_cast(amp: ModuleType, level: str) -> None:
    function = wrap(lambda x: x + torch.ones(4), Rule("result"))
    found = called_at(level, "inside", function, torch.ones(2, 4, dtype=HALF_OF.get(level, F16)))
    assert found.dtype is (HALF_OF[level] if level in ("O1", "O4") else F32)
    assert called_at(level, "float_region", function, torch.ones(2, 4)).dtype is F32


@pytest.mark.parametrize("dtype", [F16, F32, F64, torch.long])
def test_what_is_told_a_half_dtype_computes_in_float32(dtype: torch.dtype) -> None:
    def count(size: int, dtype: torch.dtype) -> Tensor:
        SEEN.append((dtype,))
        return torch.full((1,), size, dtype=dtype)

    function = wrap(count, Rule("told"))
    for found in (function(3, dtype), function(3, dtype=dtype)):
        assert found.dtype is dtype
        assert found.item() == 3
        assert SEEN.pop() == (F32 if dtype is F16 else dtype,)
    assert wrap(int, Rule("told"))("3") == 3


@pytest.mark.parametrize("dtypes", [(F16, F32), (F32, F16), (F16, BF16)])
def test_two_dtypes_promote_to_float32_and_count_in_it(dtypes: tuple[torch.dtype, ...]) -> None:
    a, b = (torch.full((2,), 60_000.0, dtype=dtype) for dtype in dtypes)
    found = called_at("O1", "inside", wrap(torch.add, Rule("told")), a, b)
    assert found.dtype is F32
    assert (found > 100_000).all()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtypes", [(F16, F16), (F16, F32), (F32, F16), (BF16, BF16)])
def test_half_weights_are_added_up_in_float32(level: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """The result has the dtype of the weights, whatever is told, and no infinite number."""

    def sums(weights: Tensor, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        SEEN.append((weights.dtype, dtype, (weights[None] @ weights[:, None]).dtype))
        return index, weights.sum()[None] * 70_000

    index = torch.tensor([0, 0])
    function = wrap(sums, Rule("told"))
    given = torch.ones(2, dtype=dtypes[0])
    same, found = called_at(level, "inside", function, given, index, dtypes[1])
    assert same is index
    assert found.dtype is dtypes[0]
    assert found.isfinite().all()
    if dtypes[0] is not F32:
        assert SEEN.pop() == (F32, F32, F32)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_loss_by_a_method_is_computed_in_float32(level: str, where: str) -> None:
    def loss(x: Tensor) -> Tensor:
        return 1 - torch.sigmoid(x * 1.0)

    process_is_mixed = level != "O0"

    def called() -> Tensor:
        process.is_mixed = process_is_mixed
        return wrap(loss, Rule("loss"))(torch.full((1,), 9.0, dtype=F16))

    found = called_at(level, where, called)
    assert found.dtype is (F32 if process_is_mixed else F16)
    assert bool(found > 0) is process_is_mixed


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


def test_out_is_written_to_where_it_comes_by_its_place() -> None:
    def add(a: Tensor, out: Tensor | None = None, times: int = 1) -> Tensor:
        return torch.mul(a, times, out=out)

    out = torch.zeros(2)
    half = torch.ones(2, dtype=F16)
    function = wrap(add, Rule("promote", "always"))
    assert called_at("O2", "inside", function, half.float(), out) is out
    assert torch.equal(out, torch.ones(2))
    assert called_at("O2", "inside", function, half, None).dtype is F16


def test_torchscript_compiles_the_original() -> None:
    assert wrap(multiply, Rule("half")).__prepare_scriptable__() is multiply


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


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix_norm": lambda w: torch.linalg.matrix_norm(w, 2),
    "matrix_norm, nuclear": lambda w: torch.linalg.matrix_norm(w, ord="nuc"),
    "norm": lambda w: torch.norm(w, "nuc"),
    "method": lambda w: w.norm("nuc"),
    "nuclear_norm": lambda w: torch.nuclear_norm(w),
}


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.filterwarnings("ignore:at..nuclear_norm is deprecated")
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_half_matrices_are_float32_s(amp: ModuleType, level: str, name: str) -> None:
    """In the model, for a penalty in its forward, and beside it."""

    class Penalized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean() + NORMS[name](self.weight)

    model = amp.initialize(Penalized(4, 4), opt_level=level, loss_scale=1.0, verbosity=0)
    wide = model.weight.detach().float().requires_grad_()
    NORMS[name](wide).backward()
    for loss in (model(torch.zeros(1, 4)), NORMS[name](model.weight)):
        model.weight.grad = None
        loss.backward()
        torch.testing.assert_close(model.weight.grad.float(), wide.grad, rtol=0.02, atol=0.01)
