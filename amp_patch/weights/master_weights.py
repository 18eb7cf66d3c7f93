"""The fp32 masters that one optimizer steps for half parameters (O2, O5).

Knows nothing of scales, skipped steps or modules. Which of a parameter and its master follows the
other is `FP32Values`' subject.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from amp_patch import kernels
from amp_patch.casting.mode import HALVES
from amp_patch.distributed.shards import is_spread, local, same_numbers, set_data, version_of
from amp_patch.kernels import small_tensors, torch_kernels
from amp_patch.kernels.default_device import without_default_device

from .fp32_values import FP32Values
from .lazy_gradients import LazyGradients
from .lost_writes import tell_of_lost_writes
from .own_gradients import OwnGradients
from .parameter_lists import (
    are_complete,
    are_same,
    as_plain_tensors,
    clear_grads,
    keeping_versions,
    listed,
    look_up,
    store_grad,
    stored_grad,
    stored_grads,
)
from .stepped_state import SteppedState
from .ties import Ties
from .unseen_writes import UnseenWrites
from .versions import Versions

_VERSION = operator.attrgetter("_version")


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
        lock: held by the thread whose step writes to the masters, until their parameters follow.
        agreements: how often parameters and masters were made to agree.
        own_gradients: those of masters that no script has written.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        values: FP32Values,
        lazy: LazyGradients | None,
        may_move: bool,
        wrapped: Sequence[Optimizer],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._state = SteppedState((optimizer, *wrapped))
        self._lazy = lazy
        self._may_move = may_move
        self._was_set = False
        self._values = values
        self._params: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._versions = Versions()
        self._ties = Ties()
        self._is_due = False
        self._unseen = UnseenWrites(values.sums)
        self.lock = threading.RLock()
        self.agreements = 0
        self.own_gradients = OwnGradients()
        self._are_spread = False
        self._params_by_master: dict[int, Tensor] = {}
        self._masters_at: Sequence[tuple[int, Sequence[int]]] = ()
        self._forget_places()
        for group in optimizer.param_groups:
            group["params"][:] = self.replace(group["params"])
        small_tensors.move_together([param for param in self._params if not is_spread(param)])
        self._masters_at = self._places()
        self._moves = values.moves

    def _forget_places(self) -> None:
        self._known: tuple[int, int, Sequence[int]] | None = None
        self._masters_at = ()
        self._cast = kernels.Cast([], [])
        self._comparison = kernels.Comparison([], [])
        self._others: tuple[list[int], torch_kernels.Comparison] | None = None

    def param_of(self, stepped: Tensor) -> Tensor:
        """Return the half parameter of a master; a tensor that is no master stands for itself."""
        return self._params_by_master.get(id(stepped), stepped)

    def has_master_of_any(self, params: Sequence[Tensor]) -> bool:
        """Return whether half parameters are among these whose masters the optimizer steps."""
        return not set(map(id, self._params)).isdisjoint(map(id, params))

    def __len__(self) -> int:
        return len(self._masters)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the half parameters, each with its master."""
        return zip(self._params, self._masters, strict=True)

    def weight_versions(self) -> list[int]:
        """Return what `FP32Values.version_of` does of each half parameter."""
        versions, writes = self._versions_of(self._params), self._values.writes
        if not writes:  # else of a few, in all steps to come
            return versions
        rows = zip(self._params, versions, strict=True)
        return [now + writes.get(id(one), 0) for one, now in rows]

    def follow(self, were_written: bool) -> None:
        """Others had the masters in hand: they may hold their numbers elsewhere now.

        Args:
            were_written: whether they may hold other numbers, which the parameters are to follow.
        """
        self._forget_places()
        if were_written:
            self._compare()
            self.publish()
        else:
            self.expose()  # a load writes into what it was given

    def replace(self, params: Sequence[Any]) -> list[Any]:
        """Return ``params`` with a master in place of each half one, but frozen ones that came so.

        Args:
            params: tensors, or ``(name, tensor)``; anything else stays for torch to refuse.
        """
        known = dict(zip(map(id, self._params), self._masters, strict=True))
        count = len(self)
        # Copies: a list that `listed` has made knows the classes of its tensors, and gets no more.
        self._params, self._masters = list(self._params), list(self._masters)
        replaced: list[Any] = []
        try:
            for given in params:
                names = given[:-1] if isinstance(given, tuple) else ()
                param = given[-1] if isinstance(given, tuple) and given else given
                is_half = isinstance(param, Tensor) and param.dtype in HALVES
                if is_half and id(param) not in known and not self._values.is_frozen_half(param):
                    known[id(param)] = self._make(param)
                stepped = known.get(id(param), param)
                replaced.append((*names, stepped) if param is not given else stepped)
        except BaseException:  # out of memory, say
            self.drop_after(count)
            raise
        self._params, self._masters = listed(self._params), listed(self._masters)
        self._unseen.note(self._local(self._masters[count:]))
        return replaced

    def drop_after(self, count: int) -> None:
        """Undo `replace` for all masters but the first ``count``, which no group holds."""
        # `_make` may have been interrupted between two lists, which then differ in length.
        for param, master in zip(self._params[count:], self._masters[count:], strict=False):
            self._values.forget_versions(param, self._versions)
            self._params_by_master.pop(id(master), None)
            self._state.move(master, param)
        del self._versions.equal[count:]
        self._params, self._masters = listed(self._params[:count]), listed(self._masters[:count])

    def _make(self, param: Tensor) -> Tensor:
        value = self._values.take(param)
        lazy, own, attached = self._lazy, type(param), param.requires_grad
        master = nn.Parameter(value, attached) if lazy is None else lazy.parameter(value, attached)
        if lazy is None and nn.Parameter in own.__mro__:
            # Optimizers look at a user's own class, too: Riemannian ones find manifolds by it.
            master = Tensor._make_subclass(own, master, attached)  # type: ignore[assignment]
        grad = param.grad if value.grad is None else value.grad
        master.grad = None if grad is None else grad.to(torch.float32, copy=True)
        self.own_gradients.watch(master)
        # Optimizers look at attributes that users set on parameters.
        vars(master).update(vars(param))
        self._params.append(param)
        self._are_spread |= is_spread(param)
        self._masters.append(master)
        self._versions.equal.append(0)
        self._params_by_master[id(master)] = param
        self._values.set(param, master, self._versions, len(self._masters) - 1)
        self._state.move(param, master)
        return master

    def expose(self) -> None:
        """The user gets the masters, to write to until the step that follows."""
        self.end_exposure()
        self.reconcile()
        self._note_exposed()
        for param, master in self.pairs():
            if param.requires_grad is not master.requires_grad:
                master.requires_grad_(param.requires_grad)

    def _note_exposed(self) -> None:
        self._versions.give(self.weight_versions(), self._versions_of(self._masters))

    def show_writes(self) -> None:
        """A forward reads the parameters next: what the user wrote to the masters goes there.

        What another thread's step has written does not: its step publishes it.
        """
        if self._versions.given or self._is_written() or self._unseen.is_looking:
            self._unless_in_a_step(self._show_writes)

    def note_writes(self) -> None:
        """Note what was written by ``.data``, so that the values are exact; nothing is changed.

        A graph may hold half weights of now: the forward alone shows masters in them.
        """
        if self._versions.given or self._unseen.is_looking or self._was_set:
            self._unless_in_a_step(self._note_writes)

    def note_data_read(self, stepped: Tensor) -> None:
        """Look for writes from now on, if a script reads the ``.data`` of a master.

        What it writes to masters that were handed out is found without.
        """
        if id(stepped) not in self._params_by_master or self._versions.given:
            return
        if not self._unseen.is_looking:
            self._unless_in_a_step(lambda: self._unseen.look_now(self._local(self._masters)))

    def note_data_set(self, stepped: Tensor) -> None:
        """A script gives a master other memory, as `torch.nn.utils.vector_to_parameters` does."""
        self._was_set |= id(stepped) in self._params_by_master

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

    def _show_writes(self) -> None:
        self._show_unseen()
        if self._versions.given or self._is_written():  # still
            self._show_written()

    def _note_writes(self) -> None:
        self._note_moved()
        self._masters_that_win(self._versions_of(self._masters))

    def _show_unseen(self) -> None:
        if not self._versions.given:  # else a write through .data may be to a half weight, as well
            self._unseen.show(self._masters, self._local(self._masters))

    def _show_written(self) -> None:
        self._note_moved()
        self._compare().forget()
        wins = self._masters_that_win(self._versions_of(self._masters))
        rows = [row for row, master_wins in enumerate(wins) if master_wins]
        self._show_masters(sorted({*rows, *self._written_alike()}))

    def _written_alike(self) -> list[int]:
        """Return the rows of half parameters that were written to what their masters are."""
        if not self._versions.given:
            return []
        versions = enumerate(zip(self.weight_versions(), self._versions.given, strict=False))
        return [row for row, (now, then) in versions if now != then and self._agree(row)]

    def _show_masters(self, rows: Sequence[int]) -> None:
        """Round these masters into their half parameters.

        What the user has written to the others waits for the step. Who puts it back before that,
        as after an evaluation of averaged weights, finds the masters' bits as they were.
        """
        if not rows:
            return
        masters, params = (
            [column[row] for row in rows] for column in (self._masters, self._params)
        )
        self.agreements += 1
        comparison = self._compare()
        if len(rows) < len(self._masters):
            comparison = kernels.Comparison(self._local(masters), self._local(params))
        comparison.reconcile(lambda: [True] * len(rows))
        now = self._versions_of(self._masters)
        for row in rows:
            self._versions.equal[row] = now[row]
        self._unseen.note(self._local(masters))
        if self._versions.given:
            self._versions.give_again(rows, self.weight_versions(), now)

    def _is_written(self) -> bool:
        if self._versions_of(self._masters) != self._versions.equal:
            return True
        return (self._was_set or self._may_move) and self._places() != self._masters_at

    def _places(self) -> list[tuple[int, Sequence[int]]]:
        """Return where the masters are, each by its address and its strides."""
        held = self._local(self._masters)
        return list(zip(look_up(Tensor.data_ptr, held), look_up(Tensor.stride, held), strict=True))

    def _note_moved(self) -> None:
        """``master.data = t`` is a write, though no version tells of it."""
        self._was_set = False
        places = self._places()
        if places != self._masters_at:
            known = zip(self._masters, places, self._masters_at, strict=False)  # some may be new
            for master, now, then in known:
                if now != then:
                    increment_version(master)
                    self._unseen.forget(now[0])
            self._forget_places()
            self._masters_at = places

    def end_exposure(self) -> None:
        """No step follows: what the user wrote to the masters goes to the parameters now."""
        if self._versions.given:
            self._compare().forget()  # a write by .data left no trace
            self.reconcile()
            self._versions.end_giving()

    @without_default_device
    def reconcile(self) -> None:
        """Make each half parameter agree with its master, by the rule of `FP32Values`."""
        self.agreements += 1
        self._is_due = False
        comparison = self._compare()
        if self._versions.given and self._versions.given != self.weight_versions():
            # Parameters were written to, and perhaps masters as well. The comparison passes by
            # pairs that it knows: one that was set to 0 and back has the same numbers again.
            comparison.forget()
        judged: list[int] = []

        def wins() -> list[bool]:
            judged[:] = self._versions_of(self._masters)
            return self._masters_that_win(judged)

        if comparison.reconcile(wins):
            self._note_equal()
        elif judged:  # kernels have made them equal, without a word
            self._versions.equal[:] = judged
            self._unseen.note(self._local(self._masters))

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
        are_all = are_same(stepped, self._masters)
        self._compare(places if are_all else None)
        all_wins = self._masters_that_win(self._versions_of(self._masters))
        if are_all:
            return all_wins
        wins = dict(zip(map(id, self._masters), all_wins, strict=True))
        found = [wins.pop(id(one), True) for one in stepped]
        if wins:
            self._reconcile_these(wins)
        return found

    def _reconcile_these(self, wins: dict[int, bool]) -> None:
        """Reconcile some masters, given by their ids, with whether they win."""
        key = list(wins)
        if self._others is None or self._others[0] != key:
            rows = [row for row, one in enumerate(self._masters) if id(one) in wins]
            chosen = [[column[row] for row in rows] for column in (self._masters, self._params)]
            self._others = key, kernels.Comparison(*map(self._local, chosen))
        self._others[1].reconcile(lambda: list(wins.values()))

    def _masters_that_win(self, versions: list[int]) -> list[bool]:
        """Return which parameters have to follow their masters; the others are followed.

        Args:
            versions: of the masters, as they are; brought up to date.
        """
        if self._unseen.is_looking:
            self._show_unseen()
            versions[:] = self._versions_of(self._masters)
        if versions == self._versions.equal and not self._versions.given:
            return [False] * len(versions)
        if self._versions.given and self._versions.all_win(self.weight_versions()):
            wins = [True] * len(versions)
        else:
            wins = list(map(self._values.wins, self._params))
        if self._versions.given and self._unseen.is_looking:
            self._give_in(wins)
        if self._versions.given and self._versions.given != (now := self.weight_versions()):
            tell_of_lost_writes(self.pairs(), wins, now, self._versions.given_yet())
        return wins

    def _give_in(self, wins: list[bool]) -> None:
        """Let half weights win over masters that the user was given, and has only read.

        Args:
            wins: whether each parameter is to follow its master; brought up to date.
        """
        unwritten = self._unseen.unwritten(self._local(self._masters))
        for row in [row for row, is_read in enumerate(unwritten) if is_read and wins[row]]:
            wins[row] = False
            if not self._agree(row):
                self._values.note_write(self._params[row])
                self._unseen.keep_looking()

    def _agree(self, row: int) -> bool:
        param, master = self._params[row], self._masters[row]
        return same_numbers(master.detach().to(param.dtype), param)

    @without_default_device
    def publish(self, are_written: bool = False) -> None:
        """Round the masters into the half parameters, unless the step has written these, too."""
        self.agreements += 1
        self.catch_up()
        if self._known is None:  # a step not seen to begin: SGD.step(optimizer, closure)
            self._compare()
        versions = self._versions_of(self._masters)
        if not are_written:
            # Of a master that was not stepped the half weight stays as it is, bit for bit. A graph
            # may have saved it for a backward that is still to come.
            left_out = self._left_out(versions)
            if left_out:
                with keeping_versions(left_out):
                    self._write_halves()
            else:
                self._write_halves()
        self._comparison.note_equal()
        self._versions.equal[:] = versions
        if self._unseen.is_looking:
            self._unseen.count_step()
            self._unseen.note(self._local(self._masters))
        if self._versions.given:
            self._versions.end_giving()

    def _write_halves(self) -> None:
        # Masters whose gradients never wait are of torch's own class, at which it asks nothing.
        if self._lazy is None:
            self._cast.run()
        else:
            with as_plain_tensors(chain(self._params, self._masters)):
                self._cast.run()

    def _left_out(self, versions: list[int]) -> list[Tensor]:
        """Return the half parameters whose masters a step had no gradient for, and did not write.

        Args:
            versions: of the masters, behind the step.
        """
        waiting = () if self._lazy is None else self._lazy.params  # a fused step has used these
        if self._are_spread or len(waiting) == len(self._masters):
            return []
        grads = stored_grads(self._masters)
        if are_complete(grads):  # as most often
            return []
        used = set(map(id, waiting))
        rows = zip(self._params, self._masters, grads, versions, self._versions.equal, strict=True)
        return [
            param
            for param, master, grad, now, before in rows
            if now == before and grad is None and id(master) not in used
        ]

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """Let the optimizer step the parameters themselves in the block, in their fp32 values.

        What is written to these then is written to the masters. Call `follow` behind the block.
        """
        self.reconcile()
        optimizer = self._optimizer()
        assert optimizer is not None
        halves = [param.data for param in self._params]
        for param, master in self.pairs():
            set_data(param, master.data)
            self._state.move(master, param)
        for group in optimizer.param_groups:
            group["params"][:] = map(self.param_of, group["params"])
        try:
            yield
        finally:
            for param, master, half in zip(self._params, self._masters, halves, strict=True):
                if param.data_ptr() != master.data_ptr():
                    master.data.copy_(param.data)
                set_data(param, half)
                self._state.move(param, master)
            for group in optimizer.param_groups:
                group["params"][:] = self.replace(group["params"])

    def clear_grads(self) -> None:
        """Drop the masters' gradients; those of the parameters go before the next backward."""
        clear_grads(self._masters)

    def release(self) -> None:
        """Give the optimizer its parameters back, with the masters' fp32 values and gradients."""
        for param, master in self.pairs():
            if param.shape != master.shape:  # after p.data = t, which no step has taken
                set_data(master, param.detach().float())
                master.grad = None
        self.end_exposure()
        self.reconcile()
        optimizer = self._optimizer()
        for param, master in self.pairs():
            param.grad = None
            set_data(param, master.data)
            param.grad = master.grad
            self._values.forget_versions(param, self._versions)
            self._state.move(master, param)
        for group in optimizer.param_groups if optimizer is not None else ():
            group["params"][:] = [self.param_of(param) for param in group["params"]]
        self._params.clear()
        self._masters.clear()
        self._versions = Versions()
        self._params_by_master.clear()
        self._forget_places()

    def _compare(self, places: Sequence[int] | None = None) -> torch_kernels.Comparison:
        """Return the comparison of masters and parameters, made anew where any was replaced.

        ``model.to(device)``, ``p.data = t`` and new parameter groups do that; so does a load,
        after which what the parameters held before tells nothing.

        Args:
            places: where the parameters are; None: they are asked.
        """
        if self._was_set:
            self._note_moved()
        params = self._local(self._params)
        if places is None:
            places = list(map(Tensor.data_ptr, params))
        known = self._values.loads, self._values.moves, places
        if known != self._known:
            self._follow_devices()
            self._known = known
            masters = self._local(self._masters)
            self._masters_at = self._places()
            self._cast = kernels.Cast(masters, params)
            self._comparison = kernels.Comparison(masters, params)
            self._others = None
        return self._comparison

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return what this rank holds of parameters or masters."""
        return list(map(local, tensors)) if self._are_spread else tensors

    def _note_equal(self) -> None:
        self._versions.equal[:] = self._versions_of(self._masters)
        self._unseen.note(self._local(self._masters))

    def _versions_of(self, tensors: list[Tensor]) -> list[int]:
        """Return what `version_of` does of parameters or masters."""
        return look_up(version_of if self._are_spread else _VERSION, tensors)

    def follow_ties(self) -> None:
        """A step comes: masters share memory where their half parameters do, see `Ties`."""
        if self._values.moves == self._moves or self._are_spread:
            return
        self._moves = self._values.moves
        self._note_moved()
        before = self._places()
        self._ties.follow(list(self.pairs()), self._agree)
        if self._places() != before:
            self._forget_places()
            self._compare()

    def _follow_devices(self) -> None:
        """``model.to(device)`` after initialize moves the parameters: masters and state follow."""
        for param, master in self.pairs():
            if master.device != param.device:
                grad = stored_grad(master)  # one that waits is on the parameter's device
                store_grad(master, None)
                set_data(master, master.data.to(param.device))
                store_grad(master, None if grad is None else grad.to(param.device))
                self._state.follow_device(master)
