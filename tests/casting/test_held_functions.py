"""Functions of torch that were stored before `amp.initialize` are reached, and put back."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import pkgutil
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from amp_patch.casting.held_functions import HeldFunctions
from amp_patch.common.living_objects import instances
from amp_patch.requested_level import resolve
from amp_patch.session import session

Named = namedtuple("Named", "act size")


@dataclass
class Config:
    act: Any
    size: int = 4


@dataclass(frozen=True)
class Frozen:
    act: Any


@dataclass
class Slotted:
    __slots__ = ("act",)
    act: Any


@dataclass
class Reticent:
    """One that refuses to tell of an attribute, as configurations of transformers may."""

    act: Any
    size: int = 4

    def __getattribute__(self, name: str) -> Any:
        if name == "size":
            raise RuntimeError("the size differs from layer to layer")
        return super().__getattribute__(name)


class Lazy(OrderedDict):
    """A table whose subscription does more than look up."""

    def __getitem__(self, key: str) -> Any:
        return (super().__getitem__(key),)


class Inner(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


def call(function: Callable[..., Any], x: Any) -> Any:
    return function(x)


def closure(act: Any) -> Callable[[Any], Any]:
    return lambda x: act(x)


def with_default(act: Any) -> Callable[[Any], Any]:
    return lambda x, act=act: act(x)


def with_keyword_default(act: Any) -> Callable[[Any], Any]:
    return lambda x, *, act=act: act(x)


def decorated(act: Any) -> Callable[[Any], Any]:
    return torch.enable_grad()(closure(act))


def method_of_an_instance(act: Any) -> Callable[[Any], Any]:
    return functools.partial(call, with_default(act))


# Each stores the function it is given.
PLACES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda act: act,
    "partial": functools.partial,
    "partial of a partial's argument": lambda act: functools.partial(call, act),
    "partial of a keyword": lambda act: functools.partial(lambda x, act: act(x), act=act),
    "list": lambda act: [act],
    "tuple": lambda act: (act,),
    "named tuple": lambda act: Named(act, 4),
    "dict": lambda act: {"act": act},
    "OrderedDict": lambda act: OrderedDict(act=act),
    "defaultdict": lambda act: defaultdict(list, act=act),
    "dict with a __getitem__ of its own": lambda act: Lazy(act=act),
    "dataclass": Config,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slotted,
    "dataclass that refuses to be read": Reticent,
    "SimpleNamespace": lambda act: types.SimpleNamespace(act=act),
    "closure": closure,
    "default argument": with_default,
    "keyword-only default": with_keyword_default,
    "function decorated by torch": decorated,
    "partial of a function": method_of_an_instance,
    "bound method": lambda act: types.MethodType(lambda owner, x, act=act: act(x), object()),
    "layer in a list": lambda act: [Inner(act)],
    "nested": lambda act: {"act": [(Config((OrderedDict(act=functools.partial(act)),)),)]},
}


def held_in(value: Any) -> Callable[..., Any]:
    """Follow the first item, or the one named ``act``, down to what can be called."""
    while not callable(value):
        if isinstance(value, dict):
            value = dict.__getitem__(value, "act")
        elif isinstance(value, (list, tuple)):
            value = value[0]
        else:
            value = value.act
    return value


class Holder(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return held_in(self.held)(self.layer(x))


def inside(value: Any) -> Iterator[Any]:
    """Yield every object that a value holds, itself first: what must be the very same again."""
    yield value
    for part in parts_of(value):
        yield from inside(part)


def parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return (value.__func__,)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__defaults__, value.__kwdefaults__, *cells
    if is_dataclass(value):
        return [object.__getattribute__(value, field.name) for field in fields(value)]
    if isinstance(value, (types.SimpleNamespace, Inner)):
        return [item for name, item in vars(value).items() if not name.startswith("_")]
    return ()


def identities(value: Any) -> list[int]:
    return [id(part) for part in inside(value)]


X = torch.linspace(-2, 2, 8).reshape(2, 4)
LEVELS = ["O1", "O4"]
# Each on a result of the layer, in half; cast up by its rule. By name: a table of functions here
# would be looked through, and changed, in every other test of the process.
FUNCTIONS = (
    "torch.nn.functional.softplus",
    "torch.exp",
    "torch.fft.fftn",
    "torch.nn.functional.cross_entropy",
)


# -- every place, and back -----------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("place", PLACES)
def test_a_function_is_reached_where_it_is_held_and_put_back(amp, opt_level, place) -> None:
    model = Holder(PLACES[place](F.softplus))
    before = identities(model.held)
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    half = model.layer(X)
    assert half.dtype is {"O1": torch.float16, "O4": torch.bfloat16}[opt_level]
    result = model(X)
    assert result.dtype is torch.float32
    amp.deactivate()
    # torch's own function, of the very values that the layer gave, in fp32
    assert torch.equal(result, F.softplus(half.float()))
    assert identities(model.held) == before
    assert model(X).dtype is torch.float32


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("path", FUNCTIONS)
def test_functions_of_every_kind_are_reached(amp, opt_level, path) -> None:
    function = pkgutil.resolve_name(path)
    model = Holder(functools.partial(function))
    args = (torch.zeros(2, dtype=torch.int64),) if function is F.cross_entropy else ()
    half = X.half()
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    result = model.held(half, *args)
    amp.deactivate()
    assert torch.equal(result, function(half.float(), *args))
    assert model.held.func is function is pkgutil.resolve_name(path)


def test_a_held_function_of_the_half_rule_casts_and_its_weight_once(amp) -> None:
    model = Holder(None)
    model.held = functools.partial(F.linear, weight=model.layer.weight)
    amp.initialize(model, opt_level="O4", verbosity=0)
    model.layer(X)
    (cast,) = session.cache.casts()[:1]
    assert model(X).dtype is torch.bfloat16
    assert any(other is cast for other in session.cache.casts())


@pytest.mark.parametrize("opt_level", ["O0", "O2", "O3", "O5"])
def test_levels_that_cast_no_functions_leave_everything(amp, opt_level) -> None:
    model = Holder((F.softplus, "text"))
    before = identities(model.held)
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    assert identities(model.held) == before


def test_partials_keep_arguments_keywords_and_attributes(amp) -> None:
    class Tagged(functools.partial):
        pass

    model = Holder(Tagged(F.softplus, beta=3.0))
    model.held.tag = "mine"
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert type(model.held) is Tagged
    assert (model.held.args, model.held.keywords, model.held.tag) == ((), {"beta": 3.0}, "mine")
    half = X.half()
    assert torch.equal(model.held(half), F.softplus(half.float(), beta=3.0))


def test_containers_that_hold_each_other_in_a_circle(amp) -> None:
    circle: list[Any] = [F.softplus]
    circle.append({"again": circle, "all": (circle, torch.exp)})
    model = Holder(circle)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert circle[0] is F.softplus
    assert circle[1]["all"][1] is torch.exp
    amp.deactivate()
    assert circle[0] is F.softplus
    assert circle[1]["all"] == (circle, torch.exp)


def test_a_container_that_several_hold_stays_one(amp) -> None:
    shared, pair = {"act": F.softplus}, (F.softplus, 1)
    models = [Holder(shared), Holder([shared]), Holder(pair), Holder([pair])]
    amp.initialize(models, opt_level="O1", verbosity=0)
    assert models[0].held is models[1].held[0] is shared
    assert models[2].held is models[3].held[0]
    amp.deactivate()
    assert models[2].held is models[3].held[0] is pair


def test_what_the_user_put_there_since_then_stays(amp) -> None:
    model = Holder({"act": F.softplus, "other": F.softplus, "removed": F.softplus})
    amp.initialize(model, opt_level="O1", verbosity=0)
    model.held["act"] = torch.relu
    del model.held["removed"]
    model.held["new"] = model.held["other"]
    amp.deactivate()
    assert model.held == {"act": torch.relu, "other": F.softplus, "new": F.softplus}


def test_a_long_list_is_data_and_is_not_looked_through(amp) -> None:
    model = Holder([F.softplus, *range(2000)])
    original = F.softplus
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model.held[0] is original


# -- drawn nestings ------------------------------------------------------------------------------


class Wrapper:
    """What holds nothing, as the functions of torch that it stands for."""

    def __call__(self, x: Any) -> Any:
        return x


LEAVES = st.sampled_from([len, F.relu, torch.exp, F.softplus, "text", 3, None, torch.float16, str])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Named, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
        st.builds(Config, inner),
        st.builds(Frozen, inner),
        st.builds(functools.partial, st.sampled_from([len, torch.exp, F.softplus]), inner, k=inner),
        inner.map(closure),
        inner.map(with_default),
        inner.map(with_keyword_default),
        inner.map(Inner),
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def wrappers() -> dict[int, tuple[Any, Any]]:
    """Replacements in no global table: `HeldFunctions.undo` would put the functions back there."""
    return {id(old): (old, Wrapper()) for old in (torch.exp, F.softplus)}


@given(TREES)
def test_any_nesting_holds_wrappers_and_then_the_very_objects_again(wrappers, tree) -> None:
    held, model = HeldFunctions(), Inner(tree)
    before = list(inside(model))
    held.install(wrappers, [], [model])
    expected = [wrappers.get(id(part), (part, part))[1] for part in before]
    replaced = list(inside(model))
    for now, then in zip(replaced, expected, strict=True):
        # a tuple is another, of the same kind and length; everything else is the object itself
        assert now is then or (type(now) is type(then) and isinstance(then, tuple))
    with mock.patch("amp_patch.casting.held_functions.instances", return_value=[model]):
        held.undo()  # to look for all living modules takes its time
    after = list(inside(model))
    for now, then in zip(after, before, strict=True):
        assert now is then or (isinstance(then, tuple) and not is_plain(then))


def is_plain(value: tuple[Any, ...]) -> bool:
    """A tuple of functions and plain values: it comes back itself, and not an equal one."""
    return not any(
        isinstance(part, (list, dict, nn.Module, functools.partial, Config, Frozen))
        or (isinstance(part, types.FunctionType) and part.__module__ == __name__)
        for part in inside(value)
    )


# -- classes of a model's modules ----------------------------------------------------------------


def make_classes() -> tuple[type, type]:
    class Base(nn.Module):
        inherited = staticmethod(F.softplus)
        table = {"act": F.softplus, "pair": (F.softplus, 1)}

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def method(self, x, act=F.softplus):
            return act(x)

        @staticmethod
        def static(x, *, act=F.softplus):
            return act(x)

        @classmethod
        def of_class(cls, x, act=F.softplus):
            return act(x)

    class Child(Base):
        builtin = F.softplus
        bound = functools.partial(F.softplus)

        def forward(self, x, way):
            return way(self)(self.layer(x))

    return Base, Child


WAYS = {
    "static method": lambda model: model.inherited,
    "builtin": lambda model: model.builtin,
    "by the class": lambda model: type(model).builtin,
    "partial": lambda model: model.bound,
    "table": lambda model: model.table["act"],
    "tuple in a table": lambda model: model.table["pair"][0],
    "default of a method": lambda model: model.method,
    "default of a static method": lambda model: model.static,
    "default of a class method": lambda model: model.of_class,
}


@pytest.mark.filterwarnings("ignore:functools.partial will be:FutureWarning")  # Python 3.13
@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_attributes_of_classes_are_reached_and_put_back(amp, opt_level, way) -> None:
    base, child = make_classes()
    before = [dict(vars(base)), dict(vars(child)), dict(base.table), base.method.__defaults__]
    model = child()
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    assert model(X, WAYS[way]).dtype is torch.float32
    del model  # its class must be put back as well
    gc.collect()
    amp.deactivate()
    now = [dict(vars(base)), dict(vars(child)), dict(base.table), base.method.__defaults__]
    for values, then in zip(now[:3], before[:3], strict=True):
        assert values.keys() == then.keys()
        assert all(values[name] is then[name] for name in then)
    assert now[3] is before[3]
    assert base.static.__kwdefaults__ == {"act": F.softplus}


def test_classes_of_torch_are_never_changed(amp) -> None:
    model = nn.TransformerEncoderLayer(4, 2, activation=F.relu)
    classes = [owner for owner in type(model).__mro__ if owner is not object]
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)  # which watches Module.half()
    before = [dict(vars(owner)) for owner in classes]
    original, defaults = F.relu, nn.TransformerEncoderLayer.__init__.__defaults__
    amp.initialize(model, opt_level="O1", verbosity=0, rules={"relu": "float"})
    assert model.activation is F.relu is not original
    assert [dict(vars(owner)) for owner in classes] == before
    assert nn.TransformerEncoderLayer.__init__.__defaults__ is defaults
    assert original in defaults
    amp.deactivate()
    assert model.activation is F.relu is original


# -- globals of the user's modules ---------------------------------------------------------------


@pytest.fixture
def user_module(monkeypatch) -> Callable[[str], types.ModuleType]:
    """Run a source as a module that is imported."""

    def make(source: str, name: str = "user_who_holds") -> types.ModuleType:
        module = types.ModuleType(name)
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


SOURCE = """
import functools
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    pass

