"""How much memory the process of a training takes; knows nothing of steps."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_patch.common.living_objects import instances, is_leaf
from amp_patch.weights.parameter_lists import stored_grads

_STATUS = Path("/proc/self/status")


def peak_rss() -> int:
    """Return the most bytes that this process has had in RAM so far.

    On Linux `VmHWM`, for `ru_maxrss` starts with what the parent had; elsewhere the latter.
    """
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_on_device() -> int | None:
    """Return the most bytes that CUDA's allocator has handed out; None where CUDA is not used.

    Of several devices, the one with most.
    """
    if not torch.cuda.is_initialized():
        return None
    return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))


class LivingTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that live at once, in this thread, while it is entered.

    Those that an operator returns are counted until their memory is freed, a view once with what
    it is a view of. What an operator takes for itself while it runs is not seen.

    Attributes:
        peak: the most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = self.peak = 0

    def __enter__(self) -> LivingTensors:
        gc.collect()  # what is held by cycles alone would count until Python happens to find it
        for tensor in _tensors_of_this_process():
            self._count(tensor)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse, or a subclass that has no memory of its own
        key, size = storage._cdata, storage.nbytes()
        # What torch.compile traces has no memory, and may have a size that is a symbol.
        if key in self._living or storage.device.type == "meta" or isinstance(size, torch.SymInt):
            return

        def freed(_: Any) -> None:
            if self._living.pop(key, None) is not None:
                self._bytes -= size

        self._living[key] = weakref.ref(storage, freed), size
        self._bytes += size
        self.peak = max(self.peak, self._bytes)


def _tensors_of_this_process() -> list[Tensor]:
    """Return what lives now and Python knows of, with the gradients but those that wait."""
    found = instances(Tensor)
    # torch 2.6 hides from Python's collector what its autograd graphs hold as well: weights, say.
    for module in instances(nn.Module):
        held = [vars(module).get(name, {}).values() for name in ("_parameters", "_buffers")]
        found += [one for one in chain(*held) if isinstance(one, Tensor)]
    grads = stored_grads(one for one in found if is_leaf(one))
    return found + [grad for grad in grads if grad is not None]
