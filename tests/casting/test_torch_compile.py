"""torch.compile of whole graphs computes what eager mode computes, at every level."""

import contextlib
import copy
import dataclasses
import subprocess
import sys
import types
from collections import OrderedDict, deque

import pytest
import torch
import torch._dynamo
from casting_support import activate
from support import nightly_but
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from amp_patch.casting.libraries.library_casts import Rule, wrap

# Compiling takes long. O1 and O4 share their code, as do O2 and O3, which the others' tests run.
LEVELS = nightly_but(("O1", "O2", "O5"), ("O0", "O1", "O2", "O3", "O4", "O5"))
BACKENDS = nightly_but(("aot_eager",), ("eager", "aot_eager"))
HALF = {"O1": torch.float16, "O4": torch.bfloat16}
FUNCTION_LEVELS = ("O1", "O4")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # torch's own, from tracing with the functorch state of the backends
    pytest.mark.filterwarnings("ignore:.*isinstance.*treespec:FutureWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
    """Start with no compiled code, and end with none."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function, backend="eager", since=(2, 6)):
    """Compile in one piece; in several by a torch before the version that traces the whole."""
    return torch.compile(function, backend=backend, fullgraph=torch.__version__ >= since)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_same(got, expected, exact=True):
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-2, "atol": 1e-2}
    got, expected = _pytree.tree_leaves(got), _pytree.tree_leaves(expected)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    torch.testing.assert_close(got, expected, **tolerance)


X = torch.linspace(-1, 1, 12).reshape(4, 3)
H = X.half()
W = torch.linspace(-0.5, 0.5, 9).reshape(3, 3)
FUNCTIONS = {
    "linear": lambda x: F.linear(x, W),
    "matmul": lambda x: torch.matmul(x, W),
    "method": lambda x: x.matmul(W),
    "chained methods": lambda x: x.mm(W).softmax(dim=-1).sum(dim=0),
    "operator": lambda x: x @ W,
    "reflected operator": lambda x: 1 / (x @ W + 3),
    "reflected division of a float": lambda x: 2.5 / (x @ W + 3),
    "power": lambda x: (x @ W) ** 2,
    "reflected power": lambda x: 2 ** (x @ W),
    "power method": lambda x: (x @ W).pow(2),
    "tensor division": lambda x: (x @ W) / (x @ W + 3),
    "division by a number": lambda x: (x @ W) / 2,
    "addition": lambda x: (x @ W) + x,
    "comparison": lambda x: (x @ W) > 0,
    "exp": lambda x: torch.exp(x @ W),
    "norms": lambda x: F.layer_norm(x @ W, (3,)) + (x @ W).norm(),
    "loss": lambda x: F.cross_entropy(x @ W, torch.tensor([0, 1, 2, 0])),
    "loss made here": lambda x: nn.CrossEntropyLoss()(x @ W, torch.tensor([0, 1, 2, 0])),
    "loss made here, by options": lambda x: nn.CrossEntropyLoss(
        torch.ones(3), None, 2, reduction="sum", label_smoothing=0.1
    )(x @ W, torch.tensor([0, 1, 2, 0])),
    "modules made here": lambda x: nn.MSELoss()(nn.LogSoftmax(-1)(x @ W), x),
    "bce": lambda x: F.binary_cross_entropy(torch.sigmoid(x @ W), torch.ones(4, 3)),
    "promoted": lambda x: torch.addcmul(x @ W, x, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, W),
    "list": lambda x: torch.linalg.multi_dot([x, W, W]),
    "nested list": lambda x: torch.cat([x @ W, x]).sum(),
    "keywords": lambda x: F.linear(input=x, weight=W, bias=None),
    "special": lambda x: torch.special.expm1(x @ W),
    "asked dtype": lambda x: (x @ W).sum(dtype=torch.float64),
    "softmax of dtype": lambda x: F.softmax(x @ W, dim=0, dtype=torch.float16),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "in place": lambda x: (x @ W).add_(1).exp_(),
    "inverse": lambda x: torch.linalg.inv(x.mT @ x + torch.eye(3)),
    "float64": lambda x: x.double() @ W.double(),
    "conv": lambda x: F.conv1d(x[None], W[:, :1].expand(3, 4)[..., None]),
    "tensor method by class": lambda x: torch.Tensor.matmul(x, W),
}


#: Of these, one or two of each rule, the ordinary run compiles more than the trace.
COMPILED_FURTHER = {
    "linear", "chained methods", "reflected division of a float", "power method", "loss",
    "bce", "promoted", "list", "softmax of dtype", "attention", "in place", "conv",
}  # fmt: skip
EVERY_FUNCTION = [(name, backend) for name in FUNCTIONS for backend in ("eager", "aot_eager")]
ORDINARY_FUNCTIONS = [
    (name, "aot_eager" if name in COMPILED_FURTHER else "eager") for name in FUNCTIONS
]


@pytest.mark.filterwarnings("ignore:binary_cross_entropy needs the digits")
@pytest.mark.parametrize("case", nightly_but(ORDINARY_FUNCTIONS, EVERY_FUNCTION), ids="-".join)
def test_a_function_computes_what_eager_computes(amp, case):
    function, backend = FUNCTIONS[case[0]], case[1]
    model = activate(amp)
    x = X.clone().requires_grad_()
    expected = function(x)
    got = compiled(function, backend)(x)
    assert_same(got, expected)
    assert graphs() == 1
    if expected.requires_grad:
        (want,) = torch.autograd.grad(expected.double().sum(), x)
        (grad,) = torch.autograd.grad(got.double().sum(), x)
        assert_same(grad, want, exact=backend == "eager")
    del model


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize(
    "name", ["operator", "chained methods", "exp", "loss", "loss made here", "reflected power"]
)
def test_functions_follow_the_level(amp, opt_level, name):
    model = activate(amp, opt_level)
    function = FUNCTIONS[name]
    assert_same(compiled(function)(X), function(X))
    del model


class Net(nn.Module):
    """Convolution, norms, a recurrent cell, attention and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(4)
        self.cell = nn.GRUCell(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        y = F.relu(self.batch_norm(self.conv(x))).transpose(1, 2)
        state = self.cell(y[:, 0])
        z, _ = self.attention(y, y, y, need_weights=False)
        z = self.norm(z + y) * (1 / (1 + state.exp().unsqueeze(1)))
        return self.head(z).softmax(-1)


def step(forward, model, x, amp, optimizer):
    """Train one step; return the loss, the result and the gradients."""
    out = forward(x)
    loss = out.float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    grads = [p.grad.clone() for p in amp.master_params(optimizer) if p.grad is not None]
    optimizer.step()
    return loss.detach(), out.detach(), grads


def pair(amp, opt_level, net, **options):
    """Initialize two equal models with optimizers; return both."""
    models = [net, copy.deepcopy(net)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    amp.initialize(models, optimizers, opt_level=opt_level, verbosity=0, **options)
    return models, optimizers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "opt_level", nightly_but(("O1", "O5"), ("O0", "O1", "O2", "O3", "O4", "O5"))
)
def test_training_equals_eager_training_and_compiles_once(amp, opt_level, backend):
    (plain, model), (plain_optimizer, optimizer) = pair(amp, opt_level, Net(), loss_scale=128.0)
    forward = compiled(model, backend)
    for i in range(4):
        x = torch.rand(3, 3, 5)
        expected = step(plain, plain, x, amp, plain_optimizer)
        got = step(forward, model, x, amp, optimizer)
        assert_same(got, expected, exact=backend == "eager" and i == 0)
        if i == 1:
            after_two = graphs()
    assert graphs() == after_two <= 2
    assert_same(model.state_dict(), plain.state_dict(), exact=False)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_model_compiled_before_initialize_follows_it(amp, opt_level):
    if torch.__version__ < (2, 12) and opt_level in ("O2", "O3", "O5"):
        pytest.skip("torch keeps its graph when the weights' dtype changes, without amp too")
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    forward = compiled(model)
    in_float = forward(X)
    assert in_float.dtype is torch.float32
    activate(amp, opt_level, model)
    for _ in range(2):
        assert_same(forward(X), model(X))
    amp.deactivate()
    assert_same(forward(X), in_float, exact=opt_level in ("O0", "O1", "O4"))


@pytest.mark.parametrize("opt_level", FUNCTION_LEVELS)
def test_a_function_compiled_before_initialize_follows_it_and_deactivate(amp, opt_level):
    function = compiled(lambda x: (x @ W).softmax(0) + (x @ W))
    assert function(X).dtype is torch.float32
    in_float = function(X)

    def dtype_of_product():
        return compiled_product(X).dtype

    compiled_product = compiled(lambda x: x @ W)
    assert dtype_of_product() is torch.float32
    models = [activate(amp, opt_level)]
    assert dtype_of_product() is HALF[opt_level]
    other_level = "O4" if opt_level == "O1" else "O1"
    models.append(activate(amp, other_level))
    assert dtype_of_product() is HALF[other_level]
    amp.deactivate()
    assert dtype_of_product() is torch.float32
    assert_same(function(X), in_float)


MODES = ("disable_casts", "half_region", "float_region")


EVERY_MODE = [(level, name) for level in ("O0", "O1", "O2", "O3", "O4", "O5") for name in MODES]
ORDINARY_MODES = [*(("O1", name) for name in MODES), ("O2", "float_region"), ("O5", "half_region")]


@pytest.mark.parametrize("case", nightly_but(ORDINARY_MODES, EVERY_MODE), ids="-".join)
def test_a_mode_inside_and_around_a_compiled_function(amp, case):
    opt_level, name = case
    model = activate(amp, opt_level)
    mode = getattr(amp, name)

    def inside(x):
        before = x @ W
        with mode():
            within = x @ W, x + x, 1 / (x + 3), x.exp(), F.relu(x).sum()
        return before, within, x @ W

    def plain(x):
        return x @ W, x.exp()

    assert_same(compiled(inside)(X), inside(X))
    around = compiled(plain)
    for _ in range(2):
        assert_same(around(X), plain(X))
        with mode():
            assert_same(around(X), plain(X))
    assert_same(around(X), plain(X))
    del model


# By methods and by functions that torch writes in Python, which a mode sees in other ways.
IN_MODES = {
    "operators": lambda x: (x @ x.mT, (x.abs() + 1) ** x, 2**x, 1 / (x.abs() + 1)),
    "products by methods": lambda x: (x.bmm(x.mT), x.matmul(x.mT), x[0].mm(x[1].mT)),
    "sums of products": lambda x: (x[0].addmm(x[0, :, :2], x[1]), x.baddbmm(x[:, :, :2], x)),
    "norms": lambda x: (x.norm(), x.norm(dim=1), F.normalize(x), torch.norm(x)),
    "methods": lambda x: (x.softmax(-1), x.sum(1), x.exp(), x.cumsum(0), x.logsumexp(1)),
    "sizes": lambda x: (
        F.interpolate(x, scale_factor=2),
        F.pad(x, (1, 1)),
        F.pad(x, (1, 1), "reflect"),
    ),
    "losses": lambda x: (F.triplet_margin_loss(x, x + 1, x - 1), F.cosine_similarity(x, x + 1)),
}


@pytest.mark.parametrize("opt_level", nightly_but(("O1",), ("O0", "O1", "O4", "O5")))
@pytest.mark.parametrize("name", nightly_but(("half_region",), MODES))
def test_functions_of_arguments_and_of_computed_tensors_in_a_mode(amp, opt_level, name):
    model = activate(amp, opt_level)
    x = torch.linspace(-2, 3, 12).view(2, 2, 3)
    mode = getattr(amp, name)
    for function in IN_MODES.values():

        def inside(x, function=function):
            with mode():
                return function(x), function(x * 1)

        assert_same(compiled(inside)(x), inside(x))
    del model


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6 traces no super() of a method")
def test_unflatten_in_a_region(amp):
    model = activate(amp)

    def inside(x):
        with amp.half_region():
            return x.unflatten(1, (3, 1)), (x @ W).unflatten(0, (1, -1))

    assert_same(compiled(inside)(X), inside(X))
    del model


class Attention(nn.Module):
    """Attention with a padding mask, by a layer alone and by one inside of another."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, mask):
        x = self.encoder(x, src_key_padding_mask=mask)
        return self.attention(x, x, x, key_padding_mask=mask)[0]


@pytest.mark.parametrize("rule", nightly_but((None, "half"), (None, "half", "float")))
@pytest.mark.parametrize("opt_level", nightly_but(("O1",), FUNCTION_LEVELS))
def test_attention_with_a_padding_mask(amp, opt_level, rule):
    rules = {"modules": {"attention": rule}} if rule else {}
    model = activate(amp, opt_level, Attention(), rules=rules)
    x = torch.linspace(-1, 2, 24).view(2, 3, 4)
    mask = torch.tensor([[False, False, True], [False, False, False]])
    gradients = []
    for forward in (model, compiled(model, "aot_eager")):
        loss = forward(x, mask).float().square().sum()
        gradients.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    assert_same(gradients[1], gradients[0])


def test_attention_refuses_a_padding_mask_of_another_length(amp):
    model = activate(amp, "O1", Attention())
    x, mask = torch.ones(2, 3, 4), torch.zeros(2, 4, dtype=torch.bool)
    for forward in (model.attention, compiled(model.attention)):
        with pytest.raises(Exception, match="key_padded_mask.shape.1. to be 3, but got 4"):
            forward(x, x, x, key_padding_mask=mask)


def test_nested_modes_inside_a_compiled_function(amp):
    model = activate(amp)

    def nested(x):
        with amp.half_region():
            with amp.float_region():
                a = x.half() + x.half()
                with amp.disable_casts():
                    b = x @ W, x.half() + 1
            c = x + 1
        with amp.disable_casts(), amp.half_region():
            d = x + 1
        return a, b, c, d, x @ W

    assert_same(compiled(nested)(X), nested(X))
    del model


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("name", nightly_but(("half_region",), MODES))
def test_a_decorated_function_runs_in_its_mode_inside_a_compiled_one(amp, opt_level, name):
    model = activate(amp, opt_level)

    @getattr(amp, name)()
    def decorated(x):
        return x @ W, x + x

    def function(x):
        return decorated(x), x @ W, x + x

    for got in (compiled(function)(X), (compiled(decorated)(X), X @ W, X + X)):
        assert_same(got, function(X))
    del model


def test_a_batch_norm_in_a_region_updates_its_statistics(amp):
    for opt_level, name in (("O1", "half_region"), ("O3", "float_region")):
        norm = activate(amp, opt_level, nn.Sequential(nn.BatchNorm1d(3)))
        other = copy.deepcopy(norm).to(norm[0].weight.dtype)

        def run(model, name=name):
            with getattr(amp, name)():
                return model(X)

        assert_same(compiled(lambda other=other, run=run: run(other))(), run(norm))
        assert_same(other.state_dict(), norm.state_dict())
        amp.deactivate()


@dataclasses.dataclass
class Batch:
    """An input with two tensors."""

    first: torch.Tensor
    second: torch.Tensor


class TakesBatch(nn.Module):
    """Takes a dict or a dataclass, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, batch):
        if isinstance(batch, Batch):
            batch = {"first": batch.first, "second": batch.second}
        return {"out": self.fc(batch["first"]), "sum": [batch["second"] + 1]}


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_containers_go_in_and_out_of_a_compiled_model(amp, opt_level, kind):
    model = activate(amp, opt_level, TakesBatch())
    batch = {"first": X, "second": X} if kind == "dict" else Batch(X, X)
    got, expected = compiled(model)(batch), model(batch)
    assert got.keys() == expected.keys()
    assert_same(got, expected)


class Out(OrderedDict):
    """An output with a constructor of its own."""

    def __init__(self, logits):
        super().__init__(logits=logits)


class Returns(nn.Module):
    """Returns its result in a container of a kind."""

    def __init__(self, kind):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.kind = kind

    def forward(self, x):
        return self.kind(self.fc(x))


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6 cannot compile their making")
@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("kind", [Out, lambda y: deque([y], maxlen=2)], ids=["Out", "deque"])
def test_containers_made_in_a_traced_model_keep_their_kind(amp, opt_level, kind):
    model = activate(amp, opt_level, Returns(kind))
    forward = compiled(lambda x: model(x), since=(2, 12) if kind is Out else (2, 7))
    got, expected = forward(X), model(X)
    assert type(got) is type(expected) is type(kind(X))
    assert_same(*[list(o.values()) if kind is Out else list(o) for o in (got, expected)])


def doubled(module, args):
    return (2 * args[0],)


def halved(module, args, outputs):
    return outputs / 2


@pytest.mark.parametrize("opt_level", LEVELS)
def test_functions_of_the_users_among_our_hooks(amp, opt_level):
    """Ours are methods, and come before hooks that were there."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for module in (model, model[0]):
        module.register_forward_pre_hook(doubled)
        module.register_forward_hook(halved)
    activate(amp, opt_level, model, rules={"modules": {"0": "float"}})
    assert_same(compiled(model)(X), model(X))
    for module in (model, model[0]):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            assert len(hooks) == 2
            assert list(dict.keys(hooks)) == list(hooks)


# since when torch traces a checkpoint of what writes to an object outside of it, as our hooks do
WRITES_IN_CHECKPOINTS = (2, 13)


class Checkpointed(nn.Module):
    """A block under a checkpoint that torch.compile traces."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x):
        y = checkpoint(self.block, x, use_reentrant=False)
        return y @ W.to(y.dtype)


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad.*:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_checkpoint_inside_a_compiled_model(amp, opt_level, backend):
    (plain, model), (plain_optimizer, optimizer) = pair(amp, opt_level, Checkpointed())
    forward = compiled(model, backend)
    for _ in range(2):
        expected = step(plain, plain, X, amp, plain_optimizer)
        assert_same(step(forward, model, X, amp, optimizer), expected, exact=False)


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad.*:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_checkpoint_around_a_whole_model(amp, opt_level, backend):
    (plain, model), (plain_optimizer, optimizer) = pair(amp, opt_level, Checkpointed().block)
    forward = compiled(
        lambda x: checkpoint(model, x, use_reentrant=False), backend, since=WRITES_IN_CHECKPOINTS
    )
    for _ in range(2):
        expected = step(plain, plain, X, amp, plain_optimizer)
        assert_same(step(forward, model, X, amp, optimizer), expected, exact=False)


LIBRARY = wrap(torch.mul, Rule("promote", "cpu"))


class OfALibrary(nn.Module):
    """A library's function between two layers, with a float32 tensor that is no input."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.after(LIBRARY(self.before(x), X[:, :1]))


# of what the one piece hands to the other, where torch makes two
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("opt_level", nightly_but(("O2",), ("O1", "O2", "O3", "O4", "O5")))
@pytest.mark.parametrize("recompute", [False, True])
def test_a_library_function_in_a_model_that_is_called_in_a_compiled_function(
    amp, opt_level, recompute
):
    """It gives the model's dtype inside of the model, and float32 after it."""
    model = activate(amp, opt_level, OfALibrary())

    def whole(x):
        y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        return y, LIBRARY(y.float(), H[:, :1])

    got = compiled(whole, since=WRITES_IN_CHECKPOINTS if recompute else (2, 6))(X)
    assert_same(got, whole(X))
    assert got[1].dtype is torch.float32


class Nested(nn.Module):
    """Calls itself, or another model, and then goes on."""

    def __init__(self, other=None):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.others = [] if other is None else [other]

    def forward(self, x, depth=2):
        y = self.fc(x.to(self.fc.weight.dtype))
        if depth:
            y = y + [self, *self.others][-1](y, depth - 1)
        return y @ W.to(y.dtype)


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("around", nightly_but((None, "O4", "O5"), (None, "O1", "O4", "O5")))
def test_a_model_that_calls_itself_is_at_its_level_to_the_end(amp, opt_level, around):
    model = activate(amp, opt_level, Nested())
    outer = model if around is None else activate(amp, around, Nested(model))
    assert_same(compiled(lambda x: outer(x))(X), outer(X))


@pytest.mark.parametrize(("opt_level", "other"), [("O2", "O5"), ("O5", "O2"), ("O0", "O5")])
def test_a_region_in_a_traced_model_has_that_models_half_dtype(amp, opt_level, other):
    def in_half(y):
        with amp.half_region():
            return [y.sum().double(), (y + y).double(), y.exp().dtype is torch.float16]

    model = activate(amp, opt_level, Returns(in_half))
    last = activate(amp, other)
    got, expected = compiled(lambda x: model(x))(X), model(X)
    assert got[-1] is expected[-1] is (opt_level != "O5")
    assert_same(got[:-1], expected[:-1])
    del last


@pytest.mark.parametrize("opt_level", FUNCTION_LEVELS)
def test_compiled_functions_in_inference_mode_and_no_grad(amp, opt_level):
    model = activate(amp, opt_level, nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)))
    forward = compiled(model)
    for grad_mode in (torch.inference_mode, torch.no_grad, contextlib.nullcontext):
        with grad_mode():
            assert_same(forward(X), model(X))


