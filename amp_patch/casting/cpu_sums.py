"""What autograd adds up in half on a CPU, added in float32 by kernels in the place of torch's.

What comes back to ``h`` by ``h[ids]`` is such a sum. It ends at 2048 in float16 and at 256 in
bfloat16 where thousands of ids are one, under torch.autocast as well. ``h[ids]`` is a slot in C,
which no wrapper stands at; so the kernels of the operators that its backward calls are replaced, in
torch's dispatcher and for a CPU alone. Knows tensors; nothing of functions, rules or modes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, int64, nn
from torch.library import Library

from amp_patch.levels import HALVES

from .added_values import are_few

Kernel = Callable[..., Any]

#: So few numbers add up in half without much loss: in bfloat16 4 % where all are equal.
_FEW = 64


class CPUSums:
    """The kernels that stand in the place of torch's, for the whole process.

    Torch has had what it takes since 2.9. Before, nothing is replaced.
    """

    def __init__(self) -> None:
        self._library: Library | None = None

    def install_for(self, models: Iterable[nn.Module], on_error: contextlib.ExitStack) -> None:
        """Replace the kernels, unless they are, where one of these models is on a CPU.

        Args:
            models: whose functions cast, or which are about to be stored in half.
            on_error: gets what undoes it.
        """
        get_kernel: Any = getattr(torch.library, "get_kernel", None)
        if self._library is not None or get_kernel is None:
            return
        if not any(param.is_cpu for model in models for param in model.parameters()):
            return

        def of_torch(name: str) -> Kernel:
            kernel: Kernel = get_kernel(f"aten::{name}", "CPU").call_boxed
            return kernel

        made = {name: make(of_torch(name), of_torch("index_add_")) for name, make in _MADE.items()}
        on_error.callback(self.undo)
        self._library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what is done here on purpose
            for name, kernel in made.items():
                self._library.impl(name, kernel, "CPU", with_keyset=True)

    def undo(self) -> None:
        """Give torch its own kernels back."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()


def _index_put(of_torch: Kernel, index_add: Kernel) -> Kernel:
    """Return a kernel of `index_put_`; torch's own of `index_add_` adds rows up in float32."""

    def index_put(
        keys: Any,
        target: Tensor,
        indices: list[Tensor | None],
        values: Tensor,
        accumulate: bool = False,
        unsafe: bool = False,
    ) -> Any:
        if not accumulate or target.dtype not in HALVES or not _may_lose(target, indices, values):
            return of_torch(keys, target, indices, values, accumulate, unsafe)
        ids = indices[0]
        if len(indices) == 1 and ids is not None and _are_rows(target, ids, values):
            if ids.dim() > 1:
                ids, values = ids.reshape(-1), values.flatten(0, ids.dim() - 1)
            return index_add(keys, target, 0, ids, values)
        wide = target.float()
        of_torch(keys, wide, indices, values.float(), accumulate, unsafe)
        return target.copy_(wide)

    return index_put


def _may_lose(target: Tensor, indices: list[Tensor | None], values: Tensor) -> bool:
    """Return whether one place may be named so often that a sum in half loses much of it."""
    first, *others = indices
    if others or first is None:
        count = values.numel()
    elif first.dtype is torch.bool:  # a mask names each place once
        return False
    else:
        count = first.numel()
    return count > _FEW and not are_few(values, target.numel())


def _are_rows(target: Tensor, ids: Tensor, values: Tensor) -> bool:
    """Return whether each id is the number of a row, counted from the first, of one row of values.

    Not so masks, rows that are counted from the last, and values that torch would broadcast.
    """
    if ids.dtype is not int64 or target.dim() < 2 or values.shape != ids.shape + target.shape[1:]:
        return False
    return int(ids.min()) >= 0


def _put(of_torch: Kernel, _: Kernel) -> Kernel:
    """Return a kernel of `put_`, which the backward of `take` calls."""

    def put(
        keys: Any, target: Tensor, index: Tensor, source: Tensor, accumulate: bool = False
    ) -> Any:
        if not accumulate or target.dtype not in HALVES or not _may_lose(target, [index], source):
            return of_torch(keys, target, index, source, accumulate)
        wide = target.float()
        of_torch(keys, wide, index, source.float(), accumulate)
        return target.copy_(wide)

    return put


def _embedding_backward(of_torch: Kernel, _: Kernel) -> Kernel:
    """Return a kernel of the backward of `F.embedding`."""

    def embedding_backward(
        keys: Any, grad: Tensor, ids: Tensor, length: int, padding: int, by_freq: bool
    ) -> Any:
        is_half = grad.dtype in HALVES and ids.numel() > _FEW
        if not is_half or are_few(grad, length * grad.size(-1)):
            return of_torch(keys, grad, ids, length, padding, by_freq)
        return of_torch(keys, grad.float(), ids, length, padding, by_freq).to(grad.dtype)

    return embedding_backward


#: By an operator's name what makes its kernel of torch's own and of that of `index_add_`.
_MADE: dict[str, Callable[[Kernel, Kernel], Kernel]] = {
    "_index_put_impl_": _index_put,
    "embedding_dense_backward": _embedding_backward,
    "put_": _put,
}
