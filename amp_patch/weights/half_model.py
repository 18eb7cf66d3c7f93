"""Casts what goes into a model, and what comes out (O0, O2, O3, O5); how a forward casts (O1, O4).

These are hooks on the model, not a replaced forward: they follow copies, replicas and pickles.
Knows no optimizer, and not how a model came to be in half (`half_storage`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_patch.casting.argument_casts import is_made_later
from amp_patch.casting.libraries.foreign_objects import cast_object
from amp_patch.casting.mode import FLOATS, mode, process
from amp_patch.casting.nested import map_tensors
from amp_patch.casting.running_modules import calls_of
from amp_patch.casting.shared_casts import CAST
from amp_patch.casting.torch_compile import call_as_traced, is_exporting, leave_out, order_hooks
from amp_patch.common.warn_once import warn_once
from amp_patch.levels import HALVES

from .kept_inputs import put_back
from .written_inputs import written_inputs


class FollowsCopies:
    """Hooks that `copy.deepcopy` and pickle take along, and that know it.

    The weights of a prepared model are in the dtype of its level, and nobody is to change it. What
    becomes of a copy is its owner's choice: hooks there go by the dtype that the weights have.

    Attributes:
        is_copy: whether they are on a copy, which nobody has prepared.
    """

    is_copy = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, is_copy=True)


@dataclasses.dataclass(frozen=True)
class ForwardCasts(FollowsCopies):
    """The hooks around one model's forward.

    Args:
        level: what the patched functions do inside: a half dtype (O1, O4), or `mode.OFF`.
        region_dtype: half dtype of a ``half_region`` inside.
        inputs: dtype that floating inputs are cast to; None leaves them. A copy casts them to that
            of its weights, and leaves them where it has none, say because these are quantized.
        kept: names of arguments, and of parts of one, that are not cast.
        kept_at: their places in a call by place, and the parts there.
        outputs: dtype that floating outputs are cast to; None leaves them. So does a call in the
            model's own forward, as of a tree that calls itself.
        observe: called with the model at the start of its forward, and what this gets; must be
            picklable.
        explain: called with what its forward raised; must be picklable.
    """

    level: torch.dtype
    region_dtype: torch.dtype
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    observe: Callable[[nn.Module, Any, Any], None] | None = None
    explain: Callable[[BaseException], None] | None = None
    kept: tuple[str, ...] = ()
    kept_at: tuple[tuple[int, str], ...] = ()

    @leave_out
    def enter(self, model: nn.Module, args: Any, kwargs: Any, is_forward: bool = True) -> Any:
        """Forward pre-hook; also called before another method, whose places are its own."""
        is_compiling = torch.compiler.is_compiling()
        inputs = self.inputs
        if self.is_copy and inputs is not None:
            inputs = dtype_of_weights(model)
        stored = inputs if inputs in HALVES else None
        leaves_no_note = is_compiling and (mode.in_checkpoint or is_exporting())
        if not (leaves_no_note and self._holds_around(id(model), stored)):
            mode.enter_model(id(model), self.level, self.region_dtype, stored)
        if is_compiling:
            _follow_device(model)
        else:
            if _autocast_is_on() or mode.autocasts:
                _warn_of_autocast(model, self.level, is_float=inputs is torch.float32)
            if self.observe is not None:
                self.observe(model, args if is_forward else (), kwargs)
        if self.inputs is None:
            return None
        if is_compiling:
            return self._cast_inputs(inputs, args, kwargs)
        return self._cast_and_note(model, inputs, args, kwargs)

    def _cast_and_note(
        self, model: nn.Module, dtype: torch.dtype | None, args: Any, kwargs: Any
    ) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # tensors that have versions
                cast = self._cast_inputs(dtype, args, kwargs)
        else:
            cast = self._cast_inputs(dtype, args, kwargs)
        given, got = args, cast[0]
        if kwargs:
            given, got = (*args, *kwargs.values()), (*got, *cast[1].values())
        if written_inputs.note(id(model), given, got, is_first=len(mode.models) == 1):
            return written_inputs.unite((args, kwargs), cast)
        return cast

    def _cast_inputs(self, dtype: torch.dtype | None, args: Any, kwargs: Any) -> Any:
        if dtype is None:  # a copy that has no floating weights
            return args, kwargs
        cast = [cast_floats(value, dtype) for value in args]
        for place, part in self.kept_at:
            if place < len(args):
                cast[place] = put_back(cast[place], args[place], part)
        if kwargs:
            given = kwargs
            kwargs = {key: cast_floats(value, dtype) for key, value in given.items()}
            for name in self.kept:
                kwargs = put_back(kwargs, given, name)
        return tuple(cast), kwargs

    @leave_out
    def leave(self, model: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Forward hook; also called when the forward raised."""
        mode.leave_model(id(model))
        if self.inputs is not None and not torch.compiler.is_compiling():
            written_inputs.give_back(id(model), self._cast_outputs)
        if outputs is None and self.explain is not None:
            error = sys.exc_info()[1]
            if error is not None:
                self.explain(error)
        if self.outputs is None or (mode.models and _runs_around(model)):
            return outputs
        return self._cast_outputs(outputs)

    def _cast_outputs(self, outputs: Any) -> Any:
        return outputs if self.outputs is None else cast_floats(outputs, self.outputs)

    def _holds_around(self, key: int, stored: torch.dtype | None) -> bool:
        """Whether entering the model changes nothing, so that it need not be noted.

        torch.compile traces no checkpoint of a function that writes to what stands outside of it,
        and torch.export no model that does.
        """
        around = mode.models[-1][0] if mode.models else None
        return (
            around != key  # else `leave` would take this model's end for the outer call's
            and (mode.level or process.dtype) is self.level
            and (mode.region_dtype or process.region_dtype) is self.region_dtype
            and mode.stored is stored
        )

    def attach(self, model: nn.Module) -> None:
        """Put the hooks on ``model``, in place of those of an earlier level."""
        detach(model)
        model.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        order_hooks(model._forward_pre_hooks)
        model.register_forward_hook(self.leave, with_kwargs=True, always_call=True)


