"""Where float32 tensors meet half ones in a model that is stored in half, against casts by hand."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from cast_counter import CastCounter
from casting_support import losses_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from amp_patch import amp as core
from amp_patch.casting.libraries import library_rules
from amp_patch.casting.meeting_dtypes import MEETINGS
from amp_patch.patching import resolve

HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
Call = Callable[..., Any]

#: Each takes matrices of 4 x 4, of which the second may be in another dtype.
PRODUCTS: dict[str, Call] = {
    "@": lambda a, b: a @ b,
    "@, reflected": lambda a, b: a.__rmatmul__(b),
    "addbmm": lambda a, b: torch.addbmm(a, b[None], a[None]),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "addmm by name": lambda a, b: torch.addmm(a, mat1=a, mat2=b, beta=0.5),
    "addmv": lambda a, b: torch.addmv(a[0], b, a[1]),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], b[None]),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "chain_matmul": lambda a, b: torch.linalg.multi_dot([a, b, a]),
    "conv1d": lambda a, b: F.conv1d(a[None], b[..., None]),
    "conv2d with a bias": lambda a, b: F.conv2d(a[None, :, :, None], b[:, :, None, None], a[0]),
    "conv_transpose1d": lambda a, b: F.conv_transpose1d(a[None], b[..., None]),
    "einsum": lambda a, b: torch.einsum("ij,jk,kl->il", a, b, a),
    "einsum of a list": lambda a, b: torch.einsum("ij,jk->ik", [a, b]),
    "linear": lambda a, b: F.linear(a, b),
    "linear by name": lambda a, b: F.linear(input=a, weight=b),
    "matmul": torch.matmul,
    "matmul by name": lambda a, b: torch.matmul(input=a, other=b),
    "mm": lambda a, b: a.mm(b),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "prelu": lambda a, b: F.prelu(a, b[0]),
    "rnn_tanh_cell": lambda a, b: torch.rnn_tanh_cell(b, a, a, a),
    "vecdot": lambda a, b: torch.linalg.vecdot(a, b),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], a[None], b[None]),
    "attention by name": lambda a, b: F.scaled_dot_product_attention(query=a, key=b, value=a),
}
JOINED: dict[str, Call] = {
    "bilinear": lambda a, b: F.bilinear(a, b, torch.stack([a, a])),
    "cartesian_prod": lambda a, b: torch.cartesian_prod(a[0], b[1]),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "dot": lambda a, b: a[0].dot(b[1]),
    "grid_sample": lambda a, b: F.grid_sample(
        a[None, None], b.reshape(1, 2, 4, 2), align_corners=False
    ),
    "group_norm": lambda a, b: F.group_norm(a, 2, b[0], b[1]),
    "inner": torch.inner,
    "linalg.cross": lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3]),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,), b[0], b[1]),
    "layer_norm by name": lambda a, b: F.layer_norm(a, (4,), weight=b[0], bias=b[1]),
    "meshgrid": lambda a, b: torch.stack(torch.meshgrid(a[0], b[1], indexing="ij")),
    "meshgrid of a list": lambda a, b: torch.stack(torch.meshgrid([a[0], b[1]], indexing="xy")),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "vdot": lambda a, b: torch.vdot(a[0], b[1]),
}
CALLS = {**PRODUCTS, **JOINED}


class Calling(nn.Module):
    """Calls in its forward what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, run: Call) -> None:
        self.layer(torch.ones(1, 4))
        self.found = run()


def in_model(model: Calling, run: Call) -> Any:
    model(run)
    return vars(model).pop("found")


def prepare(amp: ModuleType, level: str) -> Calling:
    return amp.initialize(Calling(), opt_level=level, verbosity=0)  # type: ignore[no-any-return]  # untyped


@pytest.fixture
def two() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4)


