"""Code that asks whether autocast is on gets the answers that it gets under ``torch.autocast``."""

import contextlib
import copy
import functools
import sys
import threading
import types
import warnings

import hypothesis.strategies as st
import pytest
import torch
import torch._dynamo
from casting_support import HALVES, activate
from hypothesis import example, given
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_patch.casting.mode import process

# torch's own answers: nobody replaces what stands here
OWN = torch._C
NAMES = (
    "is_autocast_enabled",
    "is_autocast_cpu_enabled",
    "get_autocast_dtype",
    "get_autocast_gpu_dtype",
    "get_autocast_cpu_dtype",
)
LEVELS = pytest.mark.parametrize("opt_level", HALVES)
X = torch.linspace(-2, 2, 16).reshape(4, 4)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.*treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.fixture
def fresh():
    """Start with no compiled code, and end with none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def is_on(device):
    """Ask in every way that tells of this device."""
    asked = [
        torch.is_autocast_enabled(device),
        torch.is_autocast_enabled(device_type=device),
        torch.is_autocast_enabled(f"{device}:0"),
    ]
    asked.append(
        torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled()
    )
    assert len(set(asked)) == 1
    return asked[0]


def half_of(device):
    """Ask for the dtype in every way that tells of this device."""
    asked = [torch.get_autocast_dtype(device), torch.get_autocast_dtype(device_type=f"{device}:0")]
    cpu = device == "cpu"
    asked.append(torch.get_autocast_cpu_dtype() if cpu else torch.get_autocast_gpu_dtype())
    assert len(set(asked)) == 1
    return asked[0]


def answers(device):
    """Return the dtype that casts are said to be to, and None where they are said to be off."""
    return half_of(device) if is_on(device) else None


@contextlib.contextmanager
def autocast(device, dtype):
    """Do what ``torch.autocast`` does, also for a device that this machine has not."""
    before = OWN.is_autocast_enabled(device), OWN.get_autocast_dtype(device)
    set_autocast(device, True, dtype)
    try:
        yield
    finally:
        set_autocast(device, *before)


def set_autocast(device, enabled, dtype):
    OWN.set_autocast_enabled(device, enabled)
    OWN.set_autocast_dtype(device, dtype)


def off(device="cpu"):
    return torch.autocast(device, enabled=False)


class Runs(nn.Module):
    """A model whose forward runs what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, function, *args):
        return function(*args)


# -- where casts are on ---------------------------------------------------------------------------

#: Blocks of amp, and what does the same under torch's autocast.
BLOCKS = {
    "off": (lambda amp, device: off(device), lambda device, dtype: off(device)),
    "disable_casts": (lambda amp, device: amp.disable_casts(), lambda device, dtype: off(device)),
    "float_region": (lambda amp, device: amp.float_region(), lambda device, dtype: off(device)),
    "half_region": (lambda amp, device: amp.half_region(), autocast),
    "on": (
        lambda amp, device: autocast(device, torch.bfloat16),
        lambda device, dtype: autocast(device, torch.bfloat16),
    ),
}
programs = st.recursive(
    st.just([]),
    lambda inner: st.lists(
        st.tuples(st.sampled_from([*BLOCKS, "model"]), inner, st.booleans()), max_size=3
    ),
    max_leaves=10,
)


def run(program, model, blocks, device):
    """Run a program of nested blocks; return what is answered around and inside of each."""
    seen = [answers(device)]
    for kind, inner, fails in program:
        if kind == "model":
            seen += model(run, inner, model, blocks, device)
        else:
            with contextlib.suppress(KeyError), blocks[kind]():
                # inside of torch's own autocast amp's blocks do nothing to it
                seen += run(inner if kind != "on" else [], model, blocks, device)
                if fails:
                    raise KeyError
        seen.append(answers(device))
    return seen


