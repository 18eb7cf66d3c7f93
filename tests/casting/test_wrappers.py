"""What the patched functions compute, on real tensors: torch's CUDA autocast is the oracle."""

import pickle
import threading
from collections import OrderedDict, defaultdict, namedtuple

import autocast_oracle as oracle
import pytest
import torch
from casting_support import ANY_DTYPE, HALVES, Product, activate, as_dtypes, casts_on, existing
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils import _pytree

import amp_patch.amp
from amp_patch.casting import rules as cast_rules
from amp_patch.casting.targets import rule_targets

# An operator that only a build with cuDNN can run.
CUDNN_ONLY = {"cudnn_convolution", "cudnn_convolution_transpose"}
# No rule touches these; the CPU refuses a call that the fake CUDA device accepts.
REFUSED_ON_CPU = {
    "__rand__", "__ror__", "__rxor__", "batch_norm", "bitwise_and", "bitwise_left_shift",
    "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "gcd", "grid_sampler_3d",
    "heaviside", "index_add", "index_copy", "index_reduce", "lcm", "native_group_norm", "put",
    "torch_ops_aten__efficient_attention_forward", "torch_ops_aten__flash_attention_forward",
}  # fmt: skip
# The same, of which older builds for CPUs refuse the call on the fake CUDA device too, or lack it.
if torch.__version__ >= (2, 14) or torch.backends.cuda.is_built():
    REFUSED_ON_CPU |= {
        "_native_batch_norm_legit", "_unsafe_masked_index_put_accumulate", "grid_sampler_2d",
        "instance_norm", "native_batch_norm", "torch__scaled_mm_v2",
        "torch_ops_aten__scaled_dot_product_flash_attention_for_cpu",
    }  # fmt: skip
# Takes the dtype of its result as an argument, which the sample gives for fp32.
INTERNAL = {"_softmax_backward_data"}
# Draws random numbers, or is so badly conditioned that half inputs say nothing of its values.
NO_REFERENCE = {"bernoulli", "dropout", "gumbel_softmax", "rrelu", "scaled_dot_product_attention"}
# Rules of what has no half kernel on the CPU.
WITHOUT_KERNEL = ("no_half", "float_on_cpu")
DTYPES = {
    "float32": (torch.float32,),
    "float16": (torch.float16,),
    "mixed": (torch.float32, torch.float16),
}


# -- the same dtypes as torch's CUDA autocast ----------------------------------------------------


def listed_calls():
    """Yield list, path, arguments and keyword arguments of torch's autocast test lists."""
    for group, entries in vars(oracle.AutocastTestLists("cpu")).items():
        for name, args, *rest in entries:
            if name in CUDNN_ONLY or not isinstance(args, tuple):
                continue
            kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
            for surface in ("torch", "torch.Tensor", "torch._C._nn", "torch.nn.functional"):
                yield group, f"{surface}.{name}", args, kwargs
            if name.startswith("linalg_"):
                yield group, f"torch.linalg.{name.removeprefix('linalg_')}", args, kwargs


def autocast_dtypes(path, args, kwargs):
    """Return the dtypes that CUDA autocast's result has, or None where the call is refused."""
    floating = [t.dtype for t in _pytree.tree_leaves((args, kwargs)) if oracle.castable(t)]
    with oracle.FAKE_MODE:
        args, kwargs = oracle.fake_cuda((args, kwargs), tuple(floating) or (torch.float32,))
        seen = oracle.observe(oracle.Casts(), existing(path), args, kwargs, autocast=True)
    return None if seen.error else seen.dtypes


@pytest.mark.usefixtures("quiet")
def test_every_call_of_torchs_autocast_test_lists_has_autocasts_dtypes(amp):
    calls = [call for call in listed_calls() if existing(call[1]) is not None]
    expected = [autocast_dtypes(path, args, kwargs) for _, path, args, kwargs in calls]
    activate(amp)
    wrong, groups = [], defaultdict(int)
    for (group, path, args, kwargs), dtypes in zip(calls, expected, strict=True):
        if dtypes is None:
            continue
        groups[group] += 1
        got = oracle.dtypes_of(existing(path)(*args, **kwargs))
        if got != dtypes:
            wrong.append(f"{path}: {got}, autocast: {dtypes}")
    assert not wrong, "\n".join(wrong)
    assert set(groups) == {
        "torch_expect_builtin_promote", "methods_expect_builtin_promote", "torch_fp16",
        "torch_fp32", "torch_need_autocast_promote", "nn_fp16", "nn_fp32", "linalg_fp16",
        "methods_fp16", "methods_fp32",
    }  # fmt: skip
    assert sum(groups.values()) > 130


