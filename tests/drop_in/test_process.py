"""``amp-patch run`` is ``python``, but for apex."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import processes
import pytest
from running import ROOT, RUN, run

from amp_patch.apex.process import environment_of_run, is_for_python

PYTHON = (sys.executable,)
SCRIPT = """
import os, sys
print(sys.argv, sys.path, __name__, __file__, __spec__ and __spec__.name)
print(sys.flags, sys.warnoptions)
print(sys.stdin.read(), os.getcwd(), sorted(set(sys.modules) & {"torch", "click", "apex"}))
def fail():
    raise ValueError("from the script")
if "exit" in sys.argv:
    sys.exit(7)
fail()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    "arguments", [["a", "--opt-level", "O1", "--", "-m"], ["exit"], ["--help", "exit"]]
)
@pytest.mark.parametrize("options", [[], ["-u", "-W", "error", "-X", "utf8"]])
def test_a_script_runs_as_python_runs_it(
    script: Path, options: list[str], arguments: list[str]
) -> None:
    expected = run([*PYTHON, *options, script, *arguments])
    found = run([sys.executable, *options, *RUN[1:], script, *arguments])
    assert (found.stdout, found.stderr) == (expected.stdout, expected.stderr)
    assert found.returncode == expected.returncode == (7 if "exit" in arguments else 1)


def test_a_module_runs_as_python_runs_it(script: Path) -> None:
    arguments = ["-m", "train", "--opt-level", "x"]
    expected = run([*PYTHON, *arguments], cwd=script.parent)
    found = run([*RUN, *arguments], cwd=script.parent)
    assert (found.stdout, found.stderr) == (expected.stdout, expected.stderr)
    assert "'--opt-level', 'x'" in found.stdout


def test_options_of_python_may_stand_in_one_with_m(script: Path) -> None:
    expected = run([*PYTHON, "-Bu", script, "exit"])
    found = run([sys.executable, "-Bum", *RUN[2:], script, "exit"])
    assert (found.stdout, found.returncode) == (expected.stdout, 7), found.stderr


def test_two_dashes_end_the_options_of_amp_patch(script: Path) -> None:
    found = run([*RUN, "--opt-level", "O2", "--", script, "exit"])
    assert found.returncode == 7
    assert f"[{str(script)!r}, 'exit']" in found.stdout


def test_a_program_that_starts_python_may_stand_in_the_place_of_the_script(script: Path) -> None:
    program = os.path.basename(sys.executable)  # found beside the Python that runs
    found = run([*RUN, "--opt-level", "O2", program, script, "exit"])
    assert found.returncode == 7, found.stderr
    assert f"[{str(script)!r}, 'exit']" in found.stdout
    assert "never called" not in found.stderr


@pytest.mark.parametrize("first", ["./train.sh", sys.executable, os.path.basename(sys.executable)])
def test_a_program_may_be_named_by_its_path_and_a_folder_of_its_name_is_none(
    script: Path, first: str
) -> None:
    shell = script.with_name("train.sh")
    shell.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shell.chmod(0o755)
    script.with_name(os.path.basename(sys.executable)).mkdir()
    found = run([*RUN, first, "-B", script, "exit"], cwd=script.parent)
    assert found.returncode == 7, found.stderr
    assert f"[{str(script)!r}, 'exit']" in found.stdout


@pytest.mark.parametrize("is_archive", [False, True])
def test_what_holds_a_main_module_runs_as_python_runs_it(script: Path, is_archive: bool) -> None:
    main, place = script.rename(script.with_name("__main__.py")), script.parent
    if is_archive:
        place /= "train.zip"
        with zipfile.ZipFile(place, "w") as archive:
            archive.write(main, main.name)
        place.chmod(0o755)
    expected = run([*PYTHON, place, "exit"])
    found = run([*RUN, place, "exit"])
    assert (found.stdout, found.returncode) == (expected.stdout, 7), found.stderr


def test_an_executable_script_of_python_is_python_s(tmp_path: Path) -> None:
    """Also where its first line names another Python than this one, and where nobody says whose."""
    for number, first in enumerate(("#!/usr/bin/env python2", "", "#!/bin/sh")):
        path = tmp_path / f"train{number}{'.py' * (number == 2)}"
        path.write_text(f"{first}\nprint(1)\n")
        path.chmod(0o755)
        assert is_for_python(str(path)), first