# a training call in such a block is told of, as docs/messages.md says
@pytest.mark.filterwarnings("ignore:torch.autocast.* switches the casts")
@LEVELS
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_answers_are_those_of_torchs_autocast(amp, monkeypatch, opt_level, device):
    dtype = HALVES[opt_level]
    model = activate(amp, opt_level, Runs())
    monkeypatch.setattr(process, "devices", frozenset({"cpu", device}))
    ours = {key: functools.partial(make, amp, device) for key, (make, _) in BLOCKS.items()}
    torchs = {key: functools.partial(make, device, dtype) for key, (_, make) in BLOCKS.items()}

    @example([("off", [("model", [], False)], False)])
    @given(programs)
    def nested(program):
        got = run(program, model, ours, device)
        with amp.disable_casts(), autocast(device, dtype):
            expected = run(program, lambda function, *args: function(*args), torchs, device)
        assert got == expected

    nested()
    assert answers(device) is dtype


def test_without_a_device_the_question_is_about_any_whose_tensors_are_cast(amp):
    model = activate(amp, "O4")
    assert torch.is_autocast_enabled()
    assert torch.get_autocast_gpu_dtype() is torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") is torch.float16
    with amp.disable_casts():
        assert not torch.is_autocast_enabled()
        assert torch.get_autocast_gpu_dtype() is torch.float16
    del model


def own_answers():
    calls = [(name, ()) for name in NAMES if name != "get_autocast_dtype"]
    calls += [(name, (device,)) for name in (NAMES[0], NAMES[2]) for device in ("cpu", "cuda")]
    return [getattr(OWN, name)(*args) for name, args in calls], [
        getattr(torch, name)(*args) for name, args in calls
    ]


@pytest.mark.parametrize("opt_level", ["O0", "O2", "O3", "O5"])
def test_levels_that_cast_no_functions_leave_torchs_answers(amp, opt_level):
    model = activate(amp, opt_level, Runs())
    for other in (None, "O1"):
        other = other and activate(amp, other)
        own, got = model(own_answers)
        assert own == got
        assert torch.is_autocast_enabled("cpu") is (other is not None)


def test_the_model_whose_forward_runs_decides(amp):
    one, other = activate(amp, "O1", Runs()), activate(amp, "O4", Runs())
    seen = one(lambda: (answers("cpu"), other(answers, "cpu"), answers("cpu")))
    assert seen == (torch.float16, torch.bfloat16, torch.float16)


def test_each_thread_has_its_own_answers(o1):
    seen = []
    with off():
        thread = threading.Thread(target=lambda: seen.append(answers("cpu")))
        thread.start()
        thread.join()
        assert not torch.is_autocast_enabled("cpu")
    assert seen == [torch.float16]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("is_autocast_enabled", ("no device",)),
        ("is_autocast_enabled", (1,)),
        ("is_autocast_enabled", ("cpu", "cpu")),
        ("get_autocast_dtype", ()),
        ("get_autocast_dtype", ("no device",)),
        ("is_autocast_cpu_enabled", ("cpu",)),
        ("get_autocast_gpu_dtype", ("cpu",)),
    ],
)
@pytest.mark.usefixtures("o1")
def test_a_wrong_question_is_torchs_to_refuse(name, args):
    with pytest.raises((RuntimeError, TypeError)) as expected:
        getattr(OWN, name)(*args)
    with pytest.raises(type(expected.value)) as got:
        getattr(torch, name)(*args)
    assert str(got.value) == str(expected.value)


# -- who asks -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("o1")
@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("torch", False),
        ("torch.utils.checkpoint", False),
        ("torchvision", True),
        ("dgl.backend.pytorch.sparse", False),  # whose functions have rules
        ("torch_geometric.nn", True),  # whose rules are no casts of its own
        ("amp_patch.mistakes", False),
        ("__main__", True),
    ],
)
def test_torchs_code_gets_torchs_answers(module, told):
    source = "import torch\ndef asked(): return [f() for f in {torch.is_autocast_enabled}]"
    namespace = {"__name__": module}
    exec(source, namespace)
    assert namespace["asked"]() == [told]
    exec("nameless = torch.is_autocast_enabled()", nameless := {"torch": torch})
    assert nameless["nameless"]


