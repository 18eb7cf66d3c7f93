"""Compares tensors with their copies in another dtype, on functions of torch; knows no models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, starmap

import torch
from torch import Tensor

from .large_copies import LargeCopies
from .small_tensors import share_most
from .strips import cut, lie_alike, strip_length
from .tensor_lists import alike


class Comparison:
    """Tells whether copies are still what their sources were cast to, again and again.

    For example, whether half weights are still their float32 masters, rounded. A call per tensor
    would cost the host more than the optimizer's step, so the values of small copies are kept when
    `note_equal` is called, and `differs` compares all small copies with these by one call.

    Args:
        sources: tensors on any devices.
        copies: a tensor of the same shape and device for each, of any real dtypes.

    Attributes:
        has_large: whether `differs` may pass by some pairs.
        found_unseen: whether the last `differs` found a large pair of which no version told.
    """

    def __init__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._pairs = [(s.detach(), c.detach()) for s, c in zip(sources, copies, strict=True)]
        together = _smallest([c for _, c in self._pairs if _is_view(_flat(c), c)])
        self._are_on_cpu = all(copy.is_cpu for copy in copies)
        ids = set(map(id, together))
        self._large = LargeCopies([pair for pair in self._pairs if id(pair[1]) not in ids])
        self.has_large = self._are_on_cpu and bool(self._large.pairs)
        self.found_unseen = False
        self._together = [_words(group) for (group,) in alike(_in_few_pieces(together))]
        # Small ones with their sources, for when nothing is known of either; and those of them that
        # are not flat in memory.
        self._apart: list[tuple[Tensor, Tensor]] = []
        flat: list[tuple[Tensor, Tensor]] = []
        for source, copy in (pair for pair in self._pairs if id(pair[1]) in ids):
            views = _flat(source), _flat(copy)
            are_views = _is_view(views[0], source) and _is_view(views[1], copy)
            (flat if are_views else self._apart).append(views if are_views else (source, copy))
        self._small = [_Joined(*group) for group in alike(*zip(*flat, strict=True))] if flat else []
        # Kept, for to allocate it costs the host more than to fill it.
        self._memory: list[Tensor] = []
        # What the small copies were when they were equal; None where that is not known.
        self._seen: list[Tensor] | None = None

    def note_equal(self) -> None:
        """Note that the copies were made from their sources just now."""
        if not self._memory:
            self._memory = [torch.cat(pieces) for pieces in self._together]
        for memory, pieces in zip(self._memory, self._together, strict=True):
            memory.copy_(_joined(pieces))
        self._seen = self._memory
        if self.has_large:
            self._large.note_equal()

    def forget(self) -> None:
        """Note that sources may have been written to: the next `differs` looks at all of them."""
        self._seen = None
        self._large.forget()

    def differs(self, trusts: bool = False) -> bool:
        """Return whether any copy is not its source cast to its dtype. Waits for the device.

        Between `note_equal` and `forget`, what is written to a small source is not seen.

        Args:
            trusts: on a CPU, pass by large pairs to which nobody has written since `note_equal`;
                see `LargeCopies.unequal_perhaps`. Nobody has read a copy's ``data`` since then.
        """
        self.found_unseen = False
        if self._are_on_cpu:
            return self._differs_on_cpu(trusts)
        flags = [torch.ne(*both).any() for both in self._expected()]
        if len({flag.device for flag in flags}) == 1:
            return bool(flags[0] if len(flags) == 1 else torch.stack(flags).any())
        return any(bool(flag) for flag in flags)

    def _differs_on_cpu(self, trusts: bool) -> bool:
        large = self._large.unequal_perhaps(trusts) if self.has_large else ()
        for pair, is_written in large:
            if any(starmap(_is_another, _pieces(*pair))):
                self.found_unseen = not is_written
                return True
        if self._seen is None:
            return any(starmap(_is_another, self._apart)) or any(
                _have_other_bits(*group.bits()) for group in self._small
            )
        return not all(map(torch.equal, self._seen, map(_joined, self._together)))

    def _expected(self) -> Iterator[Sequence[Tensor]]:
        """Yield the bits that copies must have and have; few casts are in memory at a time."""
        large = self._large.pairs
        for pair in large if self._seen is not None else [*large, *self._apart]:
            for source, copy in _pieces(*pair):
                yield _words([source.to(copy.dtype), copy])
        if self._seen is not None:
            yield from zip(self._seen, map(_joined, self._together), strict=True)
        else:
            yield from (group.bits() for group in self._small)

    def reconcile(self, wins: Callable[[], Sequence[bool]], trusts: bool = False) -> bool:
        """Make every copy and its source equal again, where one of them was written to.

        Where the source wins it is cast to the copy; else the source takes the copy's values, and
        keeps its own where these round to the copy's. Equal are the same bits, so that 0.0 and -0.0
        are not.

        Args:
            wins: returns for each source whether it wins; called only where any pair differs.
            trusts: see `differs`.

        Returns:
            True if any copy was found to differ.
        """
        differs = self.differs(trusts)
        if differs:
            for (source, copy), source_wins in zip(self._pairs, wins(), strict=True):
                if source_wins:
                    copy.copy_(source)
                else:
                    same = _bits(source.to(copy.dtype)) == _bits(copy)
                    source.copy_(torch.where(same, source, copy.to(source.dtype)))
            self.note_equal()
        return differs


class _Joined:
    """Small tensors of one device, dtype and kind of copies, which are flat in memory.

    Args:
        sources: views of all numbers.
        copies: likewise.
    """

    def __init__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._sources, self._dtype = list(sources), copies[0].dtype
        # Autocast on a CPU puts no tensors in float16 together.
        self._copies = list(map(_bits, copies))

    def bits(self) -> tuple[Tensor, Tensor]:
        """Return the bits that the copies must have, in new memory, and those that they have."""
        wanted = _joined(self._sources).to(self._dtype, copy=True)
        return _bits(wanted), _joined(self._copies)


def _is_another(source: Tensor, copy: Tensor) -> bool:
    """Return whether a copy on the CPU is not its source cast to its dtype."""
    wanted, found = _words([source.to(copy.dtype, copy=True), copy])
    return _have_other_bits(wanted, found)


def _have_other_bits(wanted: Tensor, found: Tensor) -> bool:
    """Return whether two tensors on the CPU differ; ``wanted`` is written to."""
    # `equal` of these two would look at one number after the other, in one thread.
    return not torch.equal(wanted.bitwise_xor_(found).count_nonzero(), _NONE)


def _smallest(copies: Sequence[Tensor]) -> list[Tensor]:
    """Return small ones in their order, as many as take little memory together."""
    sizes = [copy.numel() for copy in copies]
    rows = sorted(range(len(sizes)), key=sizes.__getitem__)
    totals = accumulate(sizes[row] for row in rows)
    at_most = min(max(_LEAST, sum(sizes) * _SHARE), _MOST)
    chosen = {row for row, total in zip(rows, totals, strict=True) if total <= at_most}
    return [copy for row, copy in enumerate(copies) if row in chosen]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


def _in_few_pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return flat tensors that hold the numbers of all of these, and maybe more.

    Where tensors share most of a memory, as `small_tensors` makes them, it is one of the pieces.
    """
    members: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        members.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    pieces: list[Tensor] = []
    for sharing in members.values():
        if share_most(sharing):
            first, storage = sharing[0], sharing[0].untyped_storage()
            pieces.append(torch.empty(0, dtype=first.dtype, device=first.device).set_(storage))
        else:
            pieces += map(_flat, sharing)
    return pieces


