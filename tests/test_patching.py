"""Replacing attributes of foreign objects, and that everything is as it was afterwards."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import spawn
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from amp_patch.common import imported_modules
from amp_patch.common.imported_modules import one_look, users_of_torch
from amp_patch.patching import (
    Patches,
    as_function,
    as_if_defined_at,
    bind,
    is_no_method,
    remove,
    resolve,
    resolve_in,
    split_path,
    when_imported,
)

ABSENT = object()
NAMES = ("own", "inherited", "static", "of_the_instance", "new")


class Owners:
    """One owner of each kind that is patched; nobody has the attribute ``new``."""

    def __init__(self) -> None:
        class Base:
            def inherited(self) -> str:
                return "inherited"

            def own(self) -> str:
                return "base"

        class Child(Base):
            def own(self) -> str:
                return "child"

            @staticmethod
            def static() -> str:
                return "static"

        instance = Child()
        instance.of_the_instance = "of the instance"
        module = types.ModuleType("patched")
        module.own, module.static = len, max
        self.all: list[Any] = [Base, Child, instance, module]


def namespace(owner: Any) -> dict[str, Any]:
    return {name: vars(owner).get(name, ABSENT) for name in NAMES}


def assign(owner: Any, name: str, value: Any) -> None:
    if value is not ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


# -- any order and number of patches ---------------------------------------------------------

targets = st.tuples(st.integers(0, 3), st.sampled_from(NAMES))


@given(st.lists(targets, max_size=20))
def test_undo_restores_identity_after_any_patches(patched: list[tuple[int, str]]) -> None:
    owners = Owners().all
    before = [namespace(owner) for owner in owners]
    patches = Patches()
    for which, name in patched:
        new = object()
        patches.replace(owners[which], name, new)
        assert getattr(owners[which], name) is new
    patches.undo()
    assert [namespace(owner) for owner in owners] == before


@given(st.lists(st.tuples(targets, st.integers(0, 2)), max_size=20))
def test_stacks_on_top_of_each_other_are_undone_from_the_top(
    patched: list[tuple[tuple[int, str], int]],
) -> None:
    owners = Owners().all
    stacks = [Patches() for _ in range(3)]
    seen = []
    for level, stack in enumerate(stacks):
        seen.append([namespace(owner) for owner in owners])
        for (which, name), of in patched:
            if of == level:
                stack.replace(owners[which], name, object())
    for stack in reversed(stacks):
        stack.undo()
        assert [namespace(owner) for owner in owners] == seen.pop()


changes = st.sampled_from(["patch", "patch", "another sets", "another deletes", "another restores"])


@given(st.lists(st.tuples(changes, targets), max_size=25))
def test_what_others_replaced_on_top_stays(program: list[tuple[str, tuple[int, str]]]) -> None:
    """The expected state comes from a history of each attribute: who set it, and to what."""
    owners = Owners().all
    patches = Patches()
    history = {
        (which, name): [("theirs", value)]
        for which, owner in enumerate(owners)
        for name, value in namespace(owner).items()
    }
    for change, (which, name) in program:
        layers = history[which, name]
        if change == "patch":
            layers.append(("ours", object()))
            patches.replace(owners[which], name, layers[-1][1])
            continue
        if change == "another sets":
            layers.append(("theirs", object()))
        elif change == "another deletes":
            layers.append(("theirs", ABSENT))
        elif layers[-1][0] == "theirs" and len(layers) > 1:
            layers.pop()
        assign(owners[which], name, layers[-1][1])

    patches.undo()
    for (which, name), layers in history.items():
        while layers[-1][0] == "ours":
            layers.pop()
        assert vars(owners[which]).get(name, ABSENT) is layers[-1][1]


def test_undo_ends_the_record_and_may_be_repeated() -> None:
    patches, module = Patches(), types.ModuleType("patched")
    assert not patches
    patches.replace(module, "new", 1)
    assert patches
    patches.undo()
    assert not patches
    module.new = 1
    patches.undo()
    assert module.new == 1


def test_an_inherited_method_is_inherited_again() -> None:
    before = dict(vars(torch.Tensor))
    patches = Patches()
    for name in ("matmul", "__pow__", "add"):
        patches.replace(torch.Tensor, name, lambda *args: "replaced")
    tensor = torch.ones(2)
    assert tensor.matmul(tensor) == tensor**2 == tensor.add(1) == "replaced"
    patches.undo()
    assert dict(vars(torch.Tensor)) == before
    assert "matmul" not in before
    assert tensor.matmul(tensor) == 2


def test_a_static_method_stays_one() -> None:
    _, child, instance, _ = Owners().all
    patches = Patches()
    patches.replace(child, "static", staticmethod(lambda: "replaced"))
    assert instance.static() == child.static() == "replaced"
    patches.undo()
    assert instance.static() == child.static() == "static"


def test_what_is_bound_to_no_object_is_no_method() -> None:
    methods = (Owners.__init__, staticmethod(len), property(len), torch.Tensor.matmul)
    others = (len, mock.MagicMock(), mock.create_autospec(torch.Tensor.matmul))
    assert not any(is_no_method(torch.Tensor, value) for value in methods)
    assert all(is_no_method(torch.Tensor, value) for value in others)
    assert not any(is_no_method(torch, value) for value in (*methods, *others))


def test_what_is_not_named_as_functions_are_is_called_by_one() -> None:
    assert as_function(torch.matmul, "other") is torch.matmul
    for value in (mock.MagicMock(), mock.create_autospec(torch.matmul), functools.partial(max, 1)):
        function = as_function(value, "matmul")
        assert type(function) is types.FunctionType
        assert function.__name__ == function.__qualname__ == "matmul"
    assert function(2) == 2  # the partial's


def test_a_patch_that_is_refused_is_not_recorded() -> None:
    patches = Patches()
    with pytest.raises(TypeError, match="immutable type"):
        patches.replace(int, "bit_length", None)
    assert not patches


def test_an_owner_that_cannot_be_held_weakly_is_patched_and_restored(patches: Patches) -> None:
    owner = types.SimpleNamespace(function=abs)
    patches.replace(owner, "function", len)
    assert owner.function is len
    patches.undo()
    assert owner.function is abs


def test_patches_keep_no_owner_alive_and_pass_over_dead_ones() -> None:
    _, child, instance, module = Owners().all
    patches = Patches()
    patches.replace(module, "own", None)
    patches.replace(instance, "own", None)
    reference = weakref.ref(instance)
    del instance
    assert reference() is None
    patches.undo()
    assert module.own is len


# -- globals bound to an original ------------------------------------------------------------


class Bare:
    """Takes any attribute."""

    method: Any


def test_what_is_recorded_weakly_keeps_no_owner_by_its_methods() -> None:
    patches, owner = Patches(), Bare()
    old = owner.method = types.MethodType(lambda self: "old", owner)
    patches.replace(owner, "method", types.MethodType(lambda self, old=old: "new", owner))
    patches.undo()
    assert owner.method is old
    replacement = types.MethodType(lambda self, old=old: "new", owner)
    patches.replace(owner, "method", replacement, weakly=True)
    assert owner.method() == "new"
    patches.undo()
    assert owner.method is old
    patches.replace(
        owner, "method", types.MethodType(lambda self, old=old: "new", owner), weakly=True
    )
    owner.method = 3  # somebody else's, which stays
    patches.undo()
    assert owner.method == 3
    owner.method = old
    patches.replace(owner, "method", replacement, weakly=True)
    reference = weakref.ref(owner)
    del owner, old, replacement
    gc.collect()
    assert reference() is None
    patches.undo()


def test_an_attribute_is_removed_where_it_is_what_is_thought() -> None:
    owner = Bare()
    owner.method = abs
    remove(owner, "method", len)
    remove(owner, "nothing", None)
    assert owner.method is abs
    remove(owner, "method", abs)
    assert not hasattr(owner, "method")


class Functions:
    """In a class, for this module's own globals would be replaced as well."""

    @staticmethod
    def original(x: Any) -> str:
        return f"original {x}"

    @staticmethod
    def replacement(x: Any) -> str:
        return f"replacement {x}"