def sampled_calls():
    """Yield name, path, label and sample of torch's operators, with the dtypes of autocast."""
    for op in oracle.operators():
        for sample in oracle.samples(op, 1):
            tree = ((sample.input, *sample.args), sample.kwargs)
            for name, path in oracle.spellings(op):
                if name in REFUSED_ON_CPU | INTERNAL:
                    continue
                for label, floating in DTYPES.items():
                    args, kwargs = as_dtypes(tree, floating)
                    dtypes = autocast_dtypes(path, args, kwargs)
                    if dtypes is not None:
                        yield name, path, label, args, kwargs, dtypes


def agree(name, rule, got, dtypes):
    """Compare dtypes; what has no half kernel on the CPU gives fp32 (complex64) there instead."""
    if torch.__version__ < cast_rules.DIFFERENCES_BEFORE.get(name, (0,)):
        return got == dtypes or torch.float32 in (*got, *dtypes)
    if name in cast_rules.DIFFERENCES:
        return got == dtypes or torch.float32 in got
    if rule in WITHOUT_KERNEL:
        wider = {torch.float16: torch.float32, torch.complex32: torch.complex64}
        dtypes = [wider.get(dtype, dtype) for dtype in dtypes]
    return got == dtypes


def far_from_float64(path, args, kwargs, result):
    """Return the relative error of a result against the same call on float64, if too large."""
    try:
        args, kwargs = as_dtypes((args, kwargs), (torch.float64,))
        exact = existing(path)(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    for got, want in zip(_pytree.tree_leaves(result), _pytree.tree_leaves(exact), strict=True):
        if not oracle.castable(got) or got.numel() == 0 or not want.isfinite().all():
            continue
        error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1)
        if not error < 2e-2:
            return f"{path}: relative error {error:.2g}"
    return None


@pytest.mark.usefixtures("quiet")
def test_every_operator_has_the_dtypes_of_autocast_and_the_values_of_float64(amp):
    calls = list(sampled_calls())
    activate(amp)
    rules, wrong, compared = rule_targets(), [], set()
    for name, path, label, args, kwargs, dtypes in calls:
        result = existing(path)(*args, **kwargs)
        got = oracle.dtypes_of(result)
        if not agree(name, rules.get(path), got, dtypes):
            wrong.append(f"{path} of {label}: {got}, autocast: {dtypes}")
        if rules.get(path, "no_half") not in WITHOUT_KERNEL and name not in NO_REFERENCE:
            compared.add(name)
            if message := far_from_float64(path, args, kwargs, result):
                wrong.append(f"{message} of {label}")
    assert not wrong, "\n".join(wrong)
    assert len(compared) > 80


# -- what is cast, and what is left alone --------------------------------------------------------


Pair = namedtuple("Pair", "first second")
LEAVES = st.one_of(
    ANY_DTYPE.map(lambda dtype: torch.ones(2, dtype=dtype)), st.integers(), st.none()
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner),
        st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict),
    ),
    max_leaves=8,
)
EXPECTED = {
    "half_function": {torch.float32: torch.float16, torch.bfloat16: torch.float16},
    "bfloat16_function": {torch.float32: torch.bfloat16, torch.float16: torch.bfloat16},
    "float_function": {torch.float16: torch.float32, torch.bfloat16: torch.float32},
}


def same_objects(tree):
    return [id(leaf) for leaf in _pytree.tree_leaves(tree)]


@pytest.mark.parametrize("decorator", EXPECTED)
@given(args=st.lists(TREES, max_size=3), kwargs=st.dictionaries(st.sampled_from("xyz"), TREES))
def test_nested_arguments_are_cast_and_the_callers_containers_are_not_changed(
    decorator, args, kwargs
):
    function = getattr(amp_patch.amp, decorator)(lambda *args, **kwargs: (args, kwargs))
    leaves, spec = _pytree.tree_flatten((tuple(args), kwargs))
    dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)]
    before = same_objects((args, kwargs))
    with casts_on():
        got, got_spec = _pytree.tree_flatten(function(*args, **kwargs))
    assert got_spec == spec
    assert same_objects((args, kwargs)) == before
    for leaf, result in zip(leaves, got, strict=True):
        expected = EXPECTED[decorator].get(getattr(leaf, "dtype", None))
        if expected is None:
            assert result is leaf
        else:
            assert result.dtype is expected
    assert [t.dtype for t in leaves if isinstance(t, torch.Tensor)] == dtypes


