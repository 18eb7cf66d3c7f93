"""The fused operations on multi-tensor functions of torch: the reference, on every device.

Knows lists of tensors, no models or optimizers. What a check found stays on the device until asked.
`cuda_kernels` has the same operations under the same names.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from amp_patch.common.scales import Scale

from .getters import IS_CPU, IS_SPARSE
from .tensor_lists import alike, kind_of, values
from .tensor_values import are_nonfinite
from .torch_comparison import Comparison
from .torch_norms import (
    CLIP_EPS,
    clip_by_norm,
    clip_factor,
    combined,
    multiply,
    norms_of,
    total_norm,
)
from .without_grad import without_grad

__all__ = [
    "CLIP_EPS",
    "Cast",
    "Check",
    "Comparison",
    "Flags",
    "GradCheck",
    "Unscale",
    "accumulate",
    "alike",
    "clip_by_norm",
    "clip_factor",
    "combined",
    "find_nonfinite",
    "inverse_of",
    "multiply",
    "norms_of",
    "unscale",
    "values",
]


class Flags(Protocol):
    """What a pass left of its check that tells of gradients without holding them."""

    def nonfinite(self) -> list[tuple[int, str]]:
        """See `GradCheck.nonfinite`."""


class GradCheck:
    """What one pass over a list of gradients found.

    Args:
        grads: the gradients as the pass left them, in the order they were given.
        found_inf: one float32 flag per device, shape (1,), not 0 where a value is inf or NaN.
    """

    def __init__(self, grads: Sequence[Tensor], found_inf: Sequence[Tensor]) -> None:
        self.grads = list(grads)
        self.found_inf = list(found_inf)

    @property
    def overflow(self) -> bool:
        """True where any gradient holds inf or NaN. Waits for the device."""
        return any(list(map(Tensor.item, self.found_inf)))

    @property
    def is_known(self) -> bool:
        """Whether `nonfinite` can tell."""
        return True

    def gradients(self) -> list[Tensor] | None:
        """Return the gradients of the pass; None if they are gone."""
        return self.grads

    def nonfinite(self) -> list[tuple[int, str]]:
        """Return ``(index, "inf" | "NaN" | "inf and NaN")`` of each gradient that is not finite.

        Waits once for each device.
        """
        rows: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, grad in enumerate(self.grads):
            rows.setdefault(grad.device, []).append((index, are_nonfinite(values(grad))))
        found = []
        for on_device in rows.values():
            read = torch.stack([flags for _, flags in on_device]).tolist()
            for (index, _), row in zip(on_device, read, strict=True):
                kinds = [name for name, is_so in zip(_KINDS, row, strict=True) if is_so]
                if kinds:
                    found.append((index, " and ".join(kinds)))
        return sorted(found)

    def flags(self) -> Flags | None:
        """Return what tells `nonfinite` when the gradients are gone; None: only they can tell."""
        return None

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients as the pass left them.

        Returns:
            0-dim, fp32 (float64 if a gradient is), on the first gradient's device.
        """
        return total_norm(self.grads, 2.0)


_KINDS = ("inf", "NaN")  # in the order of `are_nonfinite`


