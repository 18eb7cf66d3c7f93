"""docs/rooms.mmd has the imports between rooms, all of them and no other; docs/rooms.svg shows it.

Where A imports B and B imports C, no arrow is drawn from A to C, whether A imports C or not.
CONTRIBUTING.md has the command that draws the picture.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from test_architecture import CORE, DROP_IN, FLOORS, own_imports, parse, place_of, room_of

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "rooms.mmd").read_text(encoding="utf-8")
# `__main__` starts the command line, `half_model` is a name that pickled models know, and the
# lowest two floors are in the text.
NOT_DRAWN = {"__main__", "half_model", *FLOORS[-1], *FLOORS[-2]}
ROOMS = set().union(*FLOORS) - NOT_DRAWN

Arrows = set[tuple[str, str]]


def boxes(text: str) -> dict[str, str]:
    """Return what stands in each box of a Mermaid text, ``name["`**room/** words`"]``, by name."""
    return dict(re.findall(r'(\w+)\["`(.+?)`"\]', text, re.DOTALL))


def arrows(text: str) -> Arrows:
    """Return the arrows of a Mermaid text, by the names of its boxes."""
    lines = re.sub(r"\[.*?\]", "", text, flags=re.DOTALL).splitlines()
    chains = [[name.strip() for name in line.split("-->")] for line in lines if "-->" in line]
    return {pair for chain in chains for pair in pairwise(chain)}


def drawn(text: str) -> Arrows:
    """Return the arrows of a Mermaid text, by the rooms that its boxes begin with."""
    rooms = {name: re.match(r"\*\*(\w+)(/|\.py)\*\*", box)[1] for name, box in boxes(text).items()}
    return {(rooms[one], rooms[other]) for one, other in arrows(text)}


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
    assert drawn(TEXT) == without_shortcuts(imports_of_rooms())


def test_every_room_is_drawn() -> None:
    assert {room for arrow in drawn(TEXT) for room in arrow} == ROOMS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('  weights["`**weights/', '  step --> casting\n  weights["`**weights/'),  # a shortcut
        ("  scaling --> kernels\n", ""),  # an import that is not shown
        ("  scaling --> kernels\n", "  kernels --> scaling\n"),
        ("**step/**", "**optimizers/**"),
        ("**debug/**", "**made_up/**"),
    ],
)
def test_a_picture_that_shows_anything_else_is_seen(old: str, new: str) -> None:
    assert TEXT.count(old) == 1
    assert drawn(TEXT.replace(old, new)) != without_shortcuts(imports_of_rooms())


def test_the_svg_is_drawn_from_the_text() -> None:
    svg = ET.parse(DOCS / "rooms.svg").getroot()
    shown = {
        name[1]: "".join("".join(group.itertext()).split())
        for group in svg.iter("{http://www.w3.org/2000/svg}g")
        if (name := re.fullmatch(r"my-svg-flowchart-(\w+)-\d+", group.get("id", "")))
    }
    assert shown == {name: re.sub(r"[*\s]", "", box) for name, box in boxes(TEXT).items()}
    ids = [element.get("data-id", "") for element in svg.iter()]
    assert {match.groups() for one in ids if (match := re.match(r"L_(\w+)_(\w+)_0$", one))} == (
        arrows(TEXT)
    )


def test_shortcuts_are_found() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert without_shortcuts(graph) == {("a", "b"), ("b", "c"), ("c", "d")}
