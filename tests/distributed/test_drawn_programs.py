"""Drawn programs over ranks do what a plain loop of one process does, see `programs`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import plain_programs
import programs
import pytest
import ranks
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from programs import Inf, Program, Ran, Step
from support import trains

#: How many ulps of 1 in the dtype that a level computes in.
HALF_EPS = {"O0": 0.0, "O1": 2.0**-9, "O2": 2.0**-9, "O3": 2.0**-9, "O4": 2.0**-6, "O5": 2.0**-6}
#: A norm is rounded, and with it all that was clipped.
CLIPPED = 1e-5


class Started:
    """Ranks of each size, which stay for many programs: those that one has failed on go."""

    def __init__(self) -> None:
        self._by_size: dict[int, ranks.Ranks] = {}

    def run(self, size: int, *args: Any) -> list[Ran]:
        if size not in self._by_size:
            self._by_size[size] = ranks.Ranks(size)
        try:
            return self._by_size[size].run(programs.run, *args)
        except ranks.RankError:
            self._by_size.pop(size).close()
            raise

    def close(self) -> None:
        while self._by_size:
            self._by_size.popitem()[1].close()


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    one = Started()
    yield one
    one.close()


@st.composite
def steps(draw: st.DrawFn, engine: str, level: str) -> Step:
    micro_batches = draw(st.integers(1, 3))
    has_scale = level in programs.SCALED
    infs = []
    if has_scale and draw(st.integers(0, 2)) == 0:
        in_gradient = engine not in ("ddp", "zero") and draw(st.booleans())
        infs.append(
            Inf(
                micro_batches - 1 if in_gradient else draw(st.integers(0, micro_batches - 1)),
                draw(st.integers(0, 1)),
                draw(st.sampled_from(programs.LAYERS)),
                in_gradient,
            )
        )
    # what torch's half weights would round
    max_norm = None if level == "O3" else draw(st.sampled_from([None, 0.5, 100.0]))
    kept = st.sampled_from(["unscaled", "delayed", *(["unsynced"] * (engine != "tensor"))])
    clips_by = draw(st.sampled_from(["amp", "torch"]))
    return Step(micro_batches, draw(kept), max_norm, tuple(infs), clips_by)


@st.composite
def drawn_programs(draw: st.DrawFn) -> Program:
    engine = draw(st.sampled_from(list(programs.ENGINES)))
    level = draw(st.sampled_from(["O2", "O5", "O1", "O4", "O0", "O3"]))
    masters = level in ("O2", "O5")
    actions = st.one_of(
        steps(engine, level), steps(engine, level), st.sampled_from(["save", "load"])
    )
    return Program(
        engine,
        level,
        # without momentum they have no state, and torch cannot load that of several
        1 if level == "O3" else draw(st.integers(1, 2)),
        masters and draw(st.booleans()),
        tuple(draw(st.lists(actions, min_size=3, max_size=8))),
    )


def assert_ran(found: list[Ran], program: Program) -> None:
    known = plain_programs.run(program)
    is_clipped = any(isinstance(one, Step) and one.max_norm for one in program.actions)
    for ran in found:
        assert ran.skipped == known.skipped
        assert ran.scales == known.scales
        assert [norm for row in ran.norms for norm in row] == pytest.approx(
            [norm for row in known.norms for norm in row], rel=CLIPPED
        )
        half = HALF_EPS[program.level]
        torch.testing.assert_close(ran.outputs, known.outputs, rtol=half, atol=half + CLIPPED)
        is_read_in_half = program.engine in ("zero", "fsdp1") and program.level in ("O2", "O5")
        noise = CLIPPED * is_clipped + half * is_read_in_half
        torch.testing.assert_close(ran.params, known.params, rtol=noise, atol=noise)


ON_0, IN_1 = Inf(0, 0, "first", False), Inf(1, 1, "second", True)
SAVED = ("save", Step(3), Step(), "load", Step(2, "delayed"))


@trains()
@example(Program("zero", "O2", 1, False, (Step(2), Step(2, infs=(ON_0,)), *SAVED)))
@example(Program("zero", "O5", 2, False, (Step(2, max_norm=0.5, clips_by="torch"), *SAVED)))
@example(Program("fsdp1", "O2", 2, True, (Step(2, "unsynced", None, (ON_0,)), *SAVED)))
@example(Program("fsdp1", "O5", 1, False, (Step(2, max_norm=0.5, clips_by="torch"),)))
@example(Program("fsdp2", "O2", 2, False, (Step(2, "unsynced", 0.5, (IN_1,)), *SAVED)))
@example(Program("fsdp2", "O1", 1, False, (Step(2, "delayed", 0.5, (IN_1,)), *SAVED)))
@example(Program("ddp", "O2", 2, True, (Step(2, "unsynced", 0.5), Step(2, infs=(ON_0,)), *SAVED)))
@example(Program("tensor", "O5", 1, False, (Step(3, "delayed", 0.5), *SAVED)))
@given(program=drawn_programs())
def test_ranks_run_a_program_as_one_process_does(started: Started, program: Program) -> None:
    assert_ran(started.run(2, program), program)


@pytest.mark.slow(instead="drawn programs on two ranks, which save and load")
@trains()
@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_another_number_of_ranks_goes_on_with_a_program(
    started: Started, data: st.DataObject, size: int, later_size: int
) -> None:
    engine = data.draw(st.sampled_from(["ddp", "fsdp2"]))
    level = data.draw(st.sampled_from(["O2", "O5", "O1", "O4", "O0"]))
    actions = data.draw(st.lists(steps(engine, level), min_size=2, max_size=8))
    program = Program(engine, level, data.draw(st.integers(1, 2)), False, tuple(actions))
    half = len(actions) // 2
    with tempfile.TemporaryDirectory() as folder:
        begun = started.run(size, program._replace(actions=program.actions[:half]), folder)
        ended = started.run(later_size, program, folder, half)
    joined = [
        one._replace(
            norms=begun[0].norms + one.norms,
            skipped=begun[0].skipped + one.skipped,
            scales=begun[0].scales + one.scales,
        )
        for one in ended
    ]
    assert_ran(joined, program)
