"""The fused operations against float64 arithmetic of numpy, over drawn lists of tensors.

One table for the reference, for the CUDA kernels as the CPU runs their text, and for a GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu.launcher import EmulatedModules
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch import kernels
from amp_patch.kernels import cuda_kernels, cuda_module, torch_comparison, torch_kernels
from amp_patch.kernels.torch_kernels import GradCheck

INF, NAN = float("inf"), float("nan")
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*REAL, torch.complex64, torch.complex128)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4), (33,))
POWERS = st.integers(-24, 24).map(lambda power: 2.0**power)
SEEDS = st.integers(0, 2**16)
SCALES = POWERS | st.sampled_from([3.0, 1000.0, 0.7])


@dataclass(frozen=True)
class Operations:
    """An implementation, and the device that it is tested on."""

    module: ModuleType
    device: torch.device

    def place(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Move tensors, with their strides."""
        if self.device.type == "cpu":
            return list(tensors)
        return [
            tensor.to(self.device)
            if tensor.is_sparse
            else torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            ).copy_(tensor)
            for tensor in tensors
        ]

    def unscale(
        self, sources: list[Tensor], targets: list[Tensor], scale: float | Tensor
    ) -> GradCheck:
        check = self.module.Unscale(sources, targets).run(sources, targets, scale)
        assert isinstance(check, self.module.GradCheck)
        return check