def gradients(call: Call, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    result = call(a, b)
    return (result.detach(), *torch.autograd.grad(result.float().square().sum(), [a, b]))


@pytest.mark.parametrize("level", HALF)
def test_a_call_is_that_of_casts_by_hand(
    amp: ModuleType, level: str, two: tuple[Tensor, Tensor]
) -> None:
    model, half = prepare(amp, level), HALF[level]
    for name, call in CALLS.items():
        for dtypes in ((torch.float32, half), (half, torch.float32)):
            a, b = (x.to(dtype).requires_grad_() for x, dtype in zip(two, dtypes, strict=True))
            got = in_model(model, lambda call=call, a=a, b=b: gradients(call, a, b))

            def by_hand(a: Tensor, b: Tensor, name: str = name, call: Call = call) -> Any:
                if name in PRODUCTS:
                    return call(a.to(half), b.to(half))
                return call(a.float(), b.float()).to(half)

            want = gradients(by_hand, a, b)
            assert got[0].dtype is half, name
            assert torch.equal(got[0], want[0]), name
            # what comes twice has a cast of its own each time: gradients are added up later
            torch.testing.assert_close(got[1:], want[1:], rtol=0.02, atol=0.02, msg=name)


COMPARISONS: dict[str, Call] = {
    "allclose": torch.allclose,
    "allclose, method": lambda a, b: a.allclose(b, atol=1.0),
    "heaviside": lambda a, b: torch.heaviside(a.sign(), b),
    "heaviside, method": lambda a, b: a.sign().heaviside(values=b),
    "isclose": lambda a, b: torch.isclose(a, b, atol=0.5),
    "isclose, method": lambda a, b: a.isclose(other=b, rtol=0.5),
}


@pytest.mark.parametrize("level", [*HALF, "O1", "O4"])
def test_comparisons_take_two_dtypes(
    amp: ModuleType, level: str, two: tuple[Tensor, Tensor]
) -> None:
    """At O1 and O4 the result is float32, as torch's own would be."""
    model = prepare(amp, level)
    half = HALF.get(level, torch.bfloat16)
    for name, call in COMPARISONS.items():
        for dtypes in ((torch.float32, half), (half, torch.float32)):
            a, b = (x.to(dtype) for x, dtype in zip(two, dtypes, strict=True))
            got = in_model(model, lambda call=call, a=a, b=b: call(a, b))
            want = call(a.float(), b.float())
            if isinstance(want, Tensor) and want.is_floating_point():
                want = want.to(half if level in HALF else torch.float32)
            assert type(got) is type(want), name
            assert torch.equal(torch.as_tensor(got), torch.as_tensor(want)), name


def test_what_torch_takes_stays_torchs(amp: ModuleType, two: tuple[Tensor, Tensor]) -> None:
    model = prepare(amp, "O2")
    for name, call in CALLS.items():
        for dtype in (torch.float16, torch.float32, torch.float64):
            a, b = (x.to(dtype) for x in two)
            got = in_model(model, lambda call=call, a=a, b=b: call(a, b))
            assert got.dtype is dtype, name
            is_wide = name == "grid_sample" and dtype is torch.float16
            want = call(a.float(), b.float()).half() if is_wide else call(a, b)
            assert torch.equal(got, want), name


def test_outside_of_a_model_torch_refuses_as_ever(
    amp: ModuleType, two: tuple[Tensor, Tensor]
) -> None:
    prepare(amp, "O2")
    for name in ("@", "linear", "einsum", "dot", "cross"):
        with pytest.raises(RuntimeError):
            CALLS[name](two[0], two[1].half())


@pytest.mark.parametrize("level", HALF)
def test_a_float32_parameter_is_not_cast(
    amp: ModuleType, level: str, two: tuple[Tensor, Tensor]
) -> None:
    """It came to the model later, and no step would move it: the error's note says so."""
    model, late, half = prepare(amp, level), nn.Parameter(two[1]), two[0].to(HALF[level])
    calls = {**CALLS, "layer_norm": lambda a, b: F.layer_norm(b, (4,), a[0], a[1])}
    for name in ("@", "linear", "addmm", "layer_norm"):
        with pytest.raises(RuntimeError):
            in_model(model, lambda call=calls[name]: call(half, late))


@pytest.mark.parametrize("level", HALF)
def test_attention_takes_its_mask_in_float32(amp: ModuleType, level: str) -> None:
    """In float16 -1e9 would be -inf, and a row that is masked as a whole NaN."""
    model, half = prepare(amp, level), HALF[level]
    q, k, v = (torch.randn(1, 3, 4) for _ in range(3))
    mask = torch.full((3, 3), -1e9).triu(1)
    mask[2] = -1e9
    attend = F.scaled_dot_product_attention
    for mixed in ((q.to(half), k.to(half), v.to(half)), (q, k, v.to(half)), (q, k.to(half), v)):
        want = attend(*(one.to(half) for one in mixed), mask)
        assert want.isfinite().all()

        def attended(mixed: tuple[Tensor, ...] = mixed) -> tuple[Tensor, Tensor]:
            now = F.scaled_dot_product_attention
            return now(*mixed, mask), now(*mixed, attn_mask=mask)

        for got in in_model(model, attended):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("level", "rule"),
    [*((level, None) for level in ("O1", *HALF)), ("O1", "float"), ("O1", "off"), ("O4", "off")],
)
def test_a_mask_that_is_a_class_of_torchs_is_asked_for_its_attention(
    amp: ModuleType, level: str, rule: str | None
) -> None:
    """Such a mask has no numbers, and compares the function that torch names with that of ``F``."""
    rules = {} if rule is None else {"torch.nn.functional.scaled_dot_product_attention": rule}
    model = amp.initialize(Calling(), opt_level=level, rules=rules, verbosity=0)
    half = HALF.get(level, torch.float16)
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=half) for _ in range(3))
    wide = (q.float(), k.float(), v.float()) if rule == "float" else (q, k, v)
    want = F.scaled_dot_product_attention(*wide, is_causal=True)
    mask = causal_lower_right(9, 9)
    if torch.__version__ < (2, 7):
        pytest.skip("such a mask raises where anybody asks for its dtype")
    (got,) = in_model(model, lambda: (F.scaled_dot_product_attention(q, k, v, attn_mask=mask),))
    assert torch.equal(got, want.to(got))


