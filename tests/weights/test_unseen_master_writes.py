"""What a script writes to masters through their ``.data`` is trained on, as in float32."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Adam, Optimizer

from amp_patch.weights.unseen_master_writes import UnseenMasterWrites

Write = Callable[[list[Tensor], int], None]


def lookahead(masters: list[Tensor], step: int) -> None:
    """Every third step half way back to what the weights were three steps before."""
    for master in masters:
        slow = vars(master).setdefault("slow", master.detach().clone())
        if step % 3 == 2:
            slow += 0.5 * (master.data - slow)
            master.data.copy_(slow)


def decay(masters: list[Tensor], _: int) -> None:
    for master in masters:
        master.data.mul_(0.9)


def clip(masters: list[Tensor], _: int) -> None:
    for master in masters:
        master.data.clamp_(-0.05, 0.05)


def nothing(masters: list[Tensor], step: int) -> None:
    """Write nothing."""


def late(masters: list[Tensor], step: int) -> None:
    """Write for the first time when nobody looks any more, as stochastic weight averaging does."""
    if step == 20:
        for master in masters:
            master.data.mul_(0.3)


def swapped(masters: list[Tensor], step: int) -> None:
    """Write something else, and a part of what was there back."""
    if step == 20:
        kept = [master.data.clone() for master in masters]
        for master, value in zip(masters, kept, strict=True):
            master.data.fill_(7.0)
            master.data.copy_(0.3 * value)


def elsewhere(masters: list[Tensor], step: int) -> None:
    """Give masters the memory of a vector, as natural gradients and averages of weights do."""
    if step == 20:
        vector_to_parameters(0.3 * parameters_to_vector(masters).detach(), masters)


def trained(
    amp: ModuleType | None, level: str, width: int, before: Write, behind: Write, steps: int = 9
) -> tuple[list[float], Tensor]:
    """Return the losses, and what a forward computes at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))
    optimizer: Optimizer = Adam(model.parameters(), lr=0.01)
    if amp is not None:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
        )
    x, y = torch.randn(32, 8), torch.randint(4, (32,))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        losses.append(loss.item())
        if amp is None:
            loss.backward()
        else:
            scaled_backward(amp, loss, optimizer)
        masters = [param for group in optimizer.param_groups for param in group["params"]]
        before(masters, step)
        optimizer.step()
        behind(masters, step)
    return losses, model(x).detach().float()


