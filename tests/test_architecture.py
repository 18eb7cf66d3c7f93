"""The shape of the code: who imports whom, who may patch, what importing the package does.

Each rule is a function from a syntax tree to its violations; a table of bad snippets shows that
every rule can fail.
"""

import ast
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import processes
import pytest
from own_objects import Classes, assigned_attributes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "amp_patch"
#: What is built on the core, under the names that apex had.
DROP_IN = sorted(PACKAGE.glob("apex/**/*.py"))
CORE = sorted(set(PACKAGE.glob("**/*.py")) - set(DROP_IN))
TESTS = sorted(ROOT.glob("tests/**/test_*.py"))

# The floors of the house, the highest first: a room imports from itself and from floors below,
# never from a neighbour. Within a room imports make no circle.
FLOORS = (
    {"__main__"},
    {"tools"},
    {"apex"},
    {"amp"},
    {"user_functions", "cuda_graph", "debug", "initialization"},
    {"session"},
    {"backward_passes"},
    {"mistakes"},
    {"step"},
    {"optimizers", "scaling", "half_model"},
    {"gradients"},
    {"weights"},
    {"casting", "distributed"},
    {"kernels", "arguments"},
    {"requested_level", "patching", "__init__"},
    {"levels", "common", "other_names"},
)
#: Rooms within a room: they stand on the modules beside them, none of which imports from them.
INNER = ("amp_patch.casting.libraries",)
#: Rooms in which each module has tests of its own, tests/ROOM/test_MODULE.py; so it is for a module
#: of a room within, tests/ROOM/INNER/test_MODULE.py.
MIRRORED = (
    "arguments",
    "casting",
    "gradients",
    "kernels",
    "optimizers",
    "scaling",
    "step",
    "weights",
)
MAX_BODY_LINES = 40
#: Functions of torch that make a tensor in the default dtype, unless they are told another.
OF_A_DTYPE = ("empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
MAY_IMPORT_CUPY = ("kernels/cuda_compiler.py", "kernels/cuda_module.py")
# cupy is optional; importing dynamo replaces torch.manual_seed, so importing amp_patch must not,
# nor what imports dynamo;
# the command line needs the levels, and torch with them, only where one is named
LATE_IMPORTS = (
    "cupy.",
    "torch._dynamo.",
    "torch.nn.attention.flex_attention.",
    "amp_patch.levels.",
)

# What any module may set on an object that is not its own: a tensor's data and gradient, the flag
# that tells schedulers of a step, the two that torch's fused optimizers skip by, and the metadata
# of a function just made; and the message of an exception, which Python 3.10 adds no notes to.
FOREIGN_DATA = {"data", "grad", "grad_dtype", "requires_grad", "_opt_called"}
# what a DTensor holds of the tensor that is spread
FOREIGN_DATA |= {"found_inf", "grad_scale", "args", "_local_tensor", "_spec"}
MAKERS = ("copy.copy(", "nn.Parameter(")
# In a wrapper's place torch.compile traces "traced", TorchScript what "__prepare_..." returns.
# A function that is "_dynamo_marked..." it calls, before one of "_torchdynamo_..." a graph ends.
METADATA = {"__doc__", "__module__", "__name__", "__qualname__", "__signature__", "__wrapped__"}
# What it "stands_for" is asked by what wraps it once more, the method that it "calls" by regions.
METADATA |= {"calls", "__prepare_scriptable__", "_dynamo_marked_constant", "stands_for"}
# `custom_fwd` is answered by "custom", or by "widening".
METADATA |= {"custom", "widening"}
# TorchScript is not shown a hook of the drop-in that "is_not_scripted".
METADATA |= {"is_not_scripted", "_torchdynamo_disable", "_torchdynamo_disable_msg", "traced"}

Rule = Callable[[ast.Module], list[str]]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(text_of(path), filename=str(path))


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return every node: most rules look through them all, and to walk takes the longest."""
    return list(ast.walk(tree))


def own_imports(tree: ast.Module, package: str = "amp_patch") -> Iterator[str]:
    """Yield the modules and names of this package that a module imports, however it says so.

    Args:
        tree: the module.
        package: the dotted package that it lies in.
    """
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = str(node.module)
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "amp_patch")


def place_of(path: Path) -> str:
    """Return a file's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(dotted: str) -> str:
    """Return the room of a module or of a name in one: its first folder, or root module."""
    return (*dotted.split("."), "__init__")[1]


def upward_imports(place: str, imported: Iterable[str]) -> list[str]:
    """Imports of a room on the same floor or above, by a module at ``place``."""
    floor = {room: number for number, rooms in enumerate(reversed(FLOORS)) for room in rooms}
    room = room_of(place)
    assert room in floor, f"{room} is new: give it a floor in FLOORS"
    return [
        name
        for name in imported
        if (other := room_of(name)) != room
        and other != "__init__"
        and not (other in floor and floor[other] < floor[room])
        and name != "amp_patch.__version__"
    ]


def imports_of_inner(place: str, imported: Iterable[str]) -> list[str]:
    """Imports from a room within its own room, by a module at ``place`` outside of that."""
    return [
        name
        for inner in INNER
        if room_of(place) == room_of(inner) and not f"{place}.".startswith(f"{inner}.")
        for name in imported
        if f"{name}.".startswith(f"{inner}.")
    ]


def circles(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the modules that import each other in a circle."""
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        return error.args[1]
    return []


def imports_within(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return what each of these modules imports of the others."""
    places = {place_of(path) for path in paths}
    found = {}
    for path in paths:
        place = place_of(path)
        imported = own_imports(parse(path), place.rpartition(".")[0])
        found[place] = {module for name in imported for module in _modules_of(name, places)}
        found[place].discard(place)
    return found


def _modules_of(name: str, places: set[str]) -> Iterator[str]:
    """Yield the module that an imported name is, or is in: of a package, its ``__init__``."""
    for module in (name, name.rpartition(".")[0]):
        for place in (module, f"{module}.__init__"):
            if place in places:
                yield place
                return


def default_dtypes(tree: ast.Module) -> list[str]:
    """Tensors in the dtype that a script has set as its default, as only parameters may be."""
    kept = {
        id(node)
        for call in nodes(tree)
        if isinstance(call, ast.Call) and last_name(call.func) == "Parameter"
        for node in ast.walk(call)
    }
    return [
        ast.unparse(node)
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in OF_A_DTYPE}
        and id(node) not in kept
        and not any(keyword.arg == "dtype" for keyword in node.keywords)
    ]


def star_imports(tree: ast.Module) -> list[str]:
    return [
        f"from {node.module} import *"
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]


def late_imports(tree: ast.Module) -> list[str]:
    """Imports inside functions, which are for what must not be imported with the package."""
    return [
        ast.unparse(node)
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not f"{imported_name(node)}.".startswith(LATE_IMPORTS)
    ]


def cupy_imports(tree: ast.Module) -> list[str]:
    return [
        ast.unparse(node)
        for node in nodes(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and imported_name(node).partition(".")[0] == "cupy"
    ]


def imported_name(node: ast.Import | ast.ImportFrom) -> str:
    return node.names[0].name if isinstance(node, ast.Import) else str(node.module)


def global_statements(tree: ast.Module) -> list[str]:
    return [ast.unparse(node) for node in nodes(tree) if isinstance(node, ast.Global)]


def changing_variables(tree: ast.Module) -> list[str]:
    """Variables of a module whose contents change: by their names, they are no constants."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and not _is_looked_up(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [one.id for one in targets if isinstance(one, ast.Name) and one.id.islower()]
    return [name for name in found if not name.startswith("__")]


def _is_looked_up(value: ast.expr | None) -> bool:
    """Tell a name for what is there: ``reading.only``, ``getattr(torch._C, "_name", None)``."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("getattr", "functools.cache", "logging.getLogger")
    return isinstance(value, ast.Attribute | ast.IfExp)


def foreign_assignments(tree: ast.Module) -> list[str]:
    """Assignments to attributes of objects that are not of our classes.

    An object is ours where annotations or constructors say that it is of a class of the package,
    and its attribute is one that this class declares; a variable is, where it holds an object just
    made.
    """
    made = {
        target.id
        for node in nodes(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(MAKERS)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [
        ast.unparse(node)
        for node in nodes(tree)
        if is_foreign_setattr(node, made) or is_namespace_write(node, made)
    ]
    return calls + [
        ast.unparse(node)
        for node, owners in assigned_attributes(tree, own_classes())
        if not is_self(node.value)
        and node.attr not in {*FOREIGN_DATA, *METADATA}
        and not any(own_classes().declare(owner, node.attr) for owner in owners)
    ]


def is_foreign_setattr(node: ast.AST, made: set[str]) -> bool:
    """``setattr(model, ...)``, ``delattr(...)``, ``object.__setattr__(...)`` and the like."""
    return (
        isinstance(node, ast.Call)
        and last_name(node.func) in {"setattr", "delattr", "__setattr__", "__delattr__"}
        and bool(node.args)
        and not is_self(node.args[0])
        and last_name(node.args[0]) not in made
    )


def is_namespace_write(node: ast.AST, made: set[str]) -> bool:
    """``vars(torch)["sin"] = ...``, ``torch.__dict__.update(...)`` and the like."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return is_namespace(node.value, made)
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"clear", "pop", "setdefault", "update"}
        and is_namespace(node.func.value, made)
    )


def is_namespace(node: ast.expr, made: set[str]) -> bool:
    """``vars(x)`` or ``x.__dict__`` of an object that is neither self nor just made."""
    if isinstance(node, ast.Call) and last_name(node.func) == "vars" and node.args:
        owner = node.args[0]
    elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
        owner = node.value
    else:
        return False
    return not is_self(owner) and last_name(owner) not in made


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def private(tree: ast.Module) -> list[str]:
    """Imports of private names of the core, and of what is to be found under apex's names."""
    return [
        ast.unparse(node)
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("amp_patch")
        if "packages" in str(node.module) or any(a.name.startswith("_") for a in node.names)
    ]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_functions(tree: ast.Module) -> list[str]:
    """Functions of more than 40 lines below their signature and docstring."""
    found = []
    for function in functions(tree):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = function.end_lineno - body[0].lineno + 1 if body else 0
        if lines > MAX_BODY_LINES:
            found.append(f"{function.name}: {lines} lines")
    return found


def missing_docstrings(tree: ast.Module) -> list[str]:
    """The module, its public classes and functions, and the public methods of those classes."""
    missing = [] if ast.get_docstring(tree) else ["the module"]
    owners = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner in owners:
        for node in owner.body:
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and not getattr(owner, "name", "").startswith("_")
                and not any(last_name(one) == "setter" for one in node.decorator_list)
                and not ast.get_docstring(node)
            ):
                missing.append(node.name)
    return missing


def few_examples(tree: ast.Module) -> list[str]:
    """Numbers of examples that are not the profile's, and shares of it that `trains` gives only."""
    numbers = [
        ast.unparse(node)
        for node in nodes(tree)
        if isinstance(node, ast.keyword) and node.arg in {"max_examples", "derandomize"}
    ]
    shares = [
        ast.unparse(node)
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and last_name(node.func) == "examples"
        and not (isinstance(node.args[0], ast.Constant) and node.args[0].value >= 1)
    ]
    return numbers + shares


def slow_questions(tree: ast.Module) -> list[str]:
    """What makes a stack of transforms in the thread that asks: each node of a backward copies it.

    `torch._C._are_functorch_transforms_active` asks the same, and makes none.
    """
    names = map(last_name, (node for node in nodes(tree) if isinstance(node, ast.Attribute)))
    return [name for name in names if name == "peek_interpreter_stack"]


def not_literal(tree: ast.Module) -> list[str]:
    """Public constants that are not literals, and statements that run when the module is read."""
    allowed = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            found += [] if is_literal(node.value) else [ast.unparse(node)]
        elif not isinstance(node, allowed) and not is_literal(getattr(node, "value", None)):
            found.append(ast.unparse(node))
    return found


def is_literal(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Call) and last_name(node.func) == "frozenset":
        return all(is_literal(argument) for argument in node.args)
    try:
        ast.literal_eval(node)
    except (TypeError, ValueError):
        return False
    return True


@functools.cache
def own_classes() -> Classes:
    return Classes(map(parse, (*CORE, *DROP_IN)))


#: Assignments of the drop-in that are no patch, and why.
NO_PATCHES = {
    # of a module that is just made, by its loader
    "amp_patch/apex/finder.py": ["vars(module)['__getattr__']"],
    # of the module itself, as Python's documentation has it
    "amp_patch/apex/packages/apex/amp/_amp_state.py": ["_module.__class__"],
    # what the script assigns is handed on to the optimizer inside
    "amp_patch/apex/packages/apex/optimizers/wrapped_optimizer.py": [
        "self.optimizer.state",
        "self.optimizer.param_groups",
    ],
    "amp_patch/apex/packages/apex/parallel/LARC.py": [
        "self.optim.param_groups",
        "self.optim.state",
    ],
    # what an autograd function keeps for its backward, as torch's documentation has it
    "amp_patch/apex/packages/apex/parallel/sync_batchnorm.py": ["ctx.group"],
}


def violations(rule: Rule, paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return what breaks a rule, by file."""
    found = {str(path.relative_to(ROOT)): rule(parse(path)) for path in paths}
    return {name: broken for name, broken in found.items() if broken}


def test_imports_point_down_only() -> None:
    assert len(CORE) > 50  # an empty list would break no rule
    assert len(DROP_IN) > 50
    upward = {}
    for path in (*CORE, *DROP_IN):
        place = place_of(path)
        imported = list(own_imports(parse(path), place.rpartition(".")[0]))
        upward[place] = upward_imports(place.removesuffix(".__init__"), imported)
        upward[place] += imports_of_inner(place, imported)
    assert not {place: names for place, names in upward.items() if names}


def test_rooms_within_a_room_are_there() -> None:
    assert all((ROOT / inner.replace(".", "/") / "__init__.py").is_file() for inner in INNER)


def test_no_room_has_a_circle() -> None:
    assert circles(imports_within(CORE)) == []


def test_a_circle_through_a_package_is_seen(tmp_path: Path, monkeypatch) -> None:
    room = tmp_path / "amp_patch" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text("from .one import x\n")
    (room / "one.py").write_text("from amp_patch.room import y\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert circles(imports_within(list(room.glob("*.py"))))


@pytest.mark.parametrize(
    "rule",
    [
        default_dtypes,
        star_imports,
        late_imports,
        global_statements,
        long_functions,
        missing_docstrings,
        slow_questions,
    ],
)
def test_the_core_keeps(rule: Rule) -> None:
    assert not violations(rule, CORE)


@pytest.mark.parametrize(
    "rule",
    [
        default_dtypes,
        star_imports,
        cupy_imports,
        global_statements,
        long_functions,
        missing_docstrings,
        private,
    ],
)
def test_the_drop_in_keeps(rule: Rule) -> None:
    assert not violations(rule, DROP_IN)


def test_only_patching_assigns_to_foreign_attributes() -> None:
    assert list(violations(foreign_assignments, CORE)) == ["amp_patch/patching.py"]


def test_the_drop_in_assigns_to_foreign_attributes_by_patching() -> None:
    assert violations(foreign_assignments, DROP_IN) == NO_PATCHES


def test_the_session_tells_of_all_else_that_changes() -> None:
    told = ast.get_docstring(parse(PACKAGE / "session.py"))
    changing = {
        f"{place_of(path).removeprefix('amp_patch.')}.{name}"
        for path in (*CORE, *DROP_IN)
        if not path.is_relative_to(PACKAGE / "tools")
        and path.stem != "session"
        and "packages" not in path.parts
        for name in changing_variables(parse(path))
    }
    assert len(changing) > 20
    assert not {one for one in changing if not all(part in told for part in one.rpartition("."))}


def test_only_the_cuda_side_may_import_cupy() -> None:
    allowed = [PACKAGE / name for name in MAY_IMPORT_CUPY]
    assert not violations(cupy_imports, set(CORE) - set(allowed))
    assert len(violations(cupy_imports, allowed)) == len(MAY_IMPORT_CUPY)


def test_cast_rules_are_data() -> None:
    for name in ("rules.py", "libraries/library_rules.py"):
        assert not not_literal(parse(PACKAGE / "casting" / name))


def without_tests(modules: Iterable[str], tests: Collection[str]) -> list[str]:
    """Return the modules, ``"step/skip.py"``, that no test file is named after."""
    named = {module: re.sub(r"(\w+\.py)$", r"test_\1", module) for module in modules}
    return [module for module, test in named.items() if test not in tests]


def test_each_module_of_the_core_has_tests_of_its_own() -> None:
    modules = [path.relative_to(PACKAGE).as_posix() for path in CORE if path.stem != "__init__"]
    mirrored = [module for module in modules if module.startswith(MIRRORED)]
    assert len(mirrored) > 50
    tests = {path.relative_to(ROOT / "tests").as_posix() for path in TESTS}
    assert without_tests(mirrored, tests) == []


def test_a_module_without_tests_is_seen() -> None:
    modules = ["step/skip.py", "step/closure.py", "casting/libraries/lookups.py"]
    tests = {"step/test_skip.py", "test_closure.py", "casting/test_lookups.py"}
    assert without_tests(modules, tests) == modules[1:]


def test_how_often_properties_are_drawn_stands_in_the_profiles() -> None:
    # Without one of these words there is nothing to see, and to read the others takes seconds.
    words = re.compile("derandomize|examples")
    assert not violations(few_examples, [path for path in TESTS if words.search(text_of(path))])


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("amp_patch.kernels.choice", "amp_patch.casting.mode"),
        ("amp_patch.scaling.loss_scaler", "amp_patch.optimizers.lamb"),
        ("amp_patch.levels", "amp_patch.patching"),
        ("amp_patch.step.skip", "amp_patch.session.session"),
        ("amp_patch.session", "amp_patch.apex"),
        ("amp_patch.apex.finder", "amp_patch.tools.command_line"),
        ("amp_patch.step.skip", "amp_patch.made_up"),
    ],
)
def test_an_import_that_points_up_is_seen(place: str, name: str) -> None:
    assert upward_imports(place, [name]) == [name]


def test_an_import_of_a_room_from_one_within_it_is_seen() -> None:
    names = ["amp_patch.casting.libraries.lookups.looking_up", "amp_patch.casting.mode"]
    assert imports_of_inner("amp_patch.casting.regions", names) == names[:1]
    assert imports_of_inner("amp_patch.casting.__init__", ["amp_patch.casting.libraries"])
    for place in ("amp_patch.casting.libraries.library_casts", "amp_patch.weights.half_model"):
        assert imports_of_inner(place, names) == []


def test_a_room_without_a_floor_is_seen() -> None:
    with pytest.raises(AssertionError, match="made_up is new"):
        upward_imports("amp_patch.made_up.module", [])


def test_a_circle_is_seen() -> None:
    assert set(circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


STEPS = "session.optimizers.steps"


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [
        (default_dtypes, "flag = torch.zeros((), device=device)"),
        (star_imports, "from torch import *"),
        (late_imports, "def f():\n    import torch"),
        (late_imports, "def f():\n    from torch._dynamos import x"),
        (cupy_imports, "try:\n    import cupy.cuda\nexcept ImportError: pass"),
        (cupy_imports, "def f():\n    from cupy.cuda import nvrtc"),
        (global_statements, "def f():\n    global x\n    x = 1"),
        (long_functions, "def f():\n" + "    pass\n" * (MAX_BODY_LINES + 1)),
        (missing_docstrings, "x = 1"),
        (missing_docstrings, "'''Doc.'''\ndef f(): pass"),
        (missing_docstrings, "'''Doc.'''\nclass C:\n    '''Doc.'''\n    def f(self): pass"),
        (few_examples, "settings(max_examples=1000)"),
        (few_examples, "settings(parent, max_examples=n)"),
        (few_examples, "settings(derandomize=True)"),
        (few_examples, "@support.examples(0.99)\n@given(x)\ndef test(x): pass"),
        (few_examples, "examples(share)"),
        (private, "from amp_patch.session import _MEND"),
        (private, "from amp_patch.apex.packages.apex import amp"),
        (slow_questions, "peek = torch._C._functorch.peek_interpreter_stack"),
        (changing_variables, "_open: dict[int, str] = {}"),
        (changing_variables, "mode = CastMode()"),
        (changing_variables, "_known = weakref.WeakSet()"),
        (not_literal, "if torch.cuda.is_available():\n    HALF = ()"),
        (not_literal, "HALF = tuple(sorted(names()))"),
        (not_literal, "HALF.append('mm')"),
        (foreign_assignments, "setattr(torch, 'sin', f)"),
        (foreign_assignments, "delattr(torch, 'sin')"),
        (foreign_assignments, "object.__setattr__(model, 'forward', f)"),
        (foreign_assignments, "torch.sin = f"),
        (foreign_assignments, "torch.nn.functional.linear = f"),
        (foreign_assignments, "model.forward = f"),
        (foreign_assignments, "a, optimizer.step = 1, f"),
        (foreign_assignments, "del optimizer.step"),
        (foreign_assignments, "for torch.sin in fs: pass"),
        (foreign_assignments, "vars(torch)['sin'] = f"),
        (foreign_assignments, "del model.__dict__['forward']"),
        (foreign_assignments, "torch.__dict__.update(sin=f)"),
        # names that classes of ours declare, on objects that are not ours
        (foreign_assignments, "model.training = False"),
        (foreign_assignments, "def f(optimizer: Optimizer):\n    optimizer.state = {}"),
        (foreign_assignments, "def f(module):\n    module.scale = 1.0"),
        (foreign_assignments, "def f(session):\n    session.verbosity = 1"),
        (foreign_assignments, "def f():\n    for one in session.models.levels: one.scale = 1"),
        (foreign_assignments, "class C:\n    def f(self, x: Tensor):\n        x.version = 1"),
        # an attribute that the object's own class does not declare
        (foreign_assignments, "def f(skip: Skip):\n    skip.training = True"),
    ],
)
def test_every_rule_can_fail(rule: Rule, snippet: str) -> None:
    assert rule(ast.parse(snippet))


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [
        (default_dtypes, "flag = torch.zeros((), dtype=x.dtype)"),
        (default_dtypes, "self.weight = nn.Parameter(torch.empty(3))"),
        (late_imports, "import torch\ndef f():\n    import cupy"),
        (late_imports, "def f():\n    from cupy.cuda import nvrtc"),
        (late_imports, "def f():\n    import torch._dynamo.output_graph"),
        (changing_variables, "_CHECKS = {}\nF = TypeVar('F')\n__all__ = ['amp']"),
        (changing_variables, "only_read = _reading.only"),
        (changing_variables, "_run = getattr(graph, '_engine_run_backward', None)"),
        (foreign_assignments, "class C:\n    def f(self):\n        self.x = 1"),
        (foreign_assignments, "object.__setattr__(self, 'x', 1)"),
        (foreign_assignments, "new = copy.copy(old)\nsetattr(new, 'x', 1)"),
        (foreign_assignments, "new = nn.Parameter(x)\nvars(new).update(vars(old))"),
        (foreign_assignments, "p.grad = None"),
        (foreign_assignments, "wrapper.__name__ = 'sin'"),
        (foreign_assignments, "vars(self)['x'] = 1"),
        (foreign_assignments, "def f(skip: Skip):\n    skip.flag = None"),
        (foreign_assignments, "def f(skips: dict[str, Skip]):\n    skips['a'].flag = None"),
        (foreign_assignments, f"def f():\n    for one in {STEPS}.values(): one.ended = 0"),
        (long_functions, "def f():\n    '''" + "\n" * 100 + "    '''\n    pass"),
        (not_literal, "'''Doc.'''\nimport x\nA = frozenset({'a'})\ndef f(): return 1"),
    ],
)
def test_no_rule_fails_what_is_allowed(rule: Rule, snippet: str) -> None:
    assert not rule(ast.parse(snippet))


@pytest.mark.parametrize(
    ("snippet", "imported"),
    [
        ("import amp_patch.session", ["amp_patch.session"]),
        ("import amp_patch", ["amp_patch"]),
        ("from amp_patch import step, session", ["amp_patch.step", "amp_patch.session"]),
        ("from amp_patch.step.skip import Skip", ["amp_patch.step.skip.Skip"]),
        ("from . import skip", ["amp_patch.step.skip"]),
        ("from .skip import Skip", ["amp_patch.step.skip.Skip"]),
        ("from .. import session", ["amp_patch.session"]),
        ("from ..session import Session", ["amp_patch.session.Session"]),
        ("def f():\n    from amp_patch.session import Session", ["amp_patch.session.Session"]),
        ("import torch.amp", []),
    ],
)
def test_own_imports_are_seen_in_every_spelling(snippet: str, imported: list[str]) -> None:
    assert list(own_imports(ast.parse(snippet), "amp_patch.step")) == imported


@pytest.fixture
def effects_of_import(tmp_path: Path) -> Callable[[str], list[str]]:
    """Import modules in a process of their own, and name what that changed in torch, and cupy."""
    # importable everywhere, so that an import in a try statement is seen where cupy is missing
    (tmp_path / "cupy.py").touch()
    (tmp_path / "patches_torch.py").write_text("import torch\ntorch.sin = torch.cos\n")
    (tmp_path / "imports_cupy.py").write_text("try:\n    import cupy\nexcept ImportError: pass\n")
    script = """
        import importlib, sys
        sys.path[:0] = {paths!r}
        import torch_snapshot
        before = torch_snapshot.take()
        for name in {names!r}:
            importlib.import_module(name)
        print("\\n".join(torch_snapshot.differences(before) + ["cupy"] * ("cupy" in sys.modules)))
        """

    def effects(*names: str, fork: bool = processes.FORKS) -> list[str]:
        paths = [str(tmp_path), str(ROOT / "tests"), str(ROOT)]
        code = textwrap.dedent(script).format(paths=paths, names=names)
        run = processes.run([sys.executable, "-c", code], fork=fork)
        assert run.returncode == 0, run.stderr
        return run.stdout.split()

    return effects


def test_importing_the_package_touches_no_torch_attribute_and_no_cupy(effects_of_import) -> None:
    names = (place_of(path).removesuffix(".__init__") for path in CORE)
    assert effects_of_import(*names, fork=False) == []  # a fork has imported most of them


@pytest.mark.parametrize(
    ("module_name", "effect"), [("patches_torch", "torch.sin"), ("imports_cupy", "cupy")]
)
def test_the_import_test_can_fail(effects_of_import, module_name: str, effect: str) -> None:
    assert effects_of_import("amp_patch", module_name) == [effect]
