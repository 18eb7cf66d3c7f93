"""The public names and how they are called: what may not change when the inside is rebuilt.

`public_names.txt` holds them all. A change that is meant is entered by
``python tests/test_public_names.py > tests/public_names.txt``.
"""

import importlib.metadata
import inspect
from collections.abc import Iterator
from pathlib import Path

import click

import amp_patch

LIST = Path(__file__).with_name("public_names.txt")
MODULES = (
    "amp_patch.amp",
    "amp_patch.apex",
    "amp_patch.cuda_graph",
    "amp_patch.debug",
    "amp_patch.optimizers",
)


def signatures(owner: object, prefix: str, names: list[str]) -> Iterator[str]:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, type):
            yield f"{prefix}.{name}{inspect.signature(value)}"
            bases = [one for one in value.__mro__ if one.__module__.startswith("amp_patch.")]
            own = {one for base in bases for one in vars(base) if not one.startswith("_")}
            yield from signatures(value, f"{prefix}.{name}", sorted(own))
        elif callable(value):
            yield f"{prefix}.{name}{inspect.signature(value)}"
        else:
            yield f"{prefix}.{name}"


def public_names_of(module_name: str) -> list[str]:
    """The names in ``__all__``, else those that the module itself defines."""
    module = importlib.import_module(module_name)
    defined = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module_name and not name.startswith("_")
    ]
    return sorted(getattr(module, "__all__", defined))


def options(command: click.Command, prefix: str) -> Iterator[str]:
    for param in command.params:
        yield f"{prefix}: {param.param_type_name} {'/'.join(param.opts)}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            sub = command.get_command(context, name)
            assert sub is not None
            yield from options(sub, f"{prefix} {name}")


def all_public() -> list[str]:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="amp-patch")
    lines = ["amp_patch.__version__", *signatures(amp_patch, "amp_patch", ["sweep"])]
    for module in MODULES:
        lines += signatures(importlib.import_module(module), module, public_names_of(module))
    return [*lines, *options(entry.load(), "amp-patch")]


def test_public_names_and_signatures_are_those_of_the_list() -> None:
    assert all_public() == LIST.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    print("\n".join(all_public()))
