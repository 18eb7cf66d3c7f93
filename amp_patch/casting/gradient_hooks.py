"""Runs a script's hooks of float32 gradients as plain PyTorch does: no function casts in them.

torch.autocast is over when a backward runs; the casts of O1 and O4 are on in the whole process.
They stay on where a gradient is in half: what a hook computes of it then is what the forward would.
What the forward of a model in half registers may mix half and float32, as that forward may. Knows
the mode of the thread and torch's tables of hooks; nothing of the loss scale.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from amp_patch.levels import HALVES
from amp_patch.patching import Patches

from .argument_casts import tensors_in
from .mode import OFF, PROCESS, casts_are_on, mode

Hook = Callable[..., Any]
#: torch's tables of the hooks of a tensor, and of a module, that a backward calls.
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULES = ("_backward_hooks", "_backward_pre_hooks")


def in_its_mode(hook: Hook) -> Hook:
    """Return a hook that computes in the mode of the forward that registers it, casts apart.

    Args:
        hook: of a tensor, of several or of a module; gets and returns gradients.
    """
    return hook if isinstance(hook, _Hook) else _Hook(hook)


def own(hook: Hook) -> Hook:
    """Return what the script has registered, of what torch's tables hold."""
    return hook.of_script if isinstance(hook, _Hook) else hook


def follow(models: Iterable[nn.Module], patches: Patches) -> None:
    """Have the hooks that models have already run so, those of their parameters too.

    Args:
        models: in which functions cast.
        patches: puts the hooks back.
    """
    for model in models:
        for one in model.parameters():
            _follow(one, _OF_TENSORS, patches)
        for module in model.modules():
            _follow(module, _OF_MODULES, patches)


def _follow(owner: Any, tables: Iterable[str], patches: Patches) -> None:
    hooks: Iterable[dict[int, Hook]] = filter(None, (getattr(owner, name, None) for name in tables))
    for table, key in [*chain.from_iterable(((one, key) for key in one) for one in hooks)]:
        hook = table[key]
        if not str(getattr(hook, "__module__", "")).startswith("torch."):
            patches.replace(table, key, in_its_mode(hook), weakly=True)


class _Hook:
    """A hook in its mode. A class: a module's hooks are copied and pickled with it.

    Attributes:
        of_script: the hook itself.
    """

    def __init__(self, hook: Hook) -> None:
        functools.update_wrapper(self, hook)
        self.of_script = hook
        self._stored = mode.stored

    def __call__(self, *args: Any) -> Any:
        if self._stored is None and (not casts_are_on() or _has_half(args)):
            return self.of_script(*args)
        noted = {**PROCESS, "dtype": OFF, "level": OFF, "stored": self._stored, "in_hook": True}
        return mode.run(noted, self.of_script, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return in_its_mode(copy.deepcopy(self.of_script, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        # What is pickled is the script's own, so that who loads it needs no amp_patch.
        return operator.getitem, ((self.of_script,), 0)


def _has_half(args: tuple[Any, ...]) -> bool:
    if len(args) == 1 and isinstance(args[0], Tensor):  # as most hooks have
        return args[0].dtype in HALVES
    return any(one.dtype in HALVES for one in tensors_in(args))