BINDINGS = {id(Functions.original): (Functions.original, Functions.replacement)}


@pytest.fixture
def import_user(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Make a module as if it were imported now, with globals of its own."""

    def make(name: str, **names: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def library(import_user: Callable[..., types.ModuleType]) -> types.ModuleType:
    return import_user("library_of_others", function=Functions.original)


@pytest.fixture
def patches() -> Iterator[Patches]:
    patches = Patches()
    yield patches
    patches.undo()


def test_globals_of_users_are_replaced_and_restored(
    patches: Patches, import_user: Callable[..., types.ModuleType]
) -> None:
    user = import_user(
        "user", function=Functions.original, alias=Functions.original, equal=Equal(), other=len
    )
    inner = import_user("user.inner", function=Functions.original)
    patches.replace_bindings(BINDINGS)
    assert user.function is user.alias is inner.function is Functions.replacement
    assert type(user.equal) is Equal
    assert user.other is len
    patches.undo()
    assert user.function is user.alias is inner.function is Functions.original


@pytest.mark.parametrize("kind", ["def call():", "class Layer:\n def call(self=0):"])
def test_globals_of_the_script_of_a_spawned_process_are_replaced_and_restored(
    patches: Patches,
    library: types.ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from library_of_others import function\n{kind}\n  return function(1)\n")
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    monkeypatch.setattr(imported_modules, "_behind", [])
    spawn._fixup_main_from_path(str(script))  # as multiprocessing does there
    there = vars(sys.modules["__mp_main__"])
    call = getattr(there.get("Layer"), "call", there.get("call"))
    patches.replace_bindings(BINDINGS)
    assert call() == "replacement 1"
    patches.undo()
    assert call() == "original 1"


@pytest.fixture
def import_installed(
    import_user: Callable[..., types.ModuleType],
) -> Callable[..., types.ModuleType]:
    """Make a module of a package that pip installed."""

    def make(name: str, **names: Any) -> types.ModuleType:
        path = Path(sysconfig.get_path("purelib"), *name.split("."))
        return import_user(name, __file__=f"{path}.py", **names)

    return make


def test_an_installed_package_without_torch_is_passed_over_until_it_has_other_globals(
    patches: Patches, import_installed: Callable[..., types.ModuleType]
) -> None:
    module = import_installed("installed_without", value=None)
    patches.replace_bindings(BINDINGS, users_only=True)
    patches.undo()
    module.value = Functions.original  # what no package does
    patches.replace_bindings(BINDINGS, users_only=True)
    assert module.value is Functions.original
    patches.undo()
    module.another = Functions.original
    patches.replace_bindings(BINDINGS, users_only=True)
    assert module.value is module.another is Functions.replacement


def test_a_package_that_uses_torch_later_is_looked_through_as_a_whole(
    patches: Patches, import_installed: Callable[..., types.ModuleType]
) -> None:
    first = import_installed("installed_later.first", value=None)
    patches.replace_bindings(BINDINGS, users_only=True)
    patches.undo()
    first.value = Functions.original
    second = import_installed("installed_later.second", torch=torch)
    patches.replace_bindings(BINDINGS, users_only=True)
    assert first.value is Functions.replacement
    assert second.torch is torch


def test_a_module_that_used_torch_in_between_is_looked_through(
    patches: Patches, import_user: Callable[..., types.ModuleType], import_installed: Any
) -> None:
    module = import_installed("installed_between", value=None)
    users_of_torch()
    module.torch = torch
    assert module in users_of_torch()
    del module.torch
    module.value = Functions.original
    import_user("imported_then")
    patches.replace_bindings(BINDINGS, users_only=True)
    assert module.value is Functions.replacement


def test_a_call_looks_once_and_the_next_one_anew_also_inside_of_it(
    import_user: Callable[..., types.ModuleType],
) -> None:
    users_of_torch()  # the first look notes what it may pass over, and is no look to keep
    with one_look():
        users_of_torch()
        user = import_user("imported_meanwhile", torch=torch)
        assert user not in users_of_torch()
        with one_look():
            assert user in users_of_torch()
    later = import_user("imported_later", torch=torch)
    assert later in users_of_torch()


def test_another_thread_looks_for_itself(import_user: Callable[..., types.ModuleType]) -> None:
    users_of_torch()  # the first look notes what it may pass over, and is no look to keep
    with one_look(), ThreadPoolExecutor(1) as others:
        users_of_torch()
        user = import_user("imported_meanwhile", torch=torch)
        assert user in others.submit(users_of_torch).result()


def test_what_is_expected_is_looked_for_in_modules_that_may_use_torch(
    patches: Patches, import_user: Callable[..., types.ModuleType], import_installed: Any
) -> None:
    without = import_installed("installed_without", value=None)
    earlier = import_user("torch.earlier", value=None)
    users_of_torch()
    patches.expect_bindings(BINDINGS)
    late = import_user("torch.late", value=Functions.replacement)
    original, replacement = object(), object()
    patches.expect_bindings({id(original): (original, replacement)})
    user = import_user("user", value=Functions.replacement, other=replacement)
    without.value = earlier.value = Functions.replacement  # what neither does
    patches.undo()
    assert late.value is user.value is Functions.original
    assert user.other is original
    assert without.value is earlier.value is Functions.replacement


@pytest.mark.parametrize("installed", [True, False])
def test_other_functions_than_torchs_and_modules_of_a_script_are_always_looked_for(
    patches: Patches,
    import_user: Callable[..., types.ModuleType],
    import_installed: Callable[..., types.ModuleType],
    installed: bool,
) -> None:
    module = (import_installed if installed else import_user)("config", value=None)
    users_of_torch()
    module.value = Functions.original
    patches.replace_bindings(BINDINGS, users_only=not installed)
    assert module.value is Functions.replacement
    patches.undo()
    assert module.value is Functions.original


class Equal:
    """Claims to equal everything, as arrays and proxies may."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


@pytest.mark.parametrize("name", ["torch.made_up", "torch", "amp_patch.made_up"])
def test_globals_of_torch_and_of_this_package_are_left_alone(
    patches: Patches, import_user: Callable[..., types.ModuleType], name: str
) -> None:
    inside = import_user(name, function=Functions.original)
    beside = import_user("torchvision_made_up", function=Functions.original)
    patches.replace_bindings(BINDINGS)
    assert inside.function is Functions.original
    assert beside.function is Functions.replacement


@pytest.mark.parametrize("name", ["user", "torch.made_up"])
def test_what_was_bound_to_a_replacement_is_restored_too(
    patches: Patches,
    library: types.ModuleType,
    import_user: Callable[..., types.ModuleType],
    name: str,
) -> None:
    patches.replace_bindings(BINDINGS)
    late = import_user(name, function=library.function)
    assert late.function is Functions.replacement
    patches.undo()
    assert late.function is Functions.original
    late.function = Functions.replacement
    patches.undo()
    assert late.function is Functions.replacement


def test_a_global_that_the_user_bound_anew_stays(
    patches: Patches, library: types.ModuleType
) -> None:
    patches.replace_bindings(BINDINGS)
    library.function = len
    patches.undo()
    assert library.function is len


def test_a_module_that_is_no_longer_imported_is_restored(
    patches: Patches, library: types.ModuleType
) -> None:
    patches.replace_bindings(BINDINGS)
    del sys.modules["library_of_others"]
    patches.undo()
    assert library.function is Functions.original


def test_a_module_may_be_dropped_while_it_is_patched(
    patches: Patches, import_user: Callable[..., types.ModuleType]
) -> None:
    reference = weakref.ref(import_user("dropped", function=Functions.original))
    patches.replace_bindings(BINDINGS)
    del sys.modules["dropped"]
    gc.collect()
    # monkeypatch remembers what stood there before, which is nothing
    assert reference() is None
    patches.undo()


def test_what_is_no_module_is_passed_over(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = types.SimpleNamespace(function=Functions.original)
    monkeypatch.setitem(sys.modules, "lazy_stand_in", stand_in)
    monkeypatch.setitem(sys.modules, "refused_import", None)
    patches.replace_bindings(BINDINGS)
    assert stand_in.function is Functions.original


@given(
    st.lists(
        st.sampled_from([Functions.original, Functions.replacement, len, None]),
        min_size=1,
        max_size=6,
    )
)
def test_any_globals_end_bound_to_originals(values: list[Any]) -> None:
    module = types.ModuleType("user")
    vars(module).update({f"name{i}": value for i, value in enumerate(values)})
    patches = Patches()
    sys.modules["user_of_any_globals"] = module
    try:
        patches.replace_bindings(BINDINGS)
        patches.undo()
    finally:
        del sys.modules["user_of_any_globals"]
    expected = [Functions.original if v is Functions.replacement else v for v in values]
    assert [vars(module)[f"name{i}"] for i in range(len(values))] == expected


# -- finding what to replace -----------------------------------------------------------------


def test_a_path_leads_to_owner_name_and_value() -> None:
    assert resolve("torch.nn.functional.linear") == (
        torch.nn.functional,
        "linear",
        torch.nn.functional.linear,
    )
    owner, name, value = resolve("torch.nn.Linear.forward")
    assert (owner, name, value) == (torch.nn.Linear, "forward", torch.nn.Linear.forward)
    assert resolve_in("torch", "Tensor.matmul")[:2] == (torch.Tensor, "matmul")
    assert resolve_in(torch, "relu") == (torch, "relu", torch.relu)


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [
        ("torch.nn.functional.linear", "torch.nn.functional", "linear"),
        ("torch.Tensor.matmul", "torch", "Tensor.matmul"),
        ("not_imported_anywhere.function", "not_imported_anywhere", "function"),
    ],
)
def test_a_path_is_split_behind_the_module(path: str, module: str, name: str) -> None:
    assert split_path(path) == (module, name)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("torch.no_such_function", AttributeError, "no_such_function"),
        ("no_such_module.function", ImportError, "no_such_module"),
    ],
)
def test_a_path_to_nothing_is_refused(path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(path)


# -- what replacements must be able to do ----------------------------------------------------


@pytest.mark.parametrize("path", ["torch.nn.functional.linear", "torch.Tensor.relu"])
def test_a_replacement_is_pickled_by_reference(patches: Patches, path: str) -> None:
    owner, name, before = resolve(path)

    def function(*args: Any) -> str:
        return "replaced"

    as_if_defined_at(function, path)
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(function)
    patches.replace(owner, name, function)
    pickled = pickle.dumps(function)
    assert pickle.loads(pickled) is function
    patches.undo()
    # who unpickles it without patches gets torch's own
    assert pickle.loads(pickled) == before


class Optimizer:
    steps = 0

    def step(self) -> int:
        self.steps += 1
        return self.steps


def test_a_bound_method_is_one_and_holds_no_owner() -> None:
    optimizer = Optimizer()

    def step(self: Optimizer) -> int:
        return -Optimizer.step(self)

    optimizer.step = bind(step, optimizer)
    assert (optimizer.step(), optimizer.step(), optimizer.steps) == (-1, -2, 2)
    assert optimizer.step.__func__ is step
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        method = optimizer.step
        del optimizer
        assert reference() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="no longer exists"):
        method()


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that is there to import, but is not imported."""
    name = f"imported_later_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("def function():\n    return 'original'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_module_is_patched_as_soon_as_it_is_imported(importable: str) -> None:
    patches, seen = Patches(), []

    def patch(module: types.ModuleType) -> None:
        seen.append(module)
        patches.replace(module, "function", lambda: "replaced")

    when_imported(importable, patch)
    assert importable not in sys.modules
    assert seen == []
    module = __import__(importable)
    assert seen == [module]
    assert module.function() == "replaced"
    patches.undo()
    assert module.function() == "original"


def test_an_imported_module_is_patched_at_once(importable: str) -> None:
    module = __import__(importable)
    seen: list[types.ModuleType] = []
    when_imported(importable, seen.append)
    assert seen == [module]


def test_an_interrupt_right_behind_a_replacement_leaves_it_to_undo() -> None:
    class Interrupted:
        """Ctrl-C comes when an attribute was set for the first time."""

        was_set = False

        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, value)
            if not Interrupted.was_set:
                Interrupted.was_set = True
                raise KeyboardInterrupt

    owner, patches = Interrupted(), Patches()
    vars(owner)["value"] = 1
    with pytest.raises(KeyboardInterrupt):
        patches.replace(owner, "value", 2)
    patches.undo()
    assert vars(owner) == {"value": 1}
