"""Backwards of scaled losses that come to masters themselves, past the half parameters.

A penalty on the weights may be computed of those in ``optimizer.param_groups``. What autograd then
adds to a master's gradient is multiplied by the loss scale, and nobody else divides it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from amp_patch.common.scales import Scale
from amp_patch.distributed.shards import is_spread
from amp_patch.weights.parameter_lists import stored_grad

from .param_pairs import ParamPairs


class ReachedMasters:
    """Divides what the backward of a pass sends to one optimizer's masters by the pass's scale.

    Attributes:
        scale: of the pass that is open; None where none is.
        were_reached: whether the backward of the last pass has come to one.
    """

    def __init__(self) -> None:
        self.scale: Scale | None = None
        self.were_reached = False
        self._pairs: ParamPairs | None = None
        # The nodes of the masters in the graph: each would go with the last graph that has it.
        self._nodes: list[Any] = []

    def begin(self, pairs: ParamPairs, scale: Scale) -> None:
        """A pass of a loss multiplied by ``scale`` begins, of an optimizer of these parameters."""
        self.scale, self.were_reached = scale, False
        if pairs is not self._pairs and not torch.is_inference_mode_enabled():
            self._pairs = pairs
            self._nodes = [
                self._follow(get_gradient_edge(master).node)
                for param, master in zip(*pairs, strict=True)
                if param is not master and master.requires_grad and not is_spread(master)
            ]

    def end(self) -> None:
        """The pass is over."""
        self.scale = None

    def release(self) -> None:
        """No pass comes any more."""
        self._pairs, self._nodes = None, []

    def _follow(self, node: Any) -> Any:
        if _KNOWN not in node.metadata:
            node.metadata[_KNOWN] = True
            reference = weakref.ref(self)

            def divide(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
                self = reference()
                if self is None or self.scale is None:
                    return None
                self.were_reached, scale = True, self.scale
                return tuple(grad / scale for grad in grads)

            node.register_prehook(divide)
        return node


def refuse_given(pairs: ParamPairs) -> None:
    """Raise where masters have gradients, after a block whose backward wrote none.

    Raises:
        RuntimeError: as said.
    """
    rows = zip(*pairs, strict=True)
    count = sum(p is not master and stored_grad(master) is not None for p, master in rows)
    if count:
        raise RuntimeError(
            "a scale_loss() block unscales the gradients of the model's parameters; got "
            f"{count} that a script has given to fp32 masters in it, which would be stepped "
            "multiplied by the loss scale. Assign what torch.autograd.grad(scaled_loss, params) "
            "returned to .grad of model.parameters()."
        )


_KNOWN = "amp_patch divides its gradient"