def test_what_is_written_to_out_is_left_to_torch(
    amp: ModuleType, two: tuple[Tensor, Tensor]
) -> None:
    model, a, b = prepare(amp, "O2"), two[0].half(), two[1].half()
    out = torch.empty(4, 4, dtype=torch.float16)
    in_model(model, lambda: torch.matmul(a, b, out=out))
    assert torch.equal(out, a @ b)
    with pytest.raises(RuntimeError):
        in_model(model, lambda: torch.matmul(a, two[1], out=out))


@pytest.mark.parametrize("level", HALF)
def test_in_a_region_its_dtype_rules(
    amp: ModuleType, level: str, two: tuple[Tensor, Tensor]
) -> None:
    def run() -> Tensor:
        with core.float_region():
            return two[0] @ two[1].to(HALF[level])

    got = in_model(prepare(amp, level), run)
    assert torch.equal(got, two[0] @ two[1].to(HALF[level]).float())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("level", HALF)
def test_a_sparse_matrix_multiplies_in_float32_on_the_cpu(
    amp: ModuleType, level: str, two: tuple[Tensor, Tensor]
) -> None:
    model, half = prepare(amp, level), two[1].to(HALF[level])
    for sparse in (two[0].relu().to_sparse(), two[0].relu().to_sparse_csr()):
        got = in_model(model, lambda sparse=sparse: sparse @ half)
        assert torch.equal(got, (sparse @ half.float()).to(HALF[level]))


def test_each_row_that_meets_names_a_function_of_torch_without_a_model() -> None:
    """What has such a rule is torch's very object until a model is stored in half, and again."""
    paths = [
        f"{module}.{name}"
        for module, rows in library_rules.RULES.items()
        for name, row in rows.items()
        if row[0] in MEETINGS
    ]
    assert len(paths) > 50
    importlib.import_module("torch.nn.attention.flex_attention")  # no module of torch's does
    before = [resolve(path)[2] for path in paths]
    core.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    core.deactivate()
    core.initialize(nn.Linear(1, 1), opt_level="O5", verbosity=0)
    during = [resolve(path)[2] for path in paths]
    core.deactivate()
    assert all(one is not other for one, other in zip(before, during, strict=True))
    assert all(one is resolve(path)[2] for one, path in zip(before, paths, strict=True))


