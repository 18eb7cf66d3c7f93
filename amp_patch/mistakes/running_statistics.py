"""``model.eval()`` with running statistics that float16 could not hold: every evaluation is wrong.

A training computes with the statistics of its batch, and shows nothing of it. Knows modules only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from amp_patch.common.warn_once import warn_once
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.tensor_values import is_infinite
from amp_patch.weights.half_bits import is_plain

_EVAL = "torch.nn.modules.module.Module.eval"


def holds_any(model: nn.Module) -> bool:
    """Return whether a model has running statistics in float16."""
    return next(_statistics(model), None) is not None


class RunningStatistics:
    """Looks at calls of ``eval()`` of modules with running statistics in float16.

    To look waits for a device: it is done at the first such call, the second, the fourth, the
    eighth and so on, so that a script which evaluates in each step does not wait in each.
    """

    def __init__(self) -> None:
        self._calls = 0

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        """Return, for each method by its path, what makes its replacement."""
        return {_EVAL: self._looking}

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def eval(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not _is_traced():
                self._look(self_)
            return original(self_, *args, **kwargs)

        return eval

    def _look(self, module: nn.Module) -> None:
        found = list(_statistics(module))
        if not found or captures.are_made(found[0][1].device):
            return
        self._calls += 1
        if self._calls & (self._calls - 1):  # no power of two
            return
        flags = [is_infinite(buffer) for _, buffer in found]
        are = torch.stack([one.to(flags[0].device) for one in flags]).tolist()  # one wait
        names = list(itertools.compress([name for name, _ in found], are))
        if names:
            many = f" and {len(names) - 3} more" if len(names) > 3 else ""
            warn_once(
                "running statistics in float16 must lie below 65504, for larger ones are infinite "
                "there, and an evaluation computes with them; got larger ones in "
                f"{', '.join(names[:3])}{many} of {type(module).__name__}. Call "
                "amp.initialize(..., keep_batchnorm_fp32=True), for another norm "
                f'rules={{"modules": {{"{names[0].rpartition(".")[0]}": "float"}}}}, or '
                "opt_level='O5', whose bfloat16 has the range of float32. What is infinite stays "
                "so: begin anew, or call reset_running_stats() of these norms."
            )


def _statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(path, recurse=False):
                if buffer.dtype is torch.float16 and is_plain(buffer):
                    yield name, buffer


def _is_traced() -> bool:
    """Tell whether what is called now goes into a graph, or computes with no numbers."""
    is_traced = torch.compiler.is_compiling() or torch._C._is_tracing()
    return is_traced or bool(torch._C._len_torch_dispatch_stack())
