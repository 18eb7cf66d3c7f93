"""The fused operations by name, over lists of tensors; knows nothing of models or optimizers.

This is the torch reference: each operation on multi-tensor functions of torch. One pass over
the gradients receives, unscales and checks them; what it found stays on the device until asked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


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
    flags: dict[torch.device, tuple[Tensor, Tensor]] = {}
    dense = _dense(targets)
    parts = alike(dense, dense if sources is targets else _dense(sources))
    for group, received in parts:
        if any(map(operator.is_not, received, group)):
            torch._foreach_copy_(group, received)
        device = group[0].device
        if device not in flags:
            flags[device] = (
                torch.zeros(1, device=device),
                torch.full((1,), 1.0 / scale, device=device),
            )
        torch._amp_foreach_non_finite_check_and_unscale_(group, *flags[device])
    if scale < 1.0:
        # torch checks before it multiplies: what only then overflows is found by a second pass.
        for group, _ in parts:
            found_inf, inverse = flags[group[0].device]
            torch._amp_foreach_non_finite_check_and_unscale_(
                group, found_inf, torch.ones_like(inverse)
            )
    return GradCheck(targets, [found_inf for found_inf, _ in flags.values()])


@torch.no_grad()
def accumulate(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add ``others[i]`` to ``targets[i]`` in place, one multi-tensor call per dtype and device."""
    for ours, theirs in alike(targets, others):
        torch._foreach_add_(ours, theirs)


@torch.no_grad()
def cast(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy ``sources[i]`` into ``targets[i]`` (any dtypes), one multi-tensor call per dtypes."""
    for ours, theirs in alike(targets, sources):
        torch._foreach_copy_(ours, theirs)


@torch.no_grad()
def clip_by_norm(grads: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    The norm is taken in fp32 also of half gradients, whose squares would overflow.

    Returns:
        The total norm before, 0-dim fp32 (float64 if a gradient is), on the first device.
    """
    norms = [_norm(grad, norm_type) for grad in grads if values(grad).numel() > 0]
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for (group,) in alike(_dense(grads)):
        # A factor in half would be rounded, and flushed to 0 by a large norm.
        torch._foreach_mul_(group, factor.to(group[0].device))
    return total


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    is_half = grad.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if is_half else grad.dtype
    if grad.is_sparse:
        # Entries of one index count as their sum.
        grad = grad.to(dtype).coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=dtype)
    return norm


class Comparison:
    """Tells whether copies still are their sources in another dtype, again and again.

    Small tensors are compared together, through flat views made once: a call per tensor would
    cost the host more than the optimizer's step.

    Args:
        sources: tensors on any devices.
        copies: a tensor of the same shape and device for each, all in other dtypes if need be.
    """

    def __init__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        flat = [tensor.detach().reshape(-1) for tensor in sources]
        flat_copies = [tensor.detach().reshape(-1) for tensor in copies]
        # What cannot be viewed flat is compared by itself, as it is.
        self._alone = [
            (source, copy)
            for source, copy, f, c in zip(sources, copies, flat, flat_copies, strict=True)
            if not _is_view(f, source) or not _is_view(c, copy) or source.numel() > _TOGETHER
        ]
        alone = {id(source) for source, _ in self._alone}
        together = [
            pair
            for source, *pair in zip(sources, flat, flat_copies, strict=True)
            if id(source) not in alone
        ]
        self._together = alike([f for f, _ in together], [c for _, c in together])

    @torch.no_grad()
    def differs(self) -> bool:
        """Return whether any copy is not its source cast to its dtype. Waits for the device."""
        pairs = [(torch.cat(f), torch.cat(c)) for f, c in self._together]
        pairs += self._alone
        if all(copy.is_cpu for _, copy in pairs):
            return not all(torch.equal(source.to(copy.dtype), copy) for source, copy in pairs)
        flags = [(source.to(copy.dtype) != copy).any() for source, copy in pairs]
        if len({flag.device for flag in flags}) == 1:
            return bool(flags[0] if len(flags) == 1 else torch.stack(flags).any())
        return any(bool(flag) for flag in flags)


#: Elements up to which a tensor is compared together with others.
_TOGETHER = 1 << 16


def _is_view(flat: Tensor, tensor: Tensor) -> bool:
    return flat.data_ptr() == tensor.data_ptr()


def alike(*lists: Sequence[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Split parallel lists so that each part has one device and dtype per list.

    A multi-tensor call is one launch only for such lists.
    """
    if not lists[0]:
        return []
    if all(_is_uniform(tensors) for tensors in {id(one): one for one in lists}.values()):
        return [tuple(list(tensors) for tensors in lists)]
    parts: dict[Any, tuple[list[Tensor], ...]] = {}
    for row in zip(*lists, strict=True):
        kind = tuple((tensor.device, tensor.dtype) for tensor in row)
        for part, tensor in zip(parts.setdefault(kind, tuple([] for _ in row)), row, strict=True):
            part.append(tensor)
    return list(parts.values())


def _is_uniform(tensors: Sequence[Tensor]) -> bool:
    # Most lists are, and this runs several times a step. To compare devices costs most.
    if len(set(map(_DTYPE, tensors))) > 1:
        return False
    return all(map(_IS_CPU, tensors)) or len(set(map(_DEVICE, tensors))) == 1


_DTYPE = operator.attrgetter("dtype")
_DEVICE = operator.attrgetter("device")
_IS_CPU = operator.attrgetter("is_cpu")
_IS_SPARSE = operator.attrgetter("is_sparse")


def _dense(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if any(map(_IS_SPARSE, tensors)) or any(map(Tensor.is_complex, tensors)):
        return [values(tensor) for tensor in tensors]
    return tensors


def values(tensor: Tensor) -> Tensor:
    """Return the dense real tensor that holds a gradient's numbers."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
