"""Unscales and checks gradients by the CUDA kernels of csrc/; knows lists of tensors.

One pass over the gradients leaves statistics on the device: whether there is inf or NaN, and the
sum of squares, for each tensor. Flags, reports and norms are told from these without another pass.
Rows that no kernel takes go to torch_kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from amp_patch.common.scales import Scale

from . import cuda_module, torch_kernels
from .cuda_launch import launch, note_written
from .cuda_module import Kernel
from .dense_rows import DenseRows, Part, Split, chosen, layouts, split
from .getters import DTYPE
from .resident import Resident, scalar
from .without_grad import without_grad

_STATISTICS_BYTES = 16  # as in statistics.cuh
_KINDS = {1: "inf", 2: "NaN", 3: "inf and NaN"}
_SUMMARIZE = Kernel("summarize.cu", "summarize", "PPPPPiP")


class Statistics:
    """Sums of squares, and flags of inf and NaN, of the tensors of a part; on their device.

    Attributes:
        part: the rows.
        memory: uint8, shape (chunks + rows + 1, 16), in the layout of statistics.cuh: of each chunk
            of the part, of each row, and of all together. Not initialized.
        found_inf: float32, shape (1,), not 0 where a value is inf or NaN.

    Args:
        part: the rows.
        found_inf: a flag of the device that others have set already, and that stays set; None
            makes a new one.
    """

    def __init__(self, part: Part, found_inf: Tensor | None) -> None:
        self.part = part
        self.memory = statistics_memory(part, len(part.rows) + 1)
        self._keeps = found_inf is not None
        if found_inf is None:
            found_inf = torch.empty(1, dtype=torch.float32, device=part.device)
        self.found_inf = found_inf

    def summarize(self) -> None:
        """Fill in all but the statistics of chunks, which must be there."""
        ranges, ticket = self.part.table.ranges()
        chunks = self.memory.data_ptr()
        tensors = chunks + self.part.table.chunk_count * _STATISTICS_BYTES
        cuda_module.modules.launch(
            _SUMMARIZE,
            len(self.part.rows),
            self.part.device,
            ranges,
            chunks,
            tensors,
            tensors + len(self.part.rows) * _STATISTICS_BYTES,
            self.found_inf,
            int(self._keeps),
            ticket,
        )

    def kinds(self) -> list[tuple[int, str]]:
        """Return row and kinds of each tensor that is not finite. Waits for the device."""
        flags = self._tensors(torch.int32)[:, 3].tolist()
        return [
            (row, _KINDS[flag]) for row, flag in zip(self.part.rows, flags, strict=True) if flag
        ]

    def norm(self) -> Tensor:
        """Return the 2-norm, 0-dim fp32."""
        return self.squares().sqrt().float()

    def squares(self) -> Tensor:
        """Return the sum of squares, 0-dim float64."""
        return self.memory.view(torch.float64)[-1, 0]

    def squares_of(self, rows: Sequence[int]) -> Tensor:
        """Return the sum of squares of those of the part's rows that are among these."""
        wanted = set(rows)
        places = [place for place, row in enumerate(self.part.rows) if row in wanted]
        if len(places) == len(self.part.rows):
            return self.squares()
        squares = self._tensors(torch.float64)[:, 0]
        return torch.stack([squares[place] for place in places]).sum()

    def _tensors(self, dtype: torch.dtype) -> Tensor:
        """Return the statistics of the rows, seen as numbers of a dtype."""
        return self.memory.view(dtype)[self.part.table.chunk_count : -1]


class Flags:
    """The flags of all rows, on their devices.

    Args:
        statistics: one for each part.
    """

    def __init__(self, statistics: Sequence[Statistics]) -> None:
        self._statistics = statistics

    def nonfinite(self) -> list[tuple[int, str]]:
        """See `torch_kernels.GradCheck.nonfinite`. Waits for the devices."""
        return sorted(kind for one in self._statistics for kind in one.kinds())


