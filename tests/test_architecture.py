"""The shape of the code: who imports whom, who may patch, what importing the package does.

Each rule is a function from a syntax tree to its violations; a table of bad snippets shows that
every rule can fail.
"""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "amp_patch"
CORE = sorted(PACKAGE.glob("*.py"))
#: What is built on the core.
RING = sorted(PACKAGE.glob("apex/**/*.py"))

# A module imports from lower layers only; modules of one layer never import each other.
LAYERS = {
    "__main__": 16,
    "command_line": 15,
    "apex": 14,
    "amp": 13,
    "initialization": 12,
    "cuda_graph": 12,
    "user_functions": 12,
    "session": 11,
    "prepared_optimizers": 10,
    "scaled_loss": 10,
    "optimizer_step": 9,
    "optimizer_backward": 8,
    "patched_functions": 8,
    "casting": 7,
    "fused_step": 7,
    "gradients": 7,
    "prepared_models": 7,
    "torch_hooks": 7,
    "autocast_blocks": 6,
    "fused_launch": 6,
    "half_model": 6,
    "master_weights": 6,
    "reception": 6,
    "weight_cache": 6,
    "device_scaler": 5,
    "fused_updates": 5,
    "half_gradients": 5,
    "kept_casts": 5,
    "pooling": 5,
    "regions": 5,
    "stray_gradients": 5,
    "torch_compile": 5,
    "cuda_updates": 4,
    "kernels": 4,
    "cuda_kernels": 3,
    "cuda_module": 2,
    "dense_rows": 2,
    "optimizers": 2,
    "scaler_state": 2,
    "cuda_compiler": 1,
    "device_skip": 1,
    "forced_level": 1,
    "fp32_store": 1,
    "loss_scaler": 1,
    "tensor_tables": 1,
    "torch_kernels": 1,
    "torch_updates": 1,
    "__init__": 0,
    "__version__": 0,
    "arguments": 0,
    "captures": 0,
    "cast_mode": 0,
    "cast_rules": 0,
    "containers": 0,
    "host_copy": 0,
    "lazy_gradients": 0,
    "opt_levels": 0,
    "patching": 0,
    "reuse": 0,
    "scale_rule": 0,
    "snapshot": 0,
}
MAX_FUNCTION_LINES = 60
MAY_IMPORT_CUPY = ("cuda_compiler", "cuda_module")
# cupy is optional; importing dynamo replaces torch.manual_seed, so importing amp_patch must not
LATE_IMPORTS = ("cupy.", "torch._dynamo.")

# What any module may set on an object that is not its own: a tensor's data and gradient, the flag
# that tells schedulers of a step, the two that torch's fused optimizers skip by, and the metadata
# of a function just made.
FOREIGN_DATA = {"data", "grad", "grad_dtype", "requires_grad", "_opt_called"}
FOREIGN_DATA |= {"found_inf", "grad_scale"}
MAKERS = ("copy.copy(", "nn.Parameter(")
# In a wrapper's place torch.compile traces "traced", TorchScript what "__prepare_..." returns.
# A function that is "_dynamo_marked..." it calls.
METADATA = {"__doc__", "__module__", "__name__", "__qualname__", "__wrapped__", "traced"}
METADATA |= {"__prepare_scriptable__", "_dynamo_marked_constant"}

Rule = Callable[[ast.Module], list[str]]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def own_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names of this package's modules that a module imports, however it says so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"amp_patch.{node.module or ''}" if node.level else str(node.module)
            names = [f"{base.rstrip('.')}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "amp_patch":
                yield rest.partition(".")[0] or "__init__"


def star_imports(tree: ast.Module) -> list[str]:
    return [
        f"from {node.module} import *"
        for node in ast.walk(tree)
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
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and imported_name(node).partition(".")[0] == "cupy"
    ]


def imported_name(node: ast.Import | ast.ImportFrom) -> str:
    return node.names[0].name if isinstance(node, ast.Import) else str(node.module)


def global_statements(tree: ast.Module) -> list[str]:
    return [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Global)]


def foreign_assignments(tree: ast.Module) -> list[str]:
    """Assignments to attributes of objects that the module does not own.

    An attribute counts as the package's own where some class of it declares the name, and a
    variable does where it holds an object just made; a foreign attribute of such a name would be
    missed, everything else is caught.
    """
    made = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(MAKERS)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if is_foreign_setattr(node, made)
        or is_namespace_write(node, made)
        or is_foreign_target(node)
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


def is_foreign_target(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and not isinstance(node.ctx, ast.Load)
        and not is_self(node.value)
        and node.attr not in FOREIGN_DATA | METADATA | OWN_ATTRIBUTES
    )


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def declared_attributes(tree: ast.Module) -> set[str]:
    """The attributes that the classes of a module declare: their fields, and what they set."""
    declared = set()
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                declared.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                declared |= {node.attr} if is_self(node.value) else set()
    return declared