def test_a_compiled_model_reads_weights_as_they_are_now(amp):
    model = activate(amp, "O1", nn.Linear(3, 3))
    forward = compiled(model)
    forward(X)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    assert forward(X).abs().sum() == 0
    model.weight.data = torch.eye(3)
    assert_same(forward(X), X.half())


@pytest.mark.parametrize("opt_level", FUNCTION_LEVELS)
@pytest.mark.parametrize("made", ["itself", "a copy"])
def test_a_model_moved_after_initialize_is_cast_where_it_is_traced_first(amp, opt_level, made):
    model = activate(amp, opt_level)
    model = (model if made == "itself" else copy.deepcopy(model)).to("meta")
    outputs = compiled(model)(torch.empty(2, 3, device="meta"))
    assert outputs.dtype is HALF[opt_level]


def test_a_decorated_function_inside_a_compiled_one(amp):
    model = activate(amp)

    @amp.half_function
    def halved(x, *, factor):
        return x * factor

    @amp.float_function
    def full(x):
        return x + 1

    def function(x):
        return halved(x, factor=2.0), full(H), halved(full(H), factor=W[0])

    assert_same(compiled(function)(X), function(X))
    del model


@pytest.mark.parametrize(
    "rules",
    [
        {"relu": "half", "matmul": "off", "exp": "bfloat16"},
        {"torch.Tensor.__matmul__": "bfloat16", "torch.matmul": "off", "torch.exp": "half"},
        {"torch.Tensor.__matmul__": "off", "torch.Tensor.matmul": "float", "mm": "bfloat16"},
        {"pow": "half", "torch.Tensor.__rpow__": "off", "reciprocal": "off"},
    ],
)
def test_users_rules_hold_in_compiled_functions(amp, rules):
    model = activate(amp, rules=rules)

    def function(x):
        products = x @ W, x.matmul(W), torch.matmul(x, W), torch.mm(x, W)
        return F.relu(x), products, x.exp(), torch.exp(x), x**2, 2**H, 1 / (H + 3), H.pow(2)

    assert_same(compiled(function)(X), function(X))
    del model


