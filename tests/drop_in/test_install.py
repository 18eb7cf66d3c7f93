"""Names of apex are there while the drop-in is installed, and only then."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pickle
import pydoc
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import amp_patch.apex
from amp_patch.apex.replacements import COMPILED, REPLACEMENTS

TOP_LEVEL = ("apex", "amp_C", "apex_C")
PACKAGES = Path(amp_patch.apex.__file__).parent / "packages"
#: The modules of apex by the files that there are, but for one that is a script.
SUPPLIED = sorted(
    str(path.relative_to(PACKAGES).with_suffix("")).replace("/", ".").removesuffix(".__init__")
    for path in PACKAGES.rglob("*.py")
    if path.parent != PACKAGES or path.stem in TOP_LEVEL
    if path.stem != "multiproc"
)


@pytest.fixture
def real_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An apex of somebody else's, which has optimizers and no amp."""
    for name in ("apex", "apex/optimizers", "apex-9.9.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "apex/__init__.py").write_text("origin = 'real'\n")
    (tmp_path / "apex/optimizers/__init__.py").write_text("origin = 'real'\n")
    (tmp_path / "apex-9.9.dist-info/METADATA").write_text("Name: apex\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    amp_patch.apex.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] in TOP_LEVEL]:
        del sys.modules[name]


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_without_it_nothing_has_the_name(name: str) -> None:
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
        importlib.import_module(name)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")


def test_importing_the_package_that_installs_it_installs_nothing() -> None:
    assert not [finder for finder in sys.meta_path if type(finder).__module__.endswith("finder")]


def test_install_supplies_all_of_it_and_uninstall_takes_it_back() -> None:
    before = dict(sys.modules)
    amp_patch.apex.install()
    try:
        assert importlib.util.find_spec("apex") is not None
        assert importlib.metadata.version("apex") == "0.1"
        for name in SUPPLIED:
            assert importlib.import_module(name).__name__ == name
    finally:
        amp_patch.apex.uninstall()
    assert importlib.util.find_spec("apex") is None
    assert [name for name in sys.modules if name.partition(".")[0] in TOP_LEVEL] == []
    assert before.keys() <= sys.modules.keys()
    amp_patch.apex.uninstall()


def test_a_block_ends_what_it_began() -> None:
    with amp_patch.apex.install() as outer:
        with amp_patch.apex.install():
            module = importlib.import_module("apex.amp")
        assert importlib.import_module("apex.amp") is module
        outer.uninstall()
        assert importlib.util.find_spec("apex") is None
    assert importlib.util.find_spec("apex") is None


def test_a_block_ends_when_its_body_raises() -> None:
    with pytest.raises(KeyError), amp_patch.apex.install():
        raise KeyError
    assert importlib.util.find_spec("apex") is None


def test_other_distributions_are_found_as_before() -> None:
    with amp_patch.apex.install():
        assert importlib.metadata.version("torch")
        names = [found.metadata["Name"] for found in importlib.metadata.distributions()]
        assert names.count("apex") == 1
        assert "wrapt" in names


def test_amp_is_a_module_whose_names_stand_in_its_dict(apex: types.ModuleType) -> None:
    assert isinstance(apex.amp, types.ModuleType)
    for name in ("state_dict", "load_state_dict", "initialize", "scale_loss", "master_params"):
        assert name in apex.amp.__dict__


def test_classes_pickle_under_the_names_of_apex(apex: types.ModuleType) -> None:
    scaler = apex.amp.scaler.LossScaler(4.0)
    text = pickle.dumps(scaler)
    assert b"apex.amp.scaler" in text
    assert b"amp_patch" not in text
    assert pickle.loads(text).loss_scale() == 4.0


def test_where_a_real_apex_is_only_what_it_lacks_is_supplied(real_apex: Path) -> None:
    real = importlib.import_module("apex")
    with amp_patch.apex.install():
        assert importlib.import_module("apex.optimizers").origin == "real"
        assert callable(importlib.import_module("apex.amp").initialize)
        from apex import amp

        assert amp is sys.modules["apex.amp"]
        assert importlib.metadata.version("apex") == "9.9"
    assert sys.modules["apex"] is real
    assert "apex.amp" not in sys.modules
    assert not hasattr(real, "amp")


@pytest.mark.parametrize("imported_before", [True, False])
def test_a_real_apex_has_what_it_lacks_after_import_apex_alone(
    real_apex: Path, imported_before: bool
) -> None:
    if imported_before:
        importlib.import_module("apex")
    with amp_patch.apex.install():
        with amp_patch.apex.install():
            pass
        apex = importlib.import_module("apex")
        assert apex.origin == apex.optimizers.origin == "real"
        assert callable(apex.amp.initialize)
        with pytest.raises(AttributeError, match="module 'apex' has no attribute 'transformer'"):
            _ = apex.transformer
        with pytest.raises(ImportError, match=r"'apex.transformer' .* use megatron.core"):
            from apex import transformer  # noqa: F401
        assert __import__("apex", fromlist=["dummy"]) is apex
    assert not hasattr(apex, "amp")
    assert not [one for one in sys.meta_path if type(one).__module__.startswith("amp_patch")]


@pytest.fixture
def another_apex(real_apex: Path) -> Path:
    """What PyPI has under the name: not NVIDIA's, and not to be imported."""
    (real_apex / "apex/optimizers/__init__.py").unlink()
    (real_apex / "apex/optimizers").rename(real_apex / "apex/views")
    (real_apex / "apex/__init__.py").write_text("import pyramid_mailer\n")
    return real_apex


def test_ours_stands_in_where_another_package_of_the_name_fails(another_apex: Path) -> None:
    with amp_patch.apex.install():
        with pytest.warns(UserWarning, match=r"No module named 'pyramid_mailer'.*uninstall apex"):
            from apex import amp
        assert callable(amp.initialize)
        assert importlib.import_module("apex.optimizers").FusedAdam
    with pytest.raises(ModuleNotFoundError, match="pyramid_mailer"):
        importlib.import_module("apex")


def test_a_script_of_the_name_imports_ours(
    real_apex: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (real_apex / "scripts").mkdir()
    (real_apex / "scripts/apex.py").write_text("from apex import amp\n")
    monkeypatch.syspath_prepend(str(real_apex / "scripts"))
    with amp_patch.apex.install():
        with pytest.warns(UserWarning, match=r"scripts.apex\.py, which is another.*rename it"):
            from apex import amp
        assert callable(amp.initialize)


def test_an_apex_of_nvidias_that_fails_is_pythons_error(real_apex: Path) -> None:
    (real_apex / "apex/__init__.py").write_text("import missing_of_nvidia\n")
    with (
        amp_patch.apex.install(),
        pytest.raises(ModuleNotFoundError, match="missing_of_nvidia"),
    ):
        importlib.import_module("apex")


def test_what_is_forced_stays_under_another_install(real_apex: Path) -> None:
    with amp_patch.apex.install(force=True), amp_patch.apex.install():
        assert not hasattr(importlib.import_module("apex"), "origin")


def test_a_folder_named_apex_is_no_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone of apex's repository in the script's folder is a namespace package to Python."""
    (tmp_path / "apex/apex").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    with amp_patch.apex.install():
        apex = importlib.import_module("apex")
        assert callable(apex.amp.initialize)
        assert callable(apex.optimizers.FusedAdam)


def test_force_takes_all_and_gives_it_back(real_apex: Path) -> None:
    real = importlib.import_module("apex.optimizers")
    with amp_patch.apex.install(force=True):
        apex = importlib.import_module("apex")
        assert not hasattr(apex, "origin")
        assert not hasattr(importlib.import_module("apex.optimizers"), "origin")
    assert importlib.import_module("apex.optimizers") is real


def test_force_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"force must be True or False; got 'yes'; call"):
        amp_patch.apex.install(force="yes")
    assert importlib.util.find_spec("apex") is None


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("import apex.transformer", "'apex.transformer' .* use megatron.core"),
        ("from apex import transformer", "'apex.transformer' .* use megatron.core"),
        (
            "from apex.transformer.layers import x",
            "'apex.transformer' .* apex has RNN, amp, .* use mega",
        ),
        (
            "from apex import nothing",
            "supplies no 'apex.nothing' .*; apex has RNN, amp, .* in torch",
        ),
        ("from apex.amp.opt import Nothing", "supplies no 'apex.amp.opt.Nothing'"),
        ("from apex.contrib.sparsity import ASP", "to_sparse_semi_structured"),
        (
            "from apex.optimizers import FusedLARS",
            "apex.optimizers has .*FusedAdam",
        ),
        ("from amp_C import multi_tensor_lars", "amp_C has .*multi_tensor_scale.*Instead of multi"),
        ("from apex.amp import amp, dummy", "supplies no 'apex.amp.dummy'"),
    ],
)
def test_what_is_not_supplied_is_an_import_error_with_advice(
    apex: types.ModuleType, statement: str, words: str
) -> None:
    with pytest.raises(ImportError, match=words):
        exec(statement)


def test_libraries_that_probe_get_no(apex: types.ModuleType) -> None:
    assert not hasattr(apex, "transformer")
    assert not hasattr(apex.amp.opt, "Nothing")
    for name in ("apex.transformer", "apex.amp.dummy", "apex.contrib.sparsity", "syncbn"):
        assert importlib.util.find_spec(name) is None
    assert importlib.util.find_spec("apex.amp.opt") is not None


@pytest.mark.parametrize("name", SUPPLIED)
def test_loaders_of_plug_ins_may_ask_for_what_is_not_there(
    apex: types.ModuleType, name: str
) -> None:
    """Python ignores such a name, and so do ``pydoc``, ``unittest`` and their like."""
    module = __import__(name, fromlist=["dummy"])
    assert module is __import__(name, fromlist=[""]) is sys.modules[name]
    assert not [loaded for loaded in sys.modules if loaded.endswith(".")]
    assert not hasattr(module, "dummy")
    assert getattr(module, "dummy", 3) == 3
    with pytest.raises(ImportError):
        exec(f"from {name} import dummy")
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"{name}.dummy")
    assert raised.value.name == f"{name}.dummy"


def test_a_class_is_located_by_its_name(apex: types.ModuleType) -> None:
    """Configuration files name classes so, and what locates them tries module after module."""
    assert pydoc.locate("apex.amp.scaler.LossScaler") is apex.amp.scaler.LossScaler
    assert pydoc.locate("apex.optimizers.FusedAdam") is apex.optimizers.FusedAdam
    for name in ("apex.amp.scaler.Nothing", "apex.transformer.layers.Nothing", "syncbn.forward"):
        assert pydoc.locate(name) is None


def test_an_error_in_a_statement_is_told_from_one_beside_it(apex: types.ModuleType) -> None:
    """The statement asks the module as ``hasattr`` does; only its own question is answered so."""
    code = "import apex.amp\nhas = hasattr(apex.amp, 'dummy')\nfrom apex.amp import initialize"
    names: dict[str, object] = {}
    exec(code, names)
    assert names["has"] is False
    assert names["initialize"] is apex.amp.initialize
    many = "\n".join(f"name_{index} = {index}" for index in range(300))  # EXTENDED_ARG before it
    with pytest.raises(ImportError, match=r"supplies no 'apex.amp.dummy'") as raised:
        exec(f"{many}\nfrom apex.amp import dummy")
    assert raised.value.name == "apex.amp"


@pytest.mark.parametrize("name", COMPILED)
def test_what_apex_compiled_is_an_import_error_with_advice(
    apex: types.ModuleType, name: str
) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"Instead of {name}, use ") as raised:
        importlib.import_module(name)
    assert raised.value.name == name
    with pytest.raises(ModuleNotFoundError, match=f"supplies no '{name}', which is a module that"):
        exec(f"from {name} import forward")
    assert importlib.util.find_spec(name) is None
    for advised in re.findall(r"(?:apex|amp_C)[.\w]+", COMPILED[name]):
        package, _, attribute = advised.rpartition(".")
        assert hasattr(importlib.import_module(package), attribute)


@pytest.mark.parametrize("force", [True, False])
def test_a_module_of_a_compiled_ones_name_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    """Found on the path, or by a finder that comes after ours, as those of editable installs."""
    (tmp_path / "syncbn.py").write_text("origin = 'path'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/mlp_cuda.py").write_text("origin = 'finder'\n")

    class Editable:
        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            place = tmp_path / "hidden" / f"{name}.py"
            return importlib.util.spec_from_file_location(name, place) if place.exists() else None

    with amp_patch.apex.install(force=force):
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])
        assert importlib.import_module("syncbn").origin == "path"
        assert importlib.import_module("mlp_cuda").origin == "finder"
        assert importlib.util.find_spec("mlp_cuda") is not None
        monkeypatch.undo()
    # Uninstalling leaves what is not ours.
    assert [sys.modules.pop(name).origin for name in ("syncbn", "mlp_cuda")] == ["path", "finder"]


def test_without_it_pythons_own_words_stand() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'syncbn'$"):
        importlib.import_module("syncbn")


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_what_has_a_replacement_is_not_supplied(apex: types.ModuleType, name: str) -> None:
    with pytest.raises(ImportError, match="Instead of"):
        importlib.import_module(name)
