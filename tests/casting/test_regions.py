"""Local precision: the same dtypes at every level, and nothing outside the block changes."""

import contextlib
import copy
import functools
import threading

import numpy as np
import pytest
import torch
from support import exactly
from torch import nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from amp_patch.casting.mode import OFF, process

LEVELS = {
    "O0": torch.float16,
    "O1": torch.float16,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(params=LEVELS)
def level(amp, request):
    """Give amp and the half dtype of a level, one model of which is alive."""
    model = nn.Linear(3, 3)
    amp.initialize(model, opt_level=request.param, verbosity=0)
    yield amp, LEVELS[request.param]
    del model


def start(amp, model, opt_level):
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    return model


X = torch.linspace(0.1, 0.9, 12).reshape(4, 3)
W = torch.linspace(-0.5, 0.5, 9).reshape(3, 3)
COMPUTING = {
    "matmul": lambda x: x @ W,
    "linear": lambda x: F.linear(x, W),
    "add": lambda x: x + x,
    "reflected": lambda x: 1 / x,
    "method": lambda x: x.exp(),
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: x.norm(),
    "layer norm": lambda x: F.layer_norm(x, (3,), weight=W[0]),
    "loss": lambda x: F.mse_loss(x, x * 2),
    "sum": lambda x: x.sum(),
    "cat": lambda x: torch.cat([x, x]),
    "relu": lambda x: F.relu(x),
    "pooling": lambda x: F.avg_pool1d(x, 2),
    "einsum": lambda x: torch.einsum("ij,jk", x, W),
    "where": lambda x: torch.where(x > 0, x, x),
}


@pytest.mark.parametrize("function", COMPUTING.values(), ids=COMPUTING.keys())
def test_everything_computes_in_the_regions_dtype_at_every_level(level, function):
    amp, half = level
    with amp.disable_casts():
        exact = function(X)
    before = function(X).dtype
    with amp.half_region():
        in_half = function(X)
    with amp.float_region():
        in_float = function(X.to(half))
        torch.testing.assert_close(function(X), exact, rtol=0, atol=0)
    assert (in_half.dtype, in_float.dtype) == (half, torch.float32)
    torch.testing.assert_close(in_half.float(), exact, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(in_float, exact, rtol=3e-2, atol=3e-2)
    assert function(X).dtype is before


def product():
    return (X @ W).dtype


def test_the_innermost_region_or_disable_casts_decides(level):
    amp, half = level
    outside = product()
    with amp.half_region():
        with amp.float_region():
            assert product() is torch.float32
            with amp.half_region():
                assert product() is half
            with amp.disable_casts():
                assert product() is torch.float32
                assert (X.to(half) + X.to(half)).dtype is half
                with amp.half_region():
                    assert product() is half
                assert (X.to(half) + X.to(half)).dtype is half
            assert (X.to(half) + X.to(half)).dtype is torch.float32
        assert product() is half
    with amp.disable_casts(), amp.half_region():
        assert product() is half
    assert product() is outside


def test_an_exception_restores_the_precision_around_the_region(level):
    amp, half = level
    outside = product()
    with pytest.raises(KeyError), amp.half_region(), amp.float_region():
        raise KeyError
    assert product() is outside
    with amp.half_region():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), amp.float_region():
            X @ X
        assert product() is half


def test_a_region_is_a_decorator_that_can_be_called_again_and_recursively(level):
    amp, half = level

    @amp.half_region()
    def recursive(depth):
        """Say what it computes in."""
        return [product()] + (recursive(depth - 1) if depth else [])

    assert recursive(2) == recursive(2) == [half] * 3
    assert (recursive.__name__, recursive.__doc__) == ("recursive", "Say what it computes in.")
    assert product() is (half if amp_casts(amp) else torch.float32)


@pytest.mark.parametrize("name", ["disable_casts", "half_region", "float_region"])
def test_one_object_may_be_entered_again_inside_itself_and_in_other_threads(level, name):
    amp, half = level
    inside = half if name == "half_region" else torch.float32
    outside, block = product(), getattr(amp, name)()
    entered, left = threading.Event(), threading.Event()
    seen = []

    def in_a_thread():
        with block, amp.half_region():
            entered.set()
            left.wait(10)
            seen.append(product())
        seen.append(product())

    thread = threading.Thread(target=in_a_thread)
    with amp.float_region():
        with block:
            thread.start()
            entered.wait(10)
            with block:
                assert product() is inside
            assert product() is inside
        assert product() is torch.float32
    left.set()
    thread.join()
    assert seen == [half, outside]
    assert product() is outside


def test_one_decorator_serves_several_threads(level):
    amp, half = level
    both, seen = threading.Barrier(2, timeout=10), []

    @amp.half_region()
    def in_half():
        both.wait()
        seen.append(product())

    def run():
        in_half()
        seen.append(product())

    outside = product()
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, seen)) == sorted(map(str, [half, half, outside, outside]))


