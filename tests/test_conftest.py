"""The fixtures of conftest.py do fail what they are there to fail."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import processes
import pytest

TESTS = Path(__file__).parent
LEAKS = {
    "torch.sin = lambda x: x": "torch.sin",
    "torch.Tensor.add = lambda *a: a": "Tensor.add",
    "torch.Tensor.__pow__ = lambda *a: a": "Tensor.__pow__",
    "bound_name = lambda *a: a": "test_leaks.bound_name",
    "register_optimizer_step_post_hook(print)": "a global hook of torch.optim or torch.nn",
    "torch.backends.mha.set_fastpath_enabled(False)": "torch.backends.mha.set_fastpath_enabled",
}


@pytest.fixture
def run_tests(pytester: pytest.Pytester):
    """Run a test file under this project's conftest, in a process of its own."""
    for name in ("conftest.py", "support.py", "torch_snapshot.py"):
        pytester.path.joinpath(name).write_text((TESTS / name).read_text())
    pytester.path.joinpath("costly.txt").write_text("test_few.py::test_costly\n")
    pytester.makeini(
        "[pytest]\nmarkers =\n  gpu: needs a CUDA device\n  slow: nightly\n"
        "addopts = -s -m 'not slow'\n"
    )

    def run(**sources: str) -> pytest.RunResult:
        pytester.makepyfile(**sources)
        command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider"]
        done = processes.run(command, cwd=pytester.path)
        out, err = done.stdout.splitlines(), done.stderr.splitlines()
        return pytest.RunResult(done.returncode, out, err, duration=0)

    return run


def test_a_test_that_leaves_torch_patched_fails_and_the_next_finds_it_mended(run_tests) -> None:
    header = """\
import torch
from torch.nn.functional import linear as bound_name
from torch.optim.optimizer import register_optimizer_step_post_hook
"""
    tests = [
        f"def test_{i}():\n    global bound_name\n    {leak}\n" for i, leak in enumerate(LEAKS)
    ]
    mode = "def test_mode():\n    torch.overrides.TorchFunctionMode().__enter__()\n"
    result = run_tests(test_leaks="\n".join([header, *tests, mode]))
    result.assert_outcomes(passed=len(LEAKS) + 1, errors=len(LEAKS) + 1)
    assert any(line.startswith("the test left open: [") for line in result.outlines)
    left_patched = [line for line in result.outlines if line.startswith("the test left torch")]
    assert left_patched == [f"the test left torch patched: {name}" for name in LEAKS.values()]


@pytest.mark.parametrize(
    ("profile", "number"), [(None, 12), pytest.param("nightly", 400, marks=pytest.mark.slow)]
)
def test_a_test_that_patches_nothing_passes_and_properties_draw_what_the_profile_says(
    run_tests, monkeypatch: pytest.MonkeyPatch, profile: str | None, number: int
) -> None:
    monkeypatch.delenv("HYPOTHESIS_PROFILE", raising=False)
    if profile is not None:
        monkeypatch.setenv("HYPOTHESIS_PROFILE", profile)
    result = run_tests(
        test_nothing_patched=f"""
        import torch
        from hypothesis import given, strategies as st
        from support import examples, trains

        drawn = {{"profile's": [], "thrice": [], "trains": []}}

        def test_training(device):
            model = torch.nn.Linear(2, 2).to(device)
            optimizer = torch.optim.Adam(model.parameters())
            x = torch.zeros(1, 2, device=device)
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
            optimizer.step()
            torch.compile(model, backend="eager")(x)

        @given(st.integers())
        def test_property(number):
            drawn["profile's"].append(number)

        @examples(3)
        @given(st.integers())
        def test_often(number):
            drawn["thrice"].append(number)

        @trains()
        @given(st.integers())
        def test_training_property(number):
            drawn["trains"].append(number)

        def test_enough():
            found = [len(numbers) for numbers in drawn.values()]
            assert found == [{number}, 3 * {number}, {number} // 4]
        """
    )
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] + outcomes.get("skipped", 0) == 6, result.outlines
    assert outcomes.keys().isdisjoint({"failed", "errors"})


