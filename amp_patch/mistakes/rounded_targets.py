"""Targets that a model's call rounds, told once, with the rule that leaves them as they are.

At O2, O3 and O5 a model's call casts all float32 tensors, so corners of boxes in pixels as well: in
bfloat16 1333.3 becomes 1336. So do the ids of categories, which a table of features may hold as
float32 beside its other columns: 1001 becomes 1000, and another row is looked up. Also told is a
rule that leaves a part of an argument alone which does not come. Knows the names that targets have;
not how inputs are cast.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casting.nested import items_of
from amp_patch.common.did_you_mean import did_you_mean, meant
from amp_patch.common.warn_once import warn_once
from amp_patch.common.weak_modules import ModuleTable
from amp_patch.weights.kept_inputs import by_place, forward_of, has_part, names_of

#: Angles are made of these, and sines of the angles: of 0.1 radian these are off by a tenth.
_ANGLES = r"positions?|time(s|steps?|stamps?)?"
#: And of these, as a whole name: the times of a diffusion or a flow.
_ALONE = r"(^|\.)ts?$"
_NAMES = re.compile(
    r"(^|[_.])(targets?|labels?|gt|ground_truth|b?box(es)?|keypoints?|landmarks?|y_true"
    rf"|coord(s|inates?)?|{_ANGLES})([_.]|$)|{_ALONE}"
)
_NAMES_OF_ANGLES = re.compile(rf"(^|[_.])({_ANGLES})([_.]|$)|{_ALONE}")
#: Off by so much they are told; probabilities are rounded by less.
_OFF = 0.25
_OFF_AS_ANGLE = 0.1
#: In so many training calls targets are waited for.
_CALLS = 16
#: In so many of any kind: a teacher, or a target network, is never trained.
_LOOKS = 4096


class _Awaited(NamedTuple):
    """A model whose targets have not come yet.

    Attributes:
        names: of the arguments of its forward, by their places.
        level: name of its level.
        half: what its inputs are cast to.
        kept: names of arguments, and of parts of them, that are not cast.
        unseen: those of these that have not come, but for arguments that the forward names.
        calls: in which they may still come.
    """

    names: list[str]
    level: str
    half: torch.dtype
    kept: Collection[str]
    unseen: frozenset[str]
    calls: int = _CALLS


class RoundedTargets:
    """Looks at the targets that models are called with, once for each model.

    Attributes:
        are_awaited: whether `look` has anything to look at.
    """

    def __init__(self) -> None:
        self._awaited: ModuleTable[_Awaited] = ModuleTable()
        self._seen: set[str] = set()
        self._looks_left = _LOOKS
        self.are_awaited = False

    def follow(
        self, model: nn.Module, level: str, half: torch.dtype, kept: Collection[str]
    ) -> None:
        """Look at what a model in half will be called with.

        Args:
            model: prepared just now.
            level, half: its level, and the dtype that its call casts to.
            kept: arguments, and parts of them, that its call leaves as they are.
        """
        forward = forward_of(model)
        sure = names_of(forward)  # others may be collected by it, or be parts that never come
        unseen = frozenset(name for name in kept if name not in sure)
        self._awaited[model] = _Awaited(by_place(forward), level, half, kept, unseen)
        self.are_awaited, self._looks_left = True, _LOOKS

    def look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at a call, and warn of targets that it rounds by much, and of parts that are not."""
        self._looks_left -= 1
        if self._looks_left < 0:
            self._awaited.clear()
        awaited = self._awaited.get(model)
        if awaited is not None and model.training and torch.is_grad_enabled() and not _is_traced():
            self._look_at(
                model, awaited, {**dict(zip(awaited.names, args, strict=False)), **kwargs}
            )
        self.are_awaited = bool(self._awaited)

    def _look_at(self, model: nn.Module, awaited: _Awaited, given: Mapping[str, Any]) -> None:
        """Look at what a training call was given, by the names of the arguments."""
        found = [*_targets_in(given, awaited.kept)]
        if any(_is_captured(tensor) for _, tensor in found):
            return
        unseen = frozenset(name for name in awaited.unseen if not has_part(given, name))
        self._seen |= awaited.unseen - unseen
        if awaited.calls == _CALLS:  # once, for whatever comes is looked at
            _look_for_ids(model, awaited, given)
        if not found and awaited.calls > 1:
            self._awaited[model] = awaited._replace(calls=awaited.calls - 1, unseen=unseen)
            return
        del self._awaited[model]
        off: dict[str, float] = {}
        for name, tensor in found:
            off[name] = max(off.get(name, 0.0), _rounded_by(tensor, awaited.half))
        for name, most in off.items():
            if most >= (_OFF_AS_ANGLE if _NAMES_OF_ANGLES.search(name) else _OFF):
                _warn(model, awaited, name, most)
        elsewhere = self._seen.union(*(other.unseen for other in self._awaited.values()))
        for name in sorted(unseen - elsewhere):  # a rule holds for all models of a call
            _warn_of_unseen(model, name, given)


