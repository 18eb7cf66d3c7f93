"""Drawn passes of one optimizer, and parameters as these leave them."""

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.weights.lazy_gradients import LazyGradients


class Pass(NamedTuple):
    """What one pass of an optimizer finds.

    Attributes:
        powers: of two, of which the parameters' scaled gradients are made.
        scale: of the loss; None: of none, and no overflow counts.
        oddity: what is not as in most steps, see `ODDITIES`.
    """

    powers: tuple[int, int, int]
    scale: float | None
    oddity: str


#: What the script does, and the one after which a step and `zero_grad` follow, most often.
ODDITIES = (
    "no gradient",
    "no gradient at the last",
    "sparse",
    "sparse at the last",
    "a master has one",
    "held",
    "delayed",
    "no step",
    "not cleared",
    "no step, not cleared",
)
PASSES = st.lists(
    st.builds(
        Pass,
        st.tuples(*[st.integers(-6, 14)] * 3),
        st.sampled_from([8.0, 2.0**14, 1.0, 0.25, None]),
        st.sampled_from(["", "", "", "", *ODDITIES]),
    ),
    min_size=3,
    max_size=6,
)


class Received:
    """Parameters of one optimizer, as passes leave them.

    Args:
        is_lazy: whether masters' gradients wait.
        in_place: how many parameters are stepped themselves.
    """

    def __init__(self, is_lazy: bool, in_place: int) -> None:
        self.lazy = LazyGradients() if is_lazy else None
        halves = [nn.Parameter(torch.zeros(n, 2, dtype=torch.float16)) for n in (3, 1, 2)]
        make = self.lazy.parameter if self.lazy else nn.Parameter
        masters: list[Tensor] = [make(half.detach().float(), True) for half in halves]
        for row in range(3 - in_place, 3):
            halves[row] = masters[row] = nn.Parameter(halves[row].detach().float())
        self.pairs = ParamPairs([*halves], masters)
        self.gradients = Gradients(self.lazy)
        self.held: Any = None
        self.kept: list[Any] = []

    def run(self, one: Pass, is_alone: bool) -> None:
        first = self.pairs.master[0]
        if one.oddity == "a master has one" and first.grad is None:
            first.grad = torch.full_like(first, 0.5)
        factor = 1.0 if one.scale is None else one.scale
        self.gradients.set_aside(self.pairs, factor)
        self.backward(one)
        if one.oddity == "delayed":
            self.gradients.delay(self.pairs, factor)
            return
        if is_alone:
            check, params = self.gradients.passes.receive_alone(self.pairs, one.scale)
        else:
            taken = self.gradients.passes.receive(self.pairs, one.scale)
            self.gradients.passes.round_into_halves(taken)
            self.gradients.passes.finish(taken)
            check, params = taken.check, taken.params
        self.kept.append((check.overflow, len(check.grads), list(map(self.name, params))))
        self.kept.append(self.lazy is not None and self.lazy.are_waiting)
        self.kept += [len(self.gradients._aside), self.gradients.scaled.scale]
        self.kept += map(numbers, self.pairs.model)
        if one.oddity == "held":
            self.held = first.grad
        if "no step" not in one.oddity:
            self.step()
            self.kept.append(self.gradients.are_used(self.pairs))
        if "not cleared" not in one.oddity:
            for param in self.pairs.model:
                param.grad = None

    def backward(self, one: Pass) -> None:
        for param, power in zip(self.pairs.model, one.powers, strict=True):
            param.grad = torch.full_like(param, 2.0**power)
        odd = self.pairs.model[-1 if one.oddity.endswith("last") else 0]
        if one.oddity.startswith("no gradient"):
            odd.grad = None
        elif one.oddity.startswith("sparse"):
            odd.grad = torch.ones_like(odd).to_sparse(1)

    def step(self) -> None:
        self.gradients.forget()
        if self.lazy is not None:
            self.lazy.drop()
        for master in self.pairs.master:
            master.grad = None

    def name(self, param: Tensor) -> int:
        return [one is param for one in self.pairs.model].index(True)

    def state(self) -> list[Any]:
        """Return all that the next step, pass or reader of gradients goes by."""
        gradients, pairs = self.gradients, self.pairs
        found: list[Any] = [*self.kept, gradients.are_pending, gradients.may_be_cleared]
        found.append([list(map(self.name, params)) for params, *_ in gradients._received._passes])
        found.append([versions for _, versions, *_ in gradients._received._passes])
        found += [gradients.are_used(pairs), gradients.are_cleared(pairs)]
        found += map(numbers, [*pairs.model, *pairs.master])
        found.append(None if self.held is None else self.held.to_dense().tolist())
        return found


def numbers(param: Tensor) -> list[Any] | None:
    return None if param.grad is None else param.grad.to_dense().tolist()
