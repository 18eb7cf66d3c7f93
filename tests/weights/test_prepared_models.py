"""Models are set up at a level, in place of an earlier one, and an error puts the earlier back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from amp_patch.casting.mode import ALL_DEVICES, process
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.levels import OPT_LEVELS
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.prepared_models import ModelHooks, ModelRules, PreparedModels

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
STORED = {"O0": F32, "O1": F32, "O2": F16, "O3": F16, "O4": F32, "O5": BF16}
LEVELS = tuple(STORED)


class Prepared:
    """Prepared models, and which of them called which hook."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.values, self.cache = FP32Values(), WeightCache()
        hooks = ModelHooks(
            observe=lambda *call: self.seen.append("observe"),
            observe_casting=lambda *call: self.seen.append("observe casting"),
            explain=lambda error: self.seen.append("explain"),
            write_state=lambda *args: self.seen.append("write"),
            read_state=lambda *args: self.seen.append("read"),
            before_state=lambda *args: self.seen.append("before state"),
            before_load=lambda *args: self.seen.append("before load"),
        )
        self.models = PreparedModels(self.values, self.cache, hooks)

    def set_up(self, model: nn.Module, level: str, *stepped: nn.Parameter) -> contextlib.ExitStack:
        """Set a model up, and return what undoes it."""
        undo = contextlib.ExitStack()
        self.models.set_up([model], OPT_LEVELS[level], set(map(id, stepped)), [ModelRules()], undo)
        return undo


@pytest.fixture
def prepared() -> Iterator[Prepared]:
    saved = process.save()
    prepared = Prepared()
    yield prepared
    prepared.models.release()
    process.restore(saved)


def hooks_of(model: nn.Module) -> list[int]:
    """Return how many hooks of each kind a model has."""
    return [len(value) for name, value in sorted(vars(model).items()) if name.endswith("_hooks")]


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_has_the_levels_storage_and_hooks(prepared: Prepared, level: str) -> None:
    model = nn.Linear(2, 2)
    untouched = hooks_of(model)
    prepared.set_up(model, level)
    assert model.weight.dtype is STORED[level]
    assert prepared.values.holds(model.weight) is (level in ("O2", "O5"))
    model(torch.ones(1, 2))
    model.load_state_dict(model.state_dict())
    casting = level in ("O1", "O4")
    half = ["before state", "write", "before load", "read"] if STORED[level] is not F32 else []
    assert prepared.seen == ["observe casting" if casting else "observe", *half]
    assert prepared.models.casting_dtypes() == ({OPT_LEVELS[level].half_dtype} & {F16, BF16}
        if casting else set())  # fmt: skip
    assert process.devices == {"cpu"}
    prepared.models.release()
    assert hooks_of(model) == untouched
    assert model.weight.dtype is F32


def test_a_model_without_parameters_does_not_say_which_devices(prepared: Prepared) -> None:
    prepared.set_up(nn.ReLU(), "O1")
    assert process.devices == ALL_DEVICES


@pytest.mark.parametrize("later", LEVELS)
@pytest.mark.parametrize("earlier", ["O0", "O1", "O4"])
def test_an_error_puts_the_hooks_of_the_earlier_level_back(
    prepared: Prepared, earlier: str, later: str
) -> None:
    model = nn.Linear(2, 2)
    prepared.set_up(model, earlier)
    hooks = hooks_of(model)
    weight = model.weight.data
    undo = prepared.set_up(model, later)
    assert prepared.models.levels[model] is OPT_LEVELS[later]
    undo.close()
    model.weight.data = weight  # the tensors are somebody else's to restore
    assert hooks_of(model) == hooks
    assert prepared.models.levels[model] is OPT_LEVELS[earlier]
    assert not prepared.values.holds(model.weight)


def test_an_error_at_the_first_level_leaves_no_hook(prepared: Prepared) -> None:
    model = nn.Linear(2, 2)
    untouched = hooks_of(model)
    prepared.set_up(model, "O1").close()
    assert hooks_of(model) == untouched
    assert model not in prepared.models.levels


def test_a_frozen_parameter_has_a_value_only_where_it_is_stepped(prepared: Prepared) -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    prepared.set_up(model, "O2", model.weight)
    assert prepared.values.holds(model.weight)
    assert not prepared.values.holds(model.bias)


def test_released_models_have_their_fp32_bits_again(prepared: Prepared) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    assert not torch.equal(before, before.half().float())
    prepared.set_up(model, "O2")
    prepared.models.release()
    assert torch.equal(model.weight, before)


