"""What has to compute in fp32 for a call to be finite: tried out by running it again, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casting import rules, targets
from amp_patch.session import session

from .facts import Mend
from .paths import root_of
from .recorded_calls import Call
from .rerun import Rerun
from .watch import Origin

#: So many modules are tried in fp32 together, before the whole model is.
MOST_TOGETHER = 16


class Mended(NamedTuple):
    """What makes a call finite.

    Attributes:
        by: see `cause.Mend`.
        also: paths in the called model, of the modules that must be in fp32 beside the origin's.
        by_rule: whether a rule of the operator's function does, too.
        around: the path of the module around the origin's that must be in its place; "" for none.
        stays: whether what the module returns must stay in fp32, as by a rule for it.
        line: of the cast by which the script itself is to blame.
    """

    by: Mend | None
    also: tuple[str, ...] = ()
    by_rule: bool = False
    around: str = ""
    stays: bool = False
    line: tuple[str, int] | None = None

    def paths(self, origin: Origin) -> tuple[str, ...]:
        """Return the paths of the modules in fp32, in the called model, where some mend it."""
        return ("",) if self.by == "model" else (self.around or origin.place.module, *self.also)


def mend(call: Call, origin: Origin, grads: Mapping[int, Tensor] | None) -> Mended:
    """Return what has to be in fp32 for the call to be finite, backward too with ``grads``."""
    model = call.model()
    if model is None or origin.source not in ("forward", "backward"):
        return Mended(None)
    together = [origin.place.module]
    while len(together) <= MOST_TOGETHER:
        left = _left(call, [model.get_submodule(one) for one in together], grads)
        if left is None:
            by_rule = len(together) == 1 and _rule_mends(call, origin.place.operator, grads)
            return Mended("module", tuple(together[1:]), by_rule)
        if not _may_join(left, together):
            break
        # Many a model has the same block several times, and each of them overflows by itself.
        inside = [one for one in together[1:] if one.startswith(f"{left.place.module}.")]
        together = [*(one for one in together if one not in inside), left.place.module]
    around = origin.place.module
    while around := around.rpartition(".")[0]:  # what is too large may be handed on inside of it
        if _left(call, [model.get_submodule(around)], grads) is None:
            return Mended("module", around=around)
    return _mend_by_more(call, origin.place.module, grads)


def _mend_by_more(call: Call, module: str, grads: Mapping[int, Tensor] | None) -> Mended:
    """Return what makes the call finite where no module does that hands on half."""
    model = call.model()
    assert model is not None
    # The last module of a model, or one that casts by itself, need not hand on half.
    if _left(call, [model.get_submodule(module)], grads, stays=True) is None:
        return Mended("module", stays=True)
    left = _left(call, [model], grads)
    return Mended("model") if left is None else _not_by_float32(left)


def _not_by_float32(left: Origin) -> Mended:
    """Return what is to blame for what is left where all of the model computes in fp32."""
    if left.place.operator != "cast":
        return Mended("nothing")
    # The level casts what the model is given, and returns, in no line of the model's; and weights
    # that it stores in half, wherever they are used.
    is_level = left.place.line is None or left.is_of_weight
    return Mended("level") if is_level else Mended("script", line=left.place.line)


def _rule_mends(call: Call, function: str, grads: Mapping[int, Tensor] | None) -> bool:
    """Return whether a rule for a function mends the call, and costs little."""
    model = call.model()
    level = None if model is None else session.models.levels.get(root_of(model)[0])
    if level is None or not level.casts_functions or function in rules.HALF:
        return False  # the products that half precision is for
    try:
        targets.user_rule_targets(function)
    except ValueError:
        return False
    return _left(call, [], grads, function) is None


def _left(
    call: Call,
    in_float: Sequence[nn.Module],
    grads: Mapping[int, Tensor] | None,
    function: str = "",
    stays: bool = False,
) -> Origin | None:
    """Return what is still not finite where these modules, or a function, compute in fp32."""
    one = Rerun(call, in_float, function, stays)
    left = one.forward()
    return one.backward(grads) if left is None and grads is not None else left


def _may_join(left: Origin, together: Sequence[str]) -> bool:
    """Return whether another module made what is left by itself, and may need fp32 as well.

    A cast of what is too large already has no part in it.
    """
    module = left.place.module
    if not module or left.source not in ("forward", "backward") or left.place.operator == "cast":
        return False
    return not any(f"{module}.".startswith(f"{one}.") for one in together if one)


def mend_inside(call: Call, origin: Origin, counts: Callable[[Origin], bool]) -> Mend:
    """Return what has to be in fp32 for a module to be finite inside, whatever it returns.

    Args:
        call: of the model.
        origin: what came up in the module.
        counts: whether an origin does.
    """
    model = call.model()
    assert model is not None
    tries: dict[Mend, nn.Module] = {
        "module": model.get_submodule(origin.place.module),
        "model": model,
    }
    for name, module in tries.items():
        again = Rerun(call, [module])
        again.forward()
        if all(
            one.place.module != origin.place.module for one in again.watched.origins if counts(one)
        ):
            return name
    return "nothing"


def differ_by_half(runs: Sequence[Rerun], module: str) -> bool:
    """Tell whether gradients of one run differ from another's by more than half of their norm.

    Those that come to a module and to what a model has before it: what is after it has others.

    Args:
        runs: of one call, forward and backward.
        module: its path.
    """
    some, others = (run.gradients for run in runs)
    squares = []
    for param in _params_up_to(runs[0].model, module):
        if id(param) in others and id(param) in some:
            one, other = some[id(param)].double(), others[id(param)].double()
            squares.append((one - other).square().sum() - other.square().sum() / 4)
    return sum(one.item() for one in squares) > 0.0


def _params_up_to(model: nn.Module, module: str) -> Iterator[Tensor]:
    """Yield the parameters of a module, its parts and what is defined before it."""
    modules = dict(model.named_modules())
    paths = list(modules)
    last = max(index for index, path in enumerate(paths) if f"{path}.".startswith(f"{module}."))
    for path in paths if not module else paths[: last + 1]:
        yield from modules[path].parameters(recurse=False)


_UNTRIED = (
    "Its backward was not tried, for its gradients are not known: of 1 they do not fit in the half "
    "weights. If steps are skipped with it as well, take O5 next."
)


def of_later_backward(call: Call, was_tried: bool) -> str:
    """Return what is to be said of a backward that fp32 does not mend, as it does the forward.

    "" for nothing. Each gradient of the forward's outputs is taken for 1.

    Args:
        call: that overflowed in its forward.
        was_tried: whether the backward is finite with the gradients that the loss has had.
    """
    model = call.model()
    assert model is not None
    one = Rerun(call, [model])
    if one.forward() is not None:
        return ""
    grads = {index: torch.ones_like(output) for index, output in enumerate(one.outputs)}
    left = one.backward(grads)
    if left is None:
        return ""
    if left.result.dtype != "float32":  # of gradients that are not these it is a guess
        return _UNTRIED if left.is_of_weight and not was_tried else ""
    return (
        f"That mends the forward alone: the backward of `{left.place.operator}` is "
        f"{' and '.join(left.result.kinds)} in float32, too, as of a square root at 0."
    )
