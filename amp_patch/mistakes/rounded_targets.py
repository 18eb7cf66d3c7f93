"""Targets that a model's call rounds, told once, with the rule that leaves them as they are.

At O2, O3 and O5 a model's call casts all float32 tensors, so corners of boxes in pixels as well: in
bfloat16 1333.3 becomes 1336. Knows the names that targets have; not how inputs are cast.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casting.nested import map_tensors
from amp_patch.warn_once import warn_once
from amp_patch.weights.kept_inputs import names_of, places

_NAMES = re.compile(
    r"(^|_)(targets?|labels?|gt|ground_truth|b?box(es)?|keypoints?|landmarks?|y_true)(_|$)"
)
#: Off by so much they are told; probabilities are rounded by less.
_OFF = 0.25
#: In so many training calls targets are waited for.
_CALLS = 16


class _Awaited(NamedTuple):
    """Targets of a model that have not come yet.

    Attributes:
        names: of arguments of its forward -> the places in a call of each, one or none.
        level: name of its level.
        half: what its inputs are cast to.
        calls: in which they may still come.
    """

    names: dict[str, Collection[int]]
    level: str
    half: torch.dtype
    calls: int = _CALLS


class RoundedTargets:
    """Looks at the targets that models are called with, once for each model.

    Attributes:
        are_awaited: whether `look` has anything to look at.
    """

    def __init__(self) -> None:
        self._awaited: weakref.WeakKeyDictionary[nn.Module, _Awaited] = weakref.WeakKeyDictionary()
        self.are_awaited = False

    def follow(
        self, model: nn.Module, level: str, half: torch.dtype, kept: Collection[str]
    ) -> None:
        """Look at what a model in half will be called with.

        Args:
            model: prepared just now.
            level, half: its level, and the dtype that its call casts to.
            kept: arguments that its call leaves as they are.
        """
        names: dict[str, Collection[int]] = {
            name: places(model.forward, [name])
            for name in names_of(model.forward)
            if _NAMES.search(name) and name not in kept
        }
        if names:
            self._awaited[model] = _Awaited(names, level, half)
            self.are_awaited = True

    def look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at a call, and warn of targets that it rounds by much."""
        awaited = self._awaited.get(model)
        if awaited is None or not (model.training and torch.is_grad_enabled()) or _is_traced():
            return
        found = {
            name: _floats_in([kwargs.get(name), *[args[one] for one in at if one < len(args)]])
            for name, at in awaited.names.items()
        }
        if any(map(_is_captured, chain.from_iterable(found.values()))):
            return
        if not any(found.values()) and awaited.calls > 1:
            self._awaited[model] = awaited._replace(calls=awaited.calls - 1)
            return
        del self._awaited[model]
        self.are_awaited = bool(self._awaited)
        for name, tensors in found.items():
            off = max([_rounded_by(tensor, awaited.half) for tensor in tensors], default=0.0)
            if off >= _OFF:
                _warn(model, awaited, name, off)


def _is_traced() -> bool:
    """Tell whether tensors have no numbers that could be read, as within `torch.func`."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return bool(
        torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or transform is not None
    )


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _floats_in(value: Any) -> list[Tensor]:
    """Return the float32 tensors in a value, also in containers, of which numbers can be read."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        # torchvision's boxes are of a class of their own, which computes as torch's
        is_torchs = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        if is_torchs and tensor.dtype is torch.float32 and tensor.numel() and not tensor.is_meta:
            found.append(tensor.detach().as_subclass(Tensor))
        return tensor

    map_tensors(note, value)
    return found


def _rounded_by(tensor: Tensor, half: torch.dtype) -> float:
    """Return by how much the number that is rounded most is off; infinite beyond the range."""
    off = (tensor.to(half).to(torch.float32) - tensor).abs()
    return float(off.nan_to_num(nan=0.0, posinf=torch.inf).max())  # what was not finite stays so


def _warn(model: nn.Module, awaited: _Awaited, name: str, off: float) -> None:
    warn_once(
        f"a call of a model at opt_level {awaited.level} casts float32 targets, too, which must "
        f"keep their numbers; got {name!r} of {type(model).__name__}.forward, which "
        f"{awaited.half} rounds by up to {off:.3g}. Leave it as it is by amp.initialize(..., "
        f"rules={{'inputs': {{{name!r}: 'off'}}}}), or pass it in float64."
    )
