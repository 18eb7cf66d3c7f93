"""Tensors that a script gives parameters as their gradients stay theirs, and hold what is true.

A flat buffer of which all gradients are views, or a list of gradients that a script zeroes itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.nn import functional as F

SCALE = 1024.0
INPUTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(16) % 3
KINDS = pytest.mark.parametrize("kind", ["flat", "list"])


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def give(params: list[Tensor], kind: str) -> list[Tensor]:
    """Give parameters gradients of 0; return what the script keeps, to zero and to read."""
    if kind == "list":
        kept = [torch.zeros_like(param) for param in params]
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad
        return kept
    kept = []
    for dtype in dict.fromkeys(param.dtype for param in params):
        own = [param for param in params if param.dtype == dtype]
        flat = torch.zeros(sum(map(Tensor.numel, own)), dtype=dtype)
        for param, part in zip(own, flat.split(list(map(Tensor.numel, own))), strict=True):
            param.grad = part.view_as(param)
        kept.append(flat)
    return kept


def norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([one.detach().flatten().double() for one in tensors]).norm())


def train(
    amp: ModuleType | None, level: str, kind: str, blocks: int = 1, of: str = "model", **how: Any
) -> tuple[list[float], list[Tensor]]:
    """Return the norms that the script reads of what it keeps, step by step, and the weights."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if amp is not None:
        scale = {"loss_scale": SCALE} if level in ("O1", "O2") else {}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **scale)
    params = list(model.parameters())
    if amp is not None and of == "masters":
        params = list(amp.master_params(optimizer))
    kept, norms = give(params, kind), []
    places = [param.grad.data_ptr() for param in params]
    for _ in range(4):
        torch._foreach_zero_(kept)
        if how.get("gives_anew"):
            optimizer.zero_grad()
            kept = give(params, kind)
            places = [param.grad.data_ptr() for param in params]
        for block in range(blocks):
            loss = F.cross_entropy(model(INPUTS[block::blocks]).float(), TARGETS[block::blocks])
            if amp is None:
                (loss / blocks).backward()
            else:
                delays = how.get("delays", False) and block < blocks - 1
                scaled_backward(amp, loss / blocks, optimizer, delay_unscale=delays)
        assert [param.grad.data_ptr() for param in params] == places
        norms.append(norm(kept))
        if how.get("clips"):
            torch._foreach_mul_(kept, 0.1 / norms[-1])
        optimizer.step()
    weights = [param.detach().float().clone() for param in model.parameters()]
    return norms, weights


def assert_alike(amp: ModuleType, level: str, *args: Any, **kwargs: Any) -> None:
    norms, weights = train(amp, level, *args, **kwargs)
    true_norms, true_weights = train(None, level, *args, **kwargs)
    error = 0.02 if level in ("O4", "O5") else 0.005
    assert norms == pytest.approx(true_norms, rel=error)
    for weight, true in zip(weights, true_weights, strict=True):
        assert torch.allclose(weight, true, rtol=error, atol=error)


@KINDS
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize(("blocks", "delays"), [(1, False), (2, False), (2, True)])
def test_what_a_script_zeroes_and_reads_has_the_gradients(
    amp: ModuleType, kind: str, level: str, blocks: int, delays: bool
) -> None:
    assert_alike(amp, level, kind, blocks, delays=delays)


@KINDS
def test_what_a_script_clips_there_is_stepped_at_o1(amp: ModuleType, kind: str) -> None:
    assert_alike(amp, "O1", kind, clips=True)


@KINDS
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_it_writes_to_half_ones_is_warned_of(amp: ModuleType, kind: str, level: str) -> None:
    with pytest.warns(UserWarning, match="gradients of half parameters after scale_loss"):
        train(amp, level, kind, clips=True)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_overflows_leaves_the_memory_where_it_is(amp: ModuleType, level: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    params = list(model.parameters())
    kept, before = give(params, "flat"), [param.detach().clone() for param in params]
    places = [param.grad.data_ptr() for param in params]
    scaled_backward(amp, model(INPUTS).float().sum() * torch.inf, optimizer)
    optimizer.step()
    assert [param.grad.data_ptr() for param in params] == places
    assert all(map(torch.equal, params, before))
    torch._foreach_zero_(kept)
    scaled_backward(amp, F.cross_entropy(model(INPUTS).float(), TARGETS), optimizer)
    assert [param.grad.data_ptr() for param in params] == places
    assert norm([param.grad for param in params]) == pytest.approx(norm(kept))
    optimizer.step()
    assert not any(map(torch.equal, params[:1], before))


@KINDS
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_that_raises_leaves_what_was_there(amp: ModuleType, kind: str, level: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    params = list(model.parameters())
    kept = give(params, kind)
    for one in kept:
        one.fill_(3.0)
    places = [param.grad.data_ptr() for param in params]

    def fail() -> None:
        with amp.scale_loss(model(INPUTS).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [param.grad.data_ptr() for param in params] == places
    assert all(bool((one == 3.0).all()) for one in kept)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_write_to_the_memory_in_the_block_is_warned_of(amp: ModuleType, level: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    kept = give(list(model.parameters()), "flat")

    def halve() -> None:
        with amp.scale_loss(model(INPUTS).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            torch._foreach_mul_(kept, 0.5)

    with pytest.warns(UserWarning, match="got a write to that memory in the block"):
        halve()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_views_that_masters_get_anew_in_each_step_have_the_gradients_to_be_clipped(
    amp: ModuleType, level: str
) -> None:
    assert_alike(amp, level, "flat", of="masters", clips=True, gives_anew=True)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_views_that_masters_lose_with_the_step_are_warned_of(amp: ModuleType, level: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    kept = give(list(amp.master_params(optimizer)), "flat")

    def step() -> None:
        torch._foreach_zero_(kept)
        scaled_backward(amp, F.cross_entropy(model(INPUTS).float(), TARGETS), optimizer)
        optimizer.step()

    step()
    with pytest.warns(UserWarning, match="give masters anew what they are to have of yours"):
        step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_buffer_may_serve_two_optimizers(amp: ModuleType, level: str) -> None:
    model = make()
    halves = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 3)]
    model, optimizers = amp.initialize(model, halves, opt_level=level, verbosity=0)
    params = [*model[0].parameters(), *model[3].parameters()]
    kept = give(params, "flat")
    places = [param.grad.data_ptr() for param in params]
    for _ in range(2):
        torch._foreach_zero_(kept)
        scaled_backward(amp, F.cross_entropy(model(INPUTS).float(), TARGETS), optimizers)
        assert [param.grad.data_ptr() for param in params] == places
        assert norm(kept) == norm([param.grad for param in params]) > 0.0
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_expanded_gradients_are_added_to(amp: ModuleType, level: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    params = list(model.parameters())
    for param in params:
        param.grad = torch.ones((), dtype=param.dtype).expand_as(param)
    scaled_backward(amp, model(INPUTS).float().sum() * 0.0, optimizer)
    assert all(bool((param.grad == 1.0).all()) for param in params)


@KINDS
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_they_may_come_after_a_step(amp: ModuleType, level: str, kind: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)

    def block() -> None:
        loss = F.cross_entropy(model(INPUTS).float(), TARGETS)
        scaled_backward(amp, loss, optimizer)

    block()
    optimizer.step()
    optimizer.zero_grad()
    params = list(model.parameters())
    kept = give(params, kind)
    places = [param.grad.data_ptr() for param in params]
    block()
    assert [param.grad.data_ptr() for param in params] == places
    assert norm(kept) == pytest.approx(norm([param.grad for param in params]))
    assert norm(kept) > 0.0
