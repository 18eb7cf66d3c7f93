"""Calls an operation of amp_C with the chunk size that it stands for; knows none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, ...)``.

    Args:
        chunk_size: handed on; the operations here take no notice of it.

    Attributes:
        available: always True: the operations need no compiled extension.
        warned: False, for nothing is missing.
        import_err: None, for nothing is missing.
    """

    available = True
    warned = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the operations are there."""

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """Return what the operation returns.

        Args:
            op: of `amp_C`, say.
            noop_flag_buffer: int32, shape (1,).
            tensor_lists: lists of tensors, as the operation takes them.
            args: what else it takes.
        """
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
