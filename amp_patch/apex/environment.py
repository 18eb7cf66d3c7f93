"""What ``amp-patch enable`` writes to an environment, whether it is there, and what forbids it.

It is a small distribution, amp-patch-apex, as an installer would write it: so ``pip list`` shows it
and ``pip uninstall`` removes it. Knows folders and files; imports no torch.
"""

from __future__ import annotations

import base64
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import amp_patch

from .process import real_amp

#: As ``pip`` names the distribution.
NAME = "amp-patch-apex"
_MODULE = "amp_patch_apex"
_HOOK = Path(__file__).parent / "enabled" / f"{_MODULE}.py"
#: Python imports the hook by it, so it is written last and removed first.
_START = f"{_MODULE}.pth"
_INFO = f"{_MODULE}-{amp_patch.__version__}.dist-info"
_METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: Makes `import apex` find amp_patch in this environment; undo: amp-patch disable
Requires-Dist: amp_patch
"""


class NotPossible(Exception):
    """An environment cannot be enabled; the message says why, and what to do."""


class Standing(NamedTuple):
    """What is written in a folder.

    Attributes:
        folder: of an environment's packages.
        version: of the amp_patch that wrote it; None where nothing is there.
        is_whole: whether all is there, as this amp_patch writes it.
    """

    folder: Path
    version: str | None
    is_whole: bool


def packages_folder() -> Path:
    """Return where this environment's packages lie."""
    return Path(sysconfig.get_path("purelib"))


def look(folder: Path) -> Standing:
    """Return what is written in a folder."""
    infos = sorted(folder.glob(f"{_MODULE}-*.dist-info"))
    stems = [info.name.removesuffix(".dist-info").removeprefix(f"{_MODULE}-") for info in infos]
    has_start = (folder / _START).is_file()
    is_whole = len(infos) == 1 and all(
        _text(folder / name) == text for name, text in _files().items()
    )
    return Standing(folder, stems[-1] if stems else "?" if has_start else None, is_whole)


def enabled_folder() -> Path | None:
    """Return the folder by which processes of this environment find apex; None without.

    It may be another's, where this environment uses the system's packages.
    """
    folders = [packages_folder(), *map(Path, filter(None, sys.path))]
    return next((one for one in folders if (one / _START).is_file()), None)


def enable(folder: Path) -> bool:
    """Write the distribution; return whether anything had to be written.

    Raises:
        NotPossible: the folder cannot be written to; nothing is left there.
    """
    if look(folder).is_whole:
        return False
    try:
        disable(folder)
        (folder / _INFO).mkdir()
        for name, text in _files().items():
            _write(folder / name, text)
        # Who starts Python may not be allowed to write here.
        py_compile.compile(str(folder / f"{_MODULE}.py"), quiet=2)
    except OSError as error:
        disable(folder)
        raise NotPossible(
            f"the folder of this environment's packages must be writable; got {folder}: "
            f"{error.strerror}; make an environment of your own (python -m venv .venv), or call "
            "amp-patch run SCRIPT, which writes nothing"
        ) from error
    return True


def disable(folder: Path) -> list[Path]:
    """Remove every file that `enable` of any version wrote; return them.

    Raises:
        OSError: one cannot be removed.
    """
    infos = sorted(folder.glob(f"{_MODULE}-*.dist-info"))
    compiled = sorted((folder / "__pycache__").glob(f"{_MODULE}.*.pyc"))
    files = [folder / _START, folder / f"{_MODULE}.py", *compiled]
    removed = [path for path in files if path.exists()]
    for path in removed:
        path.unlink()
    for info in infos:
        shutil.rmtree(info)
    return removed + infos


def refuse(folder: Path, force: bool) -> None:
    """Raise where an environment should not be enabled.

    Args:
        folder: of its packages.
        force: take a Python that is no environment of its own, or finds amp_patch only because
            this process's folder or PYTHONPATH shows it.

    Raises:
        NotPossible: a real apex with amp is there, the environment is everybody's or has no
            amp_patch, or Python does not look into the folder.
    """
    here = os.getcwd()
    place = real_amp([path for path in sys.path if path not in ("", here)])
    if place is not None:
        raise NotPossible(
            f"only an environment without a real apex.amp can be enabled; found one in {place}; "
            "call pip uninstall apex first, or amp-patch run --force SCRIPT for one script"
        )
    if str(folder) not in sys.path:
        raise NotPossible(
            f"Python must find packages in {folder}; got a Python that does not look there; start "
            "it without -S and -I, or use a virtual environment"
        )
    if not force and not _is_installed():
        home = Path(amp_patch.__file__).parent.parent
        raise NotPossible(
            "amp_patch must be installed where every process finds it; got one that only this "
            f"folder or PYTHONPATH shows, {home}; call pip install {home}, or amp-patch enable "
            "--force"
        )
    if not force and not _is_own():
        raise NotPossible(
            f"only a virtual environment is enabled unasked; got {sys.prefix}, which every "
            "program of this Python uses; make one (python -m venv .venv), or call "
            "amp-patch enable --force"
        )


def _is_installed() -> bool:
    """Return whether a process that is started elsewhere finds amp_patch."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-c", "import amp_patch"]
        done = subprocess.run(command, cwd=elsewhere, env=environ, capture_output=True)
    return done.returncode == 0


def _is_own() -> bool:
    """Return whether this is a virtual environment, or one of conda's but its base."""
    prefix = Path(sys.prefix)
    of_conda = (prefix / "conda-meta").is_dir() and not (prefix / "condabin").is_dir()
    return sys.prefix != sys.base_prefix or of_conda


def _files() -> Mapping[str, str]:
    """Return the text of each file by its place in the folder, in the order of writing."""
    files = {
        f"{_MODULE}.py": _HOOK.read_text(encoding="utf-8"),
        f"{_INFO}/METADATA": _METADATA.format(name=NAME, version=amp_patch.__version__),
        f"{_INFO}/INSTALLER": "amp-patch\n",
        f"{_INFO}/top_level.txt": "amp_C\namp_patch_apex\napex\napex_C\nfused_adam_cuda\n",
    }
    start = f"import {_MODULE}\n"
    rows = [_record(name, text) for name, text in {**files, _START: start}.items()]
    files[f"{_INFO}/RECORD"] = "".join([*rows, f"{_INFO}/RECORD,,\n"])
    files[_START] = start
    return files


def _record(name: str, text: str) -> str:
    """Return a file's line in the RECORD of a distribution."""
    content = text.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def _write(path: Path, text: str) -> None:
    """Write a file at once: who reads it sees all of it or nothing."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".amp_patch_apex")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text.encode())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError):
        return None
