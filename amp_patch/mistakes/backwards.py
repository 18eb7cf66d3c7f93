"""Calls of ``backward`` inside and after `scale_loss` blocks that are not of the scaled loss.

Refused where they are made, before they write a gradient. Knows graphs of tensors, and which
parameters a block is for; no scale.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.casting.many_uses import begin_anew
from amp_patch.casting.torch_compile import never_trace
from amp_patch.common.early_looks import EarlyLooks
from amp_patch.common.running_backward import is_in_backward
from amp_patch.common.warn_once import warn_once
from amp_patch.step.autograd_graph import AutogradGraph, leaves_of
from amp_patch.step.optimizer_step import OptimizerStep
from amp_patch.step.prepared_optimizers import Reached
from amp_patch.step.scalar_backward import short_for_scalars
from amp_patch.step.watched_backward import refuse_another_backward, refuse_late_backward

from .handed_on import begins_with_gradients_of, goes_on
from .master_inputs import listed, with_halves
from .unprepared import UnpreparedParams

#: Nodes of functions whose gradients are no multiples of a factor that their argument has.
_CURVED = {
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Exp", "HuberLoss", "KlDiv"),
    *("Log", "Log1P", "LogSigmoid", "LogSoftmax", "Logsumexp", "MseLoss", "Pow", "Sigmoid"),
    *("SmoothL1Loss", "Softmax", "Softplus", "Sqrt", "Tanh"),
}


class _Block:
    """A block of one thread.

    Args:
        scaled_loss: what it yields; held weakly.
        params: returns those whose gradients its end divides by the scale.

    Attributes:
        node: of the scaled loss in its graph; None when the block has unscaled.
        handed_on: leaves that backwards came to which went on where the loss's had ended.
    """

    def __init__(self, scaled_loss: Tensor, params: Callable[[], Iterable[Tensor]]) -> None:
        self.loss = weakref.ref(scaled_loss)
        self.node: Any = scaled_loss.grad_fn
        self.params: Callable[[], Iterable[Tensor]] | None = params
        self.handed_on: list[Tensor] = []

    def leaves(self) -> list[Tensor]:
        """Return those that backwards of this block have come to; none when the loss is gone."""
        loss = self.loss()
        return self.handed_on if loss is None else [*leaves_of(loss), *self.handed_on]

    def close(self) -> None:
        """Its gradients are unscaled, or given up; nothing of the pass is held any more."""
        self.node = self.params = None
        self.handed_on = []


class Backwards:
    """The blocks of scaled losses, and the backward calls that are compared with them.

    Args:
        delayed: returns the parameters whose gradients wait, scaled, for the next block.
        running: the steps of optimizers that run.
        after_lone: called after each backward while no optimizer is prepared, whose step would
            tell that weights change: a script may write to them by hand, through ``.data`` say.
        before_plain, after_plain: called around each backward of no scaled loss, with what returns
            the ids of the leaves that it reaches.
        prepared: the prepared optimizers; false without any.
        unprepared: what no prepared optimizer steps, to which a backward may add.
        param_of: returns the half parameter of a master, and any other tensor itself.

    Attributes:
        last_was_plain: True where the last backward was of no scaled loss; False also before the
            first block.
        plain: how many backwards were of no scaled loss, in any thread, since the first block.
        begun: how many backwards have begun, in any thread.
    """

    def __init__(
        self,
        delayed: Callable[[], Iterable[Tensor]],
        running: Sequence[OptimizerStep],
        after_lone: Callable[[], None],
        before_plain: Callable[[Reached], None],
        after_plain: Callable[[Reached], None],
        prepared: Collection[Optimizer],
        unprepared: UnpreparedParams,
        param_of: Callable[[Tensor], Tensor],
    ) -> None:
        self._delayed, self._running = delayed, running
        self._param_of = param_of
        self._after_lone = after_lone
        self._before_plain, self._after_plain = before_plain, after_plain
        self._prepared, self._unprepared = prepared, unprepared
        self._blocks: dict[int, list[_Block]] = {}
        self.last_was_plain = False
        self.plain = self.begun = 0
        self._looks = EarlyLooks()  # at backwards that are given gradients after a block

    def open(
        self, scaled_loss: Tensor, params: Callable[[], Iterable[Tensor]]
    ) -> Callable[[], None]:
        """A block of this thread yields a scaled loss; return what is called when it unscales.

        Args:
            scaled_loss: has a graph.
            params: see `_Block`.

        Raises:
            RuntimeError: the loss is what another block has yielded.
        """
        thread = threading.get_ident()
        blocks = self._blocks.get(thread, ())
        _refuse_scaled_twice(blocks, scaled_loss)
        block = _Block(scaled_loss, params)
        around = [one for one in blocks if one.node is not None]
        self._blocks[thread] = [*around, block]
        return block.close

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        """Return, for a function by its path, what makes its replacement."""
        return {"torch.autograd.backward": self._looking}

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        blocks, running, run = self._blocks, self._running, short_for_scalars(original)
        prepared = self._prepared

        @never_trace
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            is_plain = not blocks
            self.begun += 1
            # A checkpoint calls backward in a backward, of which the outer one was looked at.
            if blocks and not is_in_backward():
                given = kwargs.get("grad_tensors", args[0] if args else None)
                creates_graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
                is_plain = self._look(tensors, given, kwargs.get("inputs"), creates_graph)
            reached = _reached_by(tensors) if is_plain else set
            if is_plain and prepared and not running:
                self._lead(reached)
            try:
                result = run(tensors, *args, **kwargs)
            finally:
                if is_plain and self._unprepared.blocks and not is_in_backward():
                    self._unprepared.end_plain()
            if is_plain or running or not prepared:
                self._follow(is_plain, reached)
            return result

        return backward

    def _lead(self, reached: Reached) -> None:
        """A backward begins that is of no scaled loss."""
        if not is_in_backward():
            self._before_plain(reached)
            if self._unprepared.scaled or self._unprepared.blocks:
                self._unprepared.begin_plain(reached)

    def _follow(self, is_plain: bool, reached: Reached) -> None:
        """A backward has ended that is of no scaled loss, in a step, or beside no optimizer."""
        if not is_in_backward():
            if not self._prepared:
                self._after_lone()
            elif is_plain and not self._running:
                begin_anew()
                self._after_plain(reached)
        for step in [*self._running]:
            step.receive_in_step()

    def _look(self, tensors: Any, grad_tensors: Any, inputs: Any, creates_graph: bool) -> bool:
        """Raise for a backward that is in the wrong place, warn of one whose graph is scaled.

        Returns:
            Whether it is of no scaled loss.
        """
        blocks = self._blocks.get(threading.get_ident())
        if blocks is None:
            self.plain += 1
            return True
        if _is_of_one(blocks, tensors):
            self.last_was_plain = False
            if creates_graph:
                _warn_of_graph()
            return False
        if grad_tensors is not None and _goes_on(blocks, tensors, grad_tensors):
            self.last_was_plain = False
            return False
        self.last_was_plain = True
        self.plain += 1
        nodes = {block.node for block in blocks} - {None}
        delayed = set(map(id, self._delayed()))
        if nodes or delayed:
            # what a GradScaler has scaled may add to what waits scaled, and is unscaled with it
            graph = AutogradGraph(tensors, nodes, through_grad_scalers=False)
            named = None if inputs is None else with_halves(self._param_of, listed(inputs))
            _refuse(blocks, nodes, delayed, graph, named)
            _warn_of_divided(getattr(tensors, "grad_fn", None), nodes)
        elif grad_tensors is not None and self._looks.left:
            self._looks.count()
            _warn_of_scaled(blocks, grad_tensors)
        return True


def _refuse(
    blocks: Iterable[_Block],
    nodes: Collection[Any],
    delayed: set[int],
    graph: AutogradGraph,
    inputs: Any,
) -> None:
    """Raise for a backward of no scaled loss that writes to gradients which an end divides.

    Args:
        blocks: of this thread.
        nodes: of their scaled losses.
        delayed: ids of the parameters whose gradients wait for the next block.
        graph: of the backward.
        inputs: of ``torch.autograd.backward``, and the half parameters of the masters among them.

    Raises:
        RuntimeError: as said.
    """
    reached = graph.written(inputs)
    for block in blocks:
        if block.params is not None and not reached.isdisjoint(map(id, block.params())):
            refuse_another_backward()
    if not reached.isdisjoint(delayed):
        _refuse_in_between()
    _refuse_curved(graph.behind(nodes))


def _is_of_one(blocks: Iterable[_Block], tensors: Any) -> bool:
    """Return whether a backward is that of the scaled loss of one of these blocks.

    Not where the script has written to it: after ``scaled_loss += penalty`` it is another loss.

    Raises:
        RuntimeError: of one that has unscaled.
    """
    for block in blocks:
        if block.loss() is tensors:
            if block.node is None:
                refuse_late_backward()
            return getattr(tensors, "grad_fn", None) is block.node
    return False


def _goes_on(blocks: Iterable[_Block], tensors: Any, grad_tensors: Any) -> bool:
    """Return whether a backward goes on where one of an open block has ended, and note it there."""
    for block in blocks:
        if block.node is not None and goes_on(block.leaves(), tensors, grad_tensors):
            block.handed_on += leaves_of(tensors)
            return True
    return False


def _warn_of_scaled(blocks: Iterable[_Block], grad_tensors: Any) -> None:
    """Warn of a backward after the blocks that begins with gradients of one."""
    if any(begins_with_gradients_of(block.leaves(), grad_tensors) for block in blocks):
        warn_once(
            "gradients of an input stay multiplied by the loss scale after a scale_loss() block; "
            "got a backward() after it that begins with some. Call it inside of the block: "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(); "
            "hidden.backward(detached.grad)`."
        )


def _refuse_scaled_twice(blocks: Iterable[_Block], scaled_loss: Tensor) -> None:
    """Raise for a block of what another one has yielded, which no end divides by both scales.

    Raises:
        RuntimeError: as said.
    """
    node: Any = scaled_loss.grad_fn
    given = node.next_functions[0][0]  # of the loss, which the scale was multiplied with
    for block in blocks:
        loss = block.loss()
        if loss is not None and loss.grad_fn is given:
            raise RuntimeError(
                "a loss must be scaled once; got one that another scale_loss() block has scaled. "
                "Give one block all optimizers of the loss: `with amp.scale_loss(loss, [first, "
                "second]) as scaled_loss: scaled_loss.backward()`."
            )


def _refuse_in_between() -> NoReturn:
    """Raise for a backward that adds unscaled gradients to scaled ones.

    Raises:
        RuntimeError: as said.
    """
    raise RuntimeError(
        "a backward() after scale_loss(..., delay_unscale=True) must be of a scaled loss, for the "
        "last block divides all that was added up by the scale; got one of a loss that is not "
        "multiplied by it. Call it in a block of its own: `with amp.scale_loss(loss, optimizer, "
        "delay_unscale=True) as scaled_loss: scaled_loss.backward()`."
    )


def _warn_of_graph() -> None:
    warn_once(
        "gradients that are to be differentiated again must not be multiplied by the loss scale, "
        "for the end of a scale_loss() block divides them, and not what comes of their graph; got "
        "scaled_loss.backward(create_graph=True). Call torch.autograd.grad(loss, params, "
        "create_graph=True) with the loss itself, or amp.initialize(..., opt_level='O4')."
    )


def _refuse_curved(nodes: Iterable[Any]) -> None:
    """Raise for a function of the scaled loss that does not hand on its factor.

    Raises:
        RuntimeError: as said.
    """
    names = (node.name().rstrip("0123456789").removesuffix("Backward") for node in nodes)
    curved = next((name for name in names if name in _CURVED), None)
    if curved is not None:
        raise RuntimeError(
            "the loss that a scale_loss() block yields must go backward as it is, or summed up; "
            f"got a backward of what {curved} made of it, whose gradients are not those of the "
            "loss times the scale. Compute the loss before: `with amp.scale_loss(criterion("
            "model(inputs), targets), optimizer) as scaled_loss: scaled_loss.backward()`."
        )


#: The smallest loss scale that is looked for: a loss is divided by the number of micro-batches as
#: well, and no step has as many.
_NO_COUNT = 1024.0


def _warn_of_divided(node: Any, nodes: Collection[Any]) -> None:
    """Warn of a scaled loss that the script divides by the scale, as the end of the block does.

    No error: a sum over tokens is divided by their number, at which a dynamic scale may arrive.

    Args:
        node: of what goes backward.
        nodes: of the scaled losses.
    """
    callees = [] if node is None else [one for one, _ in node.next_functions]
    scaled = next((one for one in callees if one in nodes), None)
    if scaled is None:
        return
    scale = _number(scaled, "_saved_other")
    if node.name().startswith("DivBackward"):
        divisor = _number(node, "_saved_other")
    elif node.name().startswith("MulBackward"):
        factor = _number(node, "_saved_other" if callees[0] is scaled else "_saved_self")
        divisor = 1.0 / factor if factor else 0.0
    else:
        return
    if scale >= _NO_COUNT and math.isclose(divisor, scale, rel_tol=1e-6):
        warn_once(
            "the loss that a scale_loss() block yields must not be divided by the loss scale, for "
            f"the end of the block divides its gradients; got a backward of it divided by "
            f"{scale:g}, as much as the loss scale, which would train next to nothing. Call "
            "scaled_loss.backward(). If it is a number of tokens, say, which the scale equals by "
            "chance, divide the loss by it before the block: amp.scale_loss(loss / count, "
            "optimizer)."
        )


def _number(node: Any, name: str) -> float:
    """Return a number that a node has saved; 0 where it has none."""
    saved = getattr(node, name, None)
    return float(saved) if isinstance(saved, Tensor) and saved.numel() == 1 else 0.0


def _reached_by(tensors: Any) -> Reached:
    found: list[set[int]] = []

    def reached() -> set[int]:
        if not found:
            found.append(set(map(id, leaves_of(tensors))))
        return found[0]

    return reached  # `functools.cache`, made in each backward, takes ten times as long
