"""``own = model.state_dict(); own[name].copy_(value)`` reaches the model, as in torch.

So does a write through ``.data``, which no version tells of.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from amp_patch.session import session
from amp_patch.weights.fp32_values import FP32Values

EVERY_LEVEL = True
HALF_OF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def made(seed: int, base: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with a layer that is frozen, one that no optimizer steps, and a buffer."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    model[2].to(base).requires_grad_(base is torch.float32)
    model[3].requires_grad_(False)
    model[3].register_buffer("table", torch.rand(3))
    return model


def prepared(amp: ModuleType, level: str, model: nn.Module) -> tuple[nn.Module, SGD]:
    optimizer = SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    step(amp, model, optimizer)
    return model, optimizer


def step(amp: ModuleType, model: nn.Module, optimizer: SGD) -> None:
    optimizer.zero_grad()
    with amp.scale_loss(model(X).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def load(own: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """What scripts do to load a part of a state."""
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)


def load_through_data(own: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """What scripts of federated training do."""
    for name, value in state.items():
        own[name].data.copy_(value)


WAYS = [load, load_through_data]


def expected_at(level: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the model is to hold: parameters that no fp32 value stands after are rounded."""
    rounded = {"O3": ("0.", "1.weight", "1.bias", "2.", "3.weight", "3.bias")}
    rounds = rounded.get(level, ("3.weight", "3.bias"))
    return {
        name: value.to(HALF_OF[level]).float() if name.startswith(rounds) else value
        for name, value in state.items()
    }


def outputs_in_float32(model: nn.Module) -> Tensor:
    plain = made(0)
    plain.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return plain.eval()(X)


def forward(model: nn.Module) -> dict[str, Tensor]:
    model.eval()
    rounding = torch.finfo(model[0].weight.dtype).eps * 8
    found = model(X)
    torch.testing.assert_close(found, outputs_in_float32(model), rtol=rounding, atol=rounding)
    return model.state_dict()


def after_compiled(model: nn.Module) -> dict[str, Tensor]:
    model.eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(X), model(X), rtol=0, atol=0)
    torch._dynamo.reset()
    return model.state_dict()


def after_a_load(model: nn.Module) -> dict[str, Tensor]:
    model.load_state_dict({"3.weight": model.state_dict()["3.weight"]}, strict=False)
    return model.state_dict()


def in_inference(model: nn.Module) -> dict[str, Tensor]:
    with torch.inference_mode():
        return forward(model)


