"""Whether a script clears its gradients where it must: after each step, and not before it.

Knows the passes and the gradients of one optimizer, and whether these overflowed; no scale.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_patch.common.early_looks import WATCHED
from amp_patch.common.warn_once import warn_once
from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs

from .skip import Skip


class Zeroing:
    """Tells of gradients that were cleared before their step, and of those that are used twice.

    Args:
        gradients: of the optimizer.
        skip: of the optimizer.
        drops_used: True where a step drops what masters were given; the half gradients that it was
            made of may still be there then, and plain PyTorch would add to them.

    Attributes:
        passes: how many there were.
        has_written: True once the backward of one has written gradients.
        is_watched: True in the first of them, in which mistakes of the script are looked for.
        was_cleared: True where the gradients of the last one were cleared before a step.
        was_abandoned: True where an exception has ended the last one, which drops its gradients.
    """

    def __init__(self, gradients: Gradients, skip: Skip, drops_used: bool) -> None:
        self._gradients, self._skip, self._drops_used = gradients, skip, drops_used
        self.passes = 0
        self.has_written = False
        self.is_watched = True
        self.was_cleared = self.was_abandoned = False
        self._passes_stepped = 0
        self._had_used = False
        # what the next step warns of, where a pass has added to used gradients; else ""
        self._added_to_used = ""
        # whether the step that runs has found gradients that an earlier one has used
        self._found_used = False
        self._is_empty = False  # whether the step that runs, or the pass that ends, has none
        self._has_stepped = False  # whether a step had some
        self._is_alone = True  # whether the last pass was of this optimizer alone
        self._has_left = False  # whether that pass has left any, while it is watched

    @property
    def has_earlier(self) -> bool:
        """Whether passes before the last one have left what no step has used, if they left any."""
        return self.passes - self._passes_stepped > 1

    def begin(self, pairs: Callable[[], ParamPairs], is_alone: bool = True) -> None:
        """A pass begins, and nothing was done about the gradients yet.

        Args:
            pairs: returns those of the optimizer. It takes the host time, and is seldom called.
            is_alone: whether the pass is of this optimizer alone. Who clears by hand what one of
                several is to step may freeze its parameters so.
        """
        self._had_used = self.is_watched and self._has_used(pairs)
        self.was_cleared = self.was_abandoned = self._has_left = False
        self._is_alone = is_alone
        self.passes += 1
        self.is_watched = self.passes <= WATCHED

    def look_at_written(self, pairs: ParamPairs) -> None:
        """The backward is over, if there was one; note whether it reached any parameter.

        Where plain PyTorch would have added to used gradients, the step with them is warned of: a
        pass may be meant for an input, or another optimizer, and the script clear what it left.
        """
        if self.has_written and not self._had_used and not self.is_watched:
            return
        had_used, self._had_used = self._had_used, False
        if self._gradients.wrote(pairs):
            self.has_written, self._has_left = True, self._is_alone
            if had_used:
                place = "a scale_loss() block" if self._is_alone else "an optimizer.step()"
                self._added_to_used = self._added_to_used or place

    def note_other(self) -> None:
        """A pass of another optimizer begins: the script goes on without what this one has lost."""
        self.was_abandoned = self._has_left = False

    def end_step(self) -> None:
        """All that passes have left was stepped, or is gone without the script's doing."""
        # a step may make backwards of its own, after which none of the last step's are left
        found_used = self._found_used and self._gradients.used_at_masters.are_left
        if place := self._added_to_used or ("an optimizer.step()" if found_used else ""):
            _warn_of_used(place)
        self._added_to_used, self._found_used = "", False
        if self.passes > self._passes_stepped and not self._is_empty:
            self._has_stepped = True
        self._is_empty = False
        self._passes_stepped = self.passes
        self.was_abandoned = False

    def abandon(self) -> None:
        """An exception has ended the pass, or its unscaling, and its gradients go."""
        self._added_to_used, self._is_empty = "", True
        self.end_step()
        self.was_abandoned = True

    def note_cleared(self, is_lost: bool) -> None:
        """The script is about to clear the gradients.

        Args:
            is_lost: whether there are some that no step has used, if there was a pass.
        """
        self._had_used = self.was_abandoned = False
        self._added_to_used = ""
        if self.passes > self._passes_stepped:
            self.was_cleared = is_lost

    def tell_of_no_gradients(self, pairs: Callable[[], ParamPairs]) -> None:
        """Warn, once, where a step has none, for they were cleared, or a step has used them.

        Args:
            pairs: as for `begin`.
        """
        if self.was_cleared:
            self._tell_of_cleared(pairs(), "optimizer.zero_grad()")
        elif self._is_behind_abandoned(pairs):
            warn_once(
                "a scale_loss() block that an exception ends, or the close of a generator, drops "
                "its gradients; got an optimizer.step() after one, which has none. Do after the "
                "block what may raise, or yields. To go on after an error that you catch (out of "
                "memory, say), call optimizer.zero_grad() where you catch it."
            )
        elif self.is_watched and self._has_left and self.passes > self._passes_stepped:
            self._tell_of_cleared(pairs(), "`p.grad = None`")
        elif self.is_watched and self._has_used(pairs):
            _warn_of_used("an optimizer.step()")
        elif self._gradients.used_at_masters.are_left:
            self._found_used = self._gradients.are_used(pairs())

    def _is_behind_abandoned(self, pairs: Callable[[], ParamPairs]) -> bool:
        if not self.was_abandoned or self._skip.is_certain:  # an error at an overflow ended it
            return False
        return self._gradients.are_cleared(pairs())

    def _tell_of_cleared(self, pairs: ParamPairs, by: str) -> None:
        self.was_cleared = False
        self._is_empty = self._gradients.are_cleared(pairs)
        # A step without those that overflowed is what is meant. So is one that comes after others
        # that had gradients: the script leaves out a batch, for its norm say.
        if self._is_empty and not self._has_stepped and not self._skip.has_overflowed():
            warn_once(
                f"gradients must last until the step; got an optimizer.step() after {by} has "
                "cleared what scale_loss() left, so that it has none. Call optimizer.zero_grad() "
                "after optimizer.step(), or before the block."
            )

    def _has_used(self, pairs: Callable[[], ParamPairs]) -> bool:
        """Return whether gradients are left that a step has used, and masters have dropped them."""
        may_be = self._drops_used and 0 < self.passes == self._passes_stepped
        return may_be and self._gradients.are_used(pairs())


def _warn_of_used(place: str) -> None:
    warn_once(
        "at a level with fp32 masters the gradients of a step are dropped with it, where plain "
        f"PyTorch adds to them or steps them again; got {place} with those of the last step still "
        "there. Call optimizer.zero_grad() in each step; after it, give masters anew what they are "
        "to have of yours, as views of a flat buffer."
    )
