"""What mends what left the finite range, in a sentence or two.

Knows what was found (`facts`), and nothing of how.
"""

from __future__ import annotations

from collections.abc import Sequence

from .facts import EXPONENTIALS, OF_COSINES, Facts

_CAST_OUTPUTS = (
    "Float16 cannot hold the gradients of what was cast, at any loss scale. Keep small what is "
    "raised or exponentiated in the loss, as a log-variance by .clamp(max=10); or take opt_level "
    "'O4', or leave what the model returns in float32: "
    "amp.initialize(..., rules={'modules': {'': 'float'}})."
)
_LARGE_LOSS = (
    "Float16 cannot hold the gradients of this loss even at a loss scale of 1: is the loss a sum "
    "where a mean would do?"
)
_NOTHING_HELPS = (
    "float32 does not help, for it comes out so there, too: look for a division by zero, the "
    "square root or logarithm of 0, acos or asin at 1, the standard deviation of one number or of "
    "equal ones, a softmax over nothing but -inf (a row that is masked throughout), or for values "
    "that grow from step to step (the learning rate)."
)
_OWN_BACKWARD = (
    "float32 around it does not help: this backward is the script's own. Look whether it casts to "
    "float16 (a `.half()`), divides by zero, or what it multiplies by."
)
_OWN_CAST = (
    "The script itself {casts} {there}, also where all else is in float32: leave that out (a "
    "`.half()`, a region, a rule), or bring {below}."
)


def advice_on(cause: Facts) -> str:
    """Return what mends it."""
    is_large = cause.is_large or (cause.fits is not None and 0.0 < cause.fits < 1.0)
    if cause.is_loss_scale:
        advice = _on_loss_scale(cause)
    else:
        advice = _on_large_loss(cause) if is_large else _ADVICE[cause.where](cause)
    if cause.is_mended_in_part:
        names = " and ".join(f"`{one}`" if one else "the model" for one in cause.enough)
        return (
            f"In {cause.enough_in} of {cause.steps} steps {names} in float32 is enough. In the "
            f"others: {_lower(advice)}"
        )
    if not cause.diverges:
        return advice
    return (
        f"The model's largest weight is {cause.growth:.3g} times what it was in the first step: "
        "is the learning rate too high? Train at O0 to see whether float32 diverges as well. "
        f"If it does not: {_lower(advice)}"
    )


