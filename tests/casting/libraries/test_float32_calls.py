"""What is computed in float32 whatever dtypes come: counts, losses, norms of matrices."""

import functools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from casting_support import called_at
from torch import Tensor, nn

from amp_patch.casting.cached_casts import is_large
from amp_patch.casting.libraries.library_casts import Rule, wrap
from amp_patch.casting.mode import process

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SEEN: list[tuple[torch.dtype, ...]] = []


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


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("dtypes", [(F16, F32), (F32, F16), (BF16, BF16), (F32, F32), (F64, F64)])
def test_the_result_has_the_dtype_of_the_first_argument(
    level: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """As torchvision's autocast has it for what samples features at places of boxes."""

    def sample(input: Tensor, boxes: list[Tensor]) -> Tensor:
        SEEN.append((input.dtype, boxes[0].dtype))
        return input * boxes[0]

    features, boxes = (torch.full((2,), 1.5, dtype=dtype) for dtype in dtypes)
    function = wrap(sample, Rule("first", "always"))
    named = functools.partial(function, boxes=[boxes])
    for called in (lambda x: function(x, [boxes]), named, lambda x: named(input=x)):
        found = called_at(level, "inside", called, features)
        assert found.dtype is dtypes[0]
        assert found.tolist() == [2.25, 2.25]
        assert SEEN.pop() == (F64, F64) if F64 in dtypes else (F32, F32)


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


LENGTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "method": lambda x, y: x.norm(),
    "a list of dimensions": lambda x, y: x.norm(p=3, dim=[0, 1], keepdim=True),
    "norm": lambda x, y: torch.norm(x, 1, dim=0),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x, 3.5, (0, 1)),
    "two tensors": lambda x, y: torch.nn.functional.pairwise_distance(x, y, 1.5),
    "the other by name": lambda x, y: torch.nn.functional.pairwise_distance(x, x2=y, p=1.0),
    "two by name": lambda x, y: torch.nn.functional.pairwise_distance(x2=y, x1=x, p=1.5),
    "by name": lambda x, y: torch.linalg.vector_norm(dim=0, x=x, ord=3.5),
}
#: The size of the numbers at which torch's gradient in half is wrong, and what has it.
LOSING: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
    "atan2": (1e-3, torch.atan2),
    "arctan2, method": (1e-3, lambda x, y: x.arctan2(y)),
    "logcumsumexp": (2.0, lambda x, y: torch.logcumsumexp(x, 0) + y),
    "logcumsumexp, method": (2.0, lambda x, y: x.logcumsumexp(dim=1) + y),
    "logsumexp": (2.0, lambda x, y: torch.logsumexp(x, 1) + torch.special.logsumexp(y, 1)),
    "logsumexp, method": (2.0, lambda x, y: x.logsumexp(dim=1) + y.logsumexp(1)),
    "sinc": (0.02, lambda x, y: torch.sinc(x) + torch.special.sinc(y)),
    "sinc, method": (0.02, lambda x, y: x.sinc() + y.sinc()),
    "tanhshrink": (0.02, lambda x, y: torch.nn.functional.tanhshrink(x) + y),
    # squares above 65504
    "local_response_norm": (
        300.0,
        lambda x, y: torch.nn.functional.local_response_norm(x[None], 3)[0] + y,
    ),
    "lp_pool1d": (300.0, lambda x, y: torch.nn.functional.lp_pool1d(x, 2, 3) + y[:1, :1]),
    "lp_pool2d": (
        300.0,
        lambda x, y: torch.nn.functional.lp_pool2d(x[None], 2, 2)[0] + y[:1, :1],
    ),
    "lp_pool3d": (
        300.0,
        lambda x, y: torch.nn.functional.lp_pool3d(x[None, None], 2, (1, 2, 2)) + y[:1, :1],
    ),
    "cov": (30.0, lambda x, y: torch.cov(x) + y.cov()),
    "corrcoef": (30.0, lambda x, y: torch.corrcoef(x) + y.corrcoef()),
    # squares and cubes of their results, of which a small gradient is a part
    "rsqrt": (2e-4, lambda x, y: (torch.rsqrt(x.abs()) + y.abs().rsqrt()) * 1e-3),
    "reciprocal": (1e-3, lambda x, y: (torch.reciprocal(x) + y.reciprocal()) * 1e-3),
    "by name": (
        2e-4,
        lambda x, y: (torch.rsqrt(input=x.abs()) + torch.pow(exponent=-0.5, input=y.abs())) * 1e-3,
    ),
    "one over it": (1e-3, lambda x, y: (1 / x) * 1e-3 + 1e-3 / y),
    "power": (2e-4, lambda x, y: (torch.pow(x.abs(), -0.5) + y.abs() ** -0.5) * 1e-3),
    "power, method": (0.02, lambda x, y: (x.pow(-2) + y.abs().pow(exponent=-1.5)) * 1e-3),
}


