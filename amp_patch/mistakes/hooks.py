"""Hooks on tensors and modules: they get gradients that are multiplied by the loss scale.

That is told where a script registers one that may depend on the scale (a clamp does, a mask does
not). No backward comes to a master: a hook on one goes to its half parameter. Knows no optimizer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from amp_patch.casting import gradient_hooks
from amp_patch.casting.torch_compile import never_trace
from amp_patch.common.warn_once import warn_once
from amp_patch.gradients.earlier_gradients import reading_hooks

from .linear_hooks import is_linear_in_grad, only_multiplies

_METHODS = {
    "torch.Tensor.register_hook": "of a tensor (register_hook)",
    "torch.Tensor.register_post_accumulate_grad_hook": (
        "of a parameter (register_post_accumulate_grad_hook)"
    ),
    "torch.nn.modules.module.Module.register_full_backward_hook": (
        "of a module (register_full_backward_hook)"
    ),
    "torch.nn.modules.module.Module.register_full_backward_pre_hook": (
        "of a module (register_full_backward_pre_hook)"
    ),
}


#: Packages whose own hooks do not depend on the scale: Lightning's Fabric sees by one whether its
#: ``backward`` was called, Pyro whether a gradient is NaN, Captum takes gradients of no loss, and
#: curvlinops, for Laplace approximations, those of losses that it computes itself.
_NO_SCRIPTS = frozenset(
    {"torch", "amp_patch", "apex", "lightning", "lightning_fabric", "pyro", "captum", "curvlinops"}
)

_Models = Callable[[], Iterable[nn.Module]]
_ParamOf = Callable[[Tensor], Tensor]


def replacements(scaled_models: _Models, param_of: _ParamOf) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method by its path, what makes its replacement.

    Args:
        scaled_models: returns the prepared models, if losses are multiplied by a scale.
        param_of: returns the half parameter of a master, and any other tensor itself.
    """
    telling = {
        path: functools.partial(_telling, scaled_models, param_of, what)
        for path, what in _METHODS.items()
    }
    return {**telling, "torch.autograd.graph.register_multi_grad_hook": _without_casts}


def _telling(
    scaled_models: _Models, param_of: _ParamOf, what: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def register(self: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        if caller not in _NO_SCRIPTS:
            self = self if isinstance(self, nn.Module) else param_of(self)
            if _concerns(self, scaled_models()) and not _suits_any_scale(hook):
                _tell(what)
            hook = gradient_hooks.in_its_mode(hook)
        return original(self, hook, *args, **kwargs)

    return register


def _without_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    @never_trace
    @functools.wraps(original)
    def register_multi_grad_hook(tensors: Any, fn: Any, **kwargs: Any) -> Any:
        return original(tensors, gradient_hooks.in_its_mode(fn), **kwargs)

    return register_multi_grad_hook


def _suits_any_scale(hook: Any) -> bool:
    """Return whether a hook of a tensor is seen to do the same at any scale, or to ask for it."""
    names = getattr(getattr(hook, "__code__", None), "co_names", ())
    if "grad" in names:  # of the tensor that it is given
        return "loss_scale" in names or is_linear_in_grad(hook)
    return "loss_scale" in names or only_multiplies(hook)


def _concerns(hooked: Any, models: Iterable[nn.Module]) -> bool:
    """Return whether a module, parameter or result may be of one of these models."""
    if isinstance(hooked, nn.Module):
        return any(hooked is module for model in models for module in model.modules())
    if hooked.is_leaf:
        return any(hooked is param for model in models for param in model.parameters())
    return any(True for _ in models)


def tell_of_earlier(models: Iterable[nn.Module]) -> None:
    """Warn of hooks that models which are prepared with a loss scale have already."""
    modules = [module for model in models for module in model.modules()]
    tensors: Iterable[Tensor] = chain.from_iterable(model.parameters() for model in models)
    hooks = chain.from_iterable((tensor._backward_hooks or {}).values() for tensor in tensors)
    if not all(map(_suits_any_scale, map(gradient_hooks.own, hooks))):
        _tell(_METHODS["torch.Tensor.register_hook"])
    tensors = chain.from_iterable(model.parameters() for model in models)
    if not all(map(_suits_any_scale, reading_hooks(tensors))):
        _tell(_METHODS["torch.Tensor.register_post_accumulate_grad_hook"])
    if any(module._backward_hooks or module._backward_pre_hooks for module in modules):
        _tell(_METHODS["torch.nn.modules.module.Module.register_full_backward_hook"])


def _tell(what: str) -> None:
    warn_once(
        f"a hook {what} gets gradients that are multiplied by the loss scale; got one at a level "
        "with a loss scale. Where what it does depends on their size (a clamp, a threshold, a "
        "logged norm), divide g.float() by amp_patch.amp.loss_scale() in the hook and multiply "
        "what it returns by it, or clip after the block: amp.clip_grad_norm_(optimizer, max_norm)."
    )
