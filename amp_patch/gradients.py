"""Takes gradients from the model's parameters to what the optimizer steps: scaled to unscaled.

Knows pairs of tensors only: a parameter that backward writes to, and the tensor that the
optimizer steps (the same one, or its fp32 master).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import kernels
from .kernels import GradCheck

Pair = tuple[Tensor, Tensor]


class Gradients:
    """The gradients of one optimizer around one or more backward passes.

    ``set_aside`` before a backward, then ``receive`` (unscale what it wrote and add what was
    there), or ``delay`` (leave it scaled for the next backward to add to), or ``put_back``.
    Each takes ``(parameter, stepped tensor)`` for everything the optimizer holds at that moment.

    Attributes:
        delayed_scale: the scale of gradients left scaled, None where there are none.
    """

    def __init__(self) -> None:
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._received: dict[int, int] = {}
        self.delayed_scale: float | None = None
        self._delayed_versions: list[tuple[Tensor, Tensor | None, int]] = []

    def are_delayed(self, pairs: Sequence[Pair]) -> bool:
        """True while gradients are still multiplied by a loss scale."""
        if self.delayed_scale is not None and all(p.grad is None for p, _ in pairs):
            self.forget()  # the user dropped them: model.zero_grad(), p.grad = None
        return self.delayed_scale is not None

    def forget(self) -> None:
        """The gradients were cleared or stepped: nothing is delayed or set aside any more."""
        self._aside.clear()
        self._received.clear()
        self._delayed_versions.clear()
        self.delayed_scale = None

    def set_aside(self, pairs: Sequence[Pair], scale: float) -> None:
        """Make room for a backward of a loss multiplied by ``scale``.

        Unscaled gradients wait aside; a half gradient that a master has received is dropped.
        Delayed gradients stay for the backward to add to, brought to the new scale if it moved.
        """
        if self.are_delayed(pairs):
            self._rescale_delayed(pairs, scale)
            return
        self._aside.clear()
        for param, stepped in pairs:
            grad = param.grad
            if param is not stepped:
                if stepped.grad is not None and self._was_cleared(param, grad):
                    stepped.grad = None
                param.grad = None
            elif grad is not None:
                self._aside.append((param, grad))
                param.grad = None
        self._received.clear()

    def delay(self, scale: float) -> None:
        """Leave what the backward wrote scaled."""
        self.delayed_scale = scale
        self._delayed_versions.clear()

    def put_back(self, pairs: Sequence[Pair]) -> None:
        """The backward failed: drop what it wrote, restore what was there.

        What it added to delayed gradients cannot be taken away again: where it wrote to any,
        all delayed gradients go.
        """
        if self.delayed_scale is not None:
            if all(_unchanged(*noted) for noted in self._delayed_versions):
                return
            self.delayed_scale = None
        for param, _ in pairs:
            param.grad = None
        for param, grad in self._aside:
            param.grad = grad
        self._aside.clear()

    def receive(self, pairs: Sequence[Pair], scale: float) -> tuple[GradCheck, list[Tensor]]:
        """Unscale and check what the backward wrote, and add what was set aside.

        Returns:
            What the check found, and the parameters that got a gradient, in the same order.
        """
        written = [(p, s, p.grad) for p, s in pairs if p.grad is not None]
        sources = [grad for _, _, grad in written]
        targets = [g if p is s else _like_master(g, s) for p, s, g in written]
        check = kernels.unscale(sources, targets, scale)
        self._add_earlier(written, targets)
        self.delayed_scale = None
        return check, [param for param, _, _ in written]

    @torch.no_grad()
    def _add_earlier(self, written: list[tuple[Tensor, Tensor, Tensor]], new: list[Tensor]) -> None:
        """Add what was there before the backward: gradients set aside, or a master's own."""
        aside = {id(param): (param, grad) for param, grad in self._aside}
        sums: list[Pair] = []
        for (param, stepped, grad), target in zip(written, new, strict=True):
            if param is stepped:
                _, earlier = aside.pop(id(param), (param, None))
            else:
                earlier = stepped.grad
                self._received[id(param)] = grad._version
            if earlier is None:
                stepped.grad = target
            elif earlier.is_sparse or target.is_sparse:
                stepped.grad = earlier + target
            else:
                sums.append((earlier, target))
                stepped.grad = earlier
        kernels.accumulate([earlier for earlier, _ in sums], [target for _, target in sums])
        for param, grad in aside.values():
            param.grad = grad
        self._aside.clear()

    def _was_cleared(self, param: Tensor, grad: Tensor | None) -> bool:
        """True where the user cleared a half gradient since its master received it."""
        version = self._received.get(id(param))
        if version is None or grad is None:
            return version is not None
        return grad._version != version and not bool(kernels.values(grad).any())

    @torch.no_grad()
    def _rescale_delayed(self, pairs: Sequence[Pair], scale: float) -> None:
        old = self.delayed_scale
        if old is not None and scale != old:
            grads = [kernels.values(p.grad) for p, _ in pairs if p.grad is not None]
            torch._foreach_mul_(grads, scale / old)
            self.delayed_scale = scale
        self._delayed_versions = [
            (param, param.grad, 0 if param.grad is None else param.grad._version)
            for param, _ in pairs
        ]


def _unchanged(param: Tensor, grad: Tensor | None, version: int) -> bool:
    return param.grad is grad and (grad is None or grad._version == version)


def _like_master(grad: Tensor, master: Tensor) -> Tensor:
    """Return room for ``grad`` in the master's dtype and on its device; sparse stays sparse."""
    if not grad.is_sparse:
        return torch.empty_like(grad, dtype=master.dtype, device=master.device)
    grad = grad.coalesce()
    return torch.sparse_coo_tensor(
        grad.indices(), grad.values().to(master.dtype), grad.shape, is_coalesced=True
    )