SEEN_BY: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "a forward": forward,
    "a forward in inference mode": in_inference,
    "a compiled forward": after_compiled,
    "a state": lambda model: model.state_dict(),
    "a load": after_a_load,
    "a copy": lambda model: copy.deepcopy(model).state_dict(),
}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("seen_by", SEEN_BY)
@pytest.mark.parametrize("write", WAYS)
def test_what_is_written_to_a_state_dict_is_in_the_model(
    amp: ModuleType, level: str, seen_by: str, write: Callable[..., None]
) -> None:
    model, _ = prepared(amp, level, made(0))
    new = made(1).state_dict()
    write(model.state_dict(), new)
    found = SEEN_BY[seen_by](model)
    assert differing(found, expected_at(level, new)) == []
    amp.deactivate()
    assert differing(model.state_dict(), expected_at(level, new)) == []


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("write", WAYS)
def test_what_is_written_is_there_after_deactivate(
    amp: ModuleType, level: str, write: Callable[..., None]
) -> None:
    model, _ = prepared(amp, level, made(0))
    new = made(1).state_dict()
    write(model.state_dict(), new)
    amp.deactivate()
    assert differing(model.state_dict(), expected_at(level, new)) == []


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("write", WAYS)
def test_a_step_begins_from_what_was_written(
    amp: ModuleType, level: str, write: Callable[..., None]
) -> None:
    model, optimizer = prepared(amp, level, made(0))
    new = made(1).state_dict()
    optimizer.zero_grad()
    with amp.scale_loss(model(X).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    write(model.state_dict(), new)
    for param in amp.master_params(optimizer):
        param.grad.zero_()
    optimizer.step()
    assert differing(model.state_dict(), expected_at(level, new)) == []


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_layer_that_joins_an_optimizer_has_what_was_written(
    amp: ModuleType, level: str, write: Callable[..., None], is_stepped: bool
) -> None:
    """A head that was filled by hand, before any forward."""
    body, head = made(0), made(0)
    model = nn.ModuleList([body, head])
    optimizer = torch.optim.SGD(body.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    new = made(1).state_dict()
    write(head.state_dict(), new)
    optimizer.add_param_group({"params": head.parameters()})
    if is_stepped:
        optimizer.step()
    assert differing(head.state_dict(), expected_at(level, new)) == []


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("base", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("write", WAYS)
def test_a_base_that_came_in_half_is_written_to(
    amp: ModuleType, level: str, base: torch.dtype, write: Callable[..., None]
) -> None:
    model, _ = prepared(amp, level, made(0, base))
    new = made(1, base).state_dict()
    write(model.state_dict(), new)
    found = forward(model)
    assert found["2.weight"].dtype is base
    assert torch.equal(found["2.weight"], new["2.weight"])
    amp.deactivate()
    assert torch.equal(model[2].weight, new["2.weight"])


@pytest.mark.parametrize("level", HALF_OF)
def test_a_part_that_was_written_by_hand_before_is_written_to(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level, made(0))
    with torch.no_grad():
        model[0].weight[0] = 0.5
    model.state_dict()["0.weight"].fill_(0.25)
    assert torch.equal(forward(model)["0.weight"], torch.full((4, 4), 0.25))
    assert torch.equal(next(amp.master_params(optimizer)).float(), torch.full((4, 4), 0.25))


@pytest.mark.parametrize("level", HALF_OF)
def test_equal_values_change_nothing(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level, made(0))
    before = copy.deepcopy(model.state_dict())
    tensors = [
        one for one in [*model.parameters(), *model.buffers()] if one.dtype is HALF_OF[level]
    ]
    versions = [one._version for one in tensors]
    load(model.state_dict(), before)
    model.eval()(X)
    assert [one._version for one in tensors] == versions
    assert differing(model.state_dict(), before) == []


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("event", ["a forward", "a step", "a state", "a load", "deactivate"])
def test_a_state_that_is_only_saved_is_not_held(amp: ModuleType, level: str, event: str) -> None:
    model, optimizer = prepared(amp, level, made(0))
    optimizer.zero_grad()
    model(X).sum().backward()
    copies = [weakref.ref(value) for value in model.state_dict().values()]
    events: dict[str, Callable[[], object]] = {
        "a forward": lambda: model(X),
        "a step": optimizer.step,
        "a state": model.state_dict,
        "a load": lambda: model.load_state_dict(made(1).state_dict()),
        "deactivate": amp.deactivate,
    }
    events[event]()
    gc.collect()
    assert [one() for one in copies if one() is not None] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_is_traced_after_its_state_was_saved(amp: ModuleType, level: str) -> None:
    model = amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    state = model.state_dict()
    state["weight"].data.fill_(2.0)
    traced = torch.jit.trace(model, (torch.ones(1, 2),))
    assert torch.equal(model.weight, torch.full_like(model.weight, 2.0))
    assert torch.equal(traced(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_masters_are_held_until_the_model_is_used(amp: ModuleType) -> None:
    model = nn.Linear(4, 4)
    amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    model.state_dict()
    assert session.values.handed_out.are_held
    model(X)
    assert not session.values.handed_out.are_held


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("through_data", [True, False])
def test_what_is_written_to_a_parameter_behind_a_state_counts(
    amp: ModuleType, level: str, through_data: bool
) -> None:
    """A clamp after a checkpoint, say: the state still has what was before."""
    model, optimizer = prepared(amp, level, made(0))
    saved = model.state_dict()
    with torch.no_grad():
        for param in model.parameters():
            (param.data if through_data else param).clamp_(-0.125, 0.125)
    forward(model)
    found = {name: one for name, one in model.state_dict().items() if "running" not in name}
    largest = {name: one.abs().max().item() for name, one in found.items() if "weight" in name}
    assert max(largest.values()) == 0.125
    assert saved["3.weight"].abs().max() > 0.125
    step(amp, model, optimizer)


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("shape", [(6, 6), (128, 65)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("through_data", [True, False])
def test_a_parameter_whose_numbers_change_places_behind_a_state_stays_so(
    amp: ModuleType, level: str, shape: tuple[int, int], dim: int, through_data: bool
) -> None:
    """The state is not taken for what was written to."""
    model = nn.Sequential(nn.Linear(*shape))
    amp.initialize(model, opt_level=level, verbosity=0)
    state, weight = model.state_dict(), model[0].weight
    expected = weight.detach().flip(dim)
    with torch.no_grad():
        (weight.data if through_data else weight).copy_(expected)
    model(torch.zeros(1, shape[0]))
    assert torch.equal(weight, expected)
    del state


@pytest.mark.parametrize("level", HALF_OF)
def test_numbers_that_are_none_count_as_written_to_by_nobody(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level, made(0))
    with torch.no_grad():
        model[0].weight[0], model[3].weight[0] = torch.nan, torch.inf
        model[3].weight[1] = torch.nan
    model.eval()(X)
    versions = [one._version for one in model.parameters()]
    model.state_dict()
    model(X)
    assert [one._version for one in model.parameters()] == versions


def test_a_forward_of_another_model_lets_writes_through(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O2", made(0))
    other, _ = prepared(amp, "O2", made(0))
    own = model.state_dict()
    other(X)
    load(own, new := made(1).state_dict())
    other(X)
    assert differing(forward(model), expected_at("O2", new)) == []
    step(amp, model, optimizer)


def test_a_dropped_model_is_freed_in_spite_of_its_state(amp: ModuleType) -> None:
    model, _ = prepared(amp, "O3", made(0))
    state, dead = model.state_dict(), weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    assert state["0.weight"].dtype is torch.float32


@pytest.mark.parametrize("level", HALF_OF)
def test_states_in_inference_mode(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level, made(0))
    new = made(1).state_dict()
    with torch.inference_mode():
        assert model.state_dict()["3.weight"].dtype is torch.float32
        model.load_state_dict({name: value.clone() for name, value in new.items()})
    assert differing(model.state_dict(), expected_at(level, new)) == []
    step(amp, model, optimizer)


def test_a_step_of_another_thread_while_a_state_dict_is_made_stays(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = amp.initialize(nn.Linear(3, 3), opt_level="O3", verbosity=0)
    exact = FP32Values.exact

    def stepped(self: FP32Values, tensor: Tensor) -> Tensor:
        value = exact(self, tensor)
        with torch.no_grad():
            tensor.fill_(0.5)  # after the copy, as by a step in another thread
        return value

    monkeypatch.setattr(FP32Values, "exact", stepped)
    kept = model.state_dict()
    monkeypatch.setattr(FP32Values, "exact", exact)
    model.eval()(torch.ones(2, 3))
    assert all(tensor.eq(0.5).all() for tensor in model.parameters())
    del kept


class Compared(nn.Linear):
    """A layer whose == compares weights, as TensorDictParams of tensordict does."""

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]  # that is the mistake
        return self.weight == getattr(other, "weight", other)

    __hash__ = nn.Module.__hash__


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_layer_that_compares_numbers_is_in_state_dicts(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Compared(4, 4))
    expected = copy.deepcopy(model.state_dict())
    amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    for _ in range(2):
        state = model.state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0.01, atol=1e-3)
        model[1].state_dict()
        model.load_state_dict(state)
        model(X)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_after_a_state_dict_that_raised_writes_to_those_of_parts_are_found(
    amp: ModuleType, level: str
) -> None:
    """What a whole state dict has asked for all modules it has not for later ones of parts."""

    def refuse(*_: object) -> None:
        raise ValueError("no state")

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    hook = model[1]._register_state_dict_hook(refuse)
    with pytest.raises(ValueError, match="no state"):
        model.state_dict()
    hook.remove()
    with torch.no_grad():
        model[0].weight.mul_(2)  # so that a state dict gets a copy
    model[0].state_dict()["weight"].data.fill_(5.0)
    assert model[0].state_dict()["weight"].eq(5.0).all()
    assert model[0].weight.eq(5.0).all()
