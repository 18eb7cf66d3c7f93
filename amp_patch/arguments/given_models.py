"""Checks the models that users pass, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from amp_patch.levels import HALVES

from .kinds import as_list, described


def models_of(
    models: Any,
    allow_half: bool = False,
    stored: Collection[int] = (),
    beside_masters: bool = False,
) -> list[nn.Module]:
    """Return one model, or a list or tuple of models, as a list.

    Args:
        models: as given to `initialize`.
        allow_half: take models whose half parameters are trained, too.
        stored: ids of the parameters and buffers that `initialize` has cast to half.
        beside_masters: whether an optimizer that comes with them holds masters of such.

    Raises:
        TypeError: anything else, or a model with parameters that hand their gradients on to other
            tensors.
        RuntimeError: a model that `initialize` has stored in half, or that trains half parameters.
    """
    found = as_list(models)
    for model in found:
        if not isinstance(model, nn.Module):
            raise TypeError(
                "models must be a torch.nn.Module or a list or tuple of them; got "
                f"{described(model, nn.Module)}; call model, optimizer = "
                "amp.initialize(model, optimizer, opt_level=...)."
            )
    for model in found:
        _refuse_shells(model)
        if not allow_half:
            _refuse_half(model, stored, beside_masters)
    return found


def _refuse_shells(model: nn.Module) -> None:
    """Raise for parameters that stand for other tensors, as those of hypll.

    Their class answers for the other tensor, which also gets the gradients: nobody would unscale
    or clear these. Torch itself is asked for the gradients of parameters, without their class.
    """
    for name, param in model.named_parameters():
        asks_class = type(param).__torch_function__ is not nn.Parameter.__torch_function__
        if not asks_class or isinstance(param, UninitializedParameter) or not param.requires_grad:
            continue
        with torch._C.DisableTorchFunctionSubclass():
            own = tuple(torch.Tensor.size(param))
        if tuple(param.shape) != own:
            raise TypeError(
                "models must have parameters that get their gradients themselves, for "
                f"amp.initialize() has these unscaled and cleared; got {name!r} of "
                f"type {type(param).__name__}, which stands for another tensor. Train this model "
                "without amp.initialize()."
            )


def _refuse_half(model: nn.Module, stored: Collection[int], beside_masters: bool) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype not in HALVES:
            continue
        found = f"models must come in float32, amp.initialize() casts them; got {name!r} in "
        if id(tensor) in stored and beside_masters:
            raise RuntimeError(
                f"{found}{tensor.dtype}, which amp.initialize() has cast, and an optimizer made of "
                "its fp32 masters, as from optimizer.param_groups; call amp.deactivate(), make the "
                "optimizer of model.parameters(), and call model, optimizer = "
                "amp.initialize(model, optimizer, opt_level=...) anew, with every optimizer of the "
                "model."
            )
        if id(tensor) in stored:
            raise RuntimeError(
                f"{found}{tensor.dtype}, which amp.initialize() has cast. Use what the first call "
                "returned, or call amp.deactivate() before you initialize the model anew. Models "
                "that share a layer go into one call, amp.initialize([one, other], optimizers)."
            )
        if tensor.requires_grad:
            raise RuntimeError(
                f"{found}{tensor.dtype}, which requires a gradient. Leave out your own .half(), "
                ".bfloat16() or torch.set_default_dtype(), call .float() on its module, or freeze "
                "it by requires_grad_(False). Of a model that amp.initialize() cast, call "
                "amp.deactivate() first; of one from "
                "a file, call model.float() first."
            )


def refuse_unstorable(models: Iterable[nn.Module]) -> None:
    """Raise for weights that cannot be stored in half.

    Raises:
        RuntimeError: a lazy module (`nn.LazyLinear`), which has none yet; inference tensors, which
            do not tell of writes; what optimizers step in the backward, by hooks on nodes that a
            parameter of another dtype does not have.
    """
    for model in models:
        norms = [one for one in model.modules() if isinstance(one, _NormBase)]
        of_norms = {id(param) for one in norms for param in one.parameters()}
        for name, param in model.named_parameters():
            if isinstance(param, UninitializedParameter):
                raise RuntimeError(
                    "models must have weights before amp.initialize() stores them in half "
                    f"precision; got the lazy parameter {name!r}, which has none yet. Call the "
                    "model once on a batch, then amp.initialize(model, ...)."
                )
            if param.is_inference():
                raise RuntimeError(
                    "models must be made outside of torch.inference_mode() for amp.initialize() to "
                    f"store them in half precision; got {name!r}, an inference tensor. Call "
                    "amp.initialize(copy.deepcopy(model), ...) outside of it."
                )
            steps_in_backward = getattr(param, "_in_backward_optimizers", None)
            if steps_in_backward and id(param) not in of_norms:  # which most often stay float32
                raise RuntimeError(
                    "models must come without optimizers that step in the backward, for these "
                    "never hear of a parameter that amp.initialize() stores in half precision; got "
                    f"{name!r} after _apply_optimizer_in_backward(). Call amp.initialize(model, "
                    "opt_level='O1'), or 'O4', or step after the backward."
                )


def refuse_compiled(models: Iterable[nn.Module], stores_half: bool) -> None:
    """Raise for what torch.jit compiled: a model, of which no function is Python's, or a part.

    Args:
        models: of one call of `amp.initialize`.
        stores_half: refuse parts as well, for these get hooks, and buffers in another dtype.

    Raises:
        TypeError: as said.
    """
    for model in models:
        for name, module in model.named_modules() if stores_half else [("", model)]:
            if isinstance(module, torch.jit.ScriptModule):
                place = f"at {name!r}" if name else "as the model"
                of_a_part = ", or take opt_level 'O1' or 'O4', where a part stays in float32"
                raise TypeError(
                    "models must be in Python for amp.initialize() to cast what they compute; got "
                    f"a torch.jit module of type {type(module).__name__} {place}. Call "
                    "amp.initialize() with the model that it was compiled from, and compile after "
                    f"amp.deactivate(){of_a_part if name else ''}."
                )
