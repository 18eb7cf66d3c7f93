"""Code that switches autocast off by hand, and on again, does so to our casts."""

import contextlib
import threading

import hypothesis.strategies as st
import pytest
import torch
import torch._dynamo
from casting_support import HALVES, activate
from hypothesis import example, given
from torch import nn
from torch.overrides import _get_current_function_mode_stack

# torch's own: nobody replaces what stands here
OWN = torch._C
LEVELS = pytest.mark.parametrize("opt_level", HALVES)
X = torch.linspace(-2, 2, 16).reshape(4, 4)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def torchs_own_is_left_as_it_was():
    before = OWN.is_autocast_enabled("cpu"), OWN.get_autocast_dtype("cpu")
    yield
    after = OWN.is_autocast_enabled("cpu"), OWN.get_autocast_dtype("cpu")
    OWN.set_autocast_enabled("cpu", before[0])
    OWN.set_autocast_dtype("cpu", before[1])
    assert after == before


def in_turn(x, spelling="of a device"):
    """Return what is answered, and the dtypes of a product in a bracket and after it."""
    question, setter, *device = SPELLINGS[spelling]
    is_on, switch = getattr(torch, question), getattr(torch, setter)
    before = is_on(*device)
    switch(*device, False)
    inside = (x @ x).dtype, is_on(*device)
    switch(*device, before)
    return before, *inside, (x @ x).dtype, is_on(*device)


#: Questions and what sets their answers, in each spelling, with the device if they name one.
SPELLINGS = {
    "of a device": ("is_autocast_enabled", "set_autocast_enabled", "cpu"),
    "of any": ("is_autocast_enabled", "set_autocast_enabled"),
    "of the CPU": ("is_autocast_cpu_enabled", "set_autocast_cpu_enabled"),
}


@LEVELS
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_bracket_switches_casts_off_and_on(amp, opt_level, spelling):
    activate(amp, opt_level)
    for _ in range(2):
        assert in_turn(X, spelling) == (True, torch.float32, False, HALVES[opt_level], True)
    amp.deactivate()
    assert (X @ X).dtype is torch.float32


def test_names_of_arguments_are_torchs(amp):
    activate(amp, "O1")
    torch.set_autocast_enabled(enabled=False, device_type="cpu")
    assert (X @ X).dtype is torch.float32
    torch.set_autocast_enabled("cpu", enabled=True)
    assert (X @ X).dtype is torch.float16


ACTIONS = ("off", "on", "save", "restore", "dtype")
programs = st.recursive(
    st.just([]),
    lambda inner: st.lists(
        st.one_of(
            st.tuples(st.sampled_from(ACTIONS), st.just([])), st.tuples(st.just("block"), inner)
        ),
        max_size=5,
    ),
    max_leaves=6,
)


def run(program, saved):
    """Run a program of settings and blocks; return the dtype of a product after each."""
    seen = []
    for action, inner in program:
        if action in ("off", "on"):
            torch.set_autocast_enabled("cpu", action == "on")
        elif action == "save":
            saved.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        elif action == "restore" and saved:
            enabled, dtype = saved.pop()
            torch.set_autocast_dtype("cpu", dtype)
            torch.set_autocast_enabled("cpu", enabled)
        elif action == "block":
            with torch.autocast("cpu", enabled=False):
                seen += run(inner, saved)
        seen.append((X @ X).dtype)
    return seen


@LEVELS
def test_any_program_does_what_it_does_under_torchs_autocast(amp, opt_level):
    @example([("save", []), ("off", []), ("restore", [])])
    @example([("block", [("save", []), ("on", []), ("restore", [])]), ("off", [])])
    @given(programs)
    def same(program):
        with torch.autocast("cpu", dtype=HALVES[opt_level]):
            expected = run(program, [])
        activate(amp, opt_level)
        assert run(program, []) == expected
        amp.deactivate()
        assert not OWN.is_autocast_enabled("cpu")

    same()


def test_inside_of_torchs_own_block_that_is_switched(amp):
    activate(amp, "O1")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_turn(X) == (True, torch.float32, False, torch.bfloat16, True)
    assert (X @ X).dtype is torch.float16


def test_switched_off_outside_of_a_forward_it_stays_off(amp):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    torch.set_autocast_enabled("cpu", False)
    for _ in range(2):
        output = model(X)
        assert output.dtype is torch.float32
        with amp.scale_loss(output.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    torch.set_autocast_enabled("cpu", True)
    assert model(X).dtype is torch.float16


def test_what_a_forward_left_off_that_raised_is_on_after_the_next_loss(amp):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.fails = nn.Linear(4, 4), True

        def forward(self, x):
            if self.fails:
                torch.set_autocast_enabled("cpu", False)
                raise KeyError
            return self.layer(x)

    model = Fails()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with contextlib.suppress(KeyError):
        model(X)
    model.fails = False
    with amp.scale_loss(model(X).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model(X).dtype is torch.float16


def test_a_bracket_in_a_region_ends_in_the_region(amp):
    activate(amp, "O1")
    with amp.half_region():
        assert in_turn(X) == (True, torch.float32, False, torch.float16, True)
        torch.set_autocast_enabled("cpu", False)
    assert _get_current_function_mode_stack() == []
    assert (X @ X).dtype is torch.float16
    with amp.disable_casts():
        assert in_turn(X) == (False, torch.float32, False, torch.float32, False)


def test_another_thread_goes_on_casting(amp):
    activate(amp, "O1")
    torch.set_autocast_enabled("cpu", False)
    found = []
    thread = threading.Thread(target=lambda: found.append((X @ X).dtype))
    thread.start()
    thread.join()
    assert found == [torch.float16]


def test_deactivate_forgets_what_was_left_off(amp):
    activate(amp, "O1")
    torch.set_autocast_enabled("cpu", False)
    amp.deactivate()
    activate(amp, "O4")
    assert (X @ X).dtype is torch.bfloat16


@pytest.mark.parametrize("opt_level", ["O0", "O2"])
def test_levels_that_cast_no_functions_leave_them_torchs(amp, opt_level):
    amp.initialize(nn.Linear(4, 4), opt_level=opt_level, verbosity=0)
    assert torch.set_autocast_enabled is OWN.set_autocast_enabled
    assert in_turn(X) == (False, torch.float32, False, torch.float32, False)


@pytest.mark.parametrize("args", [(), ("cpu",), ("cpu", 1), (None,), (True, True, True)])
def test_a_wrong_call_is_torchs_to_refuse(amp, args):
    with pytest.raises((TypeError, RuntimeError)) as torchs:
        OWN.set_autocast_enabled(*args)
    activate(amp, "O1")
    with pytest.raises(torchs.type, match="set_autocast_enabled"):
        torch.set_autocast_enabled(*args)


@pytest.mark.parametrize("opt_level", ["O1", "O4", "O2"])
def test_compiled_code_does_the_same(amp, opt_level):
    def function(x):
        seen = in_turn(x)
        return x @ x, seen

    activate(amp, opt_level)
    product, expected = function(X)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for _ in range(2):
        got, seen = compiled(X)
        assert (got.dtype, seen) == (product.dtype, expected)
    torch._dynamo.reset()
