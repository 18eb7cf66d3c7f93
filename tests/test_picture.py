"""The picture of docs/architecture.md shows the imports between rooms: all of them, and no other.

Where A imports B and B imports C, no arrow is drawn from A to C, whether A imports C or not.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from test_architecture import CORE, DROP_IN, FLOORS, own_imports, parse, place_of, room_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# `__main__` starts the command line, `half_model` is a name that pickled models know, and the
# lowest two floors are in the text.
NOT_DRAWN = {"__main__", "half_model", *FLOORS[-1], *FLOORS[-2]}
ROOMS = set().union(*FLOORS) - NOT_DRAWN

Arrows = set[tuple[str, str]]


def drawn(page: str) -> Arrows:
    """Return the arrows of a page's Mermaid picture, by the rooms that its boxes name.

    A box is ``name["<b>folder/</b>..."]`` or ``name["<b>module.py</b>..."]``, where it comes first.
    """
    picture = page.partition("```mermaid")[2].partition("```")[0]
    rooms = dict(re.findall(r'(\w+)\["<b>(\w+)(?:/|\.py)</b>', picture))
    lines = re.sub(r"\[.*?\]", "", picture).splitlines()
    chains = [[name.strip() for name in line.split("-->")] for line in lines if "-->" in line]
    return {(rooms[one], rooms[other]) for chain in chains for one, other in pairwise(chain)}


def imports_of_rooms() -> dict[str, set[str]]:
    """Return which drawn rooms each of them imports."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in (*CORE, *DROP_IN):
        place = place_of(path)
        imported = map(room_of, own_imports(parse(path), place.rpartition(".")[0]))
        room = room_of(place.removesuffix(".__init__"))
        if room in ROOMS:
            found[room].update(ROOMS.intersection(imported) - {room})
    return found


def without_shortcuts(imports: Mapping[str, set[str]]) -> Arrows:
    """Return the fewest arrows from which all others follow."""
    return {
        (room, other)
        for room, others in imports.items()
        for other in others
        if not any(other in _reached(imports, third) for third in others - {other})
    }


def _reached(imports: Mapping[str, set[str]], room: str) -> set[str]:
    found = set(imports[room])
    return found.union(*(_reached(imports, other) for other in found))


def test_the_picture_is_what_the_modules_import() -> None:
    assert drawn(PAGE) == without_shortcuts(imports_of_rooms())


def test_every_room_is_drawn() -> None:
    assert {room for arrow in drawn(PAGE) for room in arrow} == ROOMS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('  weights["<b>weights/', '  step --> casting\n  weights["<b>weights/'),  # a shortcut
        ("  scaling --> kernels\n", ""),  # an import that is not shown
        ("  scaling --> kernels\n", "  kernels --> scaling\n"),
        ("<b>step/</b>", "<b>optimizers/</b>"),
        ("<b>debug/</b>", "<b>made_up/</b>"),
    ],
)
def test_a_picture_that_shows_anything_else_is_seen(old: str, new: str) -> None:
    assert PAGE.count(old) == 1
    assert drawn(PAGE.replace(old, new)) != without_shortcuts(imports_of_rooms())


def test_shortcuts_are_found() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert without_shortcuts(graph) == {("a", "b"), ("b", "c"), ("c", "d")}
