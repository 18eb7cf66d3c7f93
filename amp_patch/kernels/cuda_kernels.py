"""The fused operations by the CUDA kernels of csrc/: names and signatures are torch_kernels'.

Knows lists of tensors, no models or optimizers. Rows that no kernel takes (sparse ones, float64,
other strides than their partner's) go to torch_kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import cuda_module, tensor_tables, torch_kernels
from .cuda_module import Argument, Kernel
from .dense_rows import DenseRows, Part, chosen, split
from .scaler_state import Rule, ScalerState

_STATISTICS_BYTES = 16
_KINDS = {1: "inf", 2: "NaN", 3: "inf and NaN"}
#: By the operation that needs them.
SOURCES = {
    "Unscale": ("unscale.cu", "summarize.cu"),
    "Cast": ("cast.cu",),
    "Comparison": ("reconcile.cu",),
    "accumulate": ("accumulate.cu",),
    "clip_by_norm": ("unscale.cu", "summarize.cu"),
    "update_scale": ("update_scale.cu",),
}
_SUMMARIZE = Kernel("summarize.cu", "summarize", "PPPPPiP")
_CLIP_COEFFICIENT = Kernel("summarize.cu", "clip_coefficient", "PfPP", 32)
_UPDATE_SCALE = Kernel("update_scale.cu", "update_scale", "PPiddqqff", 32)


def launch(
    part: Part,
    source: str,
    name: str,
    parameters: str,
    rows: Tensor,
    *arguments: Argument,
    found: Tensor | None = None,
) -> None:
    """Launch a kernel for each mix of dtypes in a part.

    Args:
        part: the rows.
        source: the file.
        name: the kernel's, with a {} for each dtype of the mix.
        parameters: the kernel's.
        rows: the table of tensors.
        arguments: what the kernel takes after the two tables.
        found: one row per chunk, the last argument where it is given.
    """
    chunks = part.table.chunks()
    for mix, begin, end in part.table.groups:
        kernel = Kernel(source, name.format(*mix), parameters)
        last = () if found is None else (found[begin:],)
        operands = (rows, chunks[begin:], *arguments, *last)
        cuda_module.modules.launch(kernel, end - begin, part.device, *operands)


def note_written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd, and whoever looks at versions, of writes that went by address."""
    for tensor in tensors:
        increment_version(tensor)


class Found:
    """What a pass found in the tensors of a part, on their device.

    Attributes:
        part: the rows.
        tensors: uint8, shape (rows, 16), the layout of statistics.cuh.
        total: the same of all rows together, shape (16,).
        found_inf: float32, shape (1,), not 0 where a value is inf or NaN.
    """

    def __init__(self, part: Part, found_inf: Tensor | None) -> None:
        self.part = part
        statistics = torch.empty(
            (len(part.rows) + 1, _STATISTICS_BYTES), dtype=torch.uint8, device=part.device
        )
        self.tensors, self.total = statistics[:-1], statistics[-1]
        self._keeps = found_inf is not None
        if found_inf is None:
            found_inf = torch.empty(1, dtype=torch.float32, device=part.device)
        self.found_inf = found_inf

    def summarize(self, chunks: Tensor) -> None:
        """Make totals of what was found in the chunks."""
        ranges, ticket = self.part.table.ranges()
        cuda_module.modules.launch(
            _SUMMARIZE,
            len(self.part.rows),
            self.part.device,
            ranges,
            chunks,
            self.tensors,
            self.total,
            self.found_inf,
            int(self._keeps),
            ticket,
        )

    def kinds(self) -> list[tuple[int, str]]:
        """Return row and kinds of each tensor that is not finite. Waits for the device."""
        flags = self.tensors.view(torch.int32)[:, 3].tolist()
        return [
            (row, _KINDS[flag]) for row, flag in zip(self.part.rows, flags, strict=True) if flag
        ]

    def norm(self) -> Tensor:
        """Return the 2-norm, 0-dim fp32."""
        return self.total[:8].view(torch.float64)[0].sqrt().float()

    def norm_of(self, rows: Sequence[int]) -> Tensor:
        """Return the 2-norm of those of the part's rows that are among these, 0-dim fp32."""
        wanted = set(rows)
        places = [place for place, row in enumerate(self.part.rows) if row in wanted]
        if len(places) == len(self.part.rows):
            return self.norm()
        squares = self.tensors.view(torch.float64)[:, 0]
        return torch.stack([squares[place] for place in places]).sum().sqrt().float()


