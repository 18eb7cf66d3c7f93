"""Methods of an optimizer that others stand in the place of, until they are undone; its hooks.

Knows optimizers; nothing of steps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, cast

from torch.optim import Optimizer

from amp_patch.casting.torch_compile import never_trace
from amp_patch.common.imported_modules import is_left_alone
from amp_patch.patching import Patches, bind


def takes_hooks(optimizer: Optimizer, name: str) -> bool:
    """Return whether torch can register a hook in an optimizer's dict of this name.

    A wrapper that never was initialized as an optimizer has none, or an ordinary dict of its own,
    as many a Lookahead, to which torch's handles cannot refer; its steps and loads call no hooks.
    """
    return isinstance(getattr(optimizer, name, None), OrderedDict)


def own_methods(optimizer: Optimizer) -> list[str]:
    """Return the names of public methods that an optimizer's class has and torch's have not.

    Such as ``first_step`` of SAM, ``update_hessian`` of Sophia, ``train`` of a schedule-free one.
    """
    classes = type(optimizer).__mro__
    of_torch = set(chain.from_iterable(vars(one) for one in classes if _is_left_alone(one)))
    return [
        name
        for name in dict.fromkeys(chain.from_iterable(vars(one) for one in classes))
        if name not in of_torch
        and not name.startswith("_")
        and isinstance(inspect.getattr_static(optimizer, name), types.FunctionType)
    ]


def bases_without_hooks(optimizer: Optimizer) -> list[type[Optimizer]]:
    """Return the classes whose step the optimizer's own methods may call, and torch no hooks then.

    By ``super().step()``: hooks are called from when an optimizer of that very class was made.
    """
    if not own_methods(optimizer):
        return []
    return [
        base
        for base in type(optimizer).__mro__[1:]
        if "step" in vars(base) and base is not Optimizer and issubclass(base, Optimizer)
        if not getattr(base.step, "hooked", False)
    ]


def _is_left_alone(kind: type) -> bool:
    return kind is object or is_left_alone(kind.__module__)


class ReplacedMethods:
    """What stands in the place of an optimizer's methods, and of those that it wraps."""

    def __init__(self) -> None:
        self._patches = Patches()
        # Of one place, and no threading.Event: Ctrl-C in the code of that leaves its lock taken.
        self._undone = [False]
        self._by_name: dict[str, Callable[..., Any]] = {}
        self._is_in_original = False

    def replace(
        self, optimizer: Optimizer, name: str, method: Callable[..., Any], is_wrapped: bool = False
    ) -> None:
        """Replace a method of an optimizer by ``method(original, *args)``.

        The replacement does not hold the object that ``method`` is bound to: when the optimizer
        goes, so does all that belongs to it, without waiting for the garbage collector.

        Args:
            optimizer: whose method is replaced.
            name: of the method.
            method: bound to an object.
            is_wrapped: whether the optimizer is one that another wraps.
        """
        # A WeakMethod is written in Python: a call of it takes as long as all that is done here.
        bound_to = cast(types.MethodType, method)
        weak, function = weakref.ref(bound_to.__self__), bound_to.__func__
        own = vars(optimizer).get(name)
        kind, reference = type(optimizer), weakref.ref(optimizer)
        undone = self._undone  # not self, which holds the replacements

        def original(*args: Any, **kwargs: Any) -> Any:
            if own:
                return own(*args, **kwargs)
            return getattr(kind, name)(reference(), *args, **kwargs)  # replaced since, perhaps

        # wraps() also hands on the mark by which LR schedulers know a step they have seen.
        @functools.wraps(own or getattr(kind, name))
        @never_trace
        def replacement(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            alive = weak()
            # A scheduler that was built later still calls this, and what is released may live on
            # until the garbage collector comes.
            if alive is None or undone[0]:
                return original(*args, **kwargs)
            return function(alive, original, *args, **kwargs)

        bound = bind(replacement, optimizer)
        if not is_wrapped:
            self._by_name[name] = bound
        self._patches.replace(optimizer, name, bound)

    def in_place_of(self, name: str) -> Callable[..., Any] | None:
        """Return what stands in the place of the optimizer's own method; None while it calls that.

        What it calls may be of the class that `bypasses` replaces methods of: the call must not be
        handed back.
        """
        return None if self._is_in_original else self._by_name.get(name)

    @contextlib.contextmanager
    def in_original(self) -> Iterator[None]:
        """Call what was replaced inside."""
        was_in_original, self._is_in_original = self._is_in_original, True
        try:
            yield
        finally:
            self._is_in_original = was_in_original

    def undo(self) -> None:
        """Put the optimizer's own methods back; what still holds a replacement reaches them."""
        self._undone[0] = True
        self._patches.undo()
