"""Trains small graph networks at a level, and in float32 to compare with."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = ("O1", "O2", "O4", "O5")
HALF_OF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
NODES, FEATURES, HIDDEN, CLASSES = 40, 16, 12, 4


class Layer(NamedTuple):
    """A layer of a library.

    Attributes:
        make: takes the widths of its input and output.
        call: takes the layer, the graph and the features of the nodes.
    """

    make: Callable[[int, int], nn.Module]
    call: Callable[[Any, Any, Tensor], Tensor]


class Network(nn.Module):
    """Two layers; notes the dtypes of what each computes, which torch's functions told it."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.first = layer.make(FEATURES, HIDDEN)
        self.second = layer.make(HIDDEN, CLASSES)
        self.call = layer.call
        self.dtypes: set[torch.dtype] = set()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        hidden = F.relu(self.call(self.first, graph, x)).reshape(len(x), HIDDEN)
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda kept: kept):
            return self.call(self.second, graph, hidden).reshape(len(x), CLASSES)

    def _note(self, tensor: Tensor) -> Tensor:
        self.dtypes.add(tensor.dtype)
        return tensor.detach()  # an output that is kept as it is would hold its own graph


def train(
    amp: ModuleType | None, layer: Layer, graph: Any, level: str | None
) -> tuple[list[float], Network]:
    """Return the losses of 10 steps that were made, and the network.

    Args:
        amp: not used where there is no level.
        graph: what the layer takes; passed to the model beside the features.
        level: None trains in float32 without amp.
    """
    torch.manual_seed(0)
    x, targets = torch.randn(NODES, FEATURES), torch.randint(CLASSES, (NODES,))
    model = Network(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses: list[float] = []
    for _ in range(40):  # the loss scale may come down first
        optimizer.zero_grad()
        loss = F.cross_entropy(model(graph, x).float(), targets)
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        if level is None or not amp.step_was_skipped(optimizer):
            losses.append(loss.item())
        if len(losses) == 10:
            return losses, model
    raise AssertionError(f"only {len(losses)} steps of 40 were made")


def check(amp: ModuleType, layer: Layer, graph: Any, level: str) -> None:
    """The loss after 10 steps is within 5 % of the first of float32's; half features were kept."""
    expected, _ = train(None, layer, graph, None)
    losses, model = train(amp, layer, graph, level)
    assert expected[-1] < expected[0]
    assert abs(losses[-1] - expected[-1]) < 0.05 * expected[0]
    assert HALF_OF[level] in model.dtypes


def check_step(amp: ModuleType, model: nn.Module, inputs: tuple[Any, ...], level: str) -> None:
    """The result and the gradients of one step are near those of float32, as far as half goes.

    Args:
        amp: what sets up a copy of the model.
        model: returns a tensor, or several, of which the first counts.
        inputs: of the model; a float32 tensor is the last.
        level: O1 to O5.
    """
    ours = copy.deepcopy(model)
    expected = _first(model(*inputs))  # before the functions that it calls are replaced, too
    expected.square().mean().backward()
    amp.initialize(ours, opt_level=level, verbosity=0)
    precision = 16 * torch.finfo(HALF_OF.get(level, torch.float16)).eps
    found = _first(ours(*inputs))
    assert _distance(found, expected) < precision
    found.float().square().mean().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None and theirs.grad.norm() > 1e-4:
            assert _distance(mine.grad, theirs.grad) < 4 * precision, name


def _first(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def _distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())
