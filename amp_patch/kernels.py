"""The fused operations by name, over lists of tensors; knows nothing of models or optimizers.

This is the torch reference: each operation on multi-tensor functions of torch. One pass over
the gradients receives, unscales and checks them; what it found stays on the device until asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def source(name: str) -> str:
    """Return the text of a CUDA source or header, ``source("cast.cu")``.

    A wheel holds the sources inside the package; a checkout (or an editable install of one)
    beside it.

    Raises:
        FileNotFoundError: no such source in either place.
    """
    package = Path(__file__).parent
    folders = (package / "csrc", package.parent / "csrc")
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise FileNotFoundError(
        f"a CUDA source must lie in one of {', '.join(map(str, folders))}; got {name!r}; "
        "install amp_patch from its wheel or from a complete checkout."
    )


class GradCheck:
    """What one pass over a list of gradients found.

    Args:
        grads: the gradients as the pass left them, in the order they were given.
        found_inf: one float32 flag per device, shape (1,), not 0 where a value is inf or NaN.
    """

    def __init__(self, grads: Sequence[Tensor], found_inf: Sequence[Tensor]) -> None:
        self.grads = list(grads)
        self.found_inf = list(found_inf)

    @cached_property
    def overflow(self) -> bool:
        """True where any gradient holds inf or NaN. Waits for the device, once."""
        return any(flag.item() != 0 for flag in self.found_inf)

    def nonfinite(self) -> list[tuple[int, str]]:
        """Return ``(index, "inf" | "NaN" | "inf and NaN")`` of each gradient that is not finite."""
        found = []
        for index, grad in enumerate(self.grads):
            kinds = [name for name, test in _TESTS if test(values(grad)).any()]
            if kinds:
                found.append((index, " and ".join(kinds)))
        return found


_TESTS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("inf", torch.isinf),
    ("NaN", torch.isnan),
)


@torch.no_grad()
def unscale(sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float) -> GradCheck:
    """Write ``sources[i] / scale`` to ``targets[i]`` and check that all of it is finite.

    A target may be its source (unscaled in place) or a tensor of the same shape in another
    dtype (a half gradient received as fp32). The inverse is rounded once, from float64.

    Args:
        sources: gradients of any floating or complex dtype, on any devices; a sparse one and its
            target hold their entries in the same order.
        targets: where they go; fp32 targets keep what fp16 would flush to zero.
        scale: the loss scale, above 0.
    """
    pairs = [(values(s), values(t)) for s, t in zip(sources, targets, strict=True) if s is not t]
    if pairs:
        cast([s for s, _ in pairs], [t for _, t in pairs])
    flags: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for group in _grouped([values(t) for t in targets], lambda t: (t.device, t.dtype)):
        device = group[0].device
        if device not in flags:
            flags[device] = (
                torch.zeros(1, device=device),
                torch.full((1,), 1.0 / scale, device=device),
            )
        torch._amp_foreach_non_finite_check_and_unscale_(group, *flags[device])
    return GradCheck(targets, [found_inf for found_inf, _ in flags.values()])


@torch.no_grad()
def accumulate(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add ``others[i]`` to ``targets[i]`` in place, one multi-tensor call per dtype and device."""
    pairs = list(zip(targets, others, strict=True))
    for group in _grouped(pairs, lambda p: (p[0].device, p[0].dtype, p[1].dtype)):
        torch._foreach_add_([t for t, _ in group], [o for _, o in group])


@torch.no_grad()
def cast(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy ``sources[i]`` into ``targets[i]`` (any dtypes), one multi-tensor call per dtypes."""
    pairs = list(zip(sources, targets, strict=True))
    for group in _grouped(pairs, lambda p: (p[1].device, p[0].dtype, p[1].dtype)):
        torch._foreach_copy_([t for _, t in group], [s for s, _ in group])


@torch.no_grad()
def clip_by_norm(grads: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    The norm is taken in fp32 also of half gradients, whose squares would overflow.

    Returns:
        The total norm before, 0-dim fp32 (float64 if a gradient is), on the first device.
    """
    if not grads:
        return torch.zeros(())
    dense = [values(grad) for grad in grads]
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=_norm_dtype(g)) for g in dense]
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for group in _grouped(dense, lambda g: (g.device, g.dtype)):
        torch._foreach_mul_(group, factor.to(group[0].device, group[0].dtype))
    return total


def _norm_dtype(grad: Tensor) -> torch.dtype:
    return torch.float64 if grad.dtype is torch.float64 else torch.float32


@torch.no_grad()
def differing(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> list[int]:
    """Return where ``copies[i]`` is not ``sources[i]`` cast to the copy's dtype.

    One wait for the device in all. Small tensors are compared together: per-tensor calls would
    cost more than the optimizer's step.
    """
    items = list(enumerate(zip(sources, copies, strict=True)))
    groups = _grouped(items, lambda i: (i[1][1].device, i[1][0].dtype, i[1][1].dtype))
    chunks = [chunk for group in groups for chunk in _chunks(group)]
    flags = [_differ([s for _, (s, _) in c], [t for _, (_, t) in c]) for c in chunks]
    found = []
    for flag, chunk in zip(_to_host(flags), chunks, strict=True):
        if flag:
            found += [index for index, (s, t) in chunk if not torch.equal(s.to(t.dtype), t)]
    return found


#: Elements compared in one go: 8 bytes each are held meanwhile.
_CHUNK = 1 << 22


def _chunks(
    items: list[tuple[int, tuple[Tensor, Tensor]]],
) -> list[list[tuple[int, tuple[Tensor, Tensor]]]]:
    """Split a group so that no chunk of more than one tensor exceeds `_CHUNK` elements."""
    chunks: list[list[tuple[int, tuple[Tensor, Tensor]]]] = []
    room = 0
    for item in items:
        size = item[1][0].numel()
        if size > room:
            chunks.append([])
            room = _CHUNK
        chunks[-1].append(item)
        room -= size
    return chunks


def _differ(sources: list[Tensor], copies: list[Tensor]) -> Tensor:
    if len(sources) == 1:
        return (sources[0].to(copies[0].dtype) != copies[0]).any()
    flat = torch.cat([s.reshape(-1) for s in sources]).to(copies[0].dtype)
    return (flat != torch.cat([c.reshape(-1) for c in copies])).any()


def _to_host(flags: list[Tensor]) -> list[bool]:
    """Read 0-dim flags; all of one device in one transfer."""
    if len({flag.device for flag in flags}) == 1 and len(flags) > 1:
        return [bool(flag) for flag in torch.stack(flags).tolist()]
    return [bool(flag) for flag in flags]


def values(tensor: Tensor) -> Tensor:
    """Return the dense real tensor that holds a gradient's numbers."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _grouped(items: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
