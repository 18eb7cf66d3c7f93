"""How far a metric is from another one, as a share of that; knows no runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Of a loss that ends near 0 a share says nothing: a constant that a script subtracts moves it. The
#: least that a difference is a share of, as a share of what the loss fell by after a quarter of the
#: run, before which it may have come from anywhere.
LEAST = 0.05


def share(value: float, reference: float, losses: Sequence[float] = ()) -> float:
    """Return a signed difference as a share of the reference.

    Args:
        value: such as the final loss of a run.
        reference: the same of the run that it is compared with.
        losses: all of that run's; empty for a metric that is no loss.

    Returns:
        0 where both are the same; inf or -inf where the reference is 0, and nothing else is known.
    """
    if value == reference:
        return 0.0
    finite = sorted(filter(math.isfinite, losses), reverse=True)
    fell = max(finite[len(finite) // 4] - reference, 0.0) if finite else 0.0
    whole = max(abs(reference), LEAST * fell)
    return (value - reference) / whole if whole else math.copysign(math.inf, value)
