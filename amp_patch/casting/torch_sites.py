"""The places of torch that ask about dtypes or autocast, made to ask about our casts as well.

Knows the mode of the thread and nothing of models; installed with every level, for a region
casts at every level.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.backends.mha
import torch.utils.checkpoint
from torch import Tensor, nn

from amp_patch.patching import Patches, as_function, as_if_defined_at, is_no_method, resolve

from . import autocast_blocks, custom_functions, torchscript
from .mode import casts_are_on, mode
from .torch_compile import is_patched


def install(patches: Patches, others: Mapping[str, Callable[[Any], Any]]) -> None:
    """Replace them; `_REPLACEMENTS` lists all.

    Args:
        patches: undoes it.
        others: further ones, of the caller's.
    """
    replace(patches, {**_REPLACEMENTS, **others})
    custom_functions.install(patches)


def replace(patches: Patches, replacements: Mapping[str, Callable[[Any], Any]]) -> None:
    """Replace functions and methods of torch, also where users' modules have imported them.

    Args:
        patches: undoes it.
        replacements: path -> what makes a replacement of what stands there.
    """
    bindings: dict[int, tuple[Any, Any]] = {}
    for path, make in replacements.items():
        owner, name, original = resolve(path)
        if is_no_method(owner, original):
            continue
        replacement = make(as_function(original, name))
        as_if_defined_at(replacement, path)
        patches.replace(owner, name, replacement)
        bindings[id(original)] = (original, replacement)
    patches.replace_bindings(bindings, users_only=True)


def _checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run the checkpointed function each time in the mode of its first run.

    The repetition happens in backward: outside the model, the region and perhaps the thread that
    the first run was in.

    What held ``checkpoint`` before (torch's ``checkpoint_wrapper``, a ``functools.partial``) comes
    by what it calls alone, `_apply` or `_generator`.
    """

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(function, *args, **kwargs)
        return original(_in_this_mode(function), *args, **kwargs)

    return checkpoint


def _apply(original: Any) -> Any:
    """Do the same where a checkpoint is reentrant."""

    def apply(kind: type, function: Callable[..., Any], *args: Any) -> Any:
        if not torch.compiler.is_compiling():
            function = _in_this_mode(function)
        return original.__get__(None, kind)(function, *args)

    return classmethod(apply)


def _generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do the same where it is not: torch gives the function for its repetition alone."""

    @functools.wraps(original)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(function, *args, **kwargs)
        return original(_in_this_mode(function, mode.in_checkpoint), *args, **kwargs)

    return generator


def _in_this_mode(
    function: Callable[..., Any], in_checkpoint: bool | None = None
) -> Callable[..., Any]:
    """Return a checkpointed function that runs in the mode of this moment.

    Args:
        function: the user's, or a module.
        in_checkpoint: what `mode.in_checkpoint` is then, as in a first run that was not called
            here; None: whether grad is on now.
    """
    noted = mode.note()
    inside = torch.is_grad_enabled() if in_checkpoint is None else in_checkpoint

    def run(*inputs: Any, **options: Any) -> Any:
        around, mode.in_checkpoint = mode.in_checkpoint, inside
        try:
            return mode.run(noted, function, *inputs, **options)
        finally:
            mode.in_checkpoint = around

    return run


def _get_fastpath_enabled(original: Callable[[], bool]) -> Callable[[], bool]:
    """Keep ``nn.TransformerEncoderLayer`` from its fused path, which takes one dtype only."""

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        return original() and not casts_are_on()

    return get_fastpath_enabled


def _check_input(original: Callable[..., None]) -> Callable[..., None]:
    """Let RNNs take input of another dtype than their weights: the call below casts both."""

    @functools.wraps(original)
    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        if casts_are_on() and input.is_floating_point():
            weight = self._flat_weights[0]
            dtype = input.dtype if weight is None else weight.dtype
            input = torch.empty_like(input, dtype=dtype, device="meta")
        original(self, input, batch_sizes)

    return check_input


def _find_builtin(original: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Let TorchScript see the operator behind a patched function.

    torch looks operators up in a table of functions by identity, which it makes on first use:
    here, for it must hold the functions that are found when nothing is patched.
    """
    original(None)

    @functools.wraps(original)
    def find_builtin(fn: Any) -> str | None:
        if is_patched(fn):
            fn = fn.__prepare_scriptable__()
        return original(fn)

    return find_builtin


def _get_overloads(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let TorchScript find the overloads of a patched function, as ``torch.norm`` has."""

    @functools.wraps(original)
    def get_overloads(obj: Any) -> Any:
        return original(obj.__prepare_scriptable__() if is_patched(obj) else obj)

    return get_overloads


def _create_script_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let TorchScript compile a model without our hooks, which are Python's, and their casts."""

    @functools.wraps(original)
    def create_script_module(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as hidden:
            originals = Patches()
            hidden.callback(originals.undo)
            for module in nn_module.modules():
                for name, value in list(vars(module).items()):
                    if is_patched(value):
                        originals.replace(module, name, value.__prepare_scriptable__())
                for kind in type(module).__mro__:
                    forward: Any = vars(kind).get("forward")
                    if is_patched(forward):
                        originals.replace(kind, "forward", forward.__prepare_scriptable__())
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    hidden.enter_context(_without_ours(hooks))
            return original(nn_module, *args, **kwargs)

    return create_script_module


@contextlib.contextmanager
def _without_ours(hooks: dict[int, Any]) -> Iterator[None]:
    every = dict(hooks)
    for key, hook in every.items():
        is_ours = getattr(hook, "__module__", "").partition(".")[0] == "amp_patch"
        if is_ours or hasattr(hook, "is_not_scripted"):  # as hooks of the drop-in, named apex
            del hooks[key]
    try:
        yield
    finally:
        if len(hooks) < len(every):
            hooks.clear()
            hooks.update(every)


_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl"):  # since torch 2.14
    _GENERATOR += "_impl"
_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "torch.utils.checkpoint.checkpoint": _checkpoint,
    "torch.utils.checkpoint.CheckpointFunction.apply": _apply,
    f"torch.utils.checkpoint.{_GENERATOR}": _generator,
    "torch.backends.mha.get_fastpath_enabled": _get_fastpath_enabled,
    "torch.nn.modules.rnn.RNNBase.check_input": _check_input,
    "torch.jit._builtins._find_builtin": _find_builtin,
    "torch.jit._recursive._find_builtin": _find_builtin,
    "torch.jit._recursive.create_script_module": _create_script_module,
    "torch.jit._script._get_overloads": _get_overloads,
    **autocast_blocks.REPLACEMENTS,
    **torchscript.REPLACEMENTS,
}
