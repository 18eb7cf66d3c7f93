"""Looks at what every operator of a run returns, and finds where values left the finite range.

Knows operators and their places; nothing of loss scales, nor of what is to be done about it.

A value that is not finite comes from somewhere: it is followed from operator to operator, so that
what is reported is where it came up. Infinities that are meant, in the mask of an attention say,
are followed too, and are no cause by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_patch.casting.mode import HALVES
from amp_patch.common.running_backward import is_in_backward

from .places import Place, Places, makes_gradients
from .ranges import (
    NEAR_LIMIT,
    SMALLEST_NORMAL,
    Range,
    can_look,
    kinds_of,
    range_of,
    ranges_of,
    storage_of,
)

#: What came up where: an operator of the model, a weight or buffer, or what the model was given.
Source = Literal["forward", "backward", "weight", "input", "mask"]
#: Operators that write a number that they are given.
_FILLING = {
    "constant_pad_nd",
    "fill",
    "full",
    "full_like",
    "index_fill",
    "masked_fill",
    "new_full",
    "scalar_tensor",
    "where",
}
#: Operators whose result nobody has written to yet: what memory held before.
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
#: Operators of which no operand is a mask: what is infinite there was not meant to be.
_PRODUCTS = {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "convolution", "dot", "mm", "mv"}
#: What scripts write where a mask is, as transformers do; -inf is another.
_MASK = torch.finfo(torch.float16).min


@dataclass(frozen=True, eq=False)
class Origin:
    """Where values came up that are not finite.

    Attributes:
        source: what made them; "mask": somebody who meant it.
        place: the module and the operator.
        result: the range of what the operator returned.
        operands: the ranges of what it was called with.
        inputs: the ranges of what its module was called with; none in backward.
        weights: the ranges of the module's own parameters.
        is_of_weight: whether it is a gradient of a weight that is stored in half, or of the cast of
            one.
        unless_meant: of a mask that was there before the run, the source that it else is.
    """

    source: Source
    place: Place
    result: Range
    operands: tuple[Range, ...] = ()
    inputs: tuple[Range, ...] = ()
    weights: tuple[Range, ...] = ()
    is_of_weight: bool = False
    unless_meant: Source | None = None

    @property
    def may_hide(self) -> bool:
        """Whether these are values of a forward that an error made, as what follows may hide."""
        return self.source == "forward" and self.result.kinds != ("-inf",)

    @property
    def is_meant(self) -> bool:
        """Whether the values are no error by themselves."""
        return self.source == "mask"

    def not_meant(self) -> Origin:
        """Return the same of what was taken for a mask, and is none."""
        return replace(self, source=self.unless_meant or self.source, unless_meant=None)


@dataclass
class Counts:
    """How many float16 values of a module's operators were near a limit.

    Attributes:
        values: those of forward.
        beyond: of these, inf or NaN. What follows may hide them: 1 / inf is 0, and every gradient
            finite. A -inf is left out, for masks are made of it.
        large: of these, of a magnitude above half of float16's largest, and finite. The lowest
            number of float16 is left out, for masks are made of it, too. Those of backward are not
            counted: a dynamic loss scale grows until they are.
        grads: those of backward.
        flushed: of these, not zero in float32 and zero when they were cast to float16.
        subnormal: of these, so small that float16 has fewer digits for them.
        nonzero: of those of backward, the others that are not 0.
        cast, lost: the sums of the magnitudes that were cast to float16, and of those flushed.
    """

    values: int = 0
    beyond: int = 0
    large: int = 0
    grads: int = 0
    flushed: int = 0
    subnormal: int = 0
    nonzero: int = 0
    cast: float = 0.0
    lost: float = 0.0

    @property
    def are_lost(self) -> bool:
        """Whether most gradients are 0 for want of range, and not the smallest of them alone.

        Those of a classifier that is sure of most classes are, and it trains.
        """
        return self.flushed > self.nonzero and 2.0 * self.lost > self.cast

    def add_cast(self, given: Tensor, made: Tensor) -> None:
        """Count what a cast to float16 has made 0."""
        is_flushed = (given != 0) & (made == 0)
        magnitudes = given.detach().abs().double().nan_to_num(0.0, 0.0)
        self.flushed += int(is_flushed.sum())
        self.cast += magnitudes.sum().item()
        self.lost += magnitudes[is_flushed].sum().item()


@dataclass
class Watched:
    """What a run showed.

    Attributes:
        origins: in the order in which they came up.
        counts: by the path of the module.
        peak: the largest finite magnitude of a float16 value in backward.
    """

    origins: list[Origin] = field(default_factory=list)
    counts: dict[str, Counts] = field(default_factory=dict)
    peak: float = 0.0


class _Operation(NamedTuple):
    """One call of an operator.

    Attributes:
        func: the operator.
        args: what it was given, but for keywords.
        inputs: the tensors among all that it was given.
        bad: those that are not finite, and where their values came up.
        place: where it was called.
        before: the ranges of the inputs; None where it writes to none of them.
    """

    func: Any
    args: tuple[Any, ...]
    inputs: list[Tensor]
    bad: list[tuple[Tensor, Origin]]
    place: Place
    before: tuple[Range, ...] | None

    @property
    def name(self) -> str:
        """Its name in ATen, such as "addmm"."""
        return _name_of(self.func)

    @property
    def operands(self) -> tuple[Range, ...]:
        """The ranges that the inputs had before it."""
        return ranges_of(_numbered(self.inputs)) if self.before is None else self.before


class Watch(TorchDispatchMode):
    """Looks at every operator while it is entered.

    Args:
        places: follows the modules meanwhile.
        watched: filled in.
        model: whose weights are told from other tensors.
    """

    def __init__(self, places: Places, watched: Watched, model: nn.Module) -> None:
        super().__init__()
        self._weights = {
            storage_of(param): (name.rpartition(".")[0], name.rpartition(".")[2])
            for name, param in model.named_parameters()
        }
        self._places, self._watched = places, watched
        # By the storage. One that is freed is overwritten here when it is allocated again.
        self._origins: dict[int, Origin] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _name_of(func) in UNWRITTEN:
            return self._emptied(func(*args, **kwargs))
        inputs = [one for one in tree_leaves((args, kwargs)) if can_look(one)]
        unread = _unread(func, args)
        bad = [
            (one, origin)
            for one in inputs
            if (origin := self.origin_of(one)) is not None and id(one) not in unread
        ]
        written = _written(func, args)
        before = ranges_of(_numbered(inputs)) if written else None
        result = func(*args, **kwargs)
        place = self._place(func, inputs, result)
        outputs = [one for one in tree_leaves(result) if can_look(one)]
        operation = _Operation(func, args, inputs, bad, place, before)
        for output in _unique([*outputs, *written]):
            if id(output) not in unread or self.origin_of(output) is None:
                self._look(operation, output)
        self._count_flushed(place, inputs, outputs)
        return result

    def _emptied(self, fresh: Any) -> Any:
        """Return a tensor that nobody has written to as zeros, for it may hold inf by chance."""
        for one in tree_leaves(fresh):
            if can_look(one):
                one.zero_()
                self._origins.pop(storage_of(one), None)
        return fresh

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Return where a tensor's values came up that are not finite; None if all are."""
        origin = self._origins.get(storage_of(tensor))
        return origin if origin is not None and kinds_of(tensor) else None

    def introduce(self, source: Source, place: Place, name: str, tensor: Any) -> None:
        """Look at a tensor that was there before the run."""
        if not can_look(tensor) or not (kinds := kinds_of(tensor)):
            return
        origin = Origin(source, place, range_of(name, tensor))
        if kinds == ("-inf",):
            origin = replace(origin, source="mask", unless_meant=source)
        self._add(origin, tensor)

    def _add(self, origin: Origin, tensor: Tensor) -> None:
        self._origins[storage_of(tensor)] = origin
        if not any(known is origin for known in self._watched.origins):
            self._watched.origins.append(origin)

    def _place(self, func: Any, inputs: list[Tensor], result: Any) -> Place:
        node = torch._C._current_autograd_node() if makes_gradients() else None
        if node is not None:
            return self._places.of_node(node)
        name = _name_of(func)
        return self._places.here(name, name in ("_to_copy", "copy_", "_foreach_copy_"))

    def _look(self, operation: _Operation, output: Tensor) -> None:
        kinds, bad = kinds_of(output), operation.bad
        is_view = getattr(operation.func, "is_view", False)
        self._count(operation.place, output, is_view)
        if not kinds:
            if all(storage_of(output) != storage_of(one) for one in operation.inputs):
                self._origins.pop(storage_of(output), None)
            return
        found = [origin for _, origin in bad if not origin.is_meant]
        if found:
            self._add(min(found, key=self._watched.origins.index), output)
            return
        given = [origin for _, origin in bad if origin.unless_meant is not None]
        if given and operation.name in _PRODUCTS:
            self._add(given[0].not_meant(), output)
            return
        meant = {kind for one, _ in bad for kind in kinds_of(one)}
        if bad and set(kinds) <= meant:
            self._add(bad[0][1], output)
        elif _is_meant(operation) and not bad:
            self._add(Origin("mask", operation.place, range_of("result", output)), output)
        else:
            self._add(self._describe(operation, output), output)

    def _describe(self, operation: _Operation, output: Tensor) -> Origin:
        source_of_cast = _source_of_cast(operation, output)
        if source_of_cast is not None and storage_of(source_of_cast) in self._weights:
            module_name, name = self._weights[storage_of(source_of_cast)]
            operands = ranges_of({name: source_of_cast})
            return Origin("weight", Place(module_name, 1, name), range_of(name, output), operands)
        operands = operation.operands
        source: Source = "backward" if makes_gradients() else "forward"
        if source == "forward" and any(one.kinds not in ((), ("-inf",)) for one in operands):
            source = "input"  # a tensor that the model had from elsewhere
        innermost = self._places.innermost
        module, given = (None, ()) if innermost is None else innermost
        given = tree_leaves(given)
        return Origin(
            source,
            operation.place,
            range_of("result", output),
            operands,
            ranges_of((f"input {n}", one) for n, one in enumerate(given)),
            weights_of(module),
            source == "backward" and _is_of_half_weight(torch._C._current_autograd_node()),
        )

    def _count(self, place: Place, output: Tensor, is_view: bool) -> None:
        if output.dtype is not torch.float16:
            return
        counts = self._watched.counts.setdefault(place.module, Counts())
        magnitudes = output.detach().abs()
        is_finite = magnitudes.isfinite()
        if makes_gradients():
            finite = magnitudes[is_finite]
            counts.grads += output.numel()
            counts.subnormal += int(((finite > 0) & (finite < SMALLEST_NORMAL)).sum())
            # a view may be of what the forward has saved, which no scale multiplies
            if len(finite) and not is_view:
                counts.nonzero += int(finite.count_nonzero())
                self._watched.peak = max(self._watched.peak, finite.max().item())
        else:
            is_large = is_finite & (magnitudes > NEAR_LIMIT) & (output.detach() != _MASK)
            counts.values += output.numel()
            counts.large += int(is_large.sum())
            counts.beyond += int((~is_finite & (output.detach() != -math.inf)).sum())

    def _count_flushed(self, place: Place, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if not (is_in_backward() and len(inputs) == len(outputs) == 1):
            return
        (given,), (made,) = inputs, outputs
        if given.dtype is torch.float16 or made.dtype is not torch.float16:
            return
        if given.shape == made.shape:
            counts = self._watched.counts.setdefault(place.module, Counts())
            counts.add_cast(given, made)
            largest = given.detach().abs().amax().item()
            if math.isfinite(largest):
                self._watched.peak = max(self._watched.peak, largest)


def _is_of_half_weight(node: Any) -> bool:
    """Return whether all that a node's gradient becomes is that of one leaf in half: a weight's."""
    while node is not None and len(node.next_functions) == 1:
        ((node, _),) = node.next_functions
    leaf = getattr(node, "variable", None)  # of the nodes where a graph ends
    return leaf is not None and leaf.dtype in HALVES


def weights_of(module: nn.Module | None) -> tuple[Range, ...]:
    """Return the ranges of the parameters that belong to a module itself."""
    return () if module is None else ranges_of(module.named_parameters(recurse=False))


def near_limits(counts: Mapping[str, Counts]) -> dict[str, Counts]:
    """Return the counts of those modules of which any value was near a limit, the worst first."""
    near = [(_worst(one), name, one) for name, one in counts.items() if any(_worst(one))]
    return {name: one for _, name, one in sorted(near, key=lambda it: it[0], reverse=True)}


def _worst(counts: Counts) -> tuple[int, ...]:
    return counts.beyond, counts.large, counts.flushed, counts.subnormal


def _written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the floating tensors that an operator writes to."""
    found: list[Tensor] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [one for one in tree_leaves(value) if can_look(one)]
    return found


def _unread(func: Any, args: tuple[Any, ...]) -> set[int]:
    """Return the ids of the running statistics that a batch norm updates, and does not read.

    An overflow leaves NaN in them, also of a step that is skipped.
    """
    if "batch_norm" not in _name_of(func):
        return set()
    given = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}
    is_training = given.get("training", given.get("train", True))
    return {id(given.get(name)) for name in ("running_mean", "running_var") if is_training}


def _name_of(func: Any) -> str:
    name: str = func._schema.name
    return name.rpartition("::")[2]


def _source_of_cast(operation: _Operation, output: Tensor) -> Tensor | None:
    """Return the tensor that was cast; None where an operator does more than that."""
    name, inputs = operation.name, operation.inputs
    if name == "_foreach_copy_":
        pairs = zip(*operation.args[:2], strict=True)
        return next((source for target, source in pairs if target is output), None)
    if name == "copy_":
        return inputs[-1] if inputs else None
    return inputs[0] if name == "_to_copy" and inputs else None


def _is_meant(operation: _Operation) -> bool:
    """Return whether somebody fills a mask with an infinite number."""
    return operation.name.strip("_") in _FILLING and any(
        isinstance(one, float) and math.isinf(one) for one in tree_leaves(list(operation.args))
    )


def _numbered(tensors: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"operand {n}", tensor) for n, tensor in enumerate(tensors)]


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
