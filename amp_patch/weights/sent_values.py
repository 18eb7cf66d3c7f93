"""A rank that gets the half weights of another gets their fp32 values as well (O2, O5).

`DistributedDataParallel` sends the parameters when it is made, and at the end of ``join``: the half
ones, of which each rank would make masters that differ from the sender's by a rounding. Knows the
fp32 values; no optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .fp32_values import FP32Values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


def replacements(
    values: FP32Values, are_shared_out: Callable[[], bool]
) -> dict[str, Callable[[Any], Any]]:
    """Return, for the function of torch that sends by its path, what makes its replacement.

    Args:
        values: of the parameters.
        are_shared_out: returns whether no rank has the values of all parameters.
    """
    if not torch.distributed.is_available():
        return {}
    make = functools.partial(_sending, values, are_shared_out)
    return {"torch.nn.parallel.distributed._sync_module_states": make}


def _sending(
    values: FP32Values, are_shared_out: Callable[[], bool], original: Callable[..., None]
) -> Callable[..., None]:
    @functools.wraps(original)
    def sync_module_states(
        module: nn.Module,
        process_group: ProcessGroup,
        broadcast_bucket_size: int,
        src: int,
        params_and_buffers_to_ignore: Container[str],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        ignored = params_and_buffers_to_ignore
        original(module, process_group, broadcast_bucket_size, src, ignored, *args, **kwargs)
        sent = [
            param
            for name, param in module.named_parameters()
            if name not in ignored and values.are_made_from(param)
        ]
        if sent and not are_shared_out():
            exact = [values.exact(param) for param in sent]
            send = torch.distributed._broadcast_coalesced  # type: ignore[attr-defined]  # torch's own
            send(process_group, exact, broadcast_bucket_size, src)
            for param, value in zip(sent, exact, strict=True):
                values.receive(param, value)

    return sync_module_states
