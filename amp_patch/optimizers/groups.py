"""Parameter groups: what a type of optimizer says of how it steps one.

Knows optimizers of torch; no formula, no masters, loss scales or skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.kernels.cuda_optimizers import Column, GroupRows, OptimizerKernels
from amp_patch.kernels.strips import Strips
from amp_patch.kernels.torch_kernels import clip_factor, combined
from amp_patch.weights.parameter_lists import are_same

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
