"""The places of torch that ask about dtypes or autocast, made to ask about our casts as well.

Knows the mode of the thread and nothing of models; installed with every level, for a region
casts at every level.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.backends.mha
import torch.utils.checkpoint
from torch import Tensor, nn

from .cast_mode import OFF, mode, process
from .patching import Patches, as_if_defined_at, resolve


def install(patches: Patches) -> None:
    """Make the replacements that every level needs, `_REPLACEMENTS`."""
    _replace(patches, _REPLACEMENTS)


def install_for_compile(patches: Patches) -> None:
    """Make the replacements that patched functions need under torch.compile.

    A captured graph calls torch's functions by name, so it would meet the patched ones again: in
    the mode of the moment it runs, and not in that of the traced line, which the casts in the
    graph come from. Casts are off while a graph runs, and while its dtypes are inferred.
    """
    # Importing it late keeps `import amp_patch` from changing torch (it replaces manual_seed).
    import torch._dynamo.output_graph

    _replace(patches, _COMPILE_REPLACEMENTS)


def _replace(patches: Patches, replacements: Mapping[str, Callable[[Any], Any]]) -> None:
    bindings: dict[int, tuple[Any, Any]] = {}
    for path, make in replacements.items():
        owner, name, original = resolve(path)
        replacement = make(original)
        as_if_defined_at(replacement, path)
        patches.replace(owner, name, replacement)
        bindings[id(original)] = (original, replacement)
    patches.replace_bindings(bindings)


def _casts_are_on() -> bool:
    return mode.region is not None or (mode.dtype or process.dtype) is not OFF


def _checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run the checkpointed function each time in the mode of its first run.

    The repetition happens in backward: outside the model, the region and perhaps the thread that
    the first run was in.
    """

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(function, *args, **kwargs)
        first = mode.save()
        region_dtype = mode.region_dtype
        with_grad = torch.is_grad_enabled()

        def run(*inputs: Any, **options: Any) -> Any:
            now, now_in, now_dtype = mode.save(), mode.in_checkpoint, mode.region_dtype
            repeated = first.region is not None and now.region is not first.region
            mode.restore(first)
            mode.in_checkpoint, mode.region_dtype = with_grad, region_dtype
            try:
                with first.region if repeated else contextlib.nullcontext():
                    return function(*inputs, **options)
            finally:
                mode.restore(now)
                mode.in_checkpoint, mode.region_dtype = now_in, now_dtype

        return original(run, *args, **kwargs)

    return checkpoint


def _get_fastpath_enabled(original: Callable[[], bool]) -> Callable[[], bool]:
    """Keep ``nn.TransformerEncoderLayer`` from its fused path, which takes one dtype only."""

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        return original() and not _casts_are_on()

    return get_fastpath_enabled


def _check_input(original: Callable[..., None]) -> Callable[..., None]:
    """Let RNNs take input of another dtype than their weights: the call below casts both."""

    @functools.wraps(original)
    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        if _casts_are_on() and input.is_floating_point():
            weight = self._flat_weights[0]
            dtype = input.dtype if weight is None else weight.dtype
            input = torch.empty_like(input, dtype=dtype, device="meta")
        original(self, input, batch_sizes)

    return check_input


def _without_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def without_casts(*args: Any, **kwargs: Any) -> Any:
        saved = mode.switch_off()
        try:
            return original(*args, **kwargs)
        finally:
            mode.restore(saved)

    return without_casts


def _call_user_compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    compiler = _without_casts(original)

    @functools.wraps(original)
    def call_user_compiler(*args: Any, **kwargs: Any) -> Any:
        return _without_casts(compiler(*args, **kwargs))

    return call_user_compiler


_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "torch.utils.checkpoint.checkpoint": _checkpoint,
    "torch.backends.mha.get_fastpath_enabled": _get_fastpath_enabled,
    "torch.nn.modules.rnn.RNNBase.check_input": _check_input,
}
_COMPILE_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "torch._dynamo.output_graph.OutputGraph.call_user_compiler": _call_user_compiler,
    "torch._dynamo.utils.run_node": _without_casts,
}
