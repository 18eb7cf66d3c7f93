"""Writes to a half weight that are lost because its fp32 master was written to as well.

Which of the two came last nobody can tell, and `FP32Values` lets the master win. Knows nothing of
optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from amp_patch.common.warn_once import warn_once
from amp_patch.distributed.shards import are_equal_here


def tell_of_lost_writes(
    pairs: Iterable[tuple[Tensor, Tensor]],
    wins: Sequence[bool],
    versions: Sequence[int],
    before: Sequence[int | None],
) -> None:
    """Warn of the first half weight that was written to and does not equal its master, which wins.

    Args:
        pairs: each half weight with its master.
        wins: whether the weight is about to follow its master.
        versions: of the weights.
        before: those of the weights when the user was given the masters. None of a pair that was
            loaded since, of which the weight was written to without a loss; pairs that are new
            since have none.
    """
    for (weight, master), master_wins, now, then in zip(
        pairs, wins, versions, before, strict=False
    ):
        is_written = master_wins and then is not None and now != then
        if is_written and not are_equal_here(master.detach().to(weight.dtype), weight):
            warn_once(
                "between two forward passes either a weight or its fp32 master is to be written "
                f"to; got writes to both of a weight of shape {tuple(weight.shape)}, of which that "
                f"to the weight in {weight.dtype} is lost. Write to amp.master_params(optimizer) "
                "alone, or call model(x) between the two."
            )
            return
