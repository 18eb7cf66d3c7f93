"""Bytes of living tensors are counted exactly; the RAM of the process is what the system says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_patch.tools.sweep.memory import LivingTensors, peak_on_device, peak_rss
from amp_patch.weights.lazy_gradients import LazyGradients, Made


def peak_of(program) -> int:
    """Return the bytes above those that live before."""
    counted = LivingTensors()
    with counted:
        before = counted.peak
        program()
    return counted.peak - before


def test_tensors_that_live_together_add_up() -> None:
    def program() -> None:
        first, second = torch.empty(1000), torch.empty(500, dtype=torch.half)
        del first, second

    assert peak_of(program) == 4000 + 1000


def test_what_only_a_cycle_holds_does_not_live() -> None:
    with LivingTensors() as before:
        pass
    cycle = [torch.empty(100_000)]
    cycle.append(cycle)
    del cycle
    with LivingTensors() as after:
        pass
    assert after.peak == before.peak


def test_gradients_that_wait_are_not_made_to_be_counted() -> None:
    lazy = LazyGradients()
    param = lazy.parameter(torch.ones(1000), True)
    lazy.hold([param], Made([torch.ones(1000)]))
    with LivingTensors():
        pass
    assert lazy.are_waiting


def test_what_was_freed_makes_room() -> None:
    def program() -> None:
        for _ in range(10):
            torch.empty(1000)
        torch.empty(1500)

    assert peak_of(program) == 6000


def test_a_view_is_what_it_is_a_view_of_and_keeps_it() -> None:
    def program() -> None:
        view = torch.empty(1000)[10:]
        other = torch.empty(1000)
        del view, other

    assert peak_of(program) == 8000


def test_what_lives_before_is_counted_until_it_goes() -> None:
    held = [torch.empty(2000)]

    def program() -> None:
        held.clear()
        torch.empty(1500)

    assert peak_of(program) == 0


def test_saved_activations_and_gradients_are_counted() -> None:
    weight = torch.randn(100, 100, requires_grad=True)
    inputs = torch.randn(50, 100)
    numbers, weights = 50 * 100 * 4, 100 * 100 * 4
    # the exponential lives until the backward; then gradients of it and of the weight
    peak = peak_of(lambda: (inputs @ weight).exp().sum().backward())
    assert numbers + weights <= peak <= 4 * numbers + 2 * weights


def test_nothing_is_left_in_torch_when_the_body_raises() -> None:
    with pytest.raises(RuntimeError, match="size"), LivingTensors():
        torch.ones(2) + torch.ones(3)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_views_whose_base_was_written_to_are_in_nobody_s_way() -> None:
    base = torch.zeros(1000, dtype=torch.half)
    with torch.no_grad():
        view = base[:2]
    base.mul_(torch.ones(1, requires_grad=True))
    assert peak_of(lambda: torch.empty(1500)) == 6000
    assert view.shape == (2,)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_the_peak_of_the_process_is_not_below_what_it_has() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert pages * os.sysconf("SC_PAGE_SIZE") * 0.9 < peak_rss() < 2**40


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is used there")
def test_without_a_device_no_peak_of_one_is_known() -> None:
    assert peak_on_device() is None


@pytest.mark.gpu
def test_the_allocators_peak_is_taken_on_a_device() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    torch.empty(2**20, device="cuda")
    assert peak_on_device() >= before + 4 * 2**20


def test_what_torch_compile_traces_has_no_memory() -> None:
    """A failed compilation may leave such tensors alive, whose sizes are symbols."""
    with LivingTensors() as before:
        pass
    fake = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = fake.from_tensor(torch.ones(3, 4), static_shapes=False)
    with fake, FunctionalTensorMode():
        traced = FunctionalTensor.to_functional(symbolic)
        assert isinstance(traced.untyped_storage().nbytes(), torch.SymInt)
    with LivingTensors() as after:
        assert after.peak == before.peak
    del traced
