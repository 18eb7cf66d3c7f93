"""Masters lie in memory as their half parameters do: on their device, and in their order.

``model.to(device)`` and ``model.to(memory_format=...)`` after `amp.initialize` change parameters
alone. Gradients of masters, and what an optimizer keeps for them, go with the masters, for torch's
fused optimizers and the kernels go through all of these as they lie. Knows no groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp_patch.distributed.shards import set_data
from amp_patch.kernels.strips import in_order_of

from .fp32_values import FP32Values
from .lazy_gradients import LazyGradients
from .own_gradients import OwnGradients
from .parameter_lists import look_up, store_grad, stored_grad
from .stepped_state import SteppedState

#: The strides of a half parameter and of its master.
_Orders = tuple[Sequence[int], Sequence[int]]


class FollowedMemory:
    """Where the half parameters of one optimizer were when its masters were last brought there.

    Args:
        values: tell which other masters have the memory of one.
        state: of the optimizer.
        own_gradients: those of masters that no script has written.
        lazy: see `MasterPairs`.

    Attributes:
        when_reordered: called where a master lies in another order than before.
    """

    def __init__(
        self,
        values: FP32Values,
        state: SteppedState,
        own_gradients: OwnGradients,
        lazy: LazyGradients | None,
    ) -> None:
        self._values, self._state = values, state
        self._own_gradients, self._lazy = own_gradients, lazy
        self._orders: list[_Orders] = []
        self.when_reordered: Callable[[], object] = _nothing

    def add(self, param: Tensor, master: Tensor) -> None:
        """A master was made, of values from before the parameter was given its order, perhaps."""
        self._bring(param, master)
        self._orders.append((param.stride(), master.stride()))

    def drop_after(self, count: int) -> None:
        """Forget all pairs but the first ``count``."""
        del self._orders[count:]

    def follow_devices(self, params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Bring masters to the devices of their parameters."""
        for param, master in zip(params, masters, strict=True):
            if master.device != param.device:
                grad = stored_grad(master)  # one that waits is on the parameter's device
                store_grad(master, None)
                set_data(master, master.data.to(param.device))
                store_grad(master, None if grad is None else grad.to(param.device))
                self._state.follow_device(master)

    def follow_orders(
        self,
        params: Sequence[Tensor],
        masters: Sequence[Tensor],
        is_newer_in_half: Callable[[int], bool],
    ) -> None:
        """Bring masters to an order that their parameters were given since the last time.

        A script may have given a master another one itself, by ``master.data = tensor``: it stays.

        Args:
            params, masters: all pairs.
            is_newer_in_half: tells of a row whose order has changed whether its numbers have, too,
                as by ``p.data = p.data.t()``: the master gets these.
        """
        rows = zip(look_up(Tensor.stride, params), look_up(Tensor.stride, masters), strict=True)
        orders = list(rows)
        if orders == self._orders:
            return
        if self._lazy is not None:
            self._lazy.materialize()  # those that wait lie as their masters did
        known = zip(params, masters, orders, self._orders, strict=True)
        for row, (param, master, now, then) in enumerate(known):
            if now != then:
                if now[0] != then[0]:
                    is_newer = is_newer_in_half(row)
                    self._bring(param, master)
                    if is_newer:
                        master.detach().copy_(param.detach())
                self._bring_kept(master)
                self._orders[row] = now[0], master.stride()
        self.when_reordered()

    def _bring(self, param: Tensor, master: Tensor) -> None:
        if param.stride() != master.stride() and param.shape == master.shape:
            laid, place = in_order_of(param, master.detach()), master.data_ptr()
            # those of other optimizers that step the parameter, too
            for one in [master, *self._values.masters_of(param)]:
                if one.data_ptr() == place:
                    set_data(one, laid)
        self._bring_kept(master)

    def _bring_kept(self, master: Tensor) -> None:
        """Bring a master's gradient and state to its order."""
        self._state.follow_order(master)
        grad = stored_grad(master)
        if grad is not None and grad.layout is torch.strided and grad.shape == master.shape:
            is_own = self._own_gradients.has(master)
            store_grad(master, in_order_of(master, grad))
            if is_own:
                self._own_gradients.note(master)


def _nothing() -> None:
    """Nobody has asked."""
