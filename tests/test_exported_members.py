"""``__all__`` says exactly what is public, and ``amp`` has exactly the calls that it promises."""

import ast
import importlib
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import amp_patch

PACKAGE = Path(amp_patch.__file__).parent

APEX_CALLS = {
    "initialize": "models, optimizers=None, enabled=True, opt_level='O1', cast_model_type=None, "
    "patch_torch_functions=None, keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, "
    "cast_model_outputs=None, num_losses=1, verbosity=1, min_loss_scale=None, "
    "max_loss_scale=16777216.0",
    "scale_loss": "loss, optimizers, loss_id=0, model=None, delay_unscale=False, "
    "delay_overflow_check=False",
    "disable_casts": "",
    "master_params": "optimizer",
    "state_dict": "destination=None",
    "load_state_dict": "state_dict",
    "half_function": "fn",
    "float_function": "fn",
    "promote_function": "fn",
    "bfloat16_function": "fn",
    "register_half_function": "module, name",
    "register_float_function": "module, name",
    "register_promote_function": "module, name",
    "register_bfloat16_function": "module, name",
}
OWN_CALLS = {
    "deactivate": "",
    "step_was_skipped": "optimizer",
    "loss_scale": "loss_id=None",
    "overflow_report": "",
    "summary": "",
    "clip_grad_norm_": "optimizer, max_norm, norm_type=2.0, error_if_nonfinite=False",
    "register_library_function": "module, name",
    "register_forward_method": "cls, name",
    "half_region": "",
    "float_region": "",
}


def public_names(path: Path) -> set[str]:
    """The names without underscore that a module itself defines at its top level.

    A type variable is no name for users.
    """
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def with_all() -> list[str]:
    """The modules of the core, as dotted names, that say what they export."""
    return [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted(PACKAGE.glob("**/*.py"))
        if PACKAGE / "apex" not in path.parents
        and path != PACKAGE / "__init__.py"
        and "__all__ =" in path.read_text(encoding="utf-8")
    ]


def test_modules_in_rooms_are_looked_at() -> None:
    assert {"amp_patch.amp", "amp_patch.kernels.__init__"} < set(with_all())


@pytest.mark.parametrize("name", with_all())
def test_all_is_sorted_and_complete(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert list(module.__all__) == sorted(module.__all__)
    assert public_names(Path(str(module.__file__))) <= set(module.__all__)
    assert all(hasattr(module, exported) for exported in module.__all__)


def test_the_package_exports_its_version_amp_and_the_sweep_only() -> None:
    assert amp_patch.__all__ == ["__version__", "amp", "sweep"]
    assert public_names(PACKAGE / "__init__.py") == {"sweep"}


def test_public_modules_are_attributes_that_are_imported_when_asked_for() -> None:
    code = """
        import sys, amp_patch
        assert set({names}) <= set(dir(amp_patch))
        assert not [name for name in sys.modules if name.startswith(("torch", "amp_patch."))]
        for name in {names}:
            assert getattr(amp_patch, name) is sys.modules[f"amp_patch.{{name}}"]
        assert not hasattr(amp_patch, "amq")
        """
    names = ["amp", "apex", "cuda_graph", "debug", "optimizers"]
    code = textwrap.dedent(code).format(names=names)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_call_that_is_asked_of_the_package_is_said_to_be_in_amp() -> None:
    with pytest.raises(AttributeError, match="'initialize'; its calls are in amp_patch.amp"):
        amp_patch.initialize  # noqa: B018


def test_amp_exports_the_documented_calls() -> None:
    from amp_patch import amp

    assert set(amp.__all__) == APEX_CALLS.keys() | OWN_CALLS.keys()


@pytest.mark.parametrize(("name", "signature"), APEX_CALLS.items(), ids=APEX_CALLS)
def test_apex_signatures_come_first_and_what_is_new_is_keyword_only(
    name: str, signature: str
) -> None:
    from amp_patch import amp

    parameters = inspect.signature(getattr(amp, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    new = [p for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    bare = [p.replace(annotation=p.empty) for p in positional]
    assert ", ".join(map(str, bare)) == signature
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in new)


@pytest.mark.parametrize(("name", "signature"), OWN_CALLS.items(), ids=OWN_CALLS)
def test_own_calls_start_with_the_documented_arguments(name: str, signature: str) -> None:
    from amp_patch import amp

    parameters = inspect.signature(getattr(amp, name)).parameters.values()
    required = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    assert required.startswith(signature)
