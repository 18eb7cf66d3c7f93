"""What left the finite range in a step, where, and what mends it: in words and as JSON.

Knows what was found, and nothing of how.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from amp_patch.scaling.scale_rule import ScaleRule

from .ranges import Range

#: Where it came up: in the model's forward or backward, in what the model was given or holds, in
#: the loss outside of the models, in their gradients' sum, in what the script wrote to them; or it
#: could not be found.
Where = Literal["forward", "backward", "weight", "input", "loss", "sum", "written", "unknown"]
#: Operators that make inf or NaN of 0 in every precision, forward or backward.
_OF_ZERO = {
    *("div", "divide", "log", "log10", "log2", "norm", "pow", "reciprocal", "rsqrt", "sqrt"),
    "true_divide",
}
#: Operators that make NaN of a finite number on the wrong side of a bound: 0, or 1 of the last two.
_OF_DIGITS = {"log", "log10", "log1p", "log2", "pow", "rsqrt", "sqrt", "acos", "asin"}
#: Operators of numbers from -1 to 1, which have no finite gradient at the ends.
_OF_COSINES = {"acos", "asin", "atanh"}
_OF_CAST_OUTPUTS = (
    "Float16 cannot hold the gradients of what was cast, at any loss scale. Keep small what is "
    "raised or exponentiated in the loss, as a log-variance by .clamp(max=10); or take opt_level "
    "'O4', or leave what the model returns in float32: "
    "amp.initialize(..., rules={'modules': {'': 'float'}})."
)
_OF_LARGE_LOSS = (
    "Float16 cannot hold the gradients of this loss even at a loss scale of 1: is the loss a sum "
    "where a mean would do?"
)
_NOTHING_HELPS = (
    "float32 does not help, for it comes out so there, too: look for a division by zero, the "
    "square root or logarithm of 0, acos or asin at 1, the standard deviation of one number or of "
    "equal ones, a softmax over nothing but -inf (a row that is masked throughout), or for values "
    "that grow from step to step (the learning rate)."
)
_OF_OWN_BACKWARD = (
    "float32 around it does not help: this backward is the script's own. Look whether it casts to "
    "float16 (a `.half()`), divides by zero, or what it multiplies by."
)
_OF_OWN_CAST = (
    "The script itself casts to float16 there, where the level would not: leave that out (a "
    "`.half()`, a region, a rule), or bring the values below 65504 (normalize them, say)."
)
#: From a weight that has grown so many times on, the learning rate is suspected first.
_MUCH_GROWTH = 10.0
#: Exponentials, and of what number on each is inf in float32.
_EXPONENTIALS = {"exp": 88.7, "exp2": 128, "expm1": 88.7}
#: What in fp32 makes the step finite; "level" where all is finite in fp32, but what the level keeps
#: in half is not; "script" where that is what the script itself casts to half in every precision.
#: None where that was not tried.
Mend = Literal["module", "model", "level", "script", "nothing"]
#: The half dtypes that the levels cast to; what a script computes in another one is its own doing.
_HALF_OF = {"O1": "float16", "O2": "float16", "O3": "float16", "O4": "bfloat16", "O5": "bfloat16"}


@dataclass(frozen=True)
class Cause:
    """The cause of an overflow.

    Attributes:
        where: see `Where`.
        model: the class of the model, numbered where there are several of a class.
        module: the path of the module, "" for the model itself.
        path: the same as a rules file names it: "1:head" is of the second model.
        called: the path of the module that the script called, "" for the model itself.
        call: which call of the module in its model's forward, from 1.
        operator: the function, such as "linear"; "cast" where a dtype changed.
        is_own: whether it is the backward of the script's own ``autograd.Function``.
        line: the model's own line that calls it, "net.py:12: return x / x.norm()", also where it is
            its backward; "" where the model has none.
        dtype: of what the operator returned.
        level: the opt_level of the model.
        scale: the loss scale; of several steps, where it alone is to blame, the largest.
        fits: the largest power of two that is no overflow as a loss scale; None where that was
            not found, 0 where no scale is.
        mended_by: what computed in fp32 makes this step finite.
        result, operands, inputs, weights: ranges of the operator's result and arguments, the
            arguments of the module and its own parameters.
        note: further words.
        scaling: the rule by which the loss scale moves.
        zero_eps: of a weight, the eps of its optimizer, where that is 0 in the weight's dtype.
        in_half: of a loss, an operator that the script computes in half, "" for none.
        spoiled_by: of a loss that is not finite, the first operator whose saved tensors show it.
        rounded: of a loss, what half has rounded outputs of the model to: 0, 1 or -1.
        is_large: of a loss, whether float32 cannot hold it multiplied by the scale.
        growth: how many times as large as at the first loss the model's largest weight is.
        also: the paths of further modules that must be in fp32 together with the module.
        by_rule: whether a rule of the operator's function mends it as well as the module.
        around: the path of the module around it that must be in fp32 in its place, "" for none.
        stays: whether what the module returns must stay in fp32.
        off_at: of a backward, the loss scale at which it overflows nowhere, where half rounds its
            gradients far off; None elsewhere.
    """

    where: Where
    scale: float
    model: str = ""
    module: str = ""
    path: str = ""
    called: str = ""
    call: int = 1
    operator: str = ""
    is_own: bool = False
    line: str = ""
    dtype: str = ""
    level: str = ""
    fits: float | None = None
    mended_by: Mend | None = None
    result: Range | None = None
    operands: tuple[Range, ...] = ()
    inputs: tuple[Range, ...] = ()
    weights: tuple[Range, ...] = ()
    note: str = ""
    scaling: ScaleRule = ScaleRule()
    zero_eps: float | None = None
    in_half: str = ""
    spoiled_by: str = ""
    rounded: tuple[float, ...] = ()
    is_large: bool = False
    growth: float = 1.0
    also: tuple[str, ...] = ()
    by_rule: bool = False
    around: str = ""
    stays: bool = False
    off_at: float | None = None

    @property
    def key(self) -> Hashable:
        """The same for causes that one mend cures."""
        return self.where, self.model, self.module, self.operator, self.is_loss_scale

    @property
    def is_loss_scale(self) -> bool:
        """Whether nothing but the loss scale is to blame: the unscaled gradient is in range."""
        return self.fits is not None and 1.0 <= self.fits < self.scale

    @property
    def _diverges(self) -> bool:
        """Whether the weights have grown so far that the training may diverge in float32, too."""
        return self.growth >= _MUCH_GROWTH

    @property
    def rule(self) -> dict[str, str]:
        """The rule of a module that mends it, for a rules file or ``rules=``; {} for none."""
        if self.is_loss_scale or self._diverges or self.mended_by not in ("module", "model"):
            return {}
        number = self.path[: len(self.path) - len(self.module)]
        is_model = self.mended_by == "model"
        modules = (self.called,) if is_model else (self.around or self.module, *self.also)
        return {number + module: "float" for module in modules}

    def title(self) -> str:
        """Return one line: where it was."""
        place = f"{self.model}: " if self.model else ""
        module = f"`{self.module}`" if self.module else "the model itself"
        place += module + (f" (call {self.call})" if self.call > 1 else "")
        kinds = " and ".join(self.result.kinds) if self.result is not None else "not finite"
        of = f"`{self.operator}`"
        if self.operator == "cast":
            of = f"the cast to {self.dtype}"
        return {
            "forward": f"{place}: {of} returned {kinds}, in forward",
            "backward": f"{place}: the backward of {of} returned {kinds}",
            "weight": f"{place}: its {self.operator} holds {kinds} in {self.dtype}",
            "input": f"{place}: it was given {kinds}",
            "loss": f"the loss, outside of the model: {self._of_loss(kinds)}",
            "sum": "the sum of gradients: each is finite, and float16 cannot hold their sum",
            "written": "the gradients, after a backward that was finite",
            "unknown": "not found",
        }[self.where]

    def advice(self) -> str:
        """Return what mends it, in a sentence or two."""
        is_large = self.is_large or (self.fits is not None and 0.0 < self.fits < 1.0)
        if self.is_loss_scale:
            advice = _of_loss_scale(self)
        else:
            advice = _of_large_loss(self) if is_large else _ADVICE[self.where](self)
        if not self._diverges:
            return advice
        return (
            f"The model's largest weight is {self.growth:.3g} times what it was in the first step: "
            "is the learning rate too high? Train at O0 to see whether float32 diverges as well. "
            f"If it does not: {_lower(advice)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what JSON can hold."""
        return {
            **dataclasses.asdict(self),
            "title": self.title(),
            "advice": self.advice(),
            "rule": self.rule,
        }

    def __str__(self) -> str:
        lines = [self.title()]
        if self.line:
            lines.append(f"  line: {self.line}")
        # of a weight, an input and a loss by itself the name says all
        of = "operator: " if self.operator and self.where != "weight" else ""
        for words, ranges in (
            (of, (*self.operands, *([self.result] if self.result else []))),
            ("module: ", self.inputs),
            ("weights: ", self.weights),
        ):
            lines += [f"  {words}{one}" for one in ranges]
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join([*lines, f"  mend: {self.advice()}"])

    def _of_loss(self, kinds: str) -> str:
        if not self.operator:
            return f"it is {kinds}"
        of = f"the cast to {self.dtype}" if self.operator == "cast" else f"`{self.operator}`"
        return f"the backward of {of} returned {kinds}"


