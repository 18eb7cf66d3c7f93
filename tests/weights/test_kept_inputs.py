"""Arguments of a model's call that a rule names are left as they are, and all others are cast."""

from __future__ import annotations

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

X = torch.linspace(-1.0, 1.0, 32).view(8, 4)
#: Coordinates that no half dtype has.
BOXES = [{"boxes": torch.full((8, 4), 1333.3), "ids": torch.arange(8)}]
ROUNDED = pytest.mark.filterwarnings(
    "ignore:a call of a model at opt_level O5 casts float32 target"
)
STORED = {"O0": torch.float32, "O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
RULES = {"inputs": {"targets": "off", "scale": "off"}}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, targets: Any = None, *, scale: Tensor | None = None) -> Tensor:
        self.seen = x, targets, scale
        found: Tensor = self.head(x)
        return found

    def loss(self, targets: Any, x: Tensor) -> Tensor:
        self.seen = x, targets, None
        return (self.head(x).float() - targets[0]["boxes"]).abs().mean()


class Open(Detector):
    def forward(self, x: Tensor, **others: Any) -> Tensor:  # type: ignore[override]  # it collects
        return super().forward(x, **others)


def assert_kept(model: nn.Module, stored: torch.dtype) -> None:
    """Check what a model has seen of X, the boxes, and X once more as its scale."""
    x, targets, scale = model.seen
    assert x.dtype is stored
    assert targets is BOXES
    assert scale is None or scale is X


@pytest.mark.parametrize("level", STORED)
def test_they_come_as_they_are_given(amp: ModuleType, level: str) -> None:
    model = amp.initialize(Detector(), opt_level=level, verbosity=0, rules=RULES)
    model(X, BOXES)
    assert_kept(model, STORED[level])
    model(scale=X, targets=BOXES, x=X)
    assert_kept(model, STORED[level])
    model(X)  # too few to reach them
    assert model.seen[0].dtype is STORED[level]
    model.compile(backend="eager")
    model(X, BOXES)
    assert model.seen[1][0]["boxes"].dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_where_functions_cast_nothing_is_cast_anyway(amp: ModuleType, level: str) -> None:
    model = amp.initialize(Detector(), opt_level=level, verbosity=0, rules=RULES)
    model(X, BOXES)
    assert_kept(model, torch.float32)


@ROUNDED
def test_without_a_rule_they_are_cast(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0)
    model(X, BOXES, scale=X)
    assert model.seen[1][0]["boxes"].dtype is model.seen[2].dtype is torch.bfloat16
    assert BOXES[0]["boxes"].dtype is torch.float32


def test_arguments_that_forward_collects_are_named_too(amp: ModuleType) -> None:
    model = amp.initialize(Open(), opt_level="O2", verbosity=0, rules=RULES)
    model(X, targets=BOXES, scale=X)
    assert_kept(model, torch.float16)


@ROUNDED
def test_copies_keep_them_and_a_later_level_does_not(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O2", verbosity=0, rules=RULES)
    for one in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        one(X, BOXES)
        assert one.seen[1] is BOXES
    amp.deactivate()
    model = amp.initialize(model, opt_level="O5", verbosity=0)
    model(X, BOXES)
    assert model.seen[1][0]["boxes"].dtype is torch.bfloat16


def test_methods_that_are_registered_have_places_of_their_own(amp: ModuleType) -> None:
    amp.register_forward_method(Detector, "loss")
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0, rules=RULES)
    model.loss(BOXES, X)
    assert_kept(model, torch.bfloat16)
    model.loss(x=X, targets=BOXES)
    assert_kept(model, torch.bfloat16)


def test_of_several_models_those_that_have_the_argument(amp: ModuleType) -> None:
    models = [nn.Linear(4, 4), Detector()]
    plain, detector = amp.initialize(models, opt_level="O5", verbosity=0, rules=RULES)
    detector(X, BOXES)
    assert_kept(detector, torch.bfloat16)
    assert plain(X).dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_name_that_no_forward_has_changes_nothing(amp: ModuleType, level: str) -> None:
    model = Detector()
    with pytest.raises(ValueError, match="inputs in rules") as raised:
        amp.initialize(model, opt_level=level, rules={"inputs": {"target": "off"}})
    assert str(raised.value) == (
        "inputs in rules must be named as arguments of the model's forward ('x', 'targets', "
        "'scale'); got 'target'; did you mean 'targets'? Call amp.initialize(..., "
        "rules={'inputs': {'targets': 'off'}})."
    )
    assert not model._forward_pre_hooks
    assert model.head.weight.dtype is torch.float32