class Unscale:
    """Takes the loss scale out of gradients of the same kinds, again and again, and checks them.

    Args:
        sources: tensors of the dtypes and devices of the gradients to come, for example the
            parameters; only these are looked at.
        targets: the same for the tensors that the gradients will be written to.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        rows: dict[Any, list[int]] = {}
        for index, row in enumerate(zip(sources, targets, strict=True)):
            rows.setdefault(kind_of(row), []).append(index)
        self._rows = list(rows.values())
        self._any_complex = any(map(Tensor.is_complex, sources))
        # The last factor on the CPU, kept while the scale does not move.
        self._factor: tuple[float, Tensor] | None = None

    @without_grad
    def run(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: Scale,
        storage: Sequence[list[Tensor]] = (),
    ) -> GradCheck:
        """Write ``sources[i] / scale`` to ``targets[i]`` and check that all of it is finite.

        A target may be its source (unscaled in place) or a tensor of the same shape in another
        dtype (a half gradient received as fp32). The inverse is rounded to fp32 once.

        Args:
            sources: gradients of any floating or complex dtype, on any devices; a sparse one and
                its target hold their entries in the same order.
            targets: where they go; fp32 targets keep what fp16 would flush to zero.
            scale: the loss scale, above 0, rounded to fp32 as it was when the loss was multiplied;
                as a tensor (fp32, one element, on any device) it is not waited for.
            storage: fewer tensors that hold the numbers of all (dense) targets, if there are such;
                lists, each of one dtype and device.
        """
        pairs = self._copy(sources, targets, are_dense=bool(storage))
        groups = storage or [group for _, group in pairs]
        if isinstance(scale, Tensor):
            return GradCheck(
                targets, self._multiply_and_check(groups, 1.0 / scale.reshape(1), True)
            )
        inverse = _inverse(scale)
        return GradCheck(targets, self._multiply_and_check(groups, inverse, inverse > 1.0))

    @without_grad
    def copy(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], are_dense: bool = False
    ) -> GradCheck:
        """As `run` with a scale of 1, for callers whom no overflow concerns: it says there is none.

        Args:
            sources, targets: see `run`.
            are_dense: whether it is known that none is sparse.
        """
        self._copy(sources, targets, are_dense)
        return GradCheck(targets, [])

    def _copy(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], are_dense: bool
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        pairs = self._split(sources, targets, are_dense)
        for received, group in pairs:
            if any(map(operator.is_not, received, group)):
                torch._foreach_copy_(group, received)
        return pairs

    def _split(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], are_dense: bool
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return the numbers of sources and targets, in a pair of lists for each kind."""
        if self._any_complex or (not are_dense and any(map(IS_SPARSE, sources))):
            sources, targets = list(map(values, sources)), list(map(values, targets))
        else:
            sources, targets = list(sources), list(targets)
        if len(self._rows) == 1:
            return [(sources, targets)]
        return [([sources[r] for r in rows], [targets[r] for r in rows]) for rows in self._rows]

    def _multiply_and_check(
        self, groups: Sequence[list[Tensor]], factor: float | Tensor, grows: bool
    ) -> list[Tensor]:
        """Multiply dense tensors in place; return a float32 flag per device, 0 if all are finite.

        Args:
            groups: lists of tensors of one dtype and device.
            factor: rounded to float32; or a float32 tensor of shape (1,).
            grows: whether the factor may be above 1.
        """
        flags: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for group in groups:
            device = group[0].device
            if device not in flags:
                found_inf = torch.zeros(1, dtype=torch.float32, device=device)
                flags[device] = found_inf, self._on(device, factor)
            _check_and_multiply(group, *flags[device])
        if grows:
            # torch checks before it multiplies: what only then overflows takes a second pass.
            for group in groups:
                found_inf, inverse = flags[group[0].device]
                _check_and_multiply(group, found_inf, torch.ones_like(inverse))
        return [found_inf for found_inf, _ in flags.values()]

    def _on(self, device: torch.device, factor: float | Tensor) -> Tensor:
        if isinstance(factor, Tensor):
            return factor.to(device, non_blocking=True)
        # On other devices the memory may be a CUDA graph's, whose capture fills nothing.
        if device.type != "cpu":
            return torch.full((1,), factor, dtype=torch.float32, device=device)
        if self._factor is None or self._factor[0] != factor:
            self._factor = factor, torch.full((1,), factor, dtype=torch.float32, device=device)
        return self._factor[1]


def unscale(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float | Tensor
) -> GradCheck:
    """Do once what `Unscale.run` does, of lists that may be others at each call."""
    return Unscale(sources, targets).run(sources, targets, scale)


def _inverse(scale: float) -> float:
    return 1.0 / ctypes.c_float(scale).value


def inverse_of(scale: float) -> Tensor:
    """Return what a gradient of a loss times ``scale`` is multiplied by: fp32, (1,), on the CPU."""
    return torch.tensor((_inverse(scale),), dtype=torch.float32, device="cpu")


@torch.no_grad()
def find_nonfinite(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return a float32 flag of shape (1,) for each device, not 0 where a value is inf or NaN.

    Args:
        grads: dense and real. They are multiplied by 1, for torch has no check that only looks.
    """
    flags: dict[torch.device, Tensor] = {}
    for (group,) in alike(grads):
        device = group[0].device
        found_inf = flags.setdefault(device, torch.zeros(1, dtype=torch.float32, device=device))
        one = torch.ones(1, dtype=torch.float32, device=device)
        _check_and_multiply(group, found_inf, one)
    return list(flags.values())


def _check_and_multiply(group: list[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """Multiply tensors of one dtype and device in place; raise the flag where one is not finite.

    This is torch's own operation of its GradScaler, which CUDA has no bfloat16 kernel of.
    """
    if group[0].dtype is not torch.bfloat16 or group[0].is_cpu:
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, factor)
        return
    wide = list(map(Tensor.float, group))
    torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, factor)
    torch._foreach_copy_(group, wide)


class Check:
    """Checks gradients and leaves them as they are: torch has no function for that.

    Args:
        sources, models: as `cuda_kernels.Check` takes them.
    """

    def __init__(self, sources: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        pass

    def look(
        self,
        sources: Sequence[Tensor],
        models: Sequence[Tensor],
        in_place: Sequence[bool],
        scale: Scale,
    ) -> None:
        """Do nothing and return None, as `cuda_kernels.Check.look` where no kernel is there."""


@without_grad
def accumulate(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add ``others[i]`` to ``targets[i]`` in place, one multi-tensor call per dtype and device.

    One for all on a CPU, where torch adds one after the other.
    """
    if targets and all(map(IS_CPU, targets)):
        torch._foreach_add_(list(targets), list(others))
        return
    for ours, theirs in alike(targets, others):
        torch._foreach_add_(ours, theirs)


class Cast:
    """Copies tensors into others of the same shapes, again and again.

    Args:
        sources: tensors of any dtypes, on any devices.
        targets: where they go, in any dtypes.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._groups = alike(targets, sources)

    @without_grad
    def run(self) -> None:
        """Copy, by one multi-tensor call for each pair of dtypes on a device."""
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources)