@given(
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]),
        min_size=2,
        max_size=4,
    )
)
def test_any_dtypes_of_operands_are_cast_where_two_of_them_meet(dtypes: list[torch.dtype]) -> None:
    """float64 and integers never are: torch refuses them as ever."""
    torch.manual_seed(0)
    operands = [torch.randn(3, 3).mul(4).to(dtype) for dtype in dtypes]
    equation = ",".join(["ab", "bc", "cd", "de"][: len(dtypes)]) + "->a" + "bcde"[len(dtypes) - 1]
    meets = {torch.float32, torch.bfloat16} <= set(dtypes)

    def run(operands: list[Tensor]) -> Tensor | str:
        try:
            return torch.einsum(equation, *operands)
        except RuntimeError:
            return "refused"

    cast = [x.bfloat16() if meets and x.dtype is torch.float32 else x for x in operands]
    model = prepare(core, "O5")
    try:
        want, got = run(cast), in_model(model, lambda: run(operands))
    finally:
        core.deactivate()
    assert type(got) is type(want)
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        assert got.dtype is want.dtype
        assert torch.equal(got, want)


class Attending(nn.Module):
    """Gives one activation to three layers, whose function shares the cast of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(4), *(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)) @ x.transpose(1, 2)


def test_beside_a_model_in_half_functions_cast_as_often_as_without(amp: ModuleType) -> None:
    def casts(model: nn.Module) -> int:
        model(torch.randn(2, 3, 4))  # whose casts of weights are kept
        with CastCounter() as counter:
            model(torch.randn(2, 3, 4))
        return counter.casts

    alone = casts(amp.initialize(Attending(), opt_level="O1", verbosity=0))
    core.deactivate()
    before = prepare(amp, "O2")
    model = amp.initialize(Attending(), opt_level="O1", verbosity=0)
    assert casts(model) == alone
    behind = prepare(amp, "O2")
    assert casts(model) == alone
    for half in (before, behind):
        found = in_model(half, lambda: torch.ones(4, 4) @ torch.ones(4, 4).half())
        assert found.dtype is torch.float16


class Llama(nn.Module):
    """Makes positions and a mask in float32 in its forward, as people write it by hand."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(11, 8), nn.Linear(8, 24, bias=False)
        self.scale, self.out = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(11, 8) / 3)
        self.flash = flash

    def norm(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        angles = torch.arange(length)[:, None] / 10 ** (torch.arange(4) / 4)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin for y in (q, k))
        mask = torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1) > 0, -1e9)
        if self.flash:
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            x = x + torch.softmax(q @ k.transpose(1, 2) / math.sqrt(8) + mask, -1) @ v
        return self.norm(x) @ self.out.T


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize(("flash", "backend"), [(True, None), (False, None), (False, "aot_eager")])
@pytest.mark.parametrize("level", HALF)
def test_a_model_that_makes_positions_and_a_mask_trains_as_in_float32(
    amp: ModuleType, level: str, flash: bool, backend: str | None
) -> None:
    torch.manual_seed(0)
    model, tokens = Llama(flash), torch.randint(0, 11, (4, 7))

    def loss_of(run: Call) -> Tensor:
        return F.cross_entropy(run(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    exact = losses_of(copy.deepcopy(model), loss_of)
    assert exact[-1] < exact[0]
    options = {"backend": backend, "fullgraph": True, "opt_level": level, "loss_scale": 64.0}
    assert losses_of(model, loss_of, amp, **options) == pytest.approx(exact, rel=0.02)


#: Layer norms that torch computes on a CPU with much in half: of many rows, and of equal numbers
#: with an epsilon as BERT's.
LOSING: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "many rows": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "many rows, by name": lambda x, w, b: F.layer_norm(x, (8,), weight=w, bias=b),
    "many rows, all by name": lambda x, w, b: F.layer_norm(
        input=x, normalized_shape=(8,), weight=w, bias=b, eps=1e-5
    ),
    "equal numbers": lambda x, w, b: F.layer_norm(x[:2] * 0, (8,), w, b, 1e-12),
    "equal numbers, shape by name": lambda x, w, b: F.layer_norm(
        x[:2] * 0, normalized_shape=(8,), weight=w, bias=b, eps=1e-12
    ),
    "equal numbers, bias by name": lambda x, w, b: F.layer_norm(
        x[:2] * 0, (8,), w, bias=b, eps=1e-12
    ),
    "equal numbers, no weight": lambda x, w, b: F.layer_norm(x[:2] * 0, (8,), eps=1e-12),
    "a layer of many rows": lambda x, w, b: functional_call(
        nn.LayerNorm(8), {"weight": w, "bias": b}, (x,)
    ),
    "a layer of equal numbers": lambda x, w, b: functional_call(
        nn.LayerNorm(8, 1e-12), {"weight": w, "bias": b}, (x[:2] * 0,)
    ),
}


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("name", LOSING)
def test_a_layer_norm_has_the_gradients_of_float64_on_a_cpu(
    amp: ModuleType, level: str, name: str
) -> None:
    model, half = prepare(amp, level), HALF[level]
    torch.manual_seed(0)
    x = (torch.randn(8192, 8) + 0.5).to(half)

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True), torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        result = LOSING[name](*leaves)
        assert result.dtype is dtype
        result.backward(torch.full_like(result, 2**-10))
        return [torch.zeros(8) if leaf.grad is None else leaf.grad.double() for leaf in leaves]

    found = in_model(model, lambda: run(half))
    exact = run(torch.float64)
    for ours, want in zip(found, exact, strict=True):
        atol = 2e-2 * float(want.abs().max().clamp(min=1e-3))
        torch.testing.assert_close(ours.double(), want.double(), rtol=2e-2, atol=atol)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize(("level", "eps"), [("O5", 1e-5), ("O2", 1e-12)])
