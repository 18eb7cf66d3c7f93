"""Captures a whole training step in one CUDA graph; what it leaves to the host is done here.

Knows the session, to bring its state up to date around a replay; nothing of how a step is made.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .distributed.process_groups import is_on
from .kernels.graph_capture import HostSide, captures, in_living_graphs
from .scaling.device_scaler import DeviceScaler
from .session import session
from .step.optimizer_step import OptimizerStep
from .weights.master_weights import MasterWeights

_LEAST_WARM_UP = 2


class CapturedStep:
    """A training step that the GPU repeats without Python; made by `capture`.

    Attributes:
        graph: the `torch.cuda.CUDAGraph`.
        result: what the step function returned: the same tensors after each replay, with the
            values of the last one; without the autograd graph that leads to them.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        result: Any,
        host_side: HostSide,
        masters: Sequence[MasterWeights],
    ) -> None:
        self.graph, self.result = graph, _without_autograd(result)
        # Those that it steps; as a session holds them.
        self._masters = weakref.WeakSet(masters)
        self._host_side = host_side
        weakref.finalize(self, captures.release, host_side)
        self._scalers = session.scalers
        # What the graph reads and writes must outlive it, also where the session replaces it.
        self._memory = _without_autograd(_memory())

    def replay(self) -> Any:
        """Make one step on the current stream, without waiting for it.

        `amp.step_was_skipped`, `amp.loss_scale` and `amp.state_dict` tell of it afterwards, and
        wait for it. What `amp.load_state_dict` has set since the last replay counts, and so does
        what was written to masters (its forward sees it already) or to parameters.

        Returns:
            `result`.

        Raises:
            RuntimeError: `amp.deactivate` was called since the capture.
            FloatingPointError: of an earlier replay: two steps in a row overflowed at the floor
                of the loss scale.
        """
        if session.scalers is not self._scalers:
            raise RuntimeError(
                "a captured step needs the models and optimizers as amp.initialize() left them; "
                "got a replay after amp.deactivate(). Call amp.initialize() and "
                "amp_patch.cuda_graph.capture() again."
            )
        _refuse_exhausted()
        _follow_host()
        self.graph.replay()
        for action in self._host_side.actions:
            action()
        for masters in self._masters:
            masters.note_replay()
        session.cache.mark_stale()
        return self.result


def capture(step: Callable[[], Any], *, warm_up: int = 3, pool: Any = None) -> CapturedStep:
    """Capture a whole training step: forward, `amp.scale_loss`, backward, clipping, step.

    The scale is moved, and a step with an overflow is skipped, by the GPU inside the graph: the one
    that the parameters are on. At O1 and O4 the weights are cast anew in each replay. ::

        def step():
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            return loss


        captured = cuda_graph.capture(step)
        for batch, labels in loader:
            inputs.copy_(batch)
            targets.copy_(labels)
            loss = captured.replay()

    The optimizer must be one whose device can skip a step: at O2 and O5 one with
    ``fused_step=True``, else one of torch's with ``fused=True`` (and ``capturable=True`` where it
    has that option). What else `torch.cuda.graph` asks of captured code holds here, too.

    The graph repeats the launches of one call, on the same memory. So between replays these may
    not change: the shapes, dtypes and addresses of what the step reads (write new values with
    ``copy_``); which parameters get a gradient, require one, or are there at all; options of the
    optimizer (for a learning rate that moves give a CUDA tensor, ``lr=torch.tensor(0.1,
    device="cuda")``, and fill that); the optimizer's state other than in place
    (``optimizer.load_state_dict`` replaces it: capture again); the model's mode, precision regions
    and cast rules. Python that the step function runs, hooks and schedulers included, ran once, at
    the capture. Steps without the graph may come between.

    Args:
        step: takes no arguments; reads its batch from tensors that stay.
        warm_up: ordinary steps made before, which train as any do; at least 2. One that was
            skipped is followed by another until one is not, for which the scale falls.
        pool: of `torch.cuda.graph_pool_handle` or another graph's ``pool()``: share its memory.

    Returns:
        What replays it. The capture itself makes no step.

    Raises:
        TypeError: step cannot be called, or warm_up is no int.
        ValueError: warm_up is below 2.
        RuntimeError: no CUDA device; `amp.initialize` was not called; parameters on several
            devices; the loss or an output of an earlier step is still held; a step for which the
            host has to wait.
        FloatingPointError: steps that overflow at a static loss scale, or at the floor of one.
    """
    _refuse_arguments(step, warm_up)
    session.lookup.is_off("amp_patch.cuda_graph.capture()")
    device = _device_of(_all_params())
    with torch.cuda.device(-1 if device is None else device):  # -1: the current one
        return _capture(step, warm_up, pool, device)


def _capture(
    step: Callable[[], Any], warm_up: int, pool: Any, device: torch.device | None
) -> CapturedStep:
    """Do what `capture` says on the current device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # A kept cast remembers in the autograd graph which stream it was made on: that may be one
    # that cannot be captured.
    session.cache.drop_casts()
    _refuse_living_graphs()
    with torch.cuda.stream(stream):
        _run_outside(step, warm_up)
    _settle()
    graph, before = torch.cuda.CUDAGraph(), _ended()
    try:
        with captures.collect(device) as host_side, _captured(graph, pool, stream):
            result = step()
            # What the step itself has written to masters, each replay is to bring to the weights.
            _publish_writes()
        torch.cuda.current_stream().wait_stream(stream)
        masters = [one.masters for one in _stepped_since(before) if one.masters is not None]
        captured = CapturedStep(graph, result, host_side, masters)
    finally:
        # Those that the capture made nobody has computed, also where it failed.
        session.cache.drop_casts()
    _follow_host()
    return captured


def _captured(graph: Any, pool: Any, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the block that is captured.

    The mode says which threads may not allocate, say, while a graph is captured; what is launched
    on the stream is captured whoever does it, so that autograd's threads are in it all the same.
    By torch's default, "global", the thread of a DataLoader that pins memory breaks the capture.
    """
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


