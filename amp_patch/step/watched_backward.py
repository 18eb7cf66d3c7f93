"""A backward that is not the scaled loss's, or trains nothing: refused, or warned about.

Knows the optimizers of a pass; no scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

from torch import Tensor
from torch.nn import Parameter

from amp_patch.common.warn_once import warn, warn_once
from amp_patch.distributed.process_groups import has_others
from amp_patch.gradients.reached_masters import refuse_given

from .autograd_graph import leaves_of
from .optimizer_backward import OptimizerBackward


class WatchedBackward:
    """Notes that the backward of the scaled loss runs. Holds no graph, for a graph holds it.

    After its block, that of a later block may run through the scaled loss: where the script has
    divided what `torch.autograd.grad` returned by ``scaled_loss / loss``.

    Args:
        optimizers: of the pass; held weakly.
        loss: that is scaled.

    Attributes:
        loss: returns it while it lives.
        has_run: whether it has.
        is_over: whether its block is.
        is_of_leaf: whether the loss is none that a model has computed.
    """

    def __init__(self, optimizers: Iterable[OptimizerBackward], loss: Tensor) -> None:
        self._optimizers = [*map(weakref.ref, optimizers)]
        self.loss = weakref.ref(loss)
        self.has_run = self.is_over = False
        self.is_of_leaf = loss.grad_fn is None

    def __call__(self, grads: tuple[Tensor, ...]) -> None:
        self.has_run = True
        if self.is_over:
            living = (reference() for reference in self._optimizers)
            if not any(one is not None and one.current.is_open for one in living):
                refuse_late_backward()


def tell_of_strays(optimizers: Sequence[OptimizerBackward], loss: Tensor | None) -> None:
    """Warn, once, of a backward that reached none of the parameters it is for.

    Args:
        optimizers: of its pass.
        loss: that was scaled, if it lives.

    Raises:
        RuntimeError: the script has given gradients to masters in the block.
    """
    if any(one.current.reached.were_reached for one in optimizers):
        return
    for one in optimizers:
        if not one.gradients.are_pending:
            refuse_given(one.pairs())
    if not any(any(True for _ in one.params()) for one in optimizers):
        warn_once(
            "an optimizer must hold the parameters that it is to train; got a scale_loss() of "
            "optimizers whose groups are empty, so that nothing is trained. Make them of [p for p "
            "in model.parameters() if p.requires_grad], or call optimizer.add_param_group() before."
        )
    were_cleared = any(one.zeroing.was_cleared for one in optimizers)
    params = {id(one): one.requires_grad for each in optimizers for one in each.pairs().model}
    if any(params.values()) and not were_cleared and not _asks_for_inputs(loss, params):
        warn_once(
            "the backward() of a scaled loss must reach parameters of its optimizers; got "
            "one that wrote none of their gradients, so that it trains nothing. Compute "
            "the loss with the model that amp.initialize() returned, not with a copy of "
            "it, and pass the optimizer of that model to amp.scale_loss(). What "
            "torch.autograd.grad() returned of parameters, or a copy of the model has got, assign "
            "to .grad inside the block, whose end unscales it; of an input or of features alone, "
            "nothing is amiss."
        )


def _asks_for_inputs(loss: Tensor | None, params: Collection[int]) -> bool:
    """Tell whether a loss of the right model is one that `torch.autograd.grad` may be called for.

    Adversarial training asks so for the gradient of an input, and needs none of the parameters'.

    Args:
        loss: whose backward has written to no parameter.
        params: the ids of those that it is for.
    """
    leaves = leaves_of(loss)
    is_of_model = any(id(leaf) in params for leaf in leaves)
    return is_of_model and not all(isinstance(leaf, Parameter) for leaf in leaves)


def tell_of_leaf(loss: Tensor) -> None:
    """Warn, once, of a loss that is none of a model's results, but a tensor of the script's own.

    Not of one with a hook, which may run the real backward, as where gradients are cached. Nor of
    0, which a script puts in the place of the loss of a batch without labels.

    Args:
        loss: without a graph, and requires grad.
    """
    is_own = not isinstance(loss, Parameter) and not loss._backward_hooks
    if is_own and bool(loss.detach().ne(0.0).any()):
        warn_once(
            "the loss of scale_loss() must be what the criterion returned, for its backward goes "
            "back to the weights; got a tensor without a graph that requires grad, as torch.tensor("
            "loss.item(), requires_grad=True) and loss.detach().requires_grad_() make one, which "
            "trains nothing. Call amp.scale_loss(criterion(model(inputs), targets), optimizer), "
            "and add up losses as tensors, without .item(), .data or .detach()."
        )


def warn_of_stages(optimizers: Iterable[OptimizerBackward]) -> None:
    """Warn of the factor of a pipeline's losses on a rank that decides for itself."""
    if has_others() and not any(one.ranks.groups for one in optimizers):
        warn(
            "all stages of a pipeline must skip the same steps; got scale_loss() of a number "
            "without a backward of its own, and no process group, so that each rank would "
            "skip by its own gradients alone. Call amp.initialize(..., "
            "process_group=torch.distributed.group.WORLD)."
        )


def refuse_another_backward() -> NoReturn:
    """Raise for a backward in a block that is not of the scaled loss.

    Raises:
        RuntimeError: as said.
    """
    raise RuntimeError(
        "the backward() inside a scale_loss() block must be that of the loss it yields; got "
        "gradients of another one, which are not multiplied by the loss scale and would be divided "
        "by it. Call scaled_loss.backward() in `with amp.scale_loss(loss + other_loss, optimizer) "
        "as scaled_loss:`, or give each loss a block of its own. A backward that goes on where the "
        "loss's has ended is given that gradient itself: hidden.backward(detached.grad)."
    )


def refuse_late_backward() -> NoReturn:
    """Raise for a backward of the scaled loss when its block has unscaled the gradients.

    Raises:
        RuntimeError: as said.
    """
    raise RuntimeError(
        "scaled_loss.backward() must run inside of its scale_loss() block, before what needs "
        "unscaled gradients; got one after it. Indent it below `with amp.scale_loss(loss, "
        "optimizer) as scaled_loss:`, and call what clips or steps after the block."
    )