def test_levels_that_do_what_others_do_are_left_to_the_nightly_run(run_tests) -> None:
    tests = """
        import pytest

        @pytest.mark.parametrize("level", ["O0", "O1", "O4"])
        @pytest.mark.parametrize("other", [object(), object()])
        def test_at_each(level, other):
            print(f"at {level}.")

        @pytest.mark.parametrize("level", ["O3", "O4"])
        def test_at_these_alone(level):
            print(f"alone {level}.")

        @pytest.mark.parametrize("level", ["O1", "O2", "O5"])
        @pytest.mark.parametrize("other", [object(), object(), object()])
        def test_in_turn(level, other):
            print(f"in turn {level}.")

        @pytest.mark.parametrize("level", ["O1", "O2", "O5"])
        @pytest.mark.parametrize("other", [object(), object(), object(), object()])
        def test_of_many(level, other):
            print(f"many {level}.")

        @pytest.mark.parametrize("level", ["O2", "O5"])
        def test_of_one_case(level):
            print(f"one case {level}.")

        @pytest.mark.parametrize("level", ["O2", "O5"])
        def test_of_another_case(level):
            print(f"another {level}.")

        @pytest.mark.parametrize("level", ["O1", "O5"])
        @pytest.mark.parametrize("other", [object(), object()])
        def test_costly(level, other):
            print(f"costly {level}.")
    """
    lone = """
        import pytest

        @pytest.mark.parametrize("level", ["O2", "O5"])
        def test_alone_in_its_file(level):
            print(f"lone {level}.")
    """
    every = "EVERY_LEVEL = True\n" + textwrap.dedent(tests)
    result = run_tests(test_few=tests, test_all=every, test_lone=lone)
    names = "at|alone|in turn|many|one case|another|costly|lone"
    printed = Counter(re.findall(rf"({names}) (O\d)\.", "\n".join(result.outlines)))
    assert printed == {
        # in the one file what is left of the cases, in the other all
        ("at", "O0"): 2, ("at", "O1"): 2 + 2, ("at", "O4"): 2,
        ("alone", "O3"): 1 + 1, ("alone", "O4"): 1 + 1,
        ("in turn", "O1"): 3 + 3, ("in turn", "O2"): 2 + 3, ("in turn", "O5"): 1 + 3,
        ("many", "O1"): 2 + 4, ("many", "O2"): 1 + 4, ("many", "O5"): 1 + 4,
        ("one case", "O2"): 1 + 1, ("one case", "O5"): 1,
        ("another", "O2"): 1, ("another", "O5"): 1 + 1,
        ("costly", "O1"): 1 + 2, ("costly", "O5"): 1 + 2,
        ("lone", "O2"): 1, ("lone", "O5"): 1,
    }  # fmt: skip


def test_a_test_that_only_the_nightly_run_makes_says_what_the_ordinary_run_has_instead() -> None:
    """Not one of several cases, which stands beside the others."""
    bare = [
        f"{file.name}: {node.name}"
        for file in Path(__file__).parent.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and "pytest.mark.slow" in map(ast.unparse, node.decorator_list)
    ]
    assert bare == []


def test_the_costly_tests_are_there() -> None:
    for name in (TESTS / "costly.txt").read_text().split():
        path, _, test = name.partition("::")
        assert f"def {test}(" in (TESTS.parent / path).read_text(), name


def test_the_files_are_in_order_before_pytest_randomly_draws_one(
    pytestconfig: pytest.Config,
) -> None:
    hook = pytestconfig.hook.pytest_collection_modifyitems
    called = [str(one.plugin_name) for one in reversed(hook.get_hookimpls())]
    if "randomly" not in called:
        pytest.skip("pytest-randomly is missing")
    assert called.index(str(TESTS / "conftest.py")) < called.index("randomly")


def test_an_import_that_changes_how_often_properties_are_drawn_is_an_error(run_tests) -> None:
    result = run_tests(
        test_drawn="""
        import hypothesis
        hypothesis.settings.register_profile("theirs", max_examples=10)
        hypothesis.settings.load_profile("theirs")

        def test():
            pass
        """
    )
    assert "got 10 examples, of another profile" in "\n".join([*result.outlines, *result.errlines])
    assert result.ret != 0