def test_a_script_that_is_not_there_is_pythons_error(tmp_path: Path) -> None:
    found = run([*RUN, "missing.py"], cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert "can't open file" in found.stderr


def test_an_unknown_level_is_refused() -> None:
    found = run([*RUN, "--opt-level", "O7", "train.py"], fork=True)
    assert found.returncode == 2
    assert "'O7' is not one of 'O0', 'O1', 'O2', 'O3', 'O4', 'O5'" in found.stderr


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_options_that_hide_the_drop_in_are_refused(script: Path, option: str) -> None:
    code = f"import sys; sys.path[:0] = {[str(ROOT), *sys.path]!r}; from amp_patch.apex.process "
    code += f"import run_python; run_python([{str(script)!r}], None)"
    found = run([sys.executable, option, "-c", code])
    assert "got a Python started with -I, -E or -S" in found.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM")
def test_a_signal_reaches_the_script(tmp_path: Path) -> None:
    path = tmp_path / "waits.py"
    path.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    environment = environment_of_run({"PYTHONPATH": str(ROOT)}, None)
    with subprocess.Popen(
        [*RUN, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


CHILDREN = """
import subprocess, sys
import multiprocessing
import torch
import torch.multiprocessing
from apex import amp

def work(rank, *results):
    from apex.amp import scaler
    results[-1].put((rank, scaler.LossScaler(2.0)))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        from apex import amp
        return len(amp.__name__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(0, queue))
    process.start()
    print(queue.get()[1].loss_scale())
    process.join()
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(work, args=(results,), nprocs=1)
    print(results.get()[0])
    loader = torch.utils.data.DataLoader(
        Data(), batch_size=2, num_workers=1, multiprocessing_context="spawn"
    )
    print([batch.tolist() for batch in loader])
    subprocess.run([sys.executable, "-c", "import apex.amp; print(apex.amp.__name__)"], check=True)
"""


@pytest.mark.slow(instead="a Python that the environment reaches")
def test_processes_that_the_script_starts_find_apex(tmp_path: Path) -> None:
    path = tmp_path / "children.py"
    path.write_text(CHILDREN)
    found = run([*RUN, path])
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["2.0", "0", "[[8, 8]]", "apex.amp"]


def test_the_environments_own_sitecustomize_runs_and_errors_in_it_show(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own', __name__)\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sitecustomize, importlib.util\n"
        "print(sitecustomize.__file__, importlib.util.find_spec('apex') is not None)\n"
    )
    paths = f"{tmp_path}:{ROOT}"
    found = run([*RUN, script], PYTHONPATH=paths)
    # once for amp-patch itself, once for the script
    assert found.stdout.splitlines()[:2] == ["own sitecustomize"] * 2, found.stderr
    assert found.stdout.splitlines()[2] == f"{tmp_path / 'sitecustomize.py'} True"


def test_another_python_does_not_get_apex(tmp_path: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('apex'))"
    environment = environment_of_run({"PYTHONPATH": str(ROOT)}, None)
    found = run([sys.executable, "-c", code], **{**environment, "AMP_PATCH_RUN": "/elsewhere"})
    assert found.stdout.strip() == "None"
    found = run([sys.executable, "-c", code], **environment)
    assert "ModuleSpec(name='apex'" in found.stdout


def test_the_environment_is_the_users_but_for_the_drop_in() -> None:
    environment = environment_of_run({"A": "1", "PYTHONPATH": "/x:/y"}, "O2")
    first, *rest = environment["PYTHONPATH"].split(":")
    assert rest == ["/x", "/y"]
    assert (Path(first) / "sitecustomize.py").is_file()
    assert environment["A"] == "1"
    assert environment["AMP_PATCH_OPT_LEVEL"] == "O2"
    again = environment_of_run(environment, None)
    assert again == environment


def test_a_real_apex_with_amp_is_used_and_said_to_be_and_force_takes_its_place(
    tmp_path: Path,
) -> None:
    amp = tmp_path / "installed/apex/amp"
    amp.mkdir(parents=True)
    (amp.parent / "__init__.py").touch()
    (amp / "__init__.py").write_text("origin = 'real'\n")
    script = tmp_path / "train.py"
    script.write_text("from apex import amp; print(getattr(amp, 'origin', amp.__name__))\n")
    paths = f"{tmp_path / 'installed'}:{ROOT}"
    found = run([*RUN, "--opt-level", "O2", script], fork=True, PYTHONPATH=paths)
    assert found.stdout == "real\n"
    assert f"the script uses the apex.amp in {amp.parent}, which --opt-level" in found.stderr
    forced = run([*RUN, "--force", script], fork=True, PYTHONPATH=paths)
    assert (forced.stdout, forced.stderr) == ("apex.amp\n", "")
    assert run([*RUN, script]).stderr == ""


def test_a_rules_file_is_found_from_wherever_the_script_goes(tmp_path: Path) -> None:
    rules, elsewhere = tmp_path / "rules.toml", tmp_path / "elsewhere"
    elsewhere.mkdir()
    rules.write_text("")
    path = tmp_path / "train.py"
    path.write_text("import os; os.chdir('elsewhere'); print(os.environ['AMP_PATCH_RULES'])")
    found = run([*RUN, "--rules", "rules.toml", path], cwd=tmp_path, fork=True)
    assert found.stdout == f"{rules}\n", found.stderr


def test_the_name_of_a_profile_is_no_path() -> None:
    assert environment_of_run({}, None, rules="fast-norms")["AMP_PATCH_RULES"] == "fast-norms"


def test_a_rules_file_that_is_missing_is_told_in_one_line(tmp_path: Path) -> None:
    found = run([*RUN, "--rules", "none.toml", "train.py"], cwd=tmp_path, fork=True)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)


APEX = """
import torch
from apex import amp
from torch.nn import functional as F

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32=True)
x = torch.ones(2, 4)
print(model[0](x).dtype, model(x).dtype, F.softmax(x.bfloat16(), 0).dtype, F.relu(x).dtype)
"""


def test_a_script_of_apex_trains_by_a_rules_file(tmp_path: Path) -> None:
    path, rules = tmp_path / "train.py", tmp_path / "rules.toml"
    path.write_text(APEX)
    rules.write_text('opt_level = "O4"\n[functions]\nsoftmax = "half"\n[modules]\n"1" = "float"')
    env = environment_of_run(os.environ, None, rules=str(rules))
    found = processes.run([sys.executable, path], env=env)
    lines = found.stdout.splitlines()
    assert "opt_level O2 of the script is run as O4" in found.stderr
    dtypes = ["bfloat16", "float32", "bfloat16", "float32"]
    assert lines[-1] == " ".join(f"torch.{dtype}" for dtype in dtypes)


# --- a script that never calls amp ---

NEVER = re.compile(
    r"never called amp.initialize\(\), so that (--opt-level O2|amp-patch run) had no effect"
)
MAKES_AN_OPTIMIZER = """
import torch
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
"""
USES_AMP = """
import torch
from apex import amp
model = torch.nn.Linear(2, 2)
amp.initialize(model, verbosity=0)
"""


@pytest.mark.parametrize(
    ("program", "options", "is_said"),
    [
        ("import json", ["--opt-level", "O2"], True),
        ("import json", [], False),
        (MAKES_AN_OPTIMIZER, [], True),
        ("raise SystemExit(3)", ["--opt-level", "O2"], True),
        ("1 / 0", ["--opt-level", "O2"], False),
        ("import os; os.fork() or os._exit(0)", ["--opt-level", "O2"], True),
    ],
)  # fmt: skip
def test_a_script_that_never_calls_amp_is_told_so(
    tmp_path: Path, program: str, options: list[str], is_said: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(program)
    found = run([*RUN, *options, script], fork=True)
    assert len(NEVER.findall(found.stderr)) == is_said
    assert ("amp-patch: " in found.stderr) is is_said
    assert not NEVER.search(found.stdout)


#: What makes a fork, which has imported torch, the process that ``amp-patch run`` has become.
AS_THE_SCRIPT = """
import os
from amp_patch.apex import unused
os.environ[unused.SCRIPT] = str(os.getpid())
unused.watch()
"""


@pytest.mark.parametrize(
    ("program", "level", "is_said"),
    [
        ("import torch", None, False),
        (MAKES_AN_OPTIMIZER, None, True),
        ("import apex" + MAKES_AN_OPTIMIZER, None, False),
        ("from amp_patch import amp" + MAKES_AN_OPTIMIZER, None, False),
        ("import torch", "O2", True),
        (USES_AMP + "import amp_patch.amp as a; a.deactivate()", "O2", False),
    ],
)
def test_a_script_that_trains_without_amp_is_told_so(
    program: str, level: str | None, is_said: bool
) -> None:
    environment = environment_of_run({"PYTHONPATH": str(ROOT)}, level)
    found = run([sys.executable, "-c", AS_THE_SCRIPT + program], fork=True, **environment)
    assert found.returncode == 0, found.stderr
    assert len(NEVER.findall(found.stderr)) == is_said
