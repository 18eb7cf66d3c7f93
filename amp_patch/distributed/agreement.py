"""One decision for all ranks that make a step together; knows flags and numbers, no optimizer.

With a scale of its own, or with a step that it alone skips, a rank would train another model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from amp_patch.common.scales import Scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it

#: On a device that works behind the host, the numbers of the ranks are compared once in so many
#: steps, for to read them the host waits.
COMPARED_EVERY = 100


def agree(
    found_inf: Sequence[Tensor],
    groups: Sequence[ProcessGroup],
    device: torch.device,
    scale: Scale,
    steps: int,
) -> Tensor:
    """Return one flag that is the same on every rank of the groups.

    By one small collective for each group, all of whose ranks must come here. It carries what the
    ranks must have in common as well, the loss scale and the number of steps.

    Args:
        found_inf: float32, one element each, 1 where this rank found inf or NaN, else 0; may be
            empty.
        groups: as `groups_of` returns them.
        device: where the flag is made.
        scale: what this rank has multiplied its loss by.
        steps: how many steps this rank has made.

    Returns:
        float32, shape (1,), on ``device``: 1 where any rank found inf or NaN, else 0.

    Raises:
        RuntimeError: the ranks hold different scales, or have made different numbers of steps; on
            every rank.
    """
    flags = [flag.reshape(()).to(device, non_blocking=True) for flag in found_inf]
    flags = flags or [torch.zeros((), device=device, dtype=torch.float32)]
    own = torch.as_tensor(scale, dtype=torch.float32).to(device, non_blocking=True).reshape(())
    count = torch.full((), float(steps), device=device, dtype=torch.float32)
    # The largest of the negatives tells the smallest number: all are equal where it is the largest.
    numbers = torch.stack([torch.stack(flags).amax(), own, -own, count, -count])
    for group in groups:
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group)
    if device.type == "cpu" or steps % COMPARED_EVERY == 0:
        _, most, least, last, first = numbers.tolist()
        if most != -least or last != -first:
            _refuse(groups, float(own), steps)
    return numbers[:1]


def any_rank(found: bool, groups: Sequence[ProcessGroup]) -> bool:
    """Return whether any rank of the groups has found something; all of them must come here."""
    for group in groups:
        flag = torch.tensor(found, dtype=torch.float32, device=device_of(group))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group)
        found = bool(flag)
    return found


def require_alike(wrapper: Any, held: str) -> None:
    """Raise where ranks begin to train one model with other scales, or parameters of other dtypes.

    `DistributedDataParallel` would average gradients that are multiplied by different numbers, and
    each rank divide them by its own: the ranks would train apart, and find no inf to tell of it.

    Args:
        wrapper: of the model; all ranks of its group must come here.
        held: what this rank has, in words that are the same where all is well.

    Raises:
        RuntimeError: as said; on every rank.
    """
    group = getattr(wrapper, "process_group", None)  # apex's has none: that of all
    is_joining = getattr(getattr(wrapper, "_join_config", None), "enable", False)
    if is_joining:  # a rank may be at its end already
        return
    device = next(wrapper.parameters()).device
    text = torch.tensor(list(held.encode().ljust(_TEXT)[:_TEXT]), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(text) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(gathered, text, group)
    texts = [bytes(one.tolist()).decode().strip() for one in gathered]
    if any(text != texts[0] for text in texts):
        rows = "; ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
        raise RuntimeError(
            "ranks that train one model in DistributedDataParallel must begin alike, or they train "
            f"it apart; got {rows}. Call amp.initialize() with the same opt_level and loss_scale, "
            "and amp.load_state_dict() with the same checkpoint, on every rank."
        )


#: Bytes of such a text.
_TEXT = 160


def device_of(group: ProcessGroup) -> torch.device:
    """Return a device whose tensors the collectives of a group take."""
    devices: list[torch.device] = group._device_types
    return next((one for one in devices if one.type == "cpu"), devices[0])


def _refuse(groups: Sequence[ProcessGroup], scale: float, steps: int) -> None:
    """Raise, with what each rank holds.

    Raises:
        RuntimeError: always.
    """
    known: dict[int, tuple[float, int]] = {torch.distributed.get_rank(): (scale, steps)}
    for group in groups:
        gathered: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(gathered, known, group)
        known = {rank: held for one in gathered for rank, held in one.items()}
    rows = ", ".join(
        f"{scale} after {steps} steps on rank {rank}"
        for rank, (scale, steps) in sorted(known.items())
    )
    raise RuntimeError(
        "ranks that make a step together must hold the same loss scale, after the same number of "
        f"steps; got {rows}. Call amp.load_state_dict() with the same checkpoint on every rank, "
        "and optimizer.step() equally often."
    )