def test_names_are_those_in_the_models_or_shapes(prepared: Prepared) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    prepared.set_up(model, "O1")
    assert prepared.models.names()(model[0].bias) == "0.bias"
    assert prepared.models.names()(torch.ones(4, 5)) == "a parameter of shape (4, 5)"
    other = nn.Sequential(nn.Linear(2, 3))
    prepared.set_up(other, "O1")
    assert prepared.models.names()(other[0].bias) == "Sequential 2: 0.bias"


def test_dropped_models_are_gone(prepared: Prepared) -> None:
    for level in LEVELS:
        prepared.set_up(nn.Linear(2, 2), level)
    gc.collect()
    assert len(prepared.models.levels) == 0
    assert prepared.models.casting_dtypes() == set()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_layer_that_outlives_its_models_is_float32_again(amp: ModuleType, level: str) -> None:
    """As an encoder that one model after the other is built around."""
    shared = nn.Linear(4, 4)
    for _ in range(2):
        model = nn.Sequential(shared, nn.Linear(4, 2))
        optimizer = torch.optim.SGD([*shared.parameters(), *model[1].parameters()], lr=0.5)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        with amp.scale_loss(model(torch.ones(2, 4)).square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        values = [value.clone() for name, value in model.state_dict().items() if name[0] == "0"]
        del model, optimizer, scaled_loss
        gc.collect()
        assert shared.weight.dtype in (torch.float16, torch.bfloat16)
        amp.deactivate()
        assert [param.dtype for param in shared.parameters()] == [torch.float32] * 2
        assert all(map(torch.equal, shared.parameters(), values))
    shared(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_layer_that_replaced_another_is_saved_and_loaded_in_fp32(
    amp: ModuleType, level: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    model[1] = nn.Linear(2, 2).to(STORED[level])
    optimizer.add_param_group({"params": list(model[1].parameters())})
    *_, bias = amp.master_params(optimizer)
    with torch.no_grad():
        bias.copy_(torch.tensor([1 + 2.0**-20, 2.0**-30]))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert {value.dtype for value in saved.values()} == {F32}
    assert torch.equal(saved["1.bias"], bias)
    with torch.no_grad():
        bias.zero_()
    model.load_state_dict(saved)
    *_, bias = amp.master_params(optimizer)
    assert torch.equal(bias, saved["1.bias"])
    hooks = hooks_of(model[1])
    amp.deactivate()
    assert sum(hooks_of(model[1])) == sum(hooks) - 2
    assert torch.equal(model[1].bias, saved["1.bias"])


@dataclasses.dataclass(unsafe_hash=True)
class Critic(nn.Module):
    """All critics of one width are equal, as a dataclass compares its fields."""

    width: int

    def __post_init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class Compared(Critic):
    """Compares what is in it, as ``TensorDictParams`` of tensordict does."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]  # that is the mistake
        return self.layer.weight == getattr(other, "layer", other).weight


class Incomparable(Critic):
    def __eq__(self, other: object) -> bool:
        raise TypeError(f"a critic is compared with {other!r}")

    __hash__ = Critic.__hash__


@pytest.mark.parametrize("kind", [Critic, Compared, Incomparable])
@pytest.mark.parametrize("level", LEVELS)
def test_twin_models_are_told_apart_by_identity(
    amp: ModuleType, level: str, kind: type[Critic]
) -> None:
    twins = [kind(8), kind(8)]
    plain = [copy.deepcopy(twin.layer) for twin in twins]
    params = [param for twin in twins for param in twin.parameters()]
    models, optimizer = amp.initialize(
        twins, SGD(params, lr=0.5), opt_level=level, loss_scale=1.0, trace_overflow=True
    )
    x = torch.eye(4)
    with amp.scale_loss(sum(model(x).float().sum() for model in models), optimizer) as loss:
        loss.backward()
    optimizer.step()
    sum(torch.relu(layer(x)).sum() for layer in plain).backward()
    SGD([param for layer in plain for param in layer.parameters()], lr=0.5).step()
    for model, layer in zip(models, plain, strict=True):
        state = model.state_dict()
        assert state["layer.weight"].dtype == F32
        torch.testing.assert_close(
            state["layer.weight"].float(), layer.weight.detach(), rtol=1e-2, atol=1e-2
        )
        model.load_state_dict(state)
    amp.deactivate()
    assert [sum(hooks_of(twin)) for twin in twins] == [0, 0]
    assert [twin(x).dtype for twin in twins] == [F32, F32]
