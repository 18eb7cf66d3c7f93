"""What a rules file holds: a level, a profile, rules of functions, modules and inputs.

Knows the format, and of functions, modules, levels and profiles only how they are named.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from .did_you_mean import did_you_mean, meant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Set by ``amp-patch run --rules``: a profile or the path of a file, in the place of the script's.
RULES_BY: Final = "AMP_PATCH_RULES"
PRECISIONS: Final = ("float", "half")
_LEFT_ALONE: Final = "off"
_KEYS = ("opt_level", "profile", "functions", "modules", "inputs")
#: How like one of these a key must be to be taken for it: no function of torch is.
_SURE = 0.8


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
        inputs: name of an argument of a model's forward, or of a part of one (``batch.boxes``) ->
            "off": its call does not cast it.
    """

    opt_level: str | None = None
    functions: Mapping[Any, Any] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    profile: str | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Say in the message of what is raised, inside of it, about the rules whence they are."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError) as error:
            if os.environ.get(RULES_BY):
                raise _of_the_environment(error) from error
            if self.file is None:
                raise
            raise type(error)(f"{error} This is of the rules file {self.file}.") from error


def rules_of(given: Any, levels: Collection[str], profiles: Collection[str]) -> Rules:
    """Return what the environment says, else what ``initialize`` was given; of inputs both.

    Args:
        given: None; the name of a profile; the path of a file, a str or Path; a mapping of
            functions to rules; or a mapping of what a file holds.
        levels: the names of all levels.
        profiles: the names of all profiles.

    Raises:
        TypeError: none of these; or a module that is not named by a string.
        FileNotFoundError: there is no such file.
        ValueError: the file is no TOML, or has a key or value that means nothing.
    """
    forced = os.environ.get(RULES_BY)
    if not forced:
        return _rules_of(given, levels, profiles)
    try:
        found = _rules_of(forced, levels, profiles)
    except (OSError, TypeError, ValueError) as error:
        raise _of_the_environment(error) from error
    # Which inputs are cast is no matter of precision, but of what they are.
    with contextlib.suppress(OSError, TypeError, ValueError):
        found = replace(found, inputs={**_rules_of(given, levels, profiles).inputs, **found.inputs})
    return found


def _of_the_environment(error: Exception) -> Exception:
    return type(error)(
        f"{error} This is of {RULES_BY}={os.environ[RULES_BY]}, which takes the place of the "
        "script's own rules."
    )


def _rules_of(given: Any, levels: Collection[str], profiles: Collection[str]) -> Rules:
    if given is None:
        return Rules()
    if isinstance(given, str) and given in profiles:
        return Rules(profile=given)
    if isinstance(given, (str, os.PathLike)):
        return read(given, levels, profiles)
    if not isinstance(given, Mapping):
        raise TypeError(
            f"rules must map functions to rules; got {type(given).__name__}; call "
            "amp.initialize(..., rules={'softmax': 'half'}), rules='fast-norms' or "
            "rules='rules.toml'."
        )
    if _is_of_a_file(given, [*levels, *profiles]):
        return _checked(given, levels, profiles, _Origin())
    return Rules(functions=given)


def _is_of_a_file(given: Mapping[Any, Any], names: Collection[str]) -> bool:
    """Tell a mapping of what a file holds, misspelled or not, from one of functions to rules."""
    return any(
        meant(key, _KEYS, _SURE) or isinstance(value, Mapping) or value in names
        for key, value in given.items()
    )


def read(
    given: str | os.PathLike[str], levels: Collection[str], profiles: Collection[str]
) -> Rules:
    """Read a rules file; see `rules_of`."""
    path = Path(given)
    try:
        # with or without the mark that editors of Windows write first
        text = path.read_text(encoding="utf-8-sig")
        found = tomllib.loads(text)
    except OSError as error:
        raise type(error)(
            f"rules must name a file that can be read, or a profile ({_listed(profiles)}); got "
            f"{os.fspath(given)!r}, looked for in {Path.cwd()}: {error.strerror}"
            f"{_mended_path(path, levels, profiles)}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"a rules file must be TOML; got {path}, which is not: {error}. Write rules, and names "
            'with dots or stars, in quotes: "blocks.2.proj" = "float".'
        ) from error
    return _checked(found, levels, profiles, _Origin(path))


def _mended_path(path: Path, levels: Collection[str], profiles: Collection[str]) -> str:
    """Return the end of a message about a file that cannot be read."""
    if str(path) in profiles:
        return (
            "; the name of a profile is given as a string, without a folder: call "
            f"amp.initialize(..., rules={str(path)!r})."
        )
    if str(path) in levels:
        return f"; call amp.initialize(..., opt_level={str(path)!r})."
    if path.is_dir():
        return "; name a file in this folder, or leave rules out."
    if meant(path, profiles):
        return did_you_mean(path, profiles)
    return f"; write a file by hand, or by amp-patch tune --out {path} -- train.py."


@dataclass(frozen=True)
class _Origin:
    """Where rules come from, and how they are written there.

    Attributes:
        path: of the file; None for a mapping.
    """

    path: Path | None = None

    def __str__(self) -> str:
        return "rules" if self.path is None else f"the rules file {self.path}"

    def mend(self, key: str, value: str) -> str:
        """Return what to do to say something by a key."""
        if self.path is None:
            return _call({key: value})
        return f'Write {key} = "{value}", above the first line in brackets.'

    def mend_in(self, table: str, name: str, word: str) -> str:
        """Return what to do to give a function or a module a rule."""
        if self.path is None:
            return _call({table: {name: word}})
        return f'Write "{name}" = "{word}" below a line [{table}].'


