"""The fp32 masters that one optimizer steps for half parameters (O2, O5).

Knows nothing of scales, skipped steps or modules. Which of a parameter and its master follows the
other is `UserWrites`' subject; here is when they are made to agree.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.common.living_objects import weakly
from amp_patch.distributed.shards import is_spread, local
from amp_patch.kernels import small_tensors
from amp_patch.kernels.default_device import without_default_device
from amp_patch.patching import put

from .fp32_values import FP32Values
from .frozen_masters import FrozenMasters
from .half_bits import is_plain
from .lazy_gradients import LazyGradients
from .master_pairs import MasterPairs
from .parameter_lists import are_same, clear_grads, keeping_versions
from .rounding import Rounding
from .ties import Ties
from .unseen_half_writes import UnseenHalfWrites
from .unseen_master_writes import are_readable
from .user_writes import UserWrites


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: its ``param_groups`` and ``state`` are changed in place: each half parameter
            gives way to its master. Held weakly.
        values: the fp32 values to start from; the masters are entered there.
        lazy: what makes the masters' gradients when they are asked for; None: they are there.
        may_move: whether the optimizer may give masters other memory, by ``master.data = t``.
        wrapped: optimizers that step the same groups, and have a state of their own.

    Attributes:
        pairs: the masters, each with its half parameter.
        lock: held by the thread whose step writes to the masters, until their parameters follow.
        agreements: how often parameters and masters were made to agree.
        own_gradients: those of masters that no script has written.
        are_given_back: True in a block of `given_back`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        values: FP32Values,
        lazy: LazyGradients | None,
        may_move: bool,
        wrapped: Sequence[Optimizer],
    ) -> None:
        self._values = values
        self.pairs = MasterPairs(optimizer, values, lazy, wrapped)
        self._versions = self.pairs.versions
        self._writes = UserWrites(self.pairs, values, may_move)
        self._rounding = Rounding(self.pairs, values, self._writes.moved)
        self._half_writes = UnseenHalfWrites(self.pairs, values)
        self._ties = Ties()
        self._frozen = FrozenMasters(self.pairs)
        self._is_due = False
        self.lock = threading.RLock()
        self.agreements = 0
        self.own_gradients = self.pairs.own_gradients
        self.are_given_back = False
        for group in optimizer.param_groups:
            group["params"][:] = self.replace(group["params"])
        small_tensors.move_together([one for one in self.pairs.params if not is_spread(one)])
        self._writes.moved.note_places()
        self._moves = values.moves
        self._forget_end: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return len(self.pairs)

    def has_master_of_any(self, params: Sequence[Tensor]) -> bool:
        """Return whether half parameters are among these whose masters the optimizer steps."""
        return not set(map(id, self.pairs.params)).isdisjoint(map(id, params))

    def has_others(self, stepped: Sequence[Tensor]) -> bool:
        """Return whether masters of other optimizers are among those that this one holds."""
        return bool(self.pairs.others(stepped))

    def count_data_reads(self) -> int:
        """Return how often scripts have read ``.data`` of half tensors, by which they may write."""
        return self._values.data_reads

    def replace(self, params: Sequence[Any]) -> list[Any]:
        """Return ``params`` with a master for each half one, see `MasterPairs.replace`."""
        count = len(self.pairs)
        replaced = self.pairs.replace(params)
        self._writes.note_new(count)
        self._frozen.note_new()
        return replaced

    def drop_after(self, count: int) -> None:
        """Undo `replace` for all masters but the first ``count``, which no group holds."""
        self.pairs.drop_after(count)
        self._frozen.drop_after(count)

    def call_when_reordered(self, method: Callable[[], object]) -> None:
        """Have a method called where masters lie in another order of memory; it is held weakly."""
        self.pairs.memory.when_reordered = weakly(method)

    def clear_grads(self) -> None:
        """Drop the masters' gradients; those of the parameters go before the next backward."""
        clear_grads(self.pairs.masters)

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """Let the optimizer step the parameters themselves in the block, in their fp32 values.

        What is written to these then is written to the masters. Call `follow` after the block.
        """
        self.reconcile()
        with self.pairs.given_back():
            self.are_given_back = True
            try:
                yield
            finally:
                self.are_given_back = False

    def release(self) -> None:
        """Give the optimizer its parameters back, with the masters' fp32 values and gradients."""
        self._frozen.follow()
        self.pairs.follow_shapes()
        self.end_exposure()
        self._rounding.renew().forget()  # look at all, this one time
        self.reconcile()
        self.pairs.release()
        self._rounding.forget()
        self._forget_end()

    def publish_at_end_of(self, optimizer: Optimizer) -> None:
        """Where it goes and the model stays, nobody would look for what was written last."""
        end = weakref.finalize(optimizer, self._publish_last)
        put(end, "atexit", False)
        self._forget_end = end.detach

    def _publish_last(self) -> None:
        """The optimizer goes: publish what a script wrote last, where that harms nobody.

        The collector may come to it while something is traced, after a script has freed the
        weights, or between a forward and its backward, which refuses weights of another version.
        """
        params, masters = self.pairs.params, self.pairs.masters
        every = [*params, *masters]
        is_there = all(map(is_plain, map(local, every)))
        is_there = is_there and [one.shape for one in params] == [one.shape for one in masters]
        if is_there and are_readable(every):
            with keeping_versions(params):
                self.publish_writes()

    def follow(self, were_written: bool) -> None:
        """Others had the masters in hand: they may hold their numbers elsewhere now.

        Args:
            were_written: whether they may hold other numbers, which the parameters are to follow.
        """
        self._rounding.forget()
        if were_written:
            self._rounding.renew()
            self.publish()
        else:
            self.expose()  # a load writes into what it was given

    def follow_ties(self) -> None:
        """A step comes: masters share memory where their half parameters do, see `Ties`."""
        if self._values.moves == self._moves or self.pairs.are_spread:
            return
        self._moves = self._values.moves
        self._rounding.count_moved()
        self.pairs.follow_memory()  # first, for it gives each a memory of its own
        before = self.pairs.places()
        self._ties.follow(list(self.pairs), self.pairs.agree)
        if self.pairs.places() != before:
            self._rounding.forget()
            self._rounding.renew()

    # --- what the user gets, and has written ---

    def expose(self) -> None:
        """The user gets the masters, to write to until the step that follows."""
        self.end_exposure()
        if self._writes.are_any():
            self._rounding.renew().forget()  # which passes by small masters that were written to
        self.reconcile()
        self._writes.give()
        self._frozen.expose()

    def end_exposure(self) -> None:
        """No step follows: what the user wrote to the masters goes to the parameters now."""
        if self._versions.given:
            self._rounding.renew().forget()  # a write by .data left no trace
            self.reconcile()
            self._writes.end_giving()

    def note_data_read(self, stepped: Tensor) -> None:
        """Look for writes from now on, if a script reads the ``.data`` of a master.

        What it writes to masters that were handed out is found without.
        """
        if id(stepped) not in self.pairs.param_by_id:
            return
        if self._versions.given:
            return
        self._writes.look_again()
        if self._writes.unseen.looks.left:
            self._unless_in_a_step(lambda: self._writes.unseen.note_moved([local(stepped)]))
        else:
            self._unless_in_a_step(self._writes.look_now)

    def note_data_set(self, stepped: Tensor) -> None:
        """A script gives a master other memory, as `torch.nn.utils.vector_to_parameters` does."""
        self._writes.moved.note_set(stepped)

    def note_writes(self) -> None:
        """Note what was written by ``.data``, so that the values are exact; nothing is changed.

        A graph may hold half weights of now: the forward alone shows masters in them.
        """
        writes = self._writes
        if self._versions.given or writes.unseen.looks.left or writes.moved.was_set:
            self._unless_in_a_step(self._note_writes)

    def _note_writes(self) -> None:
        self._rounding.count_moved()
        self._writes.masters_that_win(self.pairs.master_versions())

    def publish_writes(self) -> None:
        """A forward reads the parameters next: what the user wrote to the masters goes there.

        What another thread's step has written does not: its step publishes it.
        """
        self._frozen.follow()
        if self._writes.may_be_any():
            self._unless_in_a_step(self._publish_writes)

    def _publish_writes(self) -> None:
        self._writes.find_unseen()
        if self._writes.are_any():  # still
            self._rounding.count_moved()
            self._rounding.renew().forget()
            self._publish_rows(self._writes.to_publish())

    def _publish_rows(self, rows: list[int]) -> None:
        """Round these masters into their half parameters.

        What the user has written to the others waits for the step. Who puts it back before that,
        as after an evaluation of averaged weights, finds the masters' bits as they were.
        """
        if rows:
            self.agreements += 1
            self._rounding.write_rows(rows)
            self._writes.note_published(rows)

    def publish_all_writes(self) -> None:
        """As `publish_writes`, and also what the user may have written to masters in hand.

        A CUDA graph comes, or goes on, that has the half parameters win.
        """
        self.end_exposure()
        self.publish_writes()

    def note_replay(self) -> None:
        """See `UserWrites.note_replay`."""
        self._writes.note_replay()

    def _unless_in_a_step(self, act: Callable[[], None]) -> None:
        """Call ``act``, unless another thread steps the masters."""
        if self.lock.acquire(blocking=False):
            try:
                # What is kept for later steps must be no inference tensors, nor what torch.func
                # wraps.
                with torch.inference_mode(False), torch._C._DisableFuncTorch():
                    act()
            finally:
                self.lock.release()

    # --- the step ---

    @without_default_device
    def reconcile(self) -> None:
        """Make each half parameter agree with its master, by the rule of `FP32Values`."""
        self.agreements += 1
        self._is_due = False
        comparison = self._rounding.renew()
        given = self._versions.given
        if given and given != self.pairs.half_versions():
            # Parameters were written to, and perhaps masters as well. All pairs are compared anew:
            # a parameter that was set to 0 and back looks as if nobody had written to the pair.
            comparison.forget()
        trusts = comparison.has_large and not self._half_writes.may_be_any()
        judged: list[int] = []

        def wins() -> list[bool]:
            judged[:] = self.pairs.master_versions()
            return self._writes.masters_that_win(judged)

        if comparison.reconcile(wins, trusts):
            if comparison.found_unseen and not trusts:
                self._half_writes.note_found()
            self._writes.note_equal(self.pairs.master_versions())
        elif judged:  # kernels have made them equal, without a word
            self._writes.note_equal(judged)

    def reconcile_later(self) -> None:
        """As `reconcile`, but in the step, or else before the next `publish`."""
        self._is_due = True

    def catch_up(self) -> None:
        """Do what `reconcile_later` has left to do."""
        if self._is_due:
            self.reconcile()

    def reconcile_all_but(
        self, stepped: Sequence[Tensor], places: Sequence[int] | None = None
    ) -> list[bool]:
        """Do what `reconcile_later` has left to do, but for those that a kernel reconciles.

        Args:
            stepped: masters, and parameters that have none.
            places: the addresses of their half parameters; None: these are asked.

        Returns:
            For each whether its parameter is to follow it, should the two disagree.
        """
        if not self._is_due:
            return [True] * len(stepped)
        self._is_due = False
        masters = self.pairs.masters
        are_all = are_same(stepped, masters)
        self._rounding.renew(places if are_all else None)
        all_wins = self._writes.masters_that_win(self.pairs.master_versions())
        if are_all:
            return all_wins
        wins = dict(zip(map(id, masters), all_wins, strict=True))
        found = [wins.pop(id(one), True) for one in stepped]
        if wins:
            self._rounding.reconcile_these(wins)
        return found

    @without_default_device
    def publish(self, are_written: bool = False) -> None:
        """Round the masters into the half parameters, unless the step has written these, too."""
        self.agreements += 1
        if self._is_due:
            self.reconcile()
        # None where a step was not seen to begin: SGD.step(optimizer, closure)
        comparison = self._rounding.comparison or self._rounding.renew()
        versions = self.pairs.master_versions()
        if not are_written:
            # Of a master that was not stepped the half weight stays as it is.
            self._rounding.write(self.pairs.left_out(versions))
        comparison.note_equal()
        if comparison.has_large:
            self._half_writes.looks.count()
        self._writes.note_step(versions)
