"""The fused operations by the CUDA kernels of csrc/: names and signatures are torch_kernels'.

Knows lists of tensors, no models or optimizers. Rows that no kernel takes (sparse ones, float64,
other strides than their partner's) go to torch_kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from . import cuda_module, torch_kernels
from .cuda_launch import launch, note_written
from .cuda_module import Kernel
from .cuda_norms import clip_by_norm
from .cuda_unscale import Check, GradCheck, Unscale, UnscaleOnce, statistics_memory
from .dense_rows import DenseRows, chosen, split
from .scaler_state import Rule, ScalerState
from .tensor_tables import addresses
from .without_grad import without_grad

__all__ = [
    "Cast",
    "Check",
    "Comparison",
    "GradCheck",
    "SOURCES",
    "Unscale",
    "accumulate",
    "clip_by_norm",
    "unscale",
    "update_scale",
]

#: The CUDA sources that each operation launches kernels of.
SOURCES = {
    "Unscale": ("unscale.cu", "summarize.cu"),
    "Check": ("unscale.cu", "summarize.cu"),
    "Cast": ("cast.cu",),
    "Comparison": ("reconcile.cu",),
    "accumulate": ("accumulate.cu",),
    "clip_by_norm": ("unscale.cu", "summarize.cu"),
    "update_scale": ("update_scale.cu",),
}
_UPDATE_SCALE = Kernel("update_scale.cu", "update_scale", "PPiddqqff", 32)


@without_grad
def accumulate(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """See `torch_kernels.accumulate`."""
    parts, rest = split("accumulate", targets, others)
    torch_kernels.accumulate(chosen(targets, rest), chosen(others, rest))
    for part in parts:
        ours, theirs = chosen(targets, part.rows), chosen(others, part.rows)
        rows = part.table.rows(ours, theirs, ours)
        factors = (1.0, None, 1.0, None)  # of each of the two: a number, and a tensor or none
        name, chunks = "accumulate_{0}_{1}_to_{0}", statistics_memory(part)
        launch(part, "accumulate.cu", name, "PPfPfPP", rows, *factors, per_chunk=chunks)
        note_written(ours)


def unscale(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float | Tensor
) -> GradCheck:
    """See `torch_kernels.unscale`."""
    return UnscaleOnce(sources, targets).run(sources, targets, scale)


class Cast:
    """See `torch_kernels.Cast`."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._sources, self._targets = list(sources), list(targets)
        self._dense_rows = DenseRows()

    @without_grad
    def run(self) -> None:
        """See `torch_kernels.Cast.run`."""
        parts, others = self._dense_rows.split(self._sources, self._targets)
        if others:
            torch_kernels.Cast(chosen(self._sources, others), chosen(self._targets, others)).run()
        for part in parts:
            sources, targets = chosen(self._sources, part.rows), chosen(self._targets, part.rows)
            rows = part.table.rows(sources, targets)
            launch(part, "cast.cu", "cast_{}_to_{}", "PP", rows)
            note_written(targets)


class Comparison(torch_kernels.Comparison):
    """See `torch_kernels.Comparison`; here `reconcile` does not wait for the device."""

    def __init__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__(sources, copies)
        self._sources = [source for source, _ in self._pairs]
        self._copies = [copy for _, copy in self._pairs]
        # These tensors are its own, so that nobody gives one other memory or strides.
        self._parts, self._others = DenseRows(_is_rounded).split(self._sources, self._copies)
        self._addresses = [
            [addresses(chosen(column, part.rows)) for column in (self._sources, self._copies)]
            for part in self._parts
        ]

    def note_equal(self) -> None:
        """Do nothing: `reconcile` reads all sources again, which costs the host nothing."""

    @without_grad
    def reconcile(self, wins: Callable[[], Sequence[bool]], trusts: bool = False) -> bool:
        """See `torch_kernels.Comparison.reconcile`.

        Versions of tensors do not tell of what kernels write here.

        Args:
            wins: as there, but always called.
            trusts: nothing is passed by, for the host does not learn of what kernels find.

        Returns:
            True where torch compared some pairs and found that one differs. What kernels find is
            not known to the host.
        """
        winning, others = wins(), self._others
        for part, columns in zip(self._parts, self._addresses, strict=True):
            rows = part.table.rows_of(*columns, chosen(winning, part.rows))
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
