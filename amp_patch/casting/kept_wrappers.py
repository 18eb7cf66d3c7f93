"""Wrappers of torch's functions that stay from one `amp.initialize` to the next, made once each.

To make the hundreds of a level takes a third of the time of a call of `initialize`. Knows nothing
of what they do, nor where they are put.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any


class KeptWrappers:
    """A table of wrappers, by the function that each wraps and all that decides what it does."""

    def __init__(self) -> None:
        # By the ids of functions: two names of one in C may be two objects, which are equal.
        # Each entry holds its function, too, so that the id stays that function's.
        self._made: dict[tuple[int, Hashable], tuple[Any, Any]] = {}
        #: The ids of all wrappers, of which this table holds each once.
        self.ids: set[int] = set()

    def get(self, function: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the wrapper that was made for a function by a key, or make it.

        Args:
            function: is kept with it, so it must be one that lives as long as the process does.
            key: what the wrapper depends on beside the function.
            make: returns a wrapper.
        """
        place = id(function), key
        if place not in self._made:
            wrapper = make()
            self._made[place] = function, wrapper
            self.ids.add(id(wrapper))
        return self._made[place][1]

    def forget_held(self) -> None:
        """Keep none to which anything else refers, such as what torch.compile has compiled.

        To be called when all that can be put back has been: `HeldFunctions.undo` would look for
        the rest each time, through every living module and in vain.
        """
        for key in list(self._made):
            if sys.getrefcount(self._made[key][1]) > 2:  # the table's, and the argument's
                self.ids.discard(id(self._made.pop(key)[1]))