def amp_casts(amp):
    return process.dtype is not OFF


def test_a_region_is_the_calling_threads(level):
    amp, _ = level
    outside, seen = product(), []
    region = amp.float_region if outside in HALVES else amp.half_region
    with region():
        assert product() is not outside
        thread = threading.Thread(target=lambda: seen.append(product()))
        thread.start()
        thread.join()
    assert seen == [outside]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_other_dtypes_are_never_touched(level, dtype):
    amp, _ = level
    x = torch.ones(2, 2).to(dtype)
    for region in (amp.half_region, amp.float_region):
        with region():
            assert (x @ x).dtype is (x + x).dtype is dtype


def test_in_place_and_out_calls_conversions_and_views_are_left_alone(level):
    amp, half = level
    with amp.half_region():
        x = X.clone()
        x += 1
        x.mul_(2).exp_()
        assert x.dtype is torch.float32
        assert torch.add(X, X, out=torch.empty(4, 3)).dtype is torch.float32
        assert X.T.dtype is X[0].dtype is X.float().dtype is torch.zeros_like(X).dtype
        assert X.T.dtype is torch.float32
        assert X.double().dtype is torch.float64
    with amp.float_region():
        assert X.to(half).clone().dtype is half
    torch.testing.assert_close(x, (2 * (X + 1)).exp())


def test_numpy_is_given_float32_by_a_float_region_alone(level):
    """It has no bfloat16; in a half region it gets what is there, which may be float32."""
    amp, half = level
    x = torch.tensor([1.0, 2.5], dtype=half)
    with amp.float_region():
        for array in (x.numpy(), np.asarray(x)):
            assert array.dtype == np.float32
            assert array.tolist() == [1.0, 2.5]
    with amp.half_region():
        assert X.numpy().dtype == np.asarray(X).dtype == np.float32


def test_what_the_user_passes_is_not_changed(level):
    amp, half = level
    tensors = [X, X]
    with amp.half_region():
        assert torch.stack(tensors).dtype is half
    assert tensors[0] is tensors[1] is X
    assert X.dtype is torch.float32


