"""Names of apex are there while the drop-in is installed, and only then."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import SUPPLIED

import amp_patch.apex

TOP_LEVEL = ("apex", "amp_C", "apex_C", "fused_adam_cuda")


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
