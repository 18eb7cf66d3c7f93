"""Arguments of a model's call that a rule names are left as they are, and all others are cast."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.weights.half_model import cast_floats
from amp_patch.weights.kept_inputs import has_part, put_back

X = torch.linspace(-1.0, 1.0, 32).view(8, 4)
#: Coordinates that no half dtype has.
BOXES = [{"boxes": torch.full((8, 4), 1333.3), "ids": torch.arange(8)}]
ROUNDED = pytest.mark.filterwarnings(
    "ignore:a call of a model at opt_level O5 casts float32 targets"
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


#: A class that torchvision's detectors are derived from.
RetinaNet = type("RetinaNet", (Detector,), {"__module__": "torchvision.models.detection.retinanet"})


class OfOwn(RetinaNet):  # type: ignore[valid-type, misc]  # a class made by hand
    """A detector of a script's, as FasterRCNN is one of torchvision's."""


@pytest.mark.parametrize("rules", [{}, {"inputs": {"targets": "off"}}])
@pytest.mark.parametrize("level", STORED)
def test_boxes_of_torchvisions_detectors_need_no_rule(
    amp: ModuleType, level: str, rules: dict[str, Any]
) -> None:
    wrapped = torch.compile(OfOwn(), backend="eager")
    for model in amp.initialize([OfOwn(), wrapped], opt_level=level, verbosity=0, rules=rules):
        model(X, BOXES)
        assert_kept(getattr(model, "_orig_mod", model), STORED[level])


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


class Wrapper(nn.Module):
    """Hands on what it is called with, as an adapter does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.model(*args, **kwargs)
        return found


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [Wrapper, compiled, lambda model: Wrapper(Wrapper(model))])
def test_a_wrapper_has_the_arguments_of_its_model(
    amp: ModuleType, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = Detector()
    wrapper = amp.initialize(wrap(model), opt_level="O5", verbosity=0, rules=RULES)
    for args, kwargs in (((X, BOXES), {}), ((X,), {"targets": BOXES})):
        wrapper(*args, **kwargs)
        assert model.seen[0].dtype is torch.bfloat16
        assert model.seen[1][0]["boxes"].dtype is torch.float32
    with pytest.raises(ValueError, match="got 'target'; did you mean 'targets'\\?"):
        amp.initialize(wrap(Detector()), opt_level="O5", rules={"inputs": {"target": "off"}})


class Batched(Detector):
    def forward(self, batch: Any, **others: Any) -> Tensor:  # type: ignore[override]  # a batch
        found: Tensor = self.head(X.to(self.head.weight.dtype))
        self.seen = batch, others
        return found


PART = {"inputs": {"batch.boxes": "off"}}


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_part_comes_as_it_is_given(amp: ModuleType, level: str, backend: str | None) -> None:
    model = amp.initialize(Batched(), opt_level=level, verbosity=0, rules=PART)
    if backend:
        model.compile(backend=backend, fullgraph=True)
    batch = {"image": X, "boxes": BOXES[0]["boxes"], "more": [{"boxes": X}]}
    for args, kwargs in (((batch,), {}), ((), {"batch": batch})):
        model(*args, **kwargs)
        seen = model.seen[0]
        assert seen["boxes"].dtype is torch.float32
        torch.testing.assert_close(seen["boxes"], batch["boxes"], rtol=0, atol=0)
        assert seen["image"].dtype is seen["more"][0]["boxes"].dtype is STORED[level]
    assert batch["image"] is X
    assert batch["more"][0]["boxes"] is X


def test_a_part_of_an_argument_that_no_forward_has_is_told_with_the_part(amp: ModuleType) -> None:
    with pytest.raises(ValueError, match="got 'target.boxes'; did you mean 'targets'\\?") as raised:
        amp.initialize(Detector(), opt_level="O2", rules={"inputs": {"target.boxes": "off"}})
    assert str(raised.value).endswith("rules={'inputs': {'targets.boxes': 'off'}}).")


@pytest.mark.parametrize("name", ["", ".", "targets.", "targets..", ".targets"])
def test_a_name_with_a_dot_too_many_is_none(amp: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {name!r}")) as raised:
        amp.initialize(Detector(), opt_level="O2", rules={"inputs": {name: "off"}})
    example = str(raised.value).partition("{'inputs': {")[2].removesuffix(": 'off'}}).")
    assert example in {"'targets'", "'scale'", "'scale.targets'"}


def test_parts_of_what_a_registered_method_gets(amp: ModuleType) -> None:
    amp.register_forward_method(Detector, "loss")
    rules = {"inputs": {"targets.boxes": "off"}}
    model = amp.initialize(Detector(), opt_level="O5", verbosity=0, rules=rules)
    model.loss([{"boxes": BOXES[0]["boxes"], "scores": X}], X)
    (target,) = model.seen[1]
    assert target["boxes"] is BOXES[0]["boxes"]
    assert target["scores"].dtype is model.seen[0].dtype is torch.bfloat16


class Point(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


def leaves() -> st.SearchStrategy[Tensor]:
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64])
    return dtypes.map(lambda dtype: torch.full((2,), 3.0).to(dtype))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner, max_size=2),
        pairs,
        *(pairs.map(lambda two, kind=kind: kind(a=two[0], b=two[1])) for kind in (Point, Frozen)),
        pairs.map(lambda two: SimpleNamespace(a=two[0], b=two[1])),
        pairs.map(lambda two: OrderedDict(a=two[0], b=two[1])),
        pairs.map(lambda two: MappingProxyType({"a": two[0], "b": two[1]})),
    )


def by_path(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors in a value, each with the names that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from by_path(item, (*path, name))
    elif isinstance(value, (list, tuple)) and not isinstance(value, Point):
        for item in value:
            yield from by_path(item, path)
    else:
        yield from by_path({"a": value.a, "b": value.b}, path)


def leads_to(part: str, path: tuple[str, ...]) -> bool:
    return any(".".join(path[:count]) == part for count in range(1, len(path) + 1))


@given(
    value=st.recursive(leaves(), containers, max_leaves=8),
    part=st.sampled_from(["a", "b", "a.b", "b.a", "a.a", "c"]),
)
def test_drawn_values_keep_what_a_part_leads_to(value: Any, part: str) -> None:
    before = [(path, id(tensor)) for path, tensor in by_path(value)]
    found = put_back(cast_floats(value, torch.float16), value, part)
    assert type(found) is type(value)
    assert [(path, id(tensor)) for path, tensor in by_path(value)] == before
    pairs = [*zip(by_path(value), by_path(found), strict=True)]
    for (path, was), (same, tensor) in pairs:
        assert path == same
        if leads_to(part, path):
            assert tensor is was
        else:
            assert tensor.dtype is (torch.float16 if was.dtype is torch.float32 else was.dtype)
    assert has_part(value, part) or not any(leads_to(part, path) for (path, _), _ in pairs)


def test_a_frozen_dataclass_keeps_a_field() -> None:
    value = Frozen(X, BOXES[0]["boxes"])
    found = put_back(cast_floats(value, torch.float16), value, "b")
    assert found.a.dtype is torch.float16
    assert found.b is value.b
    assert value.a is X


@pytest.mark.parametrize(
    ("part", "there"),
    [("a", True), ("a.b", True), ("b", False), ("a.c", False), ("shape", False), ("", True)],
)
def test_what_is_there(part: str, there: bool) -> None:
    assert has_part([{"a": Point(None, X)}, X], part) is there
