"""The optimizers' updates by the CUDA kernels of csrc/, from half gradient to half weight.

Knows groups of parameters with their state; nothing of how gradients and weights came about.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_module
from .cuda_kernels import launch, note_written
from .cuda_module import THREADS, Argument, Kernel
from .dense_rows import DenseRows, Part, chosen

Column = Sequence[Tensor | None]


class Block(NamedTuple):
    """The rows of one group: what the group says, and the columns of the table of tensors.

    Attributes:
        arguments: of the kernel that prepares the group, after the flag.
        columns: gradient, master, state, weight and step; None where there is none.
        made: dicts to enter a tensor in, under this name, once kernels step the rows.
    """

    arguments: Sequence[Argument]
    columns: Sequence[Column]
    made: Sequence[tuple[dict[str, Any], str, Tensor]] = ()


class Factors(NamedTuple):
    """What gradients are multiplied by: 1 / scale, then clip. None stands for 1."""

    scale: Tensor | None
    clip: Tensor | None


class Rule(NamedTuple):
    """One optimizer's kernels: its source, its bytes of coefficients, its letters of options."""

    source: str
    coefficients: int
    options: str

    @property
    def prefix(self) -> str:
        """The beginning of every kernel's name."""
        return self.source.partition(".")[0]


ADAM = Rule("adamw.cu", 36, "dPddddii")
SGD_RULE = Rule("sgd.cu", 32, "dPdddiii")
LAMB = Rule("lamb.cu", 48, "dPddddiiiii")


class Batch:
    """Rows that are stepped by the same launches, again and again.

    Args:
        rule: the optimizer's.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._rows = DenseRows()
        self._masters: Column = []
        self._blocks: Sequence[Block] = ()
        self._columns: list[Column] = []
        self._parts: list[Part] = []

    def holds(self, blocks: Sequence[Block]) -> bool:
        """Take rows over; return whether kernels take all of them."""
        self._blocks = blocks
        columns = zip(*(block.columns for block in blocks), strict=True)
        self._columns = [[one for part in column for one in part] for column in columns]
        masters = self._columns[1]
        if len(masters) != len(self._masters) or any(map(operator.is_not, masters, self._masters)):
            self._rows, self._masters = DenseRows(_are_fp32_between), masters
        # The step is a number per row; where there is no weight or state the master stands in.
        models: Any = [
            [master if one is None else one for one, master in zip(column, masters, strict=True)]
            for column in self._columns[:-1]
        ]
        self._parts, others = self._rows.split(*models)
        return not others

    @torch.no_grad()
    def step(self, factors: Factors, found_inf: Tensor | None) -> None:
        """Step the rows.

        Args:
            factors: on any device.
            found_inf: float32, one element; not 0: nothing changes. None: it is 0.
        """
        for part in self._parts:
            scale, clip, flag = (_on(part.device, one) for one in (*factors, found_inf))
            rows = part.table.rows(*(chosen(column, part.rows) for column in self._columns))
            coefficients = _bytes(part, len(part.rows), self._rule.coefficients)
            self._prepare(part, rows, coefficients, flag)
            self._update(part, rows, coefficients, (scale, clip, flag))
        for column in self._columns[1:-1]:
            note_written([tensor for tensor in column if tensor is not None])

    def _prepare(self, part: Part, rows: Tensor, coefficients: Tensor, flag: Tensor | None) -> None:
        rule, ends = self._rule, 0
        kernel = Kernel(rule.source, f"{rule.prefix}_prepare", f"PiPP{rule.options}")
        positions = {row: position for position, row in enumerate(part.rows)}
        for block in self._blocks:
            begins, ends = ends, ends + len(block.columns[0])
            mine = [positions[row] for row in range(begins, ends) if row in positions]
            if mine:
                first, count = mine[0], len(mine)
                arguments = [_address(part.device, one) for one in block.arguments]
                operands = (rows[first:], count, coefficients[first:], flag, *arguments)
                grid = -(-count // THREADS)
                cuda_module.modules.launch(kernel, grid, part.device, *operands)

    def _update(
        self, part: Part, rows: Tensor, coefficients: Tensor, factors: Sequence[Tensor | None]
    ) -> None:
        source, prefix = self._rule.source, self._rule.prefix
        weight = len(self._columns) - 2
        if self._rule is not LAMB:
            name = f"{prefix}_{{0}}_to_{{{weight}}}"
            launch(part, source, name, "PPPPPP", rows, coefficients, *factors)
            return
        norms = _bytes(part, part.table.chunk_count, 16)
        ratios = torch.empty(len(part.rows), dtype=torch.float32, device=part.device)
        moments = "lamb_moments_{0}"
        launch(part, source, moments, "PPPPPPP", rows, coefficients, *factors, found=norms)
        sums = (part.table.ranges()[0], norms, coefficients, ratios, factors[-1])
        kernel = Kernel(source, "lamb_ratios", "PPPPP")
        cuda_module.modules.launch(kernel, len(part.rows), part.device, *sums)
        name = f"lamb_update_{{{weight}}}"
        launch(part, source, name, "PPPPP", rows, coefficients, ratios, factors[-1])


def _are_fp32_between(mix: tuple[str, ...]) -> bool:
    """Return whether all but gradient and weight are of float32."""
    return set(mix[1:-1]) == {"float32"}


def _bytes(part: Part, rows: int, size: int) -> Tensor:
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