RULED = {
    "torch.nn.functional.softmax": lambda x: F.softmax(x, 0),
    "torch.nn.functional.layer_norm": lambda x: F.layer_norm(x, (3,)),
    "torch.nn.functional.mse_loss": lambda x: F.mse_loss(x, 2 * x),
    "torch.nn.functional.cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 0])),
    "torch.nn.functional.normalize": lambda x: F.normalize(x),
    "torch.Tensor.norm": lambda x: x.norm(),
    "torch.Tensor.__rpow__": lambda x: 2**x,
    "torch.functional.norm": lambda x: torch.functional.norm(x),
}


@pytest.mark.parametrize("rule", nightly_but(("half",), ("off", "half", "float")))
@pytest.mark.parametrize("path", RULED)
def test_a_rule_for_a_dotted_path_decides_all_that_the_function_does(amp, path, rule):
    dtype = {"off": None, "half": torch.float16, "float": torch.float32}[rule]
    expected = [RULED[path](x if dtype is None else x.to(dtype)) for x in (X, H)]
    model = activate(amp, rules={path: rule})
    function = compiled(lambda x: (RULED[path](x), x @ W))
    for x, want in zip((X, H), expected, strict=True):
        assert_same(function(x), (want, x.half() @ W.half()))
    del model


@pytest.mark.parametrize("inside", ["O1", "O5"])
def test_a_model_of_another_level_inside_a_compiled_function(amp, inside):
    inner = activate(amp, inside, nn.Linear(3, 3))
    other = activate(amp, "O4")

    def function(x):
        return x @ W, inner(x), x @ W

    for _ in range(2):
        assert_same(compiled(function)(X), function(X))
    del other


