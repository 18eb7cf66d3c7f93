"""Gradients of earlier passes, out of the way of the next backward; knows no masters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain, compress, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch.casting.gradient_hooks import own
from amp_patch.common.warn_once import NOT_THE_USERS, warn_once
from amp_patch.distributed.shards import any_spread, local
from amp_patch.kernels.getters import GRAD, IS_SPARSE, REQUIRES_GRAD, VERSION
from amp_patch.kernels.without_grad import without_grad
from amp_patch.weights.parameter_lists import (
    are_same,
    clear_grads,
    look_up,
    store_grads,
    stored_grad,
)

from .rounded_gradients import write


class View(NamedTuple):
    """A gradient that is a view of memory that others have, with a copy of what it was."""

    param: Tensor
    grad: Tensor
    copy: Tensor
    version: int


class EarlierGradients:
    """What parameters had before a pass; false where none had a gradient.

    A script may hold these tensors, or the memory that they are views of (one flat buffer for all
    gradients). As in plain PyTorch each is its parameter's gradient again after the pass.

    Attributes:
        params: those that had one.
        grads: theirs, in the same order; of a view a copy, for DDP's backward writes to its memory.
        views: those that are views.
        are_scripts: whether there were any before the first pass of a step, so that no pass has
            made them: half parameters have these tensors again, with what masters have received.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.views: list[View] = []
        self.are_scripts = False

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
        are_views = look_up(_IS_VIEW, grads)
        views: list[View] = []
        if any(are_views):
            copies = [
                grad.clone() if is_view else grad
                for grad, is_view in zip(grads, are_views, strict=True)
            ]
            if self.are_scripts:  # else DDP's, which are made anew
                rows = zip(params, grads, copies, map(VERSION, grads), strict=True)
                views = [View(*row) for row in compress(rows, are_views) if _is_writable(row[1])]
            grads = copies
        # Before they are cleared: an interrupt between the two must lose none.
        self.params, self.grads, self.views = params, grads, views
        clear_grads(params)
        if any(True for _ in reading_hooks(params)):
            _tell_of_hooks()
        return any(are_views)

    def tell_of_writes(self) -> None:
        """The backward is over: warn where a script has written to views, whose numbers wait here.

        Not where the backward has written to their memory, as to DDP's buckets.
        """
        for view in self.views:
            if view.grad._version != view.version and not _shares_memory(view):
                _tell_of_write()

    def take_place(self, params: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        """Let parameters have the tensors of before again, in the place of those of the pass.

        Args:
            params: half parameters, of which masters have received the gradients.
            new: these gradients.

        Returns:
            What the parameters have now; ``new`` itself where nothing has changed. What the tensors
            of before hold is of before, and is to be written over.
        """
        if not self.are_scripts:
            return new
        grads = self.grads
        if self.views or not are_same(self.params, params):
            earlier = {**self.by_param(), **{id(view.param): view.grad for view in self.views}}
            grads = [earlier.get(id(one), grad) for one, grad in zip(params, new, strict=True)]
        if any_spread(grads) or not grads:
            return new
        if any(map(IS_SPARSE, chain(grads, new))) or any(map(REQUIRES_GRAD, new)):
            grads = [
                one if one.is_sparse or one.requires_grad or grad.is_sparse else grad
                for grad, one in zip(grads, new, strict=True)
            ]
        store_grads(params, grads)
        return grads

    def give_back(self) -> None:
        """The pass is over: what got no gradient in it has its earlier one again."""
        now = look_up(GRAD, self.params)
        if any(map(operator.is_, now, repeat(None))):
            for param, grad, new in zip(self.params, self.grads, now, strict=True):
                if new is None:
                    param.grad = grad
        self.end()

    def put_back(self) -> None:
        """There was no such pass: all have their earlier ones, where these still fit."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad if grad.shape == param.shape else None
        self.end()

    def end(self) -> None:
        """Each parameter has its gradient, earlier ones with what was added to them."""
        if self.views:
            self._fill_views()
        self.clear()

    @without_grad
    def _fill_views(self) -> None:
        own = [view for view in self.views if stored_grad(view.param) is view.copy]
        if own:  # else masters have received all
            write([local(view.grad) for view in own], [local(view.copy) for view in own])
        store_grads([view.param for view in own], [view.grad for view in own])

    def drop(self, cleared: Container[int]) -> None:
        """Forget those of parameters with these ids."""
        kept = [id(param) not in cleared for param in self.params]
        self.params = list(compress(self.params, kept))
        self.grads = list(compress(self.grads, kept))
        self.views = [view for view in self.views if id(view.param) not in cleared]

    def clear(self) -> None:
        """Forget all of them."""
        self.params, self.grads, self.views = [], [], []

    def by_param(self) -> dict[int, Tensor]:
        """Return the gradients by the ids of their parameters."""
        return dict(zip(map(id, self.params), self.grads, strict=True))


def reading_hooks(params: Iterable[Tensor]) -> Iterator[Callable[..., Any]]:
    """Yield hooks of scripts by ``register_post_accumulate_grad_hook`` that read ``param.grad``.

    Not those that step: at a scale of 1 they get what a step has added up, else they are refused.
    """
    for hooks in filter(None, map(_HOOKS, params)):
        for hook in map(own, hooks.values()):
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


def _is_writable(view: Tensor) -> bool:
    """Return whether each number of a view has a place of its own: not one that is expanded."""
    return view.layout is torch.strided and 0 not in view.stride()


def _shares_memory(view: View) -> bool:
    new = stored_grad(view.param)
    if new is None or new.is_sparse:
        return False
    return bool(new.untyped_storage()._cdata == view.grad.untyped_storage()._cdata)


def _tell_of_write() -> None:
    warn_once(
        "in a scale_loss() block `p.grad` is what its backward writes, and a gradient of before "
        "waits aside, the memory that it is a view of as well; got a write to that memory in the "
        "block, which is lost. Write to it after the block: `p.grad` lies in it again then."
    )


_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")
_IS_VIEW = Tensor._is_view
