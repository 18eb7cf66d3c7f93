"""Which half dtype the thread's casts have, against the rule: who is nearest and speaks wins."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from amp_patch.casting.mode import OFF, CastMode, ProcessMode
from amp_patch.casting.mode import mode as thread_mode
from amp_patch.casting.mode import process as process_mode
from amp_patch.session import session

LEVELS = (OFF, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Block:
    """A block of a program: what it is, and the blocks inside, the last of which may raise."""

    kind: str
    dtype: torch.dtype | None = None
    inside: tuple[Block, ...] = ()
    raises: bool = False


@dataclass
class Around:
    """What the rule needs to know of the blocks around a point."""

    level: torch.dtype | None = None
    off: bool = False
    region: Any = None
    region_dtype: torch.dtype | None = None
    depth: int = 0


def blocks(inner: st.SearchStrategy[tuple[Block, ...]]) -> st.SearchStrategy[tuple[Block, ...]]:
    kinds = st.one_of(
        st.tuples(st.just("model"), st.sampled_from(LEVELS)),
        st.tuples(st.sampled_from(["disable_casts", "region"]), st.none()),
    )
    parts = st.tuples(kinds, inner, st.booleans())
    return st.lists(parts.map(lambda part: Block(*part[0], *part[1:])), max_size=3).map(tuple)


programs = st.recursive(st.just(()), blocks, max_leaves=10)


def check(mode: CastMode, around: Around) -> None:
    assert mode.dtype is (OFF if around.off else around.level)
    assert (mode.level, mode.off, mode.region) == (around.level, around.off, around.region)
    assert mode.region_dtype is around.region_dtype
    assert len(mode.models) == around.depth


def run(mode: CastMode, program: tuple[Block, ...], around: Around) -> None:
    for block in program:
        try:
            within(mode, block, around)
        except ArithmeticError:
            assert block.raises
        check(mode, around)


def within(mode: CastMode, block: Block, around: Around) -> None:
    if block.kind == "model":
        # as hooks do: the second also runs when the forward raised
        mode.enter_model(id(block), block.dtype, torch.bfloat16)
        leave = functools.partial(mode.leave_model, id(block))
        inner = Around(block.dtype, around.off, around.region, torch.bfloat16, around.depth + 1)
    else:
        region = object() if block.kind == "region" else None
        leave = functools.partial(mode.restore, mode.switch_off(region))
        inner = Around(around.level, True, region, around.region_dtype, around.depth)
    try:
        check(mode, inner)
        run(mode, block.inside, inner)
        if block.raises:
            raise ArithmeticError
    finally:
        leave()


@given(programs)
def test_any_nesting_of_models_and_regions_follows_the_rule(program: tuple[Block, ...]) -> None:
    mode = CastMode()
    check(mode, Around())
    run(mode, program, Around())


@given(programs, st.sampled_from(LEVELS))
def test_a_repetition_may_bring_a_mode_back_from_elsewhere(
    program: tuple[Block, ...], level: torch.dtype
) -> None:
    """As a checkpoint does in backward: outside of all models, with a mode saved inside one."""
    mode = CastMode()
    mode.enter_model(1, level, torch.float16)
    first = mode.save()
    mode.leave_model(1)
    outside = mode.save()
    mode.restore(first)
    run(mode, program, Around(level))
    mode.restore(outside)
    check(mode, Around())


def test_a_model_that_never_began_ends_without_effect() -> None:
    mode = CastMode()
    mode.leave_model(1)
    mode.enter_model(1, torch.float16, torch.float16)
    mode.leave_model(2)
    check(mode, Around(torch.float16, region_dtype=torch.float16, depth=1))


def test_a_model_may_be_the_first_that_a_thread_does() -> None:
    mode = CastMode()
    depths: list[int] = []

    def enter() -> None:
        mode.enter_model(1, torch.float16, torch.float16)
        depths.append(len(mode.models))
        mode.leave_model(1)
        depths.append(len(mode.models))

    mode.enter_model(2, torch.bfloat16, torch.bfloat16)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert depths == [1, 0]
    assert mode.models[0][0] == 2


def test_each_thread_has_its_own_mode() -> None:
    mode = CastMode()
    mode.enter_model(1, torch.float16, torch.float16)
    mode.switch_off()
    seen: list[Any] = []
    keys = set(vars(mode))

    def look() -> None:
        seen.append((mode.save(), mode.dtype, mode.region_dtype, mode.models))
        seen.append(set(vars(mode)))
        mode.in_checkpoint = True

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    # the same keys everywhere: torch.compile guards on them
    assert seen == [((None, False, None), None, None, ()), keys]
    assert not mode.in_checkpoint


def test_a_process_begins_with_casts_off_and_ends_so() -> None:
    process = ProcessMode()
    assert (process.dtype, process.region_dtype, process.devices) == (OFF, None, frozenset())
    process.dtype = process.region_dtype = torch.float16
    process.devices |= {"cpu"}
    process.reset()
    assert (process.dtype, process.region_dtype, process.devices) == (OFF, None, frozenset())


def test_a_process_takes_back_what_it_saved() -> None:
    process = ProcessMode()
    process.dtype, process.devices = torch.float16, frozenset({"cpu"})
    saved = process.save()
    process.dtype, process.region_dtype = torch.bfloat16, torch.bfloat16
    process.devices |= {"cuda"}
    process.restore(saved)
    assert (process.dtype, process.region_dtype) == (torch.float16, None)
    assert process.devices == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_off_is_told_from_a_mode_that_says_nothing(dtype: torch.dtype) -> None:
    """The wrappers read ``mode.dtype or process.dtype``: OFF must be true, None must not."""
    mode, process = CastMode(), ProcessMode()
    process.dtype = dtype
    assert (mode.dtype or process.dtype) is dtype
    saved = mode.switch_off()
    assert (mode.dtype or process.dtype) is OFF
    mode.restore(saved)
    assert (mode.dtype or process.dtype) is dtype


def test_after_deactivate_everything_is_as_in_a_fresh_process(amp: ModuleType) -> None:
    model = torch.nn.Linear(2, 2)
    for opt_level in ("O1", "O2", "O4"):
        amp.initialize(model, opt_level=opt_level, verbosity=0)
        with amp.half_region(), amp.disable_casts():
            model(torch.ones(1, 2))
        amp.deactivate()
        assert vars(process_mode) == vars(ProcessMode())
        assert vars(thread_mode) == vars(CastMode())
        assert not len(session.cache)
        assert not session.functions._patches


def test_initialize_mends_a_mode_that_an_interrupted_step_left_off(amp: ModuleType) -> None:
    thread_mode.switch_off()  # and nobody switches it on again
    model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert model(torch.ones(1, 2)).dtype is torch.float16
    with amp.disable_casts():
        amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
        assert model(torch.ones(1, 2)).dtype is torch.float32
    assert model(torch.ones(1, 2)).dtype is torch.float16
