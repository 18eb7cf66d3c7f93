"""Weights and activations that collectives write to; the other ranks are played."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

SENT = 0.25


#: Methods of a process group, each with what a script calls; h is written to.
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "allreduce": lambda h, other: distributed.all_reduce(h),
    "allreduce_coalesced": lambda h, other: _coalesced(h),
    "broadcast": lambda h, other: distributed.broadcast(h, 0),
    "reduce": lambda h, other: distributed.reduce(h, 0),
    "scatter": lambda h, other: distributed.scatter(h, [other]),
    "gather": lambda h, other: distributed.gather(other, [h]),
    "recv": lambda h, other: distributed.recv(h, 0),
    "alltoall": lambda h, other: distributed.all_to_all([h], [other]),
    "allgather": lambda h, other: distributed.all_gather([h], other),
    "reduce_scatter": lambda h, other: distributed.reduce_scatter(h, [other]),
}
#: The same of those that have other names in other versions of torch.
OF_ONE: dict[tuple[str, str], Callable[[Tensor, Tensor], Any]] = {
    ("all_to_all_single", "alltoall_base"): distributed.all_to_all_single,
    ("all_gather_single", "_allgather_base"): distributed.all_gather_into_tensor,
    ("reduce_scatter_single", "_reduce_scatter_base"): distributed.reduce_scatter_tensor,
}
for names, call in OF_ONE.items():
    CALLS[next(one for one in names if hasattr(distributed.ProcessGroup, one))] = call


def _coalesced(tensor: Tensor) -> None:
    with distributed._coalescing_manager():
        distributed.all_reduce(tensor)


def _first_tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    else:
        for one in given:
            yield from _first_tensors(one)


@pytest.fixture(autouse=True)
def _other_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a process group of one rank, whose collectives write a number when they are waited for.

    As torch's they move no version.
    """
    written: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()

    def begin(group: Any, outputs: Any, *args: Any) -> Any:
        work = group.barrier()
        written[work] = [*_first_tensors(outputs)]
        return work

    def wait(work: Any, *args: Any, original: Any = distributed.Work.wait) -> Any:
        for tensor in written.get(work, ()):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.fill_(SENT)
        return original(work, *args)

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    for name in CALLS:
        monkeypatch.setattr(distributed.ProcessGroup, name, begin)
    monkeypatch.setattr(distributed.Work, "wait", wait)
    yield
    distributed.destroy_process_group()


def prepared(amp: ModuleType, level: str) -> tuple[nn.Module, Any]:
    """Return a model that has made a step, and its optimizer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.ones(4, 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return model, optimizer


def of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return model.state_dict().values()


def of_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return model.parameters()


CASES = [("O1", of_model), ("O2", of_groups), ("O2", of_state), ("O2", of_model), ("O3", of_state)]


@pytest.mark.parametrize(("level", "place"), CASES)
def test_what_was_sent_is_computed_with_and_saved(
    amp: ModuleType, level: str, place: Callable[..., Iterable[Tensor]]
) -> None:
    model, optimizer = prepared(amp, level)
    inputs = torch.ones(1, 3)
    model(inputs)  # casts of weights are held since
    for tensor in place(model, optimizer):
        distributed.broadcast(tensor, 0)
    assert torch.equal(model(inputs).float(), torch.full((1, 2), 4 * SENT))
    for value in model.state_dict().values():
        assert torch.equal(value, torch.full_like(value, SENT))


class Between(nn.Module):
    """Two layers of one activation, which something writes to between them."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.before, self.after = nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.write = write

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(inputs)
        outputs = [self.before(hidden)]
        with torch.no_grad():
            waiting = self.write(hidden)
        if waiting is not None:
            outputs.append(self.before(hidden))  # as it is not written to yet
            waiting.wait()
        last = self.after(hidden)
        assert outputs  # graphs of the casts of before
        return last


def after(model: Between) -> Tensor:
    """Return what the second layer makes of what was sent, in float64."""
    return model.after.bias.detach().double() + SENT * model.after.weight.detach().double().sum(1)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_next_layer_takes_what_a_collective_has_written(amp: ModuleType, name: str) -> None:
    def write(hidden: Tensor) -> None:
        CALLS[name](hidden, torch.zeros_like(hidden))

    model: Any = amp.initialize(Between(write), opt_level="O4", verbosity=0)
    found = model(torch.randn(2, 8)).detach()
    torch.testing.assert_close(found.double(), after(model).expand(2, -1), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("is_coalesced", [False, True])
def test_the_next_layer_takes_what_is_there_after_the_wait(
    amp: ModuleType, is_coalesced: bool
) -> None:
    def begin(hidden: Tensor) -> Any:
        if not is_coalesced:
            return distributed.all_reduce(hidden, async_op=True)
        with distributed._coalescing_manager(async_ops=True) as manager:
            distributed.all_reduce(hidden)
        return manager

    model: Any = amp.initialize(Between(begin), opt_level="O4", verbosity=0)
    found = model(torch.randn(2, 8)).detach()
    torch.testing.assert_close(found.double(), after(model).expand(2, -1), rtol=0.02, atol=0.01)


def test_the_next_layer_takes_what_is_there_where_nobody_waits(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(group: Any, tensors: list[Tensor], *args: Any) -> None:
        with torch.autograd._unsafe_preserve_version_counter(tensors[0]):
            tensors[0].fill_(SENT)

    monkeypatch.setattr(distributed.ProcessGroup, "allreduce", write)
    model: Any = amp.initialize(Between(distributed.all_reduce), opt_level="O4", verbosity=0)
    found = model(torch.randn(2, 8)).detach()
    torch.testing.assert_close(found.double(), after(model).expand(2, -1), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all_single"])
def test_a_weight_is_cast_anew_after_the_wait(amp: ModuleType, name: str) -> None:
    model = amp.initialize(nn.Linear(3, 2, bias=False), opt_level="O1", verbosity=0)
    others = [torch.zeros(2, 3)] if name == "all_to_all_single" else []
    with torch.no_grad():
        work = getattr(distributed, name)(model.weight, *others, async_op=True)
    model(torch.ones(1, 3))  # the weight is not there yet
    work.wait()
    assert torch.equal(model(torch.ones(1, 3)).float(), torch.full((1, 2), 3 * SENT))


def test_an_activation_that_is_saved_may_be_shared_between_forward_and_backward(
    amp: ModuleType,
) -> None:
    model = amp.initialize(nn.Linear(3, 2), opt_level="O1", verbosity=0)
    hidden = torch.randn(4, 3, requires_grad=True) * 2
    loss = (hidden * model(hidden).float().sum()).sum()
    with torch.no_grad():
        distributed.all_reduce(hidden)
    loss.backward()
    assert model.weight.grad is not None


def test_statistics_may_be_shared_between_forward_and_backward(amp: ModuleType) -> None:
    model = amp.initialize(nn.BatchNorm1d(3), opt_level="O1", verbosity=0)
    loss = model(torch.randn(4, 3)).square().sum()
    distributed.all_reduce(model.running_mean)
    loss.backward()
    assert model.weight.grad is not None