@pytest.mark.parametrize("opt_level", HALVES)
def test_operators_and_methods_are_cast(amp, opt_level):
    activate(amp, opt_level)
    half = HALVES[opt_level]
    x = torch.rand(3, 3) + 0.5
    for product in (x @ x, x.__rmatmul__(x), x.matmul(x), torch.linalg.multi_dot([x, x, x])):
        assert product.dtype is half
    h = x.to(half)
    results = {
        "power": h**2, "of 2": 2**h, "reciprocal": 1 / h, "exp": h.exp(), "sum": h.sum(),
        "norm": h.norm(), "special": torch.special.logsumexp(h, 0), "softmax": h.softmax(0),
        "linalg": torch.linalg.vector_norm(h), "layer norm": F.layer_norm(h, (3,)),
    }  # fmt: skip
    assert {name for name, result in results.items() if result.dtype is not torch.float32} == set()
    torch.testing.assert_close(results["reciprocal"], 1 / h.float())
    torch.testing.assert_close(results["of 2"], 2 ** h.float())


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="since torch 2.10")
@pytest.mark.parametrize("opt_level", HALVES)
def test_experts_multiply_in_half(amp, opt_level):
    """Where torch's autocast lets half numbers of a layer meet float32 weights, and raises."""
    torch.manual_seed(0)
    layer, experts = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8, 8))
    amp.initialize(layer, opt_level=opt_level, verbosity=0)
    x, ends = torch.randn(6, 8), torch.tensor([2, 4, 6], dtype=torch.int32)
    found = F.grouped_mm(layer(x), experts, offs=ends)
    assert found.dtype is HALVES[opt_level]
    hidden = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    wanted = torch.einsum("tgi,gio->tgo", hidden.view(3, 2, 8).transpose(0, 1), experts.double())
    torch.testing.assert_close(
        found.double(), wanted.transpose(0, 1).reshape(6, 8), rtol=0.05, atol=0.05
    )
    found.float().sum().backward()
    assert experts.grad is not None
    assert experts.grad.dtype is torch.float32