@pytest.mark.parametrize("name", ["half_region", "float_region"])
def test_gradients_through_a_region_reach_fp32_leaves(level, name):
    amp, _ = level
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    with getattr(amp, name)():
        loss = (F.relu(x @ w) ** 2).sum()
    loss.backward()
    assert x.grad.dtype is w.grad.dtype is torch.float32
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    (F.relu(exact_x @ exact_w) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, exact_x.grad.float(), rtol=3e-2, atol=1e-2)
    torch.testing.assert_close(w.grad, exact_w.grad.float(), rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize("function", ["inv", "svdvals", "cholesky", "det"])
def test_what_has_no_half_kernel_on_the_cpu_runs_in_fp32_in_a_half_region(level, function):
    amp, half = level
    matrix = W @ W.mT + torch.eye(3)
    with amp.disable_casts():
        exact = getattr(torch.linalg, function)(matrix.float())
    with amp.half_region():
        result = getattr(torch.linalg, function)(matrix.float())
        assert (result * 1).dtype is half
    torch.testing.assert_close(result, exact, rtol=1e-3, atol=1e-3)
    assert result.dtype is torch.float32


def test_fft_and_half_binary_cross_entropy_in_a_half_region(level):
    amp, _ = level
    with amp.half_region():
        assert torch.fft.rfft(X).dtype is torch.complex64
        loss = F.binary_cross_entropy(torch.sigmoid(X), torch.ones(4, 3))
    assert loss.dtype is torch.float32


class Block(nn.Module):
    """A norm, a recurrent layer and a linear layer, run in a region of its own."""

    def __init__(self, region=contextlib.nullcontext):
        super().__init__()
        self.region = region
        self.norm = nn.BatchNorm1d(3)
        self.lstm = nn.LSTM(3, 4)
        self.fc = nn.Linear(4, 2)
        self.seen = []

    def forward(self, x):
        with self.region():
            y = self.norm(x)
            z, _ = self.lstm(y)
            out = self.fc(z)
            self.seen += [t.dtype for t in (y, z, out)]
        return out


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("name", ["half_region", "float_region"])
def test_layers_in_a_region_compute_in_it_and_train(amp, opt_level, name):
    block = Block(getattr(amp, name))
    start(amp, block, opt_level)
    expected = LEVELS[opt_level] if name == "half_region" else torch.float32
    out = block(X)
    assert set(block.seen) == {expected}
    torch.testing.assert_close(
        block.norm.running_mean.float(), 0.1 * X.mean(0), rtol=1e-2, atol=1e-2
    )
    out.float().sum().backward()
    for param in block.parameters():
        assert param.grad.dtype is param.dtype
        assert param.grad.isfinite().all()
    assert block.lstm.weight_hh_l0.grad.abs().sum() > 0


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_float_region_equals_the_fp32_model_where_weights_are_fp32(amp, opt_level):
    plain = Block()
    block = copy.deepcopy(plain)
    block.region = amp.float_region
    expected = plain(X)
    start(amp, block, opt_level)
    tolerance = 0 if opt_level in ("O0", "O1", "O4") else 5e-2
    torch.testing.assert_close(block(X).float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("call", [F.batch_norm, torch.batch_norm, "by name"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_a_norm_updates_running_statistics_of_any_dtype(level, call, stored):
    amp, half = level
    mean, var = torch.zeros(3, dtype=stored), torch.ones(3, dtype=stored)
    frozen = nn.Parameter(torch.full((3,), 2.0, dtype=stored), requires_grad=False)
    with amp.float_region():
        if call is F.batch_norm:
            out = F.batch_norm(X.to(half), mean, var, frozen, None, True, 0.5)
        elif call is torch.batch_norm:
            out = torch.batch_norm(X, frozen, None, mean, var, True, 0.5, 1e-5, False)
        else:
            options = {"training": True, "momentum": 0.5, "eps": 1e-5, "cudnn_enabled": False}
            out = torch.batch_norm(
                input=X, weight=frozen, bias=None, running_mean=mean, running_var=var, **options
            )
    assert (out.dtype, mean.dtype) == (torch.float32, stored)
    torch.testing.assert_close(mean.float(), 0.5 * X.mean(0), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(var.float(), 0.5 + 0.5 * X.var(0), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out.square().mean(0), torch.full((3,), 4.0), rtol=1e-2, atol=1e-2)
    assert frozen._version == 0


class Observer(nn.Module):
    """Notes what a function sees inside its forward."""

    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.function = function
        self.seen = None

    def forward(self, x):
        self.seen = self.function()
        return self.fc(x)


@pytest.mark.parametrize(("inside", "around"), [("O1", "O5"), ("O5", "O1"), ("O2", "O4")])
def test_the_half_dtype_is_that_of_the_model_whose_forward_runs(amp, inside, around):
    def in_region():
        with amp.half_region():
            return product()

    model = start(amp, Observer(in_region), inside)
    other = start(amp, nn.Linear(3, 3), around)
    model(X)
    assert model.seen is LEVELS[inside]
    assert in_region() is LEVELS[around]
    del other


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_region_around_a_model_decides_inside_its_forward(amp, opt_level):
    model = start(amp, Observer(product), opt_level)
    other = start(amp, nn.Linear(3, 3), "O4" if opt_level == "O1" else "O1")
    with amp.half_region():
        half = product()
        assert half in HALVES
        model(X)
        assert model.seen is half
    with amp.float_region():
        model(X)
        assert model.seen is torch.float32
    del other


@pytest.mark.parametrize("name", ["half_region", "float_region"])
@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_layer_in_a_region(level, name, training):
    amp, half = level
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).train(training)
    x = torch.rand(2, 4, 6)
    with amp.disable_casts():
        exact = copy.deepcopy(layer).double()(x.double())
    with getattr(amp, name)(), torch.no_grad():
        out = layer(x)
    assert out.dtype is (half if name == "half_region" else torch.float32)
    torch.testing.assert_close(out.double(), exact, rtol=5e-2, atol=5e-2)


def test_a_region_changes_nothing_before_initialize_and_after_deactivate(amp):
    def unchanged():
        for region in (amp.half_region, amp.float_region):
            with region():
                assert product() is torch.float32
                assert (X.half() + X.half()).dtype is torch.float16

    unchanged()
    model = start(amp, nn.Linear(3, 3), "O2")
    amp.deactivate()
    unchanged()
    del model


def test_a_region_acts_on_the_device_types_of_the_models_only(amp):
    model = start(amp, nn.Linear(3, 3), "O0")
    with amp.half_region():
        assert (X.to("meta") @ W.to("meta")).dtype is torch.float32
        assert product() is torch.float16
    del model


# -- misuse --------------------------------------------------------------------------------------

BLOCKS = ["disable_casts", "half_region", "float_region"]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("given", [product, 3])
def test_a_block_without_its_parentheses_is_refused(amp, name, given):
    words = (
        f"amp.{name}() takes no argument; got {given!r}; call it with empty parentheses: "
        f"@amp.{name}() to decorate a function."
    )
    with pytest.raises(TypeError, match=exactly(words)):
        getattr(amp, name)(given)


def yields():
    yield product()


async def awaits():
    return product()


async def yields_later():
    yield product()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "late",
    [yields, awaits, yields_later, functools.partial(yields), nn.Linear, 3],
    ids=["generator", "coroutine", "async generator", "partial", "class", "number"],
)
def test_a_block_decorates_only_what_computes_before_it_returns(amp, name, late):
    words = (
        "a region decorates a function that computes before it returns, no generator, coroutine "
        f"or class; got {late!r}; write 'with amp.half_region():' (or the like) inside of it, "
        "around what computes there."
    )
    with pytest.raises(TypeError, match=exactly(words)):
        getattr(amp, name)()(late)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_decorates_methods_and_partials(level, name):
    amp, half = level
    observer = Observer(product)
    seen = [
        getattr(amp, name)()(called)(*args)
        for called, args in (
            (functools.partial(product), ()),
            (X.matmul, (W,)),
            (observer.forward, (X,)),
        )
    ]
    expected = half if name == "half_region" else torch.float32
    assert seen[0] is seen[1].dtype is observer.seen is expected


@pytest.mark.parametrize("name", BLOCKS)
def test_a_layer_is_refused_for_its_parameters_would_be_lost(amp, name):
    words = "would lose its parameters by it; got an object of type Linear; decorate its forward"
    with pytest.raises(TypeError, match=words):
        getattr(amp, name)()(nn.Linear(2, 2))


@pytest.mark.parametrize("name", BLOCKS)
def test_an_end_without_a_beginning_is_refused_and_changes_nothing(level, name):
    amp, _ = level
    outside = product()
    words = (
        "a region ends where it began, in the same thread; got an end without a beginning; call "
        "'with amp.half_region():' (or the like), which does both."
    )
    with pytest.raises(RuntimeError, match=exactly(words)):
        getattr(amp, name)().__exit__(None, None, None)
    assert product() is outside


# -- functions of the user's own that ask torch's modes --------------------------------------------


def linear(x):
    """Dispatch as torch's functions do; has the name of one of them."""
    if has_torch_function((x,)):
        return handle_torch_function(linear, (x,), x)
    return x


def batch_norm(x, statistics):
    if has_torch_function((x, statistics)):
        return handle_torch_function(batch_norm, (x, statistics), x, statistics)
    return statistics


def test_a_users_function_with_the_name_of_torchs_is_left_alone(level):
    amp, half = level
    with amp.half_region():
        assert linear(X) is X
        assert F.linear(X, W).dtype is half
    low = X.to(half)
    with amp.float_region():
        assert linear(low) is low
        assert batch_norm(low, low) is low
        assert F.linear(low, W).dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize(
    "call", [torch.cdist, lambda x, y: F.pdist(x), lambda x, y: margin(x), lambda x, y: nuclear(x)]
)
def test_what_has_no_half_kernel_is_in_float32_in_a_half_region(amp, level, call):
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    with amp.half_region():
        found = call(x, y)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, call(x, y))


def nuclear(x):
    return torch.linalg.matrix_norm(x, "nuc")


def margin(x):
    return F.multi_margin_loss(x, torch.arange(4))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_number_is_the_nearest_half_one_in_a_half_region(amp, level, compiled):
    """Also where the region casts the float32 scores that it is written into."""
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    scores = torch.randn(4, 4)
    mask = scores > 0

    def fill(scores):
        with amp.half_region():
            return [
                torch.where(mask, scores, -1e9),
                scores.masked_fill(mask, -1e9),
                scores.where(mask, -1e9),
            ]

    torch.compiler.reset()
    run = torch.compile(fill, backend="eager", fullgraph=True) if compiled else fill
    for found in run(scores):
        assert found.dtype is torch.float16
        assert found.min() == torch.finfo(torch.float16).min
