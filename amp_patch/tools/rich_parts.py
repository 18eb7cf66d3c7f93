"""What tools print with of rich, which draws a random number when it is imported.

It is given back: a script that sweeps a function, or asks for statistics, goes on with the numbers
that it would have without them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Leave Python's random numbers, after the block, as they were before it."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


with random_kept():
    from rich import box
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

__all__ = ["Console", "Live", "Table", "Text", "box", "random_kept"]
