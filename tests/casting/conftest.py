"""Fixtures of the tests of casts: amp at O1, and modules of a user's."""

import logging
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
from casting_support import activate

from amp_patch.casting.mode import process
from amp_patch.casting.weight_cache import WeightCache


@pytest.fixture
def o1(amp):
    """Give amp with the casts of O1 on for the CPU."""
    model = activate(amp)
    yield amp
    del model


@pytest.fixture
def cache(device: torch.device) -> Iterator[WeightCache]:
    """A cache of its own; casts act on the device as they do after `amp.initialize`."""
    process.devices = frozenset({device.type})
    yield WeightCache()
    process.reset()


@pytest.fixture
def quiet(monkeypatch):
    """Silence torch about deprecated functions and about fake kernels that refuse half tensors."""
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def user_module(monkeypatch):
    """Give a user's module that has bound two functions of torch at its top."""
    module = types.ModuleType("a_users_module")
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    exec("from torch import matmul\nfrom torch.nn.functional import linear as fc", vars(module))
    return module


@pytest.fixture
def library(monkeypatch):
    """Give a user's library: functions that return the dtype they see, and a class with one."""
    module = types.ModuleType("a_users_library")
    source = """
def first(x): return x.dtype
def second(x, y): return (x.dtype, y.dtype)
class Layer:
    def run(self, x): return x.dtype
"""
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "a_users_library", module)
    yield module
    from amp_patch.session import session

    session._registered.clear()
