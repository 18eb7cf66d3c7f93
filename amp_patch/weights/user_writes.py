"""What users write to masters and to half parameters, and which of a pair follows the other.

By versions, and what no version tells of by addresses and bits. The rule is that of `FP32Values`.
Changes no numbers.
"""

from __future__ import annotations

from amp_patch.common.early_looks import WATCHED

from .fp32_values import FP32Values
from .lost_writes import tell_of_lost_writes
from .master_pairs import MasterPairs
from .moved_masters import MovedMasters
from .unseen_master_writes import UnseenMasterWrites


class UserWrites:
    """Writes to the pairs of one optimizer since these were equal.

    Args:
        pairs: of the optimizer.
        values: of the half parameters.
        may_move: see `MovedMasters`.

    Attributes:
        unseen: finds writes by ``master.data.copy_(t)``.
        moved: finds writes by ``master.data = t``.
    """

    def __init__(self, pairs: MasterPairs, values: FP32Values, may_move: bool) -> None:
        self._pairs, self._values, self._versions = pairs, values, pairs.versions
        self.unseen = UnseenMasterWrites(values.sums)
        self.moved = MovedMasters(pairs, self.unseen, may_move)
        # What versions the last forward has found, and how many before it had found the same.
        self._forwards: tuple[object, int] = None, 0

    def look_again(self) -> None:
        """A script may write next: the forwards that come are to look for it."""
        self._forwards = None, 0

    def give(self) -> None:
        """The user is given all masters, to write to until a step has been made, or skipped."""
        self.unseen.note_moved(self._pairs.local_masters())
        self._versions.give(self._pairs.half_versions(), self._pairs.master_versions())

    def end_giving(self) -> None:
        """All that the user wrote is in force, with a look at every pair."""
        self._versions.end_giving()
        self.unseen.note(self._pairs.local_masters())

    def note_new(self, count: int) -> None:
        """Pairs have come after the first ``count``; the user has them with the others."""
        self.unseen.note(self._pairs.local_masters()[count:])
        if self._versions.given:
            self._versions.give_new(self._pairs.half_versions(), self._pairs.master_versions())

    def are_any(self) -> bool:
        """Return whether masters were written to, or given to the user, who may have done it."""
        versions = self._versions
        if versions.given or self._pairs.master_versions() != versions.equal:
            return True
        moved = self.moved
        return (moved.was_set or moved.may_move) and moved.are_any()

    def may_be_any(self) -> bool:
        """Return the same, and whether some may be that nothing tells of; a forward asks.

        Not in an evaluation, where many forwards have looked.
        """
        return self.are_any() or (self.unseen.looks.left > 0 and not self._were_looked_for())

    def _were_looked_for(self) -> bool:
        """Return whether many forwards in a row have looked; each is to ask.

        None of them has found a write, and since the first no step was made, no version has moved,
        and no script has read the ``.data`` of a master.
        """
        if self.unseen.looks.are_endless:
            return False
        now = self._pairs.master_versions(), self._pairs.half_versions()
        before, count = self._forwards
        self._forwards = now, (count + 1 if now == before else 0)
        return self._forwards[1] > WATCHED

    def look_now(self) -> None:
        """A script has read a master's ``.data``, see `UnseenMasterWrites.look_now`."""
        self.unseen.look_now(self._pairs.local_masters())

    def find_unseen(self) -> None:
        """Move the versions of masters that were written to by their ``.data``."""
        if not self._versions.given:  # else such a write may be to a half weight, as well
            self.unseen.increment_versions(self._pairs.masters, self._pairs.local_masters())

    def masters_that_win(self, versions: list[int]) -> list[bool]:
        """Return which parameters have to follow their masters; the others are followed.

        Args:
            versions: of the masters, as they are; brought up to date.
        """
        pairs, known = self._pairs, self._versions
        if self.unseen.looks.left:
            self.find_unseen()
            versions[:] = pairs.master_versions()
        if not known.given:
            if versions == known.equal:
                return [False] * len(versions)
            return list(map(self._values.wins, pairs.params))
        if known.all_win(pairs.half_versions()):
            wins = [True] * len(versions)
        else:
            wins = list(map(self._values.wins, pairs.params))
        if self.unseen.looks.left:
            self._give_in(wins)
        if known.given != (now := pairs.half_versions()):
            tell_of_lost_writes(pairs, wins, now, known.given_yet())
        return wins

    def _give_in(self, wins: list[bool]) -> None:
        """Let half weights win over masters that the user was given, and has only read.

        Args:
            wins: whether each parameter is to follow its master; brought up to date.
        """
        unwritten = self.unseen.unwritten(self._pairs.local_masters())
        for row in [row for row, is_read in enumerate(unwritten) if is_read and wins[row]]:
            wins[row] = False
            if not self._pairs.agree(row):
                self._values.note_write(self._pairs.params[row])
                self.unseen.looks.go_on()

    def to_publish(self) -> list[int]:
        """Return the rows of masters that a forward has to see in their half parameters.

        Those that win, and those whose half parameters were written to what they are.
        """
        wins = self.masters_that_win(self._pairs.master_versions())
        rows = {row for row, master_wins in enumerate(wins) if master_wins}
        if self._versions.given:
            versions = zip(self._pairs.half_versions(), self._versions.given, strict=False)
            written = [row for row, (now, then) in enumerate(versions) if now != then]
            rows.update(filter(self._pairs.agree, written))
        return sorted(rows)

    def note_published(self, rows: list[int]) -> None:
        """The masters of these rows were rounded into their half parameters."""
        now = self._pairs.master_versions()
        for row in rows:
            self._versions.equal[row] = now[row]
        masters = self._pairs.local_masters()
        self.unseen.note([masters[row] for row in rows])
        if self._versions.given:
            self._versions.give_again(rows, self._pairs.half_versions(), now)

    def note_equal(self, versions: list[int]) -> None:
        """All pairs are equal.

        Args:
            versions: those that the masters had then.
        """
        self._versions.equal[:] = versions
        self.unseen.note(self._pairs.local_masters())

    def note_step(self, versions: list[int]) -> None:
        """A step was made, and its masters were rounded; the user's writes end.

        Args:
            versions: see `note_equal`.
        """
        self._versions.equal[:] = versions
        if self.unseen.looks.left:
            self.unseen.looks.count()
            self.unseen.note(self._pairs.local_masters())
        if self._versions.given:
            self._versions.end_giving()

    def note_replay(self) -> None:
        """A CUDA graph has stepped the masters and rounded them, which moved no version.

        What their bits are now the host would have to wait for: none are known.
        """
        self.look_again()
        if self.unseen.looks.left:
            self.unseen.looks.count()
            for master in self._pairs.local_masters():
                self.unseen.forget(master.data_ptr())
