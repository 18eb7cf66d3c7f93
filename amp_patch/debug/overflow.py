"""`amp.overflow_report()`: what is known of the last overflows, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_patch.session import session
from amp_patch.step.overflow_log import NonFinite, Overflow

from .cause import Cause
from .trace import tracer

#: Parameters that a report in words names.
_SHOWN = 10


class OverflowReport:
    """The last overflow of each loss scaler, and the causes that were traced.

    False where there was no overflow.

    Attributes:
        overflows: one for each scaler that had any, in their order.
        causes: each different cause, with how often it was found; only with ``trace_overflow``.
    """

    def __init__(
        self, overflows: Sequence[Overflow], causes: Sequence[tuple[Cause, int]] = ()
    ) -> None:
        self.overflows = list(overflows)
        self.causes = list(causes)

    def __bool__(self) -> bool:
        return bool(self.overflows)

    def __str__(self) -> str:
        if not self.overflows:
            return "No overflow: the gradients of all backward passes were finite."
        lines = [line for one in self.overflows for line in _lines(one)]
        for cause, count in self.causes:
            lines += ["", f"Traced {_times(count)}: {cause}"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what JSON can hold."""
        return {
            "overflows": [
                {
                    **one._asdict(),
                    "params": None if one.params is None else [p._asdict() for p in one.params],
                }
                for one in self.overflows
            ],
            "causes": [{**cause.to_json(), "count": count} for cause, count in self.causes],
        }


def overflow_report() -> OverflowReport:
    """Return what is known of the last overflow of each loss scaler.

    Which parameters' gradients were not finite, with the number of inf and NaN in each; at what
    loss scale, in which step. With ``amp.initialize(..., trace_overflow=True)`` also what module
    and operator caused it.

    A GPU that skips steps by itself tells the host about one step later; this call waits for it.
    Call it before ``optimizer.zero_grad()``: gradients that are gone cannot be counted any more.

    Raises:
        RuntimeError: `amp.initialize` was not called.
    """
    if session.is_off("amp.overflow_report()"):
        return OverflowReport([])
    session.optimizers.settle()
    session.settle()
    return OverflowReport(session.passes.overflows.last(), list(tracer.causes.values()))


def _lines(overflow: Overflow) -> list[str]:
    head = (
        f"Overflow in step {overflow.step_number}, loss scaler {overflow.scaler_id} at "
        f"{overflow.scale:g} ({_times(overflow.skips)} so far): "
    )
    params = overflow.params
    if params is None:
        return [
            f"{head}which gradients is not known, for they were gone when the device told of it."
        ]
    if not params:
        return [f"{head}only the sum of gradients was not finite."]
    lines = [f"{head}{len(params)} of {overflow.total} gradients were not finite."]
    lines += [f"  {_describe(one)}" for one in params[:_SHOWN]]
    if len(params) > _SHOWN:
        lines.append(f"  and {len(params) - _SHOWN} more")
    return lines


def _describe(one: NonFinite) -> str:
    if one.infs is None or one.nans is None:
        return f"{one.name}: {one.kinds} (of {one.numel}; how many is not known any more)"
    counts = [
        f"{count} {kind} ({count / one.numel:.2%})"
        for kind, count in (("inf", one.infs), ("NaN", one.nans))
        if count
    ]
    return f"{one.name}: {' and '.join(counts)} of {one.numel}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
