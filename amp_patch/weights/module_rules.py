"""Modules whose forward runs in fp32, or in half, because a rule names them; hooks do it.

Knows a model's modules and their paths; nothing of levels, nor where the rules come from.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from amp_patch.casting.libraries.library_casts import computes_in_float
from amp_patch.casting.mode import mode
from amp_patch.casting.regions import FloatRegion, HalfRegion, end_block
from amp_patch.casting.torch_compile import order_hooks
from amp_patch.common.did_you_mean import near
from amp_patch.levels import HALVES

from .half_model import FollowsCopies, cast_floats, dtype_of_weights, remove_hooks

#: Buffers of torch's batch norms, and by custom of others.
_STATISTICS = {"running_mean", "running_var"}


@dataclasses.dataclass(frozen=True)
class ModuleRegion:
    """The hooks of a module whose forward runs in a region.

    Args:
        precision: "float" or "half".
    """

    precision: str

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        (HalfRegion() if self.precision == "half" else FloatRegion()).__enter__()
        mode.modules.append((id(module), len(mode.around)))

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Forward hook; also called when the forward raised."""
        if mode.modules and mode.modules[-1][0] == id(module):
            _end_innermost()

    def attach(self, module: nn.Module) -> None:
        """Put the hooks on a module: the innermost, for the model's own set the mode around it."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, prepend=True, always_call=True)
        order_hooks(module._forward_hooks)


class RegionOfHalfResults(ModuleRegion):
    """The hooks of a module that `keeps_buffers`: it computes in fp32, and hands on half."""

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """Forward hook; also called when the forward raised."""
        super().leave(module, args, outputs)
        return outputs if mode.stored is None else cast_floats(outputs, mode.stored)


@dataclasses.dataclass(frozen=True)
class TakesDtype(FollowsCopies):
    """The hook of a module that meets inputs of another dtype than its weights.

    Args:
        dtype: of its weights, where `initialize` put it.
    """

    dtype: torch.dtype

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: cast floating inputs, but in a region, which casts by itself."""
        if mode.region is not None:
            return None
        dtype = (self.is_copy and dtype_of_weights(module)) or self.dtype
        args = tuple([cast_floats(value, dtype) for value in args])
        return args, {key: cast_floats(value, dtype) for key, value in kwargs.items()}

    def attach(self, module: nn.Module) -> None:
        """Put the hook on a module."""
        module.register_forward_pre_hook(self.enter, with_kwargs=True)


def attach(
    model: nn.Module,
    precisions: Mapping[str, str],
    stored: torch.dtype | None,
    batch_norms: bool = False,
) -> None:
    """Put the hooks on the modules of a model, in place of earlier ones.

    Args:
        model: as the level stores it.
        precisions: path of a module -> "float" or "half".
        stored: dtype of most of its weights, where no function casts: its other modules then cast
            what those with a rule hand on. None where functions cast.
        batch_norms: see `keeps_buffers`.
    """
    detach(model)
    if stored in HALVES:
        for module in keeps_buffers(model, precisions, batch_norms):
            RegionOfHalfResults("float").attach(module)
    # One module may have two paths.
    ruled = {
        model.get_submodule(path): ModuleRegion(precision) for path, precision in precisions.items()
    }
    for module, region in ruled.items():
        region.attach(module)
    if stored is None or not ruled:
        return
    for module in takers(model, ruled, stored):
        TakesDtype(stored).attach(module)


def takers(model: nn.Module, ruled: Collection[nn.Module], stored: torch.dtype) -> list[nn.Module]:
    """Return the modules that have to cast what those with a rule hand on."""
    return [one for one in model.modules() if one not in ruled and _has_weights_in(one, stored)]


def in_float(model: nn.Module, precisions: Mapping[str, str]) -> set[nn.Module]:
    """Return the modules that compute in fp32 by a rule: their own, or one for what they are in.

    Args:
        model: any.
        precisions: path of a module -> "float" or "half"; the innermost decides.
    """
    # One module may have two paths.
    paths = model.named_modules(remove_duplicate=False)
    return {module for path, module in paths if _innermost(path, precisions) == "float"}


def in_float_by_library(model: nn.Module) -> set[nn.Module]:
    """Return the modules that compute in fp32 by a rule for a library's class, and what is in them.

    While these rules act: `library_functions` has patched the classes.
    """
    modules = [one for one in model.modules() if computes_in_float(type(one))]
    return {inner for module in modules for inner in module.modules()}


