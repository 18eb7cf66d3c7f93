"""What tests share: how often a property is drawn, which cases are nightly, a backward, waits."""

import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import filelock
import hypothesis
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
#: How often properties are drawn, see `conftest`.
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ordinary")


def examples(times: float, **options: Any) -> hypothesis.settings:
    """Return settings that draw so many times the number of examples of the profile.

    ``HYPOTHESIS_PROFILE`` chooses the profile, and a property has no number of its own.

    Args:
        times: 1 or more; `trains` is for fewer.
        options: further ones of ``hypothesis.settings``.
    """
    number = int(times * hypothesis.settings.default.max_examples)
    return hypothesis.settings(max_examples=number, **options)


def trains(**options: Any) -> hypothesis.settings:
    """Return settings for a property that trains for each example: a quarter of the profile's."""
    return examples(1 / 4, **options)


def drawn_for(*case: str) -> Callable[[Any], Any]:
    """Return a decorator of a property: in the ordinary run each case draws examples of its own.

    Else each parameter of a test would draw the same few.
    """
    if PROFILE == "nightly":
        return lambda test: test
    return hypothesis.seed(zlib.crc32(" ".join(case).encode()))


def nightly_but(ordinary: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return values for ``parametrize``, of which only these are in the ordinary run."""
    slow, values = pytest.mark.slow, list(values)
    if not any(value in ordinary for value in values):
        raise ValueError(f"the ordinary run must keep one of {values}; got {ordinary}")
    return [value if value in ordinary else pytest.param(value, marks=slow) for value in values]


def nightly_levels(tests: Iterable[pytest.Function]) -> list[pytest.Function]:
    """Return the tests at levels that the ordinary run leaves out, for it makes the like of them.

    Those at O0, O3 and O4 that it makes at O1, O2 or O5: nearly all that these levels do, others
    do. O0 casts nothing, O3 is O2 without masters, O4 is O1 in bfloat16. And of the cases at both
    O2 and O5, which is O2 in bfloat16, each at one of the two: the cases of a test in turn, and in
    a file the tests that have one case each. A test that is alone in that keeps both. Where a test
    has four cases or more at O1 as well, each is made at one level, in turn O1, O2, O1 and O5.
    A file of which the global ``EVERY_LEVEL`` is true keeps all of its tests.
    """
    left_out: list[pytest.Function] = []
    singles: dict[Any, list[Case]] = {}
    for (file, *_), cases in _by_test(tests).items():
        for at in cases:
            if not at.keys().isdisjoint(_ORDINARY):
                left_out += [test for level, test in at.items() if level not in _ORDINARY]
        several = [{level: at[level] for level in _ORDINARY if level in at} for at in cases]
        many = [at for at in several if "O1" in at and len(at) > 1]
        if len(many) >= 4:
            left_out += _all_but(many, ("O1", "O2", "O1", "O5"))
            several = [at for at in several if "O1" not in at]
        pairs = [at for at in several if "O2" in at and "O5" in at]
        left_out += _all_but_one_half(pairs)
        singles.setdefault(file, []).extend(pairs if len(pairs) == 1 else ())
    for pairs in singles.values():
        left_out += _all_but_one_half(pairs)
    return left_out


#: Of each level at which a case is made, the test.
Case = dict[str, pytest.Function]
_ORDINARY = ("O1", "O2", "O5")


def _all_but(cases: Iterable[Case], levels: Iterable[str]) -> list[pytest.Function]:
    """Return all tests of cases but one of each, in turn at these levels."""
    left_out: list[pytest.Function] = []
    for at, level in zip(cases, cycle(levels), strict=False):
        kept = at.get(level) or next(iter(at.values()))
        left_out += [test for test in at.values() if test is not kept]
    return left_out


def _all_but_one_half(pairs: list[Case]) -> list[pytest.Function]:
    """Return of several cases at both O2 and O5 the one or the other."""
    if len(pairs) < 2:
        return []
    return [at[level] for at, level in zip(pairs, cycle(("O5", "O2")), strict=False)]


def nightly_cases(
    tests: Iterable[pytest.Function], costly: Collection[str]
) -> list[pytest.Function]:
    """Return half of the cases of the tests that take longest: of four two neighbours.

    So two levels that take turns are both left. Other two of the next four, and of another test: of
    what four cases have in common with the next four each is left somewhere.

    Args:
        tests: but for those that are left out already.
        costly: their names, as ``tests/casting/test_rules.py::test_every_rule``.
    """
    cases: dict[str, list[pytest.Function]] = {}
    for test in tests:
        name = test.nodeid.partition("[")[0]
        if name in costly and not test.get_closest_marker("slow"):
            cases.setdefault(name, []).append(test)
    return [
        test
        for name, several in cases.items()
        if len(several) > 1
        for number, test in enumerate(several)
        if (number + number // 4 + 2 * (zlib.crc32(name.encode()) % 2)) % 4 in (1, 2)
    ]


def _by_test(tests: Iterable[pytest.Function]) -> dict[tuple[Any, ...], list[Case]]:
    """Return the cases of each test that is made at levels, of each case the tests by level."""
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case, at in _by_case(tests).items():
        found.setdefault(case[:3], []).append(at)
    return found


def _by_case(tests: Iterable[pytest.Function]) -> dict[Any, dict[str, pytest.Function]]:
    """Return, for each case of a test that is made at levels, the tests by level.

    A case is known by the file, the test, the parameter that is the level, and the other ones.
    """
    found: dict[Any, dict[str, pytest.Function]] = {}
    for test in tests:
        params = getattr(test, "callspec", None) and test.callspec.params or {}
        for name, value in params.items():
            every = getattr(test.module, "EVERY_LEVEL", False)
            if isinstance(value, str) and value in LEVELS and not every:
                rest = [(key, id(other)) for key, other in sorted(params.items()) if key != name]
                found.setdefault((test.path, test.originalname, name, *rest), {})[value] = test
    return found


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of this name, made by the first process of pytest-xdist that asks for it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, unfinished = base / name, base / f"{name}.unfinished"
    with filelock.FileLock(base / f"{name}.lock"):
        if not folder.exists():
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


def exactly(message: str) -> str:
    """Return a pattern for ``match`` that this message fits, and no other."""
    return f"^{re.escape(message)}$"


def numbers_like(tensor: Tensor, seed: int) -> Tensor:
    """Return the tensor's numbers with some others among them."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    chosen = torch.rand(tensor.shape, generator=generator) < (0.3 if seed % 2 else 1.0)
    return torch.where(chosen, others, tensor.detach())


def scaled_backward(amp: ModuleType, loss: Tensor, optimizers: Any, **options: Any) -> None:
    """Run the backward of a loss in its ``scale_loss`` block; options are that function's."""
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def profiled(**options: Any) -> torch.profiler.profile:
    """Profile the CPU; torch before 2.13 warns where events of earlier cycles are not kept."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, acc_events=True, **options)


class CountItems(TorchDispatchMode):
    """Counts what would wait for a device: ``.item()`` and whatever needs a number of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def allocations(call: Callable[[], object]) -> list[int]:
    """Return the bytes of each block of memory that torch takes within a call, on a CPU.

    Also of those that an operator takes and gives back, of which no result tells.
    """
    with profiled(profile_memory=True) as profile:
        call()
    recorded: Any = profile.profiler
    nodes = recorded.kineto_results.experimental_event_tree()
    sizes = []
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if (
            node.tag == torch._C._profiler._EventType.Allocation
            and node.extra_fields.alloc_size > 0
        ):
            sizes.append(node.extra_fields.alloc_size)
    return sizes
