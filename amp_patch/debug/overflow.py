"""`amp.overflow_report()`: what is known of the last overflows, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_patch.session import session
from amp_patch.step.overflow_log import NonFinite, Overflow

from . import spoiled_buffers
from .cause import Cause
from .spoiled_buffers import SpoiledBuffer
from .trace import tracer

#: Parameters that a report in words names.
_SHOWN = 10
_ALL_FINITE = "No overflow: the gradients of all backward passes were finite."
_NOBODY_LOOKED = (
    "No step was skipped. At a loss scale of 1 nobody looks whether gradients are inf or NaN: call "
    "amp.initialize(..., trace_overflow=True), or run amp-patch diagnose."
)


class OverflowReport:
    """The last overflow of each loss scaler, and the causes that were traced.

    False where none of these is known.

    Attributes:
        overflows: one for each scaler that had any, in their order.
        causes: each different cause, with how often it was found; only with ``trace_overflow``.
        buffers: those that a forward has made inf or NaN; only with ``trace_overflow``.
        looked: whether somebody has looked at all gradients. At a loss scale of 1 no step is
            skipped, and only ``trace_overflow`` looks at them.
    """

    def __init__(
        self,
        overflows: Sequence[Overflow],
        causes: Sequence[tuple[Cause, int]] = (),
        looked: bool = True,
        buffers: Sequence[SpoiledBuffer] = (),
    ) -> None:
        self.overflows = list(overflows)
        self.causes = list(causes)
        self.looked = looked
        self.buffers = list(buffers)

    def __bool__(self) -> bool:
        return bool(self.overflows or self.causes or self.buffers)

    def __str__(self) -> str:
        if not self:
            return _ALL_FINITE if self.looked else _NOBODY_LOOKED
        parts = ["\n".join(_lines(one)) for one in self.overflows]
        traced = [f"Traced {_times(count)}: {cause}" for cause, count in self.causes]
        buffers = "\n".join(spoiled_buffers.lines([one.to_json() for one in self.buffers]))
        return "\n\n".join(filter(None, ["\n".join(parts), *traced, buffers]))

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
            "buffers": [one.to_json() for one in self.buffers],
        }


def overflow_report() -> OverflowReport:
    """Return what is known of the last overflow of each loss scaler.

    Which parameters' gradients were not finite, with the number of inf and NaN in each; at what
    loss scale, in which step. With ``amp.initialize(..., trace_overflow=True)`` also what module
    and operator caused it, and which buffers a forward has made inf or NaN.

    A GPU that skips steps by itself tells the host about one step later; this call waits for it.
    Call it before ``optimizer.zero_grad()``: gradients that are gone cannot be counted any more.

    Raises:
        RuntimeError: `amp.initialize` was not called.
    """
    if session.lookup.is_off("amp.overflow_report()"):
        return OverflowReport([])
    session.optimizers.settle()
    session.settle()
    return OverflowReport(
        session.passes.overflows.last(),
        tracer.told(),
        looked=tracer.is_on or not any(one.is_one for one in session.scalers),
        buffers=tracer.buffers.found(),
    )


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
