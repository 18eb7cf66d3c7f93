"""Wrappers of single functions, as scripts import them from apex.amp.wrap."""

from __future__ import annotations

import contextlib
from typing import Any

from amp_patch.session import session

from . import utils

__all__ = ["cached_cast", "disable_casts", "make_cast_wrapper", "make_promote_wrapper", "promote"]


def make_cast_wrapper(orig_fn: Any, cast_fn: Any, handle: Any, try_caching: bool = False) -> Any:
    """Return a function whose arguments are cast, to fp16 by `utils.maybe_half`, else to fp32."""
    return session.casts.wrap(orig_fn, "half" if cast_fn is utils.maybe_half else "float")


def make_promote_wrapper(orig_fn: Any, cast_fn: Any = None, handle: Any = None) -> Any:
    """Return a function whose arguments of mixed dtypes are cast to fp32."""
    return session.casts.wrap(orig_fn, "promote")


def cached_cast(
    mod: Any, fn: str, cast_fn: Any, handle: Any, try_caching: bool = False, verbose: bool = False
) -> None:
    """Cast the arguments of ``mod.fn`` until `amp.deactivate`."""
    utils.set_func(
        mod, fn, make_cast_wrapper(utils.get_func(mod, fn), cast_fn, handle, try_caching)
    )


def promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Cast arguments of mixed dtypes of ``mod.fn`` until `amp.deactivate`."""
    utils.set_func(mod, fn, make_promote_wrapper(utils.get_func(mod, fn), handle=handle))


def disable_casts(handle: Any) -> contextlib.AbstractContextManager[Any]:
    """Switch casts off; see `amp_patch.amp.disable_casts`."""
    off: contextlib.AbstractContextManager[Any] = handle._disable_casts()
    return off
