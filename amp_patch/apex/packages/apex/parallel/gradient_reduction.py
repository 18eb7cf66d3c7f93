"""All-reduces gradients while a backward makes them. Knows parameters; no module, no wrapper."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from amp_patch.common.running_backward import is_in_backward

from .flat_calls import flatten, unflatten


@dataclasses.dataclass(frozen=True)
class Averaging:
    """How gradients of all processes are made one.

    Args:
        always_fp32: sum half gradients in fp32.
        average: divide the sum by the number of processes.
        predivide_factor: how much of that division is done before the sum.
        groups: the process groups that the buckets take turns in; None stands for the world.
    """

    always_fp32: bool = False
    average: bool = True
    predivide_factor: float = 1.0
    groups: Sequence[Any] = (None,)


class _Sum(NamedTuple):
    flat: Tensor  # the gradients of a bucket, then for each of them whether there is one
    work: Any


class GradientReduction:
    """The gradients of parameters, summed over processes bucket by bucket.

    A bucket is sent once all of its gradients are there and all earlier buckets are sent, so all
    processes send them in one order. At the end of the backward what is left is sent, and the
    sums come back. A parameter that got a gradient in some processes counts as 0 in the others;
    one without a gradient anywhere has none afterwards.

    Args:
        averaging: what is done to the gradients.
        bucket_numel: a bucket is full when it has this many elements.
        delay: send no bucket before the end of the backward.
        retain: keep the flat sums; the gradients become views of them.

    Attributes:
        enabled: False leaves gradients alone, to be summed with those of a later backward.
        flat_sums: with ``retain``, what the last backward made, 1-dim each.
    """

    def __init__(
        self, averaging: Averaging, bucket_numel: float, delay: bool, retain: bool
    ) -> None:
        self._averaging = averaging
        self._bucket_numel = bucket_numel
        self._delay = delay
        self._retain = retain
        self.enabled = True
        self.flat_sums: list[Tensor] = []
        self._known: list[Any] = []
        self._hooks: list[Any] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._place: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._is_armed = False
        self._written: set[int] = set()
        self._missing = list(map(len, self._buckets))
        self._sums: list[_Sum] = []
        self._stale: set[int] = set()

    def follow(self, params: Sequence[nn.Parameter]) -> None:
        """Take over the parameters that train, in the model's order; call before each forward."""
        if is_in_backward():
            return  # a checkpoint computes the forward again, inside of a backward
        known = [(id(param), param.dtype, param.device) for param in params]
        if known != self._known:
            self._known = known
            self._buckets = _buckets(params, self._bucket_numel)
            self._place = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket}
            for hook in self._hooks:
                hook.remove()
            # The parameters outlive the wrapper, which reduces nothing once it is dropped.
            note = functools.partial(_note, weakref.ref(self))
            self._hooks = [p.register_post_accumulate_grad_hook(note) for p in params]
        self._begin()  # the last backward may have failed half-way

    def arm(self) -> None:
        """Finish at the end of the backward that runs now.

        Called for the outputs of a forward as well: inside of the backward of a checkpoint, where
        parameters get their gradients, the end would be that of the checkpoint's.
        """
        if self.enabled and not self._is_armed:
            self._is_armed = True
            Variable._execution_engine.queue_callback(self._finish)

    def note(self, param: Tensor) -> None:
        """A backward has added to the gradient of a parameter.

        Raises:
            RuntimeError: to a sparse one.
        """
        place = self._place.get(id(param))
        if not self.enabled or place is None:
            return
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError(
                "apex.parallel.DistributedDataParallel sums dense gradients; got a sparse one of "
                f"shape {tuple(param.shape)}. Build the embedding with sparse=False, or wrap the "
                "model in torch.nn.parallel.DistributedDataParallel."
            )
        self.arm()
        if place < len(self._sums):
            self._stale.add(place)  # added to once more, by another part of a checkpointed model
        elif id(param) not in self._written:
            self._missing[place] -= 1
        self._written.add(id(param))
        while not self._delay and self._next_is_complete():
            self._send(len(self._sums))

    def _next_is_complete(self) -> bool:
        place = len(self._sums)
        return place < len(self._buckets) and self._missing[place] == 0

    @torch.no_grad()
    def _send(self, place: int) -> None:
        bucket, averaging = self._buckets[place], self._averaging
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        present = grads[0].new_ones(len(bucket))
        for index, param in enumerate(bucket):
            if param.grad is None:
                present[index] = 0
        flat = flatten([*grads, present])
        if averaging.always_fp32:
            flat = flat.float()
        if averaging.predivide_factor != 1:
            flat /= averaging.predivide_factor
        work = dist.all_reduce(flat, group=self._group_of(place), async_op=True)
        self._sums[place : place + 1] = [_Sum(flat, work)]

    def _group_of(self, place: int) -> Any:
        return self._averaging.groups[place % len(self._averaging.groups)]

    @torch.no_grad()
    def _finish(self) -> None:
        if self._written:  # else no parameter was differentiated by: torch.autograd.grad
            for place in range(len(self._buckets)):
                if place in self._stale:
                    self._sums[place].work.wait()
                if place in self._stale or place >= len(self._sums):
                    self._send(place)
            self.flat_sums = []
            for place in range(len(self._buckets)):
                self._receive(place)
        self._begin()

    def _receive(self, place: int) -> None:
        bucket, averaging, (flat, work) = self._buckets[place], self._averaging, self._sums[place]
        work.wait()
        if averaging.average:
            world_size = dist.get_world_size(self._group_of(place))
            flat *= averaging.predivide_factor / world_size
        numel = flat.numel() - len(bucket)
        sums = flat[:numel].to(bucket[0].dtype)
        if self._retain:
            self.flat_sums.append(sums)
        changed: list[tuple[Tensor, Tensor]] = []
        views = unflatten(sums, bucket)
        for param, view, present in zip(bucket, views, flat[numel:].unbind(), strict=True):
            if param.grad is None:
                param.grad = view.clone() if bool(present > 0) else None
            elif self._retain:
                param.grad = view
            else:
                changed.append((param.grad, view))
        if changed:
            torch._foreach_copy_([grad for grad, _ in changed], [view for _, view in changed])


def _note(reference: weakref.ref[GradientReduction], param: Tensor) -> None:
    reduction = reference()
    if reduction is not None:
        reduction.note(param)


def _buckets(params: Sequence[nn.Parameter], numel: float) -> list[list[nn.Parameter]]:
    """Split parameters by dtype and device into buckets, in the order of a backward."""
    full: list[list[nn.Parameter]] = []
    filling: dict[Any, list[nn.Parameter]] = {}
    counts: Counter[Any] = Counter()
    for param in reversed(params):
        kind = (param.dtype, param.device)
        filling.setdefault(kind, []).append(param)
        counts[kind] += param.numel()
        if counts[kind] >= numel:
            full.append(filling.pop(kind))
            del counts[kind]
    return [*full, *filling.values()]
