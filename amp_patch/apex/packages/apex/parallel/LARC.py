"""Layer-wise adaptive rates around any optimizer. Knows gradients and groups; no loss scale."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LARC(Optimizer):
    """Steps an optimizer with each gradient scaled to the size of its parameter.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017): before the
    step, a parameter p with gradient g, learning rate lr and weight decay d of its group gets

        rate = trust_coefficient * |p| / (|g| + d * |p| + eps)
        rate = min(rate / lr, 1)            with clip (LARC); without it is LARS
        g    = rate * (g + d * p)

    where neither norm is 0; the optimizer itself then decays nothing. A gradient of norm 0, or of
    a parameter of norm 0, is left alone.

    Groups, state and the form of the state dict are the wrapped optimizer's. It may wrap before
    ``amp.initialize``, or what that returned.

    Args:
        optimizer: of parameters on any device, in any dtype; norms are taken in fp32 (float64 of
            float64).
        trust_coefficient: how far a parameter may move, as a part of its norm.
        clip: never step further than the optimizer alone would.
        eps: against a division by 0.

    Attributes:
        optim: the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # Not Optimizer.__init__, which would make groups and state of its own.
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip
        super().__setstate__({})  # torch makes what its hooks need here, as it does in __init__

    # amp looks up what it did to an optimizer by the optimizer: a LARC around one that
    # amp.initialize() returned is found where that one is.
    def __hash__(self) -> int:
        return hash(self.optim)

    def __eq__(self, other: object) -> bool:
        return self.optim is (other.optim if isinstance(other, LARC) else other)

    def __getstate__(self) -> dict[str, Any]:
        """Return what can be pickled; schedulers and amp leave on an object what cannot."""
        names = ("optim", "trust_coefficient", "eps", "clip")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over another's state."""
        self.optim = state["optim"]
        super().__setstate__(state)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # torch has a variable
        """The defaults of the wrapped optimizer."""
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, in torch's form."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, as the wrapped optimizer does."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, then step the wrapped optimizer.

        Args:
            closure: evaluates the loss; the gradients that it makes are scaled.

        Returns:
            What the wrapped optimizer's step returns.
        """
        with self._without_decay() as decays:
            if closure is None:
                self._adapt(decays)
                return self.optim.step()
            evaluate = closure

            def adapted() -> Any:
                loss = evaluate()
                self._adapt(decays)
                return loss

            return self.optim.step(adapted)

    @contextlib.contextmanager
    def _without_decay(self) -> Iterator[list[float]]:
        """Yield each group's weight decay, which is 0 inside the block."""
        groups = [group for group in self.param_groups if "weight_decay" in group]
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        before = [group["weight_decay"] for group in groups]
        try:
            for group in groups:
                group["weight_decay"] = 0
            yield decays
        finally:
            for group, decay in zip(groups, before, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _adapt(self, decays: list[float]) -> None:
        for group, decay in zip(self.param_groups, decays, strict=True):
            for param in group["params"]:
                if param.grad is not None:
                    self._adapt_one(param, param.grad, decay, group["lr"])

    def _adapt_one(self, param: Tensor, grad: Tensor, decay: float, lr: Any) -> None:
        param_norm, grad_norm = _norm(param), _norm(grad)
        rate = self.trust_coefficient * param_norm / (grad_norm + param_norm * decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1)
        # Chosen on the device, which the host need not wait for.
        adapts = (param_norm != 0) & (grad_norm != 0)
        grad.add_(param * (adapts.to(rate.dtype) * decay))
        grad.mul_(torch.where(adapts, rate, 1.0))


def _norm(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm
