"""Finds the optimizers that another one wraps, as SAM and Lookahead do.

Changes nothing: `optimizer_step` replaces their methods with those of the one that wraps them.
"""

from __future__ import annotations

from torch.optim import Optimizer


def wrapped_by(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that another holds, or one of those holds, and that step its groups.

    Two step the same groups where their ``param_groups`` are the same objects: an optimizer that
    is held for other parameters, or is not finished, is none of these.
    """
    found = [optimizer]
    for holder in found:  # grows
        for held in vars(holder).values():
            is_new = isinstance(held, Optimizer) and not any(held is one for one in found)
            if is_new and _groups(held) == _groups(optimizer):
                found.append(held)
    return found[1:]


def _groups(optimizer: Optimizer) -> list[int]:
    return list(map(id, getattr(optimizer, "param_groups", ())))
