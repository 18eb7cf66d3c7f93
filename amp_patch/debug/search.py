"""The search for the cause of one overflow: in which order calls are run again, and with what.

Knows nothing of when that is done, which is the tracer's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.session import session

from .cause import Cause
from .later_calls import LaterCalls
from .loss_watch import LossStep, LossWatch
from .mends import Mended, differ_by_half, mend, mend_inside, of_later_backward
from .paths import joined, named, numbered, root_of
from .places import shown_line
from .ranges import Range, kinds_in, largest_scale
from .recorded_calls import Call
from .rerun import Rerun, from_outside
from .undefined import Given, rounded_to
from .watch import Origin

UNSEEN = "One that is compiled, or inside of torch.func, is not: trace without."

_FORWARD_ALONE = (
    "In float32 the forward is finite, and float16 cannot hold the gradients that this loss has of "
    "it, even at a loss scale of 1."
)


class Search:
    """The search in one backward pass.

    Args:
        calls: that its gradients reached, the earliest first.
        number: of the pass.
        scale: of the loss.
        watch: of what is outside of the models.
        kept: all calls that can be run again, in the order in which they ended.
    """

    def __init__(
        self,
        calls: list[Call],
        number: int,
        scale: float,
        watch: LossWatch,
        kept: Sequence[Call],
    ) -> None:
        self._kept = [call for call in kept if call.model() is not None]
        self._calls = [call for call in calls if call.model() is not None]
        self._number, self._scale, self._watch = number, scale, watch

    def find(self) -> Cause | None:
        """Return what came first: in the forwards, in the loss, or in the backwards."""
        for call in self._calls:
            one = Rerun(call)
            origin = one.forward()
            if origin is not None:
                found = self._in_forward(one, call, origin)
                return (self._handed_on(call, found) if origin.source == "input" else None) or found
            if one.lost:
                return self._not_again(one)
        if self._watch.loss and self._watch.loss[0].kinds:
            return self._of_spoiled_loss(self._watch.loss[0])
        if self._watch.found is not None:
            return self._in_loss(self._watch.found)
        for call in reversed(self._calls):
            cause = self._in_backward(call, call.grads[self._number])
            if cause is not None:
                return cause
        return None

    def _in_forward(self, one: Rerun, call: Call, origin: Origin) -> Cause:
        mended = mend(call, origin, None)
        grads = self._felt_by(call)
        again = mend(call, origin, grads) if grads and mended.by in ("module", "model") else mended
        found = self._with_later_calls(
            one, call, origin, mended if again.by == "nothing" else again
        )
        if again.by != mended.by and again.by in ("level", "script"):
            return _noted(found, _FORWARD_ALONE)
        if found.mended_by not in ("module", "model"):
            return found
        return _noted(found, of_later_backward(call, was_tried=bool(grads)))

    def _felt_by(self, call: Call) -> dict[int, Tensor]:
        """Return the gradients of a call's outputs as at a loss scale of 1; {} if not finite.

        Where outputs were inf they may be finite: a loss that clamps, say.
        """
        grads = from_outside(call, call.grads.get(self._number, {}))
        found = {index: grad.float() / self._scale for index, grad in grads.items()}
        return {} if kinds_in(found.values()) else found

    def _with_later_calls(self, one: Rerun, call: Call, origin: Origin, mended: Mended) -> Cause:
        """Return the cause in a forward, its mend tried out through the calls given its result."""
        found = _in_model(one, origin, self._scale, mended)
        if mended.by not in ("module", "model"):
            return found
        after = itertools.dropwhile(lambda other: other is not call, self._kept)
        later = LaterCalls(call, origin, mended, itertools.islice(after, 1, None))
        if later.stuck is not None:
            at = named(later.stuck.model) or "the model"
            line = shown_line(later.stuck.line)
            stuck = replace(found, mended_by=later.stuck.by, by_rule=False, stuck_at=at)
            return replace(stuck, cast_at=line if line != found.line else "")
        needed = tuple(named(model, path) for model, path in later.needed)
        found = replace(found, also_later=needed, by_rule=found.by_rule and not needed)
        if later.untried is None:
            return found
        name = named(later.untried)
        at = f"`{name}`" if name else "the model"
        return _noted(
            found,
            f"Whether {at} bears the mended result was not tried: it was given inf or NaN that no "
            "model has returned as it is, or its call cannot be run again.",
        )

    def _of_spoiled_loss(self, loss: Range) -> Cause:
        """Return the cause where the outputs of the models are finite, and the loss is not."""
        spoiled = self._watch.spoiled_by
        if spoiled is None:
            found = self._kept_inside() or self._without_graph()
            return found or self._of_loss(loss, note=self._unseen())
        is_given = any(one.kinds for one in spoiled.saved)
        if is_given and (found := self._without_graph()) is not None:
            return found
        note = f"The first place that shows it is `{spoiled.operator}`, of these. {self._unseen()}"
        # NaN was not made of a number that is 0
        is_nan = any("NaN" in one.kinds for one in spoiled.saved)
        rounded = {} if is_nan else self._rounded(spoiled.argument)
        return self._of_loss(
            loss,
            operands=spoiled.saved,
            note=note.strip(),
            spoiled_by=spoiled.operator,
            line=shown_line(spoiled.line),
            **rounded,
        )

    def _without_graph(self) -> Cause | None:
        """Return the cause in a model whose result the loss has without gradients, as a target.

        A teacher's, that of DQN's target network, the features of a perceptual loss.
        """
        calls = (one for one in self._kept if one.first_pass <= self._number)
        return self._first_of(calls, "The loss was given it, or what was made of it.")

    def _rounded(self, argument: Given | None) -> dict[str, Any]:
        """Return the first model whose outputs half has rounded to 0, 1 or -1; {} for none.

        An operator of the loss makes inf or NaN of it, though the loss is in float32.

        Args:
            argument: of that operator.
        """
        if argument is None:
            return {}
        for call in self._calls:
            narrow = Rerun(call)
            wide = Rerun(call, [narrow.model])
            root, called = root_of(narrow.model)
            level = session.models.levels.get(root)
            if level is None:
                continue
            narrow.forward()
            wide.forward()
            found: dict[float, bool] = {}
            for one, other in zip(narrow.outputs, wide.outputs, strict=False):
                found |= rounded_to(argument, one, other, level.half_dtype)
            if found:
                return {
                    "rounded": tuple(found),
                    "model": session.models.label_of(root) or type(root).__name__,
                    "module": called,
                    "path": numbered(root, called),
                    "called": called,
                    "mended_by": "nothing" if all(found.values()) else "model",
                }
        return {}

    def _unseen(self) -> str:
        """Return what is to be said of a loss that no recorded call has a part in."""
        return "" if self._calls else f"No call of an initialized model was seen in it. {UNSEEN}"

    def _kept_inside(self) -> Cause | None:
        """Return the cause in a model that keeps for the loss what it does not return."""
        for call in self._calls:
            one = Rerun(call)
            one.forward()
            found = filter(_is_error, one.watched.origins)
            # -inf alone is often a mask, as the logarithm of one
            origin = min(found, key=lambda one: not one.may_hide, default=None)
            if origin is not None:
                mended = Mended(mend_inside(call, origin, _is_error))
                note = "The model does not return it: the loss has it from an attribute, say."
                return replace(_in_model(one, origin, self._scale, mended), note=note)
        return None

    def _not_again(self, one: Rerun) -> Cause:
        """Return the cause where the second run of a call was finite, and the first was not."""
        root, path = root_of(one.model)
        name = session.models.label_of(root) or type(root).__name__
        return Cause(
            "unknown",
            self._scale,
            **_level_of(root),
            note=f"{name}{f', `{path}`,' if path else ''} returned {' and '.join(one.lost)}, and "
            "did not in a second run: it computed with numbers that are gone, such as weights "
            "that the script has written to since.",
        )

    def _handed_on(self, call: Call, found: Cause) -> Cause | None:
        """Return the cause in the first call of the step that returned inf or NaN before this one.

        A GAN's critic is given what the generator made without gradients, or detached; a model that
        conditions on its own guess has made that itself.
        """
        calls = itertools.takewhile(lambda one: one is not call, self._kept)
        return self._first_of(calls, f"{found.model} was given it, or what was made of it.")

    def _first_of(self, calls: Iterable[Call], note: str) -> Cause | None:
        """Return the cause in the first call that returned inf or NaN and that no gradient reached.

        Args:
            calls: the earliest first.
            note: what became of what it returned.
        """
        for call in calls:
            if not call.kinds or call in self._calls:
                continue
            one = Rerun(call)
            try:
                origin = one.forward()
            except RuntimeError as error:  # a tensor of inference mode, that the model has kept
                if "inference" not in str(error).lower():
                    raise
                continue
            if origin is not None:
                cause = self._with_later_calls(one, call, origin, mend(call, origin, None))
                return replace(cause, note=f"{note} {cause.note}".strip())
        return None

    def _in_loss(self, found: LossStep) -> Cause | None:
        """Return the cause where a gradient was not finite before it came to a model."""
        result = next(one for one in found.made if one.kinds)
        fits = found.fits
        told = {"operator": found.operator, "line": shown_line(found.line)}
        if fits is None:
            largest = _peak(self._watch.loss)
            is_large = largest * self._scale > torch.finfo(torch.float32).max
            rounded = {} if is_large else self._rounded(found.argument)
            if not is_large and not rounded and (cause := self._without_graph()) is not None:
                return cause
            operands = (*self._watch.loss, *found.given) if is_large else found.given
            return self._of_loss(result, operands=operands, is_large=is_large, **told, **rounded)
        if fits < 1.0:
            return self._of_loss(result, operands=found.given, fits=fits, **told)
        # What was cast has the shape of an output: look whether the model bears it unscaled.
        for call in reversed(self._calls):
            grads = {
                index: unscaled.to(grad.dtype)
                for index, grad in call.grads[self._number].items()
                for unscaled in found.cast
                if grad.shape == unscaled.shape
            }
            one = Rerun(call)
            one.forward()
            origin = one.backward(grads) if grads else None
            if origin is not None:
                return _in_model(one, origin, self._scale, mend(call, origin, grads))
            fits = min(fits, largest_scale(one.watched.peak))
        return self._of_loss(result, operands=found.given, fits=fits, **told)

    def _in_backward(self, call: Call, grads: Mapping[int, Tensor]) -> Cause | None:
        grads = from_outside(call, grads)
        one = Rerun(call)
        one.forward()
        if self._is_sum_of_finite(grads):
            root = root_of(one.model)[0]
            name = session.models.label_of(root) or type(root).__name__
            note = f"They meet at an output of {name}, of which the loss has several parts."
            return Cause("sum", self._scale, **_level_of(root), note=note)
        origin = one.backward(grads)
        if origin is None:
            return None
        unscaled = {index: grad / self._scale for index, grad in grads.items()}
        other = Rerun(call)
        other.forward()
        real = other.backward(unscaled)
        if real is None:
            fits = largest_scale(other.watched.peak)
            mended = self._of_rounding(call, origin, grads, fits)
            if mended is None:
                return _in_model(one, origin, self._scale, Mended(None), fits)
            return replace(_in_model(one, origin, self._scale, mended), off_at=fits)
        # Whatever the scale: the first at the present one may be another.
        return _in_model(other, real, self._scale, mend(call, real, unscaled))

    def _is_sum_of_finite(self, grads: Mapping[int, Tensor]) -> bool:
        """Tell whether gradients that every operator of the loss has made finite add up to inf.

        Autograd adds up in float16 what comes back to an output from several places.
        """
        kinds = kinds_in(one for one in grads.values() if one.dtype is torch.float16)
        return self._watch.is_whole and "NaN" not in kinds and bool(kinds)

    def _of_rounding(
        self, call: Call, origin: Origin, grads: Mapping[int, Tensor], fits: float
    ) -> Mended | None:
        """Return what has to be in fp32 where half has made a backward too large by its rounding.

        As that of ``log(1 - sigmoid(x))``, whose argument it rounds to 0. None where gradients are
        right, but for their size.

        Args:
            call, origin, grads: at the present scale.
            fits: the scale at which gradients are in range.
        """
        model = call.model()
        assert model is not None
        smaller = {index: grad * (fits / self._scale) for index, grad in grads.items()}
        runs = [Rerun(call), Rerun(call, [model.get_submodule(origin.place.module)])]
        for one in runs:
            if one.forward() is not None or one.backward(smaller) is not None:
                return None
        if not differ_by_half(runs, origin.place.module):
            return None
        mended = mend(call, origin, grads)
        return mended if mended.by in ("module", "model") else None

    def _of_loss(self, result: Range, **more: Any) -> Cause:
        return Cause(
            "loss",
            self._scale,
            dtype=result.dtype,
            **self._level(),
            result=result,
            in_half=self._watch.in_half,
            **more,
        )

    def _level(self) -> dict[str, Any]:
        models = [call.model() for call in self._calls]
        return next((_level_of(root_of(one)[0]) for one in models if one is not None), {})


def _in_model(
    one: Rerun, origin: Origin, scale: float, mended: Mended, fits: float | None = None
) -> Cause:
    assert origin.source != "mask"
    root, called = root_of(one.model)
    module = joined(called, origin.place.module)
    return Cause(
        origin.source,
        scale,
        model=session.models.label_of(root) or type(root).__name__,
        module=module,
        path=numbered(root, module),
        called=called,
        call=origin.place.call,
        operator=origin.place.operator or origin.result.name,
        is_own=origin.place.is_own,
        line=shown_line(origin.place.line),
        dtype=origin.result.dtype,
        **_level_of(root),
        fits=fits,
        mended_by=mended.by,
        also=tuple(joined(called, module) for module in mended.also),
        by_rule=mended.by_rule,
        around=joined(called, mended.around) if mended.around else "",
        stays=mended.stays,
        cast_at=shown_line(mended.line) if mended.line != origin.place.line else "",
        result=origin.result,
        operands=origin.operands,
        inputs=origin.inputs,
        weights=origin.weights,
        zero_eps=_zero_eps(one.model, origin) if origin.source == "weight" else None,
    )


def _zero_eps(model: nn.Module, origin: Origin) -> float | None:
    """Return the eps of the optimizer that has stepped a weight, if it is 0 in its dtype.

    1e-8, the usual one of Adam, is in float16: such a step divides by 0 (O3).
    """
    params = dict(model.get_submodule(origin.place.module).named_parameters(recurse=False))
    param = params.get(origin.place.operator or origin.result.name)
    if param is None:  # a buffer
        return None
    for optimizer in session.optimizers.steps:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            is_stepped = any(one is param for one in group["params"]) and param in optimizer.state
            if isinstance(eps, float) and is_stepped:
                return None if torch.tensor(eps, dtype=param.dtype) else eps
    return None


def _is_error(origin: Origin) -> bool:
    """Return whether an operator of a forward made what nobody meant."""
    return origin.source == "forward" and not origin.is_meant


def hidden(call: Call, one: Rerun) -> Iterator[Cause]:
    """Yield what came up in a forward, no gradient shows, and is finite in fp32.

    1 / inf is 0: no gradient tells of it. What fp32 makes as well is the script's own matter.

    Args:
        call: one that was run again.
        one: that run, of a pass that did not overflow.
    """
    for origin in list(one.watched.origins):
        if origin.may_hide:
            by = mend_inside(call, origin, lambda other: other.may_hide)
            if by != "nothing":
                yield _in_model(one, origin, 1.0, Mended(by))


def _level_of(model: nn.Module) -> dict[str, Any]:
    """Return what `Facts` say of the model's level; {} for a copy that nobody initialized."""
    level = session.models.levels.get(model)
    if level is None:
        return {}
    has_half = level.casts_functions or level.stores_half
    half = str(level.half_dtype).removeprefix("torch.") if has_half else ""
    return {"level": level.name, "half": half, "casts_functions": level.casts_functions}


def _noted(cause: Cause, words: str) -> Cause:
    """Return a cause with further words, if there are any."""
    return replace(cause, note=f"{cause.note} {words}".strip())


def _peak(ranges: Sequence[Range]) -> float:
    return max((one.largest or 0.0) for one in ranges)
