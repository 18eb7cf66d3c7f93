"""What apex's lists ask for beyond amp_patch's own rules, as rules of amp_patch."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from amp_patch.casting.targets import rule_targets

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["rules_of_lists"]

_PATHS = {
    "torch.nn.functional": functional_overrides,
    "torch": torch_overrides,
    "torch.Tensor": tensor_overrides,
}
# torch's own promotion serves for most functions of the lists CASTS and SEQUENCE_CASTS.
_RULES = {
    "FP16_FUNCS": ("half", ("half",)),
    "FP32_FUNCS": ("float", ("float", "float_dtype")),
    "CASTS": ("promote", ("promote", None)),
    "SEQUENCE_CASTS": ("promote", ("promote", None)),
}


def _listed(module: types.ModuleType, name: str) -> list[str]:
    return [entry if isinstance(entry, str) else entry[0] for entry in getattr(module, name, [])]


_DEFAULTS = {
    (path, name): frozenset(_listed(module, name))
    for path, module in _PATHS.items()
    for name in (*_RULES, "BANNED_FUNCS")
}


def rules_of_lists(allow_banned: bool = False) -> dict[str, str]:
    """Return dotted path -> rule for what the lists say now, where the core does not say the same.

    Args:
        allow_banned: cast the arguments of banned functions to fp32; else these refuse half.
    """
    core = rule_targets()
    rules = {path: "off" for path in _removed() if path in core}
    for kind, (rule, same) in _RULES.items():
        rules |= {path: rule for path in _paths_of(kind) if core.get(path) not in same}
    rules |= dict.fromkeys(_in_place(), "refuse")
    rules |= dict.fromkeys(_paths_of("BANNED_FUNCS"), "float" if allow_banned else "refuse")
    return rules


def _paths_of(kind: str) -> Iterator[str]:
    """Yield the path of every function that a list of this kind means, if torch has it."""
    for path, module in _PATHS.items():
        names = _listed(module, kind)
        if path == "torch.Tensor":
            names = [*names, *_listed(torch_overrides, kind)]
        for name in names:
            if hasattr(_owner(module), name):
                yield f"{path}.{name}"


def _in_place() -> Iterator[str]:
    """Yield the path of the in-place variant of each fp32 function of torch, if torch has it."""
    for name in _listed(torch_overrides, "FP32_FUNCS"):
        for path, owner in (("torch", torch), ("torch.Tensor", torch.Tensor)):
            if hasattr(owner, f"{name}_"):
                yield f"{path}.{name}_"


def _removed() -> Iterator[str]:
    """Yield the path of every function that a script took out of the lists."""
    for (path, kind), names in _DEFAULTS.items():
        for name in names.difference(_listed(_PATHS[path], kind)):
            yield f"{path}.{name}"
            if path == "torch":
                yield f"torch.Tensor.{name}"


def _owner(module: Any) -> Any:
    return module.MODULE