def _of_loss_scale(cause: Cause) -> str:
    fits = cause.fits or 1.0
    fact = f"It is only the loss scale: a scale of {fits:g} is no overflow."
    if not cause.scaling.dynamic:
        return (
            f"{fact} Yours is static, so every step that it is too high for is skipped. Call "
            f"amp.initialize(..., loss_scale={fits:g}), or give loss_scale='dynamic', which comes "
            "there by itself."
        )
    skips = cause.scaling.overflows_until(cause.scale, fits)
    if skips is None:
        floor = cause.scaling.min_loss_scale
        return (
            f"{fact} Yours stays at min_loss_scale={floor:g}: leave that out of "
            "amp.initialize(...), and a dynamic scale comes there by itself."
        )
    steps = f"{skips} step{'s' * (skips != 1)}"
    return (
        f"{fact} A dynamic scale comes there by itself, with {steps} skipped. "
        f"To skip none, call amp.initialize(..., max_loss_scale={fits:g})."
    )


def _of_large_loss(cause: Cause) -> str:
    if not cause.is_own:
        return _OF_LARGE_LOSS
    return (
        f"Float16 cannot hold what the backward of `{cause.operator}` returns even at a loss scale "
        "of 1: look at what it multiplies by."
    )


def _region(module: str, also: Sequence[str] = ()) -> str:
    around = f"`{module}`" if module else "the model"
    if also:
        *between, last = (f"`{one}`" for one in also)
        around = f"{', '.join([around, *between])} and {last}, each of which overflows by itself,"
    return f"compute {around} in `with amp.float_region():`"


