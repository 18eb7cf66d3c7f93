"""amp_C: every operation against its published formula in float64, flags and in-place writes."""

from __future__ import annotations

import importlib
import pickle
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHARES_APEX = True
SHAPES = st.lists(
    st.sampled_from([(), (1,), (0,), (3, 4), (7,), (2, 3, 4, 2)]), min_size=1, max_size=4
)
DTYPES = st.sampled_from([F16, BF16, F32])
SEEDS = st.integers(0, 2**32)
ONE_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
# Of one rounding to the dtype, twice over.
TOLERANCE = {F16: 2e-3, BF16: 1.6e-2, F32: 2e-5, F64: 1e-10}


@pytest.fixture
def amp_C(apex: types.ModuleType) -> Iterator[Any]:
    return importlib.import_module("amp_C")


def flag(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def drawn(seed: int, *columns: tuple[list[Any], torch.dtype]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        for shapes, dtype in columns
    ]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def near(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        tolerance = TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


class TestScale:
    @ONE_FIXTURE
    @given(shapes=SHAPES, dtypes=st.tuples(DTYPES, DTYPES), seed=SEEDS, data=st.data())
    def test_it_multiplies(
        self, amp_C: Any, shapes: Any, dtypes: Any, seed: int, data: st.DataObject
    ) -> None:
        scale = data.draw(st.sampled_from([1.0, 0.3, 4.0, 2.0**-16]))
        sources, targets = drawn(seed, (shapes, dtypes[0]), (shapes, dtypes[1]))
        noop = flag()
        amp_C.multi_tensor_scale(65536, noop, [sources, targets], scale)
        near(targets, [source.double() * scale for source in sources])
        assert noop.tolist() == [0]

    @pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
    @pytest.mark.parametrize("dtype", [F16, BF16, F32])
    def test_what_is_not_finite_is_written_and_flagged(
        self, amp_C: Any, bad: float, dtype: torch.dtype
    ) -> None:
        sources = [torch.ones(5, dtype=dtype), torch.ones(3, dtype=dtype)]
        sources[1][2] = bad
        targets = [torch.zeros(5), torch.zeros(3)]
        noop = flag()
        amp_C.multi_tensor_scale(65536, noop, [sources, targets], 0.5)
        assert noop.tolist() == [1]
        expected = torch.tensor([0.5, 0.5, bad])
        torch.testing.assert_close(targets[1], expected, equal_nan=True)
        assert targets[0].tolist() == [0.5] * 5

    def test_a_set_flag_stops_nothing_and_stays(self, amp_C: Any) -> None:
        tensors, noop = [torch.ones(3)], flag(1)
        amp_C.multi_tensor_scale(65536, noop, [tensors, tensors], 2.0)
        assert (tensors[0].tolist(), noop.tolist()) == ([2.0] * 3, [1])

    def test_a_result_that_overflows_is_not_flagged(self, amp_C: Any) -> None:
        noop = flag()
        target = [torch.zeros(1, dtype=F16)]
        amp_C.multi_tensor_scale(65536, noop, [[torch.full((1,), 60000.0)], target], 2.0)
        assert (target[0].item(), noop.item()) == (float("inf"), 0)


class TestAxpby:
    @ONE_FIXTURE
    @given(shapes=SHAPES, dtypes=st.tuples(DTYPES, DTYPES, DTYPES), seed=SEEDS)
    def test_it_adds(self, amp_C: Any, shapes: Any, dtypes: Any, seed: int) -> None:
        xs, ys, sums = drawn(seed, *((shapes, dtype) for dtype in dtypes))
        noop = flag()
        amp_C.multi_tensor_axpby(65536, noop, [xs, ys, sums], 0.25, -3.0, -1)
        near(sums, [0.25 * x - 3.0 * y for x, y in zip(exact(xs), exact(ys), strict=True)])
        assert noop.tolist() == [0]

    @pytest.mark.parametrize("bad", [float("inf"), float("nan")])
    @pytest.mark.parametrize(
        ("checked", "where", "flagged"),
        [(-1, 0, 1), (-1, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)],
    )
    def test_only_the_argument_to_check_is_flagged(
        self, amp_C: Any, bad: float, checked: int, where: int, flagged: int
    ) -> None:
        lists = [[torch.ones(4)], [torch.ones(4)]]
        lists[where][0][3] = bad
        noop = flag()
        out = [torch.zeros(4)]
        amp_C.multi_tensor_axpby(65536, noop, [*lists, out], 1.0, 1.0, checked)
        assert noop.item() == flagged
        assert not torch.isfinite(out[0][3])
        assert out[0][:3].tolist() == [2.0] * 3


class TestNorms:
    @ONE_FIXTURE
    @given(shapes=SHAPES, dtypes=st.lists(DTYPES, min_size=4, max_size=4), seed=SEEDS)
    def test_of_all_and_of_each(self, amp_C: Any, shapes: Any, dtypes: Any, seed: int) -> None:
        tensors = [
            drawn(seed + i, ([s], d))[0][0]
            for i, (s, d) in enumerate(zip(shapes, dtypes, strict=False))
        ]
        each = torch.stack([tensor.double().square().sum().sqrt() for tensor in tensors])
        for name in ("multi_tensor_l2norm", "multi_tensor_l2norm_mp"):
            noop = flag()
            total, found = getattr(amp_C, name)(65536, noop, [tensors], True)
            near([total, found], [each.square().sum().sqrt().reshape(1), each])
            assert (total.dtype, total.shape, found.shape) == (F32, (1,), (len(tensors),))
            assert noop.tolist() == [0]

    def test_of_each_is_empty_where_not_asked_for(self, amp_C: Any) -> None:
        total, each = amp_C.multi_tensor_l2norm(65536, flag(), [[torch.ones(4)]], False)
        assert (total.tolist(), each.tolist()) == ([2.0], [])

    def test_squares_beyond_fp16_do_not_overflow(self, amp_C: Any) -> None:
        noop = flag()
        total, _ = amp_C.multi_tensor_l2norm(65536, noop, [[torch.full((4,), 6e4).half()]], False)
        assert (total.item(), noop.item()) == (120000.0, 0)

    @pytest.mark.parametrize("bad", [float("inf"), float("nan")])
    def test_what_is_not_finite_is_flagged(self, amp_C: Any, bad: float) -> None:
        noop = flag()
        total, _ = amp_C.multi_tensor_l2norm(65536, noop, [[torch.tensor([1.0, bad])]], False)
        assert noop.tolist() == [1]
        assert not torch.isfinite(total).any()

    def test_a_set_flag_makes_them_0_with_mp_only(self, amp_C: Any) -> None:
        lists = [[torch.ones(4)]]
        assert amp_C.multi_tensor_l2norm(65536, flag(1), lists, True)[0].item() == 2.0
        total, each = amp_C.multi_tensor_l2norm_mp(65536, flag(1), lists, True)
        assert (total.tolist(), each.tolist()) == ([0.0], [0.0])

    def test_scale_writes_and_returns_the_norm_before(self, amp_C: Any) -> None:
        sources, targets = [torch.ones(4)], [torch.zeros(4, dtype=F16)]
        total, each = amp_C.multi_tensor_l2norm_scale(65536, flag(), [sources, targets], 3.0, True)
        assert (total.item(), each.tolist(), targets[0].tolist()) == (2.0, [2.0], [3.0] * 4)

    def test_unscale_multiplies_the_norm_alone(self, amp_C: Any) -> None:
        tensors, inverse = [torch.ones(4), torch.full((1,), 2.0)], torch.tensor([0.5])
        total, each = amp_C.multi_tensor_unscale_l2norm(65536, flag(), [tensors], inverse, True)
        assert each.tolist() == [1.0, 1.0]
        torch.testing.assert_close(total, torch.tensor([2.0**0.5]))
        assert tensors[1].item() == 2.0

    def test_nothing_has_norm_0(self, amp_C: Any) -> None:
        assert amp_C.multi_tensor_l2norm(65536, flag(), [[]], True)[0].tolist() == [0.0]


BETAS = st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.5)])
NUMBERS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([2.0**-10, 2.0**-4]),
        "betas": BETAS,
        "eps": st.sampled_from([1e-8, 1e-2]),
        "step": st.sampled_from([1, 2, 500]),
        "decay": st.sampled_from([0.0, 0.01, 0.5]),
        "mode": st.sampled_from([0, 1]),
        "correct": st.sampled_from([0, 1]),
    }
)


