"""Gradients whose sums over ranks a script begins in a block, and waits for after it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

RANKS = 2
WARNING = "gradients that a script averages over ranks in tensors of its own"
pytestmark = pytest.mark.filterwarnings("ignore:a hook of a parameter")


@pytest.fixture(autouse=True)
def _other_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a group of one rank; a second one, which has sent the same, is played.

    A sum of what was sent is written when it is waited for.
    """
    begun: weakref.WeakKeyDictionary[Any, list[tuple[Tensor, Tensor]]]
    begun = weakref.WeakKeyDictionary()

    def begin(group: Any, tensors: list[Tensor], *args: Any) -> Any:
        work = group.barrier()
        begun[work] = [(one, one * RANKS) for one in tensors]
        return work

    def wait(work: Any, *args: Any, original: Any = distributed.Work.wait) -> Any:
        for tensor, total in begun.pop(work, ()):
            tensor.copy_(total)
        return original(work, *args)

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(distributed.ProcessGroup, "allreduce", begin)
    monkeypatch.setattr(distributed.Work, "wait", wait)
    yield
    distributed.destroy_process_group()


class Averages:
    """Averages gradients while the backward runs, as tutorials write it.

    Args:
        model: whose gradients.
        is_flat: whether copies are sent, which `finish` copies back.
        is_late: whether `finish` divides, and not the hooks.
    """

    def __init__(self, model: nn.Module, is_flat: bool = False, is_late: bool = False) -> None:
        self._is_flat, self._is_late = is_flat, is_late
        self._begun: list[tuple[Any, nn.Parameter, Tensor]] = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._begin)

    def _begin(self, param: Any) -> None:
        if not self._is_late:
            param.grad.div_(RANKS)
        sent = param.grad.flatten().clone() if self._is_flat else param.grad
        self._begun.append((distributed.all_reduce(sent, async_op=True), param, sent))

    def finish(self) -> None:
        """Wait for all."""
        for work, param, sent in self._begun:
            work.wait()
            if self._is_flat:
                param.grad.copy_(sent.view_as(param.grad))
            if self._is_late:
                param.grad.div_(RANKS)
        self._begun.clear()


def make() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 32).reshape(8, 4)).float().square().mean()


def trained(amp: ModuleType, level: str, in_block: bool, **options: Any) -> list[Tensor]:
    """Return how far the parameters have come in two steps."""
    model, optimizer = make()
    begun = copy.deepcopy(list(model.parameters()))
    averages = Averages(model, **options)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            if in_block:
                averages.finish()
        averages.finish()
        optimizer.step()
    found = zip(amp.master_params(optimizer), begun, strict=True)
    return [(now - before).detach() for now, before in found]


def plain() -> list[Tensor]:
    """Return the same of float32, where all ranks have the gradients of one."""
    model, optimizer = make()
    begun = copy.deepcopy(list(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return [(now - old).detach() for now, old in zip(model.parameters(), begun, strict=True)]


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_the_end_of_a_block_waits_for_what_is_summed_in_place(
    amp: ModuleType, level: str, in_block: bool
) -> None:
    expected = plain()
    size = max(one.abs().max().item() for one in expected)
    found = trained(amp, level, in_block)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.02 * size)


def test_what_is_divided_after_the_block_is_the_unscaled_sum(amp: ModuleType) -> None:
    found = trained(amp, "O1", in_block=False, is_late=True)
    torch.testing.assert_close(found, plain(), rtol=0.01, atol=1e-4)


@pytest.mark.filterwarnings("ignore:What is written to the gradients of half parameters")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_sum_in_a_copy_that_comes_after_the_block_is_told_of(amp: ModuleType, level: str) -> None:
    with pytest.warns(UserWarning, match=WARNING):
        trained(amp, level, in_block=False, is_flat=True)


@pytest.mark.parametrize(
    ("level", "in_block"), [("O0", False), ("O4", False), ("O1", True), ("O2", True)]
)
def test_nothing_is_said_of_copies_that_come_in_time(
    amp: ModuleType, level: str, in_block: bool
) -> None:
    found = trained(amp, level, in_block, is_flat=True)
    torch.testing.assert_close(found, plain(), rtol=0.05, atol=1e-3)


def of_all(loss: Tensor, grads: list[Tensor]) -> Any:
    return distributed.all_reduce(torch.cat([one.flatten() for one in grads]), async_op=True)


def of_log(loss: Tensor, grads: list[Tensor]) -> Any:
    return distributed.all_reduce(loss.detach().clone(), async_op=True)


def by_future(loss: Tensor, grads: list[Tensor]) -> Any:
    return of_all(loss, grads).get_future()


@pytest.mark.parametrize(
    ("begin", "is_told"), [(of_all, True), (of_log, False), (by_future, False)]
)
def test_of_sums_begun_after_the_backward_those_of_gradients_are_told_of(
    amp: ModuleType,
    recwarn: pytest.WarningsRecorder,
    begin: Callable[[Tensor, list[Any]], Any],
    is_told: bool,
) -> None:
    model, optimizer = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        work = begin(loss, [param.grad for param in model.parameters()])
    work.wait()
    assert [WARNING in str(one.message) for one in recwarn] == [True] * is_told