class Lengths(nn.Linear):
    """Calls what finds lengths in its forward."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.found = {name: call(x, y) for name, call in LENGTHS.items()}
        return self.found


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_lengths_in_a_model_in_half_are_float32_s_rounded_once(amp: ModuleType, level: str) -> None:
    half = F16 if level == "O2" else BF16
    x, y = torch.randn(2, 40, 30).to(half)
    model = amp.initialize(Lengths(1, 1), opt_level=level, verbosity=0)
    model(x, y)
    for name, call in LENGTHS.items():
        assert torch.equal(model.found[name], call(x.float(), y.float()).to(half)), name


class Losing(nn.Linear):
    """Adds up in its forward what a function finds."""

    call: Callable[[Tensor, Tensor], Tensor]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.found = self.call(x, y)
        return self.found.float().sum()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_that_half_would_lose_are_float64_s(amp: ModuleType, level: str) -> None:
    """Torch's kernels for half square numbers below 2e-4, and subtract what rounds to the same."""
    half = F16 if level == "O2" else BF16
    torch.manual_seed(0)
    drawn = torch.randn(2, 40, 30)
    model = amp.initialize(Losing(1, 1), opt_level=level, verbosity=0)
    for name, (size, call) in LOSING.items():
        values = (drawn.sign() * (drawn.abs() + 0.25) * size).to(half)
        inputs = [one.float().requires_grad_() for one in values]
        vars(model)["call"] = call
        model(*inputs).backward()
        exact = [one.double().requires_grad_() for one in values]
        call(*exact).sum().backward()
        assert model.found.dtype is half, name
        for one, other in zip(inputs, exact, strict=True):
            near = torch.isclose(one.grad.double(), other.grad, rtol=2 * torch.finfo(half).eps)
            assert near.float().mean() > 0.98, name


#: What backward needs of much is kept in half where that holds it, and nowhere else.
LOSING_OF_MUCH: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "logsumexp": (lambda x: x + 700, lambda x: x.logsumexp(1)),
    "logcumsumexp": (lambda x: x + 700, lambda x: x.logcumsumexp(1)),
    "lp_pool1d": (
        lambda x: (x.abs() + 1).clamp(max=2) * 1e-4,
        lambda x: torch.nn.functional.lp_pool1d(x, 2, 2),
    ),
    "corrcoef": (lambda x: x * 3e-4, lambda x: torch.corrcoef(x[:32])),
    "norm": (lambda x: x * 1e-3, lambda x: x.norm(p=3, dim=1)),
}


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", LOSING_OF_MUCH)
def test_gradients_that_half_would_lose_are_float64_s_of_much_as_well(
    amp: ModuleType, level: str, name: str
) -> None:
    half = F16 if level == "O2" else BF16
    size, call = LOSING_OF_MUCH[name]
    torch.manual_seed(0)
    values = size(torch.randn(64, 512)).to(half)
    assert is_large(values)
    model = amp.initialize(Losing(1, 1), opt_level=level, verbosity=0)
    vars(model)["call"] = lambda x, _: call(x)
    x, exact = values.float().requires_grad_(), values.double().requires_grad_()
    model(x, x).backward()
    call(exact).sum().backward()
    error = (x.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 2 * torch.finfo(half).eps


def test_a_power_by_whole_numbers_has_the_dtype_of_its_base(amp: ModuleType) -> None:
    model = amp.initialize(Losing(1, 1), opt_level="O2", verbosity=0)
    vars(model)["call"] = lambda x, _: x ** torch.arange(3)
    model(torch.ones(3), torch.ones(3))
    assert model.found.dtype is F16


def test_a_mean_without_nans_counts_more_than_float16_has(amp: ModuleType) -> None:
    model = amp.initialize(Losing(1, 1), opt_level="O2", verbosity=0)
    x = torch.full((70000,), 0.5)
    x[0] = torch.nan
    for call in (lambda x, _: torch.nanmean(x), lambda x, _: x.nanmean()):
        vars(model)["call"] = call
        model(x, x)
        assert (model.found.dtype, model.found.item()) == (F16, 0.5)


def test_a_generalized_mean_of_small_half_numbers_is_float64_s(amp: ModuleType) -> None:
    """Its exponent learns; powers of such numbers are 0 in float16, and the slope of a root inf."""
    model = amp.initialize(Losing(1, 1), opt_level="O2", verbosity=0)

    def mean(x: Tensor, p: Tensor) -> Tensor:
        return x.clamp(min=1e-6).pow(p).mean(1) ** (1 / p)

    vars(model)["call"] = mean
    values = torch.linspace(1e-4, 4e-3, 40).view(4, 10).half(), torch.tensor([3.0]).half()
    inputs = [one.float().requires_grad_() for one in values]
    model(*inputs).backward()
    exact = [one.double().requires_grad_() for one in values]
    wanted = mean(*exact)
    wanted.sum().backward()
    assert model.found.dtype is F32
    # 1 / p is rounded to half, and of two large parts of the exponent's gradient little is left
    torch.testing.assert_close(model.found.double(), wanted, rtol=0.01, atol=0.0)
    torch.testing.assert_close(inputs[0].grad.double(), exact[0].grad, rtol=0.01, atol=0.0)
    torch.testing.assert_close(inputs[1].grad.double(), exact[1].grad, rtol=0.0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
def test_steep_functions_of_half_are_no_steeper_where_they_are_compiled(amp: ModuleType) -> None:
    model = amp.initialize(Losing(1, 1), opt_level="O2", verbosity=0)
    x, y = (torch.linspace(0.25, 4.0, 8).half() * size for size in (1e-3, 2e-4))

    def both(x: Tensor, y: Tensor) -> Tensor:
        return (1 / x + y**-0.5) * 1e-3

    vars(model)["call"] = both
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (model, compiled):
        inputs = [one.float().requires_grad_() for one in (x, y)]
        exact = [one.double().requires_grad_() for one in (x, y)]
        wanted = torch.autograd.grad(both(*exact).sum(), exact)
        for one, other in zip(torch.autograd.grad(call(*inputs), inputs), wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=4e-3, atol=0.0)
    torch._dynamo.reset()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_float32_tensors_that_forward_makes_stay_so_there(amp: ModuleType, level: str) -> None:
    model = amp.initialize(Losing(1, 1), opt_level=level, verbosity=0)
    made = torch.linspace(0.5, 1.0, 300).view(20, 15)
    for name, (_, call) in LOSING.items():
        vars(model)["call"] = lambda x, y, call=call: call(made, made)
        model(made, made)
        assert torch.equal(model.found, call(made, made)), name
