"""What functions and methods of Python itself return, where rules need to know."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from .reader import Reader
from .values import Arguments, Const, Imported, Items, Made, Partial, Table, Value, flat

_GROUPS = {"add_argument_group", "add_mutually_exclusive_group", "add_parser"}
_MEMBERS = itertools.count()


def of_parser(reader: Reader, parser: Made, name: str, arguments: Arguments) -> Value:
    """Return what a method of an argparse.ArgumentParser returns."""
    if name in _GROUPS:
        return parser
    if name == "add_argument":
        _add_option(reader, parser, arguments)
    if name in ("parse_args", "parse_known_args"):
        options = reader.attribute(parser, "(options)")
        return options if name == "parse_args" else Items([options, Value()])
    return Value()


def _add_option(reader: Reader, parser: Made, arguments: Arguments) -> None:
    flags = [str(one.value) for one in arguments.positional if isinstance(one, Const)]
    dest = arguments.keywords.get("dest")
    chosen = next((flag for flag in flags if flag.startswith("--")), (flags or [""])[0])
    name = dest.value if isinstance(dest, Const) else chosen.lstrip("-").replace("-", "_")
    option = reader.attribute(reader.attribute(parser, "(options)"), str(name))
    option.default = arguments.keywords.get("default")


def of_container(reader: Reader, owner: Value, name: str, arguments: Arguments) -> Value | None:
    """Return what a method of a list or dict returns, which may change it; None for others."""
    if isinstance(owner, Items) and name in ("append", "add", "extend"):
        for one in arguments.positional:
            new = reader.elements(one) if name == "extend" else [one]
            owner.items += [item for item in new or [] if item not in owner.items]
        return Const(None)
    if isinstance(owner, Table) and name == "values":
        return Items(owner.entries.values())
    if isinstance(owner, Table) and name == "items":
        return Items(Items([Value(key), one]) for key, one in owner.entries.items())
    if isinstance(owner, Table) and name == "update":
        for one in arguments.positional:
            owner.entries |= one.entries if isinstance(one, Table) else {one.key: one}
        owner.entries |= {repr(key): one for key, one in arguments.keywords.items()}
        return Const(None)
    return None


def _range(reader: Reader, arguments: Arguments) -> Value | None:
    limits = [one.value for one in arguments.positional if isinstance(one, Const)]
    if len(limits) != len(arguments.positional) or not all(isinstance(n, int) for n in limits):
        return None
    try:
        numbers = range(*limits)
    except (TypeError, ValueError):
        return None
    return Items(map(Const, numbers)) if len(numbers) <= 8 else None


def _enumerate(reader: Reader, arguments: Arguments) -> Value | None:
    items = reader.elements(arguments.positional[0]) if arguments.positional else None
    start = arguments.get("start", 1) or Const(0)
    first = start.value if isinstance(start, Const) else None
    if items is None or not isinstance(first, int):
        return None
    return Items(Items([Const(number), item]) for number, item in enumerate(items, first))


def _zip(reader: Reader, arguments: Arguments) -> Value | None:
    columns = [reader.elements(one) for one in arguments.positional]
    known = [column for column in columns if column is not None]
    if not known:
        return None
    rows = range(min(map(len, known)))
    return Items(
        Items(Value() if column is None else column[row] for column in columns) for row in rows
    )


def _dict(reader: Reader, arguments: Arguments) -> Value | None:
    if arguments.positional or arguments.is_open:
        return None
    return Table({repr(key): value for key, value in arguments.keywords.items()})


def _getattr(reader: Reader, arguments: Arguments) -> Value | None:
    name = arguments.get("name", 1)
    if isinstance(name, Const) and isinstance(name.value, str):
        return reader.attribute(arguments.positional[0], name.value)
    # which optimizer it is may be an option
    return Imported("torch.optim.Optimizer") if _is_torch_optim(arguments) else None


def _is_torch_optim(arguments: Arguments) -> bool:
    owner = arguments.get("object", 0)
    return isinstance(owner, Imported) and owner.dotted == "torch.optim"


def _isinstance(reader: Reader, arguments: Arguments) -> Value | None:
    """Tell what is known of lists, tuples and dicts that the script itself has made."""
    if len(arguments.positional) != 2:
        return None
    value, of = arguments.positional
    asked = {one.dotted for one in flat(of) if isinstance(one, Imported)}
    if isinstance(value, Table):
        return Const("builtins.dict" in asked) if asked else None
    if not isinstance(value, Items):
        return None
    may_be = asked & {"builtins.list", "builtins.tuple", "builtins.set"}
    if not may_be:
        return Const(False) if asked else None
    return Const(True) if {"builtins.list", "builtins.tuple"} <= may_be else None


def _import_module(reader: Reader, arguments: Arguments) -> Value | None:
    name = arguments.get("name", 0)
    return Imported(name.value) if isinstance(name, Const) and name.value else None


def _partial(reader: Reader, arguments: Arguments) -> Value | None:
    if not arguments.positional:
        return None
    callee, *others = arguments.positional
    return Partial(callee, Arguments(others, arguments.keywords, arguments.is_open))


def _chain(reader: Reader, arguments: Arguments) -> Value | None:
    return Items(arguments.positional)


def _auto(reader: Reader, arguments: Arguments) -> Value | None:
    """Return the value of a member of an enumeration, which equals no other and no literal."""
    return Const(("enum.auto", next(_MEMBERS)))


#: Functions of which more is known than that they were called.
RESULTS: dict[str, Callable[[Reader, Arguments], Value | None]] = {
    "builtins.range": _range,
    "builtins.enumerate": _enumerate,
    "builtins.zip": _zip,
    "builtins.dict": _dict,
    "builtins.getattr": _getattr,
    "builtins.isinstance": _isinstance,
    "importlib.import_module": _import_module,
    "functools.partial": _partial,
    "itertools.chain": _chain,
    "enum.auto": _auto,
}
