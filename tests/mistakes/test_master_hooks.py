"""Hooks on what the optimizer steps, which at O2 and O5 are masters: the backward calls them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from training import assert_equal, batches, loss_of, make, prepared

from amp_patch import amp as core
from amp_patch.step.autograd_graph import leaf_of

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALVES = ("O2", "O5")


def stepped(optimizer: Any) -> list[Tensor]:
    """Return the parameters as a script takes them from the optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def backward(amp: ModuleType, model: Any, optimizer: Any, **options: Any) -> None:
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
        scaled_loss.backward(**options)


@pytest.mark.parametrize("level", LEVELS)
def test_one_of_several_gets_all_gradients_at_once(amp: ModuleType, level: str) -> None:
    """In the dtypes of what it was registered on, at the loss scale."""
    model, optimizer = prepared(amp, level, loss_scale=8.0)
    params: list[Tensor] = stepped(optimizer)
    seen: list[list[Tensor]] = []
    handle = torch.autograd.graph.register_multi_grad_hook(params, seen.append)  # type: ignore[arg-type]
    for calls in (1, 2):
        backward(amp, model, optimizer)
        assert len(seen) == calls
    assert [g.dtype for g in seen[0]] == [p.dtype for p in params]
    handle.remove()
    backward(amp, model, optimizer)
    assert len(seen) == 2
    scaled_loss = loss_of(model, next(batches())) * core.loss_scale()
    assert_equal(seen[0], list(torch.autograd.grad(scaled_loss, params)))


@pytest.mark.parametrize("level", LEVELS)
def test_one_of_whichever_comes_first_is_called_once_in_a_backward(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    seen: list[Tensor] = []
    handle = register_multi_grad_hook(stepped(optimizer), seen.append, mode="any")
    for calls in (1, 2):
        backward(amp, model, optimizer)
        assert len(seen) == calls
    assert {g.dtype for g in seen} == {p.dtype for p in stepped(optimizer)}
    handle.remove()
    backward(amp, model, optimizer)
    assert len(seen) == 2


@pytest.mark.parametrize("level", HALVES)
def test_masters_stand_beside_half_parameters_and_results(amp: ModuleType, level: str) -> None:
    """And what a backward is not asked for is None, as torch says."""
    model, optimizer = prepared(amp, level)
    (_, bias, *_), half = stepped(optimizer), next(model.parameters())
    seen: list[Sequence[Tensor | None]] = []
    inputs = next(batches()).requires_grad_()
    handle = register_multi_grad_hook((bias, half, inputs), seen.append)
    loss_of(model, inputs).backward()
    dtypes = [None if g is None else g.dtype for g in seen[0]]
    assert dtypes == [torch.float32, half.dtype, torch.float32]
    loss_of(model, inputs).backward(inputs=[bias])
    assert [g is None for g in seen[1]] == [False, True, True]
    handle.remove()


@pytest.mark.parametrize("level", HALVES)
def test_a_script_may_step_where_all_gradients_are_there(amp: ModuleType, level: str) -> None:
    """As torch's tutorial does; the sums are those of plain PyTorch."""
    (plain, _), (model, optimizer) = make(), prepared(amp, level)
    sums: dict[str, list[float]] = {"plain": [], level: []}
    for name, params in (("plain", list(plain.parameters())), (level, stepped(optimizer))):
        register_multi_grad_hook(
            params, lambda grads, name=name: sums[name].extend(float(g.norm()) for g in grads)
        )
    loss_of(plain, next(batches())).backward()
    loss_of(model, next(batches())).backward()
    torch.testing.assert_close(sums[level], sums["plain"], rtol=2e-2, atol=1e-3)


def test_a_mode_that_torch_has_not_is_refused_by_torch(amp: ModuleType) -> None:
    _, optimizer = prepared(amp, "O2")
    with pytest.raises(ValueError, match="Expects mode to be one of"):
        torch.autograd.graph.register_multi_grad_hook(stepped(optimizer), print, mode="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", LEVELS)
def test_one_of_the_node_that_adds_up_is_called_in_each_backward(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    calls: list[int] = []
    nodes = [get_gradient_edge(p).node for p in stepped(optimizer)]
    handles = [
        node.register_hook(lambda *_, place=place: calls.append(place))
        for place, node in enumerate(nodes)
    ]
    for step in (1, 2):
        backward(amp, model, optimizer)
        assert sorted(calls) == sorted([0, 1, 2, 3] * step)
    handles[1].remove()
    backward(amp, model, optimizer, inputs=stepped(optimizer)[:3])
    assert sorted(calls[8:]) == [0, 2]


@pytest.mark.parametrize("level", HALVES)
def test_a_node_taken_twice_calls_each_hook_once(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    param = stepped(optimizer)[0]
    calls: list[int] = []
    nodes: list[Any] = [get_gradient_edge(param).node for _ in range(3)]
    for node in nodes:
        node.register_hook(lambda *_: calls.append(1))
    backward(amp, model, optimizer)
    assert len(calls) == len(nodes)


@pytest.mark.parametrize("level", HALVES)
def test_a_prehook_of_a_masters_node_is_called_before(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    calls: list[bool] = []
    param = next(model.parameters())
    node: Any = get_gradient_edge(stepped(optimizer)[0]).node
    node.register_prehook(lambda *_: calls.append(param.grad is None))
    node.register_hook(lambda *_: calls.append(param.grad is None))
    backward(amp, model, optimizer)
    assert calls == [True, False]


def test_a_node_of_what_has_no_gradient_or_is_no_leaf_stays_torchs(amp: ModuleType) -> None:
    prepared(amp, "O2")
    plain, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    result = leaf * 2
    assert get_gradient_edge(result).node is result.grad_fn
    assert leaf_of(get_gradient_edge(leaf)) is leaf
    with pytest.raises(RuntimeError, match="does not require gradients"):
        get_gradient_edge(plain)
