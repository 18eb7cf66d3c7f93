"""What a scaled backward adds to true gradients is divided; nothing else is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_patch.gradients import true_gradients
from amp_patch.gradients.true_gradients import TrueGradients


@pytest.fixture
def param() -> nn.Parameter:
    one = nn.Parameter(torch.ones(2))
    one.grad = torch.full((2,), 3.0)
    return one


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0)])
def test_what_is_added_is_divided_until_the_end(param: nn.Parameter, scale: float | Tensor) -> None:
    true = TrueGradients(scale)
    true.keep([param])
    assert true.is_as_it_was(param)
    (param * param).sum().mul(8.0).backward()
    assert param.grad.tolist() == [5.0, 5.0]
    assert true.has(param)
    assert not true.is_as_it_was(param)
    true.end()
    param.sum().mul(8.0).backward()
    assert param.grad.tolist() == [13.0, 13.0]


def test_not_while_another_block_is_open_inside(param: nn.Parameter) -> None:
    true = TrueGradients(8.0)
    true.keep([param])
    true.is_on = False
    param.sum().backward()
    assert param.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_is_cleared_is_true_no_more(param: nn.Parameter, set_to_none: bool) -> None:
    true = TrueGradients(8.0)
    true.keep([param])
    param.grad = None if set_to_none else torch.zeros(2)
    param.sum().mul(8.0).backward()
    assert param.grad.tolist() == [8.0, 8.0]
    assert not true.has(param)


@pytest.mark.parametrize("clear", [torch.zero_, None])
def test_what_is_cleared_between_two_backwards_of_the_block_is_true_no_more(
    param: nn.Parameter, clear: Callable[[Tensor], object] | None
) -> None:
    true = TrueGradients(8.0)
    true.keep([param])
    param.sum().mul(8.0).backward()
    assert param.grad.tolist() == [4.0, 4.0]
    if clear is None:
        param.grad = torch.zeros(2)
    else:
        clear(param.grad)
    param.sum().mul(8.0).backward()
    assert param.grad.tolist() == [8.0, 8.0]
    assert not true.has(param)


def test_what_overflows_leaves_the_true_gradient(param: nn.Parameter) -> None:
    true = TrueGradients(8.0)
    true.keep([param])
    (param * torch.tensor([1.0, torch.inf])).sum().backward()
    assert param.grad.tolist() == [3.0, 3.0]


def test_frozen_ones_are_none_of_these() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    true = TrueGradients(8.0)
    true.keep([frozen])
    assert not true.has(frozen)


def test_sparse_ones_are_divided() -> None:
    table = nn.Embedding(3, 1, sparse=True)
    loss = table(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    true = TrueGradients(8.0)
    true.keep([table.weight])
    (loss * 8.0).backward()
    assert table.weight.grad.to_dense().flatten().tolist() == [0.0, 2.0, 0.0]


LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


@LEVELS
def test_a_plain_backward_in_a_block_adds_all_of_it(amp: ModuleType, level: str) -> None:
    """Of a probe with an optimizer of its own, over detached features, which accumulates."""
    model, probe = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    probe_optimizer = torch.optim.SGD(probe.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0)
    for _ in range(2):
        probe_optimizer.zero_grad()
        for _ in range(3):
            loss = model(torch.ones(1, 2)).float().sum()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                probe(torch.ones(1, 2)).float().sum().backward()
        assert probe.weight.grad.tolist() == [[3.0, 3.0]]
        probe_optimizer.step()


@LEVELS
@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_a_plain_backward_is_the_blocks_again(
    amp: ModuleType, level: str, fails: bool
) -> None:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.0)
    amp.initialize(layers, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0)
    x = torch.ones(1, 2, dtype=layers[1].weight.dtype)
    layers[1](x).float().sum().backward()
    loss = layers[1](0.0 * layers[0](x) + x).float().sum()
    leaf = torch.ones(1, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        if fails:
            leaf.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                leaf.sum().backward()
        else:
            leaf.sum().backward()
        scaled_loss.backward()
    optimizer.add_param_group({"params": layers[1].parameters()})
    [weight, _] = list(amp.master_params(optimizer))[2:]
    assert weight.grad.tolist() == [[2.0, 2.0]]


@LEVELS
def test_blocks_inside_of_another_add_to_what_that_has_scaled(amp: ModuleType, level: str) -> None:
    """To a layer that no optimizer holds, until one gets it."""
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)])
    first, second = (torch.optim.SGD(layers[row].parameters(), lr=0.0) for row in (0, 1))
    options = {"opt_level": level, "loss_scale": 1024.0, "verbosity": 0}
    amp.initialize(layers, [first, second], **options)
    x = torch.ones(1, 2, dtype=layers[2].weight.dtype)
    losses = [layers[2](0.0 * layers[row](x) + x).float().sum() for row in (0, 1)]
    with amp.scale_loss(losses[0], first) as outer:
        outer.backward()
        with amp.scale_loss(losses[1], second) as inner:
            inner.backward()
    first.add_param_group({"params": layers[2].parameters()})
    [weight, _] = list(amp.master_params(first))[2:]
    assert weight.grad.tolist() == [[2.0, 2.0]]


def test_a_backward_of_another_thread_adds_all_of_it(param: nn.Parameter) -> None:
    true = TrueGradients(8.0)
    true.keep([param])
    other = threading.Thread(target=lambda: param.sum().backward())
    other.start()
    other.join()
    assert param.grad.tolist() == [4.0, 4.0]
    param.sum().mul(8.0).backward()
    assert param.grad.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_backward_is_of_who_called_it_whatever_thread_runs_it(
    param: nn.Parameter, is_own: bool
) -> None:
    """A GPU's run in a thread of torch's; on a CPU those do that other backwards call, in turn."""
    ran_in: list[int] = []

    def called(depth: int) -> Tensor:
        class Nested(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, one: Tensor) -> Tensor:
                return one.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                with torch.enable_grad():
                    inner = called(depth - 1) if depth else param.sum().mul(8.0)
                    ran_in.append(threading.get_ident())
                    inner.backward()
                return grad

        return Nested.apply(torch.ones((), requires_grad=True))

    true = TrueGradients(8.0)
    true.keep([param])
    thread = threading.Thread(target=lambda: called(80).backward())
    if is_own:
        called(80).backward()
    else:
        thread.start()
        thread.join()
    assert ran_in[-1] not in (threading.get_ident(), thread.ident)
    assert param.grad.tolist() == ([4.0, 4.0] if is_own else [11.0, 11.0])


def test_a_parameter_that_is_named_twice_is_divided_once(param: nn.Parameter) -> None:
    true = TrueGradients(8.0)
    true.keep([param, param])
    true.keep([param])
    param.sum().mul(8.0).backward()
    assert param.grad.tolist() == [4.0, 4.0]


def test_a_gradient_that_stays_as_it_is_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read its numbers waits for a device."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for param in params[:2]:
        param.grad = torch.full((2,), 3.0)
    params[2].grad = torch.zeros(2)
    looks: list[int] = []
    look = true_gradients.are_any

    def noted(grads: list[Tensor | None]) -> list[bool]:
        looks.append(len(grads))
        return look(grads)

    monkeypatch.setattr(true_gradients, "are_any", noted)
    true = TrueGradients(8.0)
    true.keep(params)
    assert not looks  # most often no backward of the block reaches them
    torch.stack(params).sum().mul(8.0).backward()
    assert looks == [3]
    assert [param.grad.tolist() for param in params] == [[4.0, 4.0], [4.0, 4.0], [8.0, 8.0]]
    assert [true.has(param) for param in params] == [True, True, False]


def test_what_a_thread_is_told_by_lives_as_long_as_it_is_held() -> None:
    """Torch 2.6 would free it."""
    value = object()
    held = sys.getrefcount(value)
    for _ in range(3):
        true_gradients._stash("amp_patch.test", value)
    assert sys.getrefcount(value) >= held + 1
    assert true_gradients._stashed("amp_patch.test") is value