class GradCheck(torch_kernels.GradCheck):
    """What one pass found, told from the statistics that it left on the device.

    Args:
        grads: as `torch_kernels.GradCheck`.
        rest: the rows that no kernel took, and the check of these.
        found: what the kernels found.
    """

    def __init__(
        self,
        grads: Sequence[Tensor],
        rest: tuple[Sequence[int], torch_kernels.GradCheck],
        found: Sequence[Found],
    ) -> None:
        flags = {flag.device: flag for flag in rest[1].found_inf}
        flags.update((one.part.device, one.found_inf) for one in found)
        super().__init__(grads, list(flags.values()))
        self._rest, self._found = rest, found

    def nonfinite(self) -> list[tuple[int, str]]:
        """See `torch_kernels.GradCheck`; tells of the gradients as they were checked."""
        rows, check = self._rest
        kinds = [(rows[index], kind) for index, kind in check.nonfinite()]
        return sorted(kinds + [kind for found in self._found for kind in found.kinds()])

    def norm(self) -> Tensor:
        """See `torch_kernels.GradCheck`; of the gradients as they were checked."""
        rows, check = self._rest
        norms = [found.norm() for found in self._found]
        return torch_kernels.combined([*norms, check.norm()] if rows else norms, 2.0)

    def norm_of(self, rows: Sequence[int]) -> Tensor:
        """Return the 2-norm of some gradients as they were checked, 0-dim fp32.

        Args:
            rows: which; kernels took them.
        """
        wanted = set(rows)
        norms = [one.norm_of(rows) for one in self._found if wanted.intersection(one.part.rows)]
        return torch_kernels.combined(norms, 2.0)


class Unscale:
    """See `torch_kernels.Unscale`."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._rows = DenseRows()
        self._scales: dict[torch.device, tensor_tables.Resident] = {}

    @torch.no_grad()
    def run(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: float | Tensor,
        storage: Sequence[Tensor] = (),
    ) -> GradCheck:
        """See `torch_kernels.Unscale.run`; ``storage`` is not needed."""
        parts, others = self._rows.split(sources, targets)
        rest = _unscale_others(chosen(sources, others), chosen(targets, others), scale)
        flags = {flag.device: flag for flag in rest.found_inf}
        found = []
        for part in parts:
            ours, theirs = chosen(sources, part.rows), chosen(targets, part.rows)
            one = Found(part, flags.get(part.device))
            examine(one, ours, theirs, self._scale_on(part.device, scale))
            note_written(theirs)
            found.append(one)
        return GradCheck(targets, (others, rest), found)

    def _scale_on(self, device: torch.device, scale: float | Tensor) -> Tensor:
        if isinstance(scale, Tensor):
            return scale.to(device, non_blocking=True)
        if device not in self._scales:
            self._scales[device] = tensor_tables.scalar(device)
        return self._scales[device].holding(scale)


class Check(Unscale):
    """Checks gradients for whoever unscales them himself: they stay as they are.

    Args:
        sources: tensors of the dtypes and devices of the gradients to come.
        models: what they are to be unscaled into; a gradient that is to be unscaled in place is
            of its model's dtype.
    """

    @torch.no_grad()
    def look(
        self,
        sources: Sequence[Tensor],
        models: Sequence[Tensor],
        in_place: Sequence[bool],
        scale: float | Tensor,
    ) -> GradCheck | None:
        """Check ``sources[i] / scale``, as it would be stored in the dtype of ``models[i]``.

        Returns:
            What was found, or None where no kernel takes all of them: nothing was done then.
        """
        parts, others = self._rows.split(sources, models)
        if others:
            return None
        found = []
        for part in parts:
            ours = chosen(sources, part.rows)
            pairs = zip(ours, chosen(in_place, part.rows), strict=True)
            targets = [source if unscales else None for source, unscales in pairs]
            one = Found(part, None)
            examine(one, ours, targets, self._scale_on(part.device, scale))
            note_written([target for target in targets if target is not None])
            found.append(one)
        return GradCheck(sources, ([], torch_kernels.GradCheck([], [])), found)


def _unscale_others(
    sources: list[Tensor], targets: list[Tensor], scale: float | Tensor
) -> torch_kernels.GradCheck:
    return torch_kernels.Unscale(sources, targets).run(sources, targets, scale)


def examine(
    found: Found, sources: list[Tensor], targets: Sequence[Tensor | None], scale: Tensor | None
) -> None:
    """Let a part's gradients be unscaled into targets, or only looked at where these are None."""
    part = found.part
    statistics = _statistics(part)
    rows = part.table.rows(sources, targets)
    launch(part, "unscale.cu", "unscale_{}_to_{}", "PPPP", rows, scale, found=statistics)
    found.summarize(statistics)


