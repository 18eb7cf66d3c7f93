"""Masters whose gradients come when a script asks for one; knows no optimizer and no backward.

Between a backward outside of ``scale_loss`` and the step, gradients are at the half parameters
alone, for a further backward may add to them. A script that clips, logs or merges those of
``optimizer.param_groups`` by hand finds them all the same: for so long, masters are of a class that
asks for them first.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from amp_patch.casting.torch_compile import never_trace
from amp_patch.patching import set_class


class Giver(Protocol):
    """Whose masters they are."""

    def show_gradients(self) -> None:
        """Give masters their gradients; `GradientOffer.withdraw` comes first."""

    def refuse_assignment(self) -> None:
        """Raise where a script must not give a master a gradient of its own."""

    def look_at(self, master: Tensor) -> None:
        """A script reads or sets the gradient of a master, see `GradientOffer.watch`."""


class GradientOffer:
    """Lets masters ask for their gradients, for a while.

    Args:
        giver: is asked; held weakly.
    """

    def __init__(self, giver: Giver) -> None:
        self._giver = weakref.ref(giver)
        self._asking: dict[type[Any], type[Any]] = {}
        self._watched: dict[type[Any], type[Any]] = {}
        self._stepped: Sequence[Tensor] = ()
        self._masters: dict[type[Any], list[Tensor]] = {}  # of these, by their own class
        self._is_made = False

    def make(self, params: Sequence[Tensor], stepped: Sequence[Tensor]) -> None:
        """From now on until `withdraw`, whoever reads or sets a master's gradient asks first.

        Args:
            params: of a model.
            stepped: their masters, of any classes, or themselves. It is not changed in place.
        """
        self.withdraw()
        if stepped is not self._stepped:
            self._stepped, self._masters = stepped, {}
            for param, master in zip(params, stepped, strict=True):
                if param is not master:
                    self._masters.setdefault(type(master), []).append(master)
        self._is_made = True
        for own, masters in self._masters.items():
            set_class(masters, self._asking.get(own) or self._derive(own))

    def watch(self, params: Sequence[Tensor], stepped: Sequence[Tensor]) -> None:
        """From now on until `withdraw`, the giver is told whose gradient is read or set.

        Masters show theirs by then, and a script may clear the half ones. Arguments are those of
        `make`.
        """
        self.make(params, stepped)
        for own, masters in self._masters.items():
            if own not in self._watched:
                members = {**_ASKING, "_giver": self._giver, "grad": _telling(own.grad)}
                self._watched[own] = type(own.__name__, (own,), members)
            set_class(masters, self._watched[own])

    def withdraw(self) -> None:
        """Give the masters back their classes: optimizers choose their kernels by these."""
        if self._is_made:
            self._is_made = False
            for own, masters in self._masters.items():
                set_class(masters, own)

    def _derive(self, own: type[Any]) -> type[Any]:
        asking = type(own.__name__, (own,), {**_ASKING, "_giver": self._giver})
        self._asking[own] = asking
        return asking


def class_of(tensor: Tensor) -> type[Any]:
    """Return the class of a tensor, also while it is a master that asks."""
    own = type(tensor)
    return own.__mro__[1] if "_giver" in vars(own) else own


def _ask(master: Any) -> None:
    asking, giver = type(master), master._giver()
    if giver is not None:
        giver.show_gradients()
    if type(master) is asking:  # the optimizer is gone
        set_class([master], asking.__mro__[1])


@never_trace
def _read_grad(master: Tensor) -> Tensor | None:
    _ask(master)
    return master.grad


@never_trace
def _set_grad(master: Tensor, grad: Tensor | None) -> None:
    asking: Any = type(master)
    giver = asking._giver()
    if giver is not None and grad is not None:
        giver.refuse_assignment()
    _ask(master)
    master.grad = grad


def _telling(own: Any) -> property:
    """Return a gradient as a class has it, whose giver is told before it is read or set."""

    @never_trace
    def read(master: Any) -> Any:
        tell(master)
        return own.__get__(master)

    @never_trace
    def assign(master: Any, grad: Tensor | None) -> None:
        tell(master)
        own.__set__(master, grad)

    def tell(master: Any) -> None:
        giver = master._giver()
        if giver is None:  # the optimizer is gone
            set_class([master], type(master).__mro__[1])
        else:
            giver.look_at(master)

    return property(read, assign, lambda master: assign(master, None))


def _copied(master: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a copy of the master as it is otherwise."""
    _ask(master)
    return copy.deepcopy(master, memo)


def _reduced(master: Tensor, protocol: Any) -> Any:
    _ask(master)
    return master.__reduce_ex__(protocol)


def _shown(master: Tensor) -> str:
    """Return what torch prints: it names another class than its own."""
    _ask(master)
    return repr(master)


_ASKING = {
    "__module__": __name__,
    "grad": property(_read_grad, _set_grad, lambda master: _set_grad(master, None)),
    "__deepcopy__": _copied,
    "__reduce_ex__": _reduced,
    "__repr__": _shown,
}
