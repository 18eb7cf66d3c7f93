"""The state of optimizers, entered for another tensor."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from amp_patch.weights.stepped_state import SteppedState


def two_optimizers() -> tuple[nn.Parameter, list[Optimizer]]:
    param = nn.Parameter(torch.zeros(2))
    optimizers = [Adam([param]), SGD([param], lr=1.0)]
    for one in optimizers:
        one.state[param] = {"average": torch.ones(2), "step": torch.ones(())}
    return param, optimizers


def test_it_moves_in_every_optimizer_that_lives_and_has_it() -> None:
    param, optimizers = two_optimizers()
    new = nn.Parameter(torch.zeros(2))
    state = SteppedState(optimizers)
    kept = optimizers.pop()
    moved = kept.state[param]
    optimizers.clear()
    state.move(param, new)
    state.move(param, nn.Parameter(torch.zeros(2)))  # of which there is none
    assert list(kept.state) == [new]
    assert kept.state[new] is moved


class Interrupted(dict[Any, Any]):
    """Once Ctrl-C comes when an entry has just been taken out, or is about to be."""

    def pop(self, *args: Any) -> Any:
        super().pop(*args)
        raise KeyboardInterrupt

    def __delitem__(self, key: Any) -> None:
        if "is_pressed" not in self:
            self["is_pressed"] = True
            raise KeyboardInterrupt
        super().__delitem__(key)


def test_an_interrupt_loses_no_state() -> None:
    param, (optimizer, _) = two_optimizers()
    new, moved = nn.Parameter(torch.zeros(2)), optimizer.state[param]
    optimizer.state = Interrupted(optimizer.state)  # type: ignore[assignment]  # a dict will do
    state = SteppedState([optimizer])
    with pytest.raises(KeyboardInterrupt):
        state.move(param, new)
    state.move(param, new)
    assert optimizer.state[new] is moved
    assert param not in optimizer.state


def test_what_has_the_shape_of_a_tensor_follows_it_to_its_device() -> None:
    _, optimizers = two_optimizers()
    there = nn.Parameter(torch.zeros(2, device="meta"))
    optimizers[0].state[there] = {"average": torch.ones(2), "step": torch.ones(())}
    SteppedState(optimizers).follow_device(there)
    state = optimizers[0].state[there]
    assert (state["average"].device.type, state["step"].device.type) == ("meta", "cpu")


class Choosy(SGD):
    """Lets weights decay but for those that it was told of, in one of seven ways."""

    def __init__(self, params: list[Tensor], spared: list[Tensor], way: str) -> None:
        super().__init__(params, lr=1e-6)
        factors = dict.fromkeys(params, 0.5) | dict.fromkeys(spared, 1.0)
        self.notes: Any = {
            "set": set(spared),
            "ids": set(map(id, spared)),
            "dict": factors,
            "dict of ids": {id(param): factor for param, factor in factors.items()},
            "state": {"step": 0, **factors},
            "state later": {"step": 0},
            "state from the start": {"step": 0},
        }[way]
        if way in ("state", "state from the start"):
            self.state["factors"] = self.notes
        self.others: dict[str, Any] = {"nothing": {}, "names": {"a": 1}}
        self.way = way

    def factor(self, param: Tensor) -> float:
        key = id(param) if "ids" in self.way else param
        if isinstance(self.notes, dict):
            return float(self.notes[key])
        return 1.0 if key in self.notes else 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.way.startswith("state ") and len(self.notes) == 1:
            self.state["factors"] = self.notes
            params = self.param_groups[0]["params"]
            self.notes.update({param: 1.0 if param.ndim == 1 else 0.5 for param in params})
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(self.factor(param))
        return super().step(closure)


@pytest.mark.parametrize(
    "way", ["set", "ids", "dict", "dict of ids", "state", "state later", "state from the start"]
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_what_an_optimizer_notes_of_parameters_holds_for_what_it_steps(
    amp: ModuleType, level: str, way: str
) -> None:
    model = nn.Linear(3, 3)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = Choosy(list(model.parameters()), [model.bias], way)
    before = optimizer.notes.copy()
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        scaled_backward(amp, model(torch.ones(1, 3)).float().sum(), optimizer)
        optimizer.step()
    torch.testing.assert_close(model.weight.float(), torch.full((3, 3), 0.25), rtol=0, atol=1e-3)
    torch.testing.assert_close(model.bias.float(), torch.ones(3), rtol=0, atol=1e-3)
    if not way.startswith("state "):  # which knows no other tensors than it has stepped
        assert [optimizer.factor(param) for param in model.parameters()] == [0.5, 1.0]
    amp.deactivate()
    assert [optimizer.factor(param) for param in model.parameters()] == [0.5, 1.0]
    if way.startswith("state "):
        before.update(dict.fromkeys(model.parameters()))
    assert optimizer.notes == before if "ids" in way else set(optimizer.notes) == set(before)
    assert optimizer.others == {"nothing": {}, "names": {"a": 1}}