class GradCheck(torch_kernels.GradCheck):
    """What one pass found, told from the statistics that it left on the device.

    Args:
        grads: as `torch_kernels.GradCheck` takes them.
        rest: the rows that no kernel took, and the check of these.
        statistics: of the rows that kernels took, one for each part.
    """

    def __init__(
        self,
        grads: Sequence[Tensor],
        rest: tuple[Sequence[int], torch_kernels.GradCheck],
        statistics: Sequence[Statistics],
    ) -> None:
        flags = {flag.device: flag for flag in rest[1].found_inf}
        flags.update((one.part.device, one.found_inf) for one in statistics)
        super().__init__(grads, list(flags.values()))
        self._rest, self._statistics = rest, statistics

    def nonfinite(self) -> list[tuple[int, str]]:
        """See `torch_kernels.GradCheck.nonfinite`; of the gradients as they were checked."""
        rows, check = self._rest
        kinds = [(rows[index], kind) for index, kind in check.nonfinite()]
        return sorted(kinds + [kind for one in self._statistics for kind in one.kinds()])

    def flags(self) -> Flags | None:
        """See `torch_kernels.GradCheck.flags`; None where there are rows that no kernel took."""
        return None if self._rest[0] else Flags(self._statistics)

    def norm(self) -> Tensor:
        """See `torch_kernels.GradCheck.norm`; of the gradients as they were checked."""
        rows, check = self._rest
        norms = [one.norm() for one in self._statistics]
        return torch_kernels.combined([*norms, check.norm()] if rows else norms, 2.0)

    def squares_of(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the sums of squares of some gradients as they were checked.

        Args:
            rows: their indices; kernels must have taken them.

        Returns:
            One for each device, float64, 0-dim.
        """
        if len(rows) == sum(len(one.part.rows) for one in self._statistics):
            return [one.squares() for one in self._statistics]
        wanted = set(rows)
        parts = [one for one in self._statistics if wanted.intersection(one.part.rows)]
        return [one.squares_of(rows) for one in parts]


class Unscale:
    """See `torch_kernels.Unscale`."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._dense_rows = DenseRows()
        self._scales: dict[torch.device, Resident[Tensor]] = {}

    @without_grad
    def run(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: Scale,
        storage: Sequence[list[Tensor]] = (),
    ) -> GradCheck:
        """See `torch_kernels.Unscale.run`; ``storage`` is not needed."""
        parts, others = self._split_rows(sources, targets)
        rest = _unscale_others(chosen(sources, others), chosen(targets, others), scale)
        flags = {flag.device: flag for flag in rest.found_inf}
        statistics = []
        for part in parts:
            ours, theirs = chosen(sources, part.rows), chosen(targets, part.rows)
            one = Statistics(part, flags.get(part.device))
            examine(one, ours, theirs, self._scale_on(part.device, scale))
            note_written(theirs)
            statistics.append(one)
        return GradCheck(targets, (others, rest), statistics)

    def copy(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], are_dense: bool = False
    ) -> GradCheck:
        """See `torch_kernels.Unscale.copy`; here the check takes no time, and is made."""
        return self.run(sources, targets, 1.0)

    def _split_rows(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Split:
        return self._dense_rows.split(sources, targets)

    def _scale_on(self, device: torch.device, scale: Scale) -> Tensor:
        if isinstance(scale, Tensor):
            return scale.to(device, non_blocking=True)
        if device not in self._scales:
            self._scales[device] = scalar(device)
        return self._scales[device].holding(scale)


class UnscaleOnce(Unscale):
    """As `Unscale`, of gradients that may be others at each call, see `dense_rows.split`.

    Tables of its own would have to be uploaded, which no step may that a CUDA graph captures.
    """

    def _split_rows(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Split:
        return split("Unscale", sources, targets)


class Check(Unscale):
    """Checks gradients that are unscaled later, by the kernel that steps the optimizer.

    Args:
        sources: tensors of the dtypes and devices of the gradients to come.
        models: tensors of the dtypes and devices that they are to be unscaled to.
    """

    def __init__(self, sources: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        super().__init__(sources, models)
        self._key: Any = None
        self._split: Split | None = None

    @without_grad
    def look(
        self,
        sources: Sequence[Tensor],
        models: Sequence[Tensor],
        in_place: Sequence[bool],
        scale: Scale,
    ) -> GradCheck | None:
        """Check ``sources[i] / scale``, as it would be stored in the dtype of ``models[i]``.

        Args:
            sources: the gradients.
            models: as above.
            in_place: for each gradient, whether to unscale it all the same, in place; it is of its
                model's dtype then.
            scale: as `Unscale.run` takes it.

        Returns:
            What was found, or None where no kernel takes all of them: nothing was done then.
        """
        # The models are the same at each call, and none of their numbers is read.
        key = layouts((sources,)), list(map(DTYPE, sources))
        if self._split is None or key != self._key:
            self._key, self._split = key, self._dense_rows.split_anew(sources, models)
        parts, others = self._split
        if others:
            return None
        statistics = []
        for part in parts:
            ours = chosen(sources, part.rows)
            targets: list[Tensor | None] = [None] * len(ours)
            written = list(compress(ours, chosen(in_place, part.rows)))
            if written:
                pairs = zip(ours, chosen(in_place, part.rows), strict=True)
                targets = [source if unscales else None for source, unscales in pairs]
            one = Statistics(part, None)
            examine(one, ours, targets, self._scale_on(part.device, scale))
            if written:
                note_written(written)
            statistics.append(one)
        return GradCheck(sources, ([], torch_kernels.GradCheck([], [])), statistics)


def _unscale_others(
    sources: list[Tensor], targets: list[Tensor], scale: Scale
) -> torch_kernels.GradCheck:
    if not sources:  # of a scale on a GPU two launches would make an inverse for nobody
        return torch_kernels.GradCheck([], [])
    return torch_kernels.Unscale(sources, targets).run(sources, targets, scale)


def examine(
    statistics: Statistics,
    sources: list[Tensor],
    targets: Sequence[Tensor | None],
    scale: Tensor | None,
) -> None:
    """Unscale and check a part's gradients; the statistics are filled in.

    Args:
        statistics: of the part.
        sources: the gradients, one for each row.
        targets: where ``sources[i] / scale`` goes, may be its source; None: it is only checked.
        scale: float32, one element, on the part's device; None stands for 1.
    """
    part, memory = statistics.part, statistics.memory
    rows = part.table.rows(sources, targets)
    launch(part, "unscale.cu", "unscale_{}_to_{}", "PPPP", rows, scale, per_chunk=memory)
    statistics.summarize()


def statistics_memory(part: Part, more: int = 0) -> Tensor:
    """Return memory for statistics of each chunk of a part and more, uint8, shape (n, 16)."""
    shape = (part.table.chunk_count + more, _STATISTICS_BYTES)
    return torch.empty(shape, dtype=torch.uint8, device=part.device)