TABLE = {"act": F.softplus, "more": {"list": [F.softplus]}}
LIST = [F.softplus]
TUPLE = (F.softplus, 1)
PARTIAL = functools.partial(F.softplus)
LAYER = nn.TripletMarginWithDistanceLoss(distance_function=F.pairwise_distance)

def by_default(x, act=F.softplus):
    return act(x)
"""
GLOBALS: Mapping[str, Callable[[Any], Any]] = {
    "table": lambda user: user.TABLE["act"],
    "nested table": lambda user: user.TABLE["more"]["list"][0],
    "list": lambda user: user.LIST[0],
    "tuple": lambda user: user.TUPLE[0],
    "partial": lambda user: user.PARTIAL,
    "default argument": lambda user: user.by_default,
}


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("place", GLOBALS)
def test_globals_of_a_users_module_are_reached_and_put_back(
    amp, opt_level, place, user_module
) -> None:
    user = user_module(SOURCE)
    names = [name for name in vars(user) if not name.startswith("__")]
    before = [identities(vars(user)[name]) for name in names]
    model = nn.Linear(4, 4)
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    assert GLOBALS[place](user)(model(X)).dtype is torch.float32
    assert user.LAYER.distance_function is F.pairwise_distance
    amp.deactivate()
    assert [identities(vars(user)[name]) for name in names] == before


def test_a_table_that_was_made_while_functions_were_patched_is_put_back(amp, user_module) -> None:
    original = F.softplus
    model = nn.Linear(4, 4)
    amp.initialize(model, opt_level="O1", verbosity=0)
    user = user_module(SOURCE)
    assert user.TABLE["act"] is not original
    amp.deactivate()
    assert user.TABLE["act"] is user.LIST[0] is user.TUPLE[0] is user.PARTIAL.func is original
    assert user.by_default.__defaults__ == (original,)


@pytest.mark.parametrize("when", ["before", "while patched"])
def test_a_table_of_a_module_that_has_a_function_and_no_torch_is_put_back(
    amp, user_module, when
) -> None:
    source = "from torch.nn.functional import softplus\nTABLE = {'act': softplus}"
    original, model = F.softplus, nn.Linear(4, 4)
    user = user_module(source) if when == "before" else None
    amp.initialize(model, opt_level="O1", verbosity=0)
    user = user or user_module(source)
    assert user.TABLE["act"] is not original
    amp.deactivate()
    assert user.TABLE["act"] is user.softplus is original


def test_tables_of_torch_are_left_alone_wherever_they_are_imported(amp, user_module) -> None:
    from torch.nn.modules import rnn

    before = dict(rnn._rnn_impls)
    user = user_module("import torch\nfrom torch.nn.modules.rnn import _rnn_impls as mine")
    amp.initialize(Holder(user.mine), opt_level="O1", verbosity=0)
    assert user.mine is rnn._rnn_impls
    assert all(rnn._rnn_impls[name] is before[name] for name in before)


def test_functions_that_a_module_imported_from_others_are_left_to_these(amp, user_module) -> None:
    def foreign(x, act=len):
        return act(x)

    foreign.__defaults__ = (F.softplus,)
    original = F.softplus
    user = user_module("import torch")
    user.foreign = foreign
    model = nn.Linear(4, 4)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert foreign.__defaults__ == (original,)


# -- rules, registered functions, several models -------------------------------------------------


def test_a_model_that_comes_later_is_reached_by_the_same_wrappers(amp) -> None:
    models = [Holder([F.softplus]), Holder((F.softplus,))]
    for model in models:
        amp.initialize(model, opt_level="O1", verbosity=0)
    assert models[0].held[0] is models[1].held[0] is F.softplus
    assert [model(X).dtype for model in models] == [torch.float32] * 2


@pytest.mark.parametrize("copied", [False, True])
def test_later_rules_hold_for_what_was_reached_by_earlier_ones(amp, copied) -> None:
    first = Holder({"act": F.softplus})
    amp.initialize(first, opt_level="O1", verbosity=0)
    model = copy.deepcopy(first) if copied else first
    second = nn.Linear(4, 4)
    amp.initialize(second, opt_level="O1", verbosity=0, rules={"softplus": "half"})
    assert model.held["act"] is F.softplus
    assert model(X).dtype is torch.float16


def test_a_rule_that_switches_casts_off_leaves_the_function_itself(amp) -> None:
    model, original = Holder([F.softplus]), F.softplus
    amp.initialize(model, opt_level="O1", verbosity=0, rules={"softplus": "off"})
    assert model.held[0] is original
    assert model(X).dtype is torch.float16


def test_a_registered_function_is_reached_where_it_is_held(amp, user_module) -> None:
    user = user_module("def dtype(x):\n    return x.dtype")
    original = user.dtype
    model = Holder([functools.partial(original)])
    amp.initialize(model, opt_level="O1", verbosity=0)
    session_rules = dict(session._registered)
    try:
        amp.register_float_function(user, "dtype")
        assert model(X) is torch.float32
    finally:
        session._registered.clear()
        session._registered.update(session_rules)
    amp.deactivate()
    assert model.held[0].func is original


def test_casts_without_a_model_reach_every_living_module(amp) -> None:
    model = Holder({"act": F.softplus})
    original = F.softplus
    session.cast_without_model(resolve("O1"), {})
    assert model.held["act"] is F.softplus is not original
    assert model(X).dtype is torch.float32
    amp.deactivate()
    assert model.held["act"] is original


def test_a_second_session_reaches_what_the_first_put_back(amp) -> None:
    model = Holder({"act": (F.softplus, 1)})
    for opt_level in ("O1", "O4", "O1"):
        before = identities(model.held)
        amp.initialize(model, opt_level=opt_level, verbosity=0)
        assert model(X).dtype is torch.float32
        amp.deactivate()
        assert identities(model.held) == before


def test_an_initialize_that_fails_leaves_the_model_as_it_was(amp, monkeypatch) -> None:
    first, second = Holder([F.softplus]), Holder([F.softplus])
    original = F.softplus
    amp.initialize(first, opt_level="O1", verbosity=0)

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(session.models, "set_up", fail)
        with pytest.raises(MemoryError):
            amp.initialize(second, opt_level="O1", verbosity=0)
        with pytest.raises(MemoryError):
            amp.initialize(second, opt_level="O1", verbosity=0, rules={"softplus": "half"})
    assert second.held[0] is original
    assert first.held[0] is F.softplus is not original
    assert first(X).dtype is torch.float32


# -- copies, pickles, compilers ------------------------------------------------------------------


@pytest.mark.parametrize("place", ["attribute", "partial", "list", "tuple", "dataclass"])
@pytest.mark.parametrize("how", ["deep copy", "pickle", "built meanwhile"])
def test_a_copy_made_while_patched_casts_and_is_put_back(amp, place, how) -> None:
    original = F.softplus
    model = Holder(PLACES[place](original))
    amp.initialize(model, opt_level="O1", verbosity=0)
    made = {
        "deep copy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
        "built meanwhile": lambda: Holder(PLACES[place](F.softplus)),
    }[how]()
    assert made(X).dtype is torch.float32
    amp.deactivate()
    found = held_in(made.held)
    assert getattr(found, "func", found) is original
    again = pickle.loads(pickle.dumps(made))  # by the name of what stands in torch now
    amp.initialize(again, opt_level="O4", verbosity=0)
    assert again(X).dtype is torch.float32


def test_a_pickle_made_while_patched_is_read_where_nothing_is(amp) -> None:
    model = Holder({"act": functools.partial(F.softplus)})
    amp.initialize(model, opt_level="O1", verbosity=0)
    saved = pickle.dumps(model)
    amp.deactivate()
    assert pickle.loads(saved).held["act"].func is F.softplus


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("place", ["attribute", "partial", "list", "tuple", "dict", "closure"])
def test_compiled_code_casts_as_eager_does(amp, opt_level, place) -> None:
    model = Holder(PLACES[place](F.softplus))
    model.forward = types.MethodType(FORWARDS.get(place, FORWARDS["attribute"]), model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(X).dtype is torch.float32
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    assert compiled(X).dtype is torch.float32
    assert torch.equal(compiled(X), model(X))
    amp.deactivate()
    assert torch.equal(compiled(X), model(X))


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("name", ["linear", "softmax"])  # in C, and in Python
@pytest.mark.parametrize("is_called", [False, True])
def test_a_function_that_was_compiled_before_casts(amp, opt_level, name, is_called) -> None:
    function = torch.compile(getattr(F, name), backend="eager")
    args = (X, torch.ones(4, 4)) if name == "linear" else (X.half(), -1)
    before = function(*args) if is_called else getattr(F, name)(*args)
    model = Holder({"act": function})
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    expected = getattr(F, name)(*args)
    assert function(*args).dtype is expected.dtype is not before.dtype
    around = torch.compile(lambda: function(*args), backend="eager", fullgraph=True)
    assert around().dtype is expected.dtype
    amp.deactivate()
    assert function(*args).dtype is around().dtype is before.dtype
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.compile(F.linear, backend="eager"),
        lambda: torch.compiler.disable(F.linear),
        lambda: torch.vmap(torch.mv, in_dims=(None, 0)),
        lambda: torch.func.vmap(torch.no_grad()(torch.mv), in_dims=(None, 0)),
    ],
    ids=["compile", "disable", "vmap", "vmap of no_grad"],
)
def test_what_torch_has_made_of_a_function_casts_among_globals(amp, monkeypatch, make) -> None:
    """As ``flex_attention = torch.compile(flex_attention)`` at the head of a script."""
    function = make()
    monkeypatch.setattr(sys.modules[__name__], "made_by_torch", function, raising=False)
    before = [(cell, cell.cell_contents) for cell in function.__closure__]
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    assert function(X, X).dtype is torch.bfloat16
    amp.deactivate()
    assert function(X, X).dtype is torch.float32
    assert all(cell.cell_contents is one for cell, one in before)


def test_what_torch_makes_of_a_function_that_is_not_there_yet_is_passed_over(
    amp, monkeypatch
) -> None:
    def calls_fn() -> Any:
        return fn()

    fn = None
    unset = (types.CellType(),)
    function = types.FunctionType(calls_fn.__code__, vars(torch.func), "late", None, unset)
    monkeypatch.setattr(sys.modules[__name__], "made_by_torch", function, raising=False)
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    assert F.linear(X, X).dtype is torch.bfloat16


FORWARDS: dict[str, Callable[..., Any]] = {
    "attribute": lambda self, x: self.held(self.layer(x)),
    "list": lambda self, x: self.held[0](self.layer(x)),
    "tuple": lambda self, x: self.held[0](self.layer(x)),
    "dict": lambda self, x: self.held["act"](self.layer(x)),
}


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = F.softplus

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_compiles_the_function_itself_and_leaves_the_wrapper(amp) -> None:
    model = Scripted()
    amp.initialize(model, opt_level="O1", verbosity=0)
    scripted = torch.jit.script(model)
    assert model.act is F.softplus
    assert scripted(X).dtype is torch.float32
    amp.deactivate()
    assert torch.equal(scripted(X), model(X))


# -- what the user drops, and what it costs ------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_a_dropped_model_is_freed(amp, place) -> None:
    model = Holder(PLACES[place](F.softplus))
    model.pair = (model.layer, F.softplus, model.extra_repr)
    amp.initialize(model, opt_level="O1", verbosity=0)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_tuple_with_a_layer_comes_back_as_an_equal_one(amp) -> None:
    model = Holder(F.softplus)
    model.pair = (model.layer, F.softplus)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model.pair[1](X.half()).dtype is torch.float32
    amp.deactivate()
    assert model.pair == (model.layer, F.softplus)


def test_undo_looks_around_only_where_somebody_holds_a_wrapper(monkeypatch) -> None:
    calls = []

    def count(base: type[nn.Module]) -> list[nn.Module]:
        calls.append(None)
        return instances(base)

    monkeypatch.setattr("amp_patch.casting.held_functions.instances", count)
    held, model = HeldFunctions(), Inner([torch.exp])
    wrappers = {id(torch.exp): (torch.exp, Wrapper())}
    held.install(wrappers, [], [])
    del wrappers
    held.undo()
    assert not calls
    wrappers = {id(torch.exp): (torch.exp, Wrapper())}
    held.install(wrappers, [], [])
    del wrappers
    held.reach([model])
    assert model.act[0] is not torch.exp
    held.undo()
    assert model.act[0] is torch.exp
    assert calls