def private(tree: ast.Module) -> list[str]:
    """Imports of private names of the core, and of what is to be found under apex's names."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("amp_patch")
        if "packages" in str(node.module) or any(a.name.startswith("_") for a in node.names)
    ]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_functions(tree: ast.Module) -> list[str]:
    """Functions of more than 60 lines, not counting their docstrings."""
    found = []
    for function in functions(tree):
        lines = function.end_lineno - function.lineno + 1
        if ast.get_docstring(function):
            lines -= function.body[0].end_lineno - function.body[0].lineno + 1
        if lines > MAX_FUNCTION_LINES:
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
    """Hypothesis settings that draw fewer than 100 examples."""
    return [
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
        and node.arg == "max_examples"
        and not (isinstance(node.value, ast.Constant) and node.value.value >= 100)
    ]


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


OWN_ATTRIBUTES = set().union(*(declared_attributes(parse(path)) for path in CORE))


@pytest.fixture(params=CORE, ids=lambda path: path.name)
def module(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_imports_point_down_only(module: Path) -> None:
    assert module.stem in LAYERS, f"{module.name} is new: give it a layer in LAYERS"
    upward = [
        name
        for name in own_imports(parse(module))
        if name not in LAYERS or (LAYERS[name] >= LAYERS[module.stem] and name != "__init__")
    ]
    assert not upward


@pytest.mark.parametrize(
    "rule", [star_imports, late_imports, global_statements, long_functions, missing_docstrings]
)
def test_every_module_keeps(rule: Rule, module: Path) -> None:
    assert not rule(parse(module))


@pytest.mark.parametrize("path", RING, ids=lambda path: str(path.relative_to(PACKAGE)))
@pytest.mark.parametrize(
    "rule",
    [star_imports, cupy_imports, global_statements, long_functions, missing_docstrings, private],
)
def test_every_module_of_a_ring_keeps(rule: Rule, path: Path) -> None:
    assert not rule(parse(path))


def test_only_patching_assigns_to_foreign_attributes(module: Path) -> None:
    violations = foreign_assignments(parse(module))
    assert bool(violations) == (module.stem == "patching"), violations


def test_only_the_cuda_side_may_import_cupy(module: Path) -> None:
    assert module.stem in MAY_IMPORT_CUPY or not cupy_imports(parse(module))


def test_cast_rules_are_data() -> None:
    assert not not_literal(parse(PACKAGE / "cast_rules.py"))


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("tests/**/test_*.py")), ids=lambda path: path.name
)
def test_every_property_draws_a_hundred_examples(path: Path) -> None:
    assert not few_examples(parse(path))


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [
        (star_imports, "from torch import *"),
        (late_imports, "def f():\n    import torch"),
        (late_imports, "def f():\n    from torch._dynamos import x"),
        (cupy_imports, "try:\n    import cupy.cuda\nexcept ImportError: pass"),
        (cupy_imports, "def f():\n    from cupy.cuda import nvrtc"),
        (global_statements, "def f():\n    global x\n    x = 1"),
        (long_functions, "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
        (missing_docstrings, "x = 1"),
        (missing_docstrings, "'''Doc.'''\ndef f(): pass"),
        (missing_docstrings, "'''Doc.'''\nclass C:\n    '''Doc.'''\n    def f(self): pass"),
        (few_examples, "settings(max_examples=99)"),
        (few_examples, "settings(max_examples=n)"),
        (private, "from amp_patch.session import _MEND"),
        (private, "from amp_patch.apex.packages.apex import amp"),
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
    ],
)
def test_every_rule_can_fail(rule: Rule, snippet: str) -> None:
    assert rule(ast.parse(snippet))


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [
        (late_imports, "import torch\ndef f():\n    import cupy"),
        (late_imports, "def f():\n    from cupy.cuda import nvrtc"),
        (late_imports, "def f():\n    import torch._dynamo.output_graph"),
        (foreign_assignments, "class C:\n    def f(self):\n        self.x = 1"),
        (foreign_assignments, "object.__setattr__(self, 'x', 1)"),
        (foreign_assignments, "new = copy.copy(old)\nsetattr(new, 'x', 1)"),
        (foreign_assignments, "new = nn.Parameter(x)\nvars(new).update(vars(old))"),
        (foreign_assignments, "p.grad = None"),
        (foreign_assignments, "wrapper.__name__ = 'sin'"),
        (foreign_assignments, "vars(self)['x'] = 1"),
        (long_functions, "def f():\n    '''" + "\n" * 100 + "    '''\n    pass"),
        (not_literal, "'''Doc.'''\nimport x\nA = frozenset({'a'})\ndef f(): return 1"),
    ],
)
def test_no_rule_fails_what_is_allowed(rule: Rule, snippet: str) -> None:
    assert not rule(ast.parse(snippet))


@pytest.mark.parametrize(
    ("snippet", "imported"),
    [
        ("import amp_patch.session", ["session"]),
        ("import amp_patch", ["__init__"]),
        ("from amp_patch import session, casting", ["session", "casting"]),
        ("from amp_patch.session import Session", ["session"]),
        ("from . import session", ["session"]),
        ("from .session import Session", ["session"]),
        ("def f():\n    from amp_patch.session import Session", ["session"]),
        ("import torch.amp", []),
    ],
)
def test_own_imports_are_seen_in_every_spelling(snippet: str, imported: list[str]) -> None:
    assert list(own_imports(ast.parse(snippet))) == imported


@pytest.fixture
def effects_of_import(tmp_path: Path) -> Callable[[str], list[str]]:
    """Import modules in a fresh interpreter, and name what that changed in torch, and cupy."""
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

    def effects(*names: str) -> list[str]:
        paths = [str(tmp_path), str(ROOT / "tests"), str(ROOT)]
        code = textwrap.dedent(script).format(paths=paths, names=names)
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        return run.stdout.split()

    return effects


def test_importing_the_package_touches_no_torch_attribute_and_no_cupy(effects_of_import) -> None:
    modules = [f"amp_patch.{path.stem}" for path in CORE if path.stem != "__init__"]
    assert effects_of_import("amp_patch", *modules) == []


@pytest.mark.parametrize(
    ("module_name", "effect"), [("patches_torch", "torch.sin"), ("imports_cupy", "cupy")]
)
def test_the_import_test_can_fail(effects_of_import, module_name: str, effect: str) -> None:
    assert effects_of_import("amp_patch", module_name) == [effect]
