"""Which of a half parameter and its fp32 value the other follows: whichever was written to."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.kernels.graph_capture import captures
from amp_patch.weights import fp32_values
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.state_dicts import StateDicts
from amp_patch.weights.versions import Versions

HALVES = (torch.float16, torch.bfloat16)
#: Neither half dtype has it.
THIRD = 1 / 3


def entered(dtype: torch.dtype = torch.float16) -> tuple[FP32Values, nn.Parameter, Tensor]:
    """Return a store that holds the value of one parameter, [1/3, 1/3], and both."""
    value = torch.full((2,), THIRD)
    param = nn.Parameter(value.to(dtype))
    values = FP32Values()
    values.set(param, value)
    return values, param, value


@pytest.mark.parametrize("dtype", HALVES, ids=str)
class TestWhichWins:
    def test_untouched_the_value_keeps_its_bits(self, dtype: torch.dtype) -> None:
        values, param, value = entered(dtype)
        assert not values.wins(param)
        assert torch.equal(values.exact(param), value)

    def test_a_written_element_of_the_parameter_counts_and_the_others_keep_their_bits(
        self, dtype: torch.dtype
    ) -> None:
        values, param, _ = entered(dtype)
        param.data[0] = 2.0
        assert values.exact(param).tolist() == torch.tensor([2.0, THIRD]).tolist()

    def test_a_written_value_wins_over_a_written_parameter(self, dtype: torch.dtype) -> None:
        values, param, value = entered(dtype)
        param.data.fill_(2.0)
        value.fill_(3.0)
        assert values.wins(param)
        assert values.exact(param).tolist() == [3.0, 3.0]

    def test_a_given_value_wins_unless_only_the_parameter_is_written_to(
        self, dtype: torch.dtype
    ) -> None:
        values, param, value = entered(dtype)
        versions = Versions([value._version])
        values.set(param, value, versions)
        versions.give([param._version], [value._version])
        value.data.fill_(3.0)  # moves no version
        assert values.wins(param)
        with torch.no_grad():
            param.fill_(2.0)
        assert not values.wins(param)
        versions.end_giving()
        assert not values.wins(param)
        versions.give([param._version], [value._version])
        with torch.no_grad():
            param.fill_(2.0)
        value.fill_(3.0)
        assert values.wins(param)


def test_what_was_never_entered_is_the_parameter_itself_in_fp32() -> None:
    param = nn.Parameter(torch.tensor([THIRD]).half())
    exact = FP32Values().exact(param)
    assert exact.dtype is torch.float32
    assert torch.equal(exact, param.detach().float())


def test_a_value_of_two_optimizers_was_written_to_only_if_neither_noted_it() -> None:
    values, param, value = entered()
    first, second = Versions([0]), Versions([0])
    values.set(param, value, first)
    values.set(param, value, second)
    value.fill_(3.0)
    assert values.wins(param)
    second.equal[0] = value._version  # as the second optimizer's step does
    assert not values.wins(param)
    values.forget_versions(param, second)
    assert values.wins(param)


def test_of_two_optimizers_that_give_a_value_the_last_one_says_since_when() -> None:
    values, param, value = entered()
    first, second = Versions([0]), Versions([0])
    values.set(param, value, first)
    values.set(param, value, second)
    first.give([param._version], [value._version])
    value.fill_(3.0)
    second.give([param._version], [value._version])
    param.data.fill_(2.0)  # moves no version
    assert values.wins(param)
    with torch.no_grad():
        param.fill_(2.0)
    assert not values.wins(param)  # the value was written to before
    values.receive(param, value)  # now both are equal
    assert not values.wins(param)
    second.end_giving()
    assert not values.wins(param)  # though the first one has not ended


def write_to(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


@given(st.lists(st.integers(0, 6), max_size=8))
def test_where_all_win_at_once_each_does(actions: list[int]) -> None:
    params = [nn.Parameter(torch.ones(2).half()) for _ in range(3)]
    held = [torch.ones(2) for _ in params]
    values, own, other = FP32Values(), Versions([0] * 3), Versions([0])
    for row, (param, value) in enumerate(zip(params, held, strict=True)):
        values.set(param, value, own, row)
    values.set(params[1], held[1], other)  # a second optimizer

    def now(tensors: list[Tensor]) -> list[int]:
        return [tensor._version for tensor in tensors]

    one, its_value = params[1:2], held[1:2]
    acts: list[Callable[[], object]] = [
        lambda: own.give(now(params), now(held)),
        lambda: own.given and own.give_again([1], now(params), now(held)),
        own.end_giving,
        lambda: other.give(now(one), now(its_value)),
        other.end_giving,
        lambda: write_to(params[1]),
        lambda: write_to(held[1]),
    ]
    for action in actions:
        acts[action]()
        all_win = own.all_win(now(params))
        assert all_win <= all(map(values.wins, params))
        assert all_win or action != 0


def test_a_value_that_came_later_was_not_given() -> None:
    values, _, value = entered()
    versions = Versions([value._version, 0])
    values.set(nn.Parameter(value.half()), value, versions)
    versions.give([0], [0])
    later = nn.Parameter(torch.ones(2).half())
    values.set(later, torch.ones(2), versions, 1)
    assert not values.wins(later)


def test_values_go_with_their_parameters() -> None:
    values, param, _ = entered()
    assert values.holds(param)
    values.forget([param])
    assert not values.holds(param)
    values, param, _ = entered()
    del param
    gc.collect()
    assert len(values._values) == 0


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
    monkeypatch.setattr(fp32_values, "same_numbers", lambda *_: asked.append(1) or True)
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


def test_a_master_lives_in_the_memory_of_the_value_and_has_its_gradient() -> None:
    values, param, value = entered()
    value.grad = torch.ones(2)
    param.data[0] = 2.0
    master = values.take(param)
    assert master.data_ptr() == value.data_ptr()
    assert master.tolist() == torch.tensor([2.0, THIRD]).tolist()
    assert master.grad is value.grad


def test_a_captured_step_does_not_wait_for_what_data_is_set_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To compare numbers would end the capture."""
    values, param, _ = entered()
    monkeypatch.setattr(captures, "are_made", lambda device: True)
    monkeypatch.setattr(torch, "equal", None)
    before = values.version_of(param)
    values.note_set(param, param.detach().clone())
    assert values.version_of(param) == before + 1


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
