"""apex's data-parallel wrapper and `Reducer`: which gradients are summed over processes, and when.

Knows no loss scale and no optimizer: gradients are summed as they are, scaled or not. The session
is told of each wrapper, for nothing may be decided by gradients that it has not summed yet.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils._pytree import tree_leaves

from amp_patch.levels import HALVES
from amp_patch.session import session

from .flat_calls import (
    apply_flat_dist_call,
    flat_dist_call,
    flatten,
    split_by_type,
    split_half_float_double,
    unflatten,
)
from .gradient_reduction import Averaging, GradientReduction

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]


class DistributedDataParallel(TorchDistributedDataParallel):
    """A model whose gradients each backward averages over all processes.

    To be applied after ``amp.initialize``. All processes start from the model of rank 0. It is
    torch's class in name, for who asks by ``isinstance``, and has torch's ``no_sync``; the
    reduction is its own, for apex allowed what torch's forbids: parameters that a loss does not
    reach, or that are frozen or trained later; outputs that no loss uses; several forwards before
    a backward; reentrant checkpoints; calls of ``model.module``.

    Args:
        module: on one device or several, of any dtypes; its process group is the default one.
        message_size: elements in a bucket, which is summed as soon as its gradients are there.
        delay_allreduce: sum all gradients at the end of the backward.
        shared_param: an older name of ``delay_allreduce``.
        allreduce_trigger_params: not used; the buckets decide.
        retain_allreduce_buffers: keep the flat sums in ``allreduce_buffers``, a list of 1-dim
            tensors; the gradients are views of them.
        allreduce_always_fp32: sum half gradients in fp32.
        num_allreduce_streams: not used; torch.distributed has streams of its own.
        allreduce_communicators: ``(process_groups, streams)``; the buckets take turns in the
            groups, and the streams are not used.
        gradient_average: divide the sums by the number of processes.
        gradient_predivide_factor: divide by so much of it before the sum, against overflow.
        gradient_average_split_factor: an older name of ``gradient_predivide_factor``.
        prof: not used.

    Raises:
        ValueError: torch.distributed has no process group.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: float = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[Any], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        # Not torch's own, which would give every parameter the hooks of its reducer.
        nn.Module.__init__(self)
        self.world_size = float(dist.get_world_size())
        self.message_size = message_size
        self.delay_allreduce = bool(delay_allreduce or shared_param)
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.allreduce_communicators = allreduce_communicators
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_average_split_factor or gradient_predivide_factor
        self.require_backward_grad_sync = True
        self.module = module
        _take_from_rank_0(module)
        self._set_up()

    def _set_up(self) -> None:
        communicators = self.allreduce_communicators
        averaging = Averaging(
            self.allreduce_always_fp32,
            self.gradient_average,
            self.gradient_predivide_factor,
            (None,) if communicators is None else communicators[0],
        )
        self._reduction = GradientReduction(
            averaging, self.message_size, self.delay_allreduce, self.retain_allreduce_buffers
        )
        self._reduction.follow(self._trained())
        session.guard.unsynced.follow([self])

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self.module.parameters() if param.requires_grad]

    def __getstate__(self) -> dict[str, Any]:
        """Return what can be pickled: all but the process groups and what waits for a backward."""
        state = dict(vars(self))
        state["allreduce_communicators"] = None
        del state["_reduction"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of another, in any process group."""
        nn.Module.__setstate__(self, state)
        self._set_up()

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """The flat sums of the last backward, with ``retain_allreduce_buffers``."""
        return self._reduction.flat_sums

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns; the backward of it averages the gradients."""
        reduction = self._reduction
        reduction.enabled = self.require_backward_grad_sync
        session.guard.unsynced.note(self)
        reduction.follow(self._trained())
        outputs = self.module(*inputs, **kwargs)
        for output in tree_leaves(outputs) if torch.is_grad_enabled() else ():
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(functools.partial(_arm, reduction))
        return outputs

    def enable_allreduce(self) -> None:
        """Average from now on; what has gathered in ``.grad`` since is averaged with the rest."""
        self._switch(True)

    def disable_allreduce(self) -> None:
        """Let gradients gather in each process, until `enable_allreduce`.

        Those of ``amp.scale_loss`` must gather where the backward passes write, and be averaged
        by the last: with ``delay_unscale=True`` in all but that.
        """
        self._switch(False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Average nothing inside the block, as torch's own class has it."""
        before = self.require_backward_grad_sync
        self._switch(False)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, on: bool) -> None:
        self.require_backward_grad_sync = on
        self._reduction.enabled = on


class Reducer:
    """Averages the gradients of a model over processes when it is asked to.

    Args:
        module_or_grads_list: a module, whose parameters become those of rank 0, or a list of
            tensors.
    """

    def __init__(self, module_or_grads_list: nn.Module | Sequence[Tensor]) -> None:
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            _take_from_rank_0(self.module)
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """Average the gradients, or the tensors of the list, in place."""
        if hasattr(self, "grads"):
            grads = self.grads
        else:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


def _arm(reduction: GradientReduction, grad: Tensor) -> None:
    reduction.arm()


def _take_from_rank_0(module: nn.Module) -> None:
    """Make the parameters of all processes those of rank 0."""
    params = [param.detach() for param in module.parameters()]
    flat_dist_call(params, dist.broadcast, (0,))
    if any(param.dtype in HALVES for param in params):
        # Of what amp.initialize() cast, the state dict holds the fp32 values that optimizers step.
        state = module.state_dict()
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        values = [tensor for tensor in tensors if tensor.is_floating_point()]
        flat_dist_call(values, dist.broadcast, (0,))
        module.load_state_dict(state)
