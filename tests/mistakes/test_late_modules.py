"""What is replaced in modules that a script imports after `amp.initialize`."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from amp_patch.mistakes.late_modules import LateModules
from amp_patch.patching import Patches

NAME = "a_late_module"


@pytest.fixture
def _on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").write_text("def answer():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def doubling(original: Callable[[], int]) -> Callable[[], int]:
    return lambda: 2 * original()


def patches_of_others() -> Patches:
    """Return patches as `amp.initialize` leaves them: they have replaced something."""
    patches = Patches()
    patches.replace(ModuleType("another"), "answer", doubling)
    return patches


@pytest.mark.usefixtures("_on_path")
def test_a_module_is_replaced_in_when_it_comes_and_restored() -> None:
    late, made = LateModules(), {NAME: {f"{NAME}.answer": doubling}}
    for is_imported in (False, True):
        assert set(late.imported(made)) == ({f"{NAME}.answer"} if is_imported else set())
        if not is_imported:
            patches = patches_of_others()
            late.follow(patches)
            module = importlib.import_module(NAME)
            assert module.answer() == 2
            patches.undo()
        assert module.answer() == 1


@pytest.mark.usefixtures("_on_path")
def test_a_module_that_comes_when_all_is_undone_stays_as_it_is() -> None:
    late, patches = LateModules(), patches_of_others()
    late.imported({NAME: {f"{NAME}.answer": doubling}})
    late.follow(patches)
    patches.undo()
    assert importlib.import_module(NAME).answer() == 1


@pytest.mark.usefixtures("_on_path")
def test_who_is_dropped_while_it_waits_is_not_kept_by_the_import_to_come() -> None:
    late, patches = LateModules(), patches_of_others()
    late.imported({NAME: {f"{NAME}.answer": doubling}})
    late.follow(patches)
    dropped = weakref.ref(late)
    del late
    gc.collect()
    assert dropped() is None
    assert importlib.import_module(NAME).answer() == 1


def test_sharding_is_refused_where_the_group_came_after_initialize(amp: ModuleType) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="must come before amp.initialize"):
            fully_shard(model)
    finally:
        distributed.destroy_process_group()
