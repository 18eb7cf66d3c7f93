"""Buffers that are stored in half: their exact float32 numbers come back, unless they changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from amp_patch.session import session

HALF_OF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
MEAN = torch.tensor([0.485, 0.456, 0.406])


class Net(nn.Module):
    """Constants in fractions, of which one is not saved, a mask, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("mean", MEAN.clone())
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(8) / 8), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x - self.mean))


def made(amp: ModuleType, level: str) -> tuple[Net, dict[str, Tensor]]:
    """Return a model at a level, and the very buffers that it had before."""
    model = Net()
    before = dict(model.named_buffers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.mean.dtype is model.inv_freq.dtype is HALF_OF[level]
    return model, before


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", HALF_OF)
def test_deactivate_gives_constants_back(amp: ModuleType, level: str) -> None:
    model, before = made(amp, level)
    model.eval()(torch.ones(2, 3))
    amp.deactivate()
    assert_same(dict(model.named_buffers()), before)
    assert model.mean.data_ptr() == before["mean"].data_ptr()


@pytest.mark.parametrize("level", HALF_OF)
def test_a_copy_and_a_state_have_exact_constants(amp: ModuleType, level: str) -> None:
    model, before = made(amp, level)
    twin = copy.deepcopy(model)
    state = model.state_dict()
    assert_same(dict(twin.named_buffers()), before)
    assert_same({name: state[name] for name in ("mean", "mask")}, before)
    twin.mean.zero_()
    twin.inv_freq.zero_()
    amp.deactivate()
    assert_same(dict(model.named_buffers()), before)
    plain = Net()
    plain.load_state_dict(state)
    assert torch.equal(plain.mean, MEAN)


@pytest.mark.parametrize("came_in", [torch.float32, torch.float16])
@pytest.mark.parametrize("level", HALF_OF)
def test_a_buffer_that_two_modules_share_stays_one(
    amp: ModuleType, level: str, came_in: torch.dtype
) -> None:
    model = nn.Sequential(Net(), Net())
    model[0].mean = model[1].mean = MEAN.to(came_in)
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model[0].mean is model[1].mean
    assert model[0].mean.dtype is HALF_OF[level]
    model[0].mean.fill_(2.0)
    amp.deactivate()
    assert model[0].mean is model[1].mean
    assert model[1].mean.dtype is came_in
    assert model[1].mean.tolist() == [2.0] * 3


WRITES: dict[str, Callable[[Net, Tensor], None]] = {
    "copy_": lambda model, value: model.mean.copy_(value),
    "data.copy_": lambda model, value: model.mean.data.copy_(value),
    "data =": lambda model, value: setattr(model.mean, "data", value),
    "numpy": lambda model, value: (
        model.mean.view(torch.int16).numpy().__setitem__(..., value.view(torch.int16).numpy())
    ),
    "a new tensor": lambda model, value: setattr(model, "mean", value),
}


@pytest.mark.parametrize("level", HALF_OF)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("seen_by", ["deactivate", "a copy", "a state"])
def test_what_was_written_is_given_back(
    amp: ModuleType, level: str, write: str, seen_by: str
) -> None:
    model, before = made(amp, level)
    value = torch.tensor([0.3, 0.2, 0.1]).to(HALF_OF[level])
    WRITES[write](model, value.clone())
    if seen_by == "a state":
        found = model.state_dict()["mean"]
    elif seen_by == "a copy":
        found = copy.deepcopy(model).mean
    else:
        amp.deactivate()
        found = model.mean
    assert found.dtype is torch.float32
    assert torch.equal(found, value.float())
    amp.deactivate()
    assert torch.equal(model.mean, value.float())
    assert torch.equal(before["mean"], MEAN)


@pytest.mark.parametrize("level", HALF_OF)
def test_what_stands_in_its_place_with_the_same_bits_is_not_it(amp: ModuleType, level: str) -> None:
    model, _ = made(amp, level)
    model.mean = rounded = model.mean.clone()
    assert torch.equal(model.state_dict()["mean"], rounded.float())
    amp.deactivate()
    assert torch.equal(model.mean, rounded.float())


@pytest.mark.parametrize("level", HALF_OF)
def test_the_elements_that_nobody_wrote_to_are_exact(amp: ModuleType, level: str) -> None:
    model, _ = made(amp, level)
    model.mean[1] = 0.3
    written = torch.tensor(0.3).to(HALF_OF[level]).item()
    expected = torch.stack([MEAN[0], torch.tensor(written), MEAN[2]])
    assert torch.equal(model.state_dict()["mean"], expected)
    assert torch.equal(copy.deepcopy(model).mean, expected)
    amp.deactivate()
    assert torch.equal(model.mean, expected)


@pytest.mark.parametrize("level", HALF_OF)
def test_what_was_loaded_is_kept_exactly(amp: ModuleType, level: str) -> None:
    model, before = made(amp, level)
    loaded = {**copy.deepcopy(model.state_dict()), "mean": MEAN / 3, "mask": torch.rand(4, 4)}
    given = copy.deepcopy(loaded)
    model.load_state_dict(loaded)
    for value in loaded.values():
        value.zero_()
    assert torch.equal(model.mask, given["mask"].to(HALF_OF[level]))
    assert_same(copy.deepcopy(model).state_dict(), given)
    assert_same(model.state_dict(), given)
    amp.deactivate()
    assert_same(model.state_dict(), given)
    assert torch.equal(before["mean"], MEAN)


def test_a_copy_in_half_is_its_owners(amp: ModuleType) -> None:
    model, _ = made(amp, "O2")
    twin = copy.deepcopy(model).half()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.state_dict()["mean"], MEAN.half().float())
    amp.deactivate()
    assert twin.mean.dtype is torch.float16