def _of_operator(cause: Cause) -> str:
    if cause.mended_by == "nothing" and cause.is_own:
        return _OF_OWN_BACKWARD
    if cause.mended_by == "nothing":
        is_large = cause.operator in _EXPONENTIALS and _is_inf(cause)
        return _of_exponential(cause.operator) if is_large else _NOTHING_HELPS
    if cause.mended_by == "script":
        return _OF_OWN_CAST
    if cause.off_at is not None:
        return (
            f"{_in_float32(cause)} A loss scale of {cause.off_at:g} is no overflow, but half "
            "precision rounds these gradients far off."
        )
    if _is_in_other_half(cause):
        return _in_float32(cause)
    of_digits = cause.level in ("O4", "O5") or _is_of_digits(cause)
    return (_of_rounding if of_digits else _of_range)(cause)


def _of_range(cause: Cause) -> str:
    """Return the advice at a level that computes in float16."""
    bfloat16 = f"{'O4' if cause.level == 'O1' else 'O5'}: bfloat16 has the range of float32."
    if cause.mended_by == "level" and cause.where == "forward":
        return (
            "float16, to which this level casts, cannot hold such values: bring them below 65504 "
            f"(normalize the input, say), or take {bfloat16}"
        )
    if cause.mended_by == "level":
        return f"{_of_large_loss(cause)} Or take {bfloat16}"
    after = ""
    if cause.mended_by == "model" and cause.where == "forward":
        after = f" `{cause.module}` alone is not enough."
    elif cause.where == "backward" and (cause.mended_by == "model" or _is_inf(cause)):
        after = f" {_of_large_loss(cause)}"
    if _is_of_zero(cause):  # which was rounded for want of range, or of digits
        return f"{_in_float32(cause)}{after} Or try {bfloat16[:-1]}, and fewer digits."
    return f"{_in_float32(cause)}{after} Or train at {bfloat16}"


