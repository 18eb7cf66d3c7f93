"""Takes gradients from the model's parameters to what the optimizer steps: scaled to unscaled.

Knows lists of tensors only: the parameters that backward writes to, and for each the tensor
that the optimizer steps (the same one, or its fp32 master).
"""

from __future__ import annotations

import operator
import warnings
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch import kernels
from amp_patch.kernels import GradCheck
from amp_patch.weights.half_gradients import HalfGradients
from amp_patch.weights.lazy_gradients import LazyGradients, Made, Source, stored_grad

from .gradient_buffers import Held, Reception, same


class Gradients:
    """The gradients of one optimizer around one or more backward passes.

    ``drop_cleared`` and ``set_aside`` before a backward, then ``receive`` (unscale what it wrote
    and add what was there) and ``put_unwritten_back``, or ``delay`` (leave it scaled for the next
    backward to add to), or ``put_back``.

    Args:
        lazy: keeps what masters receive until it is asked for; None: they receive it at once.

    Attributes:
        delayed_scale: the scale of gradients left scaled, None where there are none.
    """

    def __init__(self, lazy: LazyGradients | None = None) -> None:
        self._lazy = lazy
        self.delayed_scale: float | Tensor | None = None
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._received: list[tuple[list[Tensor], list[int]]] = []
        self._reception = Reception(Held([], []))
        self._has_warned = False
        self._used: list[Tensor | TensorWeakRef] = []
        self._delayed_versions: list[tuple[Tensor, Tensor | None, int]] = []

    @property
    def are_pending(self) -> bool:
        """True where a scaled loss has left gradients that no step has used yet."""
        return self.delayed_scale is not None or bool(self._received)

    @property
    def may_be_cleared(self) -> bool:
        """True where gradients that no step has used yet are not as a backward left them."""
        if self.delayed_scale is not None:
            return True
        return not all(_untouched(*noted) for noted in self._received)

    def are_delayed(self, held: Held) -> bool:
        """True while gradients are still multiplied by a loss scale."""
        if self.delayed_scale is not None and all(p.grad is None for p in held.params):
            # The user dropped them (model.zero_grad(), p.grad = None) and all that came before.
            for param, stepped in zip(*held, strict=True):
                if param is not stepped:
                    stepped.grad = None
            self.forget()
        return self.delayed_scale is not None

    def forget(self) -> None:
        """The gradients were cleared or stepped: nothing is delayed or set aside any more."""
        self._aside.clear()
        self._received.clear()
        self._delayed_versions.clear()
        self.delayed_scale = None

    def are_cleared(self, held: Held) -> bool:
        """Return whether there is no gradient, neither at a parameter or a master nor aside."""
        waiting = self._lazy is not None and self._lazy.are_waiting
        return not waiting and not self._aside and not any(map(_has_grad, chain(*held)))

    def set_aside(self, held: Held, scale: float | Tensor) -> None:
        """Make room for a backward of a loss multiplied by ``scale``.

        Unscaled gradients wait aside, and half gradients that a master has received, for the case
        that the backward fails. Delayed gradients stay for the backward to add to, brought to the
        new scale if it moved.
        """
        if self.delayed_scale is not None:
            self._rescale_delayed(held, scale)
            return
        self._aside.clear()
        for param in held.params:
            grad = param.grad
            if grad is not None:
                param.grad = None
                self._aside.append((param, grad))

    def wrote(self, held: Held) -> bool:
        """Return whether a backward has written gradients since `set_aside`."""
        if self.delayed_scale is not None:
            return not all(_unchanged(*noted) for noted in self._delayed_versions)
        return any(map(_has_grad, held.params))

    def delay(self, held: Held, scale: float | Tensor) -> None:
        """Leave what the backward wrote scaled."""
        self._delayed_versions.clear()
        if self.delayed_scale is None and not any(map(_has_grad, held.params)):
            self.put_unwritten_back()  # it reached none of them
        else:
            self.delayed_scale = scale

    def put_back(self, held: Held) -> None:
        """The backward failed: drop what it wrote, restore what was there.

        What it added to delayed gradients cannot be taken away again: where it wrote to any,
        all delayed gradients go.
        """
        if self.delayed_scale is not None:
            if all(_unchanged(*noted) for noted in self._delayed_versions):
                return
            self.delayed_scale = None
        for param in held.params:
            param.grad = None
        for param, grad in self._aside:
            param.grad = grad
        self._aside.clear()
        self._delayed_versions.clear()

    def receive(self, held: Held, scale: float | Tensor) -> tuple[GradCheck, list[Tensor]]:
        """Unscale and check what the backward wrote, and add what was set aside.

        Returns:
            What the check found, and the parameters that got a gradient, in the same order.
        """
        grads: list[Any] = list(map(_GRAD, held.params))
        if not _complete(grads):
            held = held.select([grad is not None for grad in grads])
            grads = [grad for grad in grads if grad is not None]
        if not self._reception.fits(held):
            self._reception = Reception(held)
        check = self._take_in(held, grads, scale)
        if grads and not self._reception.is_in_place:
            if not self._received:
                self._used.clear()
            self._received.append((held.params, list(map(_VERSION, grads))))
            self._used += self._reception.references(grads)
        self.delayed_scale = None
        return check, held.params

    def receive_unscaled(self, held: Held) -> None:
        """Let masters receive what a backward outside of ``scale_loss`` left at their parameters.

        Not where they have gradients. Those that a step has used are left where they are, too.
        None may be pending (`are_pending`).
        """
        if self._lazy is not None and self._lazy.are_waiting:
            return
        used = [noted if isinstance(noted, Tensor) else noted() for noted in self._used]
        not_new = {id(grad) for grad in (*used, None)}
        rows = [
            param is not master and id(stored_grad(param)) not in not_new
            for param, master in zip(*held, strict=True)
        ]
        given = held.select(rows)
        if given.params and _are_none(given.stepped):
            self.receive(given, 1.0)

    def _take_in(self, held: Held, grads: list[Tensor], scale: float | Tensor) -> GradCheck:
        reception, lazy = self._reception, self._lazy
        masters = [] if lazy is None else reception.of_masters(held.stepped)
        if lazy is None or not masters or lazy.are_waiting or not _are_none(masters):
            check = reception.receive(grads, scale)
            if self._aside or not reception.is_in_place:
                check.found_inf += self._add_earlier(held, check.grads)
            return check
        looked = reception.look(grads, scale)
        check = reception.receive(grads, scale) if looked is None else looked
        received = reception.of_masters(check.grads)
        if any(map(_IS_SPARSE, received)):
            check.found_inf += self._add_earlier(held, check.grads)
            return check
        source: Source = Made(received)
        if looked is not None:
            source = HalfGradients(received, scale, looked, reception.rows_of_masters())
        lazy.hold(masters, source)
        if len(masters) < len(grads):
            others = Held(*map(reception.in_place, held))
            check.found_inf += self._add_earlier(others, reception.in_place(check.grads))
        return check

    def _add_earlier(self, held: Held, targets: list[Tensor]) -> list[Tensor]:
        """Add what was there before the backward: gradients set aside, or a master's own.

        Returns:
            Flags as `GradCheck` has them, not 0 where only the sum overflowed.
        """
        params, stepped = held
        if self._aside:
            return self._add(params, stepped, targets)
        earlier_grads = list(map(_GRAD, stepped))
        if same(earlier_grads, targets):
            return []
        if all(map(operator.is_, earlier_grads, repeat(None))):
            for master, target in zip(stepped, targets, strict=True):
                master.grad = target
            return []
        return self._add(params, stepped, targets)

    @torch.no_grad()
    def _add(
        self, params: list[Tensor], stepped: list[Tensor], targets: list[Tensor]
    ) -> list[Tensor]:
        aside = {id(param): grad for param, grad in self._aside}
        sums: list[tuple[Tensor, Tensor]] = []
        for param, master, target in zip(params, stepped, targets, strict=True):
            earlier = aside.get(id(param)) if param is master else master.grad
            if earlier is None:
                master.grad = target
            elif earlier.is_sparse or target.is_sparse:
                master.grad = _sum(earlier, target)
            else:
                sums.append((earlier, target))
                master.grad = earlier
        if sums:
            kernels.accumulate([earlier for earlier, _ in sums], [target for _, target in sums])
        # Two finite numbers of other dtypes do not add up to inf in any training.
        halves = [earlier for earlier, _ in sums if earlier.dtype is torch.float16]
        return kernels.Unscale(halves, halves).run(halves, halves, 1.0).found_inf if halves else []

    def put_unwritten_back(self) -> None:
        """Restore the gradients that were set aside for a backward that did not write to them."""
        for param, grad in self._aside:
            if param.grad is None:
                param.grad = grad
        self._aside.clear()

    def drop_cleared(self, held: Held) -> None:
        """Where the user cleared a half gradient, drop what its master received of it, too."""
        if self.are_delayed(held):
            return
        versions: dict[int, int] = {}
        cleared: list[Tensor] = []
        for params, noted in self._received:
            versions.update(zip(map(id, params), noted, strict=True))
        for param, master in zip(*held, strict=True):
            version, grad = versions.get(id(param)), param.grad
            if (
                param is master
                or version is None
                or (grad is not None and grad._version == version)
            ):
                continue
            if grad is None or not kernels.values(grad).any():
                cleared.append(master)
                del versions[id(param)]
            else:
                self._warn_of_write()
        if cleared and self._lazy is not None and self._lazy.are_waiting:
            self._lazy.discard(cleared)
        for master in cleared:
            master.grad = None
        left = [param for param in held.params if id(param) in versions]
        self._received = [(left, [versions[id(param)] for param in left])]

    def _warn_of_write(self) -> None:
        refused_later = self._lazy is not None and isinstance(self._lazy.source, HalfGradients)
        if not self._has_warned and not refused_later:
            self._has_warned = True
            warnings.warn(
                "What is written to the gradients of half parameters after scale_loss() has no "
                "effect, for the optimizer steps fp32 masters, which have received theirs; got "
                "such a write. Write to those of amp.master_params(optimizer); call "
                "amp.clip_grad_norm_(optimizer, max_norm) to clip; put every backward() of the "
                "optimizer into a scale_loss().",
                stacklevel=2,
            )

    @torch.no_grad()
    def _rescale_delayed(self, held: Held, scale: float | Tensor) -> None:
        old = self.delayed_scale
        if old is not None and not _is_equal(scale, old):
            grads = [kernels.values(p.grad) for p in held.params if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale / old)
            self.delayed_scale = scale
        self._delayed_versions = [
            (param, param.grad, 0 if param.grad is None else param.grad._version)
            for param in held.params
        ]


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """Add two gradients of which one is sparse at least."""
    if a.is_sparse and b.is_sparse:
        # torch adds no sparse half tensors on the CPU; entries of one row count as their sum.
        indices = torch.cat([a._indices(), b._indices()], dim=1)
        entries = torch.cat([a._values(), b._values()])
        return torch.sparse_coo_tensor(indices, entries, a.shape, check_invariants=False)
    return b + a if a.is_sparse else a + b


def _is_equal(scale: float | Tensor, other: float | Tensor) -> bool:
    """Return whether two scales are known to be equal, without waiting for a device."""
    if isinstance(scale, Tensor) or isinstance(other, Tensor):
        return scale is other
    return scale == other


def _unchanged(param: Tensor, grad: Tensor | None, version: int) -> bool:
    return param.grad is grad and (grad is None or grad._version == version)


def _untouched(params: list[Tensor], versions: list[int]) -> bool:
    try:
        return list(map(_GRAD_VERSION, params)) == versions
    except AttributeError:  # None has no version
        return False


def _are_none(masters: list[Tensor]) -> bool:
    """Return whether no gradient is stored, though some may be waiting."""
    return all(map(operator.is_, map(stored_grad, masters), repeat(None)))


def _complete(grads: list[Any]) -> bool:
    return all(map(operator.is_not, grads, repeat(None)))


_GRAD = operator.attrgetter("grad")
_GRAD_VERSION = operator.attrgetter("grad._version")


def _has_grad(param: Tensor) -> bool:
    return stored_grad(param) is not None


_IS_SPARSE = operator.attrgetter("is_sparse")
_VERSION = operator.attrgetter("_version")