def test_what_half_precision_holds_costs_no_memory(amp: ModuleType) -> None:
    model, _ = made(amp, "O2")
    held = {name for name, one in model.named_buffers() if session.values.holds(one)}
    assert held == {"mean", "inv_freq"}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_sparse_buffer_comes_back_as_it_was_rounded(
    amp: ModuleType, layout: torch.layout
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(2).div(3).to_sparse(layout=layout))
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert model.state_dict()["graph"].dtype is torch.float32
    amp.deactivate()
    expected = torch.eye(2).div(3).bfloat16().float()
    assert torch.equal(model.graph.to_dense(), expected)


def test_a_model_without_data_is_stored_in_half(amp: ModuleType) -> None:
    with torch.device("meta"):
        model = Net()
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model.mean.dtype is torch.float16
    model.to_empty(device="cpu")


@pytest.mark.parametrize("level", HALF_OF)
def test_what_outlives_its_model_is_float32_again(amp: ModuleType, level: str) -> None:
    part = Net()
    before = dict(part.named_buffers())
    amp.initialize(nn.Sequential(part), opt_level=level, verbosity=0)
    assert part.mean.dtype is HALF_OF[level]
    amp.deactivate()
    assert {param.dtype for param in part.parameters()} == {torch.float32}
    assert_same(dict(part.named_buffers()), before)


@pytest.mark.parametrize("level", HALF_OF)
def test_what_was_resized_has_its_half_numbers(amp: ModuleType, level: str) -> None:
    model, _ = made(amp, level)
    model.mean.resize_(5).fill_(1.1)
    for param in model.linear.parameters():
        param.data = torch.full((5, *param.shape[1:]), 1.1).to(param)
    halves = {"mean": model.mean, **dict(model.linear.named_parameters(prefix="linear"))}
    for found in (model.state_dict(), copy.deepcopy(model).state_dict()):
        for name, half in halves.items():
            assert torch.equal(found[name], half.float())
    model.load_state_dict({**model.state_dict(), "mean": torch.full((5,), 0.3)})
    amp.deactivate()
    assert torch.equal(model.mean, torch.full((5,), 0.3))
    assert model.linear.weight.dtype is torch.float32
    assert model.linear.weight.shape == (5, 3)
