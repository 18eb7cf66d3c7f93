"""tests/gpu.sh runs its steps in order and keeps what it has, whatever becomes of them.

A stand-in for Python says what it was called with, and does what the test tells it.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu.sh")
STEPS = [
    *("machine", "kernels", "benchmark", "steps", "others"),
    *(f"sanitizer-{tool}" for tool in ("memcheck", "racecheck", "initcheck", "synccheck")),
]
# Does what BEHAVIOUR tells for a call that has all of these words: an exit code, "sleep" or "skip".
STAND_IN = """#!/bin/sh
echo "called: $*"
echo "$*" | tr "\\n" " " >> "$CALLS"; echo >> "$CALLS"
while read -r what words; do
    case "$*" in
        *${words:-nothing}*)
            [ "$what" = sleep ] && echo $$ > "$CALLS.pid" && exec sleep 60
            [ "$what" = skip ] && echo "== 3 skipped, 5 deselected in 0.1s ==" && exit
            exit "$what" ;;
    esac
done <<END
$BEHAVIOUR
END
echo "the last line"
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bash, timeout(1)")


class Script:
    """Runs gpu.sh with the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.out, self._calls = folder / "out", folder / "calls"
        self._python = folder / "python"
        self._python.write_text(STAND_IN)
        self._python.chmod(0o755)

    def start(self, *steps: str, behaviour: str = "", seconds: int = 60) -> subprocess.Popen[str]:
        own = {
            "PYTHON": str(self._python),
            "CALLS": str(self._calls),
            "BEHAVIOUR": behaviour,
            "STEP_SECONDS": str(seconds),
        }
        return subprocess.Popen(
            ["bash", str(SCRIPT), str(self.out), *steps],
            cwd=self._python.parent,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *steps: str, behaviour: str = "", seconds: int = 60) -> int:
        with self.start(*steps, behaviour=behaviour, seconds=seconds) as process:
            self.printed, self.errors = process.communicate(timeout=50)
        return process.returncode

    def sleeper(self) -> int:
        """Wait for the stand-in to sleep; return its process."""
        file = self._calls.with_suffix(".pid")
        deadline = time.monotonic() + 40
        while not (file.exists() and file.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return int(file.read_text())

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    def summary(self) -> dict[str, str]:
        """Return what is said of each step, without the seconds that it took."""
        text = re.sub(r" +\d+ s  ", ": ", (self.out / "summary.txt").read_text())
        return {name: " ".join(rest) for name, *rest in map(str.split, text.splitlines())}

    def log(self, name: str) -> str:
        return (self.out / f"{name}.log").read_text()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_all_steps_run_in_the_order_that_tells_most_first(script: Script) -> None:
    assert script.run() == 0, script.errors
    parts = ["import", "tests/kernels", "benchmarks/kernels.py", "benchmarks/step.py"]
    parts += ["tests --ignore tests/kernels", "-k memcheck", "-k racecheck"]
    parts += ["-k initcheck", "-k synccheck"]
    assert len(script.calls()) == len(parts)
    assert all(part in call for part, call in zip(parts, script.calls(), strict=True))
    assert list(script.summary()) == STEPS
    assert all(line == "passed: the last line" for line in script.summary().values())
    assert [line.partition(":")[0] for line in script.printed.splitlines()] == STEPS
    files = {path.name for path in script.out.iterdir()}
    logs = ("kernels", "benchmark", "others", "sanitizer")
    assert files == {"summary.txt", *(f"{name}.log" for name in logs)}
    assert len(files) + 3 <= 8  # the benchmarks write three
    assert script.log("sanitizer").count("the last line") == 4
    assert script.log("benchmark").count("the last line") == 3
    for name in ("kernels.py", "step.py"):
        assert f"{name} --out {script.out}" in script.log("benchmark")


@pytest.mark.parametrize(("seconds", "minutes"), [(480, 7), (600, 9), (30, 0)])
def test_the_steps_that_are_measured_end_before_the_limit(
    script: Script, seconds: int, minutes: int
) -> None:
    assert script.run("steps", seconds=seconds) == 0
    (call,) = script.calls()
    assert call.split() == [
        *("tests/benchmarks/step.py", "--out", str(script.out), "--minutes", str(minutes)),
    ]


def test_a_step_that_fails_stops_no_other_and_is_the_exit_code(script: Script) -> None:
    assert script.run(behaviour="3 tests/kernels --ignore\n1 benchmarks/kernels") == 1
    said = {name: line.partition(":")[0] for name, line in script.summary().items()}
    expected = dict.fromkeys(STEPS, "passed")
    assert said == expected | {"kernels": "exit code 3", "benchmark": "exit code 1"}
    assert "called: -m pytest -m gpu" in script.log("kernels")
    assert script.log("kernels").endswith("=== kernels: exit code 3\n")


def test_a_step_whose_tests_are_all_skipped_has_not_passed(script: Script) -> None:
    assert script.run("kernels", behaviour="skip tests/kernels") == 1
    assert script.summary()["kernels"].startswith("all skipped: == 3 skipped")


def test_a_step_that_takes_too_long_is_stopped(script: Script) -> None:
    assert script.run("kernels", "benchmark", behaviour="sleep tests/kernels", seconds=1) == 1
    summary = script.summary()
    assert summary["kernels"].startswith("timed out")
    assert summary["benchmark"].startswith("passed")
    assert summary["others"] == "not run"


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "running"), (signal.SIGTERM, "cut off")]
)
def test_what_is_there_is_kept_when_the_script_is_stopped(
    script: Script, number: signal.Signals, said: str
) -> None:
    with script.start(behaviour="sleep benchmarks") as process:
        sleeper = script.sleeper()
        os.kill(process.pid, number)
        assert process.wait(timeout=40) != 0
        if number is signal.SIGKILL:  # else the script ends what it has started
            os.kill(sleeper, number)
    summary = script.summary()
    assert summary["kernels"] == "passed: the last line"
    assert summary["benchmark"] == said
    assert summary["others"] == "not run"
    assert "the last line" in script.log("kernels")
    assert script.run("others") == 0
    assert script.summary() == summary | {
        "benchmark": "cut off",
        "others": "passed: the last line",
    }


def test_steps_can_be_chosen_and_what_others_left_is_kept(script: Script) -> None:
    assert script.run("sanitizer-racecheck", "machine", behaviour="7 racecheck") == 1
    assert ["racecheck" in call for call in script.calls()] == [True, False]
    assert script.run("benchmark") == 0
    summary = script.summary()
    assert summary["sanitizer-racecheck"].startswith("exit code 7")
    assert [name for name, line in summary.items() if line.startswith("passed")] == [
        *("machine", "benchmark"),
    ]


@pytest.mark.parametrize("arguments", [(), ("tests",)])
def test_what_it_cannot_do_is_refused(script: Script, arguments: tuple[str, ...]) -> None:
    command = ["bash", str(SCRIPT), *([str(script.out)] if arguments else []), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    got = arguments[0] if arguments else "nothing"
    assert done.stderr == (
        f"usage: tests/gpu.sh FOLDER [STEP...]; the steps: {' '.join(STEPS)}; got {got}\n"
    )
