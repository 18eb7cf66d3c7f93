"""The CUDA text of update_scale, run on the CPU, against LossScaler, bit for bit."""

import ctypes
import struct

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Kernels
from drawn_scalers import scalers
from hypothesis import given
from hypothesis import strategies as st

from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

LAYOUT = "=ffii3q"  # scale, scale_before, skipped, reduced, three counts


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("update_scale.cu", pytestconfig)


class OnDevice:
    """A scaler in device memory."""

    def __init__(self, kernels: Kernels, scaler: LossScaler) -> None:
        counts = (scaler.unskipped, scaler.hysteresis_left, scaler.overflows_at_floor)
        packed = struct.pack(LAYOUT, scaler.scale, 0.0, 0, 0, *counts)
        self.kernels, self.rule = kernels, scaler.rule
        self.memory = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def update(self, found_inf: float) -> None:
        rule = self.rule
        self.kernels.launch(
            "update_scale",
            1,
            self.memory,
            torch.tensor([found_inf]),
            int(rule.dynamic),
            rule.growth_factor,
            rule.backoff_factor,
            rule.growth_interval,
            rule.hysteresis,
            rule.min_loss_scale,
            rule.max_loss_scale,
            threads=32,
        )

    def state(self) -> tuple[float | int, ...]:
        return struct.unpack(LAYOUT, self.memory.numpy().tobytes())


@given(scaler=scalers(), overflows=st.lists(st.booleans(), max_size=40))
def test_any_series_of_passes_moves_it_as_the_loss_scaler(
    kernels: Kernels, scaler: LossScaler, overflows: list[bool]
) -> None:
    device = OnDevice(kernels, scaler)
    for overflow in overflows:
        before = scaler.scale
        scaler.update(overflow)
        device.update(float(overflow))
        assert device.state() == (
            scaler.scale,
            before,
            scaler.skipped,
            scaler.reduced,
            scaler.unskipped,
            scaler.hysteresis_left,
            scaler.overflows_at_floor,
        )
        assert ctypes.c_float(scaler.scale).value == scaler.scale


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, 1e-45, torch.inf, torch.nan])
def test_any_flag_but_0_is_an_overflow(kernels: Kernels, found_inf: float) -> None:
    device = OnDevice(kernels, LossScaler(ScaleRule()))
    device.update(found_inf)
    assert device.state()[:4] == (2.0**15, 2.0**16, 1, 1)


def test_growth_beyond_float32_ends_at_the_cap(kernels: Kernels) -> None:
    rule = ScaleRule(
        growth_factor=2.0**126,
        growth_interval=1,
        init_scale=2.0**100,
        max_loss_scale=2.0**126,
    )
    device = OnDevice(kernels, LossScaler(rule))
    device.update(0.0)
    assert device.state()[0] == 2.0**126
