"""Deep copies of models in half: float32, exact, and on their own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

HALF_OF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
MASTERS = ("O2", "O5")


class Net(nn.Module):
    """A batch norm first, a tied weight, a frozen one, and buffers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first, self.tied, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("wide", torch.randn(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.tied(self.first(self.norm(x)).tanh()) + self.shift)


def batch(number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4
    )


def train(
    amp: ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss = model(batch(number)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def trained(amp: ModuleType, level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = amp.initialize(*made(), opt_level=level, loss_scale=64.0, verbosity=0)
    train(amp, model, optimizer, range(3))
    return model, optimizer


def by_hand(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return what `Net` computes in evaluation, in float64."""
    s = {name: value.double() for name, value in state.items()}
    mean, var = s["norm.running_mean"], s["norm.running_var"]
    x = (x.double() - mean) / (var + 1e-5).sqrt() * s["norm.weight"] + s["norm.bias"]
    x = F.linear(x, s["first.weight"], s["first.bias"]).tanh()
    x = F.linear(x, s["tied.weight"], s["tied.bias"]) + s["shift"]
    return F.linear(x, s["frozen.weight"], s["frozen.bias"])


@pytest.mark.parametrize("level", HALF_OF)
def test_a_copy_is_float32_and_exact(amp: ModuleType, level: str) -> None:
    model, optimizer = trained(amp, level)
    twin = copy.deepcopy(model).eval()
    assert {value.dtype for value in twin.parameters()} == {torch.float32}
    assert twin.shift.dtype is torch.float32
    assert (twin.wide.dtype, twin.count.dtype) == (torch.float64, torch.int64)
    assert twin.tied.weight is twin.first.weight
    assert not twin.frozen.weight.requires_grad
    assert model.first.weight.dtype is HALF_OF[level]
    if level in MASTERS:
        rounded = twin.first.weight.to(HALF_OF[level]).float()
        assert not torch.equal(rounded, twin.first.weight)
        assert any(torch.equal(twin.first.weight, one) for one in amp.master_params(optimizer))
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in twin.named_parameters())
    expected = by_hand(state, batch(9))
    for _ in range(2):
        torch.testing.assert_close(twin(batch(9)).double(), expected, rtol=1e-5, atol=1e-6)
        amp.deactivate()


@pytest.mark.parametrize("level", HALF_OF)
def test_a_parameter_of_a_class_that_copies_itself_is_float32_and_exact(
    amp: ModuleType, level: str
) -> None:
    class Named(nn.Parameter):
        def __new__(cls, data: Tensor, label: str) -> Named:
            return Tensor._make_subclass(cls, data, True)

        def __init__(self, data: Tensor, label: str) -> None:
            self.label = label

        def __deepcopy__(self, memo: dict[int, object]) -> Named:
            return memo.setdefault(id(self), Named(self.detach().clone(), self.label))

    own = Named.__deepcopy__
    model, optimizer = made()
    model.shift = Named(model._buffers.pop("shift"), "shift")
    for _ in range(2):
        amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        twin = copy.deepcopy(model)
        assert (type(twin.shift), twin.shift.label) == (Named, "shift")
        assert twin.shift.dtype is torch.float32
        assert torch.equal(twin.shift, model.state_dict()["shift"])
        assert twin(batch(9)).dtype is torch.float32
        amp.deactivate()
    assert Named.__deepcopy__ is own


@pytest.mark.parametrize("level", HALF_OF)
def test_a_parameter_that_its_class_shares_with_the_copy_stays_as_it_is(
    amp: ModuleType, level: str
) -> None:
    class Shared:
        def __deepcopy__(self, memo: dict[int, object]) -> Shared:
            return self

    class SharedParameter(Shared, nn.Parameter):
        pass

    model, optimizer = made()
    model.shift = SharedParameter(model._buffers.pop("shift"))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    twin = copy.deepcopy(model)
    assert twin.shift is model.shift
    assert model.shift.dtype is HALF_OF[level]
    assert twin.first.weight.dtype is torch.float32
    other = Shared()  # no tensor
    assert copy.deepcopy(other) is other


@pytest.mark.parametrize("level", HALF_OF)
def test_a_copy_goes_its_own_way(amp: ModuleType, level: str) -> None:
    model, optimizer = trained(amp, level)
    twin = copy.deepcopy(model)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    train(amp, model, optimizer, range(3, 5))
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    for value in twin.state_dict().values():  # which are its own tensors, as in torch
        value.zero_()
    assert not twin.eval()(batch(9)).any()
    assert model.eval()(batch(9)).any()


@pytest.mark.parametrize("level", MASTERS)
def test_the_best_copy_brings_the_weights_back_to_the_bit(amp: ModuleType, level: str) -> None:
    model, optimizer = trained(amp, level)
    best, wanted = copy.deepcopy(model), [p.clone() for p in amp.master_params(optimizer)]
    train(amp, model, optimizer, range(3, 5))
    model.load_state_dict(best.state_dict())
    assert all(map(torch.equal, amp.master_params(optimizer), wanted))


@pytest.mark.parametrize("level", HALF_OF)
def test_a_copy_is_prepared_as_any_model(amp: ModuleType, level: str) -> None:
    model, _ = trained(amp, level)
    twin = copy.deepcopy(model)
    twin = amp.initialize(twin, opt_level=level, verbosity=0)
    assert twin.first.weight.dtype is HALF_OF[level]
    torch.testing.assert_close(twin.eval()(batch(9)), model.eval()(batch(9)), rtol=0, atol=0)


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize(
    "inside",
    [
        lambda model: copy.deepcopy(nn.Sequential(model))[0],
        lambda model: copy.deepcopy({"model": [model]})["model"][0],
        lambda model: copy.deepcopy(copy.deepcopy(model)),
    ],
    ids=["in a module", "in a dict", "of a copy"],
)
def test_a_copy_of_what_holds_the_model_is_exact(
    amp: ModuleType, level: str, inside: Callable[[nn.Module], nn.Module]
) -> None:
    model, _ = trained(amp, level)
    twin = inside(model).eval()
    expected = by_hand(model.state_dict(), batch(9))
    torch.testing.assert_close(twin(batch(9)).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", HALF_OF)
def test_a_copied_layer_takes_float32(amp: ModuleType, level: str) -> None:
    model, _ = trained(amp, level)
    layer, state = copy.deepcopy(model.first), model.state_dict()
    expected = F.linear(batch(9), state["first.weight"], state["first.bias"])
    torch.testing.assert_close(layer(batch(9)), expected)


def test_what_was_written_by_hand_is_in_the_copy(amp: ModuleType) -> None:
    model, optimizer = trained(amp, "O2")
    with torch.no_grad():
        model.first.bias.fill_(0.1)
        for master in itertools.islice(amp.master_params(optimizer), 1):
            master.fill_(0.3)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.first.bias, torch.full((4,), 0.1).half().float())
    assert torch.equal(twin.norm.weight, torch.full((4,), 0.3))


def test_weights_that_are_copied_without_their_module_stay_in_half(amp: ModuleType) -> None:
    """A graph, say, is made for their dtype."""
    model, _ = trained(amp, "O2")
    assert copy.deepcopy(list(model.parameters()))[2].dtype is torch.float16
    graph = fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.get_attr("weight"), 1.0)))
    module = fx.GraphModule({"weight": model.first.weight}, graph)
    assert copy.deepcopy(module)().dtype is torch.float16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_not_stored_by_the_level_is_copied_as_it_is(amp: ModuleType, level: str) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4).half()
    amp.initialize(model, opt_level=level, verbosity=0)
    assert copy.deepcopy(other).weight.dtype is torch.float16
    assert copy.deepcopy(torch.ones(3).half()).dtype is torch.float16
    if level == "O1":
        model.register_buffer("mask", torch.ones(4, dtype=torch.float16))
        assert copy.deepcopy(model).mask.dtype is torch.float16


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("order", ["model, optimizer", "optimizer, model", "checkpoint"])
def test_an_optimizer_that_is_copied_along_steps_the_copy(
    amp: ModuleType, level: str, order: str
) -> None:
    model, optimizer = trained(amp, level)
    with torch.no_grad():
        model.first.weight.mul_(1.5)  # by hand: the step that follows takes it over
    if order == "optimizer, model":
        own, twin = copy.deepcopy((optimizer, model))
    elif order == "checkpoint":
        kept = copy.deepcopy({"epoch": 3, "best": [model], "state": {"optimizer": optimizer}})
        twin, own = kept["best"][0], kept["state"]["optimizer"]
    else:
        twin, own = copy.deepcopy((model, optimizer))
    plain, by_hand = made()
    plain.load_state_dict(model.state_dict())
    by_hand.load_state_dict(optimizer.state_dict())
    before = [value.clone() for value in model.state_dict().values()]
    amp.deactivate()
    for number in range(3):
        for one, stepping in ((twin, own), (plain, by_hand)):
            stepping.zero_grad()
            one(batch(number)).square().mean().backward()
            stepping.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name
    assert all(map(torch.equal, model.state_dict().values(), before))
    stepped = [param for group in own.param_groups for param in group["params"]]
    own_params = [param for param in twin.parameters() if param.requires_grad]
    assert list(map(id, stepped)) == list(map(id, own_params))