def _on_loss_scale(cause: Facts) -> str:
    fits = cause.fits or 1.0
    fact = f"It is only the loss scale: a scale of {fits:g} is no overflow."
    limit = fits if cause.limit is None else cause.limit
    if not cause.scaling.dynamic and not limit:
        return fact
    if not cause.scaling.dynamic:
        return (
            f"{fact} Yours is static, so every step that it is too high for is skipped. Call "
            f"amp.initialize(..., loss_scale={limit:g}), or give loss_scale='dynamic', which comes "
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
    mend = f" To skip none, call amp.initialize(..., max_loss_scale={limit:g})." if limit else ""
    return f"{fact} A dynamic scale comes there by itself, with {steps} skipped.{mend}"


def _on_large_loss(cause: Facts) -> str:
    if not cause.is_own:
        return _LARGE_LOSS
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


def _on_operator(cause: Facts) -> str:
    if cause.stuck_at:
        given = cause.stuck_at if cause.stuck_at == "the model" else f"`{cause.stuck_at}`"
        fact = f"{_alone(cause)} is not enough, for {given} is given its result."
        return f"{_capital(fact)} {_capital(_on_what_is_left(cause))}"
    return _on_what_is_left(cause)


def _on_what_is_left(cause: Facts) -> str:
    if cause.mended_by == "nothing" and cause.is_own:
        return _OWN_BACKWARD
    if cause.mended_by == "nothing":
        is_large = cause.operator in EXPONENTIALS and cause.is_inf and not cause.stuck_at
        return _on_exponential(cause.operator) if is_large else _NOTHING_HELPS
    if cause.mended_by == "script":
        return _on_own_cast(cause)
    if cause.off_at is not None:
        return (
            f"{_in_float32(cause)} A loss scale of {cause.off_at:g} is no overflow, but half "
            "precision rounds these gradients far off."
        )
    if cause.is_in_other_half:
        return _in_float32(cause)
    of_digits = cause.half == "bfloat16" or cause.is_of_digits
    return (_on_rounding if of_digits else _on_range)(cause)


def _on_own_cast(cause: Facts) -> str:
    casts, below = "casts to float16", "the values below 65504 (normalize them, say)"
    if cause.where == "backward":
        casts = "has cast to float16 what is cast back"
        below = "the gradients below 65504 (a mean where the loss is a sum, say)"
    there = f"at {cause.cast_at}" if cause.cast_at else "there"
    return _OWN_CAST.format(casts=casts, there=there, below=below)


def _on_range(cause: Facts) -> str:
    """Return the advice at a level that computes in float16."""
    level = "O4" if cause.casts_functions else "O5"
    bfloat16 = f"{level}: bfloat16 has the range of float32."
    if cause.level == level:  # which the script has told to take float16
        bfloat16 = f"{level} as it is: bfloat16 has the range of float32."
    if cause.mended_by == "level" and cause.where == "forward":
        return (
            "float16, to which this level casts, cannot hold such values: bring them below 65504 "
            f"(normalize the input, say), or take {bfloat16}"
        )
    if cause.mended_by == "level":
        return f"{_on_large_loss(cause)} Or take {bfloat16}"
    after = ""
    if cause.mended_by == "model" and cause.where == "forward":
        after = f" `{cause.module}` alone is not enough."
    elif cause.where == "backward" and (cause.mended_by == "model" or cause.is_inf):
        after = f" {_on_large_loss(cause)}"
    if cause.is_of_zero:  # which was rounded for want of range, or of digits
        return f"{_in_float32(cause)}{after} Or try {bfloat16[:-1]}, and fewer digits."
    return f"{_in_float32(cause)}{after} Or train at {bfloat16}"


def _in_float32(cause: Facts) -> str:
    """Return what has to compute in fp32."""
    module = cause.called if cause.mended_by == "model" else cause.around or cause.module
    rule = ""
    if cause.by_rule:
        rule = f', or call amp.initialize(..., rules={{"{cause.operator}": "float"}})'
    after = ""
    if module and cause.half and not cause.casts_functions:
        its = "their results" if cause.also else "its result"
        after = f" Hand {its} on in the dtype of the input (`.to(x.dtype)`)."
        if cause.stays:
            after = " Leave its result in float32: half precision cannot hold it."
    if cause.also_later:
        others = " and ".join(f"`{one}`" for one in cause.also_later)
        after += (
            f" {_capital(_alone(cause))} is not enough: compute {others}, to which its result is "
            "given, in such a block as well."
        )
    return f"{_capital(_region(module, cause.also))}{rule}.{after}"


def _alone(cause: Facts) -> str:
    """Return the words for what was tried in fp32 and mends its own model only."""
    names = [cause.model_key + one for one in cause.in_float]
    return f"{' and '.join(f'`{one}`' if one else 'the model' for one in names)} alone"


def _on_rounding(cause: Facts) -> str:
    """Return the advice where digits are lost: of half precision, bfloat16 has the fewest."""
    is_wide = cause.half == "bfloat16"
    bound = "at most 1 may be above it"
    if cause.operator not in ("acos", "asin"):
        bound = "a little above 0 may be 0, or below it"
    digits = "bfloat16 has three" if is_wide else "float16 has four"
    rounded = f"{digits} digits, so what should be {bound}."
    if cause.mended_by == "level":
        return f"{_capital(rounded)} Take O1 or O2 as they are: float16 has four."
    return f"{_in_float32(cause)} {_capital(rounded)}"


def _on_weight(cause: Facts) -> str:
    if cause.zero_eps == 0.0:
        return (
            "A step before wrote it: the optimizer's eps is 0, so it divides by 0 where every "
            "gradient was 0. Give it an eps, such as 1e-8."
        )
    if cause.zero_eps is not None:
        return (
            f"A step before wrote it: the optimizer's eps={cause.zero_eps:g} is 0 in "
            f"{cause.dtype}, in which this level steps, so it divides by 0. Give the optimizer "
            "eps=1e-4, which keeps NaN out, but lets small gradients step by lr * gradient / eps, "
            "for half rounds their squares to 0; or take O2 or O5, which step in float32."
        )
    if cause.is_inf and cause.dtype == "float16":
        grows = " If it grows from step to step, lower the learning rate."
        if cause.casts_functions:
            return f"It is too large for float16: {_region(cause.module)}, or take O4.{grows}"
        return (
            f"It is too large for float16, in which the level has weights: take O5, or O1.{grows}"
        )
    return (
        "It was so before this step: a step before wrote it (is the learning rate too high?), or a "
        "checkpoint has it."
    )


def _on_input(cause: Facts) -> str:
    look = (
        "Look at what makes it: the data, or what the script computes before the model, such as "
        "another model whose weights hold NaN."
    )
    if cause.dtype != "float16" or not cause.is_inf:
        return look
    return (
        "It may be too large for float16: compute what makes it in `with amp.float_region():`. "
        f"Else: {_lower(look)}"
    )


def _on_loss(cause: Facts) -> str:
    in_float = "compute the loss in float32: loss_function(model(x).float(), target)."
    if cause.casts_functions:  # which casts the arguments of a product back
        in_float = "compute the loss in `with amp.float_region():`."
    if cause.is_of_exponential:
        return _on_exponential(cause.spoiled_by) + (
            f" Or `{cause.in_half}`, which is in half precision, made it so large: {in_float}"
            if cause.in_half
            else ""
        )
    if cause.rounded:
        return _on_rounded_outputs(cause)
    if cause.operator == "cast" and cause.dtype == "float16":
        return _CAST_OUTPUTS
    if cause.dtype in ("float16", "bfloat16"):
        return _capital(in_float)
    return _on_what_is_seen(cause, in_float)


def _on_what_is_seen(cause: Facts, in_float: str) -> str:
    """Return where to look, of a loss that is in float32 at its end."""
    operator = cause.operator or cause.spoiled_by
    if operator in OF_COSINES:
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
    if cause.half and cause.is_of_zero_in_loss:
        return (
            f"{look}or at what the model returns: the loss is computed in float32, of numbers that "
            "were rounded to half. Train at O0 to see whether it is finite there."
        )
    if not cause.casts_functions:
        return (
            f"{look}precision has no part in it, for it is computed in float32, unless a model in "
            "half, or a cast of the script's, has made what has no gradients (targets, rewards, "
            "weights)."
        )
    return (
        f"{look}it is computed in float32, but for what is made without gradients (targets of a "
        f"teacher, rewards, weights): {cause.level} casts functions there, too, also in a model "
        "that nobody initialized. Where there is such, compute it in `with amp.float_region():`."
    )


def _on_exponential(function: str) -> str:
    return (
        f"`{function}` of more than {EXPONENTIALS[function]} is inf in float32, too: subtract the "
        "largest number from all before it, as logsumexp, log_softmax and cross_entropy do by "
        "themselves."
    )


def _on_rounded_outputs(cause: Facts) -> str:
    """Return the advice where a loss takes a logarithm, say, of what half has rounded to 0."""
    numbers = " and ".join(f"{one:g}" for one in cause.rounded)
    change = (
        "Return logits, and let the loss take the logarithm: log_softmax, cross_entropy, "
        "logsigmoid or binary_cross_entropy_with_logits."
    )
    operator = cause.operator or cause.spoiled_by
    if operator in OF_COSINES:
        change = _kept_from_one(operator)
    fact = (
        f"{cause.half or 'half'} rounds numbers to {numbers} that the model returns, "
        f"which may be where the loss is not finite. {change}"
    )
    if cause.mended_by == "nothing":
        mend = "float32 is not enough, for it rounds some so as well."
    else:
        mend = f"Or {_region(cause.called)}."
    return f"{fact} {mend} Else look at the loss and its targets: NaN, or another division by zero."


def _kept_from_one(operator: str) -> str:
    return f"Keep them from 1: x.float().clamp(-1 + 1e-6, 1 - 1e-6).{operator}()."


def _on_sum(cause: Facts) -> str:
    return (
        "A smaller loss scale may hold it: a dynamic one comes there by itself. Else divide each "
        "loss by the number of backward passes that a step takes."
    )


def _on_written(cause: Facts) -> str:
    return (
        "Look at what the script does with the gradients before optimizer.step(): a division by a "
        "norm of 0, say."
    )


def _on_unknown(cause: Facts) -> str:
    return "Run with amp.initialize(..., opt_level='O4') to see whether bfloat16 is finite."


_ADVICE = {
    "forward": _on_operator,
    "backward": _on_operator,
    "weight": _on_weight,
    "input": _on_input,
    "loss": _on_loss,
    "sum": _on_sum,
    "written": _on_written,
    "unknown": _on_unknown,
}


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _lower(words: str) -> str:
    return words[0].lower() + words[1:]