def _in_float32(cause: Cause) -> str:
    """Return what has to compute in fp32."""
    module = cause.called if cause.mended_by == "model" else cause.around or cause.module
    rule = ""
    if cause.by_rule:
        rule = f', or call amp.initialize(..., rules={{"{cause.operator}": "float"}})'
    after = ""
    if module and cause.level not in ("O0", "O1", "O4"):
        its = "their results" if cause.also else "its result"
        after = f" Hand {its} on in the dtype of the input (`.to(x.dtype)`)."
        if cause.stays:
            after = " Leave its result in float32: half precision cannot hold it."
    return f"{_capital(_region(module, cause.also))}{rule}.{after}"


def _of_rounding(cause: Cause) -> str:
    """Return the advice where digits are lost: of half precision, bfloat16 has the fewest."""
    is_wide = cause.level in ("O4", "O5")
    bound = "at most 1 may be above it"
    if cause.operator not in ("acos", "asin"):
        bound = "a little above 0 may be 0, or below it"
    digits = "bfloat16 has three" if is_wide else "float16 has four"
    rounded = f"{digits} digits, so what should be {bound}."
    if cause.mended_by == "level":
        return f"{_capital(rounded)} Take O1 or O2: float16 has four."
    return f"{_in_float32(cause)} {_capital(rounded)}"


def _of_weight(cause: Cause) -> str:
    if cause.zero_eps == 0.0:
        return (
            "A step before wrote it: the optimizer's eps is 0, so it divides by 0 where every "
            "gradient was 0. Give it an eps, such as 1e-8."
        )
    if cause.zero_eps is not None:
        return (
            f"A step before wrote it: the optimizer's eps={cause.zero_eps:g} is 0 in "
            f"{cause.dtype}, in which this level steps, so it divides by 0. Give the optimizer "
            "eps=1e-4, or take O2 or O5, which step in float32."
        )
    if _is_inf(cause) and cause.dtype != "float32":
        grows = " If it grows from step to step, lower the learning rate."
        if cause.level in ("O1", "O4"):
            return f"It is too large for float16: {_region(cause.module)}, or take O4.{grows}"
        return (
            f"It is too large for float16, in which the level has weights: take O5, or O1.{grows}"
        )
    return (
        "It was so before this step: a step before wrote it (is the learning rate too high?), or a "
        "checkpoint has it."
    )


def _of_input(cause: Cause) -> str:
    look = (
        "Look at what makes it: the data, or what the script computes before the model, such as "
        "another model whose weights hold NaN."
    )
    if cause.dtype != "float16" or not _is_inf(cause):
        return look
    return (
        "It may be too large for float16: compute what makes it in `with amp.float_region():`. "
        f"Else: {_lower(look)}"
    )


def _of_loss(cause: Cause) -> str:
    in_float = "compute the loss in float32: loss_function(model(x).float(), target)."
    if cause.level in ("O1", "O4"):  # which casts the arguments of a product back
        in_float = "compute the loss in `with amp.float_region():`."
    if _is_of_exponential(cause):
        return _of_exponential(cause.spoiled_by) + (
            f" Or `{cause.in_half}`, which is in half precision, made it so large: {in_float}"
            if cause.in_half
            else ""
        )
    if cause.rounded:
        return _of_rounded_outputs(cause)
    if cause.operator == "cast" and cause.dtype == "float16":
        return _OF_CAST_OUTPUTS
    if cause.dtype in ("float16", "bfloat16"):
        return _capital(in_float)
    return _of_what_is_seen(cause, in_float)


def _of_what_is_seen(cause: Cause, in_float: str) -> str:
    """Return where to look, of a loss that is in float32 at its end."""
    operator = cause.operator or cause.spoiled_by
    if operator in _OF_COSINES:
        return (
            f"In float32, too, `{operator}` has no finite gradient at 1 and -1, and is NaN beyond, "
            f"where rounding may put what should be 1. {_kept_from_one(operator)}"
        )
    look = (
        "Look at the loss and its targets: NaN in the data, a mean of nothing, a division by "
        "zero, a square root or logarithm of 0 (add an epsilon), values that grow from step to "
        "step (the learning rate); "
    )
    if not cause.level:  # what a model has computed is in it, too
        return f"{look.removesuffix('; ')}."
    if cause.in_half:
        return f"{look}or at `{cause.in_half}` in it, which is in half precision: {in_float}"
    if cause.level != "O0" and _is_of_zero_in_loss(cause):
        return (
            f"{look}or at what the model returns: the loss is computed in float32, of numbers that "
            "were rounded to half. Train at O0 to see whether it is finite there."
        )
    return (
        f"{look}precision has no part in it, for it is computed in float32, unless the script "
        "casts what it makes without gradients (targets, rewards, weights) to half."
    )


