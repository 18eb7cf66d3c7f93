"""Fixtures for all tests: torch left as it was found, devices, seeds, hypothesis's settings."""

import contextlib
import gc
import importlib
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# before torch is imported, and inherited by the processes that tests start
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
import torch_snapshot
from support import PROFILE, nightly_cases, nightly_levels
from torch import distributed
from torch.overrides import _get_current_function_mode_stack, _pop_mode

pytest_plugins = ["pytester"]

#: Names the tests that take longest, and have several cases: 25 ms each, and four, or more.
COSTLY = Path(__file__).with_name("costly.txt")

BEGINS_WITH_THE_LAST = os.environ.get("PYTEST_XDIST_WORKER", "").endswith(tuple("13579"))

# Packages of the extra "test" that a machine that lends its GPU may not have, and no test that is
# marked "gpu" needs.
ONLY_SOME_NEED = {"click", "cloudpickle", "expecttest", "matplotlib", "plotly", "rich", "sklearn"}
ONLY_SOME_NEED |= {"tensorboard", "dgl", "torch_geometric"}

# torch 2.11 and later warn, once, of sparse tensors that nobody said whether to check
torch.sparse.check_sparse_tensor_invariants.disable()

# see CONTRIBUTING.md; `support.examples` draws more or fewer than the profile says. The ordinary
# run draws the same each time, so that a red one is red again; the nightly one looks further.
for profile, examples in (("ordinary", 12), ("nightly", 400)):
    hypothesis.settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        derandomize=profile == "ordinary",
        print_blob=True,
    )
hypothesis.settings.load_profile(PROFILE)


def can_import_cupy() -> bool:
    """Import cupy here, once: what it warns of itself would be an error inside of a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("cupy")
        except Exception:  # whatever it is: a test that needs cupy runs into it, and shows it
            return False
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not for them: torch takes one by itself where it sees one.

    So it does in `fully_shard` and `nn.DataParallel`; and no forked process may use it.
    """
    if "gpu" not in config.getoption("markexpr").replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anybody asks CUDA
    elif torch.cuda.is_available() and not can_import_cupy():
        # else the one warning that tells of it is an error in whatever test comes first
        os.environ.setdefault("AMP_PATCH_KERNELS", "torch")
    spare_stacks_of_absent_devices()


# not pytest's option log_level: set six times a test, it makes Python forget what loggers cached
logging.getLogger().setLevel(logging.INFO)


def spare_stacks_of_absent_devices() -> None:
    """Have torch.manual_seed keep no call for a device that is not there.

    It keeps the formatted stack of each, thrice: of a test's deep stack this takes milliseconds.
    """
    for absent in (torch.cuda, torch.mtia, torch.xpu):
        if not absent.is_available():
            for module in (absent, getattr(absent, "random", absent)):
                module._lazy_call = lambda callable, **kwargs: None


# For a line of its log torch measures how long the guards of each compilation take, after a flush
# of the processor's caches: up to a tenth of the compilation of a small model.
dynamo_guards = sys.modules.get("torch._dynamo.guards")
if hasattr(dynamo_guards, "profile_guard_manager"):
    dynamo_guards.profile_guard_manager = lambda *args: 0.0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Let the garbage collector rest while the test files are imported, of which nothing goes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """Skip the test files that cannot be imported without one of these packages.

    Every second process of pytest-xdist begins with the last file, and comes to those that another
    one has compiled: that takes seconds where nothing is compiled yet.
    """
    report = yield
    if isinstance(collector, pytest.Directory) and BEGINS_WITH_THE_LAST:
        report.result = list(reversed(report.result))
    error = report.call.excinfo and report.call.excinfo.value.__cause__
    missing = str(getattr(error, "name", None)).partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and missing in ONLY_SOME_NEED:
        report.outcome = "skipped"
        report.longrepr = (report.nodeid, 0, f"Skipped: {missing} is missing")
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> Iterator[None]:
    """Leave to the nightly run what `nightly_levels` and `nightly_cases` name.

    Skip what needs a GPU without one.

    In the order of the files, whichever was collected first; pytest-randomly draws another after.
    """
    items.sort(key=lambda item: str(item.path))
    for item in nightly_levels(items):
        item.add_marker(pytest.mark.slow)
    for item in nightly_cases(items, set(COSTLY.read_text().split())):
        item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and pytest -m gpu"))
    yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process of ``-n 2`` half of the files, and let who is done take of the others'.

    In one piece, so that the fixtures of a file are made once. No option does this: pytest refuses
    those of a plug-in that is not installed, as on a machine that lends its GPU.
    """
    return importlib.import_module("xdist.scheduler").WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
    """Spare the garbage collector, and who asks it for all objects, the half million imported.

    With them it takes longer than most tests. And put the test files aside: `amp.initialize` looks
    through every module that uses torch, which took longer than all else that the tests do.
    """
    number = hypothesis.settings.default.max_examples
    if number != hypothesis.settings.get_profile(PROFILE).max_examples:
        raise pytest.UsageError(
            f"properties must draw what the profile {PROFILE!r} says; got {number} examples, of "
            "another profile, which an import loaded as torch.testing._internal.common_utils does. "
            "Call hypothesis.settings.load_profile(support.PROFILE) after that import."
        )
    if libraries := sys.modules.get("graph_libraries"):
        libraries.put_aside()
    for name in [name for name in sys.modules if name.startswith("test_")]:
        del sys.modules[name]
    # pytest adds a handler to each logger that does not hand on, six times a test; torch has dozens
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    _spare_collector()


@pytest.fixture(scope="module", autouse=True)
def test_file_imported(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the test file where an import has it, while its tests run."""
    sys.modules[request.module.__name__] = request.module
    yield
    del sys.modules[request.module.__name__]