class Square(torch.autograd.Function):
    """Notes whether torch's own autocast is on in forward and backward."""

    seen = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        Square.seen.append(OWN.is_autocast_enabled("cpu"))
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        Square.seen.append(OWN.is_autocast_enabled("cpu"))
        return 2 * grad * ctx.saved_tensors[0]


@LEVELS
def test_what_custom_fwd_notes_switches_no_autocast_on_in_backward(amp, opt_level):
    model = activate(amp, opt_level)
    Square.seen = []
    Square.apply(X.clone().requires_grad_()).sum().backward()
    assert Square.seen == [False, False]
    del model


class Double(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad * 2


def casting(dtype, sees):
    """Return an autograd function that asks for a dtype, and notes those of its products."""

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=dtype)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return (x @ weight).float()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            found = grad.to(x.dtype) @ weight.T, x.T @ grad.to(x.dtype)
            sees(found[0].dtype)
            return found[0].float(), found[1].float()

    return Product.apply


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@LEVELS
def test_custom_fwd_casts_its_inputs_and_nothing_in_it(amp, opt_level, dtype, compiled):
    ones = torch.full((4, 4), 1.0009765)  # in bfloat16 1
    rounded = ones.to(dtype)
    by_hand = (X.to(dtype) @ rounded).float(), (rounded @ rounded.T).float()
    model, seen = activate(amp, opt_level), set()
    function = casting(dtype, (lambda _: None) if compiled else seen.add)
    compile_ = functools.partial(torch.compile, backend="eager", fullgraph=True)
    run = compile_(function) if compiled else function
    x, weight = X.clone().requires_grad_(), ones.clone().requires_grad_()
    y = run(x, weight)
    y.backward(ones)
    assert torch.equal(y, by_hand[0])
    assert torch.equal(x.grad, by_hand[1])
    assert compiled or seen == {dtype}
    del model


class InFloat32(torch.autograd.Function):
    """A layer's product that takes float32 alone, forward and backward."""

    @staticmethod
    def refuse(*tensors):
        if any(one.dtype is not torch.float32 for one in tensors):
            raise TypeError("float32 is needed")

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        InFloat32.refuse(x, weight)
        return x @ weight.T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        InFloat32.refuse(grad)
        return grad @ weight, grad.T @ x


class Exact(nn.Linear):
    def forward(self, x):
        return InFloat32.apply(x, self.weight)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("opt_level", "beside", "compiled"),
    [
        *(("O2", None, False), ("O3", None, False), ("O5", None, False), ("O5", "O1", False)),
        *(("O2", None, True), ("O5", "O1", True)),
    ],
)
def test_custom_fwd_gets_float32_in_a_model_in_half(amp, opt_level, beside, compiled):
    """Half layers take what it returns; the gradients are float64's, but for roundings to half."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Exact(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    exact = copy.deepcopy(model).double()
    linear = functools.partial(nn.functional.linear, weight=exact[1].weight)
    exact[3](exact[2](linear(exact[0](X.double())))).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = activate(amp, beside) if beside else None
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0, verbosity=0)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with amp.scale_loss(run(X).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    eps = 2.0**-7 if opt_level == "O5" else 2.0**-10
    for found, expected in zip(amp.master_params(optimizer), exact.parameters(), strict=True):
        if expected.grad is None:  # the bias that is not used
            continue
        error = (found.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 8 * eps
    with amp.disable_casts(), pytest.raises(TypeError, match="float32 is needed"):
        model(X)
    del other


@pytest.mark.parametrize(("opt_level", "dtype"), [("O2", "bfloat16"), ("O5", "float16")])
def test_custom_fwd_brings_no_other_half_into_a_model_in_half(amp, opt_level, dtype):
    """Its layers would not take it."""

    class Doubling(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=getattr(torch, dtype))
        def forward(ctx, x):
            return x * 2

    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(Doubling.apply(x))

    model = activate(amp, opt_level, nn.Sequential(Doubled(4, 4), nn.LayerNorm(4)))
    assert model(X).isfinite().all()


@LEVELS
def test_custom_fwd_casts_nothing_where_casts_are_off(amp, opt_level):
    model = activate(amp, opt_level)
    with amp.disable_casts():  # float16 holds no million
        y = casting(torch.float16, lambda _: None)(X * 1e6, torch.ones(4, 4))
    assert y.isfinite().all()
    del model


@LEVELS
@pytest.mark.usefixtures("fresh")
def test_nor_does_it_in_compiled_code(amp, opt_level):
    model = activate(amp, opt_level)
    entered = []

    def backend(graph, inputs):
        nodes = [node for one in graph.modules() for node in getattr(one, "graph", graph).nodes]
        entered.extend(n.args for n in nodes if n.target is torch.amp._enter_autocast)
        return graph

    compiled = torch.compile(lambda x: Double.apply(x) + 1, backend=backend, fullgraph=True)
    compiled(X.clone().requires_grad_()).sum().backward()
    assert {args[2] for args in entered} == {False}
    del model


@pytest.mark.usefixtures("o1")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_repeated_without_torchs_autocast(reentrant):
    seen = []

    def body(x):
        seen.append((OWN.is_autocast_enabled("cpu"), answers("cpu")))
        return (x @ x).float()

    checkpoint(body, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert seen == [(False, torch.float16)] * 2


# -- where the functions are found ----------------------------------------------------------------


@pytest.fixture
def library(monkeypatch):
    """Give a module that has bound the questions, in each way, before amp is initialized."""
    module = types.ModuleType("a_users_library")
    monkeypatch.setitem(sys.modules, "a_users_library", module)
    source = (
        f"import functools\nfrom torch import {', '.join(NAMES)}\n"
        + """