def test_out_and_float64_stay_as_they_are(amp):
    model = activate(amp)

    def function(x):
        out = torch.empty(4, 3)
        torch.mm(x, W, out=out)
        return out, x.double() @ W.double()

    assert_same(compiled(function)(X), function(X))
    del model


def test_dynamic_shapes_do_not_compile_for_each_batch(amp):
    model = activate(amp, "O1", nn.Linear(3, 3))
    forward = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for batch in (2, 5, 7, 9):
        assert_same(forward(torch.ones(batch, 3)), model(torch.ones(batch, 3)))
    assert graphs() == 1


@pytest.mark.slow(instead="the other backends")
# torch 2.6's own
@pytest.mark.filterwarnings("ignore:Skipping serialization of skipfiles_inline:UserWarning")
@pytest.mark.parametrize("opt_level", nightly_but(("O1",), ("O1", "O2")))
def test_inductor_trains_near_eager(amp, opt_level):
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2))
    (plain, model), (plain_optimizer, optimizer) = pair(amp, opt_level, net, loss_scale=128.0)
    forward = compiled(model, "inductor")
    for _ in range(2):
        expected = step(plain, plain, X, amp, plain_optimizer)
        assert_same(step(forward, model, X, amp, optimizer), expected, exact=False)


def test_an_operator_compiles_after_deactivate_as_before(amp):
    def function(x):
        return 1 / (x + 3), 2**x, x @ W, x**2, x.exp()

    expected = function(X)
    model = activate(amp)
    assert compiled(function)(X)[2].dtype is torch.float16
    amp.deactivate()
    torch._dynamo.reset()
    assert_same(compiled(function)(X), expected)
    del model


