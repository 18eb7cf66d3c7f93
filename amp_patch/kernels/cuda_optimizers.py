"""Launches the optimizers' kernels of csrc/, which step from half gradient to half weight.

Knows tables of tensors; no optimizer's formula, and nothing of how gradients and weights came
about. A table has a row for each parameter and a column for each kind of tensor that parameters
have: gradient, the float32 parameter itself (csrc/ calls it master), state, half weight, step
counter. Where parameters have no such tensor the column holds None.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_module
from .cuda_launch import launch, note_written
from .cuda_module import THREADS, Argument, Kernel
from .dense_rows import DenseRows, Part, chosen, layouts
from .getters import DTYPE
from .tensor_tables import addresses
from .without_grad import without_grad

Column = Sequence[Tensor | None]


class GroupRows(NamedTuple):
    """The rows of the table that are one parameter group's.

    Attributes:
        arguments: what the kernel that prepares the group takes after the flag.
        columns: gradients, float32 parameters, a column per state tensor, half weights, counters.
        new_state: ``(dict, name, value)`` of what is to be entered once it is known that kernels
            step the rows, as ``dict[name] = value``.
    """

    arguments: Sequence[Argument]
    columns: Sequence[Column]
    new_state: Sequence[tuple[dict[str, Any], str, Any]] = ()


class Factors(NamedTuple):
    """What gradients are multiplied by: 1 / scale, then clip. None stands for 1."""

    scale: Tensor | None
    clip: Tensor | None


class Operands(NamedTuple):
    """What the launches of a step share, all on one device.

    Attributes:
        rows: the table of tensors, int64, shape (rows, columns + 1).
        coefficients: uint8, shape (rows, bytes): what the kernel that prepares leaves to the next.
        scale, clip, found_inf: float32, one element, or None.
    """

    rows: Tensor
    coefficients: Tensor
    scale: Tensor | None
    clip: Tensor | None
    found_inf: Tensor | None


#: As in elementwise_step.cuh.
BLOCKS_PER_CHUNK = 4


class Span(NamedTuple):
    """Rows that follow each other: the first, and how many."""

    first: int
    rows: int


class OptimizerKernels:
    """The kernels of one type of optimizer, which update each element by itself.

    Their names begin with that of the source: ``adamw_prepare`` takes the hyperparameters of a
    group, ``adamw_float16_to_float32`` steps rows with gradients of float16 and weights of float32.

    Args:
        source: the file in csrc/.
        coefficient_bytes: the size of its ``struct Coefficients``.
        letters: the C types of `GroupRows.arguments`, as `cuda_module.packed` has them.
    """

    def __init__(self, source: str, coefficient_bytes: int, letters: str) -> None:
        self.source = source
        self.coefficient_bytes = coefficient_bytes
        self.prefix = source.partition(".")[0]
        self._prepare = Kernel(source, f"{self.prefix}_prepare", f"PiPP{letters}")

    def prepare(
        self, part: Part, operands: Operands, first: int, count: int, arguments: Sequence[Argument]
    ) -> None:
        """Launch for ``count`` rows from ``first`` on, which are of one group."""
        rows, coefficients = operands.rows[first:], operands.coefficients[first:]
        values = (rows, count, coefficients, operands.found_inf, *arguments)
        cuda_module.modules.launch(self._prepare, -(-count // THREADS), part.device, *values)

    def update(self, part: Part, operands: Operands, weight: int) -> None:
        """Launch for all rows, prepared before.

        Args:
            part: the rows.
            operands: of the launches.
            weight: the place of the half weight's column.
        """
        name = f"{self.prefix}_{{0}}_to_{{{weight}}}"
        launch(part, self.source, name, "PPPPPP", *operands, blocks_per_chunk=BLOCKS_PER_CHUNK)


class KernelStep:
    """Steps the same rows by the same launches, again and again.

    Args:
        kernels: the optimizer's.

    Attributes:
        params: the float32 parameters of the last `take`.
    """

    def __init__(self, kernels: OptimizerKernels) -> None:
        self._kernels = kernels
        self._groups: Sequence[GroupRows] = ()
        self._columns: list[Column] = []
        self._addresses: list[list[int]] = []
        # What follows was looked up for the tensors that `_key` describes.
        self.params: Column = []
        self._key: Any = None
        self._rows = DenseRows(_are_fp32_between)
        self._parts: list[Part] = []
        self._others: Sequence[int] = ()
        self._spans: list[list[Span]] = []

    def take(self, groups: Sequence[GroupRows]) -> bool:
        """Take the rows that `step` is to step; return whether there are kernels for all.

        Nothing is looked up where the parameters are those of the step before, and all tensors but
        the gradients lie where they did. Gradients are others in each step, and users give their
        parameters other strides; nobody does that to a state, which stays where it is.
        """
        self._groups, self._columns = groups, _joined(groups)
        try:
            self._addresses = list(map(addresses, self._columns))
        except RuntimeError:  # a sparse gradient has no memory of its own
            return False
        columns: Any = self._columns
        grads, params, weights = columns[0], columns[1], columns[-2]
        of_users = (grads, weights) if 0 not in self.places else (grads, weights, params)
        sizes = [len(group.columns[0]) for group in groups]
        key = (sizes, list(map(DTYPE, grads)), layouts(of_users), self._addresses[1:])
        if key != self._key or not all(map(operator.is_, params, self.params)):
            self._look_up(params, sizes)
            # The list may be the optimizer's own, which users change in place.
            self._key, self.params = key, list(params)
        # The very lists of the step before: who compares them again finds the same objects.
        self._addresses[1:] = self._key[-1]
        return not self._others

    @property
    def places(self) -> list[int]:
        """The addresses of the half weights of the last `take`; 0 for none."""
        return self._addresses[-2]

    def _look_up(self, params: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Find out which kernels step the columns, and by which tables."""
        # A counter is one number; where a row has no weight or state its parameter stands in.
        models: Any = [
            [param if one is None else one for one, param in zip(column, params, strict=True)]
            for column in self._columns[:-1]
        ]
        self._parts, self._others = self._rows.split_anew(*models)
        self._spans = [_spans(part, sizes) for part in self._parts]

    @without_grad
    def step(
        self, factors: Factors, found_inf: Tensor | None, wins: Sequence[bool] | None = None
    ) -> None:
        """Step the rows.

        Args:
            factors: on any device.
            found_inf: float32, one element; not 0: nothing is stepped. None: it is 0.
            wins: what comes first, also where nothing is stepped. For each row whether its half
                weight follows the float32 parameter where the two disagree; else the parameter
                follows, in the elements that disagree. None: all half weights follow.
        """
        wins = [True] * len(self.params) if wins is None else wins
        for part, spans in zip(self._parts, self._spans, strict=True):
            columns = [chosen(column, part.rows) for column in (*self._addresses, wins)]
            table = part.table.rows_of(*columns)
            coefficients = byte_rows(part, len(part.rows), self._kernels.coefficient_bytes)
            shared = (_on(part.device, one) for one in (*factors, found_inf))
            operands = Operands(table, coefficients, *shared)
            self._prepare(part, operands, spans)
            self._kernels.update(part, operands, weight=len(self._columns) - 2)
        # Who asks for versions asks for those of parameters.
        params, weights = self._columns[1], self._columns[-2]
        if 0 in self.places:
            weights = [one for one in weights if one is not None]
        written: Any = [*params, *weights]
        note_written(written)

    def release(self) -> None:
        """Let go of the tensors of the last `take`, but for the parameters."""
        self._groups, self._columns = (), []

    def _prepare(self, part: Part, operands: Operands, spans: Sequence[Span]) -> None:
        """Launch once for each group that has rows in this part."""
        for group, (first, rows) in zip(self._groups, spans, strict=True):
            if rows:
                arguments = [_address(part.device, one) for one in group.arguments]
                self._kernels.prepare(part, operands, first, rows, arguments)


