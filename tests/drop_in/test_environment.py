"""``amp-patch enable``: what is written, what forbids it, and that every process finds apex."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from running import ROOT

from amp_patch import __version__
from amp_patch.apex import environment

NAMES = ["amp_patch_apex.py", "amp_patch_apex.pth", f"amp_patch_apex-{__version__}.dist-info"]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_writes_a_distribution_and_takes_every_file_back(tmp_path: Path) -> None:
    (tmp_path / "other.py").touch()
    assert environment.look(tmp_path).version is None
    assert environment.enable(tmp_path) is True
    assert {*NAMES, "other.py"} <= names_in(tmp_path) <= {*NAMES, "other.py", "__pycache__"}
    assert environment.look(tmp_path) == (tmp_path, __version__, True)
    assert environment.enable(tmp_path) is False
    assert environment.disable(tmp_path)
    assert names_in(tmp_path) - {"__pycache__"} == {"other.py"}
    assert not list(tmp_path.glob("__pycache__/*"))
    assert environment.disable(tmp_path) == []


def test_the_distribution_says_what_it_is_and_records_its_files(tmp_path: Path) -> None:
    environment.enable(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.metadata["Name"], found.version) == ("amp-patch-apex", __version__)
    assert "amp_patch" in found.metadata["Summary"]
    rows = list(csv.reader(found.read_text("RECORD").splitlines()))
    written = {p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert {tmp_path / name for name, *_ in rows} == written
    for name, digest, size in rows[:-1]:
        content = (tmp_path / name).read_bytes()
        found_digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
        assert (digest, size) == (f"sha256={found_digest.rstrip('=')}", str(len(content)))


@pytest.mark.parametrize("spoil", ["older version", "no hook", "other hook", "no start"])
def test_what_another_version_wrote_or_somebody_spoilt_is_renewed(
    tmp_path: Path, spoil: str
) -> None:
    environment.enable(tmp_path)
    if spoil == "older version":
        (tmp_path / NAMES[2]).rename(tmp_path / "amp_patch_apex-0.0.1.dist-info")
    elif spoil == "other hook":
        (tmp_path / NAMES[0]).write_text("x = 1\n")
    else:
        (tmp_path / NAMES[0 if spoil == "no hook" else 1]).unlink()
    standing = environment.look(tmp_path)
    assert not standing.is_whole
    assert standing.version == ("0.0.1" if spoil == "older version" else __version__)
    assert environment.enable(tmp_path) is True
    assert environment.look(tmp_path).is_whole
    assert len(list(tmp_path.glob("*.dist-info"))) == 1


def test_a_folder_that_cannot_be_written_to_is_told_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(environment.NotPossible, match="must be writable; got .*missing: No such"):
        environment.enable(tmp_path / "missing")

    written = []

    def write_some(path: Path, text: str) -> None:
        if len(written) == 2:
            raise PermissionError(13, "Permission denied")
        path.write_text(text)
        written.append(path)

    monkeypatch.setattr(environment, "_write", write_some)
    with pytest.raises(environment.NotPossible, match="Permission denied; make an environment"):
        environment.enable(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_amp", [True, False])
def test_a_real_apex_with_amp_is_in_the_way_and_one_without_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_amp: bool
) -> None:
    folder = tmp_path / "packages"
    (folder / "apex" / "amp").mkdir(parents=True)
    (folder / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    if not has_amp:
        environment.refuse(folder, force=True)
        return
    (folder / "apex" / "amp" / "__init__.py").touch()
    with pytest.raises(environment.NotPossible, match=f"found one in {folder / 'apex'}; call pip"):
        environment.refuse(folder, force=True)
    # a clone of apex in the folder where the command is called is not installed
    monkeypatch.chdir(folder)
    environment.refuse(Path(sysconfig.get_path("purelib")), force=True)


def test_a_python_of_everybody_asks_for_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(sysconfig.get_path("purelib"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(environment.NotPossible, match=f"got {tmp_path}, .*enable --force"):
        environment.refuse(folder, force=False)
    environment.refuse(folder, force=True)
    (tmp_path / "conda-meta").mkdir()
    environment.refuse(folder, force=False)
    (tmp_path / "condabin").mkdir()  # conda's base
    with pytest.raises(environment.NotPossible):
        environment.refuse(folder, force=False)


def test_a_checkout_that_only_this_process_sees_is_refused(tmp_path: Path) -> None:
    one = Environment(tmp_path)
    one.others.write_text(f"{sysconfig.get_path('purelib')}\n")  # click, and no amp_patch
    command = [one.python, "-m", "amp_patch", "enable"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"only this folder or PYTHONPATH shows, {ROOT}; call pip install" in done.stderr
    assert not (one.packages / "amp_patch_apex.pth").exists()


def test_a_folder_that_python_does_not_look_into_is_refused(tmp_path: Path) -> None:
    with pytest.raises(environment.NotPossible, match=f"must find packages in {tmp_path}"):
        environment.refuse(tmp_path, force=True)


# --- in an environment ---

#: Prints what a process and one that it spawns find, without torch.
FINDS = """
import importlib.metadata, importlib.util, multiprocessing, sys
def find(queue=None):
    found = [importlib.util.find_spec(name) is not None for name in ("amp_C", "apex")]
    queue.put(found) if queue else print(found)
