"""Options that several commands have: names of levels, a folder to write to."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from amp_patch.levels import OPT_LEVELS
from amp_patch.tools import options
from amp_patch.tools.errors import BadArguments


def test_the_levels_are_those_of_the_table() -> None:
    assert tuple(OPT_LEVELS) == options.LEVELS


def levels(text: str | None) -> str | None:
    """Return what one level is read as."""
    return options.known_level(None, None, text)  # type: ignore[arg-type]  # not looked at


def test_a_level_is_one_of_the_table_or_is_not_given() -> None:
    assert levels("O4") == "O4"
    assert levels(None) is None
    assert levels("o4") == "O4"
    with pytest.raises(click.BadParameter, match="'O9' is not one of 'O0', 'O1'"):
        levels("O9")


def test_an_unknown_level_among_others_is_named() -> None:
    with pytest.raises(click.BadParameter, match="'O9' is not one of"):
        options.known_levels(None, None, "O0,O9")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["O1,o4", "O1 O4", " O1 ,  O4"])
def test_levels_have_commas_or_spaces_between_them(text: str) -> None:
    assert options.known_levels(None, None, text) == ["O1", "O4"]  # type: ignore[arg-type]
    with pytest.raises(click.BadParameter, match="names several levels; give one of them"):
        levels(text)


def test_levels_are_named_with_commas() -> None:
    assert options.known_levels(None, None, "O0, O2,O0") == ["O0", "O2"]  # type: ignore[arg-type]


def test_a_folder_is_made_where_there_is_none(tmp_path: Path) -> None:
    assert options.writable_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(BadArguments, match="got .*file"):
        options.writable_folder(tmp_path / "file")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="asks for a folder that refuses root")
def test_a_folder_that_refuses_files_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(BadArguments, match="must be writable; got /proc"):
        options.writable_folder(Path("/proc"))
    assert options.writable_folder(tmp_path) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_folder_that_is_not_there_is_refused_with_the_mend(tmp_path: Path) -> None:
    options.file_to_write("--json", tmp_path / "x.json")
    with pytest.raises(BadArguments, match=r"^--json must .*/a b/x.json; call mkdir -p '.*/a b'$"):
        options.file_to_write("--json", tmp_path / "a b" / "x.json")