def _joined(groups: Sequence[GroupRows]) -> list[Column]:
    """Return the columns of all groups, one below the other."""
    if len(groups) == 1:
        return list(groups[0].columns)
    columns = zip(*(group.columns for group in groups), strict=True)
    return [list(chain.from_iterable(column)) for column in columns]


def _spans(part: Part, sizes: Sequence[int]) -> list[Span]:
    """Return, for groups of these sizes, which of the part's rows are theirs: they are in a row."""
    ends = [bisect.bisect_left(part.rows, end) for end in accumulate(sizes, initial=0)]
    return [Span(begin, end - begin) for begin, end in pairwise(ends)]


def _are_fp32_between(mix: tuple[str, ...]) -> bool:
    """Return whether all but gradient and weight are of float32."""
    return set(mix[1:-1]) == {"float32"}


def byte_rows(part: Part, rows: int, size: int) -> Tensor:
    """Return memory for ``size`` bytes per row, on the part's device."""
    return torch.empty((rows, size), dtype=torch.uint8, device=part.device)


def _on(device: torch.device, factor: Tensor | None) -> Tensor | None:
    if factor is None:
        return None
    return factor.to(device, torch.float32, non_blocking=True)


def _address(device: torch.device, argument: Argument) -> Argument:
    return _on(device, argument) if isinstance(argument, Tensor) else argument


def learning_rate(lr: float | Tensor) -> list[Argument]:
    """Return a learning rate as the kernels take it: a number, or a tensor in its place."""
    return [0.0, lr] if isinstance(lr, Tensor) else [lr, None]