def _spare_collector() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def collector_spared() -> Iterator[None]:
    """Spare it, after each file, also what tests import: Dynamo brings sympy."""
    yield
    if len(gc.get_objects()) > 20_000:
        _spare_collector()


@pytest.fixture(scope="session", autouse=True)
def groups_kept() -> Iterator[None]:
    """Keep each process group that a test makes, until the process ends.

    Where a wrapped model is the last that holds a group of gloo, torch 2.13 waits for the group's
    threads with the interpreter locked, forever if one of them needs it to let go of a collective.
    """
    kept: list[Any] = []
    destroy = distributed.destroy_process_group

    def destroy_and_keep(*args: Any, **kwargs: Any) -> None:
        kept.append(distributed.group.WORLD)
        destroy(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if distributed.is_available():
            patch.setattr(distributed, "destroy_process_group", destroy_and_keep)
        yield


@pytest.fixture(scope="module")
def graph_libraries_imported() -> Iterator[None]:
    """Have DGL and PyTorch Geometric where an import has them, if a test file has imported them."""
    libraries = sys.modules.get("graph_libraries")
    with libraries.imported() if libraries else contextlib.nullcontext():
        yield


class _BetweenTests:
    """Whether torch is as the last test left it, unpatched: no fixture of a file came or went."""

    is_left = False


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    if fixturedef.scope != "function":
        _BetweenTests.is_left = False


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    if fixturedef.scope != "function":
        _BetweenTests.is_left = False


@pytest.fixture(autouse=True)
def torch_left_unpatched() -> Iterator[None]:
    """Fail a test after which torch is not, object for object, what it was before; then mend it.

    To look at all of it takes longer than many tests: once a test, where nothing runs between two.
    """
    before = torch_snapshot.last() if _BetweenTests.is_left else torch_snapshot.take()
    yield
    is_left = _BetweenTests.is_left = torch_snapshot.is_left()
    left_patched = [] if is_left else torch_snapshot.differences(before)
    if amp := sys.modules.get("amp_patch.amp"):
        amp.deactivate()
    if not is_left:
        torch_snapshot.restore(before)
    if left_patched:
        pytest.fail(f"the test left torch patched: {', '.join(left_patched)}", pytrace=False)


@pytest.fixture(autouse=True)
def no_region_left_open() -> Iterator[None]:
    """Fail a test after which torch still asks a mode about each call, as one of a region is."""
    yield
    left = _get_current_function_mode_stack()
    for _ in left:
        _pop_mode()
    if left:
        pytest.fail(f"the test left open: {left}", pytrace=False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch alike for each test (pytest-randomly seeds ``random`` and numpy)."""
    torch.manual_seed(0)


@pytest.fixture
def amp() -> Iterator[ModuleType]:
    """Give ``amp_patch.amp``, and deactivate it at the end of the test, also when that fails.

    What amp_patch switches off in torch for its own calls must be on again then. Functions that the
    test registered are forgotten, which nothing but the end of a process does: each of them is
    patched anew for every test that follows.
    """
    from amp_patch import amp
    from amp_patch.session import session

    yield amp
    amp.deactivate()
    session._registered.clear()
    assert torch._C._is_torch_function_enabled()


@pytest.fixture
def gpu(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Iterator[Any]:
    """Have tensors of the CPU taken for a GPU's, and the text of the kernels run there."""
    import cuda_on_cpu
    from cuda_on_cpu.fake_gpu import Gpu

    cuda_on_cpu.require_compiler()
    yield Gpu(monkeypatch, pytestconfig)
    amp.deactivate()  # as long as there are kernels


@pytest.fixture
def cuda(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have CUDA graphs as well, which are recorded."""
    from cuda_on_cpu.fake_graphs import FakeCuda

    return FakeCuda(monkeypatch, gpu.modules)


@pytest.fixture(
    scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=str
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test on the CPU, and on a CUDA device where there is one."""
    return torch.device(request.param)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Give Chromium, driven by playwright; skip the test where one of them is missing."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