@pytest.mark.usefixtures("o1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_other_dtypes_are_never_touched(dtype):
    x = torch.arange(1, 5).reshape(2, 2).to(dtype)
    assert (x @ x).dtype is dtype
    assert torch.einsum("ij,jk", x, x).dtype is dtype
    assert (x**2).dtype is dtype
    assert x.sum().dtype is dtype
    assert torch.tensordot(x, x, 1).dtype is dtype


@pytest.mark.usefixtures("o1")
def test_a_dtype_that_the_caller_asks_for_is_kept():
    h = torch.rand(3, 3).half()
    for dtype in (torch.float16, torch.float64):
        assert h.sum(dtype=dtype).dtype is dtype
        assert torch.softmax(h, 0, dtype).dtype is dtype
        assert F.log_softmax(h, 0, dtype=dtype).dtype is dtype
        assert torch.linalg.vector_norm(h, dtype=dtype).dtype is dtype
    assert F.softmax(h, 0, _stacklevel=3, dtype=None).dtype is torch.float32
    assert F.softmax(h, 0, 3, None).dtype is torch.float32
    # a nuclear norm in another dtype than its input's is refused by torch
    assert torch.equal(torch.norm(h, "nuc"), torch.norm(h.float(), "nuc"))


@pytest.mark.usefixtures("o1")
def test_out_and_in_place_calls_keep_their_dtype_and_bits():
    x, y = torch.rand(3, 3), torch.rand(3, 3)
    with torch.no_grad():
        exact = x.double() @ y.double()
    for result in (
        torch.mm(x, y, out=torch.empty(3, 3)),
        torch.matmul(x, y, out=torch.empty(3, 3)),
        torch.zeros(3, 3).addmm_(x, y),
    ):
        assert result.dtype is torch.float32
        torch.testing.assert_close(result.double(), exact, rtol=1e-6, atol=1e-6)
    h = x.half()
    out = torch.empty(3, 3, dtype=torch.float16)
    assert torch.exp(h, out=out) is out
    for in_place in (h.clone().exp_(), h.clone().pow_(2), h.clone().reciprocal_()):
        assert in_place.dtype is torch.float16
    h **= 2
    h /= 2
    assert h.dtype is torch.float16


UNTOUCHED = [
    "__add__", "__radd__", "__iadd__", "__mul__", "__sub__", "__truediv__", "__itruediv__",
    "__ipow__", "__eq__", "__lt__", "__getitem__", "add", "add_", "mul", "div", "mean", "relu",
    "clone", "to", "float", "half", "copy_", "exp_", "addr_", "cpu",
]  # fmt: skip


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_torch_promotes_by_itself_is_the_very_same_object(amp, name):
    before, inherited = getattr(torch.Tensor, name), name not in vars(torch.Tensor)
    activate(amp)
    assert getattr(torch.Tensor, name) is before
    assert (name not in vars(torch.Tensor)) == inherited


def test_casts_act_only_on_the_device_types_of_the_models(amp):
    model = activate(amp, model=nn.Linear(3, 3, device="meta"))
    cpu, meta = torch.rand(3, 3), torch.rand(3, 3, device="meta")
    assert (cpu @ cpu).dtype is torch.float32
    assert cpu.half().exp().dtype is torch.float16
    assert (meta @ meta).dtype is torch.float16
    assert meta.half().exp().dtype is torch.float32
    assert model(meta).dtype is torch.float16


def test_casts_leave_other_devices_alone_where_the_model_is_on_the_cpu(o1):
    cpu, meta = torch.rand(3, 3), torch.rand(3, 3, device="meta")
    assert (cpu @ cpu).dtype is torch.float16
    assert (meta @ meta).dtype is torch.float32
    assert meta.half().exp().dtype is torch.float16
    assert o1.half_function(lambda x: x)(meta) is meta
    assert o1.float_function(lambda x: x)(meta.half()).dtype is torch.float16


# -- composite functions -------------------------------------------------------------------------


RECURRENT = {
    "LSTM": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, dropout=0.0),
    "LSTM with projection": lambda: nn.LSTM(3, 4, proj_size=2),
    "GRU": lambda: nn.GRU(3, 4, batch_first=True),
    "RNN tanh": lambda: nn.RNN(3, 4, bias=False),
    "RNN relu": lambda: nn.RNN(3, 4, nonlinearity="relu"),
    "LSTMCell": lambda: nn.LSTMCell(3, 4),
    "GRUCell": lambda: nn.GRUCell(3, 4),
    "RNNCell": lambda: nn.RNNCell(3, 4),
}


def packed():
    sequences = [torch.rand(length, 3) for length in (5, 4, 2)]
    return rnn.pack_sequence(sequences)


def half_copy(module, dtype):
    copied = type(module).__new__(type(module))
    copied.__dict__.update(pickle.loads(pickle.dumps(module)).__dict__)
    return copied.to(dtype)


