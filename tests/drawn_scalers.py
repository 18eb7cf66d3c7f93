"""Loss scalers with any rule and state, as hypothesis draws them."""

from hypothesis import strategies as st

from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

SCALES = st.floats(2.0**-30, 2.0**30, width=32)


@st.composite
def scalers(draw: st.DrawFn) -> LossScaler:
    """Draw a rule, and a scale that may have been loaded from beyond its floor or cap."""
    floor, cap = sorted((draw(SCALES), draw(SCALES)))
    scaler = LossScaler(
        ScaleRule(
            dynamic=draw(st.sampled_from([True, True, True, False])),
            growth_factor=draw(st.sampled_from([2.0, 4.0]) | st.floats(1.001, 1e6)),
            backoff_factor=draw(st.sampled_from([0.5, 0.25]) | st.floats(1e-6, 0.999)),
            growth_interval=draw(st.integers(1, 4)),
            hysteresis=draw(st.integers(1, 3)),
            min_loss_scale=floor,
            max_loss_scale=cap,
        )
    )
    scaler.scale = draw(st.sampled_from([floor, cap, floor / 4, cap * 4]) | SCALES)
    scaler.unskipped = draw(st.integers(0, 6))
    return scaler
