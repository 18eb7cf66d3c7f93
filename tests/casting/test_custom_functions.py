"""The backward of a custom ``torch.autograd.Function`` runs in the mode that its forward ran in."""

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
from casting_support import activate
from torch import nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Linear(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.mT @ x


class Once(Linear):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return Linear.backward(ctx, grad)


class WithContext(Linear):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return F.linear(x, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class ByVjp(Function):
    forward = staticmethod(Linear.forward)
    vjp = staticmethod(Linear.backward)


class Nested(Linear):
    """Calls another one in its backward."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return Linear.apply(grad, weight.mT), Once.apply(grad.mT, x.mT)


class Several(Linear):
    """Has outputs without a gradient beside the one that has."""

    @staticmethod
    def forward(ctx, x, weight):
        out = Linear.forward(ctx, x, weight)
        largest = out.argmax()
        ctx.mark_non_differentiable(largest)
        return out, largest, None

    @staticmethod
    def backward(ctx, grad, *others):
        return Linear.backward(ctx, grad)


class Boxed(Linear):
    boxed_grads_call = True

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads[0] if isinstance(grads[0], list) else grads
        return Linear.backward(ctx, grad)


class Again(Function):
    """Runs a function without a graph, and again in backward, as checkpoints of scripts do."""

    @staticmethod
    def forward(ctx, function, x, *params):
        ctx.function, ctx.params = function, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        return None, *torch.autograd.grad(out, (x, *ctx.params), grad)


def again(x, weight):
    return Again.apply(lambda x: F.linear(x, weight), x, weight)


# bound before amp.initialize, as scripts have it
CALLS = {
    **{kind.__name__: kind.apply for kind in (Linear, Once, WithContext, ByVjp, Nested, Boxed)},
    "Several": lambda x, weight: Several.apply(x, weight)[0],
    "again": again,
}
AROUND = {
    "float_region": lambda amp: amp.float_region(),
    "disable_casts": lambda amp: amp.disable_casts(),
    "autocast": lambda amp: torch.autocast("cpu", enabled=False),
}


def drawn():
    """Return x, a weight and a gradient of numbers that half precision would round."""
    torch.manual_seed(0)
    return (
        torch.rand(5, 4, requires_grad=True),
        torch.rand(3, 4, requires_grad=True),
        torch.rand(5, 3),
    )


def assert_exact(grads, x, weight, grad):
    """Compare the gradients of x and of the weight with products in float64."""
    expected = grad.double() @ weight.double(), grad.double().mT @ x.double()
    for found, of in zip(grads, expected, strict=True):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.double(), of, rtol=1e-6, atol=0)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("call", CALLS)
def test_a_backward_of_a_float32_part_is_in_float32(o1, call, around):
    x, weight, grad = drawn()
    with AROUND[around](o1):
        out = CALLS[call](x, weight)
    assert_exact(torch.autograd.grad(out, (x, weight), grad), x, weight, grad)


@pytest.mark.parametrize("call", CALLS)
def test_outside_of_regions_a_backward_casts(o1, call):
    x, weight, grad = drawn()
    out = CALLS[call](x, weight)
    found = torch.autograd.grad(out, (x, weight), grad.to(out.dtype))
    half = [tensor.detach().half() for tensor in (grad, weight, x)]
    expected = half[0] @ half[1], half[0].mT @ half[2]
    torch.testing.assert_close(found, [one.float() for one in expected], rtol=1e-3, atol=0)


def test_the_mode_around_a_backward_is_put_back(o1):
    x, weight, grad = drawn()

    class Raises(Linear):
        @staticmethod
        def backward(ctx, grad):
            assert (x @ x.mT).dtype is torch.float32
            raise KeyError("its own")

    with o1.float_region():
        outs = Linear.apply(x, weight), Raises.apply(x, weight)
    torch.autograd.grad(outs[0], x, grad)
    assert (x @ x.mT).dtype is torch.float16
    with o1.half_region(), pytest.raises(KeyError, match="its own"):
        torch.autograd.grad(outs[1], x, grad)
    assert (x @ x.mT).dtype is torch.float16


def test_a_gradient_of_gradients_is_in_float32_too(o1):
    x, weight, grad = drawn()
    grad.requires_grad_()
    with o1.float_region():
        out = Nested.apply(x, weight)
    (first,) = torch.autograd.grad(out, x, grad, create_graph=True)
    second = torch.autograd.grad(first, (grad, weight), torch.ones_like(first))
    ones = torch.ones(5, 4, dtype=torch.float64)
    expected = ones @ weight.double().mT, grad.double().mT @ ones
    for found, of in zip(second, expected, strict=True):
        torch.testing.assert_close(found.double(), of, rtol=1e-6, atol=0)


@pytest.mark.parametrize("around", AROUND)
def test_transforms_of_torch_func_carry_it_too(o1, around):
    x, weight, grad = drawn()

    def each(x, weight):
        return torch.func.vmap(lambda row: WithContext.apply(row[None], weight)[0])(x)

    with AROUND[around](o1):
        out, vjp = torch.func.vjp(each, x.detach(), weight.detach())
    assert out.dtype is torch.float32
    assert_exact(vjp(grad), x, weight, grad)


def test_a_backward_in_another_thread_is_in_the_mode_of_its_forward(o1):
    x, weight, grad = drawn()
    with o1.disable_casts():
        out = Linear.apply(x, weight)
    thread = threading.Thread(target=out.backward, args=(grad,))
    thread.start()
    thread.join()
    assert_exact((x.grad, weight.grad), x, weight, grad)


def test_a_float32_model_beside_one_that_casts_has_a_float32_backward(amp):
    class Own(nn.Linear):
        def forward(self, x):
            return Linear.apply(x, self.weight)

    model = activate(amp, "O0", Own(4, 3))
    other = activate(amp, "O1")
    x, _, grad = drawn()
    model(x).backward(grad)
    assert_exact((x.grad, model.weight.grad), x, model.weight, grad)
    del other


class WideNorm(nn.GroupNorm):
    """Normalizes in float32, as diffusion models do."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


BODIES = {
    "norm": lambda x: x,
    "mask": lambda x: (x.mT @ x).masked_fill(torch.ones(8, 8).triu(1).bool(), -1e9).softmax(-1),
    "noise": lambda x: x + torch.linspace(0, 1, 8),
    "distances": lambda x: torch.cdist(x, x),
}


class Block(nn.Module):
    """Makes float32 tensors, and is run again in backward or not; notes the dtypes it sees."""

    def __init__(self, body, is_repeated):
        super().__init__()
        self.norm = WideNorm(2, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.body = body
        self.is_repeated = is_repeated
        self.seen = []

    def run(self, x):
        hidden = self.body(self.norm(x))
        out = self.conv(hidden)
        self.seen += [hidden.dtype, out.dtype]
        return out

    def forward(self, x):
        if self.is_repeated:
            return Again.apply(self.run, x, *self.parameters())
        return self.run(x)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_forward_that_runs_again_has_the_bits_of_one_that_does_not(amp, opt_level, body):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(4, 8, 1), Block(BODIES[body], False))
    model = copy.deepcopy(plain)
    model[1].is_repeated = True
    amp.initialize([plain, model], opt_level=opt_level, verbosity=0)
    x, grad = torch.rand(2, 4, 8), torch.rand(2, 8, 8)
    for one in (plain, model):
        out = one(x)
        out.backward(grad.to(out.dtype))
    grads = [[param.grad for param in one.parameters()] for one in (model, plain)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert model[1].seen == 2 * plain[1].seen


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O5"])
def test_a_backward_of_a_half_region_is_in_half(amp, opt_level):
    model = activate(amp, opt_level)
    x, weight, grad = drawn()
    with amp.half_region():
        out = Linear.apply(x, weight)
    grad = grad.to(out.dtype)
    found = torch.autograd.grad(out, (x, weight), grad)
    expected = grad @ weight.to(out.dtype), grad.mT @ x.to(out.dtype)
    torch.testing.assert_close(found, [one.float() for one in expected], rtol=0, atol=0)
    del model


class Checkpoint(Again):
    """Has all gradients by a backward in its own, as that of guided-diffusion."""

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


RUNS = {
    "once": lambda function, x: function(x),
    "own": Checkpoint.apply,
    "reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "not reentrant": lambda function, x: checkpoint(function, x, use_reentrant=False),
}


class InRegion(nn.Module):
    """Runs two layers in a region, and again in backward as it is told, one within the other."""

    def __init__(self, region, outer, inner, leaf):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.region, self.outer, self.inner, self.leaf = region, RUNS[outer], RUNS[inner], leaf

    def last(self, x):
        layer = self.layers[2]
        return layer(x) if self.leaf == "layer" else Linear.apply(x, layer.weight)

    def forward(self, x):
        with self.region():
            x = self.outer(lambda x: self.inner(self.last, self.layers[1](x)), self.layers[0](x))
        return self.layers[3](x)


def trained(amp, opt_level, region, *how):
    """Return the gradients of a step."""
    torch.manual_seed(0)
    model = InRegion(getattr(amp, region), *how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=8.0, verbosity=0)
    loss = model(torch.randn(4, 8)).float().square().sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    grads = [param.grad for param in amp.master_params(optimizer)]
    amp.deactivate()
    return grads


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("outer", ["own", "reentrant"])
@pytest.mark.parametrize(
    ("opt_level", "region"),
    [("O1", "half_region"), ("O2", "float_region"), ("O4", "float_region"), ("O5", "half_region")],
)
def test_what_runs_again_within_what_does_is_in_the_region_too(amp, opt_level, region, outer):
    """In a backward within a backward torch asks no region that is open."""
    for leaf in ("layer", "function"):
        expected = trained(amp, opt_level, region, "once", "once", leaf)
        for inner in RUNS:
            found = trained(amp, opt_level, region, outer, inner, leaf)
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("opt_level", ["O2", "O5"])
def test_hooks_in_the_backward_of_a_checkpoint_run_as_others(amp, opt_level):
    """An average of gradients that a hook keeps stays in float32."""
    model = InRegion(contextlib.nullcontext, "reentrant", "once", "layer")
    amp.initialize(model, opt_level=opt_level, loss_scale=1.0, verbosity=0)
    kept = []

    def average(param):
        kept.append(param.grad.lerp(torch.zeros(8, 8), 0.5))

    model.layers[1].weight.register_post_accumulate_grad_hook(average)
    model(torch.randn(4, 8)).float().sum().backward()
    assert [one.dtype for one in kept] == [torch.float32]


class Asked(Function):
    """Sees float32 where casts are on, and no cast in either direction."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        return Linear.forward(ctx, x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return Linear.backward(ctx, grad)


@pytest.mark.parametrize("around", ["nothing", "half_region", *AROUND])
def test_custom_bwd_keeps_its_meaning(o1, around):
    contexts = {
        **AROUND,
        "nothing": lambda amp: contextlib.nullcontext(),
        "half_region": lambda amp: amp.half_region(),
    }
    x, weight, grad = drawn()
    with contexts[around](o1):
        out = Asked.apply(x, weight)
    assert_exact(torch.autograd.grad(out, (x, weight), grad), x, weight, grad)


def test_a_node_keeps_no_model_and_notes_nothing_where_nothing_is_to_be_said(amp):
    class Own(nn.Linear):
        def forward(self, x):
            return Linear.apply(x, torch.eye(4, dtype=x.dtype))

    x = torch.rand(5, 4, requires_grad=True)
    model = activate(amp, "O1", Own(4, 4))
    assert not vars(model(x).grad_fn)
    amp.deactivate()
    model = activate(amp, "O2", Own(4, 4))
    kept = weakref.ref(model)
    out = model(x)
    del model
    gc.collect()
    assert kept() is None
    out.backward(torch.ones_like(out))


def test_deactivate_puts_the_class_of_nodes_back(amp):
    before = dict(vars(BackwardCFunction))
    activate(amp, "O2")
    assert vars(BackwardCFunction)["apply"] is not before["apply"]
    with amp.float_region():
        x, weight, grad = drawn()
        out = Linear.apply(x, weight)
    amp.deactivate()
    assert dict(vars(BackwardCFunction)) == before
    assert BackwardCFunction.__init__ is object.__init__
    assert_exact(torch.autograd.grad(out, (x, weight), grad), x, weight, grad)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled_code_computes_the_same_gradients(o1, where):
    x, weight, grad = drawn()

    def inside(x, weight):
        with o1.float_region():
            return Linear.apply(x, weight)

    def around(x, weight):
        return Linear.apply(x, weight)

    function = inside if where == "inside" else around
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with o1.float_region() if where == "around" else contextlib.nullcontext():
        out = compiled(x, weight)
    assert_exact(torch.autograd.grad(out, (x, weight), grad), x, weight, grad)
