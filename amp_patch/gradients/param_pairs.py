"""Which tensor an optimizer steps for each parameter; knows no gradient and no scale."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from itertools import compress
from typing import Literal, NamedTuple

from torch import Tensor


class ParamPairs(NamedTuple):
    """The parameters of one optimizer in its order, each with the tensor that it steps for it.

    Attributes:
        model: the model's parameters, which a backward writes gradients to.
        master: for a half parameter its fp32 master, for any other the parameter itself.
    """

    model: list[Tensor]
    master: list[Tensor]

    @classmethod
    def of(cls, rows: Sequence[tuple[Tensor, Tensor]]) -> ParamPairs:
        """Return parameters that are given each with the tensor that is stepped for it."""
        return cls([param for param, _ in rows], [master for _, master in rows])

    def share(self, taken: set[int], by: Literal["model", "master"]) -> ParamPairs:
        """Return the pairs whose parameter, or master, is not in ``taken``, and add these.

        Args:
            taken: ids of tensors that another optimizer handles.
            by: which of the two is looked up.
        """
        keys = list(map(id, getattr(self, by)))
        new = [key not in taken for key in keys]
        taken.update(keys)
        return self if all(new) else self.select(new)

    def refuse_resized(self) -> None:
        """Raise if a parameter has another shape than its master.

        Raises:
            RuntimeError: as said.
        """
        pairs = zip(self.model, self.master, strict=True)
        found = next((both for both in pairs if both[0].shape != both[1].shape), None)
        if found is not None:
            shape, before = (tuple(one.shape) for one in found)
            raise RuntimeError(
                "a weight that an optimizer steps keeps its shape at a level with fp32 masters; "
                f"got one of {shape}, as param.data = larger leaves it, whose master is of "
                f"{before}. Put torch.nn.Parameter(larger) in its place in the model, and call "
                "optimizer.add_param_group({'params': [it]})."
            )

    def halves(self) -> list[tuple[Tensor, Tensor]]:
        """Return the half parameters, each with its master; none that is stepped itself."""
        return list(compress(zip(*self, strict=True), map(operator.is_not, *self)))

    def select(self, chosen: list[bool]) -> ParamPairs:
        """Return the pairs that are chosen."""
        return ParamPairs(*(list(compress(column, chosen)) for column in self))


class Apart:
    """Remembers the pairs of several optimizers that share nothing: to find that out takes long.

    Lists that `listed` made stand for them, held weakly; nobody changes one.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[list[Tensor]]] = []

    def are(self, every: Sequence[ParamPairs]) -> bool:
        """Return whether no two of these have a parameter, or a master, together."""
        if len(every) == len(self._known):
            for known, pairs in zip(self._known, every, strict=True):
                if known() is not pairs.master:
                    break
            else:
                return True
        taken: dict[Literal["model", "master"], set[int]] = {"model": set(), "master": set()}
        are = all(pairs.share(ids, by) is pairs for by, ids in taken.items() for pairs in every)
        if are:
            self._known = [weakref.ref(pairs.master) for pairs in every]
        return are
