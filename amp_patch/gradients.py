"""Takes gradients from the model's parameters to what the optimizer steps: scaled to unscaled.

Knows lists of tensors only: the parameters that backward writes to, and for each the tensor
that the optimizer steps (the same one, or its fp32 master).
"""

from __future__ import annotations

import operator
from itertools import repeat
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .kernels import GradCheck


class Held(NamedTuple):
    """What an optimizer holds, in its order: parameters, and what it steps for each."""

    params: list[Tensor]
    stepped: list[Tensor]

    def share(self, taken: set[int], by: Literal["params", "stepped"]) -> Held:
        """Return the rows whose parameter, or stepped tensor, is not in ``taken``, and add these.

        Args:
            taken: ids of tensors that another optimizer handles.
            by: which of the two is looked up.
        """
        rows = zip(*self, getattr(self, by), strict=True)
        rest = [(p, s) for p, s, key in rows if id(key) not in taken]
        taken.update(map(id, getattr(self, by)))
        return Held([param for param, _ in rest], [stepped for _, stepped in rest])


class Gradients:
    """The gradients of one optimizer around one or more backward passes.

    ``drop_cleared`` and ``set_aside`` before a backward, then ``receive`` (unscale what it wrote
    and add what was there) and ``put_unwritten_back``, or ``delay`` (leave it scaled for the next
    backward to add to), or ``put_back``.

    Attributes:
        delayed_scale: the scale of gradients left scaled, None where there are none.
    """

    def __init__(self) -> None:
        self.delayed_scale: float | None = None
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._received: dict[int, int] = {}
        self._delayed_versions: list[tuple[Tensor, Tensor | None, int]] = []

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

    def set_aside(self, held: Held, scale: float) -> None:
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

    def delay(self, scale: float) -> None:
        """Leave what the backward wrote scaled."""
        self.delayed_scale = scale
        self._delayed_versions.clear()

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

    def receive(self, held: Held, scale: float) -> tuple[GradCheck, list[Tensor]]:
        """Unscale and check what the backward wrote, and add what was set aside.

        Returns:
            What the check found, and the parameters that got a gradient, in the same order.
        """
        params, stepped = held
        grads = [param.grad for param in params]
        sources = [grad for grad in grads if grad is not None]
        if len(sources) < len(grads):
            params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
            stepped = [s for s, grad in zip(stepped, grads, strict=True) if grad is not None]
        if all(map(operator.is_, params, stepped)):
            targets = sources
            check = kernels.unscale(sources, sources, scale)
        else:
            self._received.update(zip(map(id, params), map(_VERSION, sources), strict=True))
            check, targets = self._receive(params, stepped, sources, scale)
        self._add_earlier(params, stepped, targets)
        self.delayed_scale = None
        return check, params

    def _receive(
        self, params: list[Tensor], stepped: list[Tensor], sources: list[Tensor], scale: float
    ) -> tuple[GradCheck, list[Tensor]]:
        """Unscale half gradients into new fp32 ones, and those of fp32 parameters in place."""
        rows = zip(sources, params, stepped, strict=True)
        if all(map(_IS_CPU, sources)) and not any(map(_IS_SPARSE, sources)):
            # A cast per tensor is what a bulk copy makes on the CPU, too.
            targets = [g if p is master else g.float() for g, p, master in rows]
            return kernels.unscale(targets, targets, scale), targets
        targets = [g if p is master else _receiver(g, master) for g, p, master in rows]
        return kernels.unscale(sources, targets, scale), targets

    @torch.no_grad()
    def _add_earlier(
        self, params: list[Tensor], stepped: list[Tensor], targets: list[Tensor]
    ) -> None:
        """Add what was there before the backward: gradients set aside, or a master's own."""
        earlier_grads = [master.grad for master in stepped]
        if not self._aside and all(map(operator.is_, earlier_grads, repeat(None))):
            for master, target in zip(stepped, targets, strict=True):
                master.grad = target
            return
        if not self._aside and all(map(operator.is_, earlier_grads, targets)):
            return
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

    def put_unwritten_back(self) -> None:
        """Restore the gradients that were set aside for a backward that did not write to them."""
        for param, grad in self._aside:
            if param.grad is None:
                param.grad = grad
        self._aside.clear()

    def drop_cleared(self, held: Held) -> None:
        """Where the user cleared a half gradient, drop what its master received of it, too."""
        if self.are_delayed(held) or not self._received:
            return
        for param, master in zip(*held, strict=True):
            version = self._received.get(id(param))
            if param is master or version is None:
                continue
            grad = param.grad
            if grad is None or (grad._version != version and not kernels.values(grad).any()):
                master.grad = None
                del self._received[id(param)]

    @torch.no_grad()
    def _rescale_delayed(self, held: Held, scale: float) -> None:
        old = self.delayed_scale
        if old is not None and scale != old:
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


def _unchanged(param: Tensor, grad: Tensor | None, version: int) -> bool:
    return param.grad is grad and (grad is None or grad._version == version)


def _receiver(grad: Tensor, master: Tensor) -> Tensor:
    """Return a tensor for a master's gradient, which a bulk copy is still to fill if it is dense.

    A sparse gradient is not coalesced: the entries of one row are to be added in fp32.
    """
    if grad.is_sparse:
        return grad.to(device=master.device, dtype=master.dtype, copy=True)
    return torch.empty_like(grad, dtype=master.dtype, device=master.device)


_IS_CPU = operator.attrgetter("is_cpu")
_VERSION = operator.attrgetter("_version")
_IS_SPARSE = operator.attrgetter("is_sparse")