# what ``import cupy`` does
CUPY = {
    "missing": "raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')",
    "there": "",
    "warns": "import warnings; warnings.warn('old', DeprecationWarning)",
    "broken": "raise ImportError('libcuda.so.1: cannot open shared object file')",
}


@pytest.fixture
def run_on_gpu(run_tests, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run a test as on a machine with a GPU; warnings are errors, as in this project."""

    def run(cupy: str, *tests: str) -> pytest.RunResult:
        monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
        pytester.makepyfile(cupy=CUPY[cupy])
        pytester.makepyfile(like_a_gpu="import torch\ntorch.cuda.is_available = lambda: True\n")
        pytester.makeini(
            "[pytest]\nmarkers = gpu: needs a CUDA device\naddopts = -ra -m gpu -p like_a_gpu\n"
            "filterwarnings = error\n"
        )
        mark = "import os, pytest\npytestmark = pytest.mark.gpu"
        functions = [f"def test_{i}():\n    {test}\n" for i, test in enumerate(tests)]
        return run_tests(test_kernels="\n".join([mark, *functions]))

    return run


@pytest.mark.parametrize(
    ("cupy", "chosen", "expected", "outcome", "said"),
    [
        ("missing", None, "torch", "skipped", "could not import 'cupy'"),
        pytest.param(
            *("missing", "cupy", "cupy", "skipped", "could not import 'cupy'"),
            marks=pytest.mark.slow,
        ),
        pytest.param("there", None, None, "passed", "2 passed", marks=pytest.mark.slow),
        pytest.param("warns", None, None, "passed", "2 passed", marks=pytest.mark.slow),
        ("broken", None, "torch", "failed", "libcuda.so.1: cannot open shared object file"),
    ],
)
def test_on_a_gpu_torch_takes_the_place_of_a_cupy_of_which_only_its_tests_tell(
    run_on_gpu,
    monkeypatch: pytest.MonkeyPatch,
    cupy: str,
    chosen: str | None,
    expected: str | None,
    outcome: str,
    said: str,
) -> None:
    monkeypatch.delenv("AMP_PATCH_KERNELS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("AMP_PATCH_KERNELS", chosen)
    chooses = f"assert os.environ.get('AMP_PATCH_KERNELS') == {expected!r}"
    result = run_on_gpu(cupy, chooses, "pytest.importorskip('cupy')")
    result.assert_outcomes(**Counter(["passed", outcome]))
    result.stdout.fnmatch_lines(f"*{said}*")


@pytest.mark.parametrize(
    ("expression", "devices"),
    [
        ("not slow", ""),
        ("gpu", "5"),
        pytest.param("not gpu", "", marks=pytest.mark.slow),
        pytest.param("gpu and not slow", "5", marks=pytest.mark.slow),
    ],
)
def test_who_asks_for_no_gpu_sees_none(
    run_tests,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    expression: str,
    devices: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    markers = "markers =\n  gpu: needs a CUDA device\n  slow: nightly"
    pytester.makeini(f"[pytest]\n{markers}\naddopts = -m {expression!r}\n")
    # noted while it is collected, for here its tests are skipped
    run_tests(test_seen="import os\nopen('seen', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert pytester.path.joinpath("seen").read_text() == devices


@pytest.mark.slow(instead="such a package missing for a file of pytester's")
def test_gpu_tests_are_collected_where_other_tests_lack_their_packages(tmp_path: Path) -> None:
    """What is imported here is all that a machine with a GPU is asked to have."""
    missing = ("click", "expecttest", "mypy", "rich", "sklearn")
    (tmp_path / "lacks.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({missing}))\n"
    )
    plugins = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "lacks")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *plugins],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "expecttest is missing" in done.stdout
    found = re.search(r"^(\d+)/\d+ tests collected", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert int(found[1]) > 200


def test_a_file_that_needs_another_package_is_an_error(run_tests) -> None:
    run_tests(test_needs="import numpi").assert_outcomes(errors=1)