def test_an_operator_traced_before_initialize_is_traced_anew(amp):
    # torch.compile keeps how it handles an operator on arguments of some kinds
    def function(x, y):
        return x @ y, x**2, 2**x, 1 / x, x**y

    square = X[:3].abs().half() + 1
    compiled(function)(square, square)
    model = activate(amp)
    torch._dynamo.reset()
    got = compiled(lambda x, y: function(x, y))(square, square)
    assert_same(got, function(square, square))
    assert [t.dtype for t in got] == [torch.float16] + [torch.float32] * 4
    del model


COMPOSITES = {
    "normalize": lambda x: F.normalize(x),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="linear"),
    "upsample": lambda x: F.upsample(x[None], scale_factor=2.0, mode="linear"),
    "lp_pool1d": lambda x: F.lp_pool1d(x.abs(), 2.0, 2),
    "softmin": lambda x: F.softmin(x, dim=0),
    "local_response_norm": lambda x: F.local_response_norm(x[None], 2),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, (x > 0).to(x.dtype)),
    "triplet_margin_with_distance_loss": lambda x: F.triplet_margin_with_distance_loss(
        x, -x, x + 1
    ),
}


@pytest.mark.filterwarnings("ignore:.*nn.functional.upsample:UserWarning")
@pytest.mark.parametrize("opt_level", FUNCTION_LEVELS)
@pytest.mark.parametrize("name", COMPOSITES)
def test_functions_of_torch_that_call_patched_ones(amp, opt_level, name):
    model = activate(amp, opt_level)
    half = X.to(HALF[opt_level])
    assert_same(compiled(COMPOSITES[name])(half), COMPOSITES[name](half))
    del model


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own
@pytest.mark.parametrize("opt_level", FUNCTION_LEVELS)
def test_linearize_which_keeps_functions_of_torch_out_of_graphs(amp, opt_level):
    """They are not in the place of patched ones, though they name such."""
    model = activate(amp, opt_level, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    inputs, direction = torch.randn(5, 3), torch.randn(5, 3)
    outputs, derivative = torch.func.linearize(model, inputs)
    expected = torch.func.jvp(model, (inputs,), (direction,))
    assert_same((outputs, derivative(direction)), expected, exact=False)


def test_more_models_than_torch_compiles_one_function_for(amp):
    config = torch._dynamo.config
    limit = config.cache_size_limit if torch.__version__ < (2, 7) else config.recompile_limit
    models = [nn.Sequential(nn.Linear(3, 2 + i)) for i in range(limit + 2)]
    amp.initialize(models, opt_level="O2", verbosity=0)
    for model in models:
        # a forward of its own, which torch.compile counts apart
        namespace = {}
        exec("def forward(self, x):\n    return self[0](x)", namespace)
        model.forward = types.MethodType(namespace["forward"], model)
        assert_same(compiled(model)(X), model(X))


def test_graph_breaks_are_traced_on_both_sides(amp):
    model = activate(amp)

    def function(x):
        y = x @ W
        torch._dynamo.graph_break()
        return y, x.exp() @ W

    assert_same(torch.compile(function, backend="eager")(X), function(X))
    del model


class _Breaks(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 3, batch_first=True)
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)), nn.LayerNorm(3))

    def forward(self, x):
        return self.layers(self.rnn(x[None])[0]).softmax(-1)


