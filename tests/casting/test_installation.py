"""Where the wrappers are put, and by whose rule: torch's lists, ``rules=`` or ``register_...``."""

import functools
import pickle
import sys
import types
from unittest import mock

import autocast_oracle as oracle
import pytest
import torch
import wrapt
from casting_support import HALVES, activate, as_dtypes, existing
from support import nightly_but
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree

from amp_patch.casting.targets import rule_targets

# -- where the functions are found ---------------------------------------------------------------


def test_names_bound_elsewhere_are_patched_and_restored(amp, user_module):
    originals = dict(vars(user_module))
    activate(amp)
    x = torch.rand(2, 2)
    assert user_module.fc is F.linear is not originals["fc"]
    assert user_module.fc(x, x).dtype is torch.float16
    assert user_module.matmul(x, x).dtype is torch.float16
    amp.deactivate()
    assert dict(vars(user_module)) == originals
    assert user_module.fc(x, x).dtype is torch.float32


def test_a_name_bound_while_patched_is_restored(amp, user_module):
    activate(amp)
    user_module.late = torch.bmm
    amp.deactivate()
    assert user_module.late is torch.bmm
    assert not hasattr(torch.bmm, "__wrapped__")


STANDING_BEFORE = [
    (F, "linear"),
    (F, "softmax"),
    (torch, "matmul"),
    (torch.Tensor, "matmul"),
    (torch.Tensor, "softmax"),
    (torch.optim.SGD, "step"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.amp.GradScaler, "step"),
]


@pytest.mark.parametrize("autospec", [True, False])
@pytest.mark.parametrize(("owner", "name"), STANDING_BEFORE)
def test_a_mock_from_before_stays_and_is_called(amp, owner, name, autospec):
    original = getattr(owner, name)
    with mock.patch.object(owner, name, autospec=autospec or None, return_value="mocked") as found:
        for level in ("O1", "O2"):
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # torch wraps its step
            standing = vars(owner)[name]
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            if not isinstance(owner, type):
                assert getattr(owner, name)(1, 2) == "mocked"
                found.assert_called_with(1, 2)
            amp.deactivate()
            assert vars(owner)[name] is standing
    assert getattr(owner, name) is original


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_class_with_a_list_from_before_is_told_torchs_own_function_by_a_rule(amp, level):
    known = {F.linear: lambda x, weight, bias: "its own"}

    class Listed(torch.Tensor):  # as torchao's quantized weights
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            listed = known.get(func)
            if listed is None:
                return super().__torch_function__(func, types, args, kwargs)
            return listed(*args, **kwargs or {})

    rules = {"torch._C._nn.linear": "off"}
    layer = amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, rules=rules)
    assert F.linear(torch.ones(1, 2), torch.ones(2, 2).as_subclass(Listed), None) == "its own"
    assert layer(torch.ones(1, 2)).dtype is HALVES[level]