def _statistics(part: Part) -> Tensor:
    shape = (part.table.chunk_count, _STATISTICS_BYTES)
    return torch.empty(shape, dtype=torch.uint8, device=part.device)


@torch.no_grad()
def accumulate(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """See `torch_kernels.accumulate`."""
    parts, rest = split("accumulate", targets, others)
    torch_kernels.accumulate(chosen(targets, rest), chosen(others, rest))
    for part in parts:
        ours, theirs = chosen(targets, part.rows), chosen(others, part.rows)
        rows = part.table.rows(ours, theirs, ours)
        factors = (1.0, None, 1.0, None)
        name = "accumulate_{0}_{1}_to_{0}"
        launch(part, "accumulate.cu", name, "PPfPfPP", rows, *factors, found=_statistics(part))
        note_written(ours)


class Cast:
    """See `torch_kernels.Cast`."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._sources, self._targets = list(sources), list(targets)
        self._rows = DenseRows()

    @torch.no_grad()
    def run(self) -> None:
        """See `torch_kernels.Cast.run`."""
        parts, others = self._rows.split(self._sources, self._targets)
        if others:
            torch_kernels.Cast(chosen(self._sources, others), chosen(self._targets, others)).run()
        for part in parts:
            sources, targets = chosen(self._sources, part.rows), chosen(self._targets, part.rows)
            rows = part.table.rows(sources, targets)
            launch(part, "cast.cu", "cast_{}_to_{}", "PP", rows)
            note_written(targets)


@torch.no_grad()
def clip_by_norm(
    grads: Sequence[Tensor], max_norm: float, norm_type: float, norm: Tensor | None = None
) -> Tensor:
    """See `torch_kernels.clip_by_norm`; the norm is taken in one pass where it is the 2-norm."""
    if norm_type != 2.0 or norm is not None:
        return torch_kernels.clip_by_norm(grads, max_norm, norm_type, norm)
    parts, others = split("clip_by_norm", grads, grads)
    found = [Found(part, None) for part in parts]
    for one in found:
        examine(one, chosen(grads, one.part.rows), [None] * len(one.part.rows), None)
    if len(found) != 1 or others:
        norms = [one.norm() for one in found]
        rest = torch_kernels.norms_of(chosen(grads, others), 2.0)
        total = torch_kernels.combined(norms + rest, 2.0)
        return torch_kernels.clip_by_norm(grads, max_norm, 2.0, total)
    norm, coefficient = torch.empty(2, dtype=torch.float32, device=parts[0].device).unbind()
    arguments = (found[0].total, max_norm, norm, coefficient)
    cuda_module.modules.launch(_CLIP_COEFFICIENT, 1, parts[0].device, *arguments)
    torch_kernels.multiply(grads, coefficient)
    return norm


class Comparison(torch_kernels.Comparison):
    """See `torch_kernels.Comparison`. `reconcile` asks the device nothing."""

    def __init__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__(sources, copies)
        self._sources = [source for source, _ in self._pairs]
        self._copies = [copy for _, copy in self._pairs]
        self._rows = DenseRows(_is_rounded)

    def note_equal(self) -> None:
        """What the copies hold is not kept: to read the sources again costs the host nothing."""

    @torch.no_grad()
    def reconcile(self, wins: Callable[[], Sequence[bool]]) -> bool:
        """See `torch_kernels.Comparison.reconcile`.

        Returns:
            False where only kernels compared: what they found is not known. What they write does
            not count as written to, as far as versions of tensors go.
        """
        parts, others = self._rows.split(self._sources, self._copies)
        winning = wins()
        for part in parts:
            sources, copies = chosen(self._sources, part.rows), chosen(self._copies, part.rows)
            rows = part.table.rows(sources, copies, chosen(winning, part.rows))
            launch(part, "reconcile.cu", "reconcile_{1}", "PP", rows)
        if not others:
            return False
        rest = torch_kernels.Comparison(chosen(self._sources, others), chosen(self._copies, others))
        return rest.reconcile(lambda: chosen(winning, others))


def _is_rounded(mix: tuple[str, ...]) -> bool:
    return mix[0] == "float32" and mix[1] != "float32"


def update_scale(state: ScalerState, found_inf: Tensor, rule: Rule) -> None:
    """See `scaler_state.update`; one launch."""
    cuda_module.modules.launch(
        _UPDATE_SCALE,
        1,
        state.buffer.device,
        state.buffer,
        found_inf,
        int(rule.dynamic),
        rule.growth_factor,
        rule.backoff_factor,
        rule.growth_interval,
        rule.hysteresis,
        rule.min_loss_scale,
        rule.max_loss_scale,
    )
