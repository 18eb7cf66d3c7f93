"""``torch.autocast(device, enabled=False)`` is a block without casts, as ``disable_casts()``."""

import contextlib
import importlib
import inspect
import threading
import types

import hypothesis.strategies as st
import pytest
import torch
import torch._dynamo
from casting_support import activate
from hypothesis import example, given
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from amp_patch.casting import autocast_blocks
from amp_patch.casting.mode import mode, process

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = {"O1": torch.float16, "O4": torch.bfloat16}
BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
BIG = torch.full((4, 4), 300.0)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.c.*amp.autocast:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.*treespec:FutureWarning"),
]


def off(device="cpu"):
    return torch.autocast(device, enabled=False)


@pytest.fixture
def fresh():
    """Start with no compiled code, and end with none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def product():
    return (BIG @ BIG).dtype


# -- what the block does -------------------------------------------------------------------------

SPELLINGS = {
    "torch.autocast": lambda: torch.autocast("cpu", enabled=False),
    "torch.amp.autocast": lambda: torch.amp.autocast("cpu", enabled=False),
    "of half": lambda: torch.autocast("cpu", torch.float16, False, cache_enabled=False),
    "torch.cpu.amp.autocast": lambda: torch.cpu.amp.autocast(enabled=False),
    "not supported": lambda: torch.autocast("cpu", dtype=torch.int8, enabled=False),
}


@pytest.mark.parametrize("opt_level", HALF)
@pytest.mark.parametrize("name", SPELLINGS)
def test_functions_run_in_float32_inside(amp, opt_level, name):
    model = activate(amp, opt_level, nn.Linear(4, 4).eval())  # a training call here would warn
    with SPELLINGS[name]():
        inside = BIG @ BIG, F.linear(BIG, BIG), model(BIG)
        assert BIG.half().exp().dtype is torch.float16
    assert [t.dtype for t in inside] == [torch.float32] * 3
    torch.testing.assert_close(inside[0], torch.full((4, 4), 4 * 300.0**2))
    assert product() is HALF[opt_level]
    decorated = SPELLINGS[name]()(lambda x: x @ x)
    assert decorated(BIG).dtype is torch.float32
    assert product() is HALF[opt_level]


def test_code_that_is_in_no_module_has_blocks_too(amp):
    activate(amp)
    own = {"torch": torch, "product": product}
    exec("with torch.autocast('cpu', enabled=False):\n    found = product()", own)
    assert own["found"] is torch.float32
    assert product() is torch.float16


@pytest.mark.usefixtures("o1")
def test_only_a_block_for_a_device_whose_tensors_are_cast_counts(monkeypatch):
    with off("cuda"), torch.cuda.amp.autocast(enabled=False):
        assert product() is torch.float16
    monkeypatch.setattr(process, "devices", frozenset({"cpu", "cuda"}))
    for make in (off, torch.cuda.amp.autocast):
        with make("cuda") if make is off else make(enabled=False):
            assert product() is torch.float32
        assert product() is torch.float16


@pytest.mark.usefixtures("o1")
def test_a_block_that_is_enabled_is_torchs_own():
    with torch.autocast("cpu", torch.bfloat16):
        # our casts to float16 come first, and torch's own casts what they give
        assert product() is torch.bfloat16
        # ours alone: torch's on the CPU has no rule for it
        assert BIG.half().exp().dtype is torch.float32
        with off():
            assert product() is torch.float32
            with torch.autocast("cpu", torch.bfloat16):
                assert product() is torch.bfloat16
        assert product() is torch.bfloat16
    assert product() is torch.float16


class Recursive(nn.Module):
    """A forward that runs a program: the rest of it inside of the block that comes next."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.run = None

    def forward(self, x):
        self.run()
        return x


KINDS = ("off", "disable_casts", "half_region", "float_region", "model", "try")
programs = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from(KINDS), inner, st.booleans()), max_size=3),
    max_leaves=12,
)


def blocks(amp, block_of_off):
    return {
        "off": block_of_off,
        "disable_casts": amp.disable_casts,
        "half_region": amp.half_region,
        "float_region": amp.float_region,
    }


def run(program, model, make, seen):
    """Run a program of nested blocks and note the dtype of a product around each."""
    for kind, inner, fails in program:
        seen.append(product())
        with contextlib.suppress(KeyError):
            if kind == "model":
                model.run = lambda inner=inner: run(inner, model, make, seen)
                model(BIG)
                continue
            with make[kind]() if kind in make else contextlib.nullcontext():
                run(inner, model, make, seen)
                if fails:
                    raise KeyError
    seen.append(product())