def run_with_grads(module, inputs):
    result = module(inputs)
    leaves = [t for t in _pytree.tree_leaves(tuple(result)) if isinstance(t, torch.Tensor)]
    floating = [t for t in leaves if t.is_floating_point()]
    sum(t.float().square().sum() for t in floating).backward()
    return floating, [p.grad for p in module.parameters()]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("opt_level", HALVES)
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_and_cells_compute_what_a_half_copy_computes(amp, opt_level, kind):
    module, half = RECURRENT[kind](), HALVES[opt_level]
    inputs = torch.rand(5, 3) if "Cell" in kind else torch.rand(5, 2, 3)
    expected, grads = run_with_grads(half_copy(module, half), inputs.to(half))
    activate(amp, opt_level, module)
    got, got_grads = run_with_grads(module, inputs)
    assert {t.dtype for t in got} == {half}
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert {g.dtype for g in got_grads} == {torch.float32}
    torch.testing.assert_close(got_grads, [g.float() for g in grads], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN tanh"])
def test_recurrent_layers_take_packed_sequences(amp, kind):
    module, inputs = RECURRENT[kind](), packed()
    expected, _ = run_with_grads(half_copy(module, torch.float16), inputs.to(torch.float16))
    activate(amp, model=module)
    for given_inputs in (inputs, inputs.to(torch.float16)):
        got, _ = run_with_grads(module, given_inputs)
        assert {t.dtype for t in got} == {torch.float16}
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert inputs.data.dtype is torch.float32


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_take_states_of_another_dtype(amp, kind):
    module = RECURRENT[kind]()
    activate(amp, model=module)
    x = torch.rand(5, 2, 3)
    _, state = module(x)
    assert _pytree.tree_leaves(state)[0].dtype is torch.float16
    full = _pytree.tree_map(torch.Tensor.float, state)
    for given_state in (state, full):
        out, _ = module(x.half(), given_state)
        assert out.dtype is torch.float16
    assert {t.dtype for t in _pytree.tree_leaves(full)} == {torch.float32}


@pytest.mark.usefixtures("o1")
def test_attention_takes_mixed_dtypes():
    q, k, v = torch.rand(3, 2, 4, 8).unbind()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    got = F.scaled_dot_product_attention(q, k.half(), value=v)
    assert got.dtype is torch.float16
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("o1")
def test_einsum_takes_operands_in_a_list():
    x, y = torch.rand(2, 3), torch.rand(3, 4)
    operands = [x, y.half()]
    for got in (torch.einsum("ij,jk->ik", x, y.half()), torch.einsum("ij,jk->ik", operands)):
        assert got.dtype is torch.float16
        torch.testing.assert_close(
            got.float(), (x.double() @ y.double()).float(), rtol=1e-2, atol=0
        )
    assert operands[0] is x


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_is_near_float64(amp, need_weights):
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.rand(2, 5, 8)
    exact, _ = half_copy(module, torch.float64)(x.double(), x.double(), x.double())
    activate(amp, model=module)
    for training in (True, False):
        got, weights = module.train(training)(x, x, x, need_weights=need_weights)
        assert got.dtype is torch.float16
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)
        assert (weights is not None) == need_weights


@pytest.mark.usefixtures("o1")
@pytest.mark.parametrize("function", ["inv", "svdvals", "cholesky", "qr", "det"])
def test_what_has_no_half_kernel_on_the_cpu_takes_the_result_of_a_cast(function):
    x = torch.rand(4, 4) + 4 * torch.eye(4)
    product = x @ x.mT
    assert product.dtype is torch.float16
    result = _pytree.tree_leaves(getattr(torch.linalg, function)(product))[0]
    exact = _pytree.tree_leaves(getattr(torch.linalg, function)(product.double()))[0]
    assert result.dtype is torch.float32
    torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-4)


SPARSE_PRODUCTS = {
    "csr @ dense": lambda matrix, x: matrix.to_sparse_csr() @ x,
    "coo @ dense": lambda matrix, x: matrix @ x,
    "matmul": lambda matrix, x: torch.matmul(matrix.to_sparse_csr(), x),
    "mm": lambda matrix, x: matrix.mm(x),
    "spmm": lambda matrix, x: torch.spmm(matrix, x),
    "dsmm": lambda matrix, x: torch.dsmm(matrix.to_sparse_csr(), x),
    "csr @ csr": lambda matrix, x: (matrix.to_sparse_csr() @ x.to_sparse_csr()).to_dense(),
    "addmm": lambda matrix, x: torch.addmm(torch.zeros(3, 3), matrix.to_sparse_csr(), x),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.usefixtures("o1")
def test_products_with_sparse_matrices_run_in_fp32_on_the_cpu():
    """torch has no half kernel for them there."""
    dense, x = torch.tensor([[0.0, 2, 0], [1, 0, 0], [0, 3, 4]]), torch.arange(9.0).view(3, 3)
    with amp_patch.amp.disable_casts():
        expected = dense @ x
    for first, second in [(torch.float32,) * 2, (torch.float16,) * 2, DTYPES["mixed"]]:
        for name, product in SPARSE_PRODUCTS.items():
            found = product(dense.to(first).to_sparse(), x.to(second))
            assert found.dtype is torch.float32, name
            assert torch.equal(found, expected), name


LEARNED = {
    "@": lambda matrix, x: matrix @ x,
    "mm": torch.mm,
    "spmm": torch.spmm,
    "addmm": lambda matrix, x: torch.addmm(x, matrix, x),
    "sparse.mm": torch.sparse.mm,
    "sparse.softmax": lambda matrix, x: torch.sparse.softmax(matrix, 1).to_dense() @ x,
    "sparse.log_softmax": lambda matrix, x: torch.sparse.log_softmax(matrix, 1).to_dense() @ x,
}


class LearnedMatrix(nn.Module):
    """A graph layer whose sparse matrix has values that a layer computes."""

    def __init__(self, product):
        super().__init__()
        self.layer, self.product = nn.Linear(3, 4), product

    def forward(self, x):
        hidden = self.layer(x)
        places = torch.tensor([[0, 0, 1, 2, 3], [1, 2, 0, 3, 3]])
        values = hidden.mean(1)[places[0]].sigmoid()
        return self.product(torch.sparse_coo_tensor(places, values, (4, 4)), hidden)


@pytest.mark.parametrize("name", sorted(LEARNED))
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
def test_a_sparse_matrix_whose_values_are_learned(amp, opt_level, name):
    torch.manual_seed(0)
    model, x = LearnedMatrix(LEARNED[name]), torch.randn(4, 3)
    exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    loss = model(x).float().square().sum()
    found = torch.autograd.grad(loss, list(model.parameters()))
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got.float(), wanted, rtol=0.05, atol=0.05)


