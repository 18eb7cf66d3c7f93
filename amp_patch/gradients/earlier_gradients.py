"""Gradients of earlier passes, out of the way of the next backward; knows no masters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import compress, repeat
from typing import Any

from torch import Tensor

from amp_patch.kernels.getters import GRAD
from amp_patch.warn_once import NOT_THE_USERS, warn_once
from amp_patch.weights.parameter_lists import clear_grads, look_up


class EarlierGradients:
    """What parameters had before a pass; false where none had a gradient.

    Attributes:
        params: those that had one.
        grads: theirs, in the same order.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.params)

    def take(self, params: list[Tensor]) -> bool:
        """Take the gradients from these parameters, in the place of what is here.

        Returns:
            Whether one was a view of memory that others write to (DDP's buckets, at the next
            backward). Of those a copy is taken.
        """
        grads: list[Any] = look_up(GRAD, params)
        have_one = list(map(operator.is_not, grads, repeat(None)))
        if not all(have_one):
            params, grads = list(compress(params, have_one)), list(compress(grads, have_one))
        are_views = any(look_up(_IS_VIEW, grads))
        if are_views:
            grads = [grad.clone() if grad._is_view() else grad for grad in grads]
        # Before they are cleared: an interrupt between the two must lose none.
        self.params, self.grads = params, grads
        clear_grads(params)
        if any(True for _ in reading_hooks(params)):
            _tell_of_hooks()
        return are_views

    def give_back(self) -> None:
        """The pass is over: what got no gradient in it has its earlier one again."""
        now = look_up(GRAD, self.params)
        if any(map(operator.is_, now, repeat(None))):
            for param, grad, new in zip(self.params, self.grads, now, strict=True):
                if new is None:
                    param.grad = grad
        self.clear()

    def put_back(self) -> None:
        """There was no such pass: all have their earlier ones, where these still fit."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad if grad.shape == param.shape else None
        self.clear()

    def drop(self, cleared: Container[int]) -> None:
        """Forget those of parameters with these ids."""
        kept = [id(param) not in cleared for param in self.params]
        self.params = list(compress(self.params, kept))
        self.grads = list(compress(self.grads, kept))

    def clear(self) -> None:
        """Forget all of them."""
        self.params, self.grads = [], []

    def by_param(self) -> dict[int, Tensor]:
        """Return the gradients by the ids of their parameters."""
        return dict(zip(map(id, self.params), self.grads, strict=True))


def reading_hooks(params: Iterable[Tensor]) -> Iterator[Callable[..., Any]]:
    """Yield hooks of scripts by ``register_post_accumulate_grad_hook`` that read ``param.grad``.

    Not those that step: at a scale of 1 they get what a step has added up, else they are refused.
    """
    for hooks in filter(None, map(_HOOKS, params)):
        for hook in hooks.values():
            code: Any = getattr(hook, "__code__", None)
            if code is None or code.co_filename.startswith(NOT_THE_USERS):
                continue
            if "grad" in code.co_names and "step" not in code.co_names:
                yield hook


def _tell_of_hooks() -> None:
    warn_once(
        "a hook of register_post_accumulate_grad_hook sees in `param.grad` what a step has added "
        "up so far, where the scaled losses before were given delay_unscale=True; got a further "
        "scale_loss() block without, in which it sees the gradients of that block alone, for "
        "earlier ones wait aside. Call amp.scale_loss(loss, optimizer, delay_unscale=True) in all "
        "blocks but the last of a step."
    )


_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")
_IS_VIEW = Tensor._is_view
