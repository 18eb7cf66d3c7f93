"""Parameter groups: how a type of optimizer steps one, and what is looked up once for many steps.

Knows optimizers of torch; no formula, no masters, loss scales or skipped steps.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import chain, compress
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.distributed.shards import any_spread
from amp_patch.kernels.cuda_optimizers import Column, GroupRows, OptimizerKernels
from amp_patch.kernels.strips import Strips
from amp_patch.kernels.torch_kernels import clip_factor, combined
from amp_patch.weights.parameter_lists import Tensors, are_complete, are_same

#: What an optimizer keeps for one parameter, ``optimizer.state[param]``.
ParamState = dict[str, Any]


class StepInputs(NamedTuple):
    """What one group steps now.

    Attributes:
        group: of ``optimizer.param_groups``.
        options: what the group says, as `GroupUpdate.options` returned it.
        params: the parameters that have gradients.
        grads: these gradients; empty where there are strips.
        states: the state of each; empty where the optimizer keeps none.
        strips: of the only parameter's gradient; None where it is not stepped in strips.
        found_inf: on their device, where the group `takes_flag`; 1: nothing changes. None: it is 0.
    """

    group: dict[str, Any]
    options: Mapping[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[ParamState]
    strips: Strips | None = None
    found_inf: Tensor | None = None

    def pieces(self, *columns: list[Any]) -> Iterable[Sequence[list[Any]]]:
        """Return what is stepped at once: parameters, their gradients, and as much of each column.

        Args:
            columns: a tensor for each parameter, or none at all.
        """
        if self.strips is None:
            return [(self.params, self.grads, *columns)]
        others = [next(iter(column), None) for column in columns]
        return self.strips.rows(self.params[0], *others)


class GroupUpdate:
    """How one type of optimizer steps one of its groups.

    A type has a subclass in a file of its own, and a row in `registry.UPDATES`. There is an object
    for each group; what it keeps from step to step is not saved with the optimizer.

    Attributes:
        kernels: the CUDA kernels; None: there are none, and the reference in torch serves.
        makes_copies: whether a step that is not fused always makes tensors like the parameters.
        numbers: the options, beside the learning rate, that must be numbers or tuples of them.
    """

    kernels: ClassVar[OptimizerKernels | None] = None
    makes_copies: ClassVar[bool] = False
    numbers: ClassVar[tuple[str, ...]] = ()
    #: The values of options for which `suits_reference` was last found to be true.
    _suiting: tuple[Any, ...] = ()

    @classmethod
    def options(cls, optimizer: Optimizer, group: dict[str, Any]) -> Mapping[str, Any]:
        """Return the options of a group by the names that this class knows them by."""
        return group

    @classmethod
    def max_norm(cls, optimizer: Optimizer) -> float | None:
        """Return the 2-norm to which the optimizer clips the gradients of all groups together.

        None or 0 where it does not clip, as most optimizers do not.
        """
        return None

    @classmethod
    def clip_factor(
        cls, optimizer: Optimizer, norms: Callable[[], Sequence[Tensor]]
    ) -> Tensor | None:
        """Return what the optimizer multiplies the gradients of all groups by, before it steps.

        Args:
            optimizer: says whether it clips.
            norms: called where it does: returns 2-norms, 0-dim, whose 2-norm is that of all
                gradients.

        Returns:
            0-dim, or None where it does not clip.
        """
        max_norm = cls.max_norm(optimizer)
        return clip_factor(combined(norms(), 2.0), max_norm) if max_norm else None

    @classmethod
    def changed_options(cls, group: dict[str, Any]) -> dict[str, Any]:
        """Return what a step by kernels changes in a group itself, gradients or not.

        Nothing, unless the optimizer counts the steps there: ``{"step": 7}``.
        """
        return {}

    @classmethod
    def suits_kernels(cls, options: Mapping[str, Any]) -> bool:
        """Return whether the CUDA kernels know these options of a group."""
        return not options.get("differentiable") and _are_numbers(options, cls.numbers)

    @classmethod
    def takes_flag(cls, options: Mapping[str, Any]) -> bool:
        """Return whether `step` looks at ``found_inf``."""
        return False

    def has_state(self, options: Mapping[str, Any]) -> bool:
        """Return whether the optimizer keeps anything per parameter."""
        return True

    def suits_reference(self, inputs: StepInputs) -> bool:
        """Return whether `step` can do it; else the optimizer's own step must.

        Args:
            inputs: the parameters are dense, of float32 and on one device, the gradients dense.
        """
        options = inputs.options
        if options.get("differentiable") or options.get("capturable"):
            return False
        names = ("lr", *self.numbers)
        values = tuple(map(options.get, names))
        if are_same(values, self._suiting):  # numbers, which nobody changes in place
            return True
        suits = _are_numbers(options, names)
        has_lists = any(isinstance(value, list) for value in values)
        self._suiting = values if suits and not has_lists else ()
        return suits

    def cut_with(self, inputs: StepInputs) -> list[Tensor] | None:
        """Return the tensors of its state that are cut in strips together with a parameter.

        Where it does not return None, `step` goes through `StepInputs.pieces`.

        Args:
            inputs: of one parameter.

        Returns:
            None where the step needs the parameter as a whole. State that is not there yet is left
            out: `step` makes it like the parameter.
        """
        return None

    def step(self, inputs: StepInputs) -> None:
        """Step the group on multi-tensor functions of torch, to the bit as the optimizer does.

        Args:
            inputs: such as `suits_reference` returns True for.
        """
        raise NotImplementedError

    def kernel_rows(self, inputs: StepInputs, weights: Column) -> GroupRows:
        """Return what the CUDA kernels get; only for a class that has some.

        Args:
            inputs: the parameters are of float32 and on one device.
            weights: the half parameters that get the rounded values; None where there is none.
        """
        raise NotImplementedError


def params_of(*optimizers: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of some optimizers, in their order."""
    groups = chain.from_iterable(one.param_groups for one in optimizers)
    return list(chain.from_iterable([group["params"] for group in groups]))


