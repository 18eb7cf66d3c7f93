"""The ``state`` of an initialized optimizer: saved, loaded, and in the dtype of what is stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.common.living_objects import weakly
from amp_patch.distributed.engines import is_zero
from amp_patch.distributed.saved_masters import SavedMasters
from amp_patch.optimizers.half_eps import warn_of_eps, watch_first_step

from .held_params import HeldParams
from .replaced_methods import takes_hooks


class HoldsState(Protocol):
    """What steps in the optimizer's place, and holds its state from step to step."""

    def forget(self) -> None:
        """Hold none of it any more."""


class OptimizerState:
    """What is done about one optimizer's ``state``, and about calls that load it.

    Args:
        optimizer: held weakly.
        wrapped: optimizers that it wraps, which have state of their own.
        held: its parameters.
        holder: steps in the optimizer's place; None where it steps itself.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        wrapped: Sequence[Optimizer],
        held: HeldParams,
        holder: HoldsState | None,
    ) -> None:
        holding: list[Any] = [optimizer, *wrapped]
        # At O3 a ZeroRedundancyOptimizer itself is here; the one that steps for it has the state.
        holding += [one.optim for one in holding if is_zero(one)]
        self._optimizers = [weakref.ref(one) for one in holding]
        self._masters = held.masters
        self._stored_in: dict[Tensor, torch.dtype] = {}  # before the parameters are restored
        self._undo: list[Callable[[], None]] = []
        if held.masters is None and held.steps_halves:
            self._undo.append(watch_first_step(optimizer))
        if not takes_hooks(optimizer, "_optimizer_load_state_dict_post_hooks"):
            return
        if holder is not None:
            self._call_after_loads(optimizer, holder.forget)
        if held.masters is not None:
            # makes masters of parameters that were unfrozen, for torch loads state in their dtype
            self._call_before_loads(optimizer, held.pairs)
            self._call_after_loads(optimizer, held.masters.pairs.follow_loaded_state)
            drop = weakly(self._drop_reads)
            hook = optimizer.register_state_dict_pre_hook(lambda _: drop())
            self._undo.append(hook.remove)
        else:  # a state that another optimizer has saved may bring another eps
            self._undo.append(optimizer.register_load_state_dict_post_hook(warn_of_eps).remove)

    def remove(self) -> None:
        """Undo all of it but `match`."""
        for undo in self._undo:
            undo()

    def save_masters(self, loading: Optimizer) -> None:
        """Save masters with the optimizer's state, for the model's has none of them.

        Args:
            loading: see `SavedMasters`.
        """
        optimizer = self._optimizers[0]()
        if self._masters is not None and optimizer is not None:
            self._undo.append(SavedMasters(optimizer, loading, self._masters.pairs.param_of).remove)

    def note_dtypes(self) -> None:
        """The parameters are about to be restored; some are, where an interrupt ended it before."""
        known = self._stored_in
        self._stored_in = {param: known.get(param, param.dtype) for param, _ in self._states()}

    def match(self) -> None:
        """Bring state that is in its parameter's former dtype to the one that this was cast to.

        State in another dtype is so by the optimizer's own choice; masters are never cast. Call it
        when parameters were converted, and again when they are restored.
        """
        for param, state in self._states() if self._masters is None else ():
            before = self._stored_in.get(param, torch.float32)
            for key, value in state.items():
                # "step" counts in fp32 whatever the parameter is, as in torch's optimizers.
                if key != "step" and isinstance(value, Tensor) and value.dtype is before:
                    state[key] = value.to(param.dtype)

    def _drop_reads(self) -> None:
        """Drop the empty entries of half parameters, which torch makes where somebody reads one.

        `state_dict` raises for them, as no group holds these parameters.
        """
        optimizer, masters = self._optimizers[0](), self._masters
        if optimizer is None or masters is None:
            return
        for param, _ in masters.pairs:
            if optimizer.state.get(param) == {}:
                del optimizer.state[param]

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield each parameter with its state.

        A user's optimizer may keep more beside them, or no dict for one; a
        `ZeroRedundancyOptimizer` that was loaded has None for what other ranks step.
        """
        alive = [one() for one in self._optimizers]
        items = chain.from_iterable(one.state.items() for one in alive if one is not None)
        pairs = ((param, state) for param, state in items if isinstance(param, Tensor))
        return ((param, state) for param, state in pairs if isinstance(state, dict))

    def _call_after_loads(self, optimizer: Optimizer, method: Callable[[], object]) -> None:
        call = weakly(method)
        hook = optimizer.register_load_state_dict_post_hook(lambda _: call())
        self._undo.append(hook.remove)

    def _call_before_loads(self, optimizer: Optimizer, method: Callable[[], object]) -> None:
        call = weakly(method)
        hook = optimizer.register_load_state_dict_pre_hook(lambda *_: call())
        self._undo.append(hook.remove)
