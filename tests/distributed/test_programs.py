"""Drawn programs over ranks do what a plain loop of one process does, see `programs`."""

from __future__ import annotations

from collections.abc import Iterator

import programs
import pytest
import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import Inf, Program, Ran, Step
from support import examples

#: How many ulps of 1 in the dtype that a level computes in.
HALF_EPS = {"O0": 0.0, "O1": 2.0**-9, "O2": 2.0**-9, "O3": 2.0**-9, "O4": 2.0**-6, "O5": 2.0**-6}
#: A norm is rounded, and with it all that was clipped.
CLIPPED = 1e-5


class Started:
    """Ranks that are started anew where a program has failed on them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks = ranks.Ranks(size)

    def run(self, program: Program) -> list[Ran]:
        try:
            return self._ranks.run(programs.run, program)
        except ranks.RankError:
            self.close()
            self._ranks = ranks.Ranks(self._size)
            raise

    def close(self) -> None:
        self._ranks.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Started]:
    started = Started(2)
    yield started
    started.close()


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
    return Step(micro_batches, draw(kept), max_norm, tuple(infs))


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
    known = programs.run_plainly(program)
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


@examples(1)
@given(program=drawn_programs())
def test_ranks_run_a_program_as_one_process_does(two: Started, program: Program) -> None:
    assert_ran(two.run(program), program)
