"""A kept cast is right while its parameter is the tensor that it was cast from."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from amp_patch.casting import cached_casts
from amp_patch.casting.cached_casts import Bulk, Entry, Group, Owner


def entry_of(module: nn.Linear, name: str, group: Group) -> Entry:
    param = module._parameters[name]
    assert param is not None
    return Entry(param, param.detach().half(), group)


def kept(module: nn.Linear) -> Bulk:
    """Return the casts of a layer's weight and bias, which nobody else holds."""
    group = Group(module)
    names = ("weight", "bias")
    owners = [Owner(weakref.ref(module), name, group) for name in names]
    return Bulk([entry_of(module, name, group) for name in names], owners)


def to_other_values(module: nn.Linear) -> None:
    with torch.no_grad():
        module.weight.fill_(2.0)


def to_other_memory(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.clone()


def to_another_shape(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.view(-1)[:6].view(3, 2)


def to_another_parameter(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach())


def to_frozen(module: nn.Linear) -> None:
    module.weight.requires_grad_(False)


CHANGES: dict[Callable[[nn.Linear], None], tuple[bool, bool]] = {
    # whether the entry stands, and whether the bulk is usable
    to_other_values: (True, True),
    to_other_memory: (False, False),
    to_another_shape: (False, False),
    to_another_parameter: (True, False),  # the entry's own parameter is as it was
    to_frozen: (False, True),  # asked of each entry when its cast is handed out
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_change_of_the_parameter_means(change: Callable[[nn.Linear], None]) -> None:
    module = nn.Linear(4, 3)
    entry, bulk = entry_of(module, "weight", Group(module)), kept(module)
    assert entry.stands()
    assert bulk.usable()
    change(module)
    assert (entry.stands(), bulk.usable()) == CHANGES[change]


def test_a_refresh_copies_what_the_parameters_hold_now() -> None:
    module = nn.Linear(4, 3)
    bulk = kept(module)
    to_other_values(module)
    assert bulk.entries[0].version != module.weight._version
    bulk.refresh()
    for entry, param in zip(bulk.entries, module.parameters(), strict=True):
        assert entry.cast.dtype is torch.float16
        assert torch.equal(entry.cast, param.detach().half())
        assert entry.version == param._version
    module.bias.data.fill_(3.0)  # moves no version: who refreshes need not know
    bulk.refresh()
    assert bulk.entries[1].cast.tolist() == [3.0] * 3


@pytest.mark.parametrize("hold", [lambda cast: cast, Tensor.view_as, lambda cast: cast[0]])
def test_a_cast_that_somebody_holds_is_not_written_over(hold: Callable[..., Tensor]) -> None:
    bulk = kept(nn.Linear(4, 3))
    cast = bulk.entries[0].cast
    held = hold(cast, cast) if hold is Tensor.view_as else hold(cast)
    del cast
    assert not bulk.usable()
    del held


def test_an_owner_tells_what_stands_at_its_place_and_keeps_no_module() -> None:
    module = nn.Linear(4, 3)
    owner = Owner(weakref.ref(module), "weight", Group(module))
    old = module.weight
    assert owner.owns(old)
    assert owner.slot() == (module._parameters, "weight")
    to_another_parameter(module)
    assert not owner.owns(old)
    assert owner.param_id() == id(module.weight)
    del module
    gc.collect()
    assert owner.slot() == ({}, "weight")
    assert not owner.owns(old)


@pytest.mark.parametrize(("device", "elements"), [("cpu", 1 << 14), ("meta", 1 << 18)])
def test_from_how_many_elements_on_a_cast_gives_its_memory_back(device: str, elements: int) -> None:
    """Beside a GPU, for which "meta" stands, the host has no time for smaller ones."""
    assert cached_casts.is_large(torch.empty(elements, device=device))
    assert not cached_casts.is_large(torch.empty(elements - 1, device=device))
