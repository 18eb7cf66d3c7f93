"""Targets that a model's call rounds are told once, with the rule that leaves them as they are."""

from __future__ import annotations

import dataclasses
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from amp_patch import amp as core
from amp_patch.casting.argument_casts import tensors_in
from amp_patch.mistakes import rounded_targets
from amp_patch.session import session

X = torch.linspace(-1.0, 1.0, 8).view(2, 4)
BOXES = torch.full((2, 4), 1333.3)
HALF = {"O2": "torch.float16", "O3": "torch.float16", "O5": "torch.bfloat16"}
OFF = {"O2": "0.3", "O3": "0.3", "O5": "2.7"}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, gt_boxes: Any = None, size: Any = None) -> Tensor:
        found: Tensor = self.head(x)
        return found

    def loss(self, size: Any, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        return found


def warned(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Return what a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(*args, **kwargs)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("level", HALF)
def test_the_first_that_come_are_told(amp: ModuleType, level: str) -> None:
    model = amp.initialize(Detector(), opt_level=level, verbosity=0)
    assert warned(model, X) == []
    assert warned(model, X, [{"boxes": BOXES, "ids": torch.tensor([1])}]) == [
        f"a call of a model at opt_level {level} casts float32 targets, positions and times, too, "
        f"which must keep their numbers; got 'gt_boxes' of Detector.forward, which {HALF[level]} "
        f"rounds by up to {OFF[level]}. Leave it as it is by amp.initialize(..., rules={{'inputs': "
        "{'gt_boxes': 'off'}}), or pass it in float64."
    ]
    assert warned(model, X, BOXES) == []
    assert not session.guard.targets.are_awaited


class Diffusion(Detector):
    def forward(
        self, x: Tensor, timesteps: Any = None, positions: Any = None, t: Any = None, mt: Any = None
    ) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("name", ["timesteps", "positions", "t"])
def test_times_and_positions_are_told_where_they_are_off_by_a_tenth(
    amp: ModuleType, name: str
) -> None:
    """Of which a model takes sines; a corner of a box may be off by as much."""
    between = torch.tensor([700.18, 3.0])  # float16 has 700 and 700.5
    model = amp.initialize(Diffusion(), opt_level="O2", verbosity=0)
    (message,) = warned(model, X, **{name: between})
    assert f"got {name!r} of Diffusion.forward, which torch.float16 rounds by up to 0.18" in message
    core.deactivate()
    model = amp.initialize(Diffusion(), opt_level="O2", verbosity=0)
    assert warned(model, X, **{name: between / 4}) == []
    core.deactivate()
    model = amp.initialize(Diffusion(), opt_level="O2", verbosity=0)
    assert warned(model, X, mt=between) == []  # not the whole name
    other = amp.initialize(Detector(), opt_level="O2", verbosity=0)
    assert warned(other, X, between) == []


@pytest.mark.parametrize("level", HALF)
def test_what_the_warning_says_mends_it(amp: ModuleType, level: str) -> None:
    rules = {"inputs": {"gt_boxes": "off"}}
    model = core.initialize(Detector(), opt_level=level, verbosity=0, rules=rules)
    assert warned(model, X, BOXES) == []
    core.deactivate()
    model = core.initialize(model, opt_level=level, verbosity=0)
    assert warned(model, X, BOXES.double()) == []


def by_rows(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return tensor.to_sparse_csr()


RIGHT: dict[str, tuple[Any, ...]] = {
    "whole numbers that half has": (X, torch.full((2, 4), 96.0)),
    "probabilities": (X, torch.full((2, 4), 1 / 3)),
    "ids": (X, torch.full((2, 4), 100_000)),
    "none": (X, None),
    "infinite": (X, torch.full((2, 4), torch.inf)),
    "another argument": (X, None, BOXES),
    "an input": (BOXES,),
    "empty": (X, torch.empty(0, 4)),
    "sparse": (X, BOXES.to_sparse()),
    "sparse by rows": (X, by_rows(BOXES)),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_all_else_is_not(amp: ModuleType, level: str, name: str) -> None:
    model = amp.initialize(Detector(), opt_level=level, verbosity=0)
    assert warned(model, *RIGHT[name]) == []


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_nor_where_inputs_are_not_cast(amp: ModuleType, level: str) -> None:
    model = amp.initialize(Detector(), opt_level=level, verbosity=0)
    assert warned(model, X, BOXES) == []


def test_beyond_the_range_they_are_infinite(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O2", verbosity=0)
    assert "rounds by up to inf." in warned(model, X, gt_boxes=BOXES * 100)[0]


class Boxes(Tensor):
    """As torchvision's bounding boxes: a class of its own, which computes as torch's does."""


def test_boxes_of_a_class_of_their_own_are_looked_at(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0)
    assert "rounds by up to 2.7." in warned(model, X, {"boxes": BOXES.as_subclass(Boxes)})[0]


def table(*columns: Tensor, shape: tuple[int, ...] = (-1,)) -> Tensor:
    """Return columns beside each other, in rows of a shape."""
    return torch.stack(columns, -1).view(*shape, len(columns))


COUNT = 24
FEATURE = torch.linspace(-3.0, 3.0, COUNT)
#: Of these 2049 is none of float16's, and 257 none of bfloat16's.
IDS = torch.arange(COUNT).remainder(3) + 2047.0
TABLES = {
    "beside features": table(FEATURE, IDS),
    "alone": table(IDS),
    "in sequences": table(FEATURE, IDS, shape=(4, 6)),
}


class Tabular(Detector):
    """Looks rows of a table up by what stands in the last column."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3000, 4)

    def forward(self, x: Any, gt_boxes: Any = None, size: Any = None) -> Tensor:
        ids: Tensor = x["ids"] if isinstance(x, dict) else x
        found: Tensor = self.head(self.rows(ids[..., -1].long()))
        return found


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("level", HALF)
def test_ids_in_a_table_of_features_are_told_with_what_mends_it(
    amp: ModuleType, level: str, name: str
) -> None:
    model = amp.initialize(Tabular(), opt_level=level, verbosity=0)
    message = (
        f"a call of a model at opt_level {level} casts float32 ids, too, of which other rows are "
        f"looked up then; got 'x' of Tabular.forward, with columns of whole numbers that "
        f"{HALF[level]} rounds by up to 1. Leave it as it is by amp.initialize(..., rules="
        "{'inputs': {'x': 'off'}}), pass ids as integers, or scale what are no ids to numbers "
        "near 1."
    )
    assert warned(model, TABLES[name]) == [message]
    assert warned(model, TABLES[name]) == []
    core.deactivate()
    rules = {"inputs": {"x": "off"}}
    model = core.initialize(Tabular(), opt_level=level, verbosity=0, rules=rules)
    looked_up: list[Tensor] = []
    model.rows.register_forward_pre_hook(lambda _, args: looked_up.append(args[0]))
    assert warned(model, TABLES[name]) == []
    assert torch.equal(looked_up[0], TABLES[name][..., -1].long())


def test_a_part_with_ids_is_told_by_its_name(amp: ModuleType) -> None:
    model = amp.initialize(Tabular(), opt_level="O5", verbosity=0)
    (message,) = warned(model, {"ids": TABLES["alone"], "others": X})
    assert "rules={'inputs': {'x.ids': 'off'}}" in message


NO_IDS = {
    "integers": TABLES["alone"].long(),
    "double": TABLES["alone"].double(),
    "small": table(FEATURE, IDS - 2000.0),
    "pixels": torch.arange(256.0).view(1, 16, 16),
    "a deep picture": IDS.view(4, 3, 2),
    "a sound": table(IDS, IDS).sub(3000.0),
    "measured": table(FEATURE * 1000.0, FEATURE),
    "pictures": IDS.view(2, 3, 2, 2),
}


@pytest.mark.parametrize("name", NO_IDS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_numbers_that_are_no_ids_are_not_told(amp: ModuleType, level: str, name: str) -> None:
    class Summing(Detector):
        def forward(self, x: Tensor, gt_boxes: Any = None, size: Any = None) -> Tensor:
            return x.float().sum() + self.head.weight.sum()

    model = amp.initialize(Summing(), opt_level=level, verbosity=0)
    assert warned(model, NO_IDS[name]) == []


def test_a_target_is_told_as_one(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0)
    (message,) = warned(model, X, gt_boxes=TABLES["alone"])
    assert "casts float32 targets" in message


def test_what_a_graph_captures_is_not_read(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_targets, "_is_captured", lambda _: True)
    model = amp.initialize(Tabular(), opt_level="O5", verbosity=0)
    assert warned(model, TABLES["alone"]) == []


def test_ids_are_looked_for_in_the_first_training_call_alone(amp: ModuleType) -> None:
    model = amp.initialize(Tabular(), opt_level="O5", verbosity=0)
    assert warned(model.eval(), TABLES["alone"]) == []
    assert warned(model.train(), TABLES["alone"] - 2000.0) == []
    assert warned(model, TABLES["alone"]) == []


class Sample(NamedTuple):
    image: Tensor
    boxes: Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    image: Tensor
    boxes: Tensor


#: What a model takes in one argument -> what the warning names.
BATCHES: dict[str, tuple[Any, str]] = {
    "a dict": ({"image": X, "boxes": BOXES}, "batch.boxes"),
    "dicts": ([{"image": X, "boxes": BOXES}] * 2, "batch.boxes"),
    "a dict in a dict": ({"image": X, "labels": {"at": BOXES}}, "batch.labels"),
    "further in": ({"image": X, "one": {"gt_boxes": BOXES}}, "batch.one.gt_boxes"),
    "a key with dots": ({"image": X, "image.boxes": BOXES}, "batch.image.boxes"),
    "times": ({"image": X, "timesteps": BOXES}, "batch.timesteps"),
    "a named tuple": (Sample(X, BOXES), "batch.boxes"),
    "a dataclass": (Batch(X, BOXES), "batch.boxes"),
    "a namespace": (SimpleNamespace(image=X, boxes=BOXES), "batch.boxes"),
}


class Batched(Detector):
    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]  # one argument
        self.seen = batch
        return super().forward(X.to(self.head.weight.dtype))


@pytest.mark.parametrize("kind", BATCHES)
def test_a_part_of_a_batch_is_told_and_its_rule_leaves_it(amp: ModuleType, kind: str) -> None:
    batch, name = BATCHES[kind]
    model = amp.initialize(Batched(), opt_level="O5", verbosity=0)
    (message,) = warned(model, batch)
    assert f"got {name!r} of Batched.forward, which torch.bfloat16 rounds by up to 2.7. " in message
    rules = {"inputs": {name: "off"}}
    assert f"rules={rules}" in message
    core.deactivate()
    model = core.initialize(Batched(), opt_level="O5", verbosity=0, rules=rules)
    for _ in range(20):
        assert warned(model, batch) == []
    assert not session.guard.targets.are_awaited
    kept = [one for one in tensors_in(model.seen) if one.dtype is torch.float32]
    assert kept
    assert all(one is BOXES for one in kept)


def test_a_part_that_no_call_has_is_told(amp: ModuleType) -> None:
    rules = {"inputs": {"batch.pixel": "off"}}
    model = core.initialize(Batched(), opt_level="O5", verbosity=0, rules=rules)
    for _ in range(15):
        assert warned(model, {"image": X, "pixels": X}) == []
    assert warned(model, {"image": X, "pixels": X}) == [
        "inputs in rules must be named as what a model is called with; got 'batch.pixel', and no "
        "training call of Batched.forward so far had it; did you mean 'batch.pixels'? Call "
        "amp.initialize(..., rules={'inputs': {'batch.pixels': 'off'}})."
    ]


def test_a_part_that_came_once_is_not(amp: ModuleType) -> None:
    rules = {"inputs": {"batch.boxes": "off"}}
    model = core.initialize(Batched(), opt_level="O5", verbosity=0, rules=rules)
    assert warned(model, {"image": X, "boxes": BOXES}) == []
    for _ in range(20):
        assert warned(model, {"image": X}) == []


class Handing(nn.Module):
    """Collects what it is called with, and is no wrapper of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = Batched(), nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.model(*args, **kwargs)
        return found


def test_what_is_collected_by_place_cannot_be_left_alone_which_is_told(amp: ModuleType) -> None:
    rules = {"inputs": {"batch": "off"}}
    model = core.initialize(Handing(), opt_level="O5", verbosity=0, rules=rules)
    messages = [warned(model, X) for _ in range(16)]
    assert messages[:15] == [[]] * 15
    assert "got 'batch', and no training call of Handing.forward so far had it. " in messages[15][0]


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_part_that_another_model_gets_is_not(amp: ModuleType, in_turn: bool) -> None:
    rules = {"inputs": {"batch.pixels": "off"}}
    models = [Handing(), Batched()]
    one, other = core.initialize(models, opt_level="O5", verbosity=0, rules=rules)
    calls = [(one, X), (other, {"pixels": X})] * 20
    for model, batch in calls if in_turn else sorted(calls, key=lambda call: call[0] is other):
        assert warned(model, batch) == []
    assert not session.guard.targets.are_awaited


class Collecting(Detector):
    def forward(self, x: Tensor, *others: Any, labels: Any = None) -> Tensor:
        return super().forward(x)


def test_what_is_given_by_name_alone_has_no_place(amp: ModuleType) -> None:
    model = amp.initialize(Collecting(), opt_level="O5", verbosity=0)
    assert warned(model, X, BOXES, BOXES) == []
    assert "got 'labels' of Collecting.forward" in warned(model, X, labels=BOXES)[0]


def test_evaluation_is_waited_out(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0)
    with torch.no_grad():
        assert warned(model, X, BOXES) == []
    assert warned(model.eval(), X, BOXES) == []
    assert warned(model.train(), X, BOXES) != []


def test_nobody_waits_for_long(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0)
    for _ in range(16):
        assert session.guard.targets.are_awaited
        model(X)
    assert not session.guard.targets.are_awaited


def test_a_model_that_is_never_trained_is_not_waited_for_without_end(amp: ModuleType) -> None:
    model = amp.initialize(Detector().eval(), opt_level="O5", verbosity=0)
    with torch.no_grad():
        for _ in range(4096):
            assert session.guard.targets.are_awaited
            model(X)
        model(X)
    assert not session.guard.targets.are_awaited


def test_places_of_another_method_are_its_own(amp: ModuleType) -> None:
    core.register_forward_method(Detector, "loss")
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.loss(None, BOXES)


def test_numbers_that_cannot_be_read_are_left_alone(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0)
    many = torch.stack([X, X])

    def call(x: Tensor) -> Tensor:
        return model(x, x * 1333.3)

    torch.func.vmap(call)(many)
    model.to("meta")
    model(many[0].to("meta"), BOXES.to("meta"))
    assert session.guard.targets.are_awaited


def test_nobody_waits_after_deactivate(amp: ModuleType) -> None:
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0)
    core.deactivate()
    core.initialize(model, opt_level="O1", verbosity=0)
    assert not session.guard.targets.are_awaited