class WeightCasts(ForwardCasts):
    """The hooks around what computes a layer's weight, in fp32, for a layer that is in half.

    In a copy all is of one dtype: the layer takes the weight as it is computed.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "outputs": None})


# Any device's: half the host time of asking for one.
_autocast_is_on = torch._C._is_any_autocast_enabled


def _runs_around(model: nn.Module) -> bool:
    """Tell whether the call that ends is in the model's own forward, whose layers take halves."""
    key = id(model)
    if all(around[0] != key for around in mode.models):
        return False
    # An interrupt may have left it in the list, though no call of it runs.
    return torch.compiler.is_compiling() or calls_of(model) > 1


def _warn_of_autocast(model: nn.Module, level: torch.dtype, is_float: bool) -> None:
    """Tell of a block around the model: one that casts as well, or that switches our casts off.

    The latter is how a script's own switch is off, ``torch.autocast(device, enabled=args.amp)``.

    Args:
        model: that is called.
        level: what its functions cast to.
        is_float: whether it is in float32 throughout (O0).
    """
    name = type(model).__name__
    known = filter(torch.amp.is_autocast_available, sorted(process.devices))  # others raise
    on = [device for device in known if torch.is_autocast_enabled(device)]
    if on and is_float:
        warn_once(
            "a model at O0 trains in float32, and torch.autocast around it casts to half all the "
            f"same; got a call of a model of type {name} in torch.autocast({on[0]!r}); "
            "remove that 'with' and its GradScaler, or take O1 or O4 in their place."
        )
    elif on:
        warn_once(
            "a model that amp.initialize() set up casts by itself, and torch.autocast around it "
            f"casts once more; got a call of a model of type {name} in torch.autocast({on[0]!r}); "
            "remove that 'with' and its GradScaler, and call model(inputs) as it is."
        )
    elif _is_switched_off(level) and _is_trained(model):
        warn_once(
            "torch.autocast(..., enabled=False) switches the casts of amp.initialize() off; got a "
            f"training call of a model of type {name} in one, and all of it is computed in "
            "float32; remove that 'with', or write `with amp.disable_casts():` if that is meant."
        )


def _is_switched_off(level: torch.dtype) -> bool:
    """Tell whether a block of autocast alone switches the casts of the outermost model off.

    A region around it says what is meant, and one in it may cast.
    """
    is_outermost = len(mode.models) == 1
    return bool(mode.autocasts) and level in HALVES and is_outermost and not mode.around


def _is_trained(model: nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


def _follow_device(model: nn.Module) -> None:
    """The model may have been moved since it was last seen. One parameter speaks for all."""
    for param in model.parameters():
        _cast_on(param.device.type)
        break


@call_as_traced
def _cast_on(device_type: str) -> None:
    process.devices |= {device_type}


def detach(model: nn.Module) -> None:
    """Remove the hooks that `ForwardCasts.attach` put on ``model``."""
    remove_hooks(model, ForwardCasts)


def remove_hooks(module: nn.Module, owner: type | tuple[type, ...]) -> None:
    """Remove the forward hooks of a module that are methods of such objects.

    A copy of a model has the hooks of the model, and no handle to remove them by.
    """
    for hooks, flags in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (
            module._forward_hooks,
            (module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), owner):
                del hooks[key]
                for flag in flags:
                    flag.pop(key, None)


def dtype_of_weights(model: nn.Module) -> torch.dtype | None:
    """Return the dtype that `convert` and ``model.float()`` decide; None of a model without any.

    The first parameter speaks for all, but none of a batch norm in fp32, which may have been kept.
    One in float64 speaks where there are no others, for `convert` leaves it alone.
    """
    wide = None
    for module in model.modules():
        dtypes = HALVES if isinstance(module, _BatchNorm) else FLOATS
        # A replica of nn.DataParallel holds its weights elsewhere.
        params = module._parameters or module.__dict__.get("_former_parameters", {})
        for param in params.values():
            if param is not None and param.dtype in dtypes:
                return param.dtype
            if param is not None and param.dtype is torch.float64:
                wide = param.dtype
    return wide


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating tensors to ``dtype``; float64, complex and integers stay.

    Containers keep their type (see `nested.map_tensors`). Other objects that hold tensors, such as
    a graph or a batch of the user's own, are cast as `foreign_objects.cast_object` says.
    """
    if isinstance(value, Tensor):
        if value.dtype not in CAST or (type(value) is not Tensor and is_made_later(value)):
            return value
        cast = CAST.get(dtype)
        return value.to(dtype) if cast is None else cast(value)
    return map_tensors(
        lambda tensor: cast_floats(tensor, dtype),
        value,
        other=lambda item: cast_object(item, dtype, lambda inner: cast_floats(inner, dtype)),
    )