on_cpu = functools.partial(is_autocast_enabled, "cpu")
table = {"cpu": is_autocast_cpu_enabled}
def by_default(asked=is_autocast_enabled): return asked("cpu")
def by_name(): return is_autocast_enabled("cpu")
"""
    )
    exec(source, vars(module))
    return module


def test_questions_are_followed_where_they_are_held_and_put_back(amp, library):
    model = Runs()
    model.asked = torch.is_autocast_enabled

    def ask():
        held = (library.on_cpu, library.table["cpu"], library.by_default, library.by_name)
        return [asked() for asked in (*held, library.is_autocast_cpu_enabled, model.asked)]

    before = dict(vars(library))
    assert ask() == [False] * 6
    activate(amp, "O1", model)
    assert ask() == [True] * 6
    assert library.get_autocast_dtype("cpu") is library.get_autocast_cpu_dtype() is torch.float16
    assert library.get_autocast_gpu_dtype() is torch.float16
    late = types.ModuleType("imported_late")
    exec("from torch import is_autocast_enabled", vars(late))
    sys.modules["imported_late"] = late
    try:
        amp.deactivate()
    finally:
        del sys.modules["imported_late"]
    assert ask() == [False] * 6
    assert dict(vars(library)) == before
    assert late.is_autocast_enabled is OWN.is_autocast_enabled


def test_deactivate_restores_everything(amp):
    variable = torch._dynamo.variables.TorchInGraphFunctionVariable
    places = [(torch, name) for name in NAMES]
    places += [(torch._dynamo.trace_rules, "lookup_inner"), (variable, "_get_handlers")]
    before = [vars(owner)[name] for owner, name in places]
    for _ in range(2):
        model = activate(amp)
        assert all(vars(o)[n] is not was for (o, n), was in zip(places, before, strict=True))
        amp.deactivate()
        assert [vars(owner)[name] for owner, name in places] == before
        del model


# -- what libraries do with the answers -----------------------------------------------------------


def protected(x):
    """Compute angles in float32, as Hugging Face's models do."""
    block = off() if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()
    with block:
        return (x @ x.exp()).cos()


def cast_for_a_kernel(x):
    if torch.is_autocast_enabled("cpu"):
        x = x.to(torch.get_autocast_dtype("cpu"))
    with off():
        return x @ x


def handed_on(x):
    """Enter an autocast by the state that was asked for, as checkpoints of users' own do."""
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=enabled, dtype=dtype):
        return x @ x


def enabled(x):
    with torch.autocast("cpu"):
        return x @ x


def enabled_in_off(x):
    with off(), torch.autocast("cpu"):
        return x @ x