@pytest.fixture(
    scope="module",
    params=["torch", "cuda on cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def ops(request: pytest.FixtureRequest) -> Iterator[Operations]:
    if request.param == "torch":
        yield Operations(torch_kernels, torch.device("cpu"))
    elif request.param == "cuda":
        pytest.importorskip("cupy")
        device = torch.device("cuda", 0)
        assert cuda_module.modules.can_launch(["unscale.cu"], device), cuda_module.modules.failure
        with device:
            yield Operations(cuda_kernels, device)
    else:
        with pytest.MonkeyPatch.context() as patch:
            modules = EmulatedModules(request.config)
            patch.setattr(cuda_module, "modules", modules)
            yield Operations(cuda_kernels, torch.device("cpu"))
            assert modules.launched


@pytest.fixture
def wide_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def normal(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def laid_out(kind: tuple[torch.dtype, tuple[int, ...], str], seed: int) -> Tensor:
    """Make normal numbers times a power of 2, which the seed chooses, too."""
    dtype, shape, layout = kind
    magnitude = 2.0 ** (seed % 17 - 8)
    if layout == "transposed":
        values = normal(shape[::-1], seed).permute(tuple(reversed(range(len(shape)))))
        return (values * magnitude).to(dtype)
    if layout == "strided" and shape:
        values = normal((*shape[:-1], 2 * shape[-1]), seed)
        return (values * magnitude).to(dtype)[..., ::2]
    return (normal(shape, seed) * magnitude).to(dtype)


def tensors(dtypes: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[Tensor]:
    """Draw a tensor of normal magnitudes: dense, transposed or a strided view."""
    kinds = list(product(dtypes, SHAPES, ("contiguous", "transposed", "strided")))
    return st.builds(laid_out, st.sampled_from(kinds), SEEDS)


def sparse(rows: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Make a sparse gradient as an embedding writes it."""
    indices = torch.tensor([rows], dtype=torch.long, device="cpu").reshape(1, -1)
    values = normal((len(rows), 3), seed).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (5, 3), check_invariants=True)


def sparse_tensors(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Tensor]:
    """Draw a sparse gradient, some of its rows twice."""
    rows = st.lists(st.integers(0, 4), max_size=6)
    return st.builds(sparse, rows, st.sampled_from(dtypes), SEEDS)


def write(grads: list[Tensor], places: list[tuple[int, float, float]]) -> list[Tensor]:
    """Write values at these shares of the lengths of gradients of these indices."""
    for index, share, value in places if grads else ():
        flat = numbers(grads[index % len(grads)])
        if flat.numel():
            flat[np.unravel_index(int(share * flat.numel()), flat.shape)] = value
    return grads


def with_bad_values(grads: st.SearchStrategy[list[Tensor]]) -> st.SearchStrategy[list[Tensor]]:
    """Write inf and NaN at drawn places of the gradients."""
    share, value = st.floats(0, 1, exclude_max=True), st.sampled_from([INF, -INF, NAN])
    places = st.lists(st.tuples(st.integers(0, 5), share, value), max_size=4)
    return st.builds(write, grads, places)


GRADS = st.lists(tensors() | sparse_tensors(REAL), max_size=6)
GRADS_WITH_BAD_VALUES = with_bad_values(GRADS)


def numbers(tensor: Tensor) -> Tensor:
    """Return the dense real tensor in which a test may write."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def doubles(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return all numbers of a tensor, widened to float64."""
    return numbers(tensor).detach().double().cpu().numpy().copy()


def copies(grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad.clone() for grad in grads]


def rounded(values: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    real = torch.empty((), dtype=dtype).real.dtype if dtype.is_complex else dtype
    return torch.as_tensor(values).to(real)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the result and one of the fp32 inverse."""
    unit = torch.finfo(dtype).eps
    return {"rtol": max(unit, 2.0**-23), "atol": torch.finfo(dtype).smallest_normal}


def kinds_in(values: np.ndarray[Any, Any]) -> str:
    kinds = [("inf", np.isinf(values).any()), ("NaN", np.isnan(values).any())]
    return " and ".join(name for name, there in kinds if there)


# --- unscale ---


@given(GRADS_WITH_BAD_VALUES, SCALES)
def test_unscale_in_place_divides_and_flags(
    ops: Operations, grads: list[Tensor], scale: float
) -> None:
    grads = ops.place(grads)
    before = [doubles(grad) for grad in grads]
    check = ops.unscale(grads, grads, scale)
    after = [doubles(grad) for grad in grads]
    for grad, old in zip(grads, before, strict=True):
        expected = rounded(old / scale, grad.dtype)
        torch.testing.assert_close(
            numbers(grad), expected, equal_nan=True, **tolerance(expected.dtype)
        )
    expected_kinds = [(i, kinds_in(new)) for i, new in enumerate(after) if kinds_in(new)]
    assert check.nonfinite() == expected_kinds
    assert check.overflow == bool(expected_kinds)
    assert all(ours is given for ours, given in zip(check.grads, grads, strict=True))


@given(with_bad_values(st.lists(tensors(REAL[:3]), max_size=6)), SCALES)
def test_unscale_into_fp32_loses_nothing(
    ops: Operations, grads: list[Tensor], scale: float
) -> None:
    grads = ops.place(grads)
    before = copies(grads)
    masters = [torch.full_like(grad, 77.0, dtype=torch.float32) for grad in grads]
    check = ops.unscale(grads, masters, scale)
    inverse = np.float64(np.float32(1.0 / np.float64(np.float32(scale))))
    for grad, old, master in zip(grads, before, masters, strict=True):
        assert torch.equal(numbers(grad).nan_to_num(1.0), numbers(old).nan_to_num(1.0))
        expected = rounded(doubles(old) * inverse, torch.float32)
        torch.testing.assert_close(master, expected, rtol=0, atol=0, equal_nan=True)
    assert check.overflow == any(kinds_in(doubles(grad)) for grad in grads)


@given(st.lists(sparse_tensors(REAL[:2]), min_size=1, max_size=3), POWERS)
def test_unscale_receives_a_sparse_gradient(
    ops: Operations, grads: list[Tensor], scale: float
) -> None:
    grads = ops.place(grads)
    masters = [grad.to(torch.float32) for grad in grads]
    numbers(masters[0]).zero_()
    check = ops.unscale(grads, masters, scale)
    for grad, master in zip(grads, masters, strict=True):
        expected = rounded(doubles(grad) / scale, torch.float32)
        assert torch.equal(numbers(master), expected)
    assert not check.overflow


def test_fp16_that_would_flush_to_zero_survives_in_fp32(ops: Operations) -> None:
    grad = torch.tensor([2.0**-24], dtype=torch.float16)
    master = torch.empty(1)
    ops.unscale([grad], [master], 2.0**16)
    assert master.item() == 2.0**-40


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 4e4), (torch.float32, 3e38)])
def test_what_overflows_only_when_unscaled_is_flagged(
    ops: Operations, dtype: torch.dtype, value: float, on_device: bool
) -> None:
    grad = torch.tensor([1.0, value], dtype=dtype)
    check = ops.unscale([grad], [grad], torch.tensor(2.0**-4) if on_device else 2.0**-4)
    assert check.overflow
    assert check.nonfinite() == [(0, "inf")]


def test_bfloat16_that_overflows_only_in_its_master_is_flagged(ops: Operations) -> None:
    grad, master = torch.tensor([3e38], dtype=torch.bfloat16), torch.empty(1)
    assert ops.unscale([grad], [master], 0.5).overflow


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_unscale_tells_inf_from_nan(ops: Operations, scale: float) -> None:
    bad = [[1.0, 2.0], [INF, 1.0], [NAN, 1.0], [-INF, NAN]]
    grads = [torch.tensor(values) for values in bad]
    check = ops.unscale(grads, grads, scale)
    assert check.nonfinite() == [(1, "inf"), (2, "NaN"), (3, "inf and NaN")]


def test_a_clean_list_after_a_bad_one_is_clean(ops: Operations) -> None:
    assert ops.unscale([torch.tensor([NAN])], [torch.empty(1)], 2.0).overflow
    assert not ops.unscale([torch.tensor([1.0])], [torch.empty(1)], 2.0).overflow


@given(GRADS_WITH_BAD_VALUES, GRADS_WITH_BAD_VALUES, SCALES)
def test_unscale_again_is_that_of_other_values(
    ops: Operations, first: list[Tensor], second: list[Tensor], scale: float
) -> None:
    first, second = ops.place(first), ops.place(second)
    kinds = [torch.empty_like(grad) for grad in second]
    expected = copies(second)
    check = ops.unscale(expected, expected, scale)
    again = ops.module.Unscale(kinds, kinds)
    for grads in (copies(second), second):
        ours = again.run(grads, grads, scale)
        assert (ours.overflow, ours.nonfinite()) == (check.overflow, check.nonfinite())
    for grad, other in zip(second, expected, strict=True):
        assert torch.equal(numbers(grad).nan_to_num(7.0), numbers(other).nan_to_num(7.0))


@given(st.sampled_from([1.0, INF, NAN]), st.sampled_from([0.5, 2.0]))
def test_unscale_multiplies_and_checks_the_memory_that_targets_share(
    ops: Operations, value: float, scale: float
) -> None:
    sources = [torch.tensor([value, 2.0]).half(), torch.tensor([3.0]).half()]
    memory = torch.zeros(4)
    targets = [memory[:2], memory[3:]]
    check = ops.module.Unscale(sources, targets).run(sources, targets, scale, [memory])
    expected = torch.tensor([value / scale, 2.0 / scale, 0.0, 3.0 / scale])
    torch.testing.assert_close(memory, expected, rtol=0, atol=0, equal_nan=True)
    assert check.overflow == (value != 1.0)
    assert [index for index, _ in check.nonfinite()] == [0] * (value != 1.0)


def test_flags_norms_and_factors_are_float32_whatever_the_default_dtype(
    ops: Operations, wide_default: None
) -> None:
    for scale in (2.0, torch.tensor(2.0, dtype=torch.float32)):
        grads = [torch.tensor([1.0, value], dtype=torch.float32) for value in (3.0, INF)]
        for clean, some in ((True, grads[:1]), (False, grads)):
            check = ops.unscale(some, some, scale)
            assert [flag.dtype for flag in check.found_inf] == [torch.float32]
            assert check.overflow != clean
        assert grads[0].tolist() == [0.25, 0.75]
    grads = [torch.full((4,), 3.0, dtype=torch.float32)]
    for some, norm in ((grads, 6.0), ([], 0.0)):
        total = ops.module.clip_by_norm(some, 2.0, 2.0)
        assert (total.item(), total.dtype) == (norm, torch.float32)
    torch.testing.assert_close(grads[0], torch.ones(4, dtype=torch.float32))


def test_unscale_of_nothing_finds_nothing(ops: Operations) -> None:
    check = ops.unscale([], [], 4.0)
    assert (check.overflow, check.nonfinite(), check.grads) == (False, [], [])


@given(GRADS_WITH_BAD_VALUES, SCALES, st.booleans())
def test_a_scale_in_a_tensor_is_as_one_in_a_number(
    ops: Operations, grads: list[Tensor], scale: float, into_fp32: bool
) -> None:
    grads = ops.place(grads)
    targets = [
        grad.to(torch.float32) if into_fp32 and not grad.is_complex() else grad.clone()
        for grad in grads
    ]
    expected = copies(targets)
    check = ops.unscale(copies(grads), expected, scale)
    ours = ops.unscale(grads, targets, torch.tensor(scale))
    assert (ours.overflow, ours.nonfinite()) == (check.overflow, check.nonfinite())
    for target, other in zip(targets, expected, strict=True):
        assert torch.equal(numbers(target).nan_to_num(7.0), numbers(other).nan_to_num(7.0))


@given(GRADS, SCALES)
def test_the_norm_of_a_check_is_that_of_what_was_unscaled(
    ops: Operations, grads: list[Tensor], scale: float
) -> None:
    grads = ops.place(grads)
    check = ops.unscale(grads, grads, scale)
    # entries of one index of a sparse tensor count as their sum, so a norm in half is not exact
    dense = [grad.to(torch.complex128).to_dense().cpu().numpy().ravel() for grad in grads]
    expected = np.linalg.norm(np.abs(np.concatenate([np.zeros(1), *dense])))
    norm = check.norm()
    assert norm.shape == ()
    if np.isfinite(expected) and expected < 1e18:
        assert norm.item() == pytest.approx(expected, rel=1e-5, abs=1e-18)


def test_a_number_scale_is_rounded_as_a_multiplied_loss_is(ops: Operations) -> None:
    scale = 65536.3  # its inverse is another one once it is rounded
    grad, inverse = torch.ones(1), (1.0 / torch.tensor(scale).double()).float()
    assert inverse.item() != torch.tensor(1.0 / scale).item()
    ops.unscale([grad], [grad], scale)
    assert grad.item() == inverse.item()


def test_what_is_written_counts_as_written(ops: Operations) -> None:
    grad, target, half = torch.ones(3), torch.zeros(3), torch.zeros(3).half()
    versions = [one._version for one in (grad, target, half)]
    ops.unscale([grad], [target], 2.0)
    ops.module.Cast([grad], [half]).run()
    ops.module.accumulate([target], [grad])
    assert grad._version == versions[0]
    assert target._version > versions[1] + 1
    assert half._version > versions[2]


# --- accumulate and cast ---


@given(st.lists(tensors(), max_size=6))
def test_accumulate_adds(ops: Operations, targets: list[Tensor]) -> None:
    targets = ops.place(targets)
    others = [torch.randn_like(target) for target in targets]
    expected = [target + other for target, other in zip(targets, others, strict=True)]
    sums = [doubles(t) + doubles(o) for t, o in zip(targets, others, strict=True)]
    ops.module.accumulate(targets, others)
    for target, by_torch, by_numpy in zip(targets, expected, sums, strict=True):
        assert torch.equal(target, by_torch)
        exact = rounded(by_numpy, target.dtype)
        torch.testing.assert_close(numbers(target), exact, **tolerance(exact.dtype))


def test_accumulate_adds_half_to_fp32_in_fp32(ops: Operations) -> None:
    target, other = torch.tensor([1.0]), torch.tensor([2.0**-20], dtype=torch.float16)
    ops.module.accumulate([target], [other])
    assert target.item() == 1.0 + 2.0**-20


@given(st.lists(tensors(REAL), max_size=6), st.lists(st.sampled_from(REAL), min_size=6))
def test_cast_rounds_once(
    ops: Operations, sources: list[Tensor], dtypes: list[torch.dtype]
) -> None:
    sources = ops.place(sources)
    targets = [
        torch.full_like(source, 5.0, dtype=dtype)
        for source, dtype in zip(sources, dtypes, strict=False)
    ]
    cast = ops.module.Cast(sources, targets)
    cast.run()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, rounded(doubles(source), target.dtype).reshape(target.shape))
        source.mul_(2)
    cast.run()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(target.dtype))


def test_empty_lists_are_all_right(ops: Operations) -> None:
    ops.module.accumulate([], [])
    ops.module.Cast([], []).run()


# --- clip_by_norm ---


@given(GRADS, st.sampled_from([0.01, 1.0, 1e6]), st.sampled_from([1.0, 2.0, 3.5, INF]))
def test_clip_by_norm_is_that_of_the_dense_gradients(
    ops: Operations, grads: list[Tensor], max_norm: float, norm_type: float
) -> None:
    grads = ops.place(grads)
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
    before = [grad.to(torch.complex128, copy=True).cpu().numpy().ravel() for grad in dense]
    everything = np.abs(np.concatenate([np.zeros(1), *before]))
    expected = np.linalg.norm(everything, norm_type)
    total = ops.module.clip_by_norm(grads, max_norm, norm_type)
    assert total.shape == ()
    assert total.item() == pytest.approx(expected, rel=2e-2 if has_half_sparse(grads) else 1e-5)
    factor = min(1.0, max_norm / (total.item() + 1e-6))
    for grad, old in zip(grads, before, strict=True):
        new = grad.to_dense() if grad.is_sparse else grad
        torch.testing.assert_close(
            new.to(torch.complex128).flatten(),
            torch.as_tensor(old * factor),
            rtol=3e-2 if grad.is_sparse else 2 * torch.finfo(grad.dtype).eps + 1e-6,
            atol=2e-2 if grad.is_sparse else 1e-6,
        )


def has_half_sparse(grads: Sequence[Tensor]) -> bool:
    # to_dense() of the reference adds the entries of one row in half
    return any(grad.is_sparse and grad.dtype in REAL[:2] for grad in grads)


@given(
    st.lists(tensors(REAL[:3]).filter(lambda t: t.numel() > 0), min_size=1, max_size=6),
    st.sampled_from([0.01, 1.0, 1e6]),
    st.sampled_from([1.0, 2.0, INF]),
)
def test_clip_by_norm_is_torchs_clip_grad_norm(
    ops: Operations, grads: list[Tensor], max_norm: float, norm_type: float
) -> None:
    grads = ops.place(grads)
    # torch takes the norm of half gradients in half, so it gets them in fp32
    params = [torch.zeros(grad.shape) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(torch.float32, copy=True)
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, foreach=False)
    total = ops.module.clip_by_norm(grads, max_norm, norm_type)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for grad, param in zip(grads, params, strict=True):
        torch.testing.assert_close(grad, param.grad.to(grad.dtype))


def test_the_norm_of_half_gradients_is_taken_in_fp32(ops: Operations) -> None:
    grads = [torch.full((10000,), 60000.0, dtype=torch.float16)]
    assert ops.module.clip_by_norm(grads, 1e9, 2.0).item() == pytest.approx(
        float(grads[0][0]) * 100, rel=1e-5
    )


def test_a_factor_too_small_for_half_does_not_clear_half_gradients(ops: Operations) -> None:
    grads = [torch.full((4,), 60000.0, dtype=torch.float16), torch.full((1,), 1e12)]
    ops.module.clip_by_norm(grads, 2.0**18, 2.0)
    assert grads[0].tolist() == [pytest.approx(60000 * 2.0**18 / 1e12, rel=1e-3)] * 4


def test_the_norm_is_float64_where_a_gradient_is(ops: Operations) -> None:
    grads = [torch.ones(1, dtype=torch.float64) * (1 + 1e-12), torch.zeros(1)]
    assert ops.module.clip_by_norm(grads, 9.0, 2.0).item() == 1 + 1e-12


def test_the_norm_of_nothing_is_zero(ops: Operations) -> None:
    assert ops.module.clip_by_norm([], 1.0, 2.0).item() == 0.0
    assert ops.module.clip_by_norm([torch.ones(0)], 1.0, INF).item() == 0.0


@given(GRADS, st.sampled_from([0.01, 1.0, 1e6]), st.floats(0.1, 10.0))
def test_clip_by_a_known_norm_does_not_take_it(
    ops: Operations, grads: list[Tensor], max_norm: float, norm: float
) -> None:
    grads = ops.place(grads)
    before = copies(grads)
    known = torch.tensor(norm)
    assert ops.module.clip_by_norm(grads, max_norm, 2.0, known) is known
    factor = min(1.0, max_norm / (known.item() + 1e-6))
    for grad, old in zip(grads, before, strict=True):
        expected = rounded(doubles(old) * factor, grad.dtype)
        # the factor has two roundings in fp32
        rtol = 2 * torch.finfo(expected.dtype).eps + 1e-6
        torch.testing.assert_close(numbers(grad), expected, rtol=rtol, atol=1e-6)


# --- Comparison and alike ---


Pair = tuple[list[Tensor], list[Tensor]]


def copied_to(sources: list[Tensor], dtypes: list[torch.dtype]) -> Pair:
    return sources, [s.to(dtype, copy=True) for s, dtype in zip(sources, dtypes, strict=False)]


COPIED = st.builds(
    copied_to,
    st.lists(tensors(REAL), max_size=8),
    st.lists(st.sampled_from(REAL), min_size=8, max_size=8),
)


@given(COPIED, st.data())
def test_comparison_sees_every_written_element(
    ops: Operations, pair: Pair, data: st.DataObject
) -> None:
    sources, made = map(ops.place, pair)
    comparison = ops.module.Comparison(sources, made)
    assert not comparison.differs()
    filled = [index for index, tensor in enumerate(made) if tensor.numel()]
    if not filled:
        return
    index = data.draw(st.sampled_from(filled))
    written = data.draw(st.sampled_from([sources, made]))[index]
    where = np.unravel_index(data.draw(st.integers(0, written.numel() - 1)), written.shape)
    old = written[where].clone()
    written[where] = old * 2 + 1 if abs(old + 1) > 0.01 else 5.0
    assert comparison.differs()
    written[where] = old
    assert not comparison.differs()


def test_comparison_of_large_tensors_sees_the_last_element(ops: Operations) -> None:
    source = torch.zeros(torch_comparison._TOGETHER + 1)
    half = source.half()
    comparison = ops.module.Comparison([source, torch.zeros(2)], [half, torch.zeros(2).half()])
    assert not comparison.differs()
    half[-1] = 1.0
    assert comparison.differs()


def test_comparison_sees_nan_as_equal_to_itself(ops: Operations) -> None:
    source = torch.tensor([NAN])
    half = source.half()
    comparison = ops.module.Comparison([source], [half])
    assert not comparison.differs()
    half[0] = 1.0
    assert comparison.differs()


@given(COPIED, st.data())
def test_comparison_after_a_note_sees_what_is_written_to_a_copy(
    ops: Operations, pair: Pair, data: st.DataObject
) -> None:
    sources, made = map(ops.place, pair)
    comparison = ops.module.Comparison(sources, made)
    for source, copy in zip(sources, made, strict=True):
        source.mul_(-2).add_(1)
        copy.copy_(source)
    comparison.note_equal()
    assert not comparison.differs()
    for copy in made:
        if copy.numel():
            where = np.unravel_index(data.draw(st.integers(0, copy.numel() - 1)), copy.shape)
            old = copy[where].clone()
            copy[where] = 5.0 if old != 5.0 else 6.0
            assert comparison.differs()
            copy[where] = old
            assert not comparison.differs()


@pytest.mark.parametrize("gap", [0, 1, 100])
def test_comparison_reads_copies_that_share_a_memory_at_once(ops: Operations, gap: int) -> None:
    memory = torch.zeros(20 + gap).half()
    made = [memory[:8].view(2, 4), memory[10:20]]
    sources = [torch.randn_like(copy, dtype=torch.float32) for copy in made]
    for source, copy in zip(sources, made, strict=True):
        copy.copy_(source)
    comparison = ops.module.Comparison(sources, made)
    comparison.note_equal()
    # a memory that holds much else is not read as a whole
    assert [len(part) for part in comparison._together] == [2 if gap == 100 else 1]
    for element in (made[0][1, 3], made[1][9]):
        old = element.clone()
        element.add_(1)
        assert comparison.differs()
        element.copy_(old)
        assert not comparison.differs()


@given(COPIED, st.lists(st.booleans(), min_size=8, max_size=8), st.data())
def test_reconcile_lets_one_of_the_two_follow(
    ops: Operations,
    pair: Pair,
    wins: list[bool],
    data: st.DataObject,
) -> None:
    sources, made = map(ops.place, pair)
    wins = wins[: len(made)]
    comparison = ops.module.Comparison(sources, made)
    if data.draw(st.booleans()):
        comparison.note_equal()
    for copy in made:
        if copy.numel() and data.draw(st.booleans()):
            where = np.unravel_index(data.draw(st.integers(0, copy.numel() - 1)), copy.shape)
            copy[where] = data.draw(st.sampled_from([3.0, -0.0, INF]))
    expected = []
    for source, copy, win in zip(sources, made, wins, strict=True):
        same = bits(source.to(copy.dtype)) == bits(copy)
        exact = source if win else torch.where(same, source, copy.to(source.dtype))
        expected.append((exact.clone(), exact.to(copy.dtype)))
    differs = comparison.reconcile(lambda: wins)
    assert differs in (False, True)
    for source, copy, (exact, rounded_one) in zip(sources, made, expected, strict=True):
        assert torch.equal(bits(source), bits(exact))
        assert torch.equal(bits(copy), bits(rounded_one))
    assert not comparison.differs()


@pytest.mark.parametrize("wins", [False, True])
def test_reconcile_tells_zeros_of_different_signs_apart(ops: Operations, wins: bool) -> None:
    source, copy = torch.tensor([-1e-30, 1e-30]), torch.tensor([0.0, -0.0]).half()
    ops.module.Comparison([source], [copy]).reconcile(lambda: [wins])
    assert (source != 0).tolist() == [wins, wins]
    assert source.signbit().tolist() == copy.signbit().tolist() == [wins, not wins]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def test_the_reference_asks_who_wins_only_where_something_differs() -> None:
    source, copy = torch.ones(3), torch.ones(3).half()
    comparison = torch_kernels.Comparison([source], [copy])
    assert comparison.reconcile(lambda: pytest.fail("asked")) is False
    copy[1] = 2.0
    assert comparison.reconcile(lambda: [False]) is True
    assert source.tolist() == [1.0, 2.0, 1.0]


@given(COPIED)
def test_alike_keeps_rows_together(pair: Pair) -> None:
    sources, made = pair
    rows = set()
    for ours, theirs in kernels.alike(sources, made):
        assert len({tensor.dtype for tensor in ours}) == 1
        assert len({tensor.dtype for tensor in theirs}) == 1
        rows |= {(id(a), id(b)) for a, b in zip(ours, theirs, strict=True)}
    assert rows == {(id(a), id(b)) for a, b in zip(sources, made, strict=True)}
