"""What modules are called: in their initialized model, and in a rules file.

Knows the models of the session; nothing of what runs in them.
"""

from __future__ import annotations

from torch import nn

from amp_patch.session import session


def root_of(module: nn.Module) -> tuple[nn.Module, str]:
    """Return the initialized model that a module is of, and the path of the module in it."""
    for root in [one for one in (module, *session.models.levels) if one in session.models.levels]:
        for path, one in root.named_modules():
            if one is module:
                return root, path
    return module, ""


def joined(path: str, name: str) -> str:
    """Return the path of a module in one that has a path itself."""
    return ".".join(filter(None, (path, name)))


def numbered(model: nn.Module, module: str) -> str:
    """Return a module as a rules file names it: with the number of its model among several."""
    numbers = session.models.numbers
    several = len(set(numbers.values())) > 1 and model in numbers
    return f"{numbers[model]}:{module}" if several else module


def named(model: nn.Module, path: str = "") -> str:
    """Return a module of what was called, a model or a part of it, as a rules file names it."""
    root, called = root_of(model)
    return numbered(root, joined(called, path))
