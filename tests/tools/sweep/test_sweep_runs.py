"""Runs of scripts: their order, how they end, what is kept; with scripts that import no torch."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest

from amp_patch.tools import launch, untrained
from amp_patch.tools.errors import BadArguments
from amp_patch.tools.sweep import files, outcomes, runs
from amp_patch.tools.sweep.comparison import compared
from amp_patch.tools.sweep.outcomes import Outcome, Run
from amp_patch.tools.sweep.recommendation import recommend
from amp_patch.tools.sweep.runs import Runner
from amp_patch.tools.sweep.settings import Settings
from amp_patch.tools.sweep.steps import Folder, Recording, Step

# stands for a training script with a recorder in it
PRELUDE = """
    import json, os, sys, time
    options = json.loads(os.environ["AMP_PATCH_TOOL_OPTIONS"])
    level, seed = os.environ["AMP_PATCH_OPT_LEVEL"], options["seed"]
    file = open(os.path.join(options["out"], "steps-rank0.jsonl"), "w")
    def write(line):
        print(json.dumps(line), file=file, flush=True)
    write({"about": {"device": "none"}})
    for step in range(4):
        write({"seconds": 1.0, "losses": [2.0 - seed], "scales": {"0": 1.0}})
"""
#: Notes so many steps without amp, and lives so long after that.
NOTED = """
os.chdir(options["out"])
open("whole", "w").write("{}")
os.replace("whole", "without-amp")
time.sleep({})
"""


class Watcher:
    """Notes what it is told of."""

    def __init__(self, act=lambda run: None) -> None:
        self.told: list[str] = []
        self._act = act

    def began(self, run: Run) -> None:
        self.told.append(f"{run.level} {run.round}")

    def goes_on(self, run: Run, recording: Recording | None) -> None:
        if recording is not None and len(recording.steps) == 4:
            self._act(run)

    def note(self, line: str) -> None:
        self.told.append(line)

    def ended(self, run: Run) -> None:
        self.told.append(run.outcome.kind)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(runs, "PAUSE", 0.02)
    monkeypatch.setattr(launch, "GRACE", 0.2)


def runner(folder: Path, ending: str, view: Watcher | None = None, **options) -> Runner:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(ending))
    options.setdefault("levels", ["O0"])
    command = [sys.executable, str(script)]
    return Runner(Settings(["script.py"], **options), command, folder, view or Watcher())


def test_rounds_run_over_all_levels_each_with_its_seed(tmp_path: Path) -> None:
    view = Watcher()
    one = runner(tmp_path, "", view, levels=["O0", "O4"], repeat=2, seed=1)
    found = one.run()
    assert view.told[::2] == ["O0 1", "O4 1", "O0 2", "O4 2"]
    assert [(run.level, run.round, run.final_loss) for run in found] == [
        ("O0", 1, 1.0),
        ("O4", 1, 1.0),
        ("O0", 2, 0.0),
        ("O4", 2, 0.0),
    ]
    assert {run.outcome.kind for run in found} == {"finished"}
    assert found[0].about == {"device": "none"}


def test_after_the_largest_seed_that_numpy_takes_comes_the_smallest() -> None:
    settings = Settings(["train.py"], ["O1"], repeat=2, seed=2**32 - 1)
    assert [runs.seed_of(settings, Run("O1", round_)) for round_ in (1, 2)] == [2**32 - 1, 0]


@pytest.mark.parametrize(
    ("losses", "skipped", "final"),
    [
        ([3.0, 2.0, 1.0], (), 1.0),
        ([3.0, 2.0, math.nan], (2,), 2.0),
        ([3.0, 2.0, math.inf], (), math.inf),
        ([3.0, 2.0, 1.0], (2,), 1.0),
        ([math.inf, math.inf], (0, 1), math.inf),
    ],
)
def test_a_loss_of_a_skipped_step_counts_where_it_is_finite(
    losses: list[float], skipped: tuple[int, ...], final: float
) -> None:
    steps = [Step(losses=[loss], skipped=i in skipped) for i, loss in enumerate(losses)]
    assert Run("O1", 1, steps=steps).final_loss == final


def test_a_run_that_takes_too_long_is_ended_and_keeps_its_steps(tmp_path: Path) -> None:
    start = time.monotonic()
    (run,) = runner(tmp_path, "time.sleep(60)", timeout=0.5).run()
    assert run.outcome == Outcome("timed out", "it was stopped after 0.5 s")
    assert time.monotonic() - start < 30
    assert len(run.steps) in (0, 4)  # Python itself may need the half second


def test_a_script_that_made_its_steps_and_stays_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "LEAVE", 0.1)
    (run,) = runner(tmp_path, "write({'done': 4})\ntime.sleep(60)", steps=4).run()
    assert (run.outcome.kind, len(run.steps)) == ("finished", 4)


def test_a_crash_is_told_by_its_last_line_and_the_next_level_runs(tmp_path: Path) -> None:
    ending = "if level == 'O0': raise ValueError('too small')"
    crashed, other = runner(tmp_path, ending, levels=["O0", "O4"]).run()
    reason = f"ValueError: too small ({tmp_path / 'script.py'}, line 11)"
    assert crashed.outcome == Outcome("crashed", reason)
    assert len(crashed.steps) == 4
    assert other.outcome.kind == "finished"


def test_a_signal_ends_the_script_and_the_sweep(tmp_path: Path) -> None:
    def interrupt(run: Run) -> None:
        if run.level == "O4":
            raise launch.Interrupted(signal.SIGTERM)

    ending = "if level == 'O4': time.sleep(60)"
    one = runner(tmp_path, ending, Watcher(interrupt), levels=["O0", "O4", "O5"])
    found = one.run()
    assert [run.outcome.kind for run in found] == ["finished", "interrupted", "not run"]
    assert len(found[1].steps) == 4
    assert one.interrupted == 128 + signal.SIGTERM


def test_a_script_that_does_not_train_is_run_at_one_level_only(tmp_path: Path) -> None:
    one = runner(tmp_path, "", levels=["O0", "O4"], repeat=2)
    (tmp_path / "script.py").write_text("print('no amp here')")
    found = one.run()
    assert [run.outcome.kind for run in found] == ["no steps", *["not run"] * 3]
    assert "imported neither amp_patch nor apex" in found[0].outcome.reason
    assert one.is_futile
    assert not one.interrupted


def test_a_script_that_has_not_begun_with_amp_is_told_of_while_it_runs(tmp_path: Path) -> None:
    view = Watcher()
    runner(tmp_path, NOTED.format(20, 0.3), view).run()
    assert list(dict.fromkeys(view.told)) == ["O0 1", untrained.notice(20), "finished"]


def test_a_script_that_goes_on_without_amp_is_ended_and_run_at_no_other_level(tmp_path) -> None:
    one = runner(tmp_path, "", levels=["O0", "O4"])
    body = textwrap.dedent(PRELUDE).partition("file =")[0] + NOTED.format(200, 60)
    (tmp_path / "script.py").write_text(body)
    found = one.run()
    assert [run.outcome for run in found] == [
        Outcome("no steps", untrained.reason_after(200)),
        Outcome("not run"),
    ]
    assert one.is_futile


def test_a_level_without_steps_after_one_that_trained_does_not_end_the_sweep(tmp_path) -> None:
    one = runner(tmp_path, "", levels=["O0", "O4", "O5"])
    body = textwrap.dedent(PRELUDE).replace("range(4)", "range(4 * (level != 'O4'))")
    (tmp_path / "script.py").write_text(body + "write({'end': 'yes'})")
    found = one.run()
    assert [run.outcome.kind for run in found] == ["finished", "no steps", "finished"]
    assert not one.is_futile


def test_words_of_the_script_name_the_level_and_the_run(tmp_path: Path) -> None:
    one = runner(tmp_path, "print(sys.argv[1:])", levels=["O0", "O4"], repeat=2)
    one.command = [*one.command, "--out={run}", "x/{level}.pt", "{other}"]
    one.run()
    printed = {path.parent.name: path.read_text() for path in tmp_path.glob("runs/*/log.txt")}
    assert len(printed) == 4
    assert printed["O4-round2"] == "['--out=O4-round2', 'x/O4.pt', '{other}']\n"


def saved(folder: Path, one: Runner, found: list[Run]) -> None:
    comparison = compared(found, 0.05)
    files.save(folder, one.settings, "then", found, comparison, recommend(comparison))


def test_what_is_finished_is_kept_when_a_sweep_goes_on(tmp_path: Path) -> None:
    ending = "if level == 'O1' and not os.path.exists(options['out'] + '/../../mended'): 1 / 0"
    one = runner(tmp_path, ending, levels=["O0", "O1"])
    found = one.run()
    saved(tmp_path, one, found)
    (tmp_path / "mended").touch()
    settings, started, kept = files.load(tmp_path)
    assert (settings, started) == (one.settings, "then")
    assert [(run.level, run.outcome.kind) for run in kept] == [("O0", "finished")]
    assert kept[0].steps == found[0].steps
    view = Watcher()
    again = runner(tmp_path, ending, view, levels=["O0", "O1"]).run(kept)
    assert view.told == ["finished", "O1 1", "finished"]
    assert again[0] is kept[0]
    assert len(again[1].steps) == 4


def test_after_each_run_all_is_told(tmp_path: Path) -> None:
    one = runner(tmp_path, "", levels=["O0", "O4"])
    told = []
    one.on_ended = lambda found: told.append([run.outcome.kind for run in found])
    one.run()
    assert told == [["finished", "not run"], ["finished", "finished"]]


def test_a_run_whose_recording_is_gone_is_made_anew_and_a_damaged_line_is_left_out(
    tmp_path: Path,
) -> None:
    one = runner(tmp_path, "", levels=["O0", "O1"])
    found = one.run()
    saved(tmp_path, one, found)
    shutil.rmtree(tmp_path / "runs" / "O1-round1")
    with next((tmp_path / "runs" / "O0-round1").glob("steps-*")).open("a") as file:
        file.write('{"seconds": 0.{"end": "yes"}\n')
    _, _, kept = files.load(tmp_path)
    assert [(run.level, run.steps) for run in kept] == [("O0", found[0].steps)]


@pytest.mark.parametrize(
    "content",
    [None, "no json", '{"schema": 0}', "[]", '{"schema": 1}', '{"schema": 1, "runs": [{}]}']
    + ['{"schema": 1, "runs": [], "started": "", "settings": {"stepz": 1}}'],
)
def test_a_folder_without_a_sweep_cannot_go_on(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(BadArguments, match="to go on in must hold a sweep|must be of schema 1"):
        files.load(tmp_path)


@pytest.mark.parametrize("name", ["steps", "seed", "command"])
def test_what_makes_runs_comparable_cannot_change(name: str) -> None:
    settings = Settings(["train.py"], steps=10, seed=1)
    same = {"steps": 10, "seed": 1, "command": ["train.py"]}
    assert settings.resumed(same) == settings
    assert settings.resumed({"repeat": 3, "levels": ["O5"]}).runs[-1] == (3, "O5")
    with pytest.raises(BadArguments, match=f"keep its {name}"):
        settings.resumed({name: ["other.py"] if name == "command" else 2})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"levels": ["O4"]}, ["O0", "O1", "O4"]),
        ({"levels": ["O2", "O1", "O4"]}, ["O0", "O1", "O2", "O4"]),
        ({"repeat": 1}, ["O0", "O1", "O2"]),
    ],
)
def test_a_sweep_that_goes_on_keeps_what_has_finished(given, expected: list[str]) -> None:
    """`--levels O4` adds a level to those of a sweep; one that has no run yet may be left out."""
    settings = Settings(["train.py"], levels=["O0", "O1", "O2"], repeat=3)
    resumed = settings.resumed(given, done=[(1, "O0"), (1, "O1"), (2, "O0")])
    assert (resumed.levels, resumed.repeat) == (expected, 2 if "repeat" in given else 3)


PACKAGES = sysconfig.get_path("purelib")


@pytest.mark.parametrize(
    ("printed", "code", "reason"),
    [
        (b"a\nValueError: no\n", 1, "ValueError: no"),
        (b"[rank1]: torch.OutOfMemoryError: full\nChildFailedError:\n====\n", 1,
         "torch.OutOfMemoryError: full"),
        (b"usage: x\nx.py: error: unknown --lr\n", 2, "x.py: error: unknown --lr"),
        (b"\x1b[31mRuntimeError: red\x1b[0m\n", 1, "RuntimeError: red"),
        (b"\xff\xfe\x00\x01\n\n", 1, "exit code 1, and nothing was printed"),
        (b"", 3, "exit code 3, and nothing was printed"),
        (b"FileNotFoundError: no cache, made anew\nquality not met\n", 3,
         "exit code 3, and the last line was: quality not met"),
        (b"ValueError: caught\nTraceback (most recent call last):\n  File 'x'\n    raise it\n"
         b"QuotaHit: first\nsecond line: of it\n", 1, "QuotaHit: first"),
        (b"[rank1]: Traceback (most recent call last):\n[rank1]:   File 'x'\n"
         b"[rank1]: x.Full: no\nTraceback (most recent call last):\n  File 'run'\n"
         b"torch.ChildFailedError: \n", 1, "x.Full: no"),
        (b'  File "a b.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n', 1,
         "SyntaxError: invalid syntax (a b.py, line 2)"),
        (b'[rank1]: Traceback (most recent call last):\n[rank1]:   File "t.py", line 3\n'
         b'[rank1]:   File "m.py", line 9\n[rank1]:     x\n[rank1]: IndentationError: dedent\n', 1,
         "IndentationError: dedent (m.py, line 9)"),
        (b"  + Exception Group Traceback (most recent call last):\n  |   File 'x'\n"
         b"  | ExceptionGroup: all of it (1 sub-exception)\n  +-+------- 1 -------\n"
         b"    | KeyError: 'b'\n    +-------\n", 1, "ExceptionGroup: all of it (1 sub-exception)"),
        (b"fine\n", -9, "ended by SIGKILL (out of memory?)"),
        (b"fine\n", -6, "ended by SIGABRT"),
        (b"E" * 900 + b"\n", 2, "E" * 597 + "..."),
        (b"no data\n", 1, "exit code 1, and the last line was: no data"),
        (b'Traceback (most recent call last):\n  File "/p/train.py", line 7, in <module>\n'
         b'    main()\n  File "/p/model.py", line 3, in f\n    torch.mm(a, b)\n'
         b'  File "%s", line 20, in mm\n    raise x\nRuntimeError: half\n'
         b"amp_patch: call it\nall is saved\n" % f"{PACKAGES}/torch/x.py".encode(), 1,
         "RuntimeError: half (/p/model.py, line 3); amp_patch: call it"),
        (b'Traceback (most recent call last):\n  File "/p/train.py", line 7, in <module>\n'
         b"    f()\nKeyError: 'a'\n\nDuring handling of the above exception, another exception "
         b'occurred:\n\nTraceback (most recent call last):\n  File "<frozen runpy>", line 2, in r\n'
         b'  File "%s", line 20, in g\nOSError: b\n' % json.__file__.encode(), 1, "OSError: b"),
        (b"amp_patch: level\nE.Error: no\namp_patch: call it\nA.Error: half\n  x\n"
         b"amp_patch: call model(x)\namp_patch: call model(x)\n", 1,
         "A.Error: half; amp_patch: call model(x)"),
        (b"Go on? Traceback (most recent call last):\n  File 'x'\nEOFError: EOF\n", 1,
         "EOFError: EOF; a script that is run by amp-patch cannot ask: give it the answer as an "
         "argument"),
        (b"[rank0]: RuntimeError: half\n[rank0]: amp_patch: call it\n", 1,
         "RuntimeError: half; amp_patch: call it"),
    ],
)  # fmt: skip
def test_the_reason_of_a_crash_is_one_plain_line(
    tmp_path: Path, printed: bytes, code: int, reason: str
) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(printed)
    assert outcomes.outcome_of(code, log, None) == Outcome("crashed", reason)


@pytest.mark.parametrize(
    ("recording", "reason"),
    [
        (None, "imported neither amp_patch nor apex"),
        (Recording(initialized="no"), "never called amp.initialize"),
        (Recording(initialized="disabled"), "enabled=False"),
        (Recording(initialized="yes"), "no optimizer"),
    ],
)
def test_a_script_without_steps_is_told_why(tmp_path: Path, recording, reason: str) -> None:
    (tmp_path / "log.txt").touch()
    outcome = outcomes.outcome_of(0, tmp_path / "log.txt", recording)
    assert outcome.kind == "no steps"
    assert reason in outcome.reason


def test_of_several_processes_of_a_rank_the_one_that_trained_counts(tmp_path: Path) -> None:
    step = json.dumps({"seconds": 1.0}) + "\n"
    (tmp_path / "steps-rank0.jsonl").write_text('{"end": "no"}\n')
    (tmp_path / "steps-rank0-2.jsonl").write_text(step * 3 + '{"seco')
    (tmp_path / "steps-rank1.jsonl").write_text(step)
    folder = Folder(tmp_path)
    assert {rank: len(one.steps) for rank, one in folder.read().items()} == {0: 3, 1: 1}
    with (tmp_path / "steps-rank0-2.jsonl").open("a") as file:
        file.write('nds": 2.0}\n')
    assert [step.seconds for step in folder.read()[0].steps] == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("names", [("", "-2", "-3"), ("-3", "", "-2"), ("-2", "-3", "")])
def test_of_several_processes_the_same_one_is_shown_whichever_came_first(tmp_path, names) -> None:
    """Folds of a cross-validation in a pool: levels are compared by the losses of one of them."""
    for name, loss in zip(names, (float("nan"), 0.7, 0.6), strict=True):
        lines = [json.dumps({"losses": [loss - step / 10]}) for step in range(3)]
        (tmp_path / f"steps-rank0{name}.jsonl").write_text("\n".join([*lines, ""]))
    assert Folder(tmp_path).read()[0].steps[0].losses == [0.6]
