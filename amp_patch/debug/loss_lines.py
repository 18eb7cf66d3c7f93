"""Which line of the script has called each operator of a loss: that code runs but once.

Knows frames and the numbers of autograd's nodes; nothing of what is looked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode

from amp_patch.common.warn_once import NOT_THE_USERS, users_frame

from .places import next_node

#: So many calls of functions are remembered: a loss has a few.
_MOST = 5000


class _Noted(NamedTuple):
    """The nodes that one call of a function has made, and the line that called it."""

    first: int
    end: int
    line: tuple[str, int]


class LossLines(TorchFunctionMode):
    """Notes the lines while it is entered, in this thread.

    Args:
        is_off: whether nothing is to be noted now: in a model, say, whose calls are run again.
    """

    def __init__(self, is_off: Callable[[], bool]) -> None:
        super().__init__()
        self._is_off = is_off
        self._noted: deque[_Noted] = deque(maxlen=_MOST)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = next_node()
        result = func(*args, **(kwargs or {}))
        end = next_node()
        if end != first and not self._is_off():
            frame = users_frame()
            file = frame.f_code.co_filename
            if not file.startswith(NOT_THE_USERS):
                self._noted.append(_Noted(first, end, (file, frame.f_lineno)))
        return result

    def line_of(self, number: int) -> tuple[str, int] | None:
        """Return the file and the line that has made a node; None where it is not known.

        Args:
            number: of the node, ``_sequence_nr()``.
        """
        for one in reversed(self._noted):
            if one.first <= number < one.end:
                return one.line
        return None
