"""Counts what a run computes in: calls of operators by dtype, casts, and casts that were avoided.

Knows operators, the parameters of the initialized models and the cache of casts; changes nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_patch.levels import HALVES
from amp_patch.session import session

from .op_table import table
from .phases import Phase, Phases
from .ranges import storage_of
from .trace import tracer

#: What is cast.
Kind = Literal["weight", "activation", "gradient"]

_BULK = "_foreach_copy_"


class OpStats:
    """What was counted.

    Attributes:
        calls: by phase ("forward", "backward", "step"), operator ("addmm") and dtype ("float16":
            that of the first floating tensor that it returned, or that it was given to write to
            where it returns nothing, as ``_foreach_add_``; "other" where there is none).
            A step is all that ``optimizer.step()`` runs, and what amp does for it: it unscales
            and checks gradients, and counts inf and NaN after an overflow.
        casts: tensors that were cast, by kind ("weight", "activation", "gradient"), dtype before
            and dtype after. To round masters into half weights is a cast of weights.
        bulk_casts: how many launches cast many of these tensors at once.
        cache_hits: weights that operators of a forward read from the cache, where the cast was
            there before (O1, O4): made by an earlier use, or refreshed with all others at once.
        half_weights: weights that operators of a forward read as they are stored, in half (O2, O3,
            O5).
        first_reads: of these reads, the first of each cast that was made together with many others:
            no cast was saved by it.
        steps: calls of ``optimizer.step()`` that were made.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[Phase, str, str]] = Counter()
        self.casts: Counter[tuple[Kind, str, str]] = Counter()
        self.bulk_casts = 0
        self.cache_hits = 0
        self.half_weights = 0
        self.first_reads = 0
        self.steps = 0

    @property
    def casts_avoided(self) -> int:
        """How many fewer casts of weights were made than one for each use of a weight."""
        return self.cache_hits + self.half_weights - self.first_reads

    def casts_of(self, kind: Kind) -> int:
        """Return how many tensors of a kind were cast."""
        return sum(count for (found, _, _), count in self.casts.items() if found == kind)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what JSON can hold."""
        return {
            "calls": [
                {"phase": phase, "operator": name, "dtype": dtype, "calls": count}
                for (phase, name, dtype), count in sorted(self.calls.items())
            ],
            "casts": [
                {"of": kind, "from": before, "to": after, "casts": count}
                for (kind, before, after), count in sorted(self.casts.items())
            ],
            "bulk_casts": self.bulk_casts,
            "casts_avoided": self.casts_avoided,
            "cache_hits": self.cache_hits,
            "half_weights": self.half_weights,
            "first_reads": self.first_reads,
            "steps": self.steps,
        }

    def __str__(self) -> str:
        return table(self.to_json())


@contextlib.contextmanager
def op_stats() -> Iterator[OpStats]:
    """Count the operators that run inside the block; ``with amp.debug.op_stats() as stats:``.

    What torch.compile has compiled is counted as the operators of its graph that come through
    torch's dispatcher, if any do.

    Returns:
        A context manager that yields an `OpStats`, complete at the end of the block.
    """
    stats = OpStats()
    counting = Counting(stats)
    with counting.of_steps(), counting:
        yield stats


class Counting(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        stats: filled in.
    """

    def __init__(self, stats: OpStats) -> None:
        super().__init__()
        self._stats = stats
        self._phases = Phases(self._stepping)
        self._weights: set[int] = set()
        self._casts: set[int] = set()
        self._fresh: set[int] = set()
        self._unread: set[tuple[int, int]] = set()  # several casts may share a storage
        self._is_stale = True

    def of_steps(self) -> contextlib.AbstractContextManager[None]:
        """Know inside the block when an optimizer steps, and when amp works on its gradients."""
        return self._phases.followed()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if tracer.is_looking:  # the operators of a step that is run again to be looked at
            return func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        inputs = _floating((args, kwargs))
        if self._is_stale:
            self._look_up()
        result = func(*args, **kwargs)
        outputs = _floating(result)
        phase = self._phases.of(name)
        written = outputs or (inputs if name.endswith("_") else [])
        dtype = _name_of(written[0].dtype) if written else "other"
        if name == _BULK:
            dtype = _name_of(args[0][0].dtype)
            self._count_bulk(args[0], args[1])
        else:
            self._count_cast(name, inputs, outputs, phase)
            if phase == "forward" and not _is_view(func):
                self._count_reads(inputs, outputs)
        if not name.startswith("_record_function"):  # torch's own profiler
            self._stats.calls[phase, name, dtype] += 1
        return result

    def forget_places(self) -> None:
        """There are other models now."""
        self._is_stale = True

    def _stepping(self, begins: bool) -> None:
        self._stats.steps += begins
        self._is_stale = True

    def _count_cast(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], phase: Phase
    ) -> None:
        sources = inputs[1:] if name == "copy_" else inputs
        if not sources or not outputs or outputs[0].dtype in {one.dtype for one in sources}:
            return
        kind = self._kind(sources[0], outputs[0])
        if kind == "weight":
            self._is_stale = True  # the cast may be one that is kept
            self._fresh.add(storage_of(outputs[0]))
        elif phase == "forward":
            kind = "activation"
        self._add(kind, sources[0], outputs[0])

    def _count_bulk(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        pairs = [
            (source, target)
            for source, target in zip(sources, targets, strict=True)
            if source.dtype is not target.dtype and source.is_floating_point()
        ]
        self._stats.bulk_casts += bool(pairs)
        for source, target in pairs:
            kind = self._kind(source, target)
            self._add(kind, source, target)
            if kind == "weight":
                self._is_stale = True  # casts of large weights get memory anew
                self._unread.add((storage_of(target), int(target.storage_offset())))

    def _kind(self, source: Tensor, target: Tensor) -> Kind:
        is_weight = self._weights & {storage_of(source), storage_of(target)}
        return "weight" if is_weight else "gradient"

    def _add(self, kind: Kind, source: Tensor, target: Tensor) -> None:
        self._stats.casts[kind, _name_of(source.dtype), _name_of(target.dtype)] += 1

    def _count_reads(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        for one in inputs:
            if one.dtype in HALVES and (not outputs or outputs[0].dtype is one.dtype):
                storage = storage_of(one)
                if storage in self._fresh:  # made for this very use
                    self._fresh.remove(storage)
                    continue
                self._stats.cache_hits += storage in self._casts
                self._stats.half_weights += storage in self._weights
                place = (storage, int(one.storage_offset()))
                if place in self._unread and storage in self._casts | self._weights:
                    self._unread.remove(place)
                    self._stats.first_reads += 1

    def _look_up(self) -> None:
        """Note where weights and kept casts are; hold none of them."""
        models = list(session.models.levels)
        self._weights = {storage_of(param) for model in models for param in model.parameters()}
        self._casts = {storage_of(cast) for cast in session.cache.casts()}
        self._is_stale = False


def _floating(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.is_floating_point()]


def _is_view(func: Any) -> bool:
    return any(one.alias_info is not None for one in func._schema.returns)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
