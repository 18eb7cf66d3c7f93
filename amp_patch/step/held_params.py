"""The parameters that an optimizer holds now, with their masters; knows no gradient or scale."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.arguments import refuse_half_params
from amp_patch.common.scales import Scale, is_one
from amp_patch.distributed.process_groups import StepRanks, groups_of
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.gradients.true_gradients import TrueGradients
from amp_patch.kernels.getters import REQUIRES_GRAD
from amp_patch.levels import HALVES
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.parameter_lists import Tensors, are_still, listed

#: Gets parameters that have left an optimizer; returns those of them whose gradients are
#: multiplied by a loss scale, with this scale.
LetGo = Callable[[Sequence[Tensor]], Sequence[tuple[Tensor, Scale]]]


class Joined(NamedTuple):
    """A parameter that has come to an optimizer.

    Attributes:
        scale: what its gradient is multiplied by.
        had_grad: whether it had one.
        true: of the block in which it has come, if that keeps its gradient true.
    """

    param: Tensor
    scale: Scale
    had_grad: bool
    true: TrueGradients | None


class Strays(Protocol):
    """Gradients that blocks have written to parameters which no optimizer of theirs held."""

    def follow(
        self, before: Sequence[Tensor], now: Sequence[Tensor], let_go: LetGo
    ) -> list[Joined]:
        """Note that an optimizer holds other parameters.

        Args:
            before, now: the parameters of the model that it holds.
            let_go: is given those that it holds no more.

        Returns:
            New ones.
        """

    def look(self) -> None:
        """Parameters are about to come to an optimizer: let others see that some have left them."""


class HeldParams:
    """Looks at the groups of an optimizer, which scripts change.

    Args:
        optimizer: held weakly.
        masters: of its half parameters; None where it steps the parameters themselves.
        ranks: that step together; None: they follow from the parameters.
        steps_halves: whether half parameters without masters may be trained.

    Attributes:
        masters, steps_halves: as given.
        ranks: as given, or as the parameters say. Right from a call of `pairs` on.
        firsts: of each group the first parameter that has a master. As of the last call of `pairs`.
        joined: parameters that have come to the optimizer; emptied by who takes over the gradients
            that they came with. Likewise.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        ranks: StepRanks | None = None,
        steps_halves: bool = True,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.masters = masters
        self._stepped = listed(())
        self._pairs = self.firsts = ParamPairs(listed(()), listed(()))
        self.steps_halves = steps_halves
        self._frozen: list[Tensor] = []  # half ones without masters: `pairs` sees them unfrozen
        self._ranks_follow = ranks is None
        self.ranks = ranks or StepRanks()
        self._strays: Strays | None = None
        # a weak method: `PartedParams`, whose it is, holds this object
        self._let_go: Callable[[], LetGo | None] = lambda: None
        self._looks = False
        self.joined: list[Joined] = []

    def take_joined(self) -> list[Joined]:
        """Return `joined`, which is empty then."""
        joined, self.joined = self.joined, []
        return joined

    def follow_strays(self, strays: Strays, let_go: LetGo) -> None:
        """Ask from now on for the gradients of parameters that come, and of those held now.

        Args:
            strays: are asked.
            let_go: a method, see `Strays.follow`; held weakly.
        """
        if self._strays is None:
            held = strays.follow((), self.pairs().model, let_go)
            # gradients that are true were there before `amp.initialize`, which has seen to them
            self.joined += [row for row in held if not is_one(row.scale)]
            self._strays, self._let_go = strays, weakref.WeakMethod(let_go)

    def look_at_others(self) -> None:
        """Parameters are about to come; see `Strays.look`.

        Of masters that have left another optimizer that one alone knows which gradients they have.
        """
        if self._strays is not None and not self._looks:
            self._looks = True  # two may have changed groups, and each ask the other
            try:
                self._strays.look()
            finally:
                self._looks = False

    @property
    def are_repeated(self) -> bool:
        """True where a parameter was in the groups more than once, of which torch only warns.

        As of the last call of `pairs`.
        """
        return len(self._pairs.master) < len(self._stepped)

    def pairs(self) -> ParamPairs:
        """Return the parameters that the optimizer holds now, each once, with their masters.

        Raises:
            RuntimeError: a frozen half parameter was unfrozen at a level without masters.
        """
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        if self._frozen and optimizer is not None and any(map(REQUIRES_GRAD, self._frozen)):
            self._follow_unfrozen(optimizer)
        if len(groups) == 1:
            stepped = groups[0]["params"]
        else:
            stepped = list(chain.from_iterable(map(_PARAMS, groups)))
        if not are_still(self._stepped, stepped):
            self._look(groups, stepped)
        return self._pairs

    def with_masters(self, params: Sequence[Tensor]) -> ParamPairs:
        """Return parameters with their masters, also of those that the optimizer holds no more."""
        known = {} if self.masters is None else self.masters.pairs.by_param()
        return ParamPairs(list(params), [known.get(id(param), param) for param in params])

    def look_again(self) -> None:
        """Parameters that it holds may have become half ones."""
        self._stepped = listed(())
        self.pairs()

    def _look(self, groups: list[dict[str, Any]], stepped: Sequence[Tensor]) -> None:
        """The optimizer holds others than those that are known."""
        masters = self.masters
        has_halves = any(one.dtype in HALVES for one in stepped)
        if masters is not None and (has_halves or masters.has_others(stepped)):
            self.look_at_others()
            self._replace_own(groups, masters)
            stepped = list(chain.from_iterable(map(_PARAMS, groups)))
        before = self._stepped, self._pairs
        self._stepped = stepped = listed(stepped)
        once = {id(one): one for one in stepped}  # its gradient is to be divided once
        if len(once) < len(stepped):
            stepped = listed(once.values())
        params = stepped if masters is None else listed(map(masters.pairs.param_of, stepped))
        self._pairs = ParamPairs(params, stepped)
        if self._strays is not None:
            self._tell_of_change(self._strays, *before)
        self.firsts = self._firsts(groups)
        if masters is not None or not self.steps_halves:
            self._frozen = [one for one in stepped if one.dtype in HALVES]
        if self._ranks_follow:
            self.ranks = StepRanks(groups_of(params))

    def _tell_of_change(self, strays: Strays, stepped: Tensors, pairs: ParamPairs) -> None:
        """Tell of what has come and left; if that fails, the next call of `pairs` does it again.

        Args:
            strays: are told.
            stepped, pairs: what the optimizer held before.
        """
        let_go = self._let_go() or _nothing
        try:
            self.joined += strays.follow(pairs.model, self._pairs.model, let_go)
        except BaseException:  # a pending check has found an overflow at the floor of its scale
            self._stepped, self._pairs = stepped, pairs
            raise

    def _firsts(self, groups: list[dict[str, Any]]) -> ParamPairs:
        firsts, masters = ParamPairs([], []), self.masters
        if masters is None:
            return firsts
        for group in groups:
            pairs = ((masters.pairs.param_of(stepped), stepped) for stepped in group["params"])
            found = next((pair for pair in pairs if pair[0] is not pair[1]), None)
            if found is not None:
                firsts.model.append(found[0])
                firsts.master.append(found[1])
        return firsts

    def _replace_own(self, groups: list[dict[str, Any]], masters: MasterWeights) -> None:
        """Put masters into the groups where half parameters or masters of other optimizers are.

        The script has put them there in the place of masters, or beside them, where it looked for
        what is no parameter there; or a model of the optimizer was prepared by a call of its own.
        """
        held = set(map(id, chain.from_iterable(map(_PARAMS, groups))))
        for group in groups:
            given = group["params"]
            replaced = zip(given, masters.replace(given), strict=True)
            group["params"] = [new for old, new in replaced if new is old or id(new) not in held]

    def _follow_unfrozen(self, optimizer: Optimizer) -> None:
        """Half parameters that the optimizer has held, frozen, are to be trained from now on."""
        if self.masters is None:
            refuse_half_params(optimizer, self._frozen)
            return
        for group in optimizer.param_groups:
            group["params"][:] = self.masters.replace(group["params"])


def _nothing(_: Sequence[Tensor]) -> Sequence[tuple[Tensor, Scale]]:
    return ()


_PARAMS = operator.itemgetter("params")