def corrected(n: dict[str, Any]) -> tuple[float, float]:
    beta1, beta2 = n["betas"]
    return (1 - beta1 ** n["step"], 1 - beta2 ** n["step"]) if n["correct"] else (1.0, 1.0)


def adam(g: Tensor, p: Tensor, m: Tensor, v: Tensor, n: dict[str, Any]) -> tuple[Tensor, ...]:
    """Kingma & Ba 2015, algorithm 1, and Loshchilov & Hutter 2019, algorithm 2."""
    (beta1, beta2), (c1, c2) = n["betas"], corrected(n)
    if n["mode"] == 0:
        g = g + n["decay"] * p
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = (m / c1) / ((v / c2).sqrt() + n["eps"])
    if n["mode"] == 1:
        update = update + n["decay"] * p
    return p - n["lr"] * update, m, v


def state(seed: int, shapes: list[Any], *dtypes: torch.dtype) -> list[list[Tensor]]:
    """Gradients, parameters, averages and, never negative, averages of squares."""
    columns = drawn(seed, *((shapes, dtype) for dtype in dtypes))
    for tensor in columns[3] if len(columns) > 3 else ():
        tensor.abs_()
    return columns


class TestAdam:
    @ONE_FIXTURE
    @given(
        shapes=SHAPES,
        dtypes=st.tuples(DTYPES, DTYPES, DTYPES, DTYPES),
        numbers=NUMBERS,
        seed=SEEDS,
        capturable=st.booleans(),
        turned=st.booleans(),
    )
    def test_it_follows_the_formula(
        self,
        amp_C: Any,
        shapes: Any,
        dtypes: Any,
        numbers: dict[str, Any],
        seed: int,
        capturable: bool,
        turned: bool,
    ) -> None:
        lists = state(seed, shapes, *dtypes)
        if turned:  # gradients in another memory layout than what they belong to
            lists[0] = [g.mT.contiguous().mT if g.dim() == 2 else g for g in lists[0]]
        expected = [adam(*row, numbers) for row in zip(*map(exact, lists), strict=True)]
        n = numbers
        step: Any = n["step"]
        lr: Any = n["lr"]
        if capturable:
            step, lr = torch.tensor([step], dtype=torch.int32), torch.tensor(lr)
        name = "multi_tensor_adam_capturable" if capturable else "multi_tensor_adam"
        given_grads = exact(lists[0])
        getattr(amp_C, name)(
            65536, flag(), lists, lr, *n["betas"], n["eps"], step, n["mode"], n["correct"],
            n["decay"], *([torch.ones(1)] if capturable else []),
        )  # fmt: skip
        for column, wanted in zip(lists[1:], zip(*expected, strict=True), strict=True):
            near(column, list(wanted))
        near(lists[0], given_grads)

    def test_doubles_stay_double(self, amp_C: Any) -> None:
        lists = state(3, [(5,)], F64, F64, F64, F64)
        numbers = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "step": 2, "decay": 0.1}
        numbers |= {"mode": 1, "correct": 1}
        expected = adam(*(column[0].clone() for column in lists), numbers)
        amp_C.multi_tensor_adam(65536, flag(), lists, 0.1, 0.9, 0.99, 1e-8, 2, 1, 1, 0.1)
        near([column[0] for column in lists[1:]], list(expected))

    def test_the_flag_is_not_looked_at(self, amp_C: Any) -> None:
        lists = [[torch.ones(2)], [torch.ones(2)], [torch.zeros(2)], [torch.zeros(2)]]
        amp_C.multi_tensor_adam(65536, flag(1), lists, 0.5, 0.9, 0.99, 0.0, 1, 1, 1, 0.0)
        torch.testing.assert_close(lists[1][0], torch.full((2,), 0.5))

    @pytest.mark.parametrize("dtype", [F16, F32])
    @pytest.mark.parametrize("name", ["capturable", "capturable_master"])
    def test_the_flag_stops_all_writes_of_capturable(
        self, amp_C: Any, name: str, dtype: torch.dtype
    ) -> None:
        lists = state(1, [(3,)], dtype, dtype, F32, F32, F32)
        lists = lists if name.endswith("master") else lists[:4]
        before = [[tensor.clone() for tensor in column] for column in lists]
        rest = (torch.tensor(1), 1, 1, 0.1, torch.full((1,), 0.5))
        operation = getattr(amp_C, f"multi_tensor_adam_{name}")
        operation(65536, flag(1), lists, torch.tensor(0.5), 0.9, 0.99, 1e-8, *rest)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(lists, before, strict=True))

    def test_capturable_unscales_gradients_in_place(self, amp_C: Any) -> None:
        lists = [[torch.full((2,), 8.0)], [torch.ones(2)], [torch.zeros(2)], [torch.zeros(2)]]
        rest = (torch.tensor(1), 1, 1, 0.0, torch.full((1,), 0.25))
        amp_C.multi_tensor_adam_capturable(
            65536, flag(), lists, torch.tensor(0.5), 0.5, 0.5, 0.0, *rest
        )
        assert lists[0][0].tolist() == [2.0, 2.0]
        assert lists[2][0].tolist() == [1.0, 1.0]

    def test_masters_are_stepped_and_copied(self, amp_C: Any) -> None:
        masters = [torch.full((2,), 1 + 2.0**-12)]
        params = [torch.zeros(2, dtype=F16)]
        lists = [[torch.ones(2, dtype=F16)], params, [torch.zeros(2)], [torch.zeros(2)], masters]
        rest = (torch.tensor(1), 1, 1, 0.0, torch.ones(1))
        amp_C.multi_tensor_adam_capturable_master(
            65536, flag(), lists, torch.tensor(0.25), 0.5, 0.5, 0.0, *rest
        )
        torch.testing.assert_close(masters[0], torch.full((2,), 0.75 + 2.0**-12))
        assert torch.equal(params[0], masters[0].half())