def _all_params() -> list[Tensor]:
    return [param for model in session.models.levels for param in model.parameters()]


def _device_of(params: Iterable[Tensor]) -> torch.device | None:
    """Return the CUDA device of parameters; None where none is on one.

    Raises:
        RuntimeError: they are on several.
    """
    devices = {param.device for param in params if param.device.type == "cuda"}
    if len(devices) > 1:
        raise RuntimeError(
            "a CUDA graph captures what one device does; got models with parameters on "
            f"{', '.join(sorted(map(str, devices)))}. Call the step function itself in each "
            "iteration."
        )
    return next(iter(devices), None)


def _refuse_arguments(step: Any, warm_up: Any) -> None:
    mend = "call amp_patch.cuda_graph.capture(step_function, warm_up=3)"
    if not callable(step):
        raise TypeError(
            "capture() needs a function that makes one training step, without arguments; got "
            f"{type(step).__name__}; {mend}."
        )
    if not isinstance(warm_up, int) or isinstance(warm_up, bool):
        raise TypeError(f"warm_up must be an int; got {warm_up!r}; {mend}.")
    if warm_up < _LEAST_WARM_UP:
        raise ValueError(
            f"warm_up must be at least {_LEAST_WARM_UP}, for the first step makes what later ones "
            f"use; got {warm_up}; {mend}."
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "a CUDA graph needs a CUDA device; got torch "
            f"{torch.__version__} with torch.cuda.is_available() False. Call the step function "
            "itself in each iteration."
        )


def _refuse_living_graphs() -> None:
    if is_on():
        return  # DistributedDataParallel holds a node of each parameter all the time
    if held := in_living_graphs(_all_params()):
        raise RuntimeError(
            "a step is captured on a stream of its own, so that no autograd graph of an earlier "
            "step may be alive; got a loss or an output that is still held, whose graph leads to "
            f"{len(held)} parameters, {session.models.names()(held[0])!r} among them. Call "
            "loss = loss.detach(), or del loss, before amp_patch.cuda_graph.capture()."
        )


def _without_autograd(tree: Any) -> Any:
    """Return lists, dicts and the like of the same tensors, without graphs that lead to them.

    A graph from the capture would keep nodes of the stream that was captured, and later steps
    without the CUDA graph would have to wait for that stream, of which torch warns.
    """
    return tree_map_only(Tensor, lambda one: one if one.grad_fn is None else one.detach(), tree)


def _run_outside(step: Callable[[], Any], count: int) -> None:
    """Make steps, at least ``count``, until one is not skipped: then all state is there.

    Raises:
        FloatingPointError: two in a row are skipped at a loss scale that never falls.
    """
    for _ in range(count - 1):
        step()
    was_skipped = False
    while True:
        before = _ended()
        with captures.rehearse():
            step()
        skipped = [one for one in _stepped_since(before) if one.skip.was_skipped]
        if not skipped:
            return
        if was_skipped:
            _refuse_static(skipped)
        was_skipped = True


def _ended() -> list[tuple[OptimizerStep, int]]:
    """Return all prepared optimizers, and how many steps each has ended."""
    return [(one, one.ended) for one in session.optimizers.steps.values()]


def _stepped_since(before: Iterable[tuple[OptimizerStep, int]]) -> list[OptimizerStep]:
    """Return those that have ended a step since `_ended` returned ``before``."""
    return [one for one, ended in before if one.ended != ended]


def _refuse_static(skipped: Iterable[OptimizerStep]) -> None:
    scalers = [session.scalers[index] for one in skipped for index in one.scalers.values()]
    if not any(scaler.rule.dynamic for scaler in scalers):
        raise FloatingPointError(
            "a step must be made before a CUDA graph captures it; got two in a row that were "
            f"skipped, for their gradients are not finite at the static loss scale "
            f"{scalers[0].loss_scale()}. Call amp.initialize(..., loss_scale='dynamic'), or give "
            "a lower one."
        )


def _settle() -> None:
    """Leave nothing on its way: during a capture no event may be asked, no memory given back."""
    session.settle()
    _follow_host()
    session.cache.mark_stale()


def _follow_host() -> None:
    """Bring to the devices what was changed on the host."""
    for one in _device_scalers():
        one.renew()
    _publish_writes()


def _publish_writes() -> None:
    """Bring to the half weights what the user wrote to masters: in a replay the weights win."""
    for step in session.optimizers.steps.values():
        if step.masters is not None:
            step.masters.publish_all_writes()


def _refuse_exhausted() -> None:
    for one in _device_scalers():
        one.poll()
    for index, scaler in enumerate(session.scalers):
        if scaler.exhausted:
            raise FloatingPointError(
                "gradients must become finite at some loss scale; got two replays in a row whose "
                f"are not, with loss scaler {index} at its floor {scaler.loss_scale()}. Call the "
                "step function itself: the error that it raises names the parameters."
            )


def _device_scalers() -> list[DeviceScaler]:
    return [
        one.device_scaler for one in session.scalers if isinstance(one.device_scaler, DeviceScaler)
    ]


def _memory() -> list[Any]:
    """Return what holds the tensors that a step uses now."""
    kept: list[Any] = [*session.cache.casts(), *_device_scalers()]
    for optimizer, step in session.optimizers.steps.items():
        state = [dict(entry) for entry in optimizer.state.values() if isinstance(entry, dict)]
        kept += [step, step.backward.pairs(), copy.copy(step.backward.gradients), state]
    return kept