def _call(rules: Mapping[str, Any]) -> str:
    return f"Call amp.initialize(..., rules={rules!r})."


def _checked(
    found: Mapping[Any, Any], levels: Collection[str], profiles: Collection[str], origin: _Origin
) -> Rules:
    _check_keys(found, origin)
    functions, modules = found.get("functions", {}), found.get("modules", {})
    inputs = _flat(found.get("inputs", {}))
    _check_level(found.get("opt_level"), levels, origin)
    _check_profile(found.get("profile"), profiles, origin)
    _check_table("functions", "softmax", functions, origin)
    _check_table("modules", "blocks.2.proj", modules, origin)
    _check_modules(modules, origin)
    _check_inputs(inputs, origin)
    level, profile = found.get("opt_level"), found.get("profile")
    return Rules(level, dict(functions), dict(modules), origin.path, profile, dict(inputs))


def _flat(inputs: Any) -> Any:
    """Return a table of inputs in which tables within tables are names with dots.

    As TOML reads ``batch.boxes = "off"``.
    """
    if not isinstance(inputs, Mapping):
        return inputs
    flat: dict[Any, Any] = {}
    for name, rule in inputs.items():
        is_table = isinstance(rule, Mapping) and rule and all(isinstance(key, str) for key in rule)
        if is_table and isinstance(name, str):
            flat.update({f"{name}.{part}": inner for part, inner in _flat(rule).items()})
        else:
            flat[name] = rule
    return flat


def _check_keys(found: Mapping[Any, Any], origin: _Origin) -> None:
    unknown = [key for key in found if key not in _KEYS]
    if unknown:
        key = next((key for key in unknown if meant(key, _KEYS)), unknown[0])
        near = meant(key, _KEYS)
        mend = (
            f"did you mean {near!r}? Write {near} in its place."
            if near
            else "a function has its rule in functions, a module in modules, what forward gets in "
            "inputs. " + origin.mend_in("functions", "softmax", "half")
        )
        raise ValueError(
            f"{origin} may have opt_level, profile, functions, modules and inputs; got {key!r}; "
            f"{mend}"
        )


def _check_level(level: Any, levels: Collection[str], origin: _Origin) -> None:
    if level not in (None, *levels):
        guess = f"O{str(level).strip()[-1:]}"
        raise ValueError(
            f"a level in {origin} is one of {_listed(levels)}, written with the letter O; got "
            f"{level!r}. {origin.mend('opt_level', guess if guess in levels else 'O1')}"
        )


def _check_profile(profile: Any, profiles: Collection[str], origin: _Origin) -> None:
    if profile not in (None, *profiles):
        name = meant(profile, profiles) or next(iter(profiles))
        raise ValueError(
            f"profile in {origin} must be one of {_listed(profiles)}; got {profile!r}. "
            f"{origin.mend('profile', name)}"
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))


def _check_table(name: str, example: str, table: Any, origin: _Origin) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(
            f"{name} in {origin} must be a table of names and rules; got {table!r}. "
            f"{origin.mend_in(name, example, 'float')}"
        )
    for key, value in table.items():
        # TOML reads a path without quotes as tables in tables.
        if isinstance(value, Mapping):
            path = _path(key, value)
            raise ValueError(
                f"a name in {name} of {origin} stands in quotes if it has dots, and its rule is "
                f"one word; got a table for {key!r}. {origin.mend_in(name, path, 'float')}"
            )
        if key in _KEYS and value not in PRECISIONS:
            raise ValueError(
                f"{key} must stand beside {name} in {origin}, not in it; got {value!r} for {key!r} "
                f"in {name}. {origin.mend(key, value)}"
            )


def _path(key: Any, value: Any) -> str:
    """Return the path that TOML has read as tables in tables."""
    while isinstance(value, Mapping) and value:
        inner, value = next(iter(value.items()))
        key = f"{key}.{inner}"
    return str(key)


def _check_modules(modules: Mapping[Any, Any], origin: _Origin) -> None:
    for name, precision in modules.items():
        if not isinstance(name, str):
            raise TypeError(
                f"modules in {origin} must be named by strings, their paths in the model or "
                f"patterns of them; got {getattr(name, '__name__', type(name).__name__)} in the "
                f"place of one. {origin.mend_in('modules', 'blocks.*.norm', 'float')}"
            )
        if precision not in PRECISIONS:
            mended = meant(precision, PRECISIONS) or "float"
            raise ValueError(
                f"a module in {origin} is 'float' or 'half'; got {precision!r} for {name!r}"
                f"{did_you_mean(precision, PRECISIONS)} {origin.mend_in('modules', name, mended)}"
            )


def _check_inputs(inputs: Any, origin: _Origin) -> None:
    mend = origin.mend_in("inputs", "targets", _LEFT_ALONE)
    if not isinstance(inputs, Mapping):
        raise ValueError(
            f"inputs in {origin} must be a table of arguments of the model's forward; got "
            f"{inputs!r}. {mend}"
        )
    for name, rule in inputs.items():
        if not isinstance(name, str):
            raise TypeError(
                f"inputs in {origin} must be named by strings, as arguments of the model's "
                f"forward; got {type(name).__name__} in the place of one. {mend}"
            )
        if rule != _LEFT_ALONE:
            raise ValueError(
                f"an input in {origin} is {_LEFT_ALONE!r}, and not cast, or has no rule; got "
                f"{rule!r} for {name!r}. {origin.mend_in('inputs', name, _LEFT_ALONE)}"
            )