# torch's compiler looks at the attribute of what goes from one graph to the next
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("kind", ["a GRU", "a sequence with a break"])
def test_no_layer_is_compiled_by_itself(amp, opt_level, kind):
    """Where torch leaves the function around as it is, it compiles none of its own layers."""

    def make():
        if kind == "a GRU":
            return _Recurrent()
        return nn.Sequential(nn.Linear(3, 3), _Breaks(), nn.Linear(3, 3), nn.LayerNorm(3))

    torch.compile(make(), backend="eager")(X)
    without = graphs(), sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = activate(amp, opt_level, make())
    for _ in range(3):
        assert_same(torch.compile(model, backend="eager")(X), model(X))
    assert (graphs(), sum(torch._dynamo.utils.counters["graph_break"].values())) == without


@pytest.mark.parametrize("name", ["half_function", "float_function", "half_region"])
def test_a_decorated_function_may_be_compiled_before_initialize(amp, name):
    decorator = getattr(amp, name)
    decorator = decorator() if name.endswith("region") else decorator
    function = decorator(lambda x: x @ x.t())
    around = torch.compile(function, backend="eager", fullgraph=True)
    model = activate(amp)
    assert_same(around(X), function(X))
    assert graphs() == 1
    del model


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_a_graph_that_ends_in_a_region(amp, opt_level):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            y = self.layer(x)
            with amp.float_region():
                z = y.float() @ y.float().t()
                torch._dynamo.graph_break()
                z = z.sin()
            return z @ z.t()

    model = activate(amp, opt_level, Model())
    x = torch.randn(3, 3)
    assert_same(torch.compile(model, backend="eager")(x), model(x))


