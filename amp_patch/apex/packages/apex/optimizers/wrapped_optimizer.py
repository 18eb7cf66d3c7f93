"""What an optimizer around another one shows of it."""

from __future__ import annotations

from typing import Any


class WrappedOptimizer:
    """``state`` and ``param_groups`` are those of the optimizer inside, and may be set.

    Attributes:
        optimizer: the one inside, whose groups hold the masters.
    """

    optimizer: Any

    @property
    def state(self) -> Any:
        """The state, by master."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with the masters in them."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value
