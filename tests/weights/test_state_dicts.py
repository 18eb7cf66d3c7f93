"""State dicts of models in half hold the fp32 values, and give them back when they are loaded."""

from __future__ import annotations

import contextlib
import copy
import io
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.weights import fp32_values, state_dicts
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.state_dicts import StateDicts


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=2))
def test_a_state_dict_is_written_and_read_in_fp32(numbers: list[float]) -> None:
    module = nn.Linear(2, 1, bias=False).half()
    values, value = FP32Values(), torch.tensor([numbers])
    values.set(module.weight, torch.zeros(1, 2))
    module.weight.data.zero_()
    StateDicts(values).read_state(module, {"a.weight": value}, "a.")
    assert values.loads == 1
    assert not values.wins(module.weight)  # torch loads the parameter now
    module.weight.data.copy_(value)
    state = {"a.weight": module.weight.detach()}
    StateDicts(values).write_state(module, state, "a.")
    assert torch.equal(state["a.weight"], value)


def stacked() -> nn.Module:
    """Return a model with small weights, large ones, and a module that is twice in it."""
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    return nn.Sequential(shared, nn.Linear(8, 600), nn.Linear(600, 8), shared)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_state_dict_compares_all_weights_at_once(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    model = stacked()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    asked: list[int] = []
    for module in (fp32_values, state_dicts):
        monkeypatch.setattr(module, "are_equal_here", lambda *_: asked.append(1) or True)
    state = model.state_dict()
    if level != "O3":
        assert {name: tensor.tolist() for name, tensor in state.items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }
    assert asked == []
    del state
    with torch.no_grad():
        model[1].bias.fill_(2.0)
    model.state_dict()
    assert len(asked) == (level != "O3")  # of the written one, if it has a value


WRITES = {
    "in place": lambda weight: weight.detach().fill_(2.0),
    "through data": lambda weight: weight.data.fill_(2.0),
    "data": lambda weight: setattr(weight, "data", torch.full_like(weight, 2.0)),
}


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("how", WRITES)
def test_what_a_hook_writes_to_a_half_weight_is_in_the_state_and_stays(
    amp: ModuleType, level: str, how: str
) -> None:
    model = stacked()
    model[2].register_state_dict_pre_hook(lambda module, *_: WRITES[how](module.weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.state_dict()["2.weight"].eq(2.0).all()
    model(torch.randn(3, 8))
    assert model[2].weight.eq(2.0).all()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("how", WRITES)
def test_a_state_dict_that_failed_hides_no_write(amp: ModuleType, level: str, how: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no state now")

    model = stacked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    handle = model[3].register_state_dict_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no state now"):
        model.state_dict()
    handle.remove()
    WRITES[how](model[2].weight)
    assert model[2].state_dict()["weight"].eq(2.0).all()
    assert copy.deepcopy(model)[2].weight.eq(2.0).all()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_state_dict_is_made_within_a_transform(amp: ModuleType, level: str) -> None:
    model = stacked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    states: list[dict[str, Tensor]] = []

    def saved(x: Tensor) -> Tensor:
        states.append(model.state_dict())
        return x

    torch.vmap(saved)(torch.ones(2))
    for name, value in model.state_dict(keep_vars=True).items():
        assert value.requires_grad
        torch.testing.assert_close(states[0][name], value.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_is_written_while_a_state_dict_is_made_is_in_it(amp: ModuleType, level: str) -> None:
    model = stacked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    number = iter([2.0, 3.0])

    def write(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            module.weight.fill_(value := next(number))
        if value == 2.0:
            raise RuntimeError("no state now")

    handle = model[2].register_state_dict_pre_hook(write)
    with pytest.raises(RuntimeError, match="no state now"):
        model.state_dict()
    assert model[2].state_dict()["weight"].eq(3.0).all()
    handle.remove()
    assert model.state_dict()["2.weight"].eq(3.0).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the exporter
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_onnx_finds_the_parameters_that_it_traces(amp: ModuleType, level: str) -> None:
    """The exporter by tracing looks parameters up in a state dict, and stops at other tensors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    amp.initialize(model, opt_level=level, verbosity=0)
    states: list[list[Tensor]] = []
    model.register_state_dict_post_hook(lambda *hooked: states.append(list(hooked[1].values())))
    with contextlib.suppress(torch.onnx.errors.OnnxExporterError):  # onnx is not installed
        torch.onnx.export(model, (torch.ones(2, 4),), io.BytesIO(), dynamo=False)
    params = {param.data_ptr() for param in model.parameters()}
    assert states
    assert all(params <= {value.data_ptr() for value in state} for state in states)
    assert model.state_dict()["0.weight"].dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_backward_to_what_keep_vars_gives_is_told_of(amp: ModuleType, level: str) -> None:
    model = nn.Linear(4, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters()), opt_level=level, verbosity=0)
    kept = model.state_dict(keep_vars=True)
    penalty = sum(value.square().sum() for value in kept.values())
    assert isinstance(penalty, Tensor)
    with pytest.warns(UserWarning, match=r"state_dict\(keep_vars=True\) are float32 copies"):
        penalty.backward()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_what_keep_vars_gives_is_copied_and_saved_without_a_word(
    amp: ModuleType, level: str
) -> None:
    model = nn.Linear(4, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters()), opt_level=level, verbosity=0)
    kept = model.state_dict(keep_vars=True)
    saved = io.BytesIO()
    torch.save(kept, saved)
    saved.seek(0)
    for state in (copy.deepcopy(kept), torch.load(saved), nn.ParameterDict(kept)):
        assert all(torch.equal(state[name], value) for name, value in kept.items())
        sum(value.square().sum() for value in state.values()).backward()  # of the script's own