def test_vmap_inside_a_compiled_function(amp):
    """It calls a function of torch's that has no tensor, and names an operator."""
    model = activate(amp)
    weights = torch.randn(4, 3, 3)

    def function(x):
        return torch.func.vmap(lambda weight: x @ weight)(weights)

    assert_same(compiled(function)(X), function(X))
    del model


def test_deactivate_restores_torch_compile(amp):
    from torch._dynamo.variables.tensor import TensorVariable

    original, judge = TensorVariable.call_method, torch._dynamo.trace_rules.check_file
    model = activate(amp)
    assert TensorVariable.call_method is not original
    amp.deactivate()
    assert TensorVariable.call_method is original
    assert torch._dynamo.trace_rules.check_file is judge
    del model


FIRST_IMPORT = """
import sys
import torch
from torch import nn
from amp_patch import amp

assert "torch._dynamo" not in sys.modules
model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0))
# where another part of the script makes its tensors; there torch 2.6 cannot import torch._dynamo
with torch.device("meta" if torch.__version__ >= (2, 7) else "cpu"):
    amp.initialize(model, opt_level=sys.argv[1], verbosity=0)
x = torch.randn(2, 3, 8)
for _ in range(2):
    expected = model(x)
    torch._dynamo.reset()
    got = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    amp.deactivate()
"""


@pytest.mark.slow(instead="Dynamo imported before")
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_attention_compiles_where_initialize_was_the_first_to_import_dynamo(opt_level):
    # Here the tests, or the making of an optimizer, have imported it.
    run = [sys.executable, "-c", FIRST_IMPORT, opt_level]
    result = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
