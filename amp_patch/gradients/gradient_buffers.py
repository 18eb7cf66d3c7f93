"""The tensors that unscaled gradients are written to; knows no loss scaler and no optimizer.

The gradient of a parameter that is stepped itself is unscaled in place. That of a half parameter is
unscaled into a new fp32 tensor, which becomes the gradient of its master.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.common.scales import Scale
from amp_patch.distributed.shards import any_spread, local, spread_as
from amp_patch.kernels import CudaGradCheck, GradCheck, small_tensors, torch_kernels
from amp_patch.kernels.dense_rows import chosen
from amp_patch.kernels.getters import DTYPE, IS_CPU, IS_SPARSE
from amp_patch.kernels.reusable import Reusable
from amp_patch.kernels.tensor_lists import kind_of
from amp_patch.kernels.without_grad import without_grad
from amp_patch.levels import HALVES
from amp_patch.weights.parameter_lists import (
    Tensors,
    all_are,
    are_same,
    in_shares,
    listed,
    look_up,
)

from .param_pairs import ParamPairs
from .rounded_gradients import write
from .target_pool import InPlaceCheck, TargetPool


class GradientBuffers:
    """Unscales the gradients of the same parameters, step after step.

    The fp32 tensors for the gradients of small parameters are used again in each step: to allocate
    one costs the host more than to fill it. Large ones are allocated anew, for kept they would take
    memory that the next forward needs.

    Args:
        pairs: of one optimizer.

    Attributes:
        params: the parameters; the same object until there are others.
        is_spread: True where a parameter lies on several ranks (DTensor).
        is_in_place: True where the parameters are stepped themselves: nothing goes anywhere.
        are_all_masters: True where none is stepped itself.
        pool: the memory that half gradients are unscaled into, where they are small ones on the
            CPU, and all others fp32; else None.
        own: the parameters that are stepped themselves.
        masters: the masters; the same object until there are other parameters.
        rows_of_masters: which rows are theirs.
    """

    def __init__(self, pairs: ParamPairs) -> None:
        self._pairs = pairs
        self.params = Tensors(pairs.model)
        self.is_spread = any_spread(pairs.model)
        # What is unscaled is what this rank holds.
        self._parts = ParamPairs(*(self._local(column) for column in pairs))
        self._devices = _devices(pairs)
        self.is_in_place = are_same(*pairs)
        self._has_master = list(map(operator.is_not, *pairs))
        self._without_master = [not has for has in self._has_master]
        self.are_all_masters = all(self._has_master)
        self.own = listed(self.in_place(pairs.model))
        self.masters = listed(self.of_masters(pairs.master))
        self.rows_of_masters = rows = list(compress(range(len(pairs.model)), self._has_master))
        self._kinds = _by_kind({row: [column[row] for column in self._parts] for row in rows})
        self._checker: kernels.Checker | None = None
        self._unscale = kernels.unscaler(*self._parts)
        small = [
            master if param is not master and small_tensors.is_small(master) else None
            for param, master in zip(*self._parts, strict=True)
        ]
        self._pools, self._buffers = small_tensors.allocate(small)
        self._targets = [buffer for buffer in self._buffers if buffer is not None]
        self._check = InPlaceCheck()
        self._reusable = Reusable([*self._targets, self._check.flag])
        self._have_buffer = [buffer is not None for buffer in self._buffers]
        self._have_all_buffers = all(self._have_buffer)
        self._storage = self._places()
        self.pool = self._only_pool()
        self._is_one_call = self._is_plain() and self.is_in_place and _are_of_one_kind(pairs.model)
        # The buffers of all others, with whether a row is theirs; None until somebody asks.
        self._rest: tuple[list[bool], GradientBuffers] | None = None
        self._large = [row for row in rows if not self._have_buffer[row]]
        self._shares: list[Share] | None = None

    def fits(self, pairs: ParamPairs) -> bool:
        """Return whether this was made for the same tensors, and they are where they were."""
        is_known = pairs is self._pairs or all(map(are_same, pairs, self._pairs))
        return is_known and _devices(pairs) == self._devices

    def check(self, grads: list[Tensor], scale: Scale) -> CudaGradCheck | None:
        """Check gradients, and unscale only those that have no master; None where no kernel does.

        The optimizer's fused step unscales the others when it reads them.
        """
        if self._checker is None:
            self._checker = kernels.checker(*self._parts)
        return self._checker.look(
            self._local(grads), self._parts.master, self._without_master, scale
        )

    def unscale_small(self, grads: list[Tensor], scale: float | None) -> GradCheck | None:
        """Check all gradients, and unscale those that take little memory, or have no master.

        Args:
            grads, scale: see `unscale`.

        Returns:
            What was found, with the half gradients themselves for large masters, that are unscaled
            when the step reads them. None, with nothing done, where there are no such; where large
            parameters have others (``param.grad_dtype``); on devices where kernels do this; and
            where an unscaled gradient may overflow though the half one does not.
        """
        if not self._large or self._devices or self.is_spread or any(map(IS_SPARSE, grads)):
            return None
        large = [grads[row] for row in self._large]
        is_enlarged = scale is not None and scale < 1.0
        if is_enlarged or not set(map(DTYPE, large)).issubset(HALVES):
            return None
        if self._rest is None:
            is_rest = [True] * len(grads)
            for row in self._large:
                is_rest[row] = False
            self._rest = is_rest, GradientBuffers(self._pairs.select(is_rest))
        is_rest, buffers = self._rest
        check = buffers.unscale(list(compress(grads, is_rest)), scale)
        unscaled = iter(check.grads)
        found = [] if scale is None else torch_kernels.find_nonfinite(large)
        all_grads = [next(unscaled) if r else g for r, g in zip(is_rest, grads, strict=True)]
        return GradCheck(all_grads, [*check.found_inf, *found])

    def shares(self) -> list[Share]:
        """Return all parameters in shares, some consecutive ones each; none where one would do.

        What is unscaled only to be added to something takes the memory of one share at a time.
        """
        if self._shares is None:
            self._shares = []
            at_once = max(_LEAST_SHARE, sum(map(Tensor.numel, self.params)) // _SHARES)
            shares = list(in_shares(self.params, at_once))
            for rows in shares if len(shares) > 1 else ():
                pairs = ParamPairs(*(chosen(column, rows) for column in self._pairs))
                self._shares.append(Share(rows, pairs, GradientBuffers(pairs)))
        return self._shares

    def of_masters(self, column: list[Tensor]) -> list[Tensor]:
        """Return the entries of a column that belong to masters."""
        return list(compress(column, self._has_master))

    @without_grad
    def copy_back(self, halves: list[Tensor], unscaled: list[Tensor]) -> None:
        """Round unscaled gradients into the half ones that they come from.

        Args:
            halves: the dense gradients of all parameters; only those of half ones are written to.
            unscaled: what `unscale` returned for them.
        """
        halves, unscaled = self._local(halves), self._local(unscaled)
        for rows in self._kinds:
            write(chosen(halves, rows), chosen(unscaled, rows))

    def in_place(self, column: list[Tensor]) -> list[Tensor]:
        """Return the entries that belong to parameters stepped themselves."""
        return [entry for entry, has in zip(column, self._has_master, strict=True) if not has]

    def references(self, grads: list[Tensor]) -> Sequence[Tensor | weakref.ref[Tensor]]:
        """Return for each what tells it from later ones, and keeps no large one alive."""
        if self._have_all_buffers:
            return grads
        pairs = zip(grads, self._have_buffer, strict=True)
        return [grad if has_buffer else weakref.ref(grad) for grad, has_buffer in pairs]

    def _local(self, column: list[Tensor]) -> list[Tensor]:
        return list(map(local, column)) if self.is_spread else column

    def spread(self, grads: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Return the gradients whose numbers on this rank are ``parts``.

        Args:
            grads: as a backward left them.
            parts: where `unscale` put their numbers; themselves where nothing is spread.
        """
        if not self.is_spread:
            return parts
        return [
            grad if local(grad) is part else spread_as(master, part)
            for grad, part, master in zip(grads, parts, self._pairs.master, strict=True)
        ]

    def unscale(self, grads: list[Tensor], scale: Scale | None) -> GradCheck:
        """Unscale and check gradients.

        Args:
            grads: of all parameters.
            scale: of their loss; None: there was none, and no overflow has a consequence.

        Returns:
            What was found, with ``grads`` where the numbers that this rank holds of them went.
        """
        if self._is_one_call and scale is not None:
            check = self._check_in_place(grads, scale)
            if check is not None:
                return check
        grads = self._local(grads)
        if self.is_in_place:
            targets, are_dense = grads, False
        elif not self._reusable.are_free() or any(map(IS_SPARSE, grads)):
            targets, are_dense = self._targets_for(grads, repeat(None)), False
        elif self._have_all_buffers:
            targets, are_dense = self._targets, True
        else:
            targets, are_dense = self._targets_for(grads, self._buffers), True
        if scale is None:
            return self._unscale.copy(grads, targets, are_dense)
        places = self._storage if are_dense else ()
        storage = [[*pools, *[targets[row] for row in rows]] for pools, rows in places]
        return self._unscale.run(grads, targets, scale, storage)

    @without_grad
    def _check_in_place(self, grads: list[Tensor], scale: Scale) -> GradCheck | None:
        """Do `unscale` by one call; return None, with nothing done, where it takes more."""
        if isinstance(scale, Tensor) or scale < 1.0 or any(map(IS_SPARSE, grads)):
            return None
        return self._check.run(grads, grads, scale) if self._reusable.are_free() else None

    def _only_pool(self) -> TargetPool | None:
        is_one = len(self._pools) == 1 and len(self._kinds) == 1  # pairs of a half dtype and fp32
        if not (is_one and self._have_buffer == self._has_master and self._is_plain()):
            return None
        if not _are_of_one_kind([*self._pools, *self.own]):
            return None
        return TargetPool(self._pools, self._targets, self._check, self._reusable, self._has_master)

    def _is_plain(self) -> bool:
        """Return whether all are plain tensors on the CPU, and no kernel unscales them."""
        is_reference = isinstance(self._unscale, torch_kernels.Unscale)
        return is_reference and not self._devices and not self.is_spread

    def _places(self) -> list[tuple[list[Tensor], list[int]]]:
        """Return for each kind where the numbers of targets are: in which pools and rows."""
        masters = self._parts.master
        if any(map(Tensor.is_complex, masters)):
            return []
        alone = {row: [masters[row]] for row, one in enumerate(self._buffers) if one is None}
        places: dict[Any, tuple[list[Tensor], list[int]]] = {}
        for pool in self._pools:
            places.setdefault(kind_of([pool]), ([], []))[0].append(pool)
        for rows in _by_kind(alone):
            places.setdefault(kind_of(alone[rows[0]]), ([], []))[1].extend(rows)
        return list(places.values())

    def _targets_for(self, grads: list[Tensor], buffers: Iterable[Tensor | None]) -> list[Tensor]:
        rows = zip(grads, *self._parts, buffers, strict=False)
        with torch._C.DisableTorchFunctionSubclass():  # a target is a plain tensor
            return [
                one if one is not None else grad if param is master else _new_target(grad, master)
                for grad, param, master, one in rows
            ]


