"""A fork is to its command what a Python of its own is."""

import os
import re
import sys
from pathlib import Path

import processes
import pytest

SHOW = """\
import os, sys, warnings
print(sys.argv[1:], __name__, sys.path[0], os.getcwd(), os.environ.get("GIVEN"))
print(sys.stdin.read(), sys.warnoptions, file=sys.stderr)
"""
EXITS = """\
import atexit, sys
atexit.register(print, "at exit")
print("before", end="")
sys.exit(sys.argv[1] if sys.argv[1] == "a message" else int(sys.argv[1]))
"""
COMMANDS = {
    "program": ["-c", SHOW, "a", "-W"],
    "script": ["show.py", "--level", "O1"],
    "script elsewhere": ["folder/show.py"],
    "module": ["-m", "show", "x"],
    "options": ["-W", "error", "-W", "ignore:x:UserWarning", "show.py"],
    "exit code": ["-c", EXITS, "7"],
    "exit of 0": ["-c", EXITS, "0"],
    "exit message": ["-c", EXITS, "a message"],
    "signal": ["-c", "import os; os.kill(os.getpid(), 9)"],
}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="nothing forks elsewhere")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    for name in ("show.py", "folder/show.py"):
        (tmp_path / name).write_text(SHOW)
    return tmp_path


def both(folder: Path, command: list[str], **variables: str) -> list[tuple[str, str, int]]:
    """Return what a fork and a Python of its own print, and their exit codes."""
    env = {**os.environ, **variables}
    done = [
        processes.run([sys.executable, *command], cwd=folder, env=env, fork=fork)
        for fork in (True, False)
    ]
    return [(one.stdout, one.stderr, one.returncode) for one in done]


@linux_only
@pytest.mark.parametrize("name", COMMANDS)
def test_a_fork_does_what_a_python_of_its_own_does(folder: Path, name: str) -> None:
    forked, own = both(folder, COMMANDS[name], GIVEN="by the test")
    assert forked == own


@linux_only
def test_an_error_ends_it_with_its_traceback(folder: Path) -> None:
    forked, own = both(folder, ["-W", "error", "-c", "import warnings; warnings.warn('so')"])
    assert forked[2] == own[2] == 1
    for _, printed, _ in (forked, own):
        # Python 3.13 shows the code, too
        expected = r'  File "<string>", line 1, in <module>\n(    .*\n)*UserWarning: so\n'
        assert re.search(f"{expected}$", printed)


@linux_only
def test_the_environments_sitecustomize_runs_first(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("print('customized', __name__)\n")
    forked, own = both(folder, ["-c", "print('then')"], PYTHONPATH=str(folder))
    assert forked == own == ("customized sitecustomize\nthen\n", "", 0)


@linux_only
def test_forks_have_torch_and_nothing_of_each_other() -> None:
    """And most of this package; not what tools wait for, nor what scripts ask for by name."""
    names = ("torch", "amp_patch.step", "amp_patch.session", "amp_patch.amp", "apex")
    code = f"import sys; print([name in sys.modules for name in {names}]); import amp_patch.amp"
    for _ in range(2):
        done = processes.run([sys.executable, "-c", code], fork=True)
        assert done.stdout == "[True, True, False, False, False]\n"


@linux_only
def test_another_copy_of_the_package_is_the_commands(tmp_path: Path) -> None:
    (tmp_path / "amp_patch").mkdir()
    (tmp_path / "amp_patch" / "__init__.py").write_text("print('a copy')\n")
    (tmp_path / "elsewhere").mkdir()
    command, env = [sys.executable, "-c", "import amp_patch"], {"PYTHONPATH": str(tmp_path)}
    done = processes.run(command, cwd=tmp_path / "elsewhere", env={**os.environ, **env}, fork=True)
    assert done.stdout == "a copy\n"


@linux_only
def test_what_takes_too_long_is_ended() -> None:
    code = "import time; time.sleep(60)"
    assert processes.run([sys.executable, "-c", code], fork=True, timeout=1).returncode == -14