def _bits(tensor: Tensor) -> Tensor:
    """View numbers as integers: these are compared faster, and a NaN is equal to itself."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _words(tensors: Sequence[Tensor]) -> list[Tensor]:
    """View the numbers of tensors of one dtype as integers of 64 bits, flat, if all of them can be.

    Else see `_bits`.
    """
    per_word = 8 // tensors[0].element_size()
    if all(_is_of_words(tensor, per_word) for tensor in tensors):
        return [_flat(tensor).view(torch.int64) for tensor in tensors]
    return list(map(_bits, tensors))


def _is_of_words(tensor: Tensor, per_word: int) -> bool:
    count, offset = tensor.numel(), tensor.storage_offset()
    is_whole = count > 0 and count % per_word == 0 and offset % per_word == 0
    return bool(is_whole) and tensor.is_contiguous()


def _pieces(source: Tensor, copy: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return both in strips, where they are large."""
    length = strip_length(copy.numel(), _STRIP)
    if length is None or not lie_alike([source, copy]):
        return [(source, copy)]
    return zip(cut(source, length), cut(copy, length), strict=True)


_NONE = torch.zeros((), dtype=torch.int64, device="cpu")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: How many elements of small copies are compared together: a share of all, within these bounds.
_SHARE, _LEAST, _MOST = 1 / 64, 1 << 16, 1 << 20
#: How many elements of a large copy are compared at once, about.
_STRIP = 1 << 18


def _is_view(flat: Tensor, tensor: Tensor) -> bool:
    return flat.data_ptr() == tensor.data_ptr()
