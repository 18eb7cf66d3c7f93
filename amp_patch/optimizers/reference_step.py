"""One optimizer's step on functions of torch: the reference for the kernels, on every device.

It goes part by part (`step_parts`), and unscales gradients that wait in half when it comes to them.
Knows groups and waiting gradients; no hooks, masters or loss scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.gradients.half_gradients import LargeInHalf
from amp_patch.kernels import torch_kernels, torch_optimizers
from amp_patch.kernels.strips import Strips, cut, lie_alike, strip_length
from amp_patch.kernels.without_grad import without_grad
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.parameter_lists import (
    stored_grad,
    stored_grads,
)

from .groups import GroupUpdate, StepInputs, params_of
from .step_parts import Part, StepParts


class _Waiting(NamedTuple):
    """Which gradients of a part wait.

    Attributes:
        rows: for each parameter that of its gradient in the source; None where none waits.
        own: the rows of those that wait.
    """

    rows: list[int | None]
    own: list[int]


_NONE_WAIT = _Waiting([], [])


class _Work(NamedTuple):
    """What is stepped of a part: those of its parameters that have gradients.

    Attributes:
        part: it.
        inputs: with the masters in the place of gradients that are made when their turn comes.
        rows: of these gradients in their source; empty where all are there.
    """

    part: Part
    inputs: StepInputs
    rows: list[int]


class ReferenceStep:
    """Steps one optimizer, again and again.

    Args:
        update_type: how the optimizer steps.
        lazy: what gradients wait.
    """

    def __init__(self, update_type: type[GroupUpdate], lazy: LazyGradients) -> None:
        self._update_type, self._lazy = update_type, lazy
        self._parts = StepParts(update_type)
        # The parameters whose gradients waited last, and which of these each part has.
        self._waited: Sequence[Tensor] = ()
        self._waiting_of_parts: list[_Waiting] = []
        self._known_parts: list[Part] = []

    def forget(self) -> None:
        """Let go of what was looked up, the state of the optimizer with it."""
        self._parts.forget()
        self._waited, self._known_parts = (), []

    def takes_flag(self, optimizer: Optimizer) -> bool:
        """Return whether `step` takes a flag for all groups."""
        update = self._update_type
        return all(
            update.takes_flag(update.options(optimizer, one)) for one in optimizer.param_groups
        )

    def step(self, optimizer: Optimizer, found_inf: Tensor | None = None) -> bool:
        """Step all groups; return False, with nothing changed, where one does not suit.

        Args:
            optimizer: whose groups and state are read.
            found_inf: where it `takes_flag`; 1: nothing changes. None: it is 0.

        Raises:
            RuntimeError: see `UnscaledLater.refuse_written`; nothing has changed.
        """
        self._parts.groups.look_up(optimizer)
        self._parts.look_up(optimizer)
        if isinstance(self._lazy.source, LargeInHalf):
            self._lazy.source.refuse_written()
        work: list[_Work] = []
        for part, waiting in zip(self._parts.every, self._look_up_waiting(), strict=True):
            one = self._work(optimizer, part, waiting)
            if one is None:
                continue
            cached, inputs = part.cached, one.inputs
            if not (cached.are_plain(inputs.grads) and cached.update.suits_reference(inputs)):
                return False
            work.append(one)
        clip = self._update_type.clip_factor(optimizer, lambda: self._norms(work))
        for one in work:
            self._step(one, clip, found_inf)
        return True

    def _step(self, work: _Work, clip: Tensor | None, found_inf: Tensor | None) -> None:
        inputs = work.inputs
        if found_inf is not None:
            there = found_inf.to(inputs.params[0].device, non_blocking=True)
            inputs = inputs._replace(found_inf=there)
        strips = self._strips(work, work.part.strip) if work.part.strip and clip is None else None
        if strips is not None:
            inputs = inputs._replace(grads=[], strips=strips)
        elif work.rows or clip is not None:
            grads = self._made(work)
            grads = grads if clip is None else torch_optimizers.scaled(grads, clip)
            inputs = inputs._replace(grads=grads)
        work.part.cached.update.step(inputs)

    def _strips(self, work: _Work, length: int) -> Strips | None:
        """Return the gradient of a part's only parameter in strips; None where it must be whole."""
        inputs, source = work.inputs, self._lazy.source
        others = work.part.cached.update.cut_with(inputs)
        if others is None:
            return None
        if not work.rows:
            grad, pieces = inputs.grads[0], cut(inputs.grads[0], length)
        elif isinstance(source, LargeInHalf):
            row = work.rows[0]
            grad, pieces = source.stored(row), source.strips(row, length)
        else:
            return None
        return Strips(length, pieces) if lie_alike([grad, *inputs.params, *others]) else None

    @without_grad
    def clip(
        self,
        optimizer: Optimizer,
        max_norm: float,
        accept: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Clip gradients to a total 2-norm: large ones when the step unscales them.

        Returns:
            The norm before, 0-dim; None, with nothing done, where none wait in half for this class.
        """
        source = self._lazy.source
        if not isinstance(source, LargeInHalf) or source.is_clipped:
            return None
        if not self._lazy.are_alone():
            return None
        source.refuse_written()
        self._parts.look_up(optimizer)  # how much is looked at once, too
        waiting = self._waiting()
        norms: list[Tensor] = []
        others: list[Tensor] = []
        for param in params_of(optimizer):
            row, grad = waiting.get(id(param)), stored_grad(param)
            if row is not None:
                norms += self._norms_of_waiting(source, row)
            elif grad is not None:
                norms += torch_kernels.norms_of([grad], 2.0)
                others.append(grad)
        total = torch_kernels.combined(norms, 2.0)
        if accept is not None:
            accept(total)
        factor = torch_kernels.clip_factor(total, max_norm, torch_kernels.CLIP_EPS)
        source.clip(factor)
        torch_kernels.multiply(others, factor)
        return total

    def _norms_of_waiting(self, source: LargeInHalf, row: int) -> list[Tensor]:
        """Return the 2-norms of the parts of a gradient: strips, where it is large."""
        grad = source.stored(row)
        length = strip_length(grad.numel(), self._parts.at_once)
        if length is None or not lie_alike([grad]):
            return torch_kernels.norms_of(source.make([row]), 2.0)
        strips = source.strips(row, length)
        return list(chain.from_iterable(torch_kernels.norms_of([one], 2.0) for one in strips))

    def _waiting(self) -> Mapping[int, int]:
        """Return the rows of gradients that wait, by the ids of their parameters."""
        params = self._lazy.params
        return dict(zip(map(id, params), range(len(params)), strict=True))

    def _look_up_waiting(self) -> list[_Waiting]:
        """Return for each part which gradients wait.

        Looked up again only where other parameters wait, or parts are others.
        """
        lazy, parts = self._lazy, self._parts.every
        if lazy.source is not None and not lazy.are_alone():
            lazy.materialize()
        if lazy.source is None:
            return [_NONE_WAIT] * len(parts)
        if lazy.params is not self._waited or parts is not self._known_parts:
            row_of = self._waiting()
            self._waiting_of_parts, self._known_parts = [], parts
            for part in parts:
                rows = list(map(row_of.get, map(id, part.params)))
                own = [row for row in rows if row is not None]
                self._waiting_of_parts.append(_Waiting(rows, own))
            self._waited = lazy.params
        return self._waiting_of_parts

    def _work(self, optimizer: Optimizer, part: Part, waiting: _Waiting) -> _Work | None:
        """Return what is to be stepped of a part; None where no parameter has a gradient."""
        rows, own = waiting
        grads: list[Tensor | None]
        if not own:
            grads = stored_grads(part.params)
        elif len(own) == len(rows):  # a large gradient is made later: its master stands for it
            grads = [*(part.params if part.are_large else self._make(own))]
        else:
            made = iter([] if part.are_large else self._make(own))
            grads = [
                stored_grad(param) if row is None else next(made, param)
                for param, row in zip(part.params, rows, strict=True)
            ]
        group = optimizer.param_groups[part.group]
        inputs = part.cached.inputs(optimizer, group, grads, part.params)
        return None if inputs is None else _Work(part, inputs, own if part.are_large else [])

    def _make(self, rows: list[int]) -> list[Tensor]:
        source = self._lazy.source
        assert source is not None
        return source.make(rows)

    def _made(self, work: _Work) -> list[Tensor]:
        """Return the gradients of a part, large ones unscaled just now."""
        inputs = work.inputs
        if not work.rows:
            return inputs.grads
        made = iter(self._make(work.rows))
        return [
            next(made) if grad is param else grad
            for param, grad in zip(inputs.params, inputs.grads, strict=True)
        ]

    def _norms(self, works: Sequence[_Work]) -> list[Tensor]:
        """Return the 2-norm of each gradient, in the order of the parameters."""
        norms: dict[int, Tensor] = {}
        for work in works:
            places = dict(zip(map(id, work.part.params), work.part.places, strict=True))
            for param, grad in zip(work.inputs.params, self._made(work), strict=True):
                for norm in torch_kernels.norms_of([grad], 2.0):
                    norms[places[id(param)]] = norm
        return [norms[place] for place in sorted(norms)]