# a training call in such a block is told of, as docs/messages.md says
@pytest.mark.filterwarnings("ignore:torch.autocast.* switches the casts")
@pytest.mark.parametrize("opt_level", LEVELS)
def test_nested_with_others_it_does_what_disable_casts_does(amp, opt_level):
    model = activate(amp, opt_level, Recursive())
    other = activate(amp, "O4" if opt_level == "O1" else "O1")
    shared = off()

    @example([("off", [("model", [], False)], False)], False)
    @given(programs, st.booleans())
    def nested(program, one_object):
        got, expected = [], []
        run(program, model, blocks(amp, (lambda: shared) if one_object else off), got)
        run(program, model, blocks(amp, amp.disable_casts), expected)
        assert got == expected
        assert mode.autocasts == mode.around == []

    nested()
    del other


@pytest.mark.usefixtures("o1")
def test_a_block_is_the_calling_threads_and_one_object_serves_several():
    shared = off()
    seen = []

    @shared
    def halting(barrier):
        barrier.wait()
        seen.append(product())
        barrier.wait()

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=halting, args=(barrier,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    barrier.wait()
    outside = product()
    barrier.wait()
    for thread in threads:
        thread.join()
    assert seen == [torch.float32] * 2
    assert outside is product() is torch.float16


@BOTH
@pytest.mark.usefixtures("o1")
@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_checkpoint_is_repeated_as_it_ran(where, reentrant):
    seen = []

    def body(x):
        with off() if where == "inside" else contextlib.nullcontext():
            y = x @ x
        seen.append((y.dtype, (x @ x).dtype))
        return y.float()

    x = torch.rand(3, 3, requires_grad=True)
    around = off() if where == "around" else contextlib.nullcontext()
    with around, set_checkpoint_early_stop(False):
        loss = checkpoint(body, x, use_reentrant=reentrant).sum()
    loss.backward()
    outside = torch.float16 if where == "inside" else torch.float32
    assert seen == [(torch.float32, outside)] * 2
    assert product() is torch.float16


def test_initialize_and_deactivate_inside_of_a_block(amp):
    with amp.disable_casts():
        with off():
            model = activate(amp)
        assert mode.off
    assert product() is torch.float16
    with off():
        amp.deactivate()
        assert product() is torch.float32
    again = activate(amp)
    assert product() is torch.float16
    assert mode.autocasts == []
    del model, again


def test_deactivate_restores_the_class(amp):
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    model = activate(amp, "O2")
    assert torch.autocast.__enter__ is not enter
    amp.deactivate()
    assert torch.autocast.__enter__ is enter
    assert torch.autocast.__exit__ is leave
    del model


# -- where torch hands its own state on ----------------------------------------------------------


class Square(torch.autograd.Function):
    """Multiplies in forward and in backward; large factors tell in which dtype."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x @ x).float()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (300 * grad @ x).float()


@pytest.mark.usefixtures("o1", "fresh")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_with_custom_bwd_casts_as_its_forward_did(compiled):
    def function(x):
        return Square.apply(x)

    if compiled:
        function = torch.compile(function, backend="eager", fullgraph=True)
    x = BIG.clone().requires_grad_()
    out = function(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.isinf().all()
    assert grad.isinf().all()


def code_inside(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_inside(constant)


@pytest.mark.parametrize(("module", "name"), sorted(autocast_blocks._HANDED_ON))
def test_torch_enters_a_block_where_it_is_said_to_hand_its_state_on(module, name):
    source = inspect.getsource(importlib.import_module(module))
    codes = [c for c in code_inside(compile(source, "", "exec")) if c.co_name == name]
    assert any({"autocast", "_UnmanagedAutocast"} & {*code.co_names} for code in codes)


@BOTH
def test_a_checkpoint_that_no_patch_reached_is_repeated_with_the_casts_of_backward(amp, reentrant):
    # bound before initialize where only this function finds it
    kept = [checkpoint]
    model = activate(amp)
    seen = []

    def body(x):
        seen.append((x @ x).dtype)
        return x.exp()

    x = torch.rand(3, 3, requires_grad=True)
    with set_checkpoint_early_stop(False):
        loss = kept[0](body, x, use_reentrant=reentrant).sum()
    loss.backward()
    assert seen == [torch.float16] * 2
    assert product() is torch.float16
    del model


@pytest.mark.usefixtures("o1")
@pytest.mark.parametrize(
    ("module", "name", "dtype"),
    [
        ("torch.nn.parallel.parallel_apply", "_worker", torch.float16),
        ("torch.nn.parallel.parallel_apply", "other", torch.float32),
        ("mine", "_worker", torch.float32),
    ],
)
def test_a_block_that_hands_torchs_state_on_says_nothing_of_ours(module, name, dtype):
    namespace = {"__name__": module, "off": off, "product": product}
    exec(f"def {name}():\n    with off():\n        return product()", namespace)
    assert namespace[name]() is dtype
    assert product() is torch.float16


# -- compiled code -------------------------------------------------------------------------------


def off_inside(amp):
    def function(x):
        with off():
            y = x @ x
            with amp.half_region():
                z = x @ x
            last = x @ x
        return x @ x, y, z, last, x @ x

    return function


def off_in_a_half_region(amp):
    def function(x):
        with amp.half_region():
            y = x @ x
            with off():
                z = x @ x
            return x @ x, y, z

    return function


def decorated(amp):
    @off()
    def inner(x):
        return x @ x

    return lambda x: (x @ x, inner(x), x @ x)


def object_from_outside(amp):
    block = off()

    def function(x):
        with block, off():
            y = x @ x
        return y, x @ x

    return function


def of_another_device(amp):
    def function(x):
        with off("cuda"):
            return x @ x

    return function


def in_a_model(amp):
    class Inner(nn.Module):
        def forward(self, x):
            with off():
                y = x @ x
            return y, x @ x

    model = activate(amp, "O4", nn.Sequential(Inner()))
    return lambda x: model(x)


def graph_break(amp):
    def function(x):
        with off():
            y = x @ x
            torch._dynamo.graph_break()
            z = x @ x
        return x @ x, y, z

    return function


FUNCTIONS = (
    off_inside,
    off_in_a_half_region,
    decorated,
    object_from_outside,
    of_another_device,
    in_a_model,
    graph_break,
)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("opt_level", "backend"),
    [
        ("O1", "eager"),
        pytest.param("O4", "aot_eager", marks=pytest.mark.slow),
        pytest.param("O5", "eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make", FUNCTIONS)
def test_compiled_code_computes_what_eager_computes(amp, make, backend, opt_level):
    model = activate(amp, opt_level)
    function = make(amp)
    full = make is not graph_break
    for _ in range(2):
        expected = function(BIG)
        got = torch.compile(function, backend=backend, fullgraph=full)(BIG)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert mode.autocasts == mode.around == []
    assert not mode.off
    del model


@pytest.mark.usefixtures("o1", "fresh")
def test_one_compiled_function_inside_and_outside_of_a_block():
    function = torch.compile(lambda x: x @ x, backend="eager", fullgraph=True)
    for _ in range(2):
        with off():
            assert function(BIG).dtype is torch.float32
        assert function(BIG).dtype is torch.float16


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_compiled_checkpoint_with_a_block(amp, opt_level, where):
    model = activate(amp, opt_level)

    def body(x):
        with off() if where == "inside" else contextlib.nullcontext():
            y = (x @ BIG) @ BIG
        return y.float() + (x @ BIG).float()

    def function(x):
        with off() if where == "around" else contextlib.nullcontext():
            return checkpoint(body, x, use_reentrant=False)

    x = torch.full((4, 4), 0.01, requires_grad=True)
    expected = function(x)
    (want,) = torch.autograd.grad(expected.sum(), x)
    refused = torch.__version__ < (2, 11) and (opt_level, where) == ("O1", "inside")
    with pytest.raises(RuntimeError, match="SideEffects") if refused else contextlib.nullcontext():
        got = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        (grad,) = torch.autograd.grad(got.sum(), x)
        torch.testing.assert_close([got, grad], [expected, want], rtol=0, atol=0)
    del model


# -- a block of torch's own around a model -------------------------------------------------------


@pytest.mark.parametrize("opt_level", [level for level in LEVELS if level != "O0"])
def test_torchs_autocast_around_a_model_is_warned_of_once_a_session(amp, opt_level, recwarn):
    model = activate(amp, opt_level, nn.Linear(4, 4))
    model(BIG)
    torch.set_autocast_enabled("cuda", True)
    try:
        with off(), torch.no_grad():
            model(BIG)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert not recwarn
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(
            UserWarning,
            match=r"casts by itself.* got a call of a model of type Linear in "
            r"torch.autocast\('cpu'\); remove that 'with' and its GradScaler, and call "
            r"model\(inputs\)",
        ),
    ):
        model(BIG)
    with torch.autocast("cpu", torch.bfloat16):
        model(BIG)
    assert not recwarn
    amp.deactivate()
    model = activate(amp, opt_level, nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="casts by itself"):
        model(BIG)  # in a new session, anew


def test_at_o0_autocast_is_said_to_cast_what_is_to_be_float32(amp):
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model = amp.initialize(model, opt_level="O0", verbosity=0)
    said = r"at O0 trains in float32.* got a call of a model of type Sequential .*take O1 or O4"
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match=said):
        model(torch.ones(2, 4))
    assert seen == [torch.bfloat16]