@pytest.mark.parametrize("width", [16, 3000])  # together in one memory, and each alone
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(
    "before_and_behind",
    [(nothing, lookahead), (decay, nothing), (nothing, decay), (nothing, clip)],
    ids=["lookahead", "decay before the step", "decay after it", "clipped weights"],
)
def test_a_write_to_a_master_through_its_data_is_seen(
    amp: ModuleType, level: str, width: int, before_and_behind: tuple[Write, Write]
) -> None:
    exact, output = trained(None, level, width, *before_and_behind)
    found, found_output = trained(amp, level, width, *before_and_behind)
    plain, _ = trained(None, level, width, nothing, nothing)
    assert plain != pytest.approx(exact, rel=0.02)
    assert found == pytest.approx(exact, rel=0.02)
    torch.testing.assert_close(found_output, output, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("width", [16, 3000])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(
    "before_and_behind",
    [(nothing, late), (late, nothing), (nothing, swapped), (nothing, elsewhere)],
    ids=["after the step", "before it", "swapped", "elsewhere"],
)
def test_a_write_that_comes_late_is_seen(
    amp: ModuleType, level: str, width: int, before_and_behind: tuple[Write, Write]
) -> None:
    exact, output = trained(None, level, width, *before_and_behind, steps=22)
    found, found_output = trained(amp, level, width, *before_and_behind, steps=22)
    plain, _ = trained(None, level, width, nothing, nothing, steps=22)
    assert plain[-1] != pytest.approx(exact[-1], rel=0.1)
    assert found == pytest.approx(exact, rel=0.04)
    torch.testing.assert_close(found_output, output, rtol=0.05, atol=0.05)


def stepped(amp: ModuleType, level: str, kind: type[Adam], steps: int) -> tuple[nn.Linear, Any]:
    """Return a layer and its optimizer after some steps."""
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    for _ in range(steps):
        optimizer.zero_grad()
        scaled_backward(amp, model(torch.randn(4, 3)).float().square().mean(), optimizer)
        optimizer.step()
    return model, optimizer


class Averaging(Adam):
    """Has a method that writes averages into the weights, as torchcontrib's SWA has."""

    @torch.no_grad()
    def use_averages(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.copy_(torch.full_like(param, 0.25))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_method_of_the_optimizer_may_write_late(amp: ModuleType, level: str) -> None:
    model, optimizer = stepped(amp, level, Averaging, 20)
    optimizer.use_averages()
    assert all((value == 0.25).all() for value in model.state_dict().values())
    assert torch.equal(model(torch.ones(1, 3)).float(), torch.ones(1, 2))


class ByData(Adam):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.sub_(param.grad.data, alpha=0.01)


def test_a_step_that_reads_data_has_nothing_looked_at(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    optimizer = ByData(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    looks: list[object] = []
    monkeypatch.setattr(UnseenMasterWrites, "look_now", lambda self, local: looks.append(local))
    for _ in range(18):
        optimizer.zero_grad()
        scaled_backward(amp, model(torch.ones(1, 3)).float().sum(), optimizer)
        optimizer.step()
    assert not looks
    assert model.weight.data is not None
    assert not looks
    assert optimizer.param_groups[0]["params"][0].data is not None
    assert len(looks) == 1


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [Adam, ByData])
def test_a_hook_behind_the_step_may_write_late(
    amp: ModuleType, level: str, kind: type[Adam]
) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)

    steps = itertools.count()

    def write(*_: object) -> None:
        if next(steps) == 20:
            for master in optimizer.param_groups[0]["params"]:
                master.data.copy_(torch.full_like(master, 0.25))

    optimizer.register_step_post_hook(write)
    for _ in range(21):
        optimizer.zero_grad()
        scaled_backward(amp, model(torch.ones(1, 3)).float().sum(), optimizer)
        optimizer.step()
    assert torch.equal(model(torch.ones(1, 3)).float(), torch.ones(1, 2))
    assert all((value == 0.25).all() for value in model.state_dict().values())


def test_a_read_of_a_masters_data_has_it_looked_at_until_the_next_step() -> None:
    masters, writes = [torch.ones(3)], UnseenMasterWrites({})
    for _ in range(16):
        writes.looks.count()
    assert not writes.looks.left
    for _ in range(3):
        writes.look_now(masters)
        assert writes.looks.left
        writes.looks.count()
        assert not writes.looks.left


def behind_steps(
    amp: ModuleType, level: str, width: int, steps: int
) -> tuple[nn.Module, Optimizer]:
    """Return a layer and its optimizer, which changes nothing, after some steps."""
    model = nn.Linear(3, width)
    optimizer = Adam(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    for _ in range(steps):
        scaled_backward(amp, model(torch.ones(1, 3)).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("width", [3, 3000])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("steps", [0, 3, 20])
def test_a_write_through_data_counts_where_masters_are_read_after_it(
    amp: ModuleType, level: str, width: int, steps: int
) -> None:
    """As of an average that writes to ``optimizer.param_groups``, before a norm is logged."""
    model, optimizer = behind_steps(amp, level, width, steps)
    x = torch.ones(1, 3)
    for master in optimizer.param_groups[0]["params"]:
        master.data.fill_(0.25)
    list(amp.master_params(optimizer))
    assert torch.equal(model(x).float(), torch.ones(1, width))
    assert all((value == 0.25).all() for value in model.state_dict().values())


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("steps", [0, 3, 20])
@pytest.mark.parametrize("are_given", [False, True])
def test_the_last_write_through_data_counts_where_the_optimizer_goes(
    amp: ModuleType, level: str, steps: int, are_given: bool
) -> None:
    """As of Lookahead's last step in a function that returns the model alone."""
    model, optimizer = behind_steps(amp, level, 16, steps)
    masters = list(amp.master_params(optimizer)) if are_given else []
    masters = masters or optimizer.param_groups[0]["params"]
    for master in masters:
        master.data.fill_(0.3)  # which no half number is
    exact = masters[0].detach().clone()
    del optimizer, masters, master
    gc.collect()
    for value in model.state_dict().values():
        assert value.unique().equal(exact.unique())
    assert model(torch.ones(1, 3)).isfinite().all()
    for param in model.parameters():
        assert param.unique().equal(exact.to(param.dtype).unique())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_that_goes_undoes_no_write_to_a_half_weight(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = behind_steps(amp, level, 16, 3)
    next(model.parameters()).data.fill_(0.3)
    before = [one.detach().clone() for one in model.parameters()]
    del optimizer
    gc.collect()
    assert all(map(torch.equal, model.parameters(), before))
    expected = [one.float() for one in before]
    for now, then in zip(model.state_dict().values(), expected, strict=True):
        torch.testing.assert_close(now, then, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("free", ["resized", "another", "of another shape"])
def test_an_optimizer_that_goes_after_its_weights_writes_nothing(
    amp: ModuleType, free: str
) -> None:
    model, optimizer = behind_steps(amp, "O5", 16, 3)
    list(amp.master_params(optimizer))
    for param in model.parameters():
        if free == "resized":
            param.untyped_storage().resize_(0)
        else:
            param.data = torch.empty(0 if free == "another" else 5)
    del optimizer
    gc.collect()  # an error in here would be one of the test, and a write end the process
    assert all(param.untyped_storage().nbytes() in (0, 20) for param in model.parameters())


def test_an_optimizer_that_goes_while_a_function_is_traced_adds_nothing(amp: ModuleType) -> None:
    model, optimizer = behind_steps(amp, "O5", 16, 3)
    kept = [optimizer]
    list(amp.master_params(optimizer))
    del optimizer

    def double(x: Tensor) -> Tensor:
        kept.clear()
        gc.collect()
        return x * 2

    graph = make_fx(double)(torch.ones(3)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]


def test_an_optimizer_that_goes_between_forward_and_backward_ends_no_backward(
    amp: ModuleType,
) -> None:
    model, optimizer = behind_steps(amp, "O5", 16, 3)
    loss = model(torch.ones(2, 3, requires_grad=True)).float().square().mean()
    for master in optimizer.param_groups[0]["params"]:
        master.data.mul_(0.5)
    del optimizer, master
    gc.collect()
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


#: What moves the versions of masters: a load, a write in place.
MOVES: dict[str, Callable[[nn.Module, list[Tensor]], object]] = {
    "load": lambda model, masters: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "in place": lambda model, masters: [one.detach().add_(0.5) for one in masters],
    "half in place": lambda model, masters: [one.detach().add_(0.5) for one in model.parameters()],
}


@pytest.mark.parametrize("width", [16, 3000])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("sees", ["forward", "step"])
@pytest.mark.parametrize("steps", [0, 3, 20])
def test_a_write_through_data_counts_behind_one_that_moved_versions(
    amp: ModuleType, level: str, width: int, move: str, sees: str, steps: int
) -> None:
    """As of schedule-free optimizers, whose ``train()`` writes so after a load."""
    model, optimizer = behind_steps(amp, level, width, steps)
    x = torch.ones(1, 3)
    if sees == "step":
        scaled_backward(amp, model(x).float().sum(), optimizer)
    masters = optimizer.param_groups[0]["params"]
    MOVES[move](model, masters)
    for master in masters:
        master.data.copy_(torch.full_like(master, 0.25))
    if sees == "step":
        optimizer.step()
    assert torch.equal(model(x).float(), torch.ones(1, width))
    assert all((value == 0.25).all() for value in model.state_dict().values())


@pytest.mark.parametrize("width", [16, 3000])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_write_to_a_half_weight_through_its_data_still_counts(
    amp: ModuleType, level: str, width: int
) -> None:
    """Weights that are swapped for an evaluation, and back, in each step."""
    torch.manual_seed(0)
    model = nn.Linear(8, width)
    optimizer = Adam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    x = torch.randn(4, 8)
    for step in range(4):
        with torch.no_grad():
            before = model(x)
            kept = copy.deepcopy(list(model.parameters()))
            for param in model.parameters():
                param.data.fill_(step)
            assert model(x).sub(step * (1 + x.sum(1, keepdim=True))).abs().max() < 0.2
            for param, value in zip(model.parameters(), kept, strict=True):
                param.data.copy_(value)
            assert torch.equal(model(x), before)
        optimizer.zero_grad()
        scaled_backward(amp, model(x).float().square().mean(), optimizer)
        for param in model.parameters():
            param.data.fill_(0.25)
        optimizer.step()
        assert 0.2 < model.weight.min().item() < model.weight.max().item() < 0.3


def test_masters_are_looked_at_in_the_first_steps_and_on_where_a_write_was_found() -> None:
    for is_written in (False, True):
        masters, writes = [torch.ones(3), torch.zeros(2)], UnseenMasterWrites({})
        writes.note(masters)
        if is_written:
            masters[1].data.fill_(1)
        versions = [master._version for master in masters]
        writes.increment_versions(masters, masters)
        moved = [
            master._version - version for master, version in zip(masters, versions, strict=True)
        ]
        assert moved == [0, int(is_written)]
        for _ in range(16):
            assert writes.looks.left
            writes.looks.count()
        assert bool(writes.looks.left) == is_written


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_prepared_model_is_traced_behind_its_optimizer(amp: ModuleType, level: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.ones(1, 3)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


def test_nothing_is_looked_at_where_numbers_are_missing() -> None:
    masters, writes = [torch.ones(3, device="meta")], UnseenMasterWrites({})
    writes.note(masters)
    writes.increment_versions(masters, masters)
    assert masters[0]._version == 0