def values_of(option: Any) -> Sequence[Any]:
    """Return the values of an option: those of a list or tuple, or the only one."""
    return option if isinstance(option, (list, tuple)) else [option]


def _are_numbers(options: Mapping[str, Any], names: Sequence[str]) -> bool:
    for name in names:
        option = options.get(name, 0)
        if isinstance(option, (list, tuple)):
            if not all([isinstance(one, (int, float)) for one in option]):  # noqa: C419  # as fast again
                return False
        elif not isinstance(option, (int, float)):
            return False
    return True


class StepCounters:
    """The step counters of many parameters, in one memory: one call advances all."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._places: list[int] = []
        self._all = self._one = torch.zeros(0)  # until `gather` sees the first counters

    def advance(self, states: Sequence[ParamState]) -> list[Tensor]:
        """Add 1 to each ``state["step"]``, which is replaced where it was not in that memory.

        Returns:
            The counters, 0-dim.
        """
        steps = list(map(_STEP, states))
        if not self._are_in_place(steps):
            self._move_together(states, steps[0].device, steps[0].dtype)
        self._all += self._one  # adding a number of Python's would first make a tensor of it
        return self._steps

    def gather(
        self, states: Sequence[ParamState], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        """As `advance`, but the counters stay what they are, and are of this device and dtype."""
        is_known = (self._all.device, self._all.dtype) == (device, dtype)
        if not (is_known and self._are_in_place(list(map(_STEP, states)))):
            self._move_together(states, device, dtype)
        return self._steps

    def _are_in_place(self, steps: list[Tensor]) -> bool:
        """Return whether these counters are the known ones, and none was moved by its ``.data``."""
        is_known = are_same(steps, self._steps)
        return is_known and list(map(Tensor.data_ptr, steps)) == self._places

    def _move_together(
        self, states: Sequence[ParamState], device: torch.device, dtype: torch.dtype
    ) -> None:
        with torch.inference_mode(False):  # or no later step could write to them
            self._all = torch.stack([state["step"].to(device, dtype) for state in states])
            self._steps = [self._all[index] for index in range(len(states))]
            self._one = torch.ones((), device=device, dtype=dtype)
        self._places = list(map(Tensor.data_ptr, self._steps))
        for state, step in zip(states, self._steps, strict=True):
            state["step"] = step

    def take_back(self, share: Tensor | float = 1.0) -> None:
        """Subtract what `advance` added, for the step was not made.

        Args:
            share: a flag (float32, one element), 1 where that is so, else 0.
        """
        self._all -= share

    def values(self) -> list[float]:
        """Return what they count. Waits for the device."""
        values: list[float] = self._all.tolist()
        return values


class CachedGroup:
    """What was looked up for the parameters of a group, until somebody changes that.

    Attributes:
        update: how it steps.
        are_float32_on_one_device: what the parameters of the last `inputs` are.
    """

    def __init__(self, owner: CachedGroups, update: GroupUpdate) -> None:
        self.update = update
        self._owner = weakref.proxy(owner)
        self._params: list[Tensor] = []
        self._states: list[ParamState] = []
        self._weights: Column | None = None
        self.are_float32_on_one_device = False
        self._seen = -1

    def inputs(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        grads: list[Tensor | None],
        params: list[Tensor] | None = None,
    ) -> StepInputs | None:
        """Return what the group steps; None where no parameter has a gradient.

        Args:
            optimizer: the group's.
            group: of ``optimizer.param_groups``.
            grads: for each of its parameters the gradient, or None.
            params: those of its parameters that are meant; None: all.
        """
        params, found = _with_grads(group["params"] if params is None else params, grads)
        if not params:
            return None
        options = self.update.options(optimizer, group)
        self._look_up(params, self.update.has_state(options))
        return StepInputs(group, options, params, found, self._states)

    def _look_up(self, params: list[Tensor], has_state: bool) -> None:
        is_known = self._seen == self._owner.changes and has_state == bool(self._states)
        if is_known and (params is self._params or are_same(params, self._params)):
            return
        self._seen = self._owner.changes
        # what `listed` has made nobody changes
        self._params = params if isinstance(params, Tensors) else list(params)
        self._weights = None
        self._states = self._owner.states_of(params) if has_state else []
        kinds = {(param.dtype, param.device) for param in params}
        is_one = len(kinds) == 1 and not any_spread(params)
        self.are_float32_on_one_device = is_one and params[0].dtype is torch.float32

    def weights(self, param_of: Callable[[Tensor], Tensor]) -> Column:
        """Return the half parameters that belong to those of the last `inputs`; None for no such.

        Args:
            param_of: returns the half parameter of a master, and any other tensor itself.
        """
        if self._weights is None:
            self._weights = [None if (one := param_of(p)) is p else one for p in self._params]
        return self._weights

    def are_plain(self, grads: Sequence[Tensor]) -> bool:
        """Return whether parameters and gradients are such as fused steps take.

        Args:
            grads: of the last `inputs`.

        Returns:
            True for parameters of float32 on one device, with dense gradients.
        """
        return self.are_float32_on_one_device and not any(map(_IS_SPARSE, grads))


_IS_SPARSE = operator.attrgetter("is_sparse")
_STEP = operator.itemgetter("step")


def _with_grads(params: list[Tensor], grads: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    if are_complete(grads):
        return params, grads
    has_grad = [grad is not None for grad in grads]
    return list(compress(params, has_grad)), list(compress(grads, has_grad))


class CachedGroups:
    """A `CachedGroup` for each group of an optimizer.

    Args:
        update_type: how it steps.

    Attributes:
        groups: as many as the optimizer had at the last `look_up`.
        state: the optimizer's.
        changes: how often a look has found that a parameter's state is another object.
    """

    def __init__(self, update_type: type[GroupUpdate]) -> None:
        self._update_type = update_type
        self.groups: list[CachedGroup] = []
        self.state: MutableMapping[Any, ParamState] = {}
        self.changes = 0
        self._states: list[ParamState] = []

    def look_up(self, optimizer: Optimizer) -> None:
        """See what the optimizer has now."""
        groups = optimizer.param_groups
        del self.groups[len(groups) :]
        for _ in groups[len(self.groups) :]:
            self.groups.append(CachedGroup(self, self._update_type()))
        self.state = optimizer.state
        states = list(self.state.values())
        if not are_same(states, self._states):
            self.changes, self._states = self.changes + 1, states

    def states_of(self, params: list[Tensor]) -> list[ParamState]:
        """Return the state of each parameter, as `optimizer.state` makes it where it has none."""
        count = len(self.state)
        states = [self.state[param] for param in params]
        if len(self.state) > count:  # known from now on, so that the next look sees it taken away
            self._states = list(self.state.values())
        return states