def test_a_trace_of_a_layer_norm_warns_of_nothing(amp: ModuleType, level: str, eps: float) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps)), torch.randn(100, 4)
    amp.initialize(model, opt_level=level, verbosity=0)
    traced = torch.jit.trace(model, (x,), check_trace=False)
    torch.testing.assert_close(traced(x), model(x), rtol=0.05, atol=0.05)


def transformed(x: Tensor, theta: Tensor) -> Tensor:
    return F.affine_grid(theta.expand(len(x), -1, -1), [*x.shape], align_corners=False)


def given(x: Tensor, grid: Tensor) -> Tensor:
    return grid.expand(len(x), -1, -1, -1)


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize(
    ("made", "start"),
    [
        (transformed, torch.tensor([[[0.5, 0.25, 0.0], [-0.25, 0.5, 0.125]]])),
        (given, torch.linspace(-0.9, 0.9, 2 * 9 * 9).view(1, 9, 9, 2)),
    ],
)
def test_places_of_a_grid_have_float32_s_gradients(
    amp: ModuleType, level: str, made: Call, start: Tensor
) -> None:
    """In half torch's backward finds other pixels than its forward."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(start.to(HALF[level]).float())

        def forward(self, x: Tensor) -> Tensor:
            return F.grid_sample(x, made(x, self.places), align_corners=False)

    torch.manual_seed(0)
    model, x = Sampler(), torch.randn(2, 4, 64, 64)
    x = F.avg_pool2d(x, 9, 1, 4).to(HALF[level]).float()
    outputs = model(x)
    grads = torch.randn_like(outputs).to(HALF[level]).float()
    (expected,) = torch.autograd.grad(outputs, model.places, grads)
    amp.initialize(model, opt_level=level, verbosity=0)
    model(x).backward(grads)
    error = (model.places.grad.float() - expected).norm() / expected.norm()
    assert error < 2 * torch.finfo(HALF[level]).eps