def test_binary_cross_entropy_runs_in_fp32_on_the_cpu_and_is_refused_elsewhere(amp):
    activate(amp)
    probability, target = torch.rand(4).half(), torch.ones(4)
    with pytest.warns(UserWarning, match="needs the digits of probabilities near 1"):
        loss = F.binary_cross_entropy(probability, target)
    F.binary_cross_entropy(probability.float(), target.half())  # the target has no digits to lose
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, -probability.float().log().mean())
    elsewhere = F.binary_cross_entropy(probability.float().to("meta"), target.to("meta"))
    assert elsewhere.dtype is torch.float32  # no model is there
    activate(amp, model=nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        RuntimeError,
        match=r"binary_cross_entropy must not run where casts may feed it half tensors.*"
        r"got a call on meta while the casts of amp.initialize\(\) are on. Use "
        r"binary_cross_entropy_with_logits without the sigmoid before it, or call it with "
        r".float\(\) tensors in amp.disable_casts\(\)",
    ):
        F.binary_cross_entropy(probability.to("meta"), target.to("meta"))
    with amp.disable_casts():
        meta = F.binary_cross_entropy(probability.float().to("meta"), target.to("meta"))
    assert meta.dtype is torch.float32


# -- threads -------------------------------------------------------------------------------------


def in_thread(function):
    """Call in a new thread; return the result or raise what it raised."""
    outcome = {}

    def run():
        try:
            outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def dtype_of_product():
    x = torch.rand(2, 2)
    return (x @ x).dtype


@pytest.mark.parametrize("opt_level", HALVES)
def test_a_new_thread_casts_as_the_process_does(amp, opt_level):
    model = activate(amp, opt_level)
    assert in_thread(dtype_of_product) is HALVES[opt_level]
    with amp.disable_casts():
        assert dtype_of_product() is torch.float32
        assert in_thread(dtype_of_product) is HALVES[opt_level]
    amp.deactivate()
    assert in_thread(dtype_of_product) is torch.float32
    del model


def test_disable_casts_in_one_thread_leaves_another_alone(o1):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with o1.disable_casts():
            entered.set()
            leave.wait(10)
            return dtype_of_product()

    results = []
    thread = threading.Thread(target=lambda: results.append(hold()))
    thread.start()
    entered.wait(10)
    try:
        assert dtype_of_product() is torch.float16
    finally:
        leave.set()
        thread.join()
    assert results == [torch.float32]


class RecordingProduct(Product):
    """Its backward notes the dtype of a product that it makes."""

    seen = []

    @staticmethod
    def backward(ctx, grad):
        _, weight = ctx.saved_tensors
        RecordingProduct.seen.append((grad @ weight.T).dtype)
        return Product.backward(ctx, grad)


@pytest.mark.parametrize("where", ["same thread", "other thread"])
def test_the_backward_of_a_users_function_casts_as_the_process_does(o1, where):
    x, w = torch.rand(2, 2, requires_grad=True), torch.rand(2, 2, requires_grad=True)
    RecordingProduct.seen.clear()
    loss = RecordingProduct.apply(x, w).sum()
    assert loss.dtype is torch.float32
    loss.backward() if where == "same thread" else in_thread(loss.backward)
    assert RecordingProduct.seen == [torch.float16]
    assert x.grad.dtype is w.grad.dtype is torch.float32


