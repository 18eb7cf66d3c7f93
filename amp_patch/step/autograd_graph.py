"""What a backward comes to: the nodes and the leaves behind a loss. Knows no optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

#: Marks, in its metadata, the node of a loss that a `GradScaler` has scaled.
OF_GRAD_SCALER = "amp_patch serves its GradScaler"
#: The name of a node that writes the gradient of a leaf.
_OF_LEAF = "torch::autograd::AccumulateGrad"


def leaves_of(loss: Any) -> list[Tensor]:
    """Return the leaves that the backward of a loss, or of several tensors, writes to."""
    return AutogradGraph(loss, ()).leaves()


def leaf_of(given: Any) -> Tensor | None:
    """Return what one of the ``inputs`` of a backward stands for, if that is a tensor.

    Args:
        given: a tensor, or the ``GradientEdge`` that leads to one.
    """
    if isinstance(given, Tensor):
        return given
    node: Any = getattr(given, "node", None)
    return node.variable if node is not None and node.name() == _OF_LEAF else None


class AutogradGraph:
    """What a backward comes to, on ways that do not lead through some nodes.

    Args:
        tensors: of ``torch.autograd.backward``.
        stops: these nodes.
        through_grad_scalers: False: nor through those of losses that a `GradScaler` has scaled.
    """

    def __init__(
        self, tensors: Any, stops: Iterable[Any], *, through_grad_scalers: bool = True
    ) -> None:
        seen = {None, *stops}
        given = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        nodes: list[Any] = [getattr(one, "grad_fn", None) for one in given]
        self._callers: dict[Any, list[Any]] = {}
        self._nodes: list[Any] = []
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if not through_grad_scalers and OF_GRAD_SCALER in node.metadata:
                continue
            self._nodes.append(node)
            for following, _ in node.next_functions:
                self._callers.setdefault(following, []).append(node)
                nodes.append(following)

    def leaves(self) -> list[Tensor]:
        """Return the leaves that it comes to."""
        # by its name, for a node of the user's own function may have any attribute
        return [node.variable for node in self._nodes if node.name() == _OF_LEAF]

    def written(self, inputs: Any) -> set[int]:
        """Return the ids of the leaves that are written to: all, or those of ``inputs``.

        Args:
            inputs: a list of them, see `leaf_of`; or None.
        """
        leaves = set(map(id, self.leaves()))
        return leaves if inputs is None else leaves.intersection(map(id, map(leaf_of, inputs)))

    def behind(self, nodes: Iterable[Any]) -> Iterator[Any]:
        """Yield the nodes of what was computed from the results of these."""
        seen: set[Any] = set()
        waiting = list(nodes)
        while waiting:
            new = set(self._callers.get(waiting.pop(), ())) - seen
            seen |= new
            waiting += new
            yield from new
