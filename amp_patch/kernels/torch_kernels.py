"""The fused operations on multi-tensor functions of torch: the reference, on every device.

Knows lists of tensors, no models or optimizers. What a check found stays on the device until asked.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
        return any(flag.item() != 0 for flag in self.found_inf)

    def nonfinite(self) -> list[tuple[int, str]]:
        """Return ``(index, "inf" | "NaN" | "inf and NaN")`` of each gradient that is not finite."""
        found = []
        for index, grad in enumerate(self.grads):
            kinds = [name for name, test in _TESTS if test(values(grad)).any()]
            if kinds:
                found.append((index, " and ".join(kinds)))
        return found

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients as the pass left them.

        Returns:
            0-dim, fp32 (float64 if a gradient is), on the first gradient's device.
        """
        return _total_norm(self.grads, 2.0)


_TESTS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("inf", torch.isinf),
    ("NaN", torch.isnan),
)


class Unscale:
    """Takes the loss scale out of gradients of the same kinds, again and again, and checks them.

    Args:
        sources: tensors of the dtypes and devices of the gradients to come; the parameters, say.
        targets: the same of what they are written to.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        rows: dict[Any, list[int]] = {}
        for index, row in enumerate(zip(sources, targets, strict=True)):
            rows.setdefault(_kind(row), []).append(index)
        self._rows = list(rows.values())
        self._any_complex = any(map(Tensor.is_complex, sources))
        # The last factor on the CPU, kept while the scale does not move.
        self._factor: tuple[float, Tensor] | None = None

    def run(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: float | Tensor,
        storage: Sequence[Tensor] = (),
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
            storage: fewer tensors that hold the numbers of all (dense) targets, if there are such.
        """
        with torch.set_grad_enabled(False):  # takes the host half as long as no_grad()
            return self._run(sources, targets, scale, storage)

    def _run(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: float | Tensor,
        storage: Sequence[Tensor],
    ) -> GradCheck:
        parts = self._split(sources, targets)
        for received, group in parts:
            if any(map(operator.is_not, received, group)):
                torch._foreach_copy_(group, received)
        groups = [group for _, group in parts]
        if storage:
            groups = [group for (group,) in alike(_dense(storage))]
        if isinstance(scale, Tensor):
            return GradCheck(
                targets, self._multiply_and_check(groups, 1.0 / scale.reshape(1), True)
            )
        inverse = 1.0 / ctypes.c_float(scale).value
        return GradCheck(targets, self._multiply_and_check(groups, inverse, inverse > 1.0))

    def _split(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return the numbers of sources and targets in parts that are of one kind."""
        if self._any_complex or any(map(_IS_SPARSE, sources)):
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
            torch._amp_foreach_non_finite_check_and_unscale_(group, *flags[device])
        if grows:
            # torch checks before it multiplies: what only then overflows takes a second pass.
            for group in groups:
                found_inf, inverse = flags[group[0].device]
                one = torch.ones_like(inverse)
                torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, one)
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


@torch.no_grad()
def accumulate(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add ``others[i]`` to ``targets[i]`` in place, one multi-tensor call per dtype and device."""
    for ours, theirs in alike(targets, others):
        torch._foreach_add_(ours, theirs)


class Cast:
    """Copies tensors into others of the same shapes, again and again.

    Args:
        sources: tensors of any dtypes, on any devices.
        targets: where they go, in any dtypes.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._parts = alike(targets, sources)

    def run(self) -> None:
        """Copy, by one multi-tensor call for each pair of dtypes on a device."""
        with torch.set_grad_enabled(False):  # takes the host half as long as no_grad()
            for targets, sources in self._parts:
                torch._foreach_copy_(targets, sources)


@torch.no_grad()
def clip_by_norm(
    grads: Sequence[Tensor], max_norm: float, norm_type: float, norm: Tensor | None = None
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    The norm is taken in fp32 also of half gradients, whose squares would overflow.

    Args:
        grads: dense or sparse, on any devices.
        max_norm: what the norm is to be at most.
        norm_type: the p of the p-norm, inf included.
        norm: their total norm where it is known, as `GradCheck.norm` tells it; saves a pass.

    Returns:
        The total norm before, 0-dim fp32 (float64 if a gradient is), on the first device.
    """
    total = _total_norm(grads, norm_type) if norm is None else norm
    multiply(grads, clip_factor(total, max_norm, CLIP_EPS))
    return total


#: What is added to the norm where gradients are clipped as `torch.nn.utils.clip_grad_norm_` does.
CLIP_EPS = 1e-6


def clip_factor(norm: Tensor, max_norm: float, eps: float = 0.0) -> Tensor:
    """Return what multiplies gradients of this norm, so that it is at most ``max_norm`` then.

    Args:
        norm: 0-dim, of all gradients together.
        max_norm: above 0.
        eps: added to the norm.

    Returns:
        ``min(1, max_norm / (norm + eps))``, 0-dim; 1 for a norm of 0.
    """
    factor: Tensor = (max_norm / (norm + eps if eps else norm)).clamp(max=1.0)
    return factor


def multiply(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim fp32 or float64 tensor, on whatever device it is."""
    for (group,) in alike(_dense(grads)):
        # A factor in half would be rounded, and flushed to 0 by a large norm.
        torch._foreach_mul_(group, factor.to(group[0].device, non_blocking=True))


def _total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    return combined(norms_of(grads, norm_type), norm_type)


def norms_of(grads: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norm of each gradient that has elements, 0-dim fp32 or float64."""
    return [_norm(grad, norm_type) for grad in grads if values(grad).numel() > 0]


def combined(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all of which parts have these norms (0-dim), on the first one's device."""
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
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

    Small copies are compared together with what they were when they were last known to be equal:
    a call per tensor would cost the host more than the optimizer's step.

    Args:
        sources: tensors on any devices.
        copies: a tensor of the same shape and device for each, of any real dtypes.
    """

    def __init__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._pairs = [(s.detach(), c.detach()) for s, c in zip(sources, copies, strict=True)]
        together = [c for _, c in self._pairs if c.numel() <= _TOGETHER and _is_view(_flat(c), c)]
        ids = set(map(id, together))
        self._alone = [pair for pair in self._pairs if id(pair[1]) not in ids]
        self._together = [list(map(_bits, part)) for (part,) in alike(_in_few_pieces(together))]
        # Kept, for to allocate it costs the host more than to fill it.
        self._memory: list[Tensor] = []
        self._seen: list[Tensor] | None = None

    def note_equal(self) -> None:
        """The copies were made from their sources just now."""
        if not self._memory:
            self._memory = [torch.cat(pieces) for pieces in self._together]
        for memory, pieces in zip(self._memory, self._together, strict=True):
            memory.copy_(_joined(pieces))
        self._seen = self._memory

    def forget(self) -> None:
        """The sources may have been written to: compare with them the next time."""
        self._seen = None

    def differs(self) -> bool:
        """Return whether any copy is not its source cast to its dtype. Waits for the device.

        What was written to a small source since `note_equal` is not looked for.
        """
        pairs = self._pairs if self._seen is None else self._alone
        cast = [(_bits(source.to(copy.dtype)), _bits(copy)) for source, copy in pairs]
        if self._seen is not None:
            cast += zip(self._seen, map(_joined, self._together), strict=True)
        if all(copy.is_cpu for _, copy in cast):
            return not all(torch.equal(expected, copy) for expected, copy in cast)
        flags = [(expected != copy).any() for expected, copy in cast]
        if len({flag.device for flag in flags}) == 1:
            return bool(flags[0] if len(flags) == 1 else torch.stack(flags).any())
        return any(bool(flag) for flag in flags)

    def reconcile(self, wins: Callable[[], Sequence[bool]]) -> bool:
        """Where a copy is not its source cast to its dtype, let one of the two follow the other.

        The copy follows where the source wins, else the source takes the copy's value. The same
        bits are equal, so that zeros of different signs are not.

        Args:
            wins: called if that matters: per source, whether it wins.

        Returns:
            True if any copy was found to differ.
        """
        differs = self.differs()
        if differs:
            for (source, copy), source_wins in zip(self._pairs, wins(), strict=True):
                if source_wins:
                    copy.copy_(source)
                else:
                    same = _bits(source.to(copy.dtype)) == _bits(copy)
                    source.copy_(torch.where(same, source, copy.to(source.dtype)))
            self.note_equal()
        return differs


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


def _in_few_pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return flat tensors that hold the numbers of others: the memory that some share is one."""
    members: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        members.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    pieces: list[Tensor] = []
    for part in members.values():
        storage = part[0].untyped_storage()
        if len(part) > 1 and 2 * sum(tensor.nbytes for tensor in part) >= storage.nbytes():
            pieces.append(torch.empty(0, dtype=part[0].dtype, device=part[0].device).set_(storage))
        else:
            pieces += map(_flat, part)
    return pieces


def _bits(tensor: Tensor) -> Tensor:
    """View numbers as integers: these are compared faster, and a NaN is equal to itself."""
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements up to which a tensor is compared together with others.
_TOGETHER = 1 << 16


def _is_view(flat: Tensor, tensor: Tensor) -> bool:
    return flat.data_ptr() == tensor.data_ptr()


def alike(*lists: Sequence[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Split parallel lists so that each part has one device and dtype per list.

    A multi-tensor call is one launch only for such lists.
    """
    if len(lists[0]) <= 1:
        return [tuple(list(tensors) for tensors in lists)] if lists[0] else []
    if all(_is_uniform(tensors) for tensors in {id(one): one for one in lists}.values()):
        return [tuple(list(tensors) for tensors in lists)]
    parts: dict[Any, tuple[list[Tensor], ...]] = {}
    for row in zip(*lists, strict=True):
        part = parts.setdefault(_kind(row), tuple([] for _ in row))
        for tensors, tensor in zip(part, row, strict=True):
            tensors.append(tensor)
    return list(parts.values())


def _kind(row: Sequence[Tensor]) -> Any:
    return tuple((tensor.device, tensor.dtype) for tensor in row)


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