def keeps_buffers(
    model: nn.Module, precisions: Mapping[str, str], batch_norms: bool
) -> set[nn.Module]:
    """Return the modules that compute in fp32, and hand on half, for what their buffers hold.

    Frequencies, in modules without weights that have a buffer called ``inv_freq``. So most models
    of transformers and other libraries call what they multiply positions by, to take sines and
    cosines of it: rounded to half, far positions are turned by wrong angles. And running
    statistics, in half of which small steps are lost.

    Args:
        model: any.
        precisions: path of a module -> "float" or "half"; what has such a rule is left out.
        batch_norms: whether batch norms, and norms alike, that are not torch's are among them.
    """
    return {
        module
        for path, module in model.named_modules(remove_duplicate=False)
        if (_has_frequencies(module) or (batch_norms and _has_statistics(module)))
        and _innermost(path, precisions) is None
    }


def _has_frequencies(module: nn.Module) -> bool:
    found = any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
    return found and next(module.parameters(), None) is None


def _has_statistics(module: nn.Module) -> bool:
    """Tell a norm with statistics that move: not a frozen one, of which all are buffers.

    Torch's batch norms are kept in fp32 as a whole, and compute with half inputs.
    """
    buffers = dict(module.named_buffers(recurse=False))
    if isinstance(module, _BatchNorm) or not buffers.keys() >= _STATISTICS:
        return False
    return "num_batches_tracked" in buffers or any(True for _ in module.parameters(recurse=False))


def detach(model: nn.Module) -> None:
    """Remove the hooks that `attach` put on the modules of a model, or of what it is a copy of."""
    for module in model.modules():
        remove_hooks(module, (ModuleRegion, TakesDtype))


def leave_but(running: Collection[int]) -> None:
    """The forwards of all modules but these are over: an interrupt may have ended one."""
    while mode.modules and mode.modules[-1][0] not in running:
        _end_innermost()


def leave_all() -> None:
    """No module's forward runs in this thread: an interrupt may have ended one without a word."""
    leave_but(())


def find(
    models: Sequence[nn.Module], numbers: Sequence[int], rules: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return, for each model, path of a module -> the precision that the rules give it.

    Args:
        models: whose modules are named as ``named_modules()`` does, "" being the model itself.
        numbers: of the models; what a rule for one of several models begins with: ``"1:head"``.
        rules: path or pattern (`fnmatch`: a star also stands for dots) -> precision. Of several
            that match, the last one decides. One for a module without a forward, as an
            ``nn.ModuleList`` is, stands for each in it that has no rule of its own.

    Raises:
        ValueError: a rule names no module of these models, and none of a model with a number that
            is not among them.
    """
    found: list[dict[str, str]] = [{} for _ in models]
    paths = [[path for path, _ in one.named_modules(remove_duplicate=False)] for one in models]
    for rule, precision in rules.items():
        number, pattern = _split(rule)
        meant = [i for i, own in enumerate(numbers) if number in (None, own)]
        matched = {i: [path for path in paths[i] if _matches(path, pattern)] for i in meant}
        for i, names in matched.items():
            # What is said last stands last: the hooks of a module with two paths go by it.
            for name in names:
                found[i].pop(name, None)
                found[i][name] = precision
        if meant and not any(matched.values()):
            raise ValueError(_unknown(pattern, [path for i in meant for path in paths[i]]))
    for model, precisions in zip(models, found, strict=True):
        for path in sorted(precisions, key=lambda path: path.count("."), reverse=True):
            for inner in _called(model, path):
                precisions.setdefault(inner, precisions[path])
    return found


def _called(model: nn.Module, path: str) -> Iterator[str]:
    """Yield the path, or of a module that has no forward those of what is in it."""
    module = model.get_submodule(path)
    if getattr(module.forward, "__func__", None) is not nn.Module.forward:
        yield path
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _called(model, f"{path}.{name}".lstrip("."))


def _innermost(path: str, precisions: Mapping[str, str]) -> str | None:
    while path and path not in precisions:
        path = path.rpartition(".")[0]
    return precisions.get(path)


def _end_innermost() -> None:
    _, depth = mode.modules.pop()
    # Blocks inside of the forward that an interrupt left open end with it.
    while len(mode.around) >= depth:
        end_block()


def _has_weights_in(module: nn.Module, dtype: torch.dtype) -> bool:
    params = module._parameters.values()
    return is_parametrized(module) or any(
        param is not None and param.dtype is dtype for param in params
    )


def _split(rule: str) -> tuple[int | None, str]:
    """Return the number before a colon, if there is one, and the pattern."""
    match = re.fullmatch(r"(\d+):(.*)", rule)
    return (None, rule) if match is None else (int(match[1]), match[2])


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


def _unknown(pattern: str, paths: Iterable[str]) -> str:
    names = [path for path in dict.fromkeys(paths) if path]
    close = near(pattern, names, likeness=0.6)
    guess = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    example = (close or names or ["blocks.0"])[0]
    return (
        "a rule of a module must name one of the model's, as model.named_modules() does, or a "
        f"pattern that some match; got {pattern!r}{guess} Write rules={{'modules': {{{example!r}: "
        f'\'float\'}}}}, or in a rules file "{example}" = "float" below a line [modules].'
    )