LIBRARIES = (protected, cast_for_a_kernel, handed_on, enabled, enabled_in_off)


@LEVELS
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_compute_what_they_compute_under_autocast(amp, opt_level, library, compiled):
    with torch.autocast("cpu", HALVES[opt_level]):
        expected = library(X)
    model = activate(amp, opt_level, Runs())
    if compiled:
        library = torch.compile(library, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(library(X), expected, rtol=0, atol=0)
    torch.testing.assert_close(model(library, X), expected, rtol=0, atol=0)
    assert not OWN.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("o1")
def test_torch_warns_of_no_old_question_that_it_does_not_answer():
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.get_autocast_gpu_dtype() is torch.get_autocast_cpu_dtype() is torch.float16
            assert torch.is_autocast_cpu_enabled()
    finally:
        torch.set_warn_always(False)


class Proxies(nn.Module):
    """A loss that casts its own parameter, unless autocast does: as pytorch-metric-learning's."""

    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        if not torch.is_autocast_enabled():
            self.proxies.data = self.proxies.to(x.dtype)
        return F.linear(x, self.proxies).float().mean()


@LEVELS
def test_a_loss_that_casts_its_parameters_unless_autocast_is_on_keeps_them(amp, opt_level):
    loss = activate(amp, opt_level, Proxies())
    loss(X.to(HALVES[opt_level])).backward()
    assert loss.proxies.dtype is torch.float32


# -- compiled, traced and exported code -----------------------------------------------------------


def every_answer(amp, x):
    """Ask in every way that torch.compile takes."""
    seen = []
    blocks = (contextlib.nullcontext, amp.half_region, amp.float_region, amp.disable_casts, off)
    for block in blocks:
        with block():
            seen.append(torch.is_autocast_enabled("cpu"))
            seen.append(torch.is_autocast_enabled(device_type="cuda"))
            seen.append(torch.is_autocast_enabled())
            seen.append(torch.is_autocast_cpu_enabled())
            seen.append(torch.get_autocast_dtype("cpu"))
            seen.append(torch.get_autocast_gpu_dtype())
    return x @ x, seen


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("opt_level", ["O1", "O4", "O2"])
@pytest.mark.parametrize("inside", [False, True], ids=["a function", "a model"])
def test_compiled_code_gets_the_answers_of_eager_code(amp, opt_level, inside):
    model = activate(amp, opt_level, Runs())
    function = functools.partial(model, every_answer) if inside else every_answer
    product, expected = function(amp, X)
    compiled = torch.compile(lambda x: function(amp, x), backend="eager", fullgraph=True)
    for _ in range(2):
        got, answered = compiled(X)
        assert got.dtype is product.dtype
        assert answered == expected


@pytest.mark.usefixtures("fresh")
def test_one_compiled_function_where_casts_are_on_and_off(amp):
    def function(x):
        return x + 1 if torch.is_autocast_enabled("cpu") else x - 1

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for _ in range(2):
        assert compiled(X).equal(X - 1)
        model = activate(amp, "O1")
        assert compiled(X).equal(X + 1)
        with off():
            assert compiled(X).equal(X - 1)
        with amp.half_region():
            assert compiled(X).equal(X + 1)
        assert compiled(X).equal(X + 1)
        amp.deactivate()
        del model


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        if torch.is_autocast_enabled():
            x = x * 2
        return x


@LEVELS
def test_traced_exported_and_transformed_models_take_the_answer_of_eager_code(amp, opt_level):
    model = activate(amp, opt_level, Asks().eval())
    expected = model(X)
    close = functools.partial(torch.testing.assert_close, expected=expected, rtol=0, atol=0.02)
    close(torch.jit.trace(model, X)(X))
    for strict in (False, True):
        close(torch.export.export(model, (X,), strict=strict).module()(X), check_dtype=False)
    close(torch.func.vmap(model)(X))


def test_scripted_code_casts_nothing_and_is_told_so(amp):
    model = activate(amp, "O1", Asks())
    scripted = torch.jit.script(model)
    with amp.disable_casts():
        torch.testing.assert_close(scripted(X), model(X))