class Recording(nn.Module):
    """A linear layer that notes the dtype of its result."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.seen = []

    def forward(self, x):
        y = self.fc(x)
        self.seen.append(y.dtype)
        return y


def replicate(model):
    """Make a replica as nn.parallel.replicate does, which needs a GPU itself."""
    replica = model._replicate_for_data_parallel()
    replica._former_parameters = {}
    replica.fc = model.fc._replicate_for_data_parallel()
    replica._modules["fc"] = replica.fc
    for name, param in model.fc._parameters.items():
        setattr(replica.fc, name, param * 1)
    return replica


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_replicas_of_data_parallel_run_at_the_models_level_in_their_threads(amp, opt_level):
    model = activate(amp, opt_level, Recording())
    x = torch.rand(2, 3)
    expected = model(x)
    other = activate(amp, "O1" if opt_level != "O1" else "O4")
    replicas = [replicate(model) for _ in range(2)]
    results = [in_thread(lambda replica=replica: replica(x)) for replica in replicas]
    assert len(set(model.seen)) == 1
    assert len(model.seen) == 3
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    sum(result.float().sum() for result in results).backward()
    expected_grad = (2.0 * x.sum(0)).expand(3, 3)
    torch.testing.assert_close(model.fc.weight.grad.float(), expected_grad, rtol=2e-2, atol=2e-2)
    del other


# -- disable_casts -------------------------------------------------------------------------------


def test_disable_casts_is_reentrant_and_restored_by_an_exception(o1):
    with o1.disable_casts():
        with o1.disable_casts():
            assert dtype_of_product() is torch.float32
        assert dtype_of_product() is torch.float32
    with pytest.raises(KeyError), o1.disable_casts(), o1.disable_casts():
        raise KeyError
    assert dtype_of_product() is torch.float16


def test_disable_casts_is_a_decorator(o1):
    decorated = o1.disable_casts()(dtype_of_product)
    assert decorated() is decorated() is torch.float32
    assert decorated.__name__ == "dtype_of_product"
    assert dtype_of_product() is torch.float16


def test_every_rule_is_off_inside_disable_casts(o1):
    h, x = torch.rand(3, 3).half(), torch.rand(3, 3)
    with o1.disable_casts():
        assert h.exp().dtype is h.sum().dtype is torch.float16
        assert o1.half_function(lambda t: t)(x) is x
        assert o1.float_function(lambda t: t)(h) is h
        with pytest.raises(RuntimeError, match="same dtype"):
            h @ x


# -- users' functions ----------------------------------------------------------------------------


DECORATORS = {
    "half_function": (torch.float32, torch.float16),
    "float_function": (torch.float16, torch.float32),
    "bfloat16_function": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("name", [*DECORATORS, "promote_function"])
def test_decorators_keep_metadata_and_wait_for_initialize(amp, name):
    @getattr(amp, name)
    def scaled(x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        """Scale."""
        return x * factor

    assert scaled.__name__ == "scaled"
    assert scaled.__doc__ == "Scale."
    assert scaled.__wrapped__.__kwdefaults__ == {"factor": 2.0}
    given_dtype, cast_dtype = DECORATORS.get(name, (torch.float16, torch.float16))
    x = torch.rand(2, dtype=given_dtype)
    assert scaled(x).dtype is given_dtype
    model = activate(amp)
    assert scaled(x, factor=3.0).dtype is cast_dtype
    amp.deactivate()
    assert scaled(x).dtype is given_dtype
    del model


@pytest.mark.parametrize("opt_level", ["O0", "O2", "O3", "O5"])
def test_decorators_do_nothing_where_functions_are_not_cast(amp, opt_level):
    model = activate(amp, opt_level)
    assert amp.half_function(lambda x: x)(torch.rand(2)).dtype is torch.float32
    assert amp.float_function(lambda x: x)(torch.rand(2).half()).dtype is torch.float16
    del model


def test_a_decorator_under_staticmethod_on_a_users_function(amp):
    class Product(torch.autograd.Function):
        @staticmethod
        @amp.half_function
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x.mul(w)

        @staticmethod
        @amp.float_function
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad * w, grad * x

    model = activate(amp)
    x, w = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    result = Product.apply(x, w)
    assert result.dtype is torch.float16
    result.sum().backward()
    torch.testing.assert_close(x.grad, w.detach(), rtol=1e-3, atol=1e-3)
    assert x.grad.dtype is torch.float32
    del model


def test_a_decorator_on_the_forward_of_a_module(amp):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2))

        @amp.half_function
        def forward(self, x):
            return x * 2

    model = activate(amp, model=Scale())
    assert model(torch.rand(2)).dtype is torch.float16
