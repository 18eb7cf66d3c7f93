"""Float32 values that stand for half parameters: what ``state_dict(keep_vars=True)`` gives.

In plain PyTorch these are the parameters themselves: a script computes penalties of them, freezes
them by name, or calls the model with them. Here they hold the exact numbers, and what comes to them
in a backward goes on to the half parameters. Knows no optimizer and no scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.distributed.shards import is_spread


class AttachedValue(Tensor):
    """The value of a half parameter, which does what a script wants of the parameter.

    A copy, pickled or not, is an ordinary parameter.

    Attributes:
        param: the half parameter.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of nn.Parameter

    is_leaf = True
    _is_param = True  # of which isinstance(value, nn.Parameter) asks

    param: Tensor
    _value_of: Callable[[Tensor], Tensor | None]

    def stand_for(self, param: Tensor, value_of: Callable[[Tensor], Tensor | None]) -> None:
        """Do from now on what is wanted of a half parameter; see `attached`."""
        self.param, self._value_of = param, value_of

    def _master(self) -> Tensor | None:
        """Return what an optimizer steps in the place of the half parameter; None without."""
        value = self._value_of(self.param)
        return value if isinstance(value, nn.Parameter) else None

    def _read_grad(self) -> Tensor | None:
        master = self._master()
        grad = None if master is None else master.grad
        return self.param.grad if grad is None else grad  # itself: a script writes to it

    def _set_grad(self, grad: Tensor | None) -> None:
        master = self._master()
        if grad is None or master is None:
            self.param.grad = None if grad is None else grad.to(self.param.dtype)
        if master is not None:
            master.grad = grad

    def _delete_grad(self) -> None:
        self._set_grad(None)

    grad = property(
        _read_grad, _set_grad, _delete_grad, "The parameter's, in half where no master has it."
    )

    def _read_data(self) -> Tensor:
        return super().data

    def _set_data(self, new: Tensor) -> None:
        with torch.no_grad():
            self.copy_(new)  # of other memory of its own the model would not hear

    data = property(_read_data, _set_data, None, "The numbers, without a graph.")

    def _read_requires_grad(self) -> bool:
        return self.param.requires_grad

    def _set_requires_grad(self, flag: bool) -> None:
        self.param.requires_grad = flag

    requires_grad = property(_read_requires_grad, _set_requires_grad, None, "The parameter's.")

    def requires_grad_(self, requires_grad: bool = True) -> AttachedValue:
        """Freeze the parameter, or train it."""
        self.param.requires_grad_(requires_grad)
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """Return the numbers; of a frozen parameter torch gives them without `force`."""
        return self.detach().numpy() if not self.requires_grad else super().numpy(force=force)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Have a hook called with each gradient of the parameter, in the dtype of the value."""
        return self.param.register_hook(widened(hook, self.dtype))

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        """Have a hook called with the value when the parameter has its gradient."""
        return self.param.register_post_accumulate_grad_hook(
            functools.wraps(hook)(lambda _: hook(self))
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class _Attaching(torch.autograd.Function):
    """Gives a value a place in the graph, right before its half parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, value: Tensor) -> Tensor:
        """Return the value, in its own memory and with its version, and no view of it.

        To views of what a function like this one returns nobody may write.
        """
        if is_spread(param):
            return value.detach()
        return Tensor._make_subclass(AttachedValue, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of the half parameter, which autograd rounds."""
        return grad, None


def widened(hook: Callable[[Tensor], Any], dtype: torch.dtype) -> Callable[[Tensor], Any]:
    """Return a hook of a gradient in half, for one that gets and may return it in another dtype."""

    @functools.wraps(hook)
    def of_half(grad: Tensor) -> Any:
        new = hook(grad.to(dtype))
        return new if new is None else new.to(grad.dtype)

    return of_half


def param_behind(tensor: Any) -> Any:
    """Return the half parameter that a value stands for; anything else stands for itself."""
    return tensor.param if isinstance(tensor, AttachedValue) else tensor


def params_behind(group: Any) -> None:
    """Put half parameters in the place of their values in what an optimizer is to be given."""
    params = group.get("params") if isinstance(group, dict) else None
    if isinstance(params, Tensor):
        group["params"] = param_behind(params)
    elif isinstance(params, Iterable) and not isinstance(params, set):  # which torch refuses
        group["params"] = [
            tuple(map(param_behind, one)) if isinstance(one, tuple) else param_behind(one)
            for one in params
        ]


def attached(
    param: nn.Parameter, value: Tensor, value_of: Callable[[Tensor], Tensor | None]
) -> Tensor:
    """Return a value, in its own memory, that hands on its gradient to the half parameter.

    Args:
        param: the half parameter.
        value: its own, without a graph.
        value_of: returns of a half parameter the very tensor that holds its value, a master say.
    """
    if torch._C._are_functorch_transforms_active():
        return value
    if torch.is_inference_mode_enabled():
        return value.requires_grad_(param.requires_grad)
    trains = param.requires_grad
    # A frozen parameter may be unfrozen while the value lives, which has its graph from here.
    param.requires_grad_(trains or not is_spread(param))
    try:
        with torch.enable_grad():  # a parameter requires its gradient in any mode
            standing: Tensor = _Attaching.apply(param, value)
    finally:
        param.requires_grad_(trains)
    if isinstance(standing, AttachedValue):
        standing.stand_for(param, value_of)
    return standing
