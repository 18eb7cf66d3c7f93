"""Masters that a script differentiates by: the graph has their half parameters in their place.

Whoever takes parameters from ``optimizer.param_groups``, for ``backward(inputs=...)`` or
``torch.autograd.grad``, means the weights that the model computes with. A penalty may be computed
of the masters themselves, so the gradient of a master is that of both. Knows no scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd import graph

from amp_patch.casting.torch_compile import never_trace
from amp_patch.step.autograd_graph import leaf_of


class EdgeOfMaster(graph.GradientEdge):
    """Leads to a half parameter's node, where hooks are called; asked for was its master.

    Attributes:
        master: the float32 tensor.
    """

    master: Tensor

    @classmethod
    def made(cls, edge: graph.GradientEdge, master: Tensor) -> EdgeOfMaster:
        """Return one.

        Args:
            edge: leads to the half parameter's node.
        """
        made = cls(*edge)
        made.master = master
        return made


_ParamOf = Callable[[Tensor], Tensor]

#: What every call with ``inputs`` ends in, and the module that has bound it: torch 2.13 and before.
_ENGINE = "torch.autograd.graph._engine_run_backward", "torch.autograd._engine_run_backward"


def replacements(param_of: _ParamOf) -> dict[str, Callable[[Any], Any]]:
    """Return, for each function by its path, what makes its replacement.

    Args:
        param_of: returns the half parameter of a master, and any other tensor itself.
    """
    paths = _ENGINE if hasattr(graph, "_engine_run_backward") else ()
    return {path: functools.partial(_reaching, param_of) for path in paths}


def listed(inputs: Any) -> list[Any]:
    """Return the ``inputs`` of a backward, which may be one, several, or a dict of them."""
    if isinstance(inputs, (Tensor, graph.GradientEdge)):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, dict) else inputs)


def with_halves(param_of: _ParamOf, inputs: Iterable[Any]) -> list[Any]:
    """Return ``inputs``, followed by the half parameters of the masters among them."""
    given = list(map(_behind, inputs))
    return [*given, *(half for _, _, half in _masters(param_of, given))]


def _behind(given: Any) -> Any:
    """Return what one of the ``inputs`` stands for: a master, or itself."""
    return given.master if isinstance(given, EdgeOfMaster) else given


def _masters(param_of: _ParamOf, inputs: Sequence[Any]) -> list[tuple[int, Tensor, Tensor]]:
    """Return the masters among ``inputs``: the place of each, itself, and its half parameter."""
    leaves = ((place, leaf_of(one)) for place, one in enumerate(inputs))
    found = [(place, leaf, param_of(leaf)) for place, leaf in leaves if leaf is not None]
    # torch refuses what requires no gradient, as it does without amp
    return [row for row in found if row[2] is not row[1] and row[2].requires_grad]


def _reaching(param_of: _ParamOf, original: Callable[..., Any]) -> Callable[..., Any]:
    @never_trace
    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[3] if len(args) > 3 else ()
        inputs = list(map(_behind, given))
        masters = _masters(param_of, inputs)
        if not masters:
            return original(outputs, *args, **kwargs)
        every = (*inputs, *(half for _, _, half in masters))
        if kwargs.get("accumulate_grad", True):
            return original(outputs, *args[:3], every, *args[4:], **kwargs)
        found = original(outputs, *args[:3], every, True, *args[5:], **kwargs)
        grads = list(found[: len(inputs)])
        for (place, master, _), grad in zip(masters, found[len(inputs) :], strict=True):
            grads[place] = _sum(grads[place], grad, master)
        unused = [place for place, grad in enumerate(grads) if grad is None]
        if unused and not args[4]:
            _refuse_unused(unused[0])
        return tuple(grads)

    return run_backward


def _sum(own: Tensor | None, of_half: Tensor | None, master: Tensor) -> Tensor | None:
    """Return the gradient of a master, of what came to it and to its half parameter."""
    if of_half is None:
        return own
    grad = of_half.to(master.dtype)
    return grad if own is None else own + grad


def _refuse_unused(place: int) -> NoReturn:
    """Raise as torch does.

    Raises:
        RuntimeError: as said.
    """
    raise RuntimeError(
        "torch.autograd.grad() differentiates by tensors that its outputs were computed of; the "
        f"one at index {place} appears to not have been used in the graph. Compute the outputs "
        "with the model that amp.initialize() returned, or pass allow_unused=True, which gives "
        "None for it."
    )