def sgd(
    dtype: torch.dtype, g: Tensor, p: Tensor, m: Tensor, *, lr: float, momentum: float,
    dampening: float, decay: float, nesterov: bool, first: bool, after: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return parameter and momentum, rounded nowhere but in what is subtracted, to ``dtype``."""
    g = g * scale
    if not after:
        g = g + decay * p
    if momentum:
        m = g if first else momentum * m + (1 - dampening) * g
        g = g + momentum * m if nesterov else m
    if after:
        g = g + decay * p
    return p - (lr * g).to(dtype).to(g.dtype), m


class TestSgd:
    @ONE_FIXTURE
    @given(
        shapes=SHAPES,
        dtypes=st.tuples(DTYPES, DTYPES, DTYPES, DTYPES),
        has_models=st.booleans(),
        seed=SEEDS,
        options=st.fixed_dictionaries(
            {
                "lr": st.sampled_from([0.5, 2.0**-6]),
                "momentum": st.sampled_from([0.0, 0.9]),
                "dampening": st.sampled_from([0.0, 0.25]),
                "decay": st.sampled_from([0.0, 0.01, 0.5]),
                "nesterov": st.booleans(),
                "first": st.booleans(),
                "after": st.booleans(),
                "scale": st.sampled_from([1.0, 0.125]),
            }
        ),
    )
    def test_it_follows_the_formula(
        self, amp_C: Any, shapes: Any, dtypes: Any, has_models: bool, seed: int, options: Any
    ) -> None:
        lists = drawn(seed, *((shapes, dtype) for dtype in dtypes[: 4 if has_models else 3]))
        rows = zip(*map(exact, lists[:3]), strict=True)
        expected = [sgd(dtypes[1], *row, **options) for row in rows]
        o = options
        amp_C.multi_tensor_sgd(
            65536, flag(), lists, o["decay"], o["momentum"], o["dampening"], o["lr"],
            o["nesterov"], o["first"], o["after"], o["scale"],
        )  # fmt: skip
        near(lists[1], [p for p, _ in expected])
        near(lists[2], [m for _, m in expected])
        if has_models:
            near(lists[3], exact(lists[1]))

    @ONE_FIXTURE
    @given(
        dtype=st.sampled_from([F16, BF16]),
        has_models=st.booleans(),
        seed=SEEDS,
        options=st.fixed_dictionaries(
            {
                "lr": st.sampled_from([0.5, 0.25, 2.0**-6]),
                "momentum": st.sampled_from([0.0, 0.125, 0.5]),
                "dampening": st.sampled_from([0.0, 0.25]),
                "decay": st.sampled_from([0.0, 0.25]),
                "nesterov": st.booleans(),
                "first": st.booleans(),
                "after": st.booleans(),
                "scale": st.sampled_from([1.0, 0.125]),
            }
        ),
    )
    def test_half_parameters_are_rounded_where_apex_rounds_them(
        self, amp_C: Any, dtype: torch.dtype, has_models: bool, seed: int, options: Any
    ) -> None:
        """With powers of two all else is exact, so that every bit is known."""
        shapes = [(), (3, 4), (7,)]
        lists = drawn(seed, *[(shapes, dtype)] * (4 if has_models else 3))
        # Of few bits, so that their sums are exact in float32 as well.
        for tensor in (tensor for column in lists for tensor in column):
            tensor.copy_((tensor.float() * 64).round() / 64)
        rows = list(zip(*map(exact, lists[:3]), strict=True))
        expected = [sgd(dtype, *row, **options) for row in rows]
        o = options
        amp_C.multi_tensor_sgd(
            65536, flag(), lists, o["decay"], o["momentum"], o["dampening"], o["lr"],
            o["nesterov"], o["first"], o["after"], o["scale"],
        )  # fmt: skip
        for index, (param, momentum) in enumerate(expected):
            assert torch.equal(lists[1][index], param.to(dtype))
            assert torch.equal(lists[2][index], momentum.to(dtype))
            assert not has_models or torch.equal(lists[3][index], lists[1][index])

    def test_masters_are_stepped_in_float32_and_copied_to_half(self, amp_C: Any) -> None:
        """What half could not hold stays in the master."""
        lists = [[torch.ones(2).half()], [torch.ones(2)], [torch.zeros(2)], [torch.ones(2).half()]]
        amp_C.multi_tensor_sgd(
            65536, flag(), lists, 0.0, 0.5, 0.0, 2.0**-13, False, True, False, 1.0
        )
        assert lists[1][0].tolist() == [1 - 2.0**-13] * 2
        assert lists[2][0].tolist() == lists[3][0].tolist() == [1.0, 1.0]

    def test_a_set_flag_stops_it(self, amp_C: Any) -> None:
        lists = [[torch.ones(2)], [torch.ones(2)], [torch.zeros(2)]]
        amp_C.multi_tensor_sgd(65536, flag(1), lists, 0.1, 0.9, 0, 0.5, False, True, False, 1.0)
        assert [column[0].tolist() for column in lists[1:]] == [[1.0, 1.0], [0.0, 0.0]]

    @pytest.mark.parametrize("is_set", [0, 1])
    def test_a_flag_whose_value_is_not_known_undoes_what_was_written(
        self, amp_C: Any, is_set: int
    ) -> None:
        class OnDevice(torch.Tensor):
            """Says that it is not on the CPU, as a flag on a GPU would."""

            device = property(lambda self: torch.device("meta"))  # type: ignore[assignment]

        lists = [[torch.ones(2)], [torch.ones(2)], [torch.zeros(2)]]
        known = flag(is_set).as_subclass(OnDevice)
        amp_C.multi_tensor_sgd(65536, known, lists, 0.0, 0.9, 0, 0.5, False, True, False, 1.0)
        expected = [1.0, 0.0] if is_set else [0.5, 1.0]
        assert [column[0][0].item() for column in lists[1:]] == expected


def lamb(
    g: Tensor, p: Tensor, m: Tensor, v: Tensor, n: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """You et al. 2020, algorithm 2, with apex's options; ``g`` is clipped already."""
    (beta1, beta2), (c1, c2) = n["betas"], corrected(n)
    if n["mode"] == 0:
        g = g + n["decay"] * p
    m = beta1 * m + (1 - beta1 if n["averaging"] else 1.0) * g
    v = beta2 * v + (1 - beta2) * g * g
    update = (m / c1) / ((v / c2).sqrt() + n["eps"])
    if n["mode"] == 1:
        update = update + n["decay"] * p
    ratio = 1.0
    if n["decay"] or n["nvlamb"]:
        norms = p.square().sum().sqrt().item(), update.square().sum().sqrt().item()
        ratio = 1.0 if 0.0 in norms else norms[0] / norms[1]
    return p - n["lr"] * ratio * update, m, v


class TestLamb:
    @ONE_FIXTURE
    @given(
        shapes=SHAPES,
        dtypes=st.tuples(DTYPES, DTYPES, DTYPES, DTYPES),
        numbers=NUMBERS,
        averaging=st.sampled_from([0, 1]),
        nvlamb=st.booleans(),
        limit=st.sampled_from([0.5, 1000.0, 0.0]),
        mixed=st.booleans(),
        seed=SEEDS,
    )
    def test_it_follows_the_formula(
        self, amp_C: Any, shapes: Any, dtypes: Any, numbers: Any, averaging: int, nvlamb: bool,
        limit: float, mixed: bool, seed: int,
    ) -> None:  # fmt: skip
        n = numbers | {"averaging": averaging, "nvlamb": nvlamb}
        lists = state(seed, shapes, *dtypes)
        norm = sum(g.square().sum().item() for g in exact(lists[0])) ** 0.5
        factor = limit / norm if limit and norm > limit else 1.0
        rows = zip(*map(exact, lists), strict=True)
        expected = [lamb(g * factor, *rest, n) for g, *rest in rows]
        norms: list[Any] = [torch.tensor([norm], dtype=F32), limit]
        options = [n["correct"], n["decay"], averaging, n["mode"]]
        lr, step = n["lr"], n["step"]
        if mixed:
            scale = 8.0
            lists[0] = [g.float() * scale for g in lists[0]]
            models = drawn(seed, (shapes, F16))[0]
            norms = [norms[0] * scale, torch.tensor([limit * scale])]
            amp_C.multi_tensor_lamb_mp(
                65536, flag(), [*lists, models], torch.tensor([lr]), *n["betas"], n["eps"],
                torch.tensor([step], dtype=torch.int32), *options, *norms, nvlamb,
                torch.zeros(1), torch.tensor([1 / scale]),
            )  # fmt: skip
            assert all(torch.equal(m, p.half()) for m, p in zip(models, lists[1], strict=True))
        else:
            amp_C.multi_tensor_lamb(
                65536, flag(), lists, lr, *n["betas"], n["eps"], step, *options, *norms, nvlamb
            )
        for column, wanted in zip(lists[1:], zip(*expected, strict=True), strict=True):
            near(column, list(wanted))

    @pytest.mark.parametrize(("is_set", "found_inf"), [(1, 0.0), (0, 1.0)])
    def test_mp_is_stopped_by_flag_and_by_what_was_found(
        self, amp_C: Any, is_set: int, found_inf: float
    ) -> None:
        lists = state(0, [(3,)], F32, F32, F32, F32)
        before = [column[0].clone() for column in lists]
        rest = (1, 0.1, 1, 1, torch.ones(1), torch.ones(1), False)
        last = (torch.tensor([found_inf]), torch.ones(1))
        amp_C.multi_tensor_lamb_mp(
            65536, flag(is_set), lists, torch.tensor(0.5), 0.9, 0.99, 1e-6, torch.tensor(1),
            *rest, *last,
        )  # fmt: skip
        assert all(torch.equal(a[0], b) for a, b in zip(lists, before, strict=True))

    @ONE_FIXTURE
    @given(
        shapes=SHAPES,
        dtypes=st.tuples(DTYPES, DTYPES, DTYPES, DTYPES),
        numbers=NUMBERS,
        seed=SEEDS,
        limit=st.sampled_from([0.5, 1000.0]),
        nvlamb=st.booleans(),
    )
    def test_the_two_stages_of_old_are_one_step(
        self, amp_C: Any, shapes: Any, dtypes: Any, numbers: Any, seed: int, limit: float,
        nvlamb: bool,
    ) -> None:  # fmt: skip
        n = numbers | {"averaging": 1, "correct": 1, "mode": 1, "nvlamb": nvlamb}
        lists = state(seed, shapes, *dtypes)
        (updates,) = drawn(seed, (shapes, F32))
        norm = sum(g.square().sum().item() for g in exact(lists[0])) ** 0.5
        rows = zip(*map(exact, lists), strict=True)
        expected = [lamb(g * min(1.0, limit / (norm or 1)), *rest, n) for g, *rest in rows]
        decays = torch.full((len(shapes),), n["decay"])
        amp_C.multi_tensor_lamb_stage1_cuda(
            65536, flag(), [*lists, updates], decays, n["step"] - 1, *n["betas"], n["eps"],
            torch.tensor([norm]), limit,
        )  # fmt: skip
        norms = [
            amp_C.multi_tensor_l2norm(65536, flag(), [tensors], True)[1]
            for tensors in (lists[1], updates)
        ]
        amp_C.multi_tensor_lamb_stage2_cuda(
            65536, flag(), [lists[1], updates], *norms, n["lr"], n["decay"], nvlamb
        )
        for column, wanted in zip(lists[1:], zip(*expected, strict=True), strict=True):
            near(column, list(wanted))

    def test_stage_2_without_weight_decay_given_uses_the_ratio(self, amp_C: Any) -> None:
        params, updates = [torch.full((4,), 2.0)], [torch.ones(4)]
        norms = torch.tensor([4.0]), torch.tensor([2.0])
        amp_C.multi_tensor_lamb_stage2_cuda(65536, flag(), [params, updates], *norms, 0.5)
        assert params[0].tolist() == [1.0] * 4


def novograd(
    g: Tensor, p: Tensor, m: Tensor, norm: float, n: dict[str, Any]
) -> tuple[Tensor, Tensor, float]:
    """Ginsburg et al. 2019, algorithm 1, with apex's options."""
    beta1, beta2 = n["betas"]
    c1, c2 = corrected(n)
    if n["norm_type"] == 2:
        norm = (beta2 * norm**2 + (1 - beta2) * g.square().sum().item()) ** 0.5
    else:
        norm = beta2 * norm + (1 - beta2) * (g.abs().max().item() if g.numel() else 0.0)
    divisor = norm / c2**0.5 + n["eps"]
    if n["mode"] == 0:
        g = g / divisor + n["decay"] * p
    m = beta1 * m + (1 - beta1 if n["averaging"] else 1.0) * g
    update = m / c1
    if n["mode"] == 1:
        update = update / divisor + n["decay"] * p
    return p - n["lr"] * update, m, norm


class TestNovograd:
    @ONE_FIXTURE
    @given(
        shapes=SHAPES,
        dtypes=st.tuples(DTYPES, DTYPES, DTYPES),
        numbers=NUMBERS,
        averaging=st.sampled_from([0, 1]),
        norm_type=st.sampled_from([0, 2]),
        seed=SEEDS,
    )
    def test_it_follows_the_formula(
        self, amp_C: Any, shapes: Any, dtypes: Any, numbers: Any, averaging: int, norm_type: int,
        seed: int,
    ) -> None:  # fmt: skip
        n = numbers | {"averaging": averaging, "norm_type": norm_type}
        lists = drawn(seed, *((shapes, dtype) for dtype in dtypes))
        norms = torch.arange(1, len(shapes) + 1, dtype=F32)
        rows = zip(*map(exact, lists), norms.tolist(), strict=True)
        expected = [novograd(*row, n) for row in rows]
        amp_C.multi_tensor_novograd(
            65536, flag(), lists, norms, n["lr"], *n["betas"], n["eps"], n["step"], n["correct"],
            n["decay"], averaging, n["mode"], norm_type,
        )  # fmt: skip
        near(lists[1], [p for p, _, _ in expected])
        near(lists[2], [m for _, m, _ in expected])
        near([norms], [torch.tensor([norm for _, _, norm in expected], dtype=F64)])

    def test_other_norms_are_refused(self, amp_C: Any) -> None:
        lists = [[torch.ones(2)] for _ in range(3)]
        rest = (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.0, 1, 1)
        with pytest.raises(RuntimeError, match="norm_type must be 2, or 0 .*; got 1; call"):
            amp_C.multi_tensor_novograd(65536, flag(), lists, torch.ones(1), *rest, 1)


class TestAdagrad:
    @ONE_FIXTURE
    @given(
        shapes=SHAPES,
        dtypes=st.tuples(DTYPES, DTYPES, DTYPES),
        mode=st.sampled_from([0, 1]),
        decay=st.sampled_from([0.0, 0.1]),
        seed=SEEDS,
    )
    def test_it_follows_the_formula(
        self, amp_C: Any, shapes: Any, dtypes: Any, mode: int, decay: float, seed: int
    ) -> None:
        lists = drawn(seed, *((shapes, dtype) for dtype in dtypes))
        for tensor in lists[2]:
            tensor.abs_()
        expected = []
        for g, p, h in zip(*map(exact, lists), strict=True):
            grad = g + decay * p if mode == 0 else g
            total = h + grad**2
            update = grad / (total.sqrt() + 1e-2) + (decay * p if mode == 1 else 0.0)
            expected.append((p - 0.25 * update, total))
        amp_C.multi_tensor_adagrad(65536, flag(), lists, 0.25, 1e-2, mode, decay)
        for column, wanted in zip(lists[1:], zip(*expected, strict=True), strict=True):
            near(column, list(wanted))


class TestUpdateScaleHysteresis:
    @ONE_FIXTURE
    @given(
        overflows=st.lists(st.booleans(), max_size=30),
        hysteresis=st.integers(1, 3),
        interval=st.integers(1, 4),
    )
    def test_it_follows_the_rule(
        self, amp_C: Any, overflows: list[bool], hysteresis: int, interval: int
    ) -> None:
        scale, growth = torch.tensor([2.0**126]), flag()
        left = torch.tensor([hysteresis], dtype=torch.int32)
        expected, successes, patience = 2.0**126, 0, hysteresis
        for overflow in overflows:
            found = torch.tensor([float(overflow)])
            amp_C.update_scale_hysteresis(
                scale, growth, left, found, 2.0, 0.5, interval, hysteresis
            )
            successes = 0 if overflow else successes + 1
            patience = patience - 1 if overflow else hysteresis
            if overflow and patience <= 0:
                expected *= 0.5
            if successes == interval:
                successes = 0
                expected = expected * 2 if expected < 2.0**127 else expected
            assert (scale.item(), growth.item(), left.item()) == (expected, successes, patience)

    def test_with_no_patience_it_is_torchs_rule(self, amp_C: Any) -> None:
        scale, growth, left = torch.tensor([8.0]), flag(), flag(1)
        theirs, their_growth = scale.clone(), growth.clone()
        for found in map(torch.tensor, [[0.0], [0.0], [1.0], [0.0], [0.0], [0.0]]):
            amp_C.update_scale_hysteresis(scale, growth, left, found, 4.0, 0.5, 2, 1)
            torch._amp_update_scale_(theirs, their_growth, found, 4.0, 0.5, 2)
            assert (scale.item(), growth.item()) == (theirs.item(), their_growth.item())


def test_lists_of_different_lengths_are_refused(amp_C: Any) -> None:
    message = r"takes 2 lists of tensors of one length; got lists of lengths \[1, 2\]; call"
    with pytest.raises(RuntimeError, match=message):
        amp_C.multi_tensor_scale(1, flag(), [[torch.ones(1)], [torch.ones(1)] * 2], 1.0)
    with pytest.raises(RuntimeError, match=r"takes 3 or 4 lists .*; got lists of lengths \[0\]"):
        amp_C.multi_tensor_sgd(1, flag(), [[]], 0, 0, 0, 0, False, False, False, 1.0)


def test_lists_of_nothing_are_left_alone(amp_C: Any) -> None:
    noop = flag()
    amp_C.multi_tensor_scale(1, noop, [[], []], 1.0)
    amp_C.multi_tensor_adam(1, noop, [[], [], [], []], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    norms = torch.zeros(0)
    amp_C.multi_tensor_novograd(
        1, noop, [[], [], []], norms, 0.1, 0.9, 0.99, 1e-8, 1, 1, 0, 1, 1, 2
    )
    assert noop.tolist() == [0]


def test_an_unknown_operation_is_refused(amp_C: Any) -> None:
    message = "supplies no 'amp_C.multi_tensor_lars' .*; amp_C has .*multi_tensor_scale.* Instead"
    with pytest.raises(AttributeError, match=message):
        amp_C.multi_tensor_lars  # noqa: B018
    assert not hasattr(amp_C, "multi_tensor_lars")
    with pytest.raises(ImportError):
        importlib.import_module("amp_C.multi_tensor_lars")


def test_every_operation_is_exported_and_can_be_pickled(amp_C: Any) -> None:
    for name in amp_C.__all__:
        assert pickle.loads(pickle.dumps(getattr(amp_C, name))) is getattr(amp_C, name)


def test_parameters_are_written_without_a_graph(amp_C: Any) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    lists = [[torch.ones(2)], [param], [torch.zeros(2)], [torch.zeros(2)]]
    amp_C.multi_tensor_adam(65536, flag(), lists, 0.5, 0.9, 0.99, 0.0, 1, 1, 1, 0.0)
    assert param.is_leaf
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.5))


class TestMultiTensorApplier:
    def test_it_hands_on_its_chunk_size(self, apex: types.ModuleType) -> None:
        apply = importlib.import_module("apex.multi_tensor_apply")
        noop, lists = flag(), [[torch.ones(1)]]
        call = apply.MultiTensorApply(7)(lambda *args: args, noop, lists, 1, False)
        assert call == (7, noop, lists, 1, False)
        assert apply.multi_tensor_applier.chunk_size == 65536

    def test_it_is_available(self, apex: types.ModuleType) -> None:
        module = importlib.import_module("apex.multi_tensor_apply")
        applier = module.multi_tensor_applier
        assert (applier.available, applier.warned, applier.import_err) == (True, False, None)
        applier.check_avail()


def test_apex_C_flattens_and_gives_views(apex: types.ModuleType) -> None:
    apex_C = importlib.import_module("apex_C")
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor([7.0])]
    flat = apex_C.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7]
    views = apex_C.unflatten(flat, tensors)
    assert [tuple(view.shape) for view in views] == [(2, 3), (1,)]
    flat.zero_()
    assert views[0].sum() == 0