def test_a_proxy_from_before_gets_what_the_call_gives(amp, monkeypatch):
    given = []

    def note(function, instance, args, kwargs):
        given.append(sorted(kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(F, "linear", wrapt.FunctionWrapper(F.linear, note))
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    result = F.linear(torch.ones(1, 2), weight=model.weight, bias=model.bias)
    assert result.dtype is torch.float16
    assert given == [["bias", "weight"]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_mock_of_a_method_is_given_what_plain_torch_gives_it(amp, monkeypatch, level):
    found = mock.MagicMock(return_value="mocked")
    monkeypatch.setattr(torch.Tensor, "softmax", found)
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert torch.ones(2).softmax(-1) == "mocked"
    found.assert_called_once_with(-1)


@pytest.mark.usefixtures("o1")
def test_every_patched_function_is_picklable():
    for path in rule_targets():
        function = existing(path)
        # torch.Tensor's own methods pickle through the object that they are bound to
        loaded = pickle.loads(pickle.dumps(function))
        assert loaded is function, path


@pytest.mark.usefixtures("o1")
def test_patched_functions_keep_their_name_and_documentation():
    assert F.softmax.__name__ == "softmax"
    assert torch.matmul.__doc__.strip().startswith("matmul(")
    assert torch.Tensor.exp.__name__ == "exp"


def test_a_second_initialize_does_not_wrap_twice(amp):
    first = activate(amp)
    wrapper = F.linear
    second = activate(amp)
    assert F.linear is wrapper
    third = activate(amp, "O4", rules={"softmax": "half"})
    assert not hasattr(F.linear.__wrapped__, "__wrapped__")
    assert F.linear(torch.rand(2, 2), torch.rand(2, 2)).dtype is torch.bfloat16
    del first, second, third


# -- registered functions ------------------------------------------------------------------------


def test_registered_functions_of_modules_and_classes(amp, library):
    original = library.first
    amp.register_half_function(library, "first")
    amp.register_promote_function(library, "second")
    amp.register_bfloat16_function(library.Layer, "run")
    x, h = torch.rand(2), torch.rand(2).half()
    assert library.first is original
    model = activate(amp)
    assert library.first(x) is torch.float16
    assert library.second(x, h) == (torch.float32, torch.float32)
    assert library.second(h, h) == (torch.float16, torch.float16)
    assert library.Layer().run(x) is torch.bfloat16
    amp.deactivate()
    assert library.first is original
    model = activate(amp, "O4")
    assert library.first(x) is torch.bfloat16
    del model


def test_a_function_registered_after_initialize_is_cast_at_once(amp, library):
    model = activate(amp)
    amp.register_float_function("a_users_library", "first")
    assert library.first(torch.rand(2).half()) is torch.float32
    assert not hasattr(F.linear.__wrapped__, "__wrapped__")
    del model


def test_a_module_imported_after_initialize_is_patched_when_it_is(
    amp, library, tmp_path, monkeypatch
):
    (tmp_path / "imported_later.py").write_text("def seen(x):\n    return x.dtype\n")
    monkeypatch.syspath_prepend(tmp_path)
    amp.register_half_function("imported_later", "seen")
    model = activate(amp)
    import imported_later

    try:
        assert imported_later.seen(torch.rand(2)) is torch.float16
    finally:
        del sys.modules["imported_later"]
    del model


def test_a_registered_name_that_has_a_rule_is_wrapped_once_by_the_users(amp, library):
    amp.register_float_function(torch, "mm")
    model = activate(amp)
    x = torch.rand(2, 2)
    assert torch.mm(x.half(), x).dtype is torch.float32
    assert not hasattr(torch.mm.__wrapped__, "__wrapped__")
    assert torch.bmm(x[None], x[None]).dtype is torch.float16
    del model


def test_a_registered_function_has_its_rule_wherever_it_is_found(amp, library):
    assert torch.functional.einsum is torch.einsum
    amp.register_float_function(torch.functional, "einsum")
    model = activate(amp, rules={"torch.einsum": "half"})
    h = torch.rand(2, 2).half()
    for function in (torch.einsum, torch.functional.einsum):
        assert function("ij,ij->", h, h).dtype is torch.float32
    del model


def test_registering_a_name_that_is_missing_is_refused(amp, library):
    with pytest.raises(
        ValueError,
        match=r"a registered function must exist; got 'third', which .*a_users_library.* does not "
        r"have; call amp.register_half_function\(module, name\) with the name it has",
    ):
        amp.register_half_function(library, "third")


# -- rules= --------------------------------------------------------------------------------------


def test_a_rule_for_a_bare_name_holds_wherever_it_is_reached(amp):
    model = activate(amp, rules={"softmax": "half", "matmul": "off", "gelu": "float"})
    x = torch.rand(3, 3)
    for softmax in (torch.softmax, F.softmax, torch.Tensor.softmax, torch.special.softmax):
        assert softmax(x, 0).dtype is torch.float16
    assert (x @ x).dtype is torch.matmul(x, x).dtype is x.matmul(x).dtype is torch.float32
    assert F.gelu(x.half()).dtype is torch.float32
    assert torch.mm(x, x).dtype is torch.float16
    del model


def test_a_rule_for_a_dotted_path_holds_there_only(amp):
    model = activate(
        amp, rules={"torch.Tensor.exp": "bfloat16", "torch.nn.functional.relu": "half"}
    )
    x = torch.rand(3)
    assert x.exp().dtype is torch.bfloat16
    assert torch.exp(x.half()).dtype is torch.float32
    assert F.relu(x).dtype is torch.float16
    assert x.relu().dtype is torch.float32
    del model


X = torch.rand(3, 3) + 0.5
MORE_CALLS = {
    "torch.Tensor.__pow__": (X, 2),
    "torch.Tensor.__rdiv__": (X, 2),
    "torch.Tensor.__rmatmul__": (X, X),
    "torch.Tensor.__rpow__": (X, 2),
    "torch.Tensor.__rtruediv__": (X, 2),
    "torch.chain_matmul": (X, X, X),
    "torch.lobpcg": (X @ X.T, 1),
    "torch.nn.functional.grouped_mm": (X[None], X[None]),
    "torch.nn.functional.upsample": (X[None], None, 2),
}
RULES = ("off", "half", "float")


@functools.cache
def calls_of_targets():
    """Return for each dotted path of the rules a call of it, as its arguments."""
    calls = {path: (args, {}) for path, args in MORE_CALLS.items()}
    for op in oracle.operators():
        for sample in oracle.samples(op, 1):
            for _, path in oracle.spellings(op):
                calls[path] = (sample.input, *sample.args), sample.kwargs
    alike = {path: path.replace("torch.functional.", "torch.") for path in rule_targets()}
    return {path: calls[other] for path, other in alike.items() if other in calls}


def by_rule(rule, args, kwargs):
    """Cast arguments as docs/cast-rules.md says of a rule."""
    dtype = {"off": None, "half": torch.float16, "float": torch.float32}[rule]
    return _pytree.tree_map(
        lambda value: value.to(dtype) if dtype and oracle.castable(value) else value,
        (args, kwargs),
    )


def result_dtypes(path, args, kwargs):
    """Return the dtypes of a call's results, or None where torch refuses it."""
    try:
        return oracle.dtypes_of(existing(path)(*args, **kwargs))
    except Exception:
        return None


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("rule", nightly_but(("half",), RULES))
def test_a_rule_for_a_dotted_path_decides_all_that_the_function_does(amp, rule):
    """Python functions are given the rule one by one: one of them may call another."""
    calls = {
        (path, dtype): as_dtypes(call, (dtype,))
        for path, call in calls_of_targets().items()
        for dtype in (torch.float32, torch.float16)
    }
    expected = {key: result_dtypes(key[0], *by_rule(rule, *call)) for key, call in calls.items()}
    paths = sorted({path for path, _ in calls})
    in_python = [path for path in paths if isinstance(existing(path), types.FunctionType)]
    wrong, alone = [], [[path] for path in in_python]
    for ruled in [*alone, [path for path in paths if path not in in_python]]:
        amp.deactivate()
        model = activate(amp, rules=dict.fromkeys(ruled, rule))
        for path in ruled:
            for dtype in (torch.float32, torch.float16):
                got, want = result_dtypes(path, *calls[path, dtype]), expected[path, dtype]
                if want is not None and got != want:
                    wrong.append(f"{path} of {dtype}: {got}, {rule} means {want}")
    assert not wrong, "\n".join(wrong)
    del model
    targets = rule_targets()
    amp.deactivate()
    left = {path for path in targets if isinstance(existing(path), types.FunctionType)}
    assert left <= {path for path, _ in calls}
    assert len(paths) > 250


FAULTS = {
    "softmax": lambda x: F.softmax(x, 0),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "group_norm": lambda x: F.group_norm(x, 3),
    "rms_norm": lambda x: F.rms_norm(x, (3,)),
    "mse_loss": lambda x: F.mse_loss(x, 2 * x),
    "l1_loss": lambda x: F.l1_loss(x, 2 * x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])),
    "normalize": lambda x: F.normalize(x),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_ruled_function_computes_what_it_computes_on_cast_arguments(amp, name, rule):
    call = FAULTS[name]
    inputs = [X.half(), X]
    expected = [call(by_rule(rule, (x,), {})[0][0]) for x in inputs]
    model = activate(amp, rules={f"torch.nn.functional.{name}": rule})
    for x, want in zip(inputs, expected, strict=True):
        with amp.float_region():
            assert call(x).dtype is torch.float32
        with amp.disable_casts():
            assert call(x).dtype is x.dtype
        torch.testing.assert_close(call(x), want, rtol=0, atol=0)
    assert (X @ X).dtype is torch.float16
    assert X.half().softmax(0).dtype is torch.float32
    del model


def test_a_registered_function_of_torch_has_its_rule_alone_and_a_users_its_arguments_cast(
    amp, library
):
    library.attention = lambda x: (x.dtype, F.softmax(x, 0).dtype, (x @ x).dtype)
    amp.register_half_function(F, "softmax")
    amp.register_float_function(library, "attention")
    model = activate(amp)
    assert F.softmax(X, 0).dtype is torch.float16
    assert library.attention(X.half()) == (torch.float32, torch.float16, torch.float16)
    with pytest.raises(TypeError):
        F.softmax(X, no_such_argument=0)
    assert (X @ X).dtype is torch.float16
    del model


@pytest.mark.parametrize("opt_level", HALVES)
def test_a_rule_for_one_name_of_a_function_leaves_its_other_names_alone(amp, opt_level):
    assert F.conv1d is torch.conv1d
    rules = {"torch.nn.functional.conv1d": "float", "torch.functional.einsum": "off"}
    model = activate(amp, opt_level, rules=rules)
    half = HALVES[opt_level]
    x = torch.rand(1, 3, 3)
    assert F.conv1d(x.to(half), x).dtype is torch.float32
    assert nn.Conv1d(3, 3, 1)(x).dtype is torch.float32
    assert torch.conv1d(x, x).dtype is half
    assert torch.functional.einsum("ijk,ijk->i", x, x).dtype is torch.float32
    assert torch.einsum("ijk,ijk->i", x, x).dtype is half
    assert pickle.loads(pickle.dumps(F.conv1d)) is F.conv1d
    del model


def test_a_name_bound_elsewhere_follows_the_users_rule(amp, user_module):
    user_module.conv = F.conv1d
    user_module.einsum = torch.functional.einsum
    rules = {"torch.nn.functional.conv1d": "float", "torch.functional.einsum": "off"}
    model = activate(amp, rules=rules)
    x = torch.rand(1, 3, 3)
    assert user_module.conv(x.half(), x).dtype is torch.float32
    assert user_module.einsum("ijk,ijk->i", x, x).dtype is torch.float32
    del model


def test_a_later_rule_joins_the_earlier_ones_and_deactivate_forgets_all(amp):
    x = torch.rand(3, 3)
    models = [activate(amp, rules={"mm": "off"}), activate(amp, rules={"bmm": "off"})]
    assert torch.mm(x, x).dtype is torch.bmm(x[None], x[None]).dtype is torch.float32
    amp.deactivate()
    models.append(activate(amp))
    assert torch.mm(x, x).dtype is torch.float16


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (
            {"softmax": "fp16"},
            ValueError,
            r"a rule must be one of 'half', 'half_out', 'float', 'promote', 'bfloat16', 'off'; got "
            r"'fp16' for 'softmax'; did you mean 'half'\? Call amp.initialize\(..., "
            r"rules=\{'softmax': 'half'\}\)",
        ),
        ({"sofmax": "half"}, ValueError, "got 'sofmax'; did you mean 'softmax'"),
        ({"relu_": "half"}, ValueError, "got the in-place 'relu_': name 'relu'"),
    ],
)
def test_a_wrong_rule_is_refused_and_nothing_is_patched(amp, rules, error, message):
    before = F.softmax
    with pytest.raises(error, match=message):
        activate(amp, rules=rules)
    assert F.softmax is before
