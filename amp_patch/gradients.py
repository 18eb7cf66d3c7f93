"""Takes gradients from the model's parameters to what the optimizer steps: scaled to unscaled.

Knows lists of tensors only: the parameters that backward writes to, and for each the tensor
that the optimizer steps (the same one, or its fp32 master).
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .kernels import GradCheck


class Held(NamedTuple):
    """What an optimizer holds, in its order: parameters, and what it steps for each."""

    params: list[Tensor]
    stepped: list[Tensor]

    def without(self, taken: Container[int]) -> Held:
        """Return the rest after the stepped tensors whose ids are in ``taken``."""
        rest = [(p, s) for p, s in zip(*self, strict=True) if id(s) not in taken]
        return Held([param for param, _ in rest], [stepped for _, stepped in rest])


class Gradients:
    """The gradients of one optimizer around one or more backward passes.

    ``set_aside`` before a backward, then ``receive`` (unscale what it wrote and add what was
    there), or ``delay`` (leave it scaled for the next backward to add to), or ``put_back``.

    Attributes:
        delayed_scale: the scale of gradients left scaled, None where there are none.
    """

    def __init__(self) -> None:
        self.delayed_scale: float | None = None
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._received: dict[int, int] = {}
        self._delayed_versions: list[tuple[Tensor, Tensor | None, int]] = []
        self._room = _Room()

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
        if self.delayed_scale is not None and self.are_delayed(held):
            self._rescale_delayed(held, scale)
            return
        self._aside.clear()
        if self._received:
            self._drop_cleared(held)
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
        grads = [param.grad for param in held.params]
        params = [p for p, grad in zip(held.params, grads, strict=True) if grad is not None]
        stepped = [s for s, grad in zip(held.stepped, grads, strict=True) if grad is not None]
        sources = [grad for grad in grads if grad is not None]
        if all(map(_is, params, stepped)):
            targets = sources
        else:
            targets = self._room.of(sources, params, stepped)
            self._received.update(
                (id(param), grad._version) for param, grad in zip(params, sources, strict=True)
            )
        check = kernels.unscale(sources, targets, scale)
        self._add_earlier(params, stepped, targets)
        self.delayed_scale = None
        return check, params

    @torch.no_grad()
    def _add_earlier(
        self, params: list[Tensor], stepped: list[Tensor], targets: list[Tensor]
    ) -> None:
        """Add what was there before the backward: gradients set aside, or a master's own."""
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
        for param, grad in self._aside:
            if param.grad is None:
                param.grad = grad
        self._aside.clear()

    def _drop_cleared(self, held: Held) -> None:
        """Where the user cleared a half gradient, drop what its master received of it, too."""
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


def _is(a: object, b: object) -> bool:
    return a is b


def _unchanged(param: Tensor, grad: Tensor | None, version: int) -> bool:
    return param.grad is grad and (grad is None or grad._version == version)


#: Elements up to which a master's gradient keeps its memory from one step to the next: to make
#: it anew costs the host as much as the whole arithmetic of a small tensor.
_SMALL = 1 << 14


# Of a tensor that only the room holds: the list's, the loop's, and getrefcount's own argument.
_PLAIN_REFERENCES = 3


class _Room:
    """Tensors for masters' gradients: small ones are used again unless somebody holds one."""

    def __init__(self) -> None:
        self._masters: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._storages: list[int] = []
        self._uses: list[int] = []
        self._addresses: list[int] = []

    def of(
        self, sources: list[Tensor], params: list[Tensor], stepped: list[Tensor]
    ) -> list[Tensor]:
        """Return the tensors that ``sources``, the gradients of ``params``, are received in."""
        kept = self._keep(
            [
                (source, master)
                for source, param, master in zip(sources, params, stepped, strict=True)
                if param is not master and not source.is_sparse and source.numel() <= _SMALL
            ]
        )
        return [
            source
            if param is master
            else kept[id(master)]
            if id(master) in kept
            else _like_master(source, master)
            for source, param, master in zip(sources, params, stepped, strict=True)
        ]

    def _keep(self, small: list[tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        masters = [master for _, master in small]
        same = len(masters) == len(self._masters) and all(map(_is, masters, self._masters))
        if not same or not self._is_free():
            self._masters = masters
            self._kept = [_like_master(source, master) for source, master in small]
            self._storages = [tensor.untyped_storage()._cdata for tensor in self._kept]
            self._uses = [torch._C._storage_Use_Count(storage) for storage in self._storages]
            self._addresses = [master.data_ptr() for master in masters]
        return dict(zip(map(id, masters), self._kept, strict=True))

    def _is_free(self) -> bool:
        """True while nobody holds a kept tensor, a graph with it or a view of it."""
        return (
            [master.data_ptr() for master in self._masters] == self._addresses
            and all(sys.getrefcount(tensor) <= _PLAIN_REFERENCES for tensor in self._kept)
            and [torch._C._storage_Use_Count(storage) for storage in self._storages] == self._uses
            and all(tensor._use_count() == 1 for tensor in self._kept)  # type: ignore[attr-defined]
        )


def _like_master(grad: Tensor, master: Tensor) -> Tensor:
    """Return room for ``grad`` in the master's dtype and on its device; sparse stays sparse."""
    if grad.is_sparse:
        # Not coalesced: the entries of one row are to be added in the master's dtype.
        return grad.to(device=master.device, dtype=master.dtype)
    return torch.empty_like(grad, dtype=master.dtype, device=master.device)