if __name__ == "__main__":
    print("amp_patch" in sys.modules, importlib.metadata.version("apex"))
    find()
    if "spawn" in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=find, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
"""
TRAINS = """
import torch
from apex import amp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
"""


class Environment:
    """A virtual environment that sees the packages of this one."""

    def __init__(self, path: Path) -> None:
        venv.EnvBuilder(symlinks=True).create(path)
        self.python = path / "bin" / "python"
        (self.packages,) = path.glob("lib/python*/site-packages")
        self.others = self.packages / "others.pth"
        self.others.write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run its Python, which finds the packages of `others` there only."""
        return subprocess.run(
            [self.python, *arguments],
            capture_output=True,
            text=True,
            cwd=self.packages.parent,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )

    def finds(self, script: Path, *options: str, spawns: bool = False) -> list[str]:
        """Return what `FINDS` prints, or its error."""
        done = self.run(*options, script, *["spawn"] * spawns)
        return done.stdout.splitlines() or done.stderr.splitlines()[-1:]


@pytest.mark.slow(instead="the files that are written, what pip makes of them, what is refused")
@pytest.mark.skipif(sys.platform == "win32", reason="the folders have other names")
def test_every_process_of_one_environment_imports_apex_until_it_is_disabled(tmp_path: Path) -> None:
    one, other = Environment(tmp_path / "one"), Environment(tmp_path / "other")
    script = tmp_path / "finds.py"
    script.write_text(FINDS)
    before = names_in(one.packages)

    enabled = one.run("-m", "amp_patch", "enable")
    assert enabled.returncode == 0, enabled.stderr
    found = ["False 0.1", "[True, True]"]
    assert one.finds(script, "-I") == one.finds(script, "-E") == found
    assert one.finds(script, spawns=True) == [*found, "[True, True]"]
    absent = ["importlib.metadata.PackageNotFoundError: No package metadata was found for apex"]
    assert other.finds(script) == one.finds(script, "-S") == absent

    one.others.rename(one.packages / "others.off")  # amp_patch is uninstalled meanwhile
    assert one.finds(script) == absent
    (one.packages / "others.off").rename(one.others)

    trained = one.run("-W", "error::ImportWarning", "-c", TRAINS)
    assert (trained.returncode, trained.stdout) == (0, ""), trained.stderr
    status = one.run("-m", "amp_patch", "enable", "--status")
    assert status.stdout == f"Enabled in {one.packages} by amp_patch {__version__}. Undo: " + (
        "amp-patch disable\n"
    )
    assert "Not enabled in" in other.run("-m", "amp_patch", "enable", "--status").stdout

    assert one.run("-m", "amp_patch", "disable").returncode == 0
    assert names_in(one.packages) - {"__pycache__"} == before
    assert one.finds(script) == absent


@pytest.mark.skipif(sys.platform == "win32", reason="the folders have other names")
def test_pip_shows_it_as_what_it_is_and_uninstalls_it(tmp_path: Path) -> None:
    one = Environment(tmp_path)
    before = names_in(one.packages)
    environment.enable(one.packages)
    listed = one.run("-m", "pip", "--disable-pip-version-check", "list", "--format", "freeze")
    lines = [line for line in listed.stdout.splitlines() if "apex" in line]
    assert lines == [f"amp-patch-apex=={__version__}"]
    removed = one.run("-m", "pip", "uninstall", "-y", "amp-patch-apex")
    assert removed.returncode == 0, removed.stderr
    assert names_in(one.packages) - {"__pycache__"} == before
