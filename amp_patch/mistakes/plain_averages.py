"""An average of half weights that a script keeps in tensors of its own: ``shadow[name]`` of an EMA.

Nothing that torch calls tells of one. So a parameter is compared with what else lives in its dtype
and shape, once, some steps into a training; where nothing does, that was all. Knows models in half;
no optimizer.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from amp_patch.common.living_objects import dtype_of, instances, is_leaf
from amp_patch.common.warn_once import warn_once
from amp_patch.kernels.graph_capture import captures
from amp_patch.levels import HALVES

#: Steps until the first look: an average has begun, and the loss scale has come down.
_FIRST_LOOK = 16
#: Looks, each after a step that changed the parameter, at all of which an average must have moved.
_LOOKS = 3
#: Steps in which these looks are made, or given up, for some are skipped, or too small to see.
_MOST_STEPS = 16
#: Elements up to which a parameter is compared, where a model has one so small.
_SMALL = 1 << 16
_ALIKE = ("dtype", "shape", "device")
#: How far an average is at most from what its parameter was on its way, in norms of that.
_NEAR = 0.5


class _Followed:
    """A parameter, and the tensors that seem to follow it.

    Attributes:
        looks: how many there were.
    """

    def __init__(self, param: Tensor) -> None:
        self._param = TensorWeakRef(param)
        # A model that trains fast leaves a slow average far behind. No copy is made of large ones.
        self._start = param.detach().float() if param.numel() <= _SMALL else None
        self._earlier: list[Tensor] = []  # in fp32, for another thread may look as well
        # versions, and values, in fp32 as well
        self._seen: dict[int, tuple[int, Tensor]] = {}
        self.looks = 0

    def is_alive(self) -> bool:
        """Return whether the parameter lives."""
        return self._param() is not None

    @torch.no_grad()
    def look(self, living: Callable[[], Iterable[Tensor]]) -> bool:
        """Look once; return whether it is worth another look.

        A tensor follows the parameter that is near it, or near its way from the first value, that
        is none of its last values, and that was written to, or made, since the last look: a copy
        that a script keeps stays, or is such a value.
        """
        param = self._param()
        if param is None or param.dtype not in HALVES or captures.are_made(param.device):
            return False
        value = param.detach().float()
        if self._earlier and torch.equal(self._earlier[-1], value):
            return True  # the step was skipped, or too small
        self._earlier = [*self._earlier[-2:], value]
        if self._start is not None:
            self._start = self._start.to(value.device)  # the model may have been moved
        near = [one for one in living() if self._is_near(one, param)]
        moved = [one for one in near if self._has_moved(one)]
        self._seen = {id(one): (one._version, one.float()) for one in near}
        self.looks += 1
        return bool(near if self.looks == 1 else moved)

    def _has_moved(self, tensor: Tensor) -> bool:
        """Return whether it is new, or was written to since the last look.

        A write through `.data` makes no new version.
        """
        if id(tensor) not in self._seen:
            return True
        version, value = self._seen[id(tensor)]
        return tensor._version != version or not torch.equal(tensor.float(), value)

    def _is_near(self, tensor: Tensor, param: Tensor) -> bool:
        if any(getattr(tensor, name) != getattr(param, name) for name in _ALIKE):
            return False
        if tensor is param.grad:
            return False
        wide = tensor.float()
        passed = self._passed(wide)
        if not (wide - passed).norm() <= _NEAR * passed.norm():
            return False
        return not any(torch.equal(wide, earlier) for earlier in self._earlier)

    def _passed(self, wide: Tensor) -> Tensor:
        """Return what is nearest to a tensor on the straight way from the first value to the last.

        An average of all values on the way is near to it, however slowly it follows.
        """
        value = self._earlier[-1]
        if self._start is None or self._start.norm() <= _NEAR * value.norm():
            return value  # from 0 on what is small would be near to all of the way, as velocities
        way = value - self._start
        length = way.square().sum()
        done = ((wide - self._start) * way).sum() / length.clamp(min=torch.finfo(length.dtype).tiny)
        return torch.lerp(self._start, value, done.clamp(0.0, 1.0))


class PlainAverages:
    """Looks for averages of half parameters in plain tensors; false where it is done.

    Of each model one parameter is followed.

    Args:
        stepped: returns the parameters that prepared optimizers step.
    """

    def __init__(self, stepped: Callable[[], Iterable[Tensor]]) -> None:
        self._stepped = stepped
        self._followed: list[_Followed] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._steps = 0

    def __bool__(self) -> bool:
        return bool(self._followed)

    def follow(self, models: Iterable[nn.Module]) -> None:
        """Models were prepared."""
        self._steps = 0
        self._followed = [one for one in self._followed if one.is_alive()]
        if not self._followed:
            self._models.clear()
        for model in models:
            # of a parameter that is spread over ranks nobody keeps an average in plain tensors
            halves = [one for one in _halves_of(model) if one.requires_grad]
            if halves:
                self._followed.append(_Followed(min(halves, key=_order)))
                self._models.append(weakref.ref(model))

    def look(self) -> None:
        """Warn where an average followed a parameter at each of the last looks.

        Call it before each step.
        """
        self._steps += 1
        if self._steps < _FIRST_LOOK:
            return
        if not _is_alone():
            self._followed.clear()
            return
        living = functools.cache(lambda: list(_untrained_tensors(*self._addresses())))
        is_last = self._steps >= _FIRST_LOOK + _MOST_STEPS
        self._followed = [one for one in self._followed if one.look(living) and not is_last]
        if [one for one in self._followed if one.looks > _LOOKS]:
            self._followed.clear()
            warn_once(
                "an average of weights needs fp32, for small updates are rounded away in half "
                "precision; got tensors in half that follow the parameters of a model that "
                "amp.initialize() stored in half. Average amp.master_params(optimizer) in place of "
                "model.parameters(), in tensors of no model that amp.initialize() gets, or use "
                "torch.optim.swa_utils.AveragedModel(model), as at O3, which has no masters."
            )

    def _addresses(self) -> tuple[set[int], set[int]]:
        """Return where the models' half parameters are: those that are trained, and the others.

        Torch 2.6 hides those that a graph holds. One that no optimizer steps may be an average, as
        of the second encoder of MoCo, also where it asks for gradients: a deep copy still does.
        """
        models = [model for model in [one() for one in self._models] if model is not None]
        halves = [param for model in models for param in _halves_of(model)]
        stepped = set(map(id, self._stepped()))
        trained = {one.data_ptr() for one in halves if one.requires_grad and id(one) in stepped}
        return trained, {one.data_ptr() for one in halves} - trained


def _halves_of(model: nn.Module) -> list[Tensor]:
    plain = [one for one in model.parameters() if type(one) is nn.Parameter]
    return [one for one in plain if one.dtype in HALVES]


def _order(param: Tensor) -> tuple[bool, bool, int]:
    """Sort a matrix before a bias, which may be 0, and a small one before a large one."""
    return param.dim() < 2, param.numel() > _SMALL, param.numel()


def _is_alone() -> bool:
    """Tell whether no other thread may free a tensor; tqdm's, which many scripts have, does not.

    One that is found while it is freed would be freed twice, and the process ends.
    """
    others = {*threading.enumerate()} - {threading.current_thread()}
    return all(type(one).__module__.startswith("tqdm.") for one in others)


def _untrained_tensors(trained: set[int], untrained: set[int]) -> Iterator[Tensor]:
    """Yield the living tensors in half that are, or share the memory of, no trained parameter.

    A leaf that asks for gradients counts as trained, for another optimizer may step it.

    Args:
        trained: addresses of parameters that are.
        untrained: addresses of parameters that are not, whatever they ask for.
    """
    tensors = [one for one in instances(Tensor) if type(one) in (Tensor, nn.Parameter)]
    halves = [one for one in tensors if dtype_of(one) in HALVES and one.layout is torch.strided]
    leaves = {_address(one) for one in halves if one.requires_grad and is_leaf(one)}
    known = (leaves - untrained) | trained | {None}
    plain = (one for one in halves if not one.requires_grad or is_leaf(one))
    return (one for one in plain if _address(one) not in known)


def _address(tensor: Tensor) -> int | None:
    """Return where a tensor is.

    None where torch refuses to say: a result of ``torch.compile(mode="reduce-overhead")``, whose
    memory a later call has written to.
    """
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None