class Share(NamedTuple):
    """Some parameters of one optimizer.

    Attributes:
        rows: their places among all.
        pairs: they, and what is stepped for them.
        buffers: unscale their gradients.
    """

    rows: list[int]
    pairs: ParamPairs
    buffers: GradientBuffers


#: A share has one of so many parts of all elements, or so many elements where that is more.
_SHARES, _LEAST_SHARE = 16, 1 << 17


def _are_of_one_kind(params: Sequence[Tensor]) -> bool:
    """Return whether all are real, and of one device and dtype; False where there are none."""
    kinds = set(map(kind_of, zip(params)))
    return len(kinds) == 1 and not params[0].is_complex()


def _by_kind(tensors: dict[int, list[Tensor]]) -> list[list[int]]:
    """Return rows in lists, in each of which all tensors have the same devices and dtypes."""
    rows: dict[Any, list[int]] = {}
    for row, own in tensors.items():
        rows.setdefault(kind_of(own), []).append(row)
    return list(rows.values())


def _devices(pairs: ParamPairs) -> list[int]:
    if all_are(IS_CPU, pairs.master):  # takes a fraction of what a number for each does
        return []
    return look_up(Tensor.get_device, pairs.master)


def _new_target(grad: Tensor, master: Tensor) -> Tensor:
    """Return a new tensor for a gradient, which a bulk copy is still to fill if it is dense.

    A sparse gradient is not coalesced: the entries of one row are to be added in fp32. Any other
    lies as the master does, of which its parameter's may not be sure: torch's fused optimizers go
    through both as they lie.
    """
    if grad.is_sparse:
        return grad.to(device=master.device, dtype=master.dtype, copy=True)
    return torch.empty_like(master)
