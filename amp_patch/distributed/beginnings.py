"""Whether ranks begin alike to train a model in `DistributedDataParallel`.

It would average gradients that are multiplied by different scales, and each rank divide them by its
own: the ranks would train apart, and find no inf to tell of it. So each rank writes what it has to
the store by which the ranks have found each other, and reads later what the others wrote. Nobody
waits for another rank, as in a collective: where one rank calls what the others do not, that would
be for ever. Knows wrappers and texts; no optimizer, no scale.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.distributed

from .process_groups import is_on

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store  # not every build of torch has it

#: How often the others' texts are looked for: a rank that trains without amp writes none.
_LOOKS = 100
#: How many wrappers each process group of this process has had, by its name. Those of an earlier
#: session count, for the store keeps what was written.
_numbered: Counter[str] = Counter()


def next_number(wrapper: Any) -> int:
    """Return which of the wrappers of its process group this is: the same on every rank.

    For all ranks of a group make their wrappers together, in one order.
    """
    if not is_on():
        return 0
    name = _group_of(wrapper).group_name
    _numbered[name] += 1
    return _numbered[name]


class Beginnings:
    """What this rank has begun with, until it is known of the others.

    Attributes:
        open: those; nearly always empty.
    """

    def __init__(self) -> None:
        self.open: list[_Beginning] = []

    def tell(self, wrapper: Any, number: int, held: str) -> None:
        """Write what this rank has at the first backward of a wrapper that shares gradients.

        Args:
            wrapper: of the model.
            number: as `next_number` returned it.
            held: in words that are the same where all is well.
        """
        group, store = _group_of(wrapper), _store()
        if store is None or group.size() == 1:
            return
        path = f"amp_patch/begun/{group.group_name}/{number}"
        keys = [f"{path}/{rank}" for rank in range(group.size())]
        store.set(keys[group.rank()], held)
        self.open.append(_Beginning(store, keys, held))

    def look(self) -> None:
        """Compare what the others have written by now.

        On a CPU that is all, once a backward has shared gradients: each rank writes before. A GPU
        may be behind the host; then it is looked for again.

        Raises:
            RuntimeError: a rank has begun with something else.
        """
        for one in list(self.open):
            texts = one.texts()
            if texts is not None or not one.looks_left:
                self.open.remove(one)
            if texts is not None and any(text != one.held for text in texts):
                _refuse(texts)


@dataclasses.dataclass
class _Beginning:
    """What this rank has written of one wrapper.

    Attributes:
        keys: of all ranks, in their order.
        held: what is written there for this one.
    """

    store: Store
    keys: list[str]
    held: str
    looks_left: int = _LOOKS

    def texts(self) -> list[str] | None:
        """Return what each rank has written; None while one has not."""
        self.looks_left -= 1
        try:
            if not self.store.check(self.keys):
                return None
            return [self.store.get(key).decode() for key in self.keys]
        except RuntimeError:  # the process that keeps the store has ended
            self.looks_left = 0
            return None


def _group_of(wrapper: Any) -> Any:
    group = getattr(wrapper, "process_group", None)  # apex's has none: that of all
    return torch.distributed.group.WORLD if group is None else group


def _store() -> Store | None:
    """Return where ranks have found each other; None where they did without, as by MPI."""
    if not is_on():
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def _refuse(texts: list[str]) -> None:
    """Raise, with what each rank has.

    Raises:
        RuntimeError: always.
    """
    rows = "; ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
    raise RuntimeError(
        "ranks that train one model in DistributedDataParallel must begin alike, or they train "
        f"it apart; got {rows}. Call amp.initialize() with the same opt_level and loss_scale, "
        "and amp.load_state_dict() with the same checkpoint, on every rank."
    )
