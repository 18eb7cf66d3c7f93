"""What a backward comes to, as torch's own backward writes it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from amp_patch.step.autograd_graph import OF_GRAD_SCALER, AutogradGraph, leaf_of, leaves_of


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from("+*d"))))
def test_the_leaves_are_those_that_a_backward_writes_to(steps: list[tuple[int, int, str]]) -> None:
    leaves = [torch.ones(2, requires_grad=index != 2) for index in range(4)]
    values: list[Tensor] = list(leaves)
    for one, other, kind in steps:
        x, y = values[one % len(values)], values[other % len(values)]
        values.append({"+": x + y, "*": x * y, "d": x.detach() * y}[kind])
    loss = values[-1].sum()
    found = set(map(id, leaves_of(loss)))
    if loss.requires_grad:
        loss.backward()
    assert found == {id(leaf) for leaf in leaves if leaf.grad is not None}


def test_the_leaves_of_several_tensors_and_of_none() -> None:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    losses = [layer(torch.ones(1, 2)).sum() for layer in layers]
    params = {id(param) for layer in layers for param in layer.parameters()}
    assert set(map(id, leaves_of(losses))) == params
    assert leaves_of(None) == leaves_of(torch.ones(())) == []
    assert AutogradGraph(losses, ()).written([layers[0].weight]) == {id(layers[0].weight)}


def test_a_leaf_is_named_by_itself_or_by_the_edge_that_leads_to_it() -> None:
    leaf = torch.ones(2, requires_grad=True)
    between = leaf * 2
    assert leaf_of(leaf) is leaf_of(get_gradient_edge(leaf)) is leaf
    assert leaf_of(get_gradient_edge(between)) is leaf_of("none") is None
    assert AutogradGraph(between, ()).written([get_gradient_edge(leaf)]) == {id(leaf)}


def test_a_way_ends_at_a_stop_and_where_a_grad_scaler_has_scaled() -> None:
    one, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    inner = (one * other).sum()
    outer = inner * other.sum()
    assert [id(leaf) for leaf in AutogradGraph(outer, [inner.grad_fn]).leaves()] == [id(other)]
    inner.grad_fn.metadata[OF_GRAD_SCALER] = True
    found = AutogradGraph(outer, (), through_grad_scalers=False).leaves()
    assert [id(leaf) for leaf in found] == [id(other)]
    assert len(AutogradGraph(outer, ()).leaves()) == 2


def test_what_is_behind_a_node_was_computed_from_it() -> None:
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf.exp()
    outer = (inner.log() + leaf).sum()
    names = {node.name() for node in AutogradGraph(outer, ()).behind([inner.grad_fn])}
    assert names == {"LogBackward0", "AddBackward0", "SumBackward0"}
