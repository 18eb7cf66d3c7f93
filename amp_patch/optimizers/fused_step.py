"""Steps an optimizer in one pass over what it holds; knows no models and no rule of a scale.

Gradients come from the parameters, or wait in a `LazyGradients` until they are needed. On CUDA
devices the kernels do it all, where they work; elsewhere the reference in torch.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.lazy_gradients import LazyGradients

from .cuda_step import FusedLaunch
from .groups import UPDATES, KeptGroups
from .lamb import FusedLAMB

KINDS = (AdamW, Adam, SGD, FusedLAMB)
_MEND = "call amp.initialize(..., fused_step=False)"


class FusedStep:
    """The step of one optimizer, with all that torch runs around it: hooks, profiler marks.

    Args:
        optimizer: of one of `KINDS`.

    Attributes:
        lazy: the gradients that its masters have unless somebody reads or sets them.
        param_of: returns the half parameter of a master, and any other tensor itself.
        has_published: True where the last step wrote the half weights, too.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        refuse_unknown(optimizer)
        self.lazy = LazyGradients()
        self.param_of: Callable[[Tensor], Tensor] = _itself
        self._found_inf: Tensor | None = None
        self.has_published = False
        make_update, rule = UPDATES[type(optimizer)]
        self._groups = KeptGroups(make_update)
        self._launch = FusedLaunch(make_update, rule, self.lazy)
        self._plain = _without_hooks(type(optimizer).step)
        step = weakref.WeakMethod(self._step)
        # A method bound to this object would be a cycle, which only the collector ends. mypy does
        # not know that the reference lives as long as what calls it.
        self._hooked = Optimizer.profile_hook_step(lambda *args, **kw: step()(*args, **kw))  # type: ignore[misc]

    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor | None:
        """Clip gradients to a 2-norm; see `FusedLaunch.clip`."""
        return self._launch.clip(optimizer, max_norm)

    def skips_by_flag(self, optimizer: Optimizer) -> bool:
        """Return whether the next step's kernels can skip it; else it waits for the flag."""
        return self._launch.is_expected(optimizer)

    def run(self, optimizer: Optimizer, found_inf: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Step as ``type(optimizer).step`` does.

        Args:
            optimizer: to step.
            found_inf: float32, one element; not 0: nothing changes. None: it is 0.
            args, kwargs: of the step.

        Returns:
            What the step returns.
        """
        # Schedulers built before `initialize` see to it that they are not told of a missing step.
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers set it
        self.has_published, self._found_inf = False, found_inf
        try:
            return self._hooked(optimizer, *args, **kwargs)
        finally:
            self._found_inf = None

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = self._found_inf
        self.has_published = self._launch.step(optimizer, self.param_of, found_inf)
        if self.has_published or (found_inf is not None and captures.wait_for(found_inf)):
            return loss
        if not self._update(optimizer):
            self.lazy.materialize()
            self._plain(optimizer)
        return loss

    def _update(self, optimizer: Optimizer) -> bool:
        """Step all groups, or return False where one does not suit."""
        groups = optimizer.param_groups
        self._groups.look_up(optimizer)
        work = []
        found = self.lazy.take([group["params"] for group in groups])
        for kept, group, maybe in zip(self._groups.groups, groups, found, strict=False):
            params, grads = _with_grads(group["params"], maybe)
            if params:
                rows = kept.rows(group, params, grads)
                if not kept.suits(rows):
                    return False
                work.append((kept.update, rows))
        for update, rows in work:
            update.run(rows)
        return True


def _with_grads(params: list[Tensor], grads: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    has_grad = list(map(operator.is_not, grads, repeat(None)))
    if all(has_grad):
        return params, grads
    return list(compress(params, has_grad)), list(compress(grads, has_grad))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _without_hooks(step: Any) -> Callable[..., Any]:
    """Return the step that ``Optimizer.profile_hook_step`` wrapped for a class of optimizers."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner


def refuse_unknown(optimizer: Optimizer) -> None:
    """Raise for an optimizer that no fused step is known for.

    Raises:
        TypeError: it is not exactly one of `KINDS`.
        RuntimeError: its ``step`` was replaced, or a group has an option that fused steps lack.
    """
    if type(optimizer) not in KINDS:
        raise TypeError(
            "fused_step=True steps torch.optim.AdamW, Adam and SGD and "
            "amp_patch.optimizers.FusedLAMB, these very types; got "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}; {_MEND}."
        )
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise RuntimeError(
            "fused_step=True takes the place of the optimizer's own step(); got one that was "
            f"replaced on this {type(optimizer).__name__}, and would not be called; {_MEND}."
        )
    for group in optimizer.param_groups:
        refuse_options(optimizer, group)


def refuse_options(optimizer: Optimizer, group: Any) -> None:
    """Raise for a parameter group with an option that fused steps lack.

    Raises:
        RuntimeError: ``differentiable``, or a tensor in the place of a number other than lr.
    """
    given = {**optimizer.defaults, **(group if isinstance(group, dict) else {})}
    tensors = [name for name in _NUMBERS if _holds_tensor(given.get(name))]
    lacking = ["differentiable"] * bool(given.get("differentiable")) + tensors
    if lacking:
        name = lacking[0]
        raise RuntimeError(
            "fused_step=True knows no differentiable=True and no tensors as options but for lr; "
            f"got {name}={given[name]!r}; leave that out, or {_MEND}."
        )


_NUMBERS = ("betas", "eps", "weight_decay", "momentum", "dampening")


def _holds_tensor(option: Any) -> bool:
    values = option if isinstance(option, (list, tuple)) else [option]
    return any(isinstance(value, torch.Tensor) for value in values)
