"""Moving a scale on the device: the reference and the CUDA text against LossScaler, bit for bit."""

from collections.abc import Callable, Iterator

import pytest
import torch
from cuda_on_cpu.launcher import EmulatedModules
from drawn_scalers import scalers
from hypothesis import given
from hypothesis import strategies as st

from amp_patch.kernels import cuda_kernels, cuda_module, scaler_state
from amp_patch.kernels.scaler_state import ScalerState
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

Update = Callable[[ScalerState, torch.Tensor, ScaleRule], None]


@pytest.fixture(
    scope="module",
    params=["torch", "cuda on cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def update(request: pytest.FixtureRequest) -> Iterator[tuple[Update, torch.device]]:
    if request.param == "torch":
        yield scaler_state.update, torch.device("cpu")
    elif request.param == "cuda":
        pytest.importorskip("cupy")
        yield cuda_kernels.update_scale, torch.device("cuda", 0)
    else:
        with pytest.MonkeyPatch.context() as patch:
            modules = EmulatedModules(request.config)
            patch.setattr(cuda_module, "modules", modules)
            yield cuda_kernels.update_scale, torch.device("cpu")
            assert set(modules.launched) == {"update_scale"}


def fields(state: ScalerState) -> dict[str, float | int]:
    names = ("scale", "scale_before", "skipped", "reduced")
    counts = ("unskipped", "hysteresis_left", "overflows_at_floor")
    return {name: getattr(state, name).item() for name in (*names, *counts)}


def fields_of(scaler: LossScaler, before: float) -> dict[str, float | int]:
    return {
        "scale": scaler.scale,
        "scale_before": before,
        "skipped": int(scaler.skipped),
        "reduced": int(scaler.reduced),
        "unskipped": scaler.unskipped,
        "hysteresis_left": scaler.hysteresis_left,
        "overflows_at_floor": scaler.overflows_at_floor,
    }


@given(scaler=scalers(), overflows=st.lists(st.booleans(), max_size=40))
def test_any_series_of_passes_moves_it_as_the_loss_scaler(
    update: tuple[Update, torch.device], scaler: LossScaler, overflows: list[bool]
) -> None:
    move, device = update
    state = ScalerState(scaler, device)
    for overflow in overflows:
        before = scaler.scale
        scaler.update(overflow)
        move(state, torch.tensor([float(overflow)], device=device), scaler.rule)
        assert fields(state) == fields_of(scaler, before)


@given(
    limits=st.lists(st.floats(0.1, 64.0), min_size=2, max_size=2).map(sorted),
    start=st.none() | st.floats(0.05, 128.0),
    saved=st.none() | st.floats(0.05, 128.0),
    backoff=st.floats(0.1, 0.9),
    overflows=st.lists(st.booleans(), max_size=20),
)
def test_numbers_that_float32_has_not_are_the_same_to_host_and_device(
    update: tuple[Update, torch.device],
    limits: list[float],
    start: float | None,
    saved: float | None,
    backoff: float,
    overflows: list[bool],
) -> None:
    move, device = update
    floor, cap = limits
    rule = ScaleRule.resolve(
        "dynamic" if start is None else start,
        min_loss_scale=floor, max_loss_scale=cap, growth_interval=1, backoff_factor=backoff,
    )  # fmt: skip
    scaler = LossScaler(rule)
    if saved is not None:
        scaler.load_state_dict({"loss_scale": saved, "unskipped": 0})
    state = ScalerState(scaler, device)
    for overflow in overflows:
        assert state.scale.item() == scaler.scale
        before = scaler.scale
        scaler.update(overflow)
        move(state, torch.tensor([float(overflow)], device=device), rule)
        assert fields(state) == fields_of(scaler, before)


def test_a_scale_at_a_floor_that_float32_has_not_is_there(
    update: tuple[Update, torch.device],
) -> None:
    """0.2 halved in float32 is above 0.1, and is 0.1 in float32."""
    move, device = update
    scaler = LossScaler(ScaleRule(init_scale=0.2, min_loss_scale=0.1))
    state = ScalerState(scaler, device)
    for _ in range(3):
        scaler.update(True)
        move(state, torch.ones(1, device=device), scaler.rule)
    assert scaler.overflows_at_floor == state.overflows_at_floor.item() == 2


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, 1e-45, torch.inf, torch.nan])
def test_any_flag_but_0_is_an_overflow(
    update: tuple[Update, torch.device], found_inf: float
) -> None:
    move, device = update
    state = ScalerState(LossScaler(ScaleRule()), device)
    move(state, torch.tensor(found_inf, device=device), ScaleRule())
    assert (state.scale.item(), state.skipped.item(), state.reduced.item()) == (2.0**15, 1, 1)


@pytest.mark.parametrize(("loaded", "overflow"), [(2.0**30, False), (2.0**-30, True)])
def test_a_scale_loaded_from_beyond_its_limits_stays(
    update: tuple[Update, torch.device], loaded: float, overflow: bool
) -> None:
    move, device = update
    scaler = LossScaler(ScaleRule(growth_interval=1))
    scaler.scale = loaded
    state = ScalerState(scaler, device)
    move(state, torch.tensor([float(overflow)], device=device), scaler.rule)
    assert state.scale.item() == loaded
    scaler.update(overflow)
    assert fields(state) == fields_of(scaler, loaded)


@given(scalers(), scalers(), st.lists(st.booleans(), max_size=5))
def test_a_scaler_written_and_read_is_the_same(
    scaler: LossScaler, other: LossScaler, overflows: list[bool]
) -> None:
    for overflow in overflows:
        scaler.update(overflow)
    state = ScalerState(other, torch.device("cpu"))
    state.write(scaler)
    assert fields(state) == fields_of(scaler, scaler.scale)
    assert ScalerState.read(state.buffer, other) == scaler.scale
    assert fields_of(other, 0.0) == fields_of(scaler, 0.0)


def test_the_views_share_the_buffer() -> None:
    state = ScalerState(LossScaler(ScaleRule()), torch.device("cpu"))
    assert state.buffer.shape == (40,)
    begin = state.buffer.data_ptr()
    names = ("scale", "scale_before", "skipped", "reduced")
    counts = ("unskipped", "hysteresis_left", "overflows_at_floor")
    offsets = [getattr(state, name).data_ptr() - begin for name in (*names, *counts)]
    assert offsets == [0, 4, 8, 12, 16, 24, 32]
    assert all(getattr(state, name).shape == (1,) for name in (*names, *counts))
