"""The step of torch's own optimizers, without what torch looks up anew for each: to the bit.

For 48 small parameters ``AdamW(fused=True).step()`` takes the host 190 us, of which the kernel
takes 20. The rest is Python that gathers the same lists as in the step before, and a call for each
step counter. On a CPU an optimizer that is not fused makes a dozen calls for each parameter, where
one for all has the same bits. Knows one optimizer; no masters, scales or skipped steps.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.lazy_gradients import LazyGradients

from .fused_step import FusedStep


class DirectStep:
    """Calls what an optimizer's own step would call, where nobody has changed that step.

    Args:
        optimizer: such as `suits` returns True for.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._type_step = type(optimizer).step
        self._names, self._name, self._function = _called_by(self._type_step)
        self._fused = FusedStep(optimizer, LazyGradients(), None, by_kernels=False)

    @staticmethod
    def suits(optimizer: Optimizer) -> bool:
        """Return whether an optimizer is torch's own, and nobody has changed how it steps."""
        own = vars(optimizer).get("step")
        # An LR scheduler wraps the step to see that it was called, which `FusedStep` tells it, too.
        is_schedulers = hasattr(own, "_wrapped_by_lr_sched")
        is_kept = is_schedulers and getattr(own, "__wrapped__", None) is type(optimizer).step
        is_known = type(optimizer) in _KNOWN and _was_written_in_torch_optim(type(optimizer).step)
        if not (is_known and (own is None or is_kept)):
            return False
        _, _, function = _called_by(type(optimizer).step)
        return _was_written_in_torch_optim(function) and not _is_fake(optimizer)

    def is_right(self, optimizer: Optimizer) -> bool:
        """Return whether the next step may be made so: all is as it was when it was set up."""
        own, groups = vars(optimizer), optimizer.param_groups
        if type(optimizer).step is not self._type_step or not groups:
            return False
        if self._names.get(self._name) is not self._function:
            return False
        if "grad_scale" in own or "found_inf" in own:  # by which a scaler skips a fused step
            return False
        for group in groups:
            if not group["params"] or not (group.get("fused") or _is_stepped_together(group)):
                return False
        first = groups[0]["params"][0]
        return not (first.is_cuda and captures.are_made(first.device))

    def forget(self) -> None:
        """See `FusedStep.forget`."""
        self._fused.forget()

    def run(self, optimizer: Optimizer, flag: Tensor | None = None) -> Any:
        """Step as ``optimizer.step()`` does, with the hooks of that.

        Args:
            optimizer: to step.
            flag: not 0: nothing changes, see `device_flag`. None: it is 0.
        """
        return self._fused.run(optimizer, flag)


def _is_stepped_together(group: dict[str, Any]) -> bool:
    """Return whether torch's step has the bits of functions for many tensors, and no other effect.

    On CUDA devices only where torch calls these itself: its kernels for one tensor round otherwise.
    """
    foreach, params = group["foreach"], group["params"]
    if not params[0].is_cpu:
        is_default = (
            foreach is None and group.get("fused") is None and _PLAIN.issuperset(map(type, params))
        )
        foreach = foreach or is_default
        if not (foreach and params[0].is_cuda):
            return False
    return not (foreach and group.get("nesterov"))  # which writes to the gradients, too


_KNOWN = frozenset({AdamW, Adam, SGD, RMSprop, Adagrad})

#: The classes for which torch has such functions.
_PLAIN = frozenset({Tensor, nn.Parameter})


def _is_fake(optimizer: Optimizer) -> bool:
    """Return whether a parameter is of a ``FakeTensorMode``, whose step counters tell no number."""
    groups = optimizer.param_groups
    return any(isinstance(param, FakeTensor) for group in groups for param in group["params"])


def _called_by(step: Any) -> tuple[dict[str, Any], str, Any]:
    """Return the function that a step of torch's calls to do its work, with where it is looked up.

    That is ``torch.optim.adam.adam``, say, which a script may have replaced.

    Returns:
        The globals of the step, the function's name in them, and the function.
    """
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    names: dict[str, Any] = step.__globals__
    name = names["__name__"].rpartition(".")[2]
    return names, name, names.get(name)


def _was_written_in_torch_optim(function: Any) -> bool:
    """Return whether a function, and all that it wraps, was written in torch.optim."""
    while function is not None:
        if type(function) is not FunctionType:  # an object may say that it is one
            return False
        if not str(function.__globals__.get("__name__")).startswith("torch.optim."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
