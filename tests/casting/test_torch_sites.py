"""Checkpoints, RNNs, attention and torch's transforms ask about dtypes: they are told of casts."""

import contextlib
import copy
import functools
import threading

import pytest
import torch
from casting_support import activate
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = {"O1": torch.float16, "O4": torch.bfloat16}
TORCHSCRIPT_IS_DEPRECATED = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning"
)
BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


@pytest.fixture(autouse=True)
def complete_repetitions():
    """Let checkpoints repeat all of a function, not only what backward needs."""
    with set_checkpoint_early_stop(False):
        yield


class Checkpointed(nn.Module):
    """Two linear layers with dropout between, run under a checkpoint; notes the dtypes it sees."""

    def __init__(self, run=None, around=contextlib.nullcontext, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(4, 2)
        self.run = run
        self.around = around
        self.seen = []

    def body(self, x, scale=1.0):
        hidden = self.dropout(F.relu(self.first(x)))
        out = self.second(hidden) * scale
        self.seen += [hidden.dtype, out.dtype, hidden.sum().dtype]
        return out

    def forward(self, x):
        with self.around():
            return self.body(x) if self.run is None else self.run(self.body, x)


def checkpointing(reentrant, **options):
    return lambda body, x: checkpoint(body, x, use_reentrant=reentrant, **options)


def train_step(model, x):
    """Run forward and backward; return the result and all gradients."""
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    out = model(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def compare_with_plain(amp, opt_level, checkpointed):
    """Train a step with and one without checkpoints, and compare all bits; return dtypes seen."""
    plain = copy.deepcopy(checkpointed)
    plain.run = None
    amp.initialize([plain, checkpointed], opt_level=opt_level, verbosity=0)
    x = torch.rand(5, 3)
    expected = train_step(plain, x)
    got = train_step(checkpointed, x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert checkpointed.seen == plain.seen * 2
    return plain.seen


@BOTH
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_checkpoint_gives_the_bits_of_a_run_without(amp, opt_level, reentrant):
    seen = compare_with_plain(amp, opt_level, Checkpointed(checkpointing(reentrant)))
    if opt_level in HALF:
        assert seen == [HALF[opt_level], HALF[opt_level], torch.float32]


@BOTH
@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("name", ["disable_casts", "half_region", "float_region"])
def test_a_checkpoint_is_repeated_in_the_mode_around_its_first_run(amp, opt_level, name, reentrant):
    if name == "disable_casts" and opt_level in ("O2", "O3", "O5"):
        around = contextlib.nullcontext
    else:
        around = getattr(amp, name)
    model = Checkpointed(checkpointing(reentrant), around)
    seen = compare_with_plain(amp, opt_level, model)
    if name == "float_region":
        assert set(seen) == {torch.float32}
    if name == "half_region":
        assert len(set(seen)) == 1
        assert seen[0] is not torch.float32


@pytest.mark.parametrize("around", ["disable_casts", "half_region", "float_region"])
def test_a_repetition_that_stops_early_restores_the_mode(o1, around):
    x = torch.rand(3, 3, requires_grad=True)
    with set_checkpoint_early_stop(True):
        with getattr(o1, around)():
            loss = checkpoint(lambda x: (x @ x).float() ** 3 + 1, x, use_reentrant=False).sum()
        loss.backward()
    assert x.grad.isfinite().all()
    assert (x @ x).dtype is torch.float16


@BOTH
@pytest.mark.parametrize("inside", ["disable_casts", "half_region", "float_region"])
def test_a_mode_inside_a_checkpoint_holds_in_its_repetition(o1, inside, reentrant):
    seen = []

    def body(x):
        with getattr(o1, inside)():
            y = x @ x
        seen.append((y.dtype, (x @ x).dtype))
        return y.float()

    x = torch.rand(3, 3, requires_grad=True)
    checkpoint(body, x, use_reentrant=reentrant).sum().backward()
    dtype = torch.float16 if inside == "half_region" else torch.float32
    assert seen == [(dtype, torch.float16)] * 2


@BOTH
@pytest.mark.parametrize("around", ["disable_casts", "half_region", "float_region"])
def test_the_mode_around_backward_is_not_that_of_the_repetition(o1, around, reentrant):
    seen = []

    def body(x):
        y = x @ x
        seen.append(y.dtype)
        return y

    x = torch.rand(3, 3, requires_grad=True)
    loss = checkpoint(body, x, use_reentrant=reentrant).float().sum()
    with getattr(o1, around)():
        loss.backward()
        inside = (x @ x).dtype
    assert seen == [torch.float16] * 2
    assert inside is (torch.float16 if around == "half_region" else torch.float32)
    assert (x @ x).dtype is torch.float16
    assert x.grad.dtype is torch.float32


@BOTH
def test_backward_in_another_thread_repeats_in_the_mode_of_the_first_run(o1, reentrant):
    seen = []

    def body(x):
        y = x @ x
        seen.append(y.dtype)
        return y.float()

    x = torch.rand(3, 3, requires_grad=True)
    with o1.disable_casts():
        loss = checkpoint(body, x, use_reentrant=reentrant).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert seen == [torch.float32] * 2


@BOTH
@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("other_level", ["O1", "O4", "O5"])
def test_a_checkpoint_of_one_model_is_repeated_at_its_level_while_another_is_active(
    amp, opt_level, other_level, reentrant
):
    model = activate(amp, opt_level, Checkpointed(checkpointing(reentrant)))
    other = activate(amp, other_level)
    train_step(model, torch.rand(5, 3))
    assert model.seen[:3] == model.seen[3:]
    assert model.seen[0] in (torch.float32, HALF.get(opt_level), model.first.weight.dtype)
    del other


@BOTH
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_nested_checkpoints(amp, opt_level, reentrant):
    def twice(body, x):
        def inner(y):
            return checkpoint(body, y, use_reentrant=reentrant)

        return checkpoint(inner, x, use_reentrant=reentrant)

    plain, model = Checkpointed(), Checkpointed(twice)
    model.load_state_dict(plain.state_dict())
    amp.initialize([plain, model], opt_level=opt_level, verbosity=0)
    x = torch.rand(5, 3)
    torch.testing.assert_close(train_step(model, x), train_step(plain, x), rtol=0, atol=0)
    assert len(model.seen) > 2 * len(plain.seen)
    assert model.seen[:3] == model.seen[-3:] == plain.seen


@BOTH
def test_a_checkpoint_repeats_its_dropout(amp, reentrant):
    compare_with_plain(amp, "O1", Checkpointed(checkpointing(reentrant), dropout=0.5))


def test_a_checkpoint_passes_its_options_and_keyword_arguments_on(o1):
    model = Checkpointed()
    x = torch.rand(5, 3, requires_grad=True)
    entered = []

    @contextlib.contextmanager
    def noting(name):
        entered.append(name)
        yield

    out = checkpoint(
        model.body,
        x,
        scale=2.0,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (noting("forward"), noting("repetition")),
        determinism_check="default",
    )
    torch.testing.assert_close(out, 2 * model.body(x))
    out.sum().backward()
    assert entered == ["forward", "repetition"]


class Selective(nn.Module):
    """Checkpoints two layers that are large enough to give their casts' memory back."""

    def __init__(self, is_saved):
        super().__init__()
        self.gate = nn.Linear(128, 128)
        self.body = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
        self.is_saved = is_saved

    def forward(self, x):
        x = x.exp()  # float32, of which the gate's cast is one that the body could share
        gate = self.gate(x)
        if self.is_saved is None:
            return gate * self.body(x)
        contexts = functools.partial(
            create_selective_checkpoint_contexts, lambda _, op, *args, **kwargs: self.is_saved(op)
        )
        return gate * checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)


SAVED = {
    "products": lambda op: op is torch.ops.aten.addmm.default,
    "casts": lambda op: op is torch.ops.aten._to_copy.default,
    "nothing": lambda op: False,
}


@pytest.mark.parametrize("saved", SAVED)
def test_a_selective_checkpoint_sees_the_same_operators_in_both_runs(amp, saved):
    torch.manual_seed(0)
    model = Selective(None)
    own = copy.deepcopy(model)
    own.is_saved = SAVED[saved]
    x = torch.rand(4, 128)
    for one in (model, own):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        amp.initialize(one, optimizer, opt_level="O4", verbosity=0)
        for _ in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(one(x).float().square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
    for expected, found in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0.02, atol=1e-4)


HELD = {
    "partial": lambda reentrant: functools.partial(checkpoint, use_reentrant=reentrant),
    "wrapper": lambda reentrant: (
        lambda body, x: checkpoint_wrapper(
            Body(body),
            checkpoint_impl=getattr(CheckpointImpl, "REENTRANT" if reentrant else "NO_REENTRANT"),
        )(x)
    ),
}


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl")  # before torch 2.10
@BOTH
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_checkpoint_that_was_held_before_is_repeated_as_it_ran(amp, opt_level, held, reentrant):
    run = HELD[held](reentrant)
    seen = compare_with_plain(amp, opt_level, Checkpointed(run, amp.float_region))
    assert set(seen) == {torch.float32}
    amp.deactivate()

    class Float32Inside(Checkpointed):
        def body(self, x):
            return F.mse_loss(super().body(x.float()), x[:, :2].float())

    compare_with_plain(amp, opt_level, Float32Inside(run))


@BOTH
def test_a_checkpoint_of_sequential_layers(o1, reentrant):
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    x = torch.rand(2, 3, requires_grad=True)
    expected = layers(x)
    (grad,) = torch.autograd.grad(expected.float().sum(), x)
    out = checkpoint_sequential(layers, 2, x, use_reentrant=reentrant)
    assert out.dtype is torch.float16
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.float().sum().backward()
    torch.testing.assert_close(x.grad, grad, rtol=0, atol=0)


@BOTH
def test_an_exception_in_a_checkpoint_restores_the_mode(o1, reentrant):
    def failing(x):
        raise KeyError

    with o1.disable_casts(), pytest.raises(KeyError):
        checkpoint(failing, torch.rand(3, 3, requires_grad=True), use_reentrant=reentrant)
    x = torch.rand(3, 3)
    assert (x @ x).dtype is torch.float16


def test_a_name_bound_to_checkpoint_is_patched_and_restored(amp):
    original = checkpoint
    model = activate(amp)
    assert checkpoint is torch.utils.checkpoint.checkpoint is not original
    amp.deactivate()
    assert checkpoint is torch.utils.checkpoint.checkpoint is original
    del model


# -- RNNs and transformers -----------------------------------------------------------------------


@pytest.mark.usefixtures("o1")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_rnn_takes_input_of_any_castable_dtype(kind, dtype):
    out, _ = kind(3, 4)(torch.rand(5, 2, 3).to(dtype))
    assert out.dtype is torch.float16


def test_an_rnn_still_refuses_what_is_wrong(o1):
    layer = nn.LSTM(3, 4)
    for wrong, message in (
        (torch.rand(5, 2, 7), r"input.size\(-1\) must be equal to input_size"),
        (torch.rand(2), "Expected input to be 2D or 3D"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            layer(wrong)
    with o1.disable_casts(), pytest.raises(ValueError, match="type torch.float16|dtype"):
        layer(torch.rand(5, 2, 3).half())


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


@pytest.fixture
def fast_calls(monkeypatch):
    """Count the calls of the fused path of nn.TransformerEncoderLayer."""
    calls = []
    original = torch._transformer_encoder_layer_fwd

    def counting(*args):
        calls.append(args[0].dtype)
        return original(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counting)
    return calls


FAST = {"O0": torch.float32, "O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_transformer_layer_takes_its_fast_path_only_where_nothing_is_cast(
    amp, opt_level, fast_calls
):
    # on a model's own hooks torch leaves the fast path, so the layer is not the model itself
    layer = nn.Sequential(encoder_layer()).eval()
    x = torch.rand(2, 5, 8)
    exact = copy.deepcopy(layer).double()(x.double())
    fast_calls.clear()
    activate(amp, opt_level, layer)
    other = activate(amp, "O4" if opt_level == "O1" else "O1")
    for grad_mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with grad_mode():
            out = layer(x)
            torch.testing.assert_close(out.double(), exact.detach(), rtol=5e-2, atol=5e-2)
    expected = [FAST[opt_level]] * 2 if opt_level in FAST else []
    assert fast_calls == expected
    del other


def test_the_fast_path_is_taken_inside_disable_casts_and_after_deactivate(amp, fast_calls):
    layer = activate(amp, model=encoder_layer().eval())
    x = torch.rand(2, 5, 8)
    with torch.no_grad():
        layer(x)
        assert fast_calls == []
        with amp.float_region():
            assert layer(x).dtype is torch.float32
        assert fast_calls == []
        with amp.disable_casts():
            nn.TransformerEncoder(encoder_layer().eval(), 2, enable_nested_tensor=False)(x)
        amp.deactivate()
        nn.Sequential(layer)(x)
    assert torch.float32 in fast_calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_takes_a_padding_mask_in_eval(o1):
    encoder = nn.TransformerEncoder(encoder_layer(), 2).eval()
    x, mask = torch.rand(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    exact = copy.deepcopy(encoder).double()
    with torch.no_grad():
        out = encoder(x, src_key_padding_mask=mask)
        with o1.disable_casts():
            expected = exact(x.double(), src_key_padding_mask=mask)
    keep = ~mask
    torch.testing.assert_close(out.double()[keep], expected[keep], rtol=3e-2, atol=3e-2)


def test_multi_head_attention_in_eval_is_cast(o1):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():
        out, _ = attention(*[torch.rand(2, 5, 8)] * 3)
    assert out.dtype is torch.float16


# -- torch.func, higher derivatives, hooks, tracing ----------------------------------------------


@pytest.mark.parametrize("opt_level", HALF)
def test_vmap_equals_a_loop(amp, opt_level):
    model = activate(amp, opt_level)
    x = torch.rand(4, 2, 3)
    batched = torch.vmap(model)(x)
    assert batched.dtype is HALF[opt_level]
    torch.testing.assert_close(
        batched, torch.stack([model(row) for row in x]), rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize("opt_level", HALF)
def test_functional_gradients_equal_autograds(amp, opt_level):
    model = activate(amp, opt_level, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.rand(5, 3)
    seen = []

    def loss(params, x):
        out = torch.func.functional_call(model, params, (x,))
        seen.append(out.dtype)
        return out.float().square().mean()

    grads = torch.func.grad(loss)(params, x)
    loss({}, x).backward()
    assert set(seen) == {HALF[opt_level]}
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-2, atol=1e-3)
    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x[:, None])
    mean = {name: g.mean(0) for name, g in per_sample.items()}
    torch.testing.assert_close(mean, grads, rtol=2e-2, atol=2e-3)


def test_functional_call_reads_the_parameters_it_is_given(o1):
    model = nn.Linear(3, 3)
    amp_model = activate(o1, model=model)
    x = torch.rand(2, 3)
    amp_model(x).float().sum().backward()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.func.functional_call(model, zeros, (x,)).abs().sum() == 0
    assert model(x).abs().sum() > 0


@TORCHSCRIPT_IS_DEPRECATED
def test_forward_mode_and_jacobians(o1):
    w = torch.rand(3, 3)

    def function(x):
        return (x @ w).float().tanh()

    x, t = torch.rand(2, 3), torch.rand(2, 3)
    out, tangent = torch.func.jvp(function, (x,), (t,))
    slope = 1 - torch.tanh(x @ w).float() ** 2
    torch.testing.assert_close(tangent.float(), slope * (t @ w).float(), rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(out, function(x))
    jacobian = torch.func.jacrev(function)(x[0])
    torch.testing.assert_close(jacobian, slope[0][:, None] * w.T, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_gradient_penalty_is_near_float64(amp, opt_level):
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    exact = copy.deepcopy(model).double()
    activate(amp, opt_level, model)

    def penalty(net, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        loss = (grad.square().sum(1) - 1).square().mean()
        loss.backward()
        return loss.detach(), [p.grad for p in net.parameters() if p.grad is not None]

    x = torch.rand(4, 3)
    loss, grads = penalty(model, x)
    with amp.disable_casts():
        exact_loss, exact_grads = penalty(exact, x.double())
    torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-2, atol=1e-2)
    for got, want in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-1, atol=2e-2)


@pytest.mark.filterwarnings("ignore:a hook of a")
def test_hooks_of_modules_and_tensors_see_what_is_computed(o1):
    model = activate(o1, model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    seen = {}
    model[1].register_forward_pre_hook(lambda _, args: seen.update(input=args[0].dtype))
    model[1].register_forward_hook(lambda _, args, out: seen.update(output=out.dtype))
    model[0].register_full_backward_hook(lambda _, gin, gout: seen.update(grad=gout[0].dtype))
    model[0].weight.register_hook(lambda grad: seen.update(weight=grad.dtype))
    model(torch.rand(2, 3, requires_grad=True)).float().sum().backward()
    half = torch.float16
    assert seen == {"input": half, "output": half, "grad": half, "weight": torch.float32}


@pytest.mark.parametrize("opt_level", HALF)
def test_inference_mode_casts_and_later_training_works(amp, opt_level):
    model = activate(amp, opt_level)
    x = torch.rand(2, 3)
    with torch.inference_mode():
        inferred = model(x)
        assert torch.rand(2, 2).half().exp().dtype is torch.float32
    assert inferred.dtype is HALF[opt_level]
    out = model(x)
    torch.testing.assert_close(out, inferred, rtol=0, atol=0)
    out.float().sum().backward()
    assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize("opt_level", LEVELS)
@TORCHSCRIPT_IS_DEPRECATED
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_made_inside_disable_casts_computes_as_eager_does_there(amp, opt_level):
    model = activate(amp, opt_level, nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)))
    x = torch.rand(2, 3)
    with amp.disable_casts():
        expected = model(x) if opt_level not in HALF else F.softmax(model[0](x), -1)
        traced = torch.jit.trace(model, x)
        torch.testing.assert_close(traced(x), expected)
    torch.testing.assert_close(traced(x), expected)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_export_made_inside_disable_casts_computes_as_eager_does_there(amp, opt_level):
    model = activate(amp, opt_level, nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)))
    x = torch.rand(2, 3)
    with amp.disable_casts():
        expected = model(x)
        program = torch.export.export(model, (x,), strict=False)  # torch 2.6 is strict by default
    torch.testing.assert_close(program.module()(x), expected)
    amp.deactivate()
    assert "to.dtype" not in str(program.graph) or opt_level not in HALF


def scripted_function(x, w):
    # type: (torch.Tensor, torch.Tensor) -> torch.Tensor
    y = F.softmax(torch.matmul(x, w) + x @ w, dim=0)
    return F.layer_norm(F.linear(y, w), [3]) + y.exp() + F.binary_cross_entropy(y, y)


@TORCHSCRIPT_IS_DEPRECATED
@pytest.mark.parametrize("opt_level", HALF)
def test_torchscript_compiles_the_originals(amp, opt_level):
    model = activate(amp, opt_level)
    x, w = torch.rand(3, 3), torch.rand(3, 3)
    with amp.disable_casts():
        expected = scripted_function(x, w)
    compiled = torch.jit.script(scripted_function)
    decorated = torch.jit.script(amp.half_function(scripted_function))
    for function in (compiled, decorated):
        torch.testing.assert_close(function(x, w), expected, rtol=0, atol=0)
    amp.deactivate()
    torch.testing.assert_close(torch.jit.script(scripted_function)(x, w), expected)
    del model


def scripted_overloads(x: torch.Tensor) -> torch.Tensor:
    return torch.norm(x, dim=-1) + torch.tensordot(x, x, dims=1)


@TORCHSCRIPT_IS_DEPRECATED
@pytest.mark.parametrize("opt_level", HALF)
def test_torchscript_compiles_what_has_overloads(amp, opt_level):
    model = activate(amp, opt_level)
    x = torch.rand(3, 3)
    with amp.disable_casts():
        expected = scripted_overloads(x)
    compiled = torch.jit.script(scripted_overloads)
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)
    del model


class Block(nn.Module):
    """Layers of several kinds, by a forward that TorchScript understands."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x)
        z = self.norm(y).exp()
        return self.attention(z, z, z)[0].softmax(-1)


@TORCHSCRIPT_IS_DEPRECATED
@pytest.mark.parametrize("inner", [False, True], ids=["model", "around the model"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_torchscript_compiles_a_model_without_casts(amp, opt_level, inner):
    model = activate(amp, opt_level, nn.Sequential(nn.Linear(3, 4), Block()).eval())
    hooks = [list(model._forward_pre_hooks.items()), list(model._forward_hooks.items())]
    x = torch.rand(5, 2, 3)
    with amp.disable_casts(), torch.no_grad():
        expected = model(x)
    script = torch.jit.script(nn.Sequential(model) if inner else model)
    weights = model[0].weight.dtype
    got = script(x.to(weights))
    assert got.dtype is weights
    # on processors that multiply halves, a compiled graph rounds to them at other places
    rtol = max(1e-6, 2 * torch.finfo(weights).eps)
    torch.testing.assert_close(got.to(expected.dtype), expected, rtol=rtol, atol=1e-6)
    assert hooks == [list(model._forward_pre_hooks.items()), list(model._forward_hooks.items())]
    assert [len(of_kind) for of_kind in hooks] == [1, 1]


def scriptable_pre_hook(self, args: tuple[torch.Tensor]) -> torch.Tensor:
    return args[0] + 1


def scriptable_hook(self, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    return out + 1


@TORCHSCRIPT_IS_DEPRECATED
@pytest.mark.parametrize("fails", [False, True])
def test_hooks_of_the_users_are_compiled_and_all_stay_in_their_order(amp, fails):
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda *_: None) if fails else None
    model.register_forward_hook(scriptable_hook)
    model.register_forward_pre_hook(scriptable_pre_hook)
    activate(amp, "O0", model)
    hooks = [list(model._forward_pre_hooks.items()), list(model._forward_hooks.items())]
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        script = torch.jit.script(model)
        x = torch.rand(2, 3)
        torch.testing.assert_close(script(x), model(x), rtol=0, atol=0)
    assert hooks == [list(model._forward_pre_hooks.items()), list(model._forward_hooks.items())]
    assert [len(of_kind) for of_kind in hooks] == [2, 2 + fails]