def _is_traced() -> bool:
    """Tell whether tensors have no numbers that could be read, as within `torch.func`."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
    )


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _targets_in(given: Mapping[str, Any], kept: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the float32 tensors that a name tells to be targets, each with the name as in rules."""
    for path, tensor in _cast_in(given, kept):
        told = [count for count, key in enumerate(path, 1) if _NAMES.search(key)]
        if told:
            yield ".".join(path[: told[0]]), tensor


def _cast_in(
    given: Mapping[str, Any], kept: Collection[str]
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the float32 tensors that the call casts, by the keys to them."""
    for path, tensor in _floats_in(given, ()):
        if not any(".".join(path[: count + 1]) in kept for count in range(len(path))):
            yield path, tensor


def _look_for_ids(model: nn.Module, awaited: _Awaited, given: Mapping[str, Any]) -> None:
    """Warn of the first table of features with columns of whole numbers that the call changes."""
    for path, tensor in _cast_in(given, awaited.kept):
        is_passed_over = _is_captured(tensor) or any(_NAMES.search(key) for key in path)
        off = 0.0 if is_passed_over else _whole_numbers_off(tensor, awaited.half)
        if off:
            _warn_of_ids(model, awaited, ".".join(path), off)
            return


def _whole_numbers_off(tensor: Tensor, half: torch.dtype) -> float:
    """Return by how much those are off of the columns that have no others; 0 where all are kept.

    Of tables, (rows, columns), and of sequences of rows with other columns beside them. Not of
    columns with a number below 0, which are no ids: sounds, say.
    """
    if tensor.dim() not in (2, 3):
        return 0.0
    rows = tensor.detach().as_subclass(Tensor).flatten(0, -2)
    are_whole = ((rows == rows.floor()) & (rows >= 0)).all(0)
    if not bool(are_whole.any()) or (tensor.dim() == 3 and bool(are_whole.all())):
        return 0.0
    return _rounded_by(rows[:, are_whole], half)


def _floats_in(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the float32 tensors in a value of which numbers can be read, by the keys to them."""
    if isinstance(value, Tensor):
        # torchvision's boxes are of a class of their own, which computes as torch's
        is_torchs = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        can_be_read = is_torchs and value.layout is torch.strided and not value.is_meta
        if can_be_read and value.dtype is torch.float32 and value.numel():
            yield path, value
        return
    for key, item in items_of(value):
        yield from _floats_in(item, path if key is None else (*path, key))


def _rounded_by(tensor: Tensor, half: torch.dtype) -> float:
    """Return by how much the number that is rounded most is off; infinite beyond the range."""
    plain = tensor.detach().as_subclass(Tensor)
    off = (plain.to(half).to(torch.float32) - plain).abs()
    return float(off.nan_to_num(nan=0.0, posinf=torch.inf).max())  # what was not finite stays so


def _warn(model: nn.Module, awaited: _Awaited, name: str, off: float) -> None:
    warn_once(
        f"a call of a model at opt_level {awaited.level} casts float32 targets, positions and "
        f"times, too, which must keep their numbers; got {name!r} of {type(model).__name__}"
        f".forward, which {awaited.half} rounds by up to {off:.3g}. Leave it as it is by "
        f"amp.initialize(..., rules={{'inputs': {{{name!r}: 'off'}}}}), or pass it in float64."
    )


def _warn_of_ids(model: nn.Module, awaited: _Awaited, name: str, off: float) -> None:
    warn_once(
        f"a call of a model at opt_level {awaited.level} casts float32 ids, too, of which other "
        f"rows are looked up then; got {name!r} of {type(model).__name__}.forward, with columns of "
        f"whole numbers that {awaited.half} rounds by up to {off:.3g}. Leave it as it is by "
        f"amp.initialize(..., rules={{'inputs': {{{name!r}: 'off'}}}}), pass ids as integers, or "
        "scale what are no ids to numbers near 1."
    )


def _warn_of_unseen(model: nn.Module, name: str, given: Mapping[str, Any]) -> None:
    """Tell of a part that a rule names and no call has, with the parts that there are."""
    argument = name.partition(".")[0]
    named = [".".join(path) for path, _ in _floats_in({argument: given.get(argument)}, ())]
    example = meant(name, named) or (named or [f"{argument}.boxes"])[0]
    warn_once(
        f"inputs in rules must be named as what a model is called with; got {name!r}, and no "
        f"training call of {type(model).__name__}.forward so far had it"
        f"{did_you_mean(name, named)} Call amp.initialize(..., "
        f"rules={{'inputs': {{{example!r}: 'off'}}}})."
    )
