"""What is to be swept and how: the options of one sweep, as they are kept in its folder."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from amp_patch.tools.errors import BadArguments
from amp_patch.tools.options import LEVELS


@dataclass(frozen=True)
class Settings:
    """The options of a sweep.

    Attributes:
        command: the words after ``--``, or the name of a function.
        is_function: whether it is the latter, which `amp_patch.sweep` calls.
        levels: in the order in which they run.
        steps: of each run; None: until the script ends by itself.
        repeat: rounds over all levels.
        tolerance: how far the final loss may be from that of O0, as a share of it.
        timeout: seconds that a run may take; None: any.
        seed: of the first round; each further round has the next.
    """

    command: Sequence[str]
    levels: Sequence[str] = LEVELS
    steps: int | None = None
    repeat: int = 1
    tolerance: float = 0.05
    timeout: float | None = None
    seed: int = 0
    is_function: bool = False

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Round, from 1, and level of each run, in order: all levels, then all of them again."""
        return [(round_, level) for round_ in range(1, self.repeat + 1) for level in self.levels]

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {**asdict(self), "command": list(self.command), "levels": list(self.levels)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Settings:
        """Return what `as_json` gave."""
        return cls(**found)

    def goes_on_by(self, folder: Path) -> str:
        """Return the call that goes on with this sweep."""
        if self.is_function:
            return f"amp_patch.sweep({self.command[0]}, resume={str(folder)!r})"
        return f"amp-patch sweep --resume {shlex.quote(str(folder))}"

    def resumed(self, given: Mapping[str, Any], done: Collection[tuple[int, str]] = ()) -> Settings:
        """Return these settings with what was given for the rest of the sweep.

        Args:
            given: options that take the place of these.
            done: round and level of each finished run. All of them stay: levels and rounds that
                have one are kept, whatever was given.

        Raises:
            BadArguments: the runs that are done would not be comparable with those to come.
        """
        for name in ("command", "steps", "seed"):
            if name in given and given[name] != getattr(self, name):
                raise BadArguments(
                    f"a sweep that goes on must keep its {name}, {_shown(getattr(self, name))}; "
                    f"got {_shown(given[name])}; leave it out, or begin another sweep"
                )
        changed = replace(self, **given)
        rounds = max([changed.repeat, *(number for number, _ in done)])
        if "levels" in given:
            kept = {*given["levels"], *(level for _, level in done)}
            ordered = dict.fromkeys([*self.levels, *given["levels"]])
            changed = replace(changed, levels=[level for level in ordered if level in kept])
        return replace(changed, repeat=rounds)


def _shown(value: Any) -> str:
    if value is None:
        return "all that there are"
    return " ".join(value) if isinstance(value, (list, tuple)) else str(value)
