"""What a rules file holds: a level, a profile, rules of functions, precisions of modules.

Knows the format, and of functions, modules, levels and profiles only how they are named.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Set by ``amp-patch run --rules``: a profile or the path of a file, in the place of the script's.
RULES_BY: Final = "AMP_PATCH_RULES"
PRECISIONS: Final = ("float", "half")
_KEYS = ("opt_level", "profile", "functions", "modules")


@dataclass(frozen=True)
class Rules:
    """What `amp.initialize` was told by ``rules``, in whichever form.

    Attributes:
        opt_level: takes the place of the script's; None leaves it.
        functions: name or dotted path of a function -> rule.
        modules: path of a module, or a pattern -> "float" or "half", in the order in which they
            were written.
        file: where they were read; None where they came otherwise.
        profile: name of rules of functions that hold where ``functions`` has none.
    """

    opt_level: str | None = None
    functions: Mapping[Any, Any] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    profile: str | None = None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Name the file in the message of what is raised, inside of it, about its content."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError) as error:
            if self.file is None:
                raise
            raise type(error)(f"{error} This is of the rules file {self.file}.") from error


def rules_of(given: Any, levels: Collection[str], profiles: Collection[str]) -> Rules:
    """Return what the environment says, else what ``initialize`` was given.

    Args:
        given: None; the name of a profile; the path of a file, a str or Path; a mapping of
            functions to rules; or a mapping of what a file holds.
        levels: the names of all levels.
        profiles: the names of all profiles.

    Raises:
        TypeError: none of these.
        FileNotFoundError: there is no such file.
        ValueError: the file is no TOML, or has a key or value that means nothing.
    """
    given = os.environ.get(RULES_BY) or given
    if given is None:
        return Rules()
    if isinstance(given, str) and given in profiles:
        return Rules(profile=given)
    if isinstance(given, (str, os.PathLike)):
        return read(Path(given), levels, profiles)
    if not isinstance(given, Mapping):
        raise TypeError(
            f"rules must map functions to rules; got {type(given).__name__}; call "
            "amp.initialize(..., rules={'softmax': 'half'}), or rules='rules.toml'."
        )
    if any(key in given for key in _KEYS):
        return _checked(given, levels, profiles, None)
    return Rules(functions=given)


def read(path: Path, levels: Collection[str], profiles: Collection[str]) -> Rules:
    """Read a rules file; see `rules_of`."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text)
    except OSError as error:
        near = difflib.get_close_matches(str(path), profiles, 1)
        mend = f"write a file by hand, or by amp-patch tune --out {path} -- train.py."
        raise type(error)(
            f"rules must name a file that can be read, or a profile ({_listed(profiles)}); got "
            f"{str(path)!r}, looked for in {Path.cwd()}: {error.strerror}; "
            f"{f'did you mean {near[0]!r}?' if near else mend}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"a rules file must be TOML; got {path}, which is not: {error}. Write keys with "
            'dots or stars in quotes: "blocks.2.proj" = "float".'
        ) from error
    return _checked(found, levels, profiles, path)


def _checked(
    found: Mapping[str, Any], levels: Collection[str], profiles: Collection[str], path: Path | None
) -> Rules:
    where = "rules" if path is None else f"the rules file {path}"
    for key in found:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            raise ValueError(
                f"{where} may have opt_level, profile, [functions] and [modules]; got {key!r}"
                f"{f'; did you mean {near[0]!r}?' if near else ';'} Write the rule of a function "
                f"below a line [functions], that of a module below [modules]."
            )
    functions, modules = found.get("functions", {}), found.get("modules", {})
    _check_level(found.get("opt_level"), levels, where)
    _check_profile(found.get("profile"), profiles, where)
    _check_table("functions", "softmax", functions, where)
    _check_table("modules", "blocks.2.proj", modules, where)
    for name, precision in modules.items():
        if precision not in PRECISIONS:
            raise ValueError(
                f"a module in {where} is 'float' or 'half'; got {precision!r} for {name!r}; write "
                f'"{name}" = "float".'
            )
    return Rules(found.get("opt_level"), dict(functions), dict(modules), path, found.get("profile"))


def _check_level(level: Any, levels: Collection[str], where: str) -> None:
    if level not in (None, *levels):
        raise ValueError(
            f"opt_level in {where} must be one of {_listed(levels)}, with the letter O; got "
            f'{level!r}; write opt_level = "O1".'
        )


def _check_profile(profile: Any, profiles: Collection[str], where: str) -> None:
    if profile not in (None, *profiles):
        raise ValueError(
            f"profile in {where} must be one of {_listed(profiles)}; got {profile!r}; write "
            f'profile = "{next(iter(profiles))}".'
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))


def _check_table(name: str, example: str, table: Any, where: str) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(
            f"{name} in {where} must be a table; got {table!r}; write [{name}] in a line and below "
            f'it lines such as "{example}" = "float".'
        )
    for key, value in table.items():
        # TOML reads a path without quotes as tables in tables.
        if isinstance(value, Mapping):
            inner = next(iter(value), "...")
            raise ValueError(
                f"names in [{name}] of {where} must stand in quotes where they have dots; got "
                f'{key}.{inner}; write "{key}.{inner}" = "float".'
            )