def _of_exponential(function: str) -> str:
    return (
        f"`{function}` of more than {_EXPONENTIALS[function]} is inf in float32, too: subtract the "
        "largest number from all before it, as logsumexp, log_softmax and cross_entropy do by "
        "themselves."
    )


def _of_rounded_outputs(cause: Cause) -> str:
    """Return the advice where a loss takes a logarithm, say, of what half has rounded to 0."""
    numbers = " and ".join(f"{one:g}" for one in cause.rounded)
    change = (
        "Return logits, and let the loss take the logarithm: log_softmax, cross_entropy, "
        "logsigmoid or binary_cross_entropy_with_logits."
    )
    operator = cause.operator or cause.spoiled_by
    if operator in _OF_COSINES:
        change = _kept_from_one(operator)
    fact = (
        f"{_HALF_OF.get(cause.level, 'half')} rounds numbers to {numbers} that the model returns, "
        f"which may be where the loss is not finite. {change}"
    )
    if cause.mended_by == "nothing":
        mend = "float32 is not enough, for it rounds some so as well."
    else:
        mend = f"Or {_region(cause.called)}."
    return f"{fact} {mend} Else look at the loss and its targets: NaN, or another division by zero."


def _kept_from_one(operator: str) -> str:
    return f"Keep them from 1: x.float().clamp(-1 + 1e-6, 1 - 1e-6).{operator}()."


def _of_sum(cause: Cause) -> str:
    return (
        "A smaller loss scale may hold it: a dynamic one comes there by itself. Else divide each "
        "loss by the number of backward passes that a step takes."
    )


def _of_written(cause: Cause) -> str:
    return (
        "Look at what the script does with the gradients before optimizer.step(): a division by a "
        "norm of 0, say."
    )


def _of_unknown(cause: Cause) -> str:
    return "Run with amp.initialize(..., opt_level='O4') to see whether bfloat16 is finite."


_ADVICE = {
    "forward": _of_operator,
    "backward": _of_operator,
    "weight": _of_weight,
    "input": _of_input,
    "loss": _of_loss,
    "sum": _of_sum,
    "written": _of_written,
    "unknown": _of_unknown,
}


def _is_in_other_half(cause: Cause) -> bool:
    """Return whether the script computes there in a half dtype that its level does not cast to."""
    mends = cause.mended_by in ("module", "model")
    return mends and cause.dtype in {*_HALF_OF.values()} - {_HALF_OF.get(cause.level)}


def _is_inf(cause: Cause) -> bool:
    """Return whether numbers were too large, and none is NaN."""
    return cause.result is not None and "NaN" not in cause.result.kinds


def _is_of_digits(cause: Cause) -> bool:
    """Return whether a finite number was on the wrong side of a bound: rounding has put it there.

    A range that is wider does not help against that.
    """
    return (
        cause.where == "forward"
        and cause.mended_by in ("module", "model")
        and cause.operator in _OF_DIGITS
        and not _is_inf(cause)
        and not any(one.kinds for one in cause.operands)
    )


def _is_of_zero(cause: Cause) -> bool:
    """Return whether an operator was given 0, of which it makes inf or NaN."""
    return cause.operator in _OF_ZERO and any(one.smallest == 0.0 for one in cause.operands)


def _is_of_exponential(cause: Cause) -> bool:
    """Return whether a loss has an exponential that float32 cannot hold."""
    return cause.spoiled_by in _EXPONENTIALS and any(
        one.dtype == "float32" and one.kinds == ("inf",) for one in cause.operands
    )


def _is_of_zero_in_loss(cause: Cause) -> bool:
    """Return whether 0 may have spoiled a loss, which rounding to half may have made."""
    if any("NaN" in one.kinds for one in cause.operands):
        return False
    return cause.operator in _OF_ZERO or any(one.smallest == 0.0 for one in cause.operands)


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _lower(words: str) -> str:
    return words[0].lower() + words[1:]
