"""How long a script is watched for mistakes that cost time to look for.

Who makes one makes it at once: to look in every step would cost the host more than what is looked
at.
"""

from __future__ import annotations

import sys

#: So many of the first passes or steps of each optimizer are looked at.
WATCHED = 16


class EarlyLooks:
    """Counts down the first looks for something that a script may do.

    Args:
        most: how many there are, unless something is found.

    Attributes:
        left: how many are still to be made. Each step asks, so it is no property: that is a call.
    """

    def __init__(self, most: int = WATCHED) -> None:
        self.left = self._most = most

    def count(self) -> None:
        """One was made, if any was left."""
        self.left = max(self.left - 1, 0)  # another thread may have made the last one

    def look_once(self) -> None:
        """Make one more where none is left."""
        self.left = self.left or 1

    def go_on(self) -> None:
        """Something was found: there is no last look."""
        self.left = sys.maxsize

    @property
    def are_endless(self) -> bool:
        """Whether something was found."""
        return self.left > self._most
