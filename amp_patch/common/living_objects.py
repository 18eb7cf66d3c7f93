"""Finds the living instances of a class, whatever other threads do; calls what lives still."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import chain, starmap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind")
KindOfModule = TypeVar("KindOfModule", bound=nn.Module)


def instances(base: type[Kind]) -> list[Kind]:
    """Return every instance of a class, or of its subclasses, in this process.

    May take a tenth of a second. An object is asked for its type only: asked for its class, a lazy
    proxy would load what it stands for. Where another thread may free some of them, do not ask for
    tensors: torch gives the interpreter up while it frees one.

    Args:
        base: a class made in Python, for its instances refer to it.
    """
    # Nobody may hold the list of gc.get_objects() while another thread runs: that thread's tuples
    # are in it, and CPython raises SystemError where one is held before it is finished. So it is
    # made and dropped within one call, in which no other thread can run.
    kinds = set(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))
    found: set[Any] = {kind for kind in kinds if issubclass(kind, base)}
    return [one for one in gc.get_referrers(*found) if type(one) in found]


def living_modules(base: type[KindOfModule]) -> list[KindOfModule]:
    """Return every living module of a class that `is_set_up`."""
    return [one for one in instances(base) if is_set_up(one)]


def is_set_up(module: nn.Module) -> bool:
    """Return whether a module has its parts.

    A ``copy.deepcopy`` that failed leaves one that has none, for as long as its traceback is kept,
    which a notebook does until the next error.
    """
    return "_modules" in vars(module) or isinstance(module, torch.jit.ScriptModule)


def dtype_of(tensor: Tensor) -> torch.dtype | None:
    """Return a tensor's dtype; None of one without memory that torch is about to free, or to fill.

    A backward holds such tensors; those of torch 2.6 can be found, and raise when they are asked.
    """
    try:
        return tensor.dtype
    except RuntimeError:
        return None


def is_leaf(tensor: Tensor) -> bool:
    """Return `Tensor.is_leaf`; False where torch raises in the place of an answer.

    It does for a view that was made under ``no_grad()``, once somebody has written to what it is a
    view of with gradients on. Such a one may live anywhere in the process, unknown to its script.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def weakly(method: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call
