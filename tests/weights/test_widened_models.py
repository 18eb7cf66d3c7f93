"""A model that is made float32 again, for an export say, has its exact values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_patch.weights.fp32_values import FP32Values

HALF = ("O2", "O3", "O5")
WAYS: dict[str, Callable[[nn.Module], object]] = {
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "to": lambda model: model.to("cpu", torch.float32),
    "to a tensor's": lambda model: model.to(torch.zeros(1)),
    "to by name": lambda model: model.to(dtype=torch.float32),
    "type": lambda model: model.type(torch.float32),
    "of a part": lambda model: [part.float() for part in model.children()],
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.first.register_buffer("factor", torch.rand(8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x) * self.first.factor))


def trained(amp: ModuleType, level: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Scaled()
    optimizer: Optimizer = SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        scaled_backward(amp, model(torch.randn(16, 8)).float().square().mean(), optimizer)
        optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:amp.initialize.* keeps weights in")
@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("way", WAYS)
def test_weights_and_buffers_are_exact(amp: ModuleType, level: str, way: str) -> None:
    model, _ = trained(amp, level)
    with torch.no_grad():
        model.last.bias += 1  # a write to a half weight that no step has taken yet
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    WAYS[way](model)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(value.dtype not in (torch.float16, torch.bfloat16) for value in own.values())
    for found in (own, model.state_dict()):
        for name, value in found.items():
            assert torch.equal(value.to(exact[name].dtype), exact[name]), name
    amp.deactivate()
    for name, value in model.state_dict().items():
        assert torch.equal(value.to(exact[name].dtype), exact[name]), name


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_was_written_to_masters_is_in_it(amp: ModuleType, level: str) -> None:
    model, optimizer = trained(amp, level)
    for master in optimizer.param_groups[0]["params"]:
        master.data.fill_(0.3)
    model.float()
    assert all((param == torch.tensor(0.3)).all() for param in model.parameters())


@pytest.mark.parametrize("level", HALF)
def test_what_was_written_to_a_state_dict_is_in_it(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    optimizer = SGD(model[0].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for value in (state := model.state_dict()).values():
        value.copy_(torch.rand_like(value))
    model.float()
    written = [param.detach() for param in model.parameters()]
    torch.testing.assert_close(written, list(state.values()), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("level", HALF)
def test_what_a_script_has_set_by_data_is_not_undone(amp: ModuleType, level: str) -> None:
    model, _ = trained(amp, level)
    for param in model.parameters():
        param.data.fill_(0.25)
    model.float()
    assert all((param == 0.25).all() for param in model.parameters())


@pytest.mark.parametrize("level", HALF)
def test_a_forward_that_casts_a_layer_goes_on_from_the_numbers_it_has(
    amp: ModuleType, level: str
) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            before = self.gate.weight.detach().clone()
            self.gate.float()
            assert torch.equal(self.gate.weight, before.float())
            return self.gate(x.float())

    model, _ = amp.initialize(
        model := Router(), SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )
    assert model(torch.randn(2, 4)).isfinite().all()


class Growing(nn.Linear):
    """Adds a parameter of the same shape when it is converted, before the others."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        own = dict(self._parameters)
        self._parameters.clear()
        self._parameters.update({"added": nn.Parameter(torch.zeros(4, 4)), **own})
        return self


def test_a_move_to_a_device_reads_no_weights(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained(amp, "O2")
    read: list[object] = []
    monkeypatch.setattr(FP32Values, "exact", lambda self, param: read.append(param))
    model.to("cpu")
    model.to(device="cpu", non_blocking=True)
    assert not read


def test_tensors_are_known_by_their_names(amp: ModuleType) -> None:
    model = Growing(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    model.float()
    assert model.added.eq(0).all()
    assert all(torch.equal(getattr(model, name), value) for name, value in exact.items())


def test_a_copy_that_is_no_prepared_model_is_as_torch_has_it(amp: ModuleType) -> None:
    trained(amp, "O2")
    other = nn.Linear(2, 2).half()
    rounded = copy.deepcopy(other.weight.detach())
    assert torch.equal(other.float().weight, rounded.float())
