"""What was found out about what left the finite range in a step.

Knows no words for it: `advice` has those, and nothing of how it was found.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from amp_patch.scaling.scale_rule import ScaleRule

from .ranges import Range

#: Where it came up: in the model's forward or backward, in what the model was given or holds, in
#: the loss outside of the models, in their gradients' sum, in what the script wrote to them; or it
#: could not be found.
Where = Literal["forward", "backward", "weight", "input", "loss", "sum", "written", "unknown"]
#: Operators that make inf or NaN of 0 in every precision, forward or backward.
_MAKE_NONFINITE_OF_ZERO = {
    *("div", "divide", "log", "log10", "log2", "norm", "pow", "reciprocal", "rsqrt", "sqrt"),
    "true_divide",
}
#: Operators that make NaN of a finite number on the wrong side of a bound: 0, or 1 of the last two.
_HAVE_A_BOUND = {"log", "log10", "log1p", "log2", "pow", "rsqrt", "sqrt", "acos", "asin"}
#: Operators of numbers from -1 to 1, which have no finite gradient at the ends.
OF_COSINES = {"acos", "asin", "atanh"}
#: From a weight that has grown so many times on, the learning rate is suspected first.
_MUCH_GROWTH = 10.0
#: Exponentials, and of what number on each is inf in float32.
EXPONENTIALS = {"exp": 88.7, "exp2": 128, "expm1": 88.7}
#: What in fp32 makes the step finite; "level" where all is finite in fp32, but what the level keeps
#: in half is not; "script" where that is what the script itself casts to half in every precision.
#: None where that was not tried.
Mend = Literal["module", "model", "level", "script", "nothing"]


@dataclass(frozen=True)
class Facts:
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
        level: the opt_level of the model, "" where there is none.
        half: the half dtype to which that level casts, or in which it stores; "" for none.
        casts_functions: whether it casts the arguments of functions, as O1 and O4 do.
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
        also_later: modules of later calls, which were given the result, that must be in fp32 as
            well, as a rules file names them.
        stuck_at: the later call, as a rules file names its model, that cannot hold what the module
            returns in fp32; "" for none, and "the model" for the only one.
        off_at: of a backward, the loss scale at which it overflows nowhere, where half rounds its
            gradients far off; None elsewhere.
        cast_at: another line than that, at which the script itself casts to half; "" for none.
        limit: the loss scale that is advised for all causes of a run; None for `fits`, 0 where the
            words for another one have it.
        steps: in how many overflows it was found.
        enough: modules, as a rules file names them, that mend most of these, computed in fp32.
        enough_in: how many they mend.
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
    half: str = ""
    casts_functions: bool = False
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
    also_later: tuple[str, ...] = ()
    stuck_at: str = ""
    off_at: float | None = None
    cast_at: str = ""
    limit: float | None = None
    steps: int = 1
    enough: tuple[str, ...] = ()
    enough_in: int = 0

    @property
    def key(self) -> Hashable:
        """The same for causes that one mend cures."""
        return self.where, self.model, self.module, self.operator, self.is_loss_scale

    @property
    def is_loss_scale(self) -> bool:
        """Whether nothing but the loss scale is to blame: the unscaled gradient is in range."""
        return self.fits is not None and 1.0 <= self.fits < self.scale

    @property
    def diverges(self) -> bool:
        """Whether the weights have grown so far that the training may diverge in float32, too."""
        return self.growth >= _MUCH_GROWTH

    @property
    def rule(self) -> dict[str, str]:
        """The rule of a module that mends it, for a rules file or ``rules=``; {} for none.

        Where nothing mends all of its steps, what mends most of them.
        """
        if self.is_loss_scale or self.diverges:
            return {}
        if self.mended_by not in ("module", "model"):
            return dict.fromkeys(self.enough if self.is_mended_in_part else (), "float")
        modules = (*(self.model_key + module for module in self.in_float), *self.also_later)
        return dict.fromkeys(modules, "float")

    @property
    def is_mended_in_part(self) -> bool:
        """Whether modules in fp32 mend at least half of its steps, and not all."""
        is_part = self.mended_by not in ("module", "model") and bool(self.enough_in)
        return is_part and not self.diverges and 2 * self.enough_in >= self.steps

    @property
    def model_key(self) -> str:
        """What stands before the path of a module in a rules file: "1:", or nothing."""
        return self.path[: len(self.path) - len(self.module)]

    @property
    def in_float(self) -> tuple[str, ...]:
        """The paths of the modules of its model that mend it, computed in fp32."""
        is_model = self.mended_by == "model"
        return (self.called,) if is_model else (self.around or self.module, *self.also)

    @property
    def is_in_other_half(self) -> bool:
        """Whether the script computes there in a half dtype that its level does not cast to."""
        mends = self.mended_by in ("module", "model")
        return mends and self.dtype in ("float16", "bfloat16") and self.dtype != self.half

    @property
    def is_inf(self) -> bool:
        """Whether numbers were too large, and none is NaN."""
        return self.result is not None and "NaN" not in self.result.kinds

    @property
    def is_of_digits(self) -> bool:
        """Whether a finite number was on the wrong side of a bound: rounding has put it there.

        A range that is wider does not help against that.
        """
        return (
            self.where == "forward"
            and self.mended_by in ("module", "model")
            and self.operator in _HAVE_A_BOUND
            and not self.is_inf
            and not any(one.kinds for one in self.operands)
        )

    @property
    def is_of_zero(self) -> bool:
        """Whether an operator was given 0, of which it makes inf or NaN."""
        return self.operator in _MAKE_NONFINITE_OF_ZERO and any(
            one.smallest == 0.0 for one in self.operands
        )

    @property
    def is_of_exponential(self) -> bool:
        """Whether a loss has an exponential that float32 cannot hold."""
        return self.spoiled_by in EXPONENTIALS and any(
            one.dtype == "float32" and one.kinds == ("inf",) for one in self.operands
        )

    @property
    def is_of_zero_in_loss(self) -> bool:
        """Whether 0 may have spoiled a loss, which rounding to half may have made."""
        if any("NaN" in one.kinds for one in self.operands):
            return False
        return self.operator in _MAKE_NONFINITE_OF_ZERO or any(
            one.smallest == 0.0 for one in self.operands
        )
