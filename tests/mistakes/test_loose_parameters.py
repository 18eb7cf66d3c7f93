"""Weights that no module has, as those in a plain list: the note on torch's exception tells so."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from test_dtypes import DTYPES, HALF, X, fail
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from training import assert_equal, weights

MEND = (
    "of no module of the model, as one in a plain list or dict is: put it into an nn.ParameterList "
    "or nn.ParameterDict of the module before amp.initialize(), or write weight.to(x.dtype)"
)
INPUTS = "a tensor made inside of forward is not"


class Head:
    """An object of a script's own, with a weight."""

    def __init__(self) -> None:
        self.weight = weight()

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Held(nn.Module):
    """Makes a layer's output meet what it holds, in one way or the other."""

    def __init__(self, held: Any, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.held, self.layer(x))


def weight() -> nn.Parameter:
    return nn.Parameter(torch.eye(4) + 0.1)


def applied(held: Any, x: Tensor) -> Tensor:
    for one in held:
        x = x @ one
    return x


#: What holds a weight, and how it meets an activation.
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "list": (lambda: [weight()], lambda held, x: x @ held[0]),
    "loop": (lambda: [weight(), weight()], applied),
    "tuple": (lambda: (weight(),), lambda held, x: torch.ops.aten.lerp(x, held[0], 0.5)),
    "dict": (lambda: {"head": weight()}, lambda held, x: nn.functional.linear(x, held["head"])),
    "dict of lists": (lambda: {0: [weight()]}, lambda held, x: torch.mm(x, held[0][0])),
    "namespace": (lambda: types.SimpleNamespace(w=weight()), lambda held, x: x.matmul(held.w)),
    "object": (Head, lambda held, x: held(x)),
}


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("kind", HELD)
def test_a_weight_that_no_module_has(amp: ModuleType, level: str, kind: str) -> None:
    made, use = HELD[kind]
    model = amp.initialize(Held(made(), use), opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert f"at opt_level {level} the model is stored in {DTYPES[level]}" in note
    assert "The parameter in torch.float32 in '" in note
    assert MEND in note
    assert "register_buffer" not in note


def test_a_weight_in_a_list_is_named_by_its_attribute_or_variable(amp: ModuleType) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.heads = nn.Linear(4, 4), [weight()]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ self.heads[0]

    model = amp.initialize(Named(), opt_level="O2", verbosity=0)
    assert "The parameter in torch.float32 in 'self.heads' is" in fail(lambda: model(X))

    class Hidden(Named):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ vars(self)["he" + "ads"][0]

    model = amp.initialize(Hidden(), opt_level="O2", verbosity=0)
    assert "The parameter in torch.float32 in an argument is" in fail(lambda: model(X))

    class Looped(Named):
        def forward(self, x: Tensor) -> Tensor:
            for head in vars(self)["he" + "ads"]:
                x = self.layer(x) @ head
            return x

    model = amp.initialize(Looped(), opt_level="O2", verbosity=0)
    assert "The parameter in torch.float32 in 'head' is" in fail(lambda: model(X))


@pytest.mark.parametrize("level", HALF)
def test_a_mask_that_may_be_at_fault_as_well_is_told_of_after_it(
    amp: ModuleType, level: str
) -> None:
    class Masked(Held):
        def forward(self, x: Tensor) -> Tensor:
            h, mask = self.layer(x), torch.ones(4, 4)
            return torch.ops.aten.lerp(h @ self.held[0].to(h.dtype), mask, 0.5)

    model = amp.initialize(Masked([weight()], applied), opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert MEND in note
    assert f"If that is as it should be: Inputs of the model are cast to {DTYPES[level]}, " in note
    assert INPUTS in note


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("kind", ["unused", "another dtype", "itself"])
def test_weights_that_are_not_at_fault_are_not_told_of(
    amp: ModuleType, level: str, kind: str
) -> None:
    """As an average that a module keeps beside its layers; a list may hold itself."""
    held: list[Any] = [nn.Parameter(torch.eye(4, dtype=getattr(torch, DTYPES[level][6:])))]
    if kind == "unused":
        model: nn.Module = Held(None, lambda held, x: torch.ops.aten.lerp(x, torch.ones(4, 4), 0.5))
        model.average = [weight()]  # type: ignore[assignment]
    else:
        if kind == "itself":
            held.append(held)
        model = Held(held, lambda held, x: torch.ops.aten.lerp(x @ held[0], torch.ones(4, 4), 0.5))
    amp.initialize(model, opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert INPUTS in note
    assert "of no module" not in note


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_weight_that_the_level_keeps_in_float32_is_the_models(
    amp: ModuleType, level: str
) -> None:
    def use(norm: nn.Module, x: Tensor) -> Tensor:
        scale = norm.weight
        return torch.ops.aten.lerp(x, scale.expand(4, 4), 0.5)

    model = amp.initialize(Held(nn.BatchNorm1d(4), use), opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert INPUTS in note
    assert "of no module" not in note


@pytest.mark.parametrize("level", HALF)
def test_a_part_that_is_called_by_itself_is_told_of_its_call(amp: ModuleType, level: str) -> None:
    class Encoder(Held):
        def encode(self, x: Tensor) -> Tensor:
            return self.layer(x @ self.held[0])

    model = Encoder([weight()], lambda held, x: x)
    amp.initialize(model, opt_level=level, verbosity=0)
    note = fail(lambda: model.encode(X), ends_script=True)
    assert "Encoder.encode() was called by itself" in note
    assert "of no module" not in note


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("mend", ["list", "dict", "cast"])
def test_both_mends_train_the_weight(amp: ModuleType, level: str, kind: Any, mend: str) -> None:
    held: Any = {
        "list": lambda: nn.ParameterList([weight()]),
        "dict": lambda: nn.ParameterDict({"head": weight()}),
        "cast": lambda: [weight()],
    }[mend]()
    key: Any = "head" if mend == "dict" else 0
    torch.manual_seed(0)
    model = Held(held, lambda held, x: x @ held[key].to(x.dtype))
    own = [held[0]] if mend == "cast" else []
    optimizer = kind([*model.parameters(), *own], lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = [*weights(model), *(one.detach().clone() for one in own)]
    with amp.scale_loss(model(X).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    grad = held[key].grad.float()
    assert 0.0 < grad.abs().max() < 10.0
    optimizer.step()
    now = [*weights(model), *own]
    assert all(not torch.equal(one, other) for one, other in zip(now, before, strict=True))
    assert_equal([one.isfinite() for one in now], [torch.ones_like(one).bool() for one in now])


class Lazy(Mapping[str, Tensor]):
    """Reads what it is asked for from a file, which is closed."""

    def __getitem__(self, key: str) -> Tensor:
        raise OSError(key)

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


def test_what_a_mapping_would_have_to_read_is_left_alone(amp: ModuleType) -> None:
    held = [Lazy(), dict.fromkeys(range(500)), weight()]
    model = Held(held, lambda held, x: x @ held[2])
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert MEND in fail(lambda: model(X))
